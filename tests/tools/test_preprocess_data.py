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

from megatron.data.description import Description
from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer import GPT2BPETokenizer
from tests.data.samples import write_tokenizer
from tests.tools.corpus.lines import content, manifest, write_jsonl
from tools import preprocess_data
from tools.corpus import split
from tools.corpus.shards import cut
from tools.tokenise import LARGEST_UNIT, SMALLEST_UNIT, deal, unit_bytes

ROOT = Path(__file__).parents[2]
TEXTS = [f"the thing number {i} in the inn. " * (1 + i % 9) for i in range(200)]
TOKENIZER = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]
BESIDE = {f"_text_document.tokenizer/{name}" for name in ("vocab.json", "merges.txt")}


def start(folder: Path, *words: str, **environ: str) -> subprocess.Popen[str]:
    """Run the command in the folder, which gets a tokenizer."""
    write_tokenizer(folder)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], **environ},
        start_new_session=True,
    )


def preprocess(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    process = start(folder, *words, **environ)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def tokenise(folder: Path, *words: str) -> str:
    """What a run that succeeds says; of one worker, if not told otherwise."""
    done = preprocess(folder, "--workers", "1", *words, *TOKENIZER)
    assert done.returncode == 0, done.stderr
    return done.stderr


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(str(prefix))
    ranges = [data.token_range(range(i, i + 1)) for i in range(len(data.documents) - 1)]
    return [data.tokens[each.start : each.stop].tolist() for each in ranges]


def encoded(folder: Path, texts: list[str]) -> list[list[int]]:
    return GPT2BPETokenizer(*write_tokenizer(folder), "tokenizers").encode_batch(texts)


def outputs(folder: Path, prefix: str) -> dict[str, bytes]:
    """{what follows the prefix: content} of every file, those in folders too."""
    return {
        str(file.relative_to(folder)).removeprefix(prefix): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.relative_to(folder).parts[0].startswith(f"{prefix}_")
    }


def test_documents_in_order_with_end_marks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:100]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[100:150])))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(lines(TEXTS[150:])))
    files = ["--input", "a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "--json-key", "text"]
    said = tokenise(tmp_path, *files, "--output-prefix", "p", "--append-eod")
    assert "p_text_document: 200 documents" in said
    assert "no line set aside" in said
    assert "warning" not in said
    assert "p_text_document.work" not in said  # which goes at the end
    assert "encoder: gigatoken" in said
    expected = [[*ids, 260] for ids in encoded(tmp_path, TEXTS)]
    assert read(tmp_path / "p_text_document") == expected
    found = outputs(tmp_path, "p")
    assert set(found) == {f"_text_document{s}" for s in (".bin", ".idx", ".json")} | BESIDE
    for name in ("vocab.json", "merges.txt"):
        assert found[f"_text_document.tokenizer/{name}"] == (tmp_path / name).read_bytes()
    checked = preprocess(tmp_path, "verify", "p_text_document")
    assert checked.returncode == 0, checked.stderr
    assert "sound, as its .json says; 200 documents" in checked.stdout


def test_documents_that_run_into_each_other_are_said_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    said = tokenise(tmp_path, "--input", "a.jsonl", "--output-prefix", "p")
    assert said.count("warning: without --append-eod documents run into each other") == 1


def test_help_mentions_the_second_command(tmp_path: Path) -> None:
    told = preprocess(tmp_path, "--help").stdout.replace("│", " ")
    assert "`verify P_text_document`" in " ".join(told.split())


def test_the_encoder_can_be_forced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    found = []
    for encoder in ("tokenizers", "gigatoken"):
        words = ["--input", "a.jsonl", "--output-prefix", encoder, "--encoder", encoder]
        assert f"encoder: {encoder}" in tokenise(tmp_path, *words)
        found.append(outputs(tmp_path, encoder))
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [[], ["--shard-size", "150KB"]])
def test_the_same_bytes_for_any_number_of_workers(tmp_path: Path, size: list[str]) -> None:
    """Lines for several units, some of them bad, of files of several kinds."""
    texts = lines(TEXTS * 40).splitlines(keepends=True)
    texts[5::100] = [b"bad\n"] * len(texts[5::100])
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"".join(texts[:6000]))
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(texts[6000:])))
    found = []
    for workers in ("1", "3"):
        words = ["--input", "in", "--output-prefix", f"w{workers}", "--workers", workers]
        tokenise(tmp_path, *words, *size)
        found.append(outputs(tmp_path, f"w{workers}"))
    assert len(found[0]) > 14 if size else len(found[0]) == 6
    assert found[0] == found[1]
    good = [orjson.loads(line)["text"] for line in texts if line != b"bad\n"]
    assert read(tmp_path / "w1_text_document") == encoded(tmp_path, good)


