"""From JSON lines to .bin, .idx and .json, through the command."""

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orjson
import pytest
from backports import zstd

from megatron.data.indexed import Description, IndexedDataset
from megatron.data.tokenizer import GPT2BPETokenizer
from tests.data.samples import write_tokenizer
from tests.tools.corpus.lines import content, manifest, write_jsonl
from tools import preprocess_data
from tools.corpus import split
from tools.corpus.shards import cut
from tools.data_files import verify
from tools.tokenise import LARGEST_UNIT, SMALLEST_UNIT, group_units, unit_bytes

PROGRAM = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
TEXTS = [f"the thing number {i} in the inn. " * (1 + i % 9) for i in range(200)]
TOKENIZER = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]
BESIDE = {f"_text_document.tokenizer/{name}" for name in ("vocab.json", "merges.txt")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given, with a tokenizer and some text."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    return tmp_path


def tokenise(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a run that succeeds says; of one worker, if not told otherwise."""
    capsys.readouterr()
    preprocess_data.main(["--workers", "1", *words, *TOKENIZER])
    return capsys.readouterr().err


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, tuple[str, ...]]:
    """(what a refused run says, the arguments that work in place of the bad one)."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2") as stop:
        preprocess_data.main(list(words))
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("error: ")
    return said, getattr(stop.value.__cause__, "works", ())


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read(prefix: str) -> list[list[int]]:
    data = IndexedDataset(prefix)
    ranges = [data.token_range(range(i, i + 1)) for i in range(data.num_documents)]
    return [data.read(each.start, each.stop).tolist() for each in ranges]


def encoded(texts: list[str]) -> list[list[int]]:
    return GPT2BPETokenizer("vocab.json", "merges.txt").encode_batch(texts)


def outputs(folder: Path, prefix: str) -> dict[str, bytes]:
    """{what follows the prefix: content} of every file, those in folders too."""
    return {
        str(file.relative_to(folder)).removeprefix(prefix): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.relative_to(folder).parts[0].startswith(f"{prefix}_")
    }


def test_documents_in_order_with_end_marks(folder: Path) -> None:
    """As a program, and checked by its second command."""
    (folder / "a.jsonl").write_bytes(lines(TEXTS[:100]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[100:150])))
    (folder / "c.jsonl.zst").write_bytes(zstd.compress(lines(TEXTS[150:])))
    words = ["--input", "a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "--json-key", "text",
             "--output-prefix", "p", "--append-eod", "--workers", "1", *TOKENIZER]  # fmt: skip
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    assert "p_text_document: 200 documents" in done.stderr
    assert "warning" not in done.stderr
    assert "encoder: gigatoken" in done.stderr
    assert read("p_text_document") == [[*ids, 260] for ids in encoded(TEXTS)]
    found = outputs(folder, "p")
    assert set(found) == {f"_text_document{s}" for s in (".bin", ".idx", ".json")} | BESIDE
    for name in ("vocab.json", "merges.txt"):
        assert found[f"_text_document.tokenizer/{name}"] == (folder / name).read_bytes()
    check = [*command, "verify", "p_text_document"]
    done = subprocess.run(check, capture_output=True, text=True, check=True)
    assert "sound, as its .json says; 200 documents" in done.stdout


def test_text_files_are_documents_beside_lines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = folder / "mixed"
    mixed.mkdir()
    (mixed / "a.txt").write_text(TEXTS[0] + "\n\n" + TEXTS[1])
    (mixed / "b.jsonl").write_text(json.dumps({"body": TEXTS[2]}) + "\n")
    (mixed / "c.txt.gz").write_bytes(gzip.compress(TEXTS[3].encode()))
    (mixed / "page.md").write_text("not read")
    (mixed / "d.txt").write_bytes(b"\xff\xfe")
    words = ["--input", "mixed", "--json-key", "body", "--output-prefix", "p", "--append-eod"]
    said = tokenise(capsys, *words)
    assert [line for line in said.splitlines() if line.startswith("warning") and "page.md" in line]
    expected = encoded([TEXTS[0] + "\n\n" + TEXTS[1], TEXTS[2], TEXTS[3]])
    assert read("p_body_document") == [[*ids, 260] for ids in expected]
    (bad,) = map(json.loads, (folder / "p_body_document.rejected.jsonl").read_text().splitlines())
    assert bad["file"].endswith("d.txt")


