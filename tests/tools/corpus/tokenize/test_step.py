"""From JSON lines and text files to .bin, .idx and .json: of documents, and of sentences.

Kills, bad lines, shards and shares, as in every step of a corpus: tests/tools/corpus/test_faults.py
"""

import gzip
import json
import string
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from backports import zstd

from megatron.data.files import tokenizer_folder
from megatron.data.indexed import Description, IndexedDataset
from megatron.data.tokenizer import GPT2BPETokenizer, build_tokenizer, read_tokenizer
from megatron.errors import UsageError
from tests.data.samples import write_tokenizer, write_tokenizer_json, write_wordpiece
from tests.refusals import by_last_flag, refusal, refused
from tests.tools.corpus.lines import content, manifest, write_jsonl
from tools.corpus import files, split
from tools.corpus.tokenize import step
from tools.corpus.tokenize.encode import SAMPLE_UNITS, sample_texts, split_sentences
from tools.corpus.tokenize.settings import Settings
from tools.corpus.tokenize.writer import verify

PROGRAM = Path(__file__).parents[4] / "tools" / "preprocess_data.py"
TEXTS = [f"the thing number {i} in the inn. " * (1 + i % 9) for i in range(200)]
TALK = [
    f"The thing number {i} is in the inn. " * (1 + i % 5) + f"Is it?\nMr. {i} thinks so."
    for i in range(120)
]
LOWER = [text.lower() for text in TALK]
LOWER_CASE = "BertWordPieceLowerCase"
BPE = "--vocab-file vocab.json --merge-file merges.txt"
BERT = f"--split-sentences --tokenizer-type {LOWER_CASE} --vocab-file vocab.txt"
JSON = "--tokenizer-type HuggingFaceTokenizer --vocab-file json"
UNKNOWN = "\u6f22"  # a letter that the WordPiece lacks
FILES = {f"_text_document{suffix}" for suffix in (".bin", ".idx", ".json")}
TOKENIZER = {f"_text_document.tokenizer/{name}" for name in ("vocab.json", "merges.txt")}
Tokenise = Callable[[str], str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands are given, with a BPE, a WordPiece, and a.jsonl with TALK."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    write_wordpiece(tmp_path, "thing", "number", "is", "it", "so", "mr")
    write_lines("a.jsonl", TALK)
    return tmp_path


@pytest.fixture
def tokenise(folder: Path, capsys: pytest.CaptureFixture[str]) -> Tokenise:
    """Runs the program on a.jsonl with one worker, unless told otherwise; returns its stderr."""

    def run(words: str) -> str:
        capsys.readouterr()
        step.main(given(words))
        return capsys.readouterr().err

    return run


def given(words: str) -> list[str]:
    output = [] if "--output" in words else ["--output-prefix", "p"]
    return ["--workers", "1", "--input", "a.jsonl", *output, *words.split()]


def refused_with(words: str) -> str:
    return str(refusal(lambda: step.main(given(words))))


def write_lines(name: str, texts: list[str], more: bytes = b"") -> None:
    Path(name).write_bytes(lines(texts) + more)


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read(prefix: str) -> list[list[list[int]]]:
    """The sequences of each document."""
    data = IndexedDataset(prefix)
    found = []
    for document in range(data.num_documents):
        bounds = data.first_token(document) + np.cumsum([0, *data.sequence_sizes(document)])
        found.append([data.read(*each).tolist() for each in pairwise(bounds.tolist())])
    return found


def documents(texts: list[str], *end: int) -> list[list[list[int]]]:
    tokenizer = GPT2BPETokenizer("vocab.json", "merges.txt")
    return [[[*ids, *end]] for ids in tokenizer.encode_batch(texts)]


def sentences(texts: list[str]) -> list[list[list[int]]]:
    tokenizer = build_tokenizer(LOWER_CASE, "vocab.txt", None)
    return [tokenizer.encode_batch(split_sentences(text)) for text in texts]


def described(prefix: str) -> Description:
    found = Description.read(prefix)
    assert found is not None
    return found


def outputs(prefix: str) -> dict[str, bytes]:
    """{what follows the prefix: content} of every file, those in folders too."""
    every = content(Path()).items()
    return {name.removeprefix(prefix): x for name, x in every if name.startswith(f"{prefix}_")}


def test_a_sample_is_of_the_whole_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([f"{number:04}" for number in range(1000)]))
    units = files.cut([tmp_path / "a.jsonl"], 40)
    assert len(units) > 3 * SAMPLE_UNITS
    found = sorted(map(int, sample_texts(units, "text")))
    assert (found[0] < 50, found[-1] > 950) == (True, True)


