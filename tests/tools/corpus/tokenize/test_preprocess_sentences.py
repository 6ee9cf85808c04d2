"""From JSON lines to sentences of WordPiece tokens, through the command."""

import string
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron.data.files import tokenizer_folder
from megatron.data.indexed import Description, IndexedDataset
from megatron.data.tokenizer import build_tokenizer, read_tokenizer
from tests.data.samples import write_tokenizer, write_wordpiece
from tests.refusals import field_of
from tests.tools.corpus.lines import content, manifest, write_jsonl
from tests.tools.corpus.tokenize.test_preprocess_data import lines, outputs, refused_with
from tools.corpus.pipeline import read_description
from tools.corpus.tokenize import step as preprocess_data
from tools.corpus.tokenize.encode import split_sentences
from tools.corpus.tokenize.writer import verify

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
    """Stderr of a run that succeeds."""
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
    assert f" {count} sentences" in said
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
    assert f" {count} sequences" in capsys.readouterr().out


def test_text_without_a_token_is_left_out_and_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A zero-width space is no white space, and no token of BERT's."""
    texts = ["One.\n\u200b\nThe inn.", "\u200b \u200b", "In.", "\x00", "\u200b\n\u200b"]
    (folder / "a.jsonl").write_bytes(lines(texts) + b"bad\n")
    words = [*SPLIT, "--workers", "1", "--input"]
    preprocess_data.main([*words, "a.jsonl", "--output", "out"])
    assert read("out/text_sentence") == encoded(["One.\nThe inn.", "In."])
    noted = manifest(folder / "out")
    assert noted["dropped"]["bad line"]["documents"] == 1
    assert (noted["sentences"], noted["empty_sentences"]) == (3, 5)
    assert noted["input"]["documents"] - noted["output"]["documents"] == 1 + 3
    (folder / "b.jsonl").write_bytes(lines(texts[3:]))
    assert field_of(refused_with(*words, "b.jsonl", "--output-prefix", "q")) == "--input"
    assert not list(folder.glob("q_*"))