def test_shards_hold_what_one_shard_holds(tmp_path: Path) -> None:
    texts = [f"{number} {text}" for number, text in enumerate(TEXTS * 5)]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    tokenise(tmp_path, "--input", "a.jsonl", "--output-prefix", "one")
    said = tokenise(
        tmp_path, "--input", "a.jsonl", "--output-prefix", "many", "--shard-size", "40KB"
    )
    assert f"{len(texts)} documents" in said
    one, many = tmp_path / "one_text_document", tmp_path / "many_text_document"
    listed = Description.read(str(many))
    assert listed is not None
    assert len(listed.shards) == 5
    assert f"in {len(listed.shards)} shards" in said
    assert read(many) == read(one)
    pairs = [Path(f"{many}{shard.name}.bin").read_bytes() for shard in listed.shards]
    assert b"".join(pairs) == Path(f"{one}.bin").read_bytes()
    assert preprocess(tmp_path, "verify", many.name).returncode == 0
    said = tokenise(tmp_path, "--input", "a.jsonl", "--output-prefix", "many")
    assert len(outputs(tmp_path, "many")) == 5, "the shards of the run before are gone"


BAD = [
    (b"{not json", "not JSON"),
    (b'{"title": "a"}', 'no "text" string'),
    (b'{"text": 5}', 'no "text" string'),
    (b'["text"]', 'no "text" string'),
    (b'{"text": ""}', 'empty "text"'),
    (b'{"text": " "}', 'empty "text"'),
    (b'{"text": "\xff"}', "not JSON"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b"[" * 100_000, "nested deeper"),
]


def test_bad_lines_are_set_aside_and_the_run_goes_on(tmp_path: Path) -> None:
    texts = ["first", "nul \x00 and \r alone", "last"]
    middle = [line for line, _ in BAD]
    content = [json.dumps({"text": texts[0]}).encode(), b"", *middle]
    content += [json.dumps({"text": text}).encode() for text in texts[1:]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(content))
    said = tokenise(tmp_path, "--input", "a.jsonl", "--output-prefix", "p")
    assert read(tmp_path / "p_text_document") == encoded(tmp_path, texts)
    rejected = (tmp_path / "p_text_document.rejected.jsonl").read_text().splitlines()
    whole = (tmp_path / "a.jsonl").read_bytes()
    for line, (bad, reason) in zip(map(json.loads, rejected), BAD, strict=True):
        assert line["file"] == "a.jsonl"
        assert line["reason"].startswith(reason)
        assert whole[line["offset"] :].startswith(bad + b"\n")
    assert "3 documents" in said
    assert '9 lines set aside in p_text_document.rejected.jsonl (3 no "text" string, 2' in said


def test_a_gzip_file_cut_in_the_middle_costs_its_end_only(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS))[:-200])
    (tmp_path / "b.jsonl").write_bytes(lines(["last"]))
    said = tokenise(tmp_path, "--input", "a.jsonl.gz", "b.jsonl", "--output-prefix", "p")
    found = read(tmp_path / "p_text_document")
    assert 10 < len(found) < len(TEXTS)
    assert found == encoded(tmp_path, [*TEXTS[: len(found) - 1], "last"])
    assert "1 lines set aside in p_text_document.rejected.jsonl (1 damaged or cut short" in said
    bad = json.loads((tmp_path / "p_text_document.rejected.jsonl").read_text())
    assert bad["file"] == "a.jsonl.gz"
    assert lines(TEXTS)[: bad["offset"]] == lines(TEXTS[: len(found) - 1])