def test_the_encoder_can_be_forced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for encoder in ("tokenizers", "gigatoken"):
        words = ["--input", "a.jsonl", "--output-prefix", encoder, "--encoder", encoder]
        assert f"encoder: {encoder}" in tokenise(capsys, *words)
        found.append(outputs(folder, encoder))
    assert found[0] == found[1]


def test_the_same_bytes_for_any_number_of_workers_and_shards(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines for several units, some of them bad, of files of several kinds."""
    texts = lines([f"{number} {text}" for number, text in enumerate(TEXTS * 20)])
    each = texts.splitlines(keepends=True)
    each[5::100] = [b"bad\n"] * len(each[5::100])
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_bytes(b"".join(each[:3000]))
    (folder / "in" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(each[3000:])))
    good = encoded([orjson.loads(line)["text"] for line in each if line != b"bad\n"])
    pairs = []
    for size in ([], ["--shard-size", "75KB"]):
        found = []
        for workers in ("1", "3"):
            prefix = f"w{workers}{len(size)}"
            words = ["--input", "in", "--output-prefix", prefix, "--workers", workers, *size]
            tokenise(capsys, *words)
            found.append(outputs(folder, prefix))
        assert found[0] == found[1]
        assert read(f"{prefix}_text_document") == good
        pairs.append(sorted(name for name in found[0] if name.endswith(".bin")))
    assert (len(pairs[0]), len(pairs[1]) > 4) == (1, True)
    verify("w12_text_document")
    whole = b"".join((folder / f"w12{name}").read_bytes() for name in pairs[1])
    assert whole == (folder / "w10_text_document.bin").read_bytes()


BAD = [
    (b"{not json", "not JSON"),
    (b'{"title": "a"}', 'no "text" string'),
    (b'{"text": ""}', 'empty "text"'),
    (b'["text"]', 'no "text" string'),
]


def test_bad_lines_are_set_aside_and_the_run_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["first", "nul \x00 and \r alone", "last"]
    content = [json.dumps({"text": texts[0]}).encode(), b"", *(line for line, _ in BAD)]
    content += [json.dumps({"text": text}).encode() for text in texts[1:]]
    (folder / "a.jsonl").write_bytes(b"\n".join(content))
    said = tokenise(capsys, "--input", "a.jsonl", "--output-prefix", "p")
    assert read("p_text_document") == encoded(texts)
    rejected = (folder / "p_text_document.rejected.jsonl").read_text().splitlines()
    whole = (folder / "a.jsonl").read_bytes()
    for line, (bad, reason) in zip(map(json.loads, rejected), BAD, strict=True):
        assert line["file"] == "a.jsonl"
        assert line["reason"].startswith(reason)
        assert whole[line["offset"] :].startswith(bad + b"\n")
    assert '4 lines set aside in p_text_document.rejected.jsonl (2 no "text" string, 1' in said


def test_a_gzip_file_cut_in_the_middle_costs_its_end_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS))[:-200])
    (folder / "b.jsonl").write_bytes(lines(["last"]))
    tokenise(capsys, "--input", "a.jsonl.gz", "b.jsonl", "--output-prefix", "p")
    found = read("p_text_document")
    assert 10 < len(found) < len(TEXTS)
    assert found == encoded([*TEXTS[: len(found) - 1], "last"])
    bad = json.loads((folder / "p_text_document.rejected.jsonl").read_text())
    assert bad["file"] == "a.jsonl.gz"
    assert lines(TEXTS)[: bad["offset"]] == lines(TEXTS[: len(found) - 1])


def test_a_wrong_json_key_is_named_once_with_the_keys_that_are_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"content": text, "id": str(number)} for number, text in enumerate(TEXTS * 10)]
    write_jsonl(folder / "b.jsonl", records)
    words = ["--input", "b.jsonl", "--output-prefix", "p", "--append-eod"]
    said, works = refusal(capsys, *words, *TOKENIZER, "--json-key", "body")
    assert works == ("--json-key", "content")
    assert said.count("body") == 1
    assert "2000 lines" in said
    assert "content, id" in said
    assert not outputs(folder, "p")
    assert "warning" not in tokenise(capsys, *words, *works)
    write_jsonl(folder / "b.jsonl", [*records, {"body": "the inn"}])
    said = tokenise(capsys, *words, "--json-key", "body")
    (warning,) = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert "--json-key body: 2000 lines" in warning
    assert read("p_body_document") == [[*encoded(["the inn"])[0], 260]]


def test_an_earlier_output_is_kept_or_with_overwrite_replaced_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.jsonl").write_bytes(lines(["one", "two"] * 2000) + b"bad\n")
    (folder / "b.jsonl").write_bytes(lines(["three"]))
    (folder / "c.jsonl").write_bytes(b"bad\n")
    words = ["--output-prefix", "p", "--append-eod", "--input"]
    tokenise(capsys, *words, "a.jsonl", "--shard-size", "20KB")
    before = outputs(folder, "p")
    assert len(before) > 8
    said, works = refusal(capsys, *words, "b.jsonl", *TOKENIZER)
    assert "--output-prefix p: " in said
    assert "4000 documents" in said
    said, _ = refusal(capsys, *words, "c.jsonl", *TOKENIZER, "--overwrite")
    assert "--input c.jsonl holds no document" in said
    assert outputs(folder, "p") == before
    assert "replaced p_text_document, of 4000 documents" in tokenise(
        capsys, *works, "--append-eod", "--input", "b.jsonl"
    )
    assert set(outputs(folder, "p")) == {
        "_text_document" + s for s in (".bin", ".idx", ".json")
    } | (BESIDE)
    (folder / "p_text_document.json").write_text("{}")
    assert "replaced" in tokenise(capsys, *words, "b.jsonl", "--overwrite")
    assert read("p_text_document") == [[*encoded(["three"])[0], 260]]


def test_a_folder_is_filled_as_by_a_step_and_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.jsonl").write_bytes(lines(TEXTS) + b"bad\n")
    words = ["--input", "a.jsonl", "--output", "out", "--append-eod"]
    tokenise(capsys, *words)
    assert set(content(folder / "out")) == {
        "manifest.json", "rejected.jsonl",
        "text_document.bin", "text_document.idx", "text_document.json",
        "text_document.tokenizer/vocab.json", "text_document.tokenizer/merges.txt",
    }  # fmt: skip
    facts = manifest(folder / "out")
    assert (facts["step"], facts["output"]["documents"]) == ("tokenise", len(TEXTS))
    assert facts["dropped"]["bad line"]["documents"] == 1
    assert facts["tokens"] == sum(map(len, read("out/text_document")))
    stamps = [file.stat().st_mtime_ns for file in sorted((folder / "out").iterdir())]
    assert "nothing is left to do" in tokenise(capsys, *words)
    assert [file.stat().st_mtime_ns for file in sorted((folder / "out").iterdir())] == stamps
    other = [*words, *TOKENIZER, "--no-append-eod"]
    assert "--overwrite" in refusal(capsys, *other)[0]
    (folder / "out" / "text_document.tokenizer" / "mine.txt").touch()
    assert "mine.txt" in refusal(capsys, *other, "--overwrite")[0]
    (folder / "out" / "text_document.tokenizer" / "mine.txt").unlink()
    tokenise(capsys, *words, "--no-append-eod", "--overwrite")
    assert len(content(folder / "out")) == 7


def test_job_arrays_fill_the_folder_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.jsonl").write_bytes(lines(TEXTS * 20))
    words = ["--input", "a.jsonl", "--shard-size", "100KB"]
    tokenise(capsys, *words, "--output-prefix", "alone")
    for _ in range(2):  # encoding, joining
        for share in ("0/2", "1/2"):
            said = tokenise(capsys, *words, "--output-prefix", "array", "--shard", share)
            assert "--shard" in said
    assert not list(folder.glob("array_*.json"))
    tokenise(capsys, *words, "--output-prefix", "array")
    assert outputs(folder, "array") == outputs(folder, "alone")


def test_two_runs_with_one_prefix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While one is at work, its folder is locked; the other is refused by name."""
    (folder / "p_text_document.work").mkdir()
    lock = os.open(folder / "p_text_document.work", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    said, _ = refusal(capsys, "--input", "a.jsonl", "--output-prefix", "p", *TOKENIZER)
    os.close(lock)
    assert "p_text_document.work" in said
    assert not (folder / "p_text_document.bin").exists()


def kill_after(folder: Path, words: list[str], tasks: int) -> bool:
    """Start the command and kill it and its workers as soon as so many tasks have left their
    markers; whether it had not ended by then."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *words], stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None:
        if len(list(folder.glob("p_*.work/.work/*/*.done.json"))) >= tasks:
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    return process.wait() == -signal.SIGKILL


def test_killed_anywhere_the_same_command_gives_the_same_bytes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the slow encoder, for there to be time to kill it in."""
    content = lines([f"{number} {text}" for number, text in enumerate(TEXTS * 30)]) + b"bad\n"
    (folder / "a.jsonl").write_bytes(content)
    words = ["--input", "a.jsonl", "--shard-size", "500KB", "--encoder", "tokenizers",
             *TOKENIZER, "--overwrite", "--output-prefix"]  # fmt: skip
    preprocess_data.main([*words, "whole", "--workers", "1"])
    expected = outputs(folder, "whole")
    assert len(expected) == 2 + 2 * 3 + 2
    assert sum(kill_after(folder, [*words, "p", "--workers", "2"], n) for n in (0, 1, 3, 5))
    preprocess_data.main([*words, "p", "--workers", "1"])
    assert outputs(folder, "p") == expected


def test_what_was_done_before_a_kill_is_not_done_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The books of a unit come from its marker."""
    (folder / "a.jsonl").write_bytes(lines(TEXTS * 20))
    words = ["--input", "a.jsonl", "--output", "out"]
    tokenise(capsys, *words, "--shard", "0/1")
    markers = sorted((folder / "out" / ".work" / "encode-00000").glob("*.done.json"))
    assert len(markers) > 1
    for marker in markers:
        outcome = json.loads(marker.read_bytes())
        outcome["result"]["funnel"]["output"]["sources"]["unnamed"]["bytes"] = 77
        marker.write_text(json.dumps(outcome))
    tokenise(capsys, *words)
    assert manifest(folder / "out")["output"]["bytes"] == 77 * len(markers)
    assert read("out/text_document") == encoded(TEXTS * 20)


def test_cut_off_while_it_is_put_in_place(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all is done in the work folder, the same command takes out what is left there."""
    (folder / "a.jsonl").write_bytes(lines(TEXTS * 5) + b"bad\n")
    words = ["--input", "a.jsonl", "--shard-size", "40KB", "--output-prefix"]
    tokenise(capsys, *words, "whole")
    tokenise(capsys, "--input", "a.jsonl", "--output-prefix", "p")
    move = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if str(target).endswith(cut_off[-1]):
            raise KeyboardInterrupt
        return move(self, target)

    cut_off = []
    for name in ("p_text_document_00002.bin", "p_text_document_00003.idx"):
        cut_off.append(name)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fail)
            with pytest.raises(SystemExit, match="130"):
                preprocess_data.main([*words, "p", "--workers", "1", *TOKENIZER, "--overwrite"])
        with pytest.raises((FileNotFoundError, ValueError)):
            IndexedDataset("p_text_document")
    tokenise(capsys, *words, "p")
    assert outputs(folder, "p") == outputs(folder, "whole")
    assert not (folder / "p_text_document.work").exists()


def test_whether_documents_were_shuffled_is_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"text": text, "id": str(number)} for number, text in enumerate(TEXTS)]
    source = write_jsonl(folder / "in.jsonl", records)
    split.run(split.Settings(input=(source,), output=folder / "split", workers=1, ratio="3:1"))
    shard = next((folder / "split" / "train").glob("*.jsonl"))
    for prefix, given, expected in [
        ("a", ["split/train"], True),
        ("b", ["split/train", "split/valid"], True),
        ("c", [str(shard.relative_to(folder))], True),
        ("d", ["in.jsonl"], None),
        ("e", ["split/train", "in.jsonl"], None),
    ]:
        tokenise(capsys, "--input", *given, "--output-prefix", prefix)
        described = Description.read(f"{prefix}_text_document")
        assert described is not None
        assert described.shuffled is expected


