"""From JSON lines to .bin, .idx and .json, through the command.

Kills, bad lines, shards and shares, as in every step of a corpus, are tested in
tests/tools/corpus/test_faults.py.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from backports import zstd

from megatron.data.indexed import Description, IndexedDataset
from megatron.data.tokenizer import GPT2BPETokenizer
from megatron.errors import UsageError
from tests.data.samples import write_tokenizer
from tests.refusals import field_of, refusal, refused
from tests.tools.corpus.lines import content, manifest, write_jsonl
from tools.corpus import split
from tools.corpus.tokenize import step as preprocess_data
from tools.corpus.tokenize.writer import verify

PROGRAM = Path(__file__).parents[4] / "tools" / "preprocess_data.py"
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
    """Stderr of a run that succeeds; of one worker, if not told otherwise."""
    capsys.readouterr()
    preprocess_data.main(["--workers", "1", *words, *TOKENIZER])
    return capsys.readouterr().err


def refused_with(*words: str) -> str:
    return str(refusal(lambda: preprocess_data.main(list(words))))


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
             "--output-prefix", "p", "--workers", "1", *TOKENIZER]  # fmt: skip
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    assert "warning" not in done.stderr
    assert "gigatoken" in done.stderr
    assert read("p_text_document") == [[*ids, 260] for ids in encoded(TEXTS)]
    found = outputs(folder, "p")
    assert set(found) == {f"_text_document{s}" for s in (".bin", ".idx", ".json")} | BESIDE
    for name in ("vocab.json", "merges.txt"):
        assert found[f"_text_document.tokenizer/{name}"] == (folder / name).read_bytes()
    check = [*command, "verify", "p_text_document"]
    done = subprocess.run(check, capture_output=True, text=True, check=True)
    assert "200 documents" in done.stdout


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


def test_units_are_put_together_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By several workers: units of one shard, and of several; with bad lines between."""
    texts = [f"{number} {text}" for number, text in enumerate(TEXTS * 20)]
    each = lines(texts).splitlines(keepends=True)
    each[5::100] = [b"bad\n"] * len(each[5::100])
    (folder / "a.jsonl").write_bytes(b"".join(each[:3000]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(each[3000:])))
    good = encoded([json.loads(line)["text"] for line in each if line != b"bad\n"])
    for prefix, more in (("one", []), ("cut", ["--shard-size", "75KB"])):
        words = ["--input", "a.jsonl", "b.jsonl.gz", "--output-prefix", prefix, *more]
        tokenise(capsys, *words, "--workers", "3", "--no-append-eod")
        assert read(f"{prefix}_text_document") == good
        verify(f"{prefix}_text_document")
    assert len(list(folder.glob("cut_*.bin"))) > 4


def test_a_wrong_json_key_is_named_with_the_keys_that_are_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"content": text, "id": str(number)} for number, text in enumerate(TEXTS * 10)]
    write_jsonl(folder / "b.jsonl", records)
    words = ["--input", "b.jsonl", "--output-prefix", "p", "--append-eod", *TOKENIZER]
    wrong = [*words, "--workers", "1", "--json-key", "body"]
    error = refusal(lambda: preprocess_data.main(wrong))
    assert isinstance(error, UsageError)
    assert (error.flag, error.works) == ("--json-key", ("--json-key", "content"))
    assert "2000" in str(error)
    assert not outputs(folder, "p")
    assert "warning" not in tokenise(capsys, *words, *error.works)
    write_jsonl(folder / "b.jsonl", [*records, {"body": "the inn"}])
    said = tokenise(capsys, *words, "--json-key", "body")
    (warning,) = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert "--json-key body: 2000 " in warning
    assert read("p_body_document") == [[*encoded(["the inn"])[0], 260]]


def test_an_earlier_output_is_kept_or_with_overwrite_replaced_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.jsonl").write_bytes(lines(["one", "two"] * 2000) + b"bad\n")
    (folder / "b.jsonl").write_bytes(lines(["three"]))
    (folder / "c.jsonl").write_bytes(b"bad\n")
    words = ["--output-prefix", "p", "--append-eod", "--workers", "1", *TOKENIZER, "--input"]
    tokenise(capsys, *words, "a.jsonl", "--shard-size", "20KB")
    before = outputs(folder, "p")
    assert len(before) > 8
    assert field_of(refused_with(*words, "c.jsonl", "--overwrite")) == "--input"
    assert outputs(folder, "p") == before
    assert refused(preprocess_data.main, [*words, "b.jsonl"]) == "--output-prefix"
    for _ in range(2):  # also where its sidecar says nothing
        tokenise(capsys, *words, "b.jsonl", "--overwrite")
        files = {f"_text_document{suffix}" for suffix in (".bin", ".idx", ".json")}
        assert set(outputs(folder, "p")) == files | BESIDE
        assert read("p_text_document") == [[*encoded(["three"])[0], 260]]
        (folder / "p_text_document.json").write_text("{}")


def test_a_folder_is_filled_as_by_a_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.jsonl").write_bytes(lines(TEXTS) + b"bad\n")
    words = ["--input", "a.jsonl", "--output", "out", "--append-eod"]
    tokenise(capsys, *words)
    data_set = {f"text_document.{ending}" for ending in ("bin", "idx", "json")}
    data_set |= {f"text_document.tokenizer/{name}" for name in ("vocab.json", "merges.txt")}
    assert set(content(folder / "out")) == data_set | {"manifest.json", "rejected.jsonl"}
    facts = manifest(folder / "out")
    assert (facts["step"], facts["output"]["documents"]) == ("tokenise", len(TEXTS))
    assert facts["dropped"]["bad line"]["documents"] == 1
    assert facts["tokens"] == sum(map(len, read("out/text_document")))
    refused_with(*words, *TOKENIZER, "--no-append-eod")
    tokenise(capsys, *words, "--no-append-eod", "--overwrite")
    assert set(content(folder / "out")) == data_set | {"manifest.json", "rejected.jsonl"}


def test_a_move_that_failed_is_finished_by_the_same_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is done in the work folder by then."""
    words = ["--input", "a.jsonl", "--shard-size", "4KB", "--workers", "1", *TOKENIZER]
    tokenise(capsys, *words, "--output-prefix", "whole")
    in_the_way = folder / "p_text_document_00002.bin"
    in_the_way.mkdir()
    assert in_the_way.name in refused_with(*words, "--output-prefix", "p")
    in_the_way.rmdir()
    tokenise(capsys, *words, "--output-prefix", "p")
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


@pytest.mark.parametrize(
    "words",
    [
        "--input nowhere.jsonl",
        "--input empty.jsonl",
        "--workers 0",
        "--vocab-file no.json",
        "--tokenizer-type T5",
        "--max-unknown 5",
        "--encoder fast",
        "--shard-size x",
        "--output o",
        "--split-sentences",
    ],
)
def test_bad_input_is_refused_by_its_flag(folder: Path, words: str) -> None:
    (folder / "empty.jsonl").touch()
    given = ["--input", "a.jsonl", "empty.jsonl", "--output-prefix", "p", *TOKENIZER]
    given += ["--workers", "1", *words.split()]
    assert words.split()[0] in refused_with(*given)
    assert not list(folder.glob("p_*"))
    refused(preprocess_data.main, given, whole=False)


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
