"""From JSON lines to sentences of WordPiece tokens, through the command."""

import json
import re
import string
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron.data.files import tokenizer_folder
from megatron.data.indexed import Description, IndexedDataset
from megatron.data.tokenizer import build_tokenizer, read_tokenizer
from tests.data.samples import write_tokenizer, write_wordpiece
from tests.tools.corpus.lines import content, manifest, write_jsonl
from tests.tools.test_preprocess_data import lines, outputs, refusal
from tools import preprocess_data
from tools.corpus.pipeline import read_description
from tools.data_files import verify
from tools.sentences import split_sentences

TEXTS = [
    f"The thing number {i} is in the inn. " * (1 + i % 5) + f"Is it?\nMr. {i} thinks so."
    for i in range(120)
]
LOWER = [text.lower() for text in TEXTS]
KIND = "BertWordPieceLowerCase"
SPLIT = ["--split-sentences", "--tokenizer-type", KIND, "--vocab-file", "vocab.txt"]
GIVEN = [*SPLIT, "--input", "a.jsonl", "--output-prefix", "p", "--workers", "1"]
UNKNOWN = "\u6f22"  # a letter that the vocabulary lacks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given, with a tokenizer and some text."""
    monkeypatch.chdir(tmp_path)
    write_wordpiece(tmp_path, "thing", "number", "is", "it", "so", "mr")
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    return tmp_path


