"""From JSON lines to sentences of WordPiece tokens, through the command."""

import json
import re
import string
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.data.description import Description
from megatron.data.files import tokenizer_folder
from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer import build_tokenizer, read_tokenizer
from megatron.data.verify import verify
from tests.data.samples import write_tokenizer, write_wordpiece
from tests.tools.corpus.lines import content, manifest, write_jsonl
from tests.tools.test_preprocess_data import lines, outputs
from tools import preprocess_data
from tools.corpus.pipeline import read_description
from tools.sentences import split_sentences

TEXTS = [
    f"The thing number {i} is in the inn. " * (1 + i % 5) + f"Is it?\nMr. {i} thinks so."
    for i in range(120)
]
LOWER = [text.lower() for text in TEXTS]
KIND = "BertWordPieceLowerCase"
SPLIT = ["--split-sentences", "--tokenizer-type", KIND, "--vocab-file", "vocab.txt"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given, with a tokenizer and some text."""
    monkeypatch.chdir(tmp_path)
    write_wordpiece(tmp_path, "thing", "number", "is", "it", "so", "mr")
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    return tmp_path


def preprocess(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a run that succeeds says; of one worker, if not told otherwise."""
    capsys.readouterr()
    preprocess_data.main(["--workers", "1", *SPLIT, *words])
    return capsys.readouterr().err


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        preprocess_data.main(list(words))
    return capsys.readouterr().err


def read(prefix: Path) -> list[list[list[int]]]:
    """The sentences of each document."""
    data = IndexedDataset(str(prefix))
    starts = data.pointers[:] // data.dtype.itemsize
    sentences = [
        data.tokens[start : start + size].tolist()
        for start, size in zip(starts, data.sizes[:], strict=True)
    ]
    bounds = data.documents[:].tolist()
    return [sentences[first:last] for first, last in pairwise(bounds)]


def encoded(vocab_file: str, texts: list[str]) -> list[list[list[int]]]:
    tokenizer = build_tokenizer(KIND, vocab_file, None)
    return [tokenizer.encode_batch(split_sentences(text)) for text in texts]


def test_each_sentence_is_a_sequence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = preprocess(capsys, "--input", "a.jsonl", "--output-prefix", "p")
    expected = encoded("vocab.txt", TEXTS)
    assert read(folder / "p_text_sentence") == expected
    count = sum(map(len, expected))
    assert f"p_text_sentence: 120 documents, {count} sentences, " in said
    assert "no line set aside" in said
    assert "warning" not in said
    assert ", once for each word; sentences: sentencex " in said
    described = Description.read("p_text_sentence")
    assert described is not None
    assert (described.sentences, described.documents, described.eod) == (count, 120, None)
    assert set(outputs(folder, "p")) == {
        *(f"_text_sentence{suffix}" for suffix in (".bin", ".idx", ".json")),
        "_text_sentence.tokenizer/vocab.txt",
    }
    found = read_tokenizer(KIND, tokenizer_folder("p_text_sentence"))
    assert found.fingerprint == described.tokenizer_fingerprint
    preprocess_data.main(["verify", "p_text_sentence"])
    told = capsys.readouterr().out
    assert f"sound, as its .json says; 120 documents, {count} sequences" in told


def test_what_has_no_token_is_left_out_and_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A zero-width space is no white space, and no token of BERT's."""
    texts = ["One.\n\u200b\nThe inn.", "\u200b \u200b", "In.", "\x00", "\u200b\n\u200b"]
    (folder / "a.jsonl").write_bytes(lines(texts) + b"bad\n")
    said = preprocess(capsys, "--input", "a.jsonl", "--output-prefix", "p")
    assert read(folder / "p_text_sentence") == encoded("vocab.txt", ["One.\nThe inn.", "In."])
    assert "2 documents, 3 sentences" in said
    assert "1 lines set aside in p_text_sentence.rejected.jsonl (1 not JSON)" in said
    assert "3 documents without a token left out, 5 sentences without a token left out" in said
    (folder / "b.jsonl").write_bytes(lines(texts[3:]))
    refused = refusal(capsys, *SPLIT, "--input", "b.jsonl", "--output-prefix", "q")
    assert "--input b.jsonl holds no document; no line set aside, 2 documents without" in refused
    assert not list(folder.glob("q_*"))


def test_whole_documents_without_a_token_are_left_out_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.jsonl").write_bytes(lines(["the inn", "\u200b", "in"]))
    preprocess_data.warn.cache_clear()  # for it is said once in a process
    words = ["--no-split-sentences", "--append-eod", "--input", "a.jsonl", "--output-prefix", "p"]
    said = preprocess(capsys, *words)
    assert "1 documents without a token left out" in said
    assert "warning: without --split-sentences pretrain_bert.py does not read" in said
    tokenizer = build_tokenizer(KIND, "vocab.txt", None)
    assert read(folder / "p_text_document") == [
        [[*tokenizer.encode(text), tokenizer.sep]] for text in ("the inn", "in")
    ]


def test_without_sentences_only_one_thing_is_advised(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For --append-eod would not make it data of pretrain_bert.py."""
    preprocess_data.warn.cache_clear()
    said = preprocess(capsys, "--no-split-sentences", "--input", "a.jsonl", "--output-prefix", "p")
    assert said.count("warning: ") == 1
    assert "warning: without --split-sentences pretrain_bert.py does not read" in said


UNKNOWN = "\u6f22"  # a letter that the vocabulary lacks


@pytest.mark.parametrize("where", ["--output-prefix", "--output"])
def test_text_of_another_language_is_refused_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Though it is a part of the input only, and not its beginning."""
    content = lines(TEXTS * 40)
    (folder / "a.jsonl").write_bytes(content + lines([UNKNOWN * 20] * 4000))
    before = set(folder.iterdir())
    words = [*SPLIT, "--input", "a.jsonl", where, "p"]
    said = refusal(capsys, *words)
    assert re.search(
        r"error: --input a.jsonl, a sample of it: \d+ of \d+ tokens \(\d\d.\d%\) are \[UNK\], .*: "
        r"--vocab-file vocab.txt lacks .*tools/train_tokenizer.py .*, or --max-unknown 0.\d\d, ",
        said,
    )
    assert set(folder.iterdir()) == before
    assert "[UNK]" in preprocess(capsys, *words, "--max-unknown", "1")


def test_a_share_of_unknown_tokens_is_told_warned_of_and_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 100 tokens 1, 2, and 8: the last is told at the end, when the share is certain."""
    words = ["--input", "a.jsonl", "--output-prefix", "p"]
    for unknown in (1, 2, 8):
        text = " ".join(["the"] * (100 - unknown) + [UNKNOWN] * unknown)
        (folder / "a.jsonl").write_bytes(lines([text] * 7 + [f"{text}\n{text}"]))
        if unknown == 8:
            break
        said = preprocess(capsys, *words)
        assert f"900 tokens ({unknown}.00% [UNK]); no line set aside" in said.splitlines()[-1]
        warning = f"warning: --input a.jsonl: {9 * unknown} of 900 tokens (2.0%) are [UNK]"
        assert said.count("warning: ") == said.count(warning) == (unknown > 1)
    earlier = outputs(folder, "p")
    said = refusal(capsys, *SPLIT, *words)
    assert "error: --input a.jsonl: 72 of 900 tokens (8.0%) are [UNK], " in said
    assert "or --max-unknown 0.08, would work; nothing was put in place" in said
    assert said.endswith("the run goes on from p_text_sentence.work\n")
    assert {name: found for name, found in outputs(folder, "p").items() if "work" not in name} == (
        earlier
    )
    assert "72 of 900 tokens" in preprocess(capsys, *words, "--max-unknown", "0.08")
    described = Description.read("p_text_sentence")
    assert described is not None
    assert (described.unknown_tokens, described.one_sentence) == (72, 7)
    assert not list(folder.glob("*.work"))


@pytest.mark.parametrize("place", [["--output-prefix", "p"], ["--output", "p", "--overwrite"]])
def test_text_in_lower_case_is_refused_by_a_vocabulary_with_capitals(
    folder: Path, capsys: pytest.CaptureFixture[str], place: list[str]
) -> None:
    """Of which nothing is [UNK]; below one half of texts with capitals the share is told."""
    capitals = string.ascii_uppercase
    file = Path(write_wordpiece(folder, *capitals, *(f"##{letter}" for letter in capitals)))
    file.rename("cased.txt")  # a tokenizer is made once of a file
    before = set(folder.iterdir())
    words = ["--input", "a.jsonl", *place, "--tokenizer-type", "BertWordPieceCase"]
    words += ["--vocab-file", "cased.txt"]
    for cased, texts in ((0, LOWER), (40, [*TEXTS[:40], *LOWER[40:]]), (120, TEXTS)):
        (folder / "a.jsonl").write_bytes(lines(texts))
        counted = f"--input a.jsonl, a sample of it: {cased} of 120 texts ({cased / 120:.1%}) have"
        if not cased:
            said = refusal(capsys, *SPLIT, *words)
            assert f"error: {counted} a capital letter, and BertWordPieceCase is made" in said
            assert "--tokenizer-type BertWordPieceLowerCase with" in said
            assert set(folder.iterdir()) == before
        allowed = ["--allow-lower-case"] if not cased else []
        said = preprocess(capsys, *words, *allowed)
        assert said.count("warning: --input") == said.count(f"warning: {counted}") == (cased < 60)
        assert "(0.00% [UNK])" in said


def test_what_is_unknown_and_of_one_sentence_is_noted_of_every_shard(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the sidecar and, for a folder, in the manifest."""
    texts = [*TEXTS, "the inn " * 20 + UNKNOWN] * 3
    (folder / "a.jsonl").write_bytes(lines(texts))
    words = ["--input", "a.jsonl", "--output", "out", "--shard-size", "10KB"]
    said = preprocess(capsys, *words)
    described = Description.read("out/text_sentence")
    assert described is not None
    assert len(described.shards) > 1
    assert (described.unknown_tokens, described.one_sentence) == (3, 3)
    assert sum(shard.one_sentence or 0 for shard in described.shards) == 3
    facts = manifest(folder / "out")
    assert (facts["unknown_tokens"], facts["one_sentence"]) == (3, 3)
    last = said.splitlines()[-1]
    assert last.startswith("out/text_sentence: 363 documents, ")
    assert re.search(r" tokens \(0\.\d\d% \[UNK\]\) in \d+ shards; no line set aside, 3 docu", last)


@pytest.mark.parametrize("size", [[], ["--shard-size", "150KB"]])
def test_the_same_bytes_for_any_number_of_workers(
    folder: Path, capsys: pytest.CaptureFixture[str], size: list[str]
) -> None:
    texts = lines([*TEXTS, "\u200b"] * 30).splitlines(keepends=True)
    texts[5::100] = [b"bad\n"] * len(texts[5::100])
    (folder / "a.jsonl").write_bytes(b"".join(texts))
    found = []
    for workers in ("1", "3"):
        words = ["--input", "a.jsonl", "--output-prefix", f"w{workers}", "--workers", workers]
        preprocess(capsys, *words, *size)
        found.append(outputs(folder, f"w{workers}"))
    assert found[0] == found[1]
    assert (len(found[0]) > 7) == bool(size)
    good = [json.loads(line)["text"] for line in texts if line != b"bad\n"]
    expected = [document for document in encoded("vocab.txt", good) if document != [[]]]
    assert read(folder / "w1_text_sentence") == expected
    report = verify("w3_text_sentence")
    assert (report.documents, report.sequences) == (len(expected), sum(map(len, expected)))


def test_what_was_done_before_an_interruption_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--input", "a.jsonl"]
    preprocess(capsys, *words, "--output-prefix", "whole")
    for _ in range(2):  # encoding, joining
        assert "--shard" in preprocess(capsys, *words, "--output-prefix", "p", "--shard", "0/1")
    assert not (folder / "p_text_sentence.json").exists()
    preprocess(capsys, *words, "--output-prefix", "p")
    assert outputs(folder, "p") == outputs(folder, "whole")


def test_a_folder_is_filled_as_by_a_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(capsys, "--input", "a.jsonl", "--output", "out")
    assert set(content(folder / "out")) == {
        "manifest.json", "text_sentence.bin", "text_sentence.idx", "text_sentence.json",
        "text_sentence.tokenizer/vocab.txt",
    }  # fmt: skip
    facts = manifest(folder / "out")
    described = Description.read("out/text_sentence")
    assert described is not None
    assert (facts["sentences"], facts["empty_sentences"]) == (described.sentences, 0)
    assert facts["settings"]["sentences"].startswith("sentencex ")
    assert "nothing is left to do" in preprocess(capsys, "--input", "a.jsonl", "--output", "out")


def test_a_table_of_a_corpus_run_takes_the_same_flags(folder: Path) -> None:
    write_jsonl(folder / "raw.jsonl", [{"text": TEXTS[0]}])
    (folder / "corpus.toml").write_text(
        'output = "out"\ninput = ["raw.jsonl"]\n[tokenise]\nsplit_sentences = true\n'
        f'tokenizer_type = "{KIND}"\nvocab_file = "vocab.txt"\n'
    )
    (job,) = read_description(folder / "corpus.toml").jobs({})
    job.run()
    assert read(folder / "out" / "tokenise" / "text_sentence") == encoded("vocab.txt", TEXTS[:1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--append-eod"], "--append-eod: must be left out with --split-sent"),
        (["--tokenizer-type", "BertWordPieceCase"], "--tokenizer-type BertWordPieceLowerCase"),
        (["--vocab-file", "vocab.json"], "--vocab-file vocab.json is JSON, and lacks [PAD]"),
        (["--merge-file", "merges.txt"], "--merge-file merges.txt is no part of"),
        (["--encoder", "gigatoken"], "--encoder tokenizers would work"),
        (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "vocab.json", "--merge-file",
          "merges.txt"], "--tokenizer-type GPT2BPETokenizer: must be"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    write_tokenizer(folder)
    said = refusal(capsys, "--input", "a.jsonl", "--output-prefix", "p", *SPLIT, *words)
    assert said.splitlines()[-1].startswith("error: ")
    assert message in said
    assert not list(folder.glob("p_*"))


def test_real_text(folder: Path, test_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Web pages with BERT's own vocabulary: no character of them is lost."""
    source = test_data / "neardup" / "c4_sample.jsonl.gz"
    vocab_file = str(test_data / "bert" / "vocab.txt")
    words = ["--input", str(source), "--output-prefix", "p", "--vocab-file", vocab_file]
    said = preprocess(capsys, *words)
    assert "1000 documents" in said
    assert verify("p_text_sentence").highest_id < 30_522
    tokenizer = build_tokenizer(KIND, vocab_file, None)
    found = read(folder / "p_text_sentence")
    whole = IndexedDataset("p_text_sentence").tokens[:].tolist()
    assert whole == [number for document in found for sentence in document for number in sentence]
    preprocess(capsys, *words, "--no-split-sentences", "--output-prefix", "q")
    apart = read(folder / "q_text_document")
    assert [[number for each in document for number in each] for document in found] == [
        document for (document,) in apart
    ]
    assert tokenizer.decode(found[0][0])
