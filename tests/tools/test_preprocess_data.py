"""From JSON lines to .bin, .idx and .json, through the command."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer import GPT2BPETokenizer
from tests.data.samples import write_tokenizer

TEXTS = [f"the thing number {i} in the inn. " * (1 + i % 9) for i in range(200)]


def preprocess(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in the folder, which gets a tokenizer."""
    write_tokenizer(folder)
    program = str(Path(__file__).parents[2] / "tools" / "preprocess_data.py")
    return subprocess.run(
        [sys.executable, program, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )


TOKENIZER = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(str(prefix))
    ranges = [data.token_range(range(i, i + 1)) for i in range(len(data.documents) - 1)]
    return [data.tokens[each.start : each.stop].tolist() for each in ranges]


def outputs(folder: Path, prefix: str) -> dict[str, bytes]:
    return {
        file.name.removeprefix(prefix): file.read_bytes() for file in folder.glob(f"{prefix}_*")
    }


def test_documents_in_order_with_end_marks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:150]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[150:])))
    files = ["--input", "a.jsonl", "b.jsonl.gz", "--json-key", "text"]
    done = preprocess(tmp_path, *files, "--output-prefix", "p", *TOKENIZER, "--append-eod")
    assert done.returncode == 0, done.stderr
    assert "p_text_document: 200 documents" in done.stderr
    assert "no line set aside" in done.stderr
    tokenizer = GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    expected = [[*ids, tokenizer.eod] for ids in tokenizer.encode_batch(TEXTS)]
    assert read(tmp_path / "p_text_document") == expected
    assert set(outputs(tmp_path, "p")) == {f"_text_document{s}" for s in (".bin", ".idx", ".json")}
    checked = preprocess(tmp_path, "verify", "p_text_document")
    assert checked.returncode == 0, checked.stderr
    assert "sound, as its .json says; 200 documents" in checked.stdout


def test_the_same_bytes_for_any_number_of_workers(tmp_path: Path) -> None:
    """Enough lines for several batches, some of them bad."""
    texts = lines(TEXTS * 20).splitlines(keepends=True)
    texts[5::100] = [b"bad\n"] * len(texts[5::100])
    (tmp_path / "a.jsonl").write_bytes(b"".join(texts))
    found = []
    for workers in ("1", "3"):
        words = ["--input", "a.jsonl", "--output-prefix", f"w{workers}", "--workers", workers]
        done = preprocess(tmp_path, *words, *TOKENIZER)
        assert done.returncode == 0, done.stderr
        found.append(outputs(tmp_path, f"w{workers}"))
    assert len(found[0]) == 4
    assert found[0] == found[1]


BAD = {
    2: (b"{not json", "not JSON"),
    3: (b'{"title": "a"}', "no string under the key text"),
    4: (b'{"text": 5}', "no string under the key text"),
    5: (b'["text"]', "no string under the key text"),
    6: (b"", "blank line"),
    7: (b'{"text": ""}', "empty text"),
    8: (b'{"text": "\xff"}', "not JSON"),
    9: (b'{"text": "\\ud800"}', "half of a surrogate pair in the text"),
    10: (b"[" * 100_000, "not JSON"),
}


def test_bad_lines_are_set_aside_and_the_run_goes_on(tmp_path: Path) -> None:
    content = [lines(["first"]).rstrip(), *(line for line, _ in BAD.values()), b'{"text": "last"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(content))
    done = preprocess(tmp_path, "--input", "a.jsonl", "--output-prefix", "p", *TOKENIZER)
    assert done.returncode == 0, done.stderr
    tokenizer = GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert read(tmp_path / "p_text_document") == tokenizer.encode_batch(["first", "last"])
    rejected = (tmp_path / "p_text_document.rejected.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in rejected] == [
        {"file": "a.jsonl", "line": number, "reason": reason} for number, (_, reason) in BAD.items()
    ]
    assert "2 documents" in done.stderr
    assert "9 lines set aside in p_text_document.rejected.jsonl (3 not JSON, 3 no" in done.stderr


def test_an_earlier_output_is_replaced_or_left_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "two"]) + b"bad\n")
    (tmp_path / "b.jsonl").write_bytes(lines(["three"]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS))[:-30])
    assert (
        preprocess(tmp_path, "--input", "a.jsonl", "--output-prefix", "p", *TOKENIZER).returncode
        == 0
    )
    before = outputs(tmp_path, "p")
    broken = preprocess(tmp_path, "--input", "c.jsonl.gz", "--output-prefix", "p", *TOKENIZER)
    assert broken.returncode == 2
    assert "error: --input c.jsonl.gz is no whole gzip file" in broken.stderr
    assert outputs(tmp_path, "p") == before
    assert (
        preprocess(tmp_path, "--input", "b.jsonl", "--output-prefix", "p", *TOKENIZER).returncode
        == 0
    )
    after = outputs(tmp_path, "p")
    assert before.keys() - after.keys() == {"_text_document.rejected.jsonl"}
    assert len(read(tmp_path / "p_text_document")) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "nowhere.jsonl"], "--input nowhere.jsonl: no such file"),
        (["--input", "good.jsonl", "empty.jsonl"], "--input empty.jsonl is empty"),
        (["--input", "bad.jsonl"], "--input bad.jsonl holds no document; 1 lines set aside in"),
        (["--input", "good.jsonl", "--workers", "0"], "--workers 0 should be above 0"),
        (["--input", "good.jsonl", "--vocab-file", "no.json"], "--vocab-file no.json: no such"),
        (["--input", "good.jsonl", "--tokenizer-type", "T5"], "--tokenizer-type T5 is unknown"),
        (["verify"], "verify takes one prefix"),
        (["verify", "nowhere"], "error: nowhere.idx is not there"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "good.jsonl").write_bytes(lines(["one"]))
    (tmp_path / "bad.jsonl").write_bytes(b"{}\n")
    (tmp_path / "empty.jsonl").touch()
    settings = [] if words[0] == "verify" else ["--output-prefix", "p", *TOKENIZER, *words]
    done = preprocess(tmp_path, *(settings or words))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert set(outputs(tmp_path, "p")) <= {"_text_document.rejected.jsonl"}


def test_real_text(tmp_path: Path, test_data: Path) -> None:
    """A thousand web pages with GPT-2's own vocabulary, there and back."""
    source = test_data / "neardup" / "c4_sample.jsonl.gz"
    files = [str(test_data / "gpt2" / name) for name in ("vocab.json", "merges.txt")]
    words = ["--input", str(source), "--output-prefix", "p", "--append-eod", "--workers", "2"]
    done = preprocess(tmp_path, *words, "--vocab-file", files[0], "--merge-file", files[1])
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["text"] for line in gzip.decompress(source.read_bytes()).splitlines()]
    tokenizer = GPT2BPETokenizer(*files)
    found = read(tmp_path / "p_text_document")
    assert {document[-1] for document in found} == {50_256}
    assert [tokenizer.decode(document[:-1]) for document in found] == texts
    assert preprocess(tmp_path, "verify", "p_text_document").returncode == 0