def test_an_earlier_output_is_replaced_or_left_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "two"]) + b"bad\n")
    (tmp_path / "b.jsonl").write_bytes(lines(["three"]))
    (tmp_path / "c.jsonl").write_bytes(b"bad\n")
    tokenise(tmp_path, "--input", "a.jsonl", "--output-prefix", "p")
    before = outputs(tmp_path, "p")
    broken = preprocess(tmp_path, "--input", "c.jsonl", "--output-prefix", "p", *TOKENIZER)
    assert broken.returncode == 2
    assert "error: --input c.jsonl holds no document; 1 lines set aside" in broken.stderr
    assert outputs(tmp_path, "p") == before
    tokenise(tmp_path, "--input", "b.jsonl", "--output-prefix", "p")
    after = outputs(tmp_path, "p")
    assert before.keys() - after.keys() == {"_text_document.rejected.jsonl"}
    assert read(tmp_path / "p_text_document") == encoded(tmp_path, ["three"])


def test_an_earlier_output_that_is_replaced_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "two"]))
    (tmp_path / "b.jsonl").write_bytes(lines(["three"]))
    words = ["--output-prefix", "p", "--append-eod", "--input"]
    assert "replaced" not in tokenise(tmp_path, *words, "a.jsonl")
    assert "replaced" not in tokenise(tmp_path, *words, "a.jsonl"), "the same again"
    tokens = sum(map(len, read(tmp_path / "p_text_document")))
    said = tokenise(tmp_path, *words, "b.jsonl").splitlines()
    assert said[-2] == f"replaced p_text_document, which held 2 documents and {tokens} tokens"
    (tmp_path / "p_text_document.json").write_text("{}")
    assert tokenise(tmp_path, *words, "a.jsonl").splitlines()[-2] == "replaced p_text_document"


def test_a_folder_is_filled_as_by_a_step_and_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS) + b"bad\n")
    words = ["--input", "a.jsonl", "--output", "out", "--append-eod"]
    tokenise(tmp_path, *words)
    assert set(content(tmp_path / "out")) == {
        "manifest.json", "rejected.jsonl",
        "text_document.bin", "text_document.idx", "text_document.json",
        "text_document.tokenizer/vocab.json", "text_document.tokenizer/merges.txt",
    }  # fmt: skip
    facts = manifest(tmp_path / "out")
    assert (facts["step"], facts["output"]["documents"]) == ("tokenise", len(TEXTS))
    assert facts["dropped"]["bad line"]["documents"] == 1
    assert facts["tokens"] == sum(map(len, read(tmp_path / "out" / "text_document")))
    stamps = [file.stat().st_mtime_ns for file in sorted((tmp_path / "out").iterdir())]
    assert "nothing is left to do" in tokenise(tmp_path, *words)
    assert [file.stat().st_mtime_ns for file in sorted((tmp_path / "out").iterdir())] == stamps
    other = preprocess(tmp_path, *words, *TOKENIZER, "--no-append-eod")
    assert other.returncode == 2
    assert "--overwrite" in other.stderr
    (tmp_path / "out" / "text_document.tokenizer" / "mine.txt").touch()
    refused = preprocess(tmp_path, *words, *TOKENIZER, "--no-append-eod", "--overwrite")
    assert "mine.txt in it is no step's, and is never removed" in refused.stderr
    (tmp_path / "out" / "text_document.tokenizer" / "mine.txt").unlink()
    tokenise(tmp_path, *words, "--no-append-eod", "--overwrite")
    assert len(content(tmp_path / "out")) == 7


def test_job_arrays_fill_the_folder_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS * 20))
    words = ["--input", "a.jsonl", "--shard-size", "100KB", "--workers", "1"]
    tokenise(tmp_path, *words, "--output-prefix", "alone")
    for _ in range(2):  # encoding, joining
        for share in ("0/2", "1/2"):
            assert "--shard" in tokenise(
                tmp_path, *words, "--output-prefix", "array", "--shard", share
            )
    assert not list(tmp_path.glob("array_*.json"))
    tokenise(tmp_path, *words, "--output-prefix", "array")
    assert outputs(tmp_path, "array") == outputs(tmp_path, "alone")