def test_units_and_shards_are_cut_by_the_input_alone(tmp_path: Path) -> None:
    assert unit_bytes(10**3, 10**9) == SMALLEST_UNIT
    assert unit_bytes(10**12, 10**9) == LARGEST_UNIT
    assert unit_bytes(10**7, 10**5) == 10**5
    for name, size in (("a", 700), ("b", 0), ("c", 300)):
        (tmp_path / name).write_bytes(bytes(size))
    units = cut([tmp_path / name for name in "abc"], 100)
    shards = group_units(units, 400)
    assert [unit for shard in shards for unit in shard] == units
    assert [sum(unit.stop - unit.start for unit in shard) for shard in shards] == [400, 300, 300]
    assert len(group_units(units, 1000)) == 1


@pytest.mark.parametrize(
    ("flag", "bad", "works"),
    [
        ("--input", ["nowhere.jsonl"], ["a.jsonl"]),
        ("--input", ["empty.jsonl"], ["a.jsonl"]),
        ("--workers", ["0"], ["1"]),
        ("--vocab-file", ["no.json"], ["vocab.json"]),
        ("--tokenizer-type", ["T5"], ["GPT2BPETokenizer"]),
        ("--max-unknown", ["5"], ["0.05"]),
        ("--encoder", ["fast"], ["auto"]),
        ("--shard-size", ["x"], ["500KB"]),
        ("--output", ["o"], None),
        ("--split-sentences", [], None),
    ],
)
def test_bad_input_is_one_message(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    bad: list[str],
    works: list[str] | None,
) -> None:
    (folder / "empty.jsonl").touch()
    words = ["--input", "a.jsonl", "empty.jsonl", "--output-prefix", "p", *TOKENIZER]
    words += ["--workers", "1"]
    said, _ = refusal(capsys, *words, flag, *bad)
    assert flag in said.splitlines()[-1]
    assert not list(folder.glob("p_*"))
    preprocess_data.main([*words, flag, *works] if works else words)
    assert verify("p_text_document").documents == 200


@pytest.mark.parametrize("words", [["verify"], ["verify", "nowhere"]])
def test_verify_takes_one_data_set(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    refusal(capsys, *words)


def test_real_text(folder: Path, test_data: Path) -> None:
    """A thousand web pages with GPT-2's own vocabulary, there and back."""
    source = test_data / "neardup" / "c4_sample.jsonl.gz"
    files = [str(test_data / "gpt2" / name) for name in ("vocab.json", "merges.txt")]
    words = ["--input", str(source), "--output-prefix", "p", "--append-eod", "--workers", "2"]
    preprocess_data.main([*words, "--vocab-file", files[0], "--merge-file", files[1]])
    texts = [json.loads(line)["text"] for line in gzip.decompress(source.read_bytes()).splitlines()]
    tokenizer = GPT2BPETokenizer(files[0], files[1])
    found = read("p_text_document")
    assert {document[-1] for document in found} == {50_256}
    assert [tokenizer.decode(document[:-1]) for document in found] == texts
    assert min(map(len, found)) > 1
    assert np.max(verify("p_text_document").highest_id) == 50_256