def preprocess(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a run that succeeds says."""
    capsys.readouterr()
    preprocess_data.main([*GIVEN, *words])
    return capsys.readouterr().err


def described(prefix: str) -> Description:
    found = Description.read(prefix)
    assert found is not None
    return found


def read(prefix: str) -> list[list[list[int]]]:
    """The sentences of each document."""
    data = IndexedDataset(prefix)
    found = []
    for document in range(data.num_documents):
        bounds = data.first_token(document) + np.cumsum([0, *data.sequence_sizes(document)])
        found.append([data.read(*each).tolist() for each in pairwise(bounds.tolist())])
    return found


def encoded(texts: list[str], vocab_file: str = "vocab.txt") -> list[list[list[int]]]:
    tokenizer = build_tokenizer(KIND, vocab_file, None)
    return [tokenizer.encode_batch(split_sentences(text)) for text in texts]


def test_each_sentence_is_a_sequence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = preprocess(capsys)
    expected = encoded(TEXTS)
    assert read("p_text_sentence") == expected
    count = sum(map(len, expected))
    assert f"120 documents, {count} sentences, " in said
    assert "warning" not in said
    facts = described("p_text_sentence")
    assert (facts.sentences, facts.documents, facts.eod) == (count, 120, None)
    assert set(outputs(folder, "p")) == {
        *(f"_text_sentence{suffix}" for suffix in (".bin", ".idx", ".json")),
        "_text_sentence.tokenizer/vocab.txt",
    }
    found = read_tokenizer(KIND, tokenizer_folder("p_text_sentence"))
    assert found.fingerprint == facts.tokenizer_fingerprint
    preprocess_data.main(["verify", "p_text_sentence"])
    assert f"120 documents, {count} sequences" in capsys.readouterr().out


def test_what_has_no_token_is_left_out_and_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A zero-width space is no white space, and no token of BERT's."""
    texts = ["One.\n\u200b\nThe inn.", "\u200b \u200b", "In.", "\x00", "\u200b\n\u200b"]
    (folder / "a.jsonl").write_bytes(lines(texts) + b"bad\n")
    said = preprocess(capsys)
    assert read("p_text_sentence") == encoded(["One.\nThe inn.", "In."])
    assert "2 documents, 3 sentences" in said
    assert "1 lines set aside in p_text_sentence.rejected.jsonl (1 not JSON)" in said
    assert "3 documents without a token left out, 5 sentences without a token left out" in said
    (folder / "b.jsonl").write_bytes(lines(texts[3:]))
    said, _ = refusal(capsys, *SPLIT, "--input", "b.jsonl", "--output-prefix", "q")
    assert "--input b.jsonl holds no document; no line set aside, 2 documents without" in said
    assert not list(folder.glob("q_*"))


def test_whole_documents_of_a_wordpiece(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those without a token are left out; one warning says which program does not read them."""
    (folder / "a.jsonl").write_bytes(lines(["the inn", "\u200b", "in"]))
    tokenizer = build_tokenizer(KIND, "vocab.txt", None)
    for end in ([], [tokenizer.eod]):
        preprocess_data.warn.cache_clear()  # for it is said once in a process
        mark = ["--append-eod"] if end else []
        said = preprocess(capsys, "--no-split-sentences", "--overwrite", *mark)
        assert "1 documents without a token left out" in said
        assert said.count("warning: ") == said.count("--split-sentences") == 1
        assert read("p_text_document") == [
            [[*tokenizer.encode(text), *end]] for text in ("the inn", "in")
        ]


def test_text_of_another_language_is_refused_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though it is a part of the input only, and not its beginning."""
    (folder / "a.jsonl").write_bytes(lines(TEXTS * 40) + lines([UNKNOWN * 20] * 4000))
    before = set(folder.iterdir())
    words = [*SPLIT, "--input", "a.jsonl", "--output", "p", "--workers", "1"]
    said, _ = refusal(capsys, *words)
    assert re.search(r"--input a.jsonl.* \d+ of \d+ tokens .*--max-unknown 0.\d", said)
    assert set(folder.iterdir()) == before
    preprocess_data.main([*words, "--max-unknown", "1"])


def test_a_share_of_unknown_tokens_is_told_warned_of_and_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 100 tokens 1, 2, and 8: the last is told at the end, when the share is certain."""
    for unknown in (1, 2, 8):
        text = " ".join(["the"] * (100 - unknown) + [UNKNOWN] * unknown)
        (folder / "a.jsonl").write_bytes(lines([text] * 7 + [f"{text}\n{text}"]))
        if unknown == 8:
            break
        said = preprocess(capsys, "--overwrite")
        assert f"900 tokens ({unknown}.00% [UNK])" in said
        assert said.count("warning: ") == said.count(f" {9 * unknown} of 900") == (unknown > 1)
    earlier = outputs(folder, "p")
    said, _ = refusal(capsys, *GIVEN, "--overwrite")
    assert "72 of 900 tokens (8.0%) are [UNK]; " in said
    assert "--max-unknown 0.08" in said
    assert {name: found for name, found in outputs(folder, "p").items() if "work" not in name} == (
        earlier
    )
    assert "72 of 900 tokens" in preprocess(capsys, "--overwrite", "--max-unknown", "0.08")
    facts = described("p_text_sentence")
    assert (facts.unknown_tokens, facts.one_sentence) == (72, 7)
    assert not list(folder.glob("*.work"))


def test_text_in_lower_case_is_refused_by_a_vocabulary_with_capitals(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of which nothing is [UNK]; below one half of texts with capitals the share is told."""
    capitals = string.ascii_uppercase
    file = Path(write_wordpiece(folder, *capitals, *(f"##{letter}" for letter in capitals)))
    file.rename("cased.txt")  # a tokenizer is made once of a file
    before = set(folder.iterdir())
    words = ["--split-sentences", "--input", "a.jsonl", "--output-prefix", "p", "--overwrite",
             "--workers", "1",
             "--tokenizer-type", "BertWordPieceCase", "--vocab-file", "cased.txt"]  # fmt: skip
    for cased, texts in ((0, LOWER), (40, [*TEXTS[:40], *LOWER[40:]]), (120, TEXTS)):
        (folder / "a.jsonl").write_bytes(lines(texts))
        counted = f"{cased} of 120 texts ({cased / 120:.1%}) have"
        if not cased:
            said, _ = refusal(capsys, *words)
            assert counted in said
            assert "--tokenizer-type BertWordPieceLowerCase" in said
            assert set(folder.iterdir()) == before
        preprocess_data.main([*words, *(["--allow-lower-case"] if not cased else [])])
        said = capsys.readouterr().err
        assert said.count("warning: --input") == said.count(counted) == (cased < 60)
        assert "(0.00% [UNK])" in said


def test_what_is_unknown_and_of_one_sentence_is_noted_of_every_shard(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the sidecar and, for a folder, in the manifest."""
    texts = [*TEXTS, "the inn " * 20 + UNKNOWN] * 3
    (folder / "a.jsonl").write_bytes(lines(texts))
    words = [*SPLIT, "--input", "a.jsonl", "--output", "out", "--shard-size", "10KB"]
    preprocess_data.main([*words, "--workers", "1"])
    assert "text_sentence.tokenizer/vocab.txt" in content(folder / "out")
    facts = described("out/text_sentence")
    assert len(facts.shards) > 1
    assert (facts.unknown_tokens, facts.one_sentence) == (3, 3)
    assert sum(shard.one_sentence or 0 for shard in facts.shards) == 3
    noted = manifest(folder / "out")
    assert (noted["unknown_tokens"], noted["one_sentence"]) == (3, 3)
    assert (noted["sentences"], noted["empty_sentences"]) == (facts.sentences, 0)
    assert noted["settings"]["sentences"].startswith("sentencex ")


def test_the_same_bytes_for_any_number_of_workers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = lines([*TEXTS, "\u200b"] * 30).splitlines(keepends=True)
    texts[5::100] = [b"bad\n"] * len(texts[5::100])
    (folder / "a.jsonl").write_bytes(b"".join(texts))
    found = []
    for workers in ("1", "3"):
        preprocess(
            capsys, "--output-prefix", f"w{workers}", "--workers", workers, "--shard-size", "150KB"
        )
        found.append(outputs(folder, f"w{workers}"))
    assert found[0] == found[1]
    assert len(found[0]) > 7
    good = [json.loads(line)["text"] for line in texts if line != b"bad\n"]
    expected = [document for document in encoded(good) if document != [[]]]
    assert read("w1_text_sentence") == expected
    report = verify("w3_text_sentence")
    assert (report.documents, report.sequences) == (len(expected), sum(map(len, expected)))


def test_a_table_of_a_corpus_run_takes_the_same_flags(folder: Path) -> None:
    write_jsonl(folder / "raw.jsonl", [{"text": TEXTS[0]}])
    (folder / "corpus.toml").write_text(
        'output = "out"\ninput = ["raw.jsonl"]\n[tokenise]\nsplit_sentences = true\n'
        f'tokenizer_type = "{KIND}"\nvocab_file = "vocab.txt"\n'
    )
    (job,) = read_description(folder / "corpus.toml").jobs({})
    job.run()
    assert read("out/tokenise/text_sentence") == encoded(TEXTS[:1])


@pytest.mark.parametrize(
    ("bad", "flag"),
    [
        (["--append-eod"], "--append-eod"),
        (["--tokenizer-type", "BertWordPieceCase"], "--tokenizer-type BertWordPieceLowerCase"),
        (["--vocab-file", "vocab.json"], "--vocab-file"),
        (["--merge-file", "merges.txt"], "--merge-file"),
        (["--encoder", "gigatoken"], "--encoder tokenizers"),
        (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "vocab.json", "--merge-file",
          "merges.txt"], "--tokenizer-type BertWordPieceLowerCase"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], bad: list[str], flag: str
) -> None:
    write_tokenizer(folder)
    said, _ = refusal(capsys, *GIVEN, *bad)
    assert flag in said.splitlines()[-1]
    assert not list(folder.glob("p_*"))
    works = flag.split() if " " in flag else []
    preprocess_data.main([*GIVEN, *works])


def test_real_text(folder: Path, test_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Web pages with BERT's own vocabulary: no character of them is lost."""
    source = str(test_data / "neardup" / "c4_sample.jsonl.gz")
    words = ["--input", source, "--vocab-file", str(test_data / "bert" / "vocab.txt")]
    assert "1000 documents" in preprocess(capsys, *words)
    assert verify("p_text_sentence").highest_id < 30_522
    found = read("p_text_sentence")
    whole = np.fromfile("p_text_sentence.bin", "<u2").tolist()
    assert whole == [number for document in found for sentence in document for number in sentence]
    preprocess(capsys, *words, "--no-split-sentences", "--output-prefix", "q")
    apart = read("q_text_document")
    assert [[number for each in document for number in each] for document in found] == [
        document for (document,) in apart
    ]