def test_two_runs_with_one_prefix(tmp_path: Path) -> None:
    """While one is at work, its folder is locked; the other is refused by name."""
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    folder = tmp_path / "p_text_document.work"
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    words = ["--input", "a.jsonl", "--output-prefix", "p", *TOKENIZER]
    done = preprocess(tmp_path, *words)
    os.close(lock)
    assert done.returncode == 2
    assert "p_text_document.work: another run is filling it" in done.stderr
    assert not (tmp_path / "p_text_document.bin").exists()


def kill_at_random(folder: Path, words: list[str], seconds: float) -> bool:
    """Start the command and kill it and its workers; whether it had not ended by then."""
    process = start(folder, *words)
    time.sleep(seconds)
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return alive


def test_killed_anywhere_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    """With the slow encoder, for there to be time to kill it in."""
    content = lines([f"{number} {text}" for number, text in enumerate(TEXTS * 30)]) + b"bad\n"
    (tmp_path / "a.jsonl").write_bytes(content)
    words = ["--input", "a.jsonl", "--shard-size", "500KB", "--workers", "2", "--encoder",
             "tokenizers", *TOKENIZER, "--output-prefix"]  # fmt: skip
    began = time.monotonic()
    assert preprocess(tmp_path, *words, "whole").returncode == 0
    took = time.monotonic() - began
    expected = outputs(tmp_path, "whole")
    assert len(expected) == 2 + 2 * 3 + 2
    killed = sum(kill_at_random(tmp_path, [*words, "p"], took * k / 6) for k in range(2, 6))
    assert killed
    assert preprocess(tmp_path, *words, "p").returncode == 0
    assert outputs(tmp_path, "p") == expected


def test_what_was_done_before_a_kill_is_not_done_again(tmp_path: Path) -> None:
    """The books of a unit come from its marker."""
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS * 20))
    words = ["--input", "a.jsonl", "--output", "out", "--workers", "1"]
    tokenise(tmp_path, *words, "--shard", "0/1")
    markers = sorted((tmp_path / "out" / ".work" / "encode-00000").glob("*.done.json"))
    assert len(markers) > 1
    for marker in markers:
        outcome = json.loads(marker.read_bytes())
        outcome["result"]["funnel"]["output"]["sources"]["unnamed"]["bytes"] = 77
        marker.write_text(json.dumps(outcome))
    tokenise(tmp_path, *words)
    assert manifest(tmp_path / "out")["output"]["bytes"] == 77 * len(markers)
    assert read(tmp_path / "out" / "text_document") == encoded(tmp_path, TEXTS * 20)