def test_whole_documents_of_a_wordpiece(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those without a token are left out; one warning says which program does not read them."""
    (folder / "a.jsonl").write_bytes(lines(["the inn", "\u200b", "in"]))
    tokenizer = build_tokenizer(KIND, "vocab.txt", None)
    for end in ([], [tokenizer.eod]):
        preprocess_data.warn.cache_clear()  # for it is said once in a process
        mark = [] if end else ["--no-append-eod"]
        said = preprocess(capsys, "--no-split-sentences", "--overwrite", *mark)
        assert said.count("warning: ") == said.count("--split-sentences") == 1
        assert read("p_text_document") == [
            [[*tokenizer.encode(text), *end]] for text in ("the inn", "in")
        ]


def test_text_of_another_language_is_refused_before_anything_is_written(folder: Path) -> None:
    """Though it is a part of the input only, and not its beginning."""
    (folder / "a.jsonl").write_bytes(lines(TEXTS * 40) + lines([UNKNOWN * 20] * 4000))
    before = set(folder.iterdir())
    words = [*SPLIT, "--input", "a.jsonl", "--output", "p", "--workers", "1"]
    assert "--max-unknown 0." in refused_with(*words)
    assert set(folder.iterdir()) == before
    preprocess_data.main([*words, "--max-unknown", "1"])


def test_a_share_of_unknown_tokens_is_told_warned_of_and_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1, 2 and 8 of 100 tokens: the last is told at the end, when the share is certain."""

    def write(unknown: int) -> None:
        text = " ".join(["the"] * (100 - unknown) + [UNKNOWN] * unknown)
        (folder / "a.jsonl").write_bytes(lines([text] * 7 + [f"{text}\n{text}"]))

    for unknown in (1, 2):
        write(unknown)
        said = preprocess(capsys, "--overwrite")
        assert f"{unknown}.00%" in said
        assert said.count("warning: ") == said.count(f" {9 * unknown} of 900") == (unknown > 1)
    earlier = outputs(folder, "p")
    write(8)
    said = refused_with(*GIVEN, "--overwrite")
    assert "72 of 900" in said
    assert "--max-unknown 0.08" in said
    assert {name: found for name, found in outputs(folder, "p").items() if "work" not in name} == (
        earlier
    )
    assert "72 of 900" in preprocess(capsys, "--overwrite", "--max-unknown", "0.08")
    facts = described("p_text_sentence")
    assert (facts.unknown_tokens, facts.one_sentence) == (72, 7)
    assert not list(folder.glob("*.work"))


def test_text_in_lower_case_is_refused_by_a_vocabulary_with_capitals(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though nothing of it is [UNK]; below one half of texts with capitals the share is told."""
    capitals = string.ascii_uppercase
    file = Path(write_wordpiece(folder, *capitals, *(f"##{letter}" for letter in capitals)))
    file.rename("cased.txt")  # a tokenizer is made once of a file
    before = set(folder.iterdir())
    words = [*GIVEN, "--overwrite", "--vocab-file", "cased.txt"]
    words += ["--tokenizer-type", "BertWordPieceCase"]
    (folder / "a.jsonl").write_bytes(lines(LOWER))
    said = refused_with(*words)
    assert "0 of 120" in said
    assert "--tokenizer-type BertWordPieceLowerCase" in said
    assert set(folder.iterdir()) == before
    capsys.readouterr()
    for cased, more in ((0, ["--allow-lower-case"]), (40, []), (120, [])):
        (folder / "a.jsonl").write_bytes(lines([*TEXTS[:cased], *LOWER[cased:]]))
        preprocess_data.main([*words, *more])
        said = capsys.readouterr().err
        assert said.count("warning: ") == said.count(f"{cased} of 120") == (cased < 60)
        assert "(0.00% [UNK])" in said


def test_unknown_tokens_and_single_sentences_are_noted_of_every_shard(folder: Path) -> None:
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


def test_a_table_of_a_corpus_run_takes_the_same_flags(folder: Path) -> None:
    write_jsonl(folder / "raw.jsonl", [{"text": TEXTS[0]}])
    (folder / "corpus.toml").write_text(
        'output = "out"\ninput = ["raw.jsonl"]\n[tokenise]\nsplit_sentences = true\n'
        f'tokenizer_type = "{KIND}"\nvocab_file = "vocab.txt"\n'
    )
    (job,) = read_description(folder / "corpus.toml").jobs({})
    job.run()
    assert read("out/tokenise/text_sentence") == encoded(TEXTS[:1])


GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--append-eod", "--append-eod"),
        ("--tokenizer-type BertWordPieceCase", "--tokenizer-type BertWordPieceLowerCase"),
        ("--vocab-file vocab.json", "--vocab-file"),
        ("--merge-file merges.txt", "--merge-file"),
        ("--encoder gigatoken", "--encoder tokenizers"),
        (GPT2, "--tokenizer-type BertWordPieceLowerCase"),
    ],
)
def test_bad_input_is_refused_by_its_flag(folder: Path, words: str, named: str) -> None:
    write_tokenizer(folder)
    assert named in refused_with(*GIVEN, *words.split())
    assert not list(folder.glob("p_*"))
    preprocess_data.main([*GIVEN, *(named.split() if " " in named else [])])


def test_real_text(folder: Path, test_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Web pages with BERT's own vocabulary: no character of them is lost."""
    source = str(test_data / "neardup" / "c4_sample.jsonl.gz")
    words = ["--input", source, "--vocab-file", str(test_data / "bert" / "vocab.txt")]
    preprocess(capsys, *words)
    report = verify("p_text_sentence")
    assert (report.documents, report.highest_id < 30_522) == (1000, True)
    found = read("p_text_sentence")
    whole = np.fromfile("p_text_sentence.bin", "<u2").tolist()
    assert whole == [number for document in found for sentence in document for number in sentence]
    words += ["--no-split-sentences", "--no-append-eod", "--output-prefix", "q"]
    preprocess(capsys, *words)
    apart = read("q_text_document")
    assert [[number for each in document for number in each] for document in found] == [
        document for (document,) in apart
    ]