def test_documents_in_order_with_end_marks(tokenise: Tokenise) -> None:
    """As a program, on several units of one shard."""
    texts = [f"{number} {text}" for number, text in enumerate(TEXTS * 20)]
    write_lines("a.jsonl", texts[:3000])
    Path("b.jsonl.gz").write_bytes(gzip.compress(lines(texts[3000:3500])))
    Path("c.jsonl.zst").write_bytes(zstd.compress(lines(texts[3500:])))
    words = f"{BPE} --input a.jsonl b.jsonl.gz c.jsonl.zst"
    program = [sys.executable, str(PROGRAM), *given(words)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "warning" not in done.stderr
    assert "gigatoken" in done.stderr
    expected = documents(texts, 260)
    assert read("p_text_document") == expected
    assert outputs("p").keys() == FILES | TOKENIZER
    for name in TOKENIZER:
        assert Path(f"p{name}").read_bytes() == Path(Path(name).name).read_bytes()
    assert verify("p_text_document").documents == 4000
    tokenise(f"{words} --output-prefix cut --shard-size 75KB")
    assert read("cut_text_document") == expected
    assert len(list(Path().glob("cut_*.bin"))) > 4


def test_text_files_are_documents_beside_lines(tokenise: Tokenise) -> None:
    Path("mixed/deeper").mkdir(parents=True)
    Path("mixed/a.txt").write_text(TEXTS[0] + "\n\n" + TEXTS[1])
    Path("mixed/b.jsonl").write_text(json.dumps({"body": TEXTS[2]}) + "\n")
    Path("mixed/c.txt.gz").write_bytes(gzip.compress(TEXTS[3].encode()))
    Path("mixed/page.md").write_text("not read")
    Path("mixed/d.txt").write_bytes(b"\xff\xfe")
    Path("mixed/e.txt.gz").write_bytes(gzip.compress(b"cut short")[:-4])
    said = tokenise(f"{BPE} --input mixed --json-key body")
    [warned] = [line for line in said.splitlines() if "page.md" in line]
    assert warned.startswith("warning")
    assert "after --input" in warned
    expected = documents([TEXTS[0] + "\n\n" + TEXTS[1], TEXTS[2], TEXTS[3]], 260)
    assert read("p_body_document") == expected
    bad = map(json.loads, Path("p_body_document.rejected.jsonl").read_text().splitlines())
    assert [each["file"] for each in bad] == ["mixed/d.txt", "mixed/e.txt.gz"]
    assert " 2 lines set aside" in said


def test_a_wrong_json_key_is_named_with_those_that_are_there(tokenise: Tokenise) -> None:
    records = [{"content": text, "id": str(number)} for number, text in enumerate(TEXTS * 10)]
    write_jsonl(Path("b.jsonl"), records)
    words = f"{BPE} --input b.jsonl"
    error = refusal(lambda: step.main(given(f"{words} --json-key body")))
    assert isinstance(error, UsageError)
    assert (error.flag, error.works) == ("--json-key", ("--json-key", "content"))
    assert "2000" in str(error)
    assert not outputs("p")
    assert "warning" not in tokenise(" ".join([words, *error.works]))
    write_jsonl(Path("b.jsonl"), [*records, {"body": "the inn"}])
    said = tokenise(f"{words} --json-key body")
    [warning] = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert "--json-key body: 2000 " in warning
    assert read("p_body_document") == documents(["the inn"], 260)


def test_an_earlier_output_is_kept_or_with_overwrite_replaced_whole(tokenise: Tokenise) -> None:
    write_lines("a.jsonl", ["one", "two"] * 2000, b"bad\n")
    write_lines("b.jsonl", ["three"])
    Path("c.jsonl").write_bytes(b"bad\n")
    tokenise(f"{BPE} --shard-size 20KB")
    before = outputs("p")
    assert len(before) > 8
    assert refused_with(f"{BPE} --input c.jsonl --overwrite").startswith("--input")
    assert outputs("p") == before
    assert refused(step.main, given(f"{BPE} --input b.jsonl")) == "--output-prefix"
    for _ in range(2):  # also where its sidecar says nothing
        tokenise(f"{BPE} --input b.jsonl --overwrite")
        assert outputs("p").keys() == FILES | TOKENIZER
        assert read("p_text_document") == documents(["three"], 260)
        Path("p_text_document.json").write_text("{}")


def test_a_move_that_failed_is_finished_by_the_same_command(tokenise: Tokenise) -> None:
    """All is done in the work folder by then."""
    tokenise(f"{BPE} --shard-size 4KB --output-prefix whole")
    in_the_way = Path("p_text_document_00002.bin")
    in_the_way.mkdir()
    assert in_the_way.name in refused_with(f"{BPE} --shard-size 4KB")
    in_the_way.rmdir()
    tokenise(f"{BPE} --shard-size 4KB")
    assert outputs("p") == outputs("whole")
    assert not list(Path().glob("*.work"))


def test_whether_documents_were_shuffled_is_noted(tokenise: Tokenise) -> None:
    inputs = (Path("a.jsonl"),)
    split.run(split.Settings(input=inputs, output=Path("split"), workers=1, ratio="3:1"))
    shard = next(Path("split/train").glob("*.jsonl"))
    for paths, expected in (
        (["split/train"], True),
        (["split/train", "split/valid"], True),
        ([shard], True),
        (["a.jsonl"], None),
        (["split/train", "a.jsonl"], None),
    ):
        settings = Settings(input=tuple(map(Path, paths)), output=Path("out"))
        assert settings.shuffled is expected
    for words, expected in (("--input split/train", True), ("--overwrite", None)):
        tokenise(f"{BPE} {words}")
        assert described("p_text_document").shuffled is expected


# The last flag of each row is refused.
LAST = """
BPE --input nowhere.jsonl | BPE --input empty.jsonl | BPE --vocab-file no.json
BPE --tokenizer-type T5 | BPE --max-unknown 5 | BPE --encoder fast | BPE --encoder words
BPE --shard-size x | BERT --append-eod | BERT --vocab-file vocab.json
BERT --merge-file merges.txt | BERT --encoder gigatoken | JSON --encoder gigatoken
JSON --encoder words | JSON --merge-file json/tokenizer.json | JSON --vocab-file nowhere
JSON --vocab-file empty
"""
ROWS = by_last_flag(LAST)
ROWS += [("BPE --output o", "--output-prefix"), ("BPE --split-sentences", "--tokenizer-type")]
ROWS += [("BERT --tokenizer-type BertWordPieceCase", "--vocab-file")]
ROWS += [("JSON --split-sentences", "--tokenizer-type")]


@pytest.mark.parametrize(("row", "flag"), ROWS)
def test_bad_input_is_refused_by_its_flag(folder: Path, row: str, flag: str) -> None:
    kind, _, words = row.partition(" ")
    tokenizer = {"BPE": BPE, "BERT": BERT, "JSON": JSON}[kind]
    write_tokenizer_json(folder / "json")
    Path("empty.jsonl").touch()
    Path("empty").mkdir()
    words = f"{tokenizer} --output-prefix p {words}"
    assert refusal(lambda: step.main(given(words)))
    assert not list(folder.glob("p_*"))
    # Where the kind of tokenizer is at fault, the files that are there are of another kind.
    assert refused(step.main, given(words), whole=flag != "--tokenizer-type") == flag


# Sentences of a WordPiece


def test_each_sentence_is_a_sequence(
    tokenise: Tokenise, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tokenise(BERT)
    expected = sentences(TALK)
    assert read("p_text_sentence") == expected
    count = sum(map(len, expected))
    assert f" {count} sentences" in said
    assert "warning" not in said
    facts = described("p_text_sentence")
    assert (facts.sentences, facts.documents, facts.eod) == (count, 120, None)
    names = [f"_text_sentence{suffix}" for suffix in (".bin", ".idx", ".json")]
    assert outputs("p").keys() == {*names, "_text_sentence.tokenizer/vocab.txt"}
    found = read_tokenizer(LOWER_CASE, tokenizer_folder("p_text_sentence"))
    assert found.fingerprint == facts.tokenizer_fingerprint
    step.main(["verify", "p_text_sentence"])
    assert f" {count} sequences" in capsys.readouterr().out


def test_text_without_a_token_is_left_out_and_counted(tokenise: Tokenise) -> None:
    """A zero-width space is no white space, and no token of BERT's."""
    texts = ["One.\n\u200b\nThe inn.", "\u200b \u200b", "In.", "\x00", "\u200b\n\u200b"]
    write_lines("a.jsonl", texts, b"bad\n")
    tokenise(f"{BERT} --output out")
    assert read("out/text_sentence") == sentences(["One.\nThe inn.", "In."])
    noted = manifest(Path("out"))
    assert noted["dropped"]["bad line"]["documents"] == 1
    assert (noted["sentences"], noted["empty_sentences"]) == (3, 5)
    assert noted["input"]["documents"] - noted["output"]["documents"] == 1 + 3
    write_lines("a.jsonl", texts[3:])
    assert refused_with(BERT).startswith("--input")
    assert not list(Path().glob("p_*"))


def test_whole_documents_of_a_wordpiece(tokenise: Tokenise) -> None:
    """Those without a token are left out; one warning says which program does not read them."""
    write_lines("a.jsonl", ["the inn", "\u200b", "in"])
    tokenizer = build_tokenizer(LOWER_CASE, "vocab.txt", None)
    for flag, end in (("--no-append-eod", []), ("", [tokenizer.eod])):
        step.warn.cache_clear()  # for it is said once in a process
        said = tokenise(f"{BERT} --no-split-sentences --overwrite {flag}")
        assert said.count("warning: ") == said.count("--split-sentences") == 1
        assert read("p_text_document") == [
            [[*tokenizer.encode(text), *end]] for text in ("the inn", "in")
        ]


def test_text_of_another_language_is_refused_before_anything_is_written(tokenise: Tokenise) -> None:
    """Though it is a part of the input only, and not its beginning."""
    write_lines("a.jsonl", TALK * 40 + [UNKNOWN * 20] * 4000)
    before = set(Path().iterdir())
    assert "--max-unknown 0." in refused_with(f"{BERT} --output out")
    assert set(Path().iterdir()) == before
    tokenise(f"{BERT} --output out --max-unknown 1")


def test_a_share_of_unknown_tokens_is_told_warned_of_and_refused(tokenise: Tokenise) -> None:
    """1, 2 and 8 of 100 tokens: the last is refused at the end, when the share is certain."""

    def write(unknown: int) -> None:
        text = " ".join(["the"] * (100 - unknown) + [UNKNOWN] * unknown)
        write_lines("a.jsonl", [text] * 7 + [f"{text}\n{text}"])

    for unknown in (1, 2):
        write(unknown)
        said = tokenise(f"{BERT} --overwrite")
        assert f"{unknown}.00%" in said
        assert said.count("warning: ") == said.count(f" {9 * unknown} of 900") == (unknown > 1)
    earlier = outputs("p")
    write(8)
    said = refused_with(f"{BERT} --overwrite")
    assert "72 of 900" in said
    assert "a sample" not in said
    assert "--max-unknown 0.08" in said
    left = {name: found for name, found in outputs("p").items() if "work" not in name}
    assert left == earlier
    assert "72 of 900" in tokenise(f"{BERT} --overwrite --max-unknown 0.08")
    facts = described("p_text_sentence")
    assert (facts.unknown_tokens, facts.one_sentence) == (72, 7)
    assert not list(Path().glob("*.work"))


def test_text_in_lower_case_is_refused_by_a_vocabulary_with_capitals(tokenise: Tokenise) -> None:
    """Though no token is [UNK]; a share of capitals below one half is a warning."""
    capitals = string.ascii_uppercase
    file = Path(write_wordpiece(Path(), *capitals, *(f"##{letter}" for letter in capitals)))
    file.rename("cased.txt")  # a tokenizer is made once of a file
    before = set(Path().iterdir())
    words = f"{BERT} --overwrite --vocab-file cased.txt --tokenizer-type BertWordPieceCase"
    write_lines("a.jsonl", LOWER)
    said = refused_with(words)
    assert "0 of 120" in said
    assert f"--tokenizer-type {LOWER_CASE}" in said
    assert set(Path().iterdir()) == before
    for cased, more in ((0, "--allow-lower-case"), (40, ""), (120, "")):
        write_lines("a.jsonl", [*TALK[:cased], *LOWER[cased:]])
        said = tokenise(f"{words} {more}")
        assert said.count("warning: ") == said.count(f"{cased} of 120") == (cased < 60)
        assert "(0.00% [UNK])" in said


def test_unknown_tokens_and_single_sentences_are_noted_of_every_shard(tokenise: Tokenise) -> None:
    """In the sidecar and, for a folder, in the manifest."""
    texts = [*TALK, "the inn " * 20 + UNKNOWN] * 3
    write_lines("a.jsonl", texts)
    tokenise(f"{BERT} --output out --shard-size 10KB")
    facts = described("out/text_sentence")
    assert len(facts.shards) > 1
    assert read("out/text_sentence") == sentences(texts)
    assert (facts.unknown_tokens, facts.one_sentence) == (3, 3)
    assert sum(shard.one_sentence or 0 for shard in facts.shards) == 3
    noted = manifest(Path("out"))
    assert (noted["unknown_tokens"], noted["one_sentence"]) == (3, 3)
    assert (noted["sentences"], noted["empty_sentences"]) == (facts.sentences, 0)
    assert noted["tokens"] == sum(map(len, chain.from_iterable(sentences(texts))))
    assert noted["settings"]["sentences"].startswith("sentencex ")
    again = f"{BERT} --output out --shard-size 10KB --json-key body"
    assert refused_with(again).startswith("--output ")