def test_cut_off_while_it_is_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all is done in the work folder, the same command takes out what is left there."""
    texts = TEXTS * 5
    (tmp_path / "a.jsonl").write_bytes(lines(texts) + b"bad\n")
    words = ["--input", "a.jsonl", "--shard-size", "40KB", "--workers", "1", "--output-prefix"]
    tokenise(tmp_path, *words, "whole")
    tokenise(tmp_path, "--input", "a.jsonl", "--output-prefix", "p")
    vocab, merges = (str(tmp_path / name) for name in ("vocab.json", "merges.txt"))
    monkeypatch.chdir(tmp_path)
    argv = [*words, "p", "--vocab-file", vocab, "--merge-file", merges]
    move = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if str(target).endswith("p_text_document_00002.bin"):
            raise KeyboardInterrupt
        return move(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(SystemExit, match="130"):
            preprocess_data.main(argv)
    assert not (tmp_path / "p_text_document.idx").exists()
    preprocess_data.main(argv)
    assert outputs(tmp_path, "p") == outputs(tmp_path, "whole")
    assert not (tmp_path / "p_text_document.work").exists()


def test_whether_documents_were_shuffled_is_noted(tmp_path: Path) -> None:
    records = [{"text": text, "id": str(number)} for number, text in enumerate(TEXTS)]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    split.run(split.Settings(input=(source,), output=tmp_path / "split", workers=1, ratio="3:1"))
    shard = next((tmp_path / "split" / "train").glob("*.jsonl"))
    for prefix, given, expected in [
        ("a", ["split/train"], True),
        ("b", ["split/train", "split/valid"], True),
        ("c", [str(shard.relative_to(tmp_path))], True),
        ("d", ["in.jsonl"], None),
        ("e", ["split/train", "in.jsonl"], None),
    ]:
        tokenise(tmp_path, "--input", *given, "--output-prefix", prefix)
        described = Description.read(str(tmp_path / f"{prefix}_text_document"))
        assert described is not None
        assert described.shuffled is expected


def test_units_and_shards_are_cut_by_the_input_alone(tmp_path: Path) -> None:
    assert unit_bytes(10**3, 10**9) == SMALLEST_UNIT
    assert unit_bytes(10**12, 10**9) == LARGEST_UNIT
    assert unit_bytes(10**7, 10**5) == 10**5
    for name, size in (("a", 700), ("b", 0), ("c", 300)):
        (tmp_path / name).write_bytes(bytes(size))
    units = cut([tmp_path / name for name in "abc"], 100)
    shards = deal(units, 400)
    assert [unit for shard in shards for unit in shard] == units
    assert [sum(unit.stop - unit.start for unit in shard) for shard in shards] == [400, 300, 300]
    assert len(deal(units, 1000)) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "nowhere.jsonl"], "--input nowhere.jsonl: no such file"),
        (["--input", "empty.jsonl"], "--input empty.jsonl is empty"),
        (["--input", "good.jsonl", "--workers", "0"], "--workers 0 should be above 0"),
        (["--input", "good.jsonl", "--vocab-file", "no.json"], "--vocab-file no.json: no such"),
        (["--input", "good.jsonl", "--tokenizer-type", "T5"], "--tokenizer-type T5 is unknown"),
        (["--input", "good.jsonl", "--max-unknown", "5"], "--max-unknown 5.0 should be in [0, 1]"),
        (["--input", "good.jsonl", "--encoder", "fast"], "--encoder fast is unknown; known: auto"),
        (["--input", "good.jsonl", "--shard-size", "x"], "--shard-size x: a size such as 500KB"),
        (["--input", "good.jsonl", "--output", "o"], "--output-prefix P, for files P_text"),
        (["verify"], "verify takes one prefix"),
        (["verify", "nowhere"], "error: nowhere.idx is not there"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "good.jsonl").write_bytes(lines(["one"]))
    (tmp_path / "empty.jsonl").touch()
    settings = [] if words[0] == "verify" else ["--output-prefix", "p", *TOKENIZER, *words]
    done = preprocess(tmp_path, *(settings or words))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert not [name for name in outputs_names(tmp_path) if name.startswith("p_")]


def outputs_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_an_empty_shard_among_others_is_said_and_passed_over(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": "one"}])
    (tmp_path / "in" / "b.jsonl").touch()
    said = tokenise(tmp_path, "--input", "in", "--output-prefix", "p")
    assert "warning: --input in/b.jsonl is empty" in said
    assert read(tmp_path / "p_text_document") == encoded(tmp_path, ["one"])


def test_real_text(tmp_path: Path, test_data: Path) -> None:
    """A thousand web pages with GPT-2's own vocabulary, there and back."""
    source = test_data / "neardup" / "c4_sample.jsonl.gz"
    files = [str(test_data / "gpt2" / name) for name in ("vocab.json", "merges.txt")]
    words = ["--input", str(source), "--output-prefix", "p", "--append-eod", "--workers", "2"]
    done = preprocess(tmp_path, *words, "--vocab-file", files[0], "--merge-file", files[1])
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["text"] for line in gzip.decompress(source.read_bytes()).splitlines()]
    tokenizer = GPT2BPETokenizer(files[0], files[1], "tokenizers")
    found = read(tmp_path / "p_text_document")
    assert {document[-1] for document in found} == {50_256}
    assert [tokenizer.decode(document[:-1]) for document in found] == texts
    sizes = np.diff([0, *np.cumsum([len(each) for each in found])])
    assert sizes.min() > 1
    assert preprocess(tmp_path, "verify", "p_text_document").returncode == 0
