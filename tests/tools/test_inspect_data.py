"""tools/inspect_data.py: samples as text, statistics beside what is to be expected."""

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.bert import BertDataset, open_bert_splits
from megatron.data.files import tokenizer_folder
from megatron.data.gpt2 import open_splits
from megatron.data.indexed import IndexedDataset
from megatron.data.sources import open_corpus
from megatron.data.tokenizer import BertWordPieceLowerCase, GPT2BPETokenizer
from megatron.errors import switch
from tests.data.samples import write_data_of_tokenizer, write_sentences, write_wordpiece
from tests.programs import ROOT
from tests.refusals import by_last_flag, refused
from tools.inspect_data import main

Capture = pytest.CaptureFixture[str]
Sentences = tuple[str, BertWordPieceLowerCase]  # a data set and its tokenizer
Documents = tuple[str, GPT2BPETokenizer]

WORDS = ("alpha", "beta", "gamma", "delta", "##on")


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Sentences:
    """300 documents of 1 to 12 sentences, every tenth of one, with their tokenizer beside them."""
    prefix = str(tmp_path_factory.mktemp("data") / "p_text_sentence")
    folder = tokenizer_folder(prefix)
    folder.mkdir()
    tokenizer = BertWordPieceLowerCase(write_wordpiece(folder, *WORDS))
    draw = random.Random(1)
    words = ["alpha", "beta", "gammas", "deltaon", "the", "in", "xyz"]
    documents = []
    for number in range(300):
        count = draw.randint(2, 12) if number % 10 else 1
        texts = [" ".join(draw.choices(words, k=draw.randint(3, 12))) + "." for _ in range(count)]
        documents.append(tokenizer.encode_batch(texts))
    facts = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    write_sentences(Path(prefix), documents, **facts)
    return prefix, tokenizer


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """300 documents of 5 to 44 tokens and an end mark."""
    prefix = tmp_path_factory.mktemp("data") / "p_text_document"
    draw = random.Random(2)
    content = [[*draw.choices(range(40, 90), k=5 + number % 40), 260] for number in range(300)]
    return str(prefix), write_data_of_tokenizer(prefix, content)


def printed(capsys: Capture, *arguments: str) -> str:
    main(arguments, {})
    return capsys.readouterr().out


def numbers_in(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def table(text: str) -> dict[str, list[float]]:
    """{name: [found, and the expected value if there is one]} of the statistics."""
    whole = text.split("samples     ")[1].split("\n\n")[0]
    rows = (re.split(r"\s{2,}", line) for line in whole.splitlines()[1:])
    return {name: [float(cell.rstrip(" %")) for cell in cells] for name, *cells in rows}


def training_split(sentences: Sentences, **settings: Any) -> BertDataset:
    prefix, tokenizer = sentences
    corpus = open_corpus([prefix], None)
    splits = open_bert_splits(corpus, tokenizer, split="29,1,0", seq_length=64, seed=5, **settings)
    assert isinstance(splits[0], BertDataset)
    return splits[0]


def test_sample_of_bert(capsys: Capture, sentences: Sentences) -> None:
    """Every mark of what is hidden taken back, the text is that of the batch."""
    prefix, tokenizer = sentences
    words = ["--data-path", prefix, "--seq-length", "64", "--statistics", "0", "--seed", "5"]
    text = printed(capsys, *words, "--samples", "3", "--first", "17")
    settings = {"mask_prob": 0.15, "short_seq_prob": 0.1, "max_ngram_size": 3}
    batch = training_split(sentences, **settings).batch(range(17, 20))
    shown = re.split(r"sample (\d+): segments ", text)[1:]
    assert shown[::2] == ["17", "18", "19"]
    for row, (facts, *lines) in enumerate(each.strip().splitlines() for each in shown[1::2]):
        real, hidden = int(batch.is_real[row].sum()), int(batch.loss_mask[row].sum())
        assert ("swapped" in facts) == batch.is_swapped[row]
        assert numbers_in(facts)[:3] == [real, 64 - real, hidden]
        stripped = " ".join(line.strip() for line in lines)
        chosen = {r"\{.*? <- (.*?)\}": batch.labels, r"\{(.*?) <- .*?\}": batch.tokens}
        for choose, ids in chosen.items():
            # A continuation that is read in place of a word keeps its mark.
            found = re.sub(choose, r"\1", stripped).replace(" ", "").replace("##", "")
            whole = tokenizer.decode(ids[row, :real].tolist())
            assert found == whole.replace(" ", "").replace("##", "")


def test_statistics_of_bert(capsys: Capture, sentences: Sentences) -> None:
    """In percent, of some 14,000 words to be predicted; 300 of 1,500 pairs are short."""
    words = ["--data-path", sentences[0], "--seq-length", "64", "--samples", "0", "--seed", "5"]
    words += ["--statistics", "1500", "--short-seq-prob", "0.2"]
    rows = table(printed(capsys, *words, "--max-ngram-size", "4", "--mask-prob", "0.3"))
    expected = {name: cells for name, cells in rows.items() if len(cells) == 2}
    assert [cells[1] for cells in expected.values()] == [
        30, 30, 80, 10, 10, 48, 24, 16, 12, 50, 20
    ]  # fmt: skip
    for name, (found, wanted) in expected.items():
        assert found == pytest.approx(wanted, abs=4 if "pairs" in name or "short" in name else 2)
    others = {name: cells[0] for name, cells in rows.items() if len(cells) == 1}
    assert len(others) == 5
    settings = {"mask_prob": 0.3, "short_seq_prob": 0.2, "max_ngram_size": 4}
    is_real = training_split(sentences, **settings).batch(range(1500)).is_real
    padding = 100 * (1 - is_real.mean())
    assert others["padding"] == pytest.approx(padding, abs=0.1)
    assert others["tokens that are [UNK]"] == 0
    assert others["documents of one sentence, passed over"] == 10
    assert 0 < others["spare numbers, another block drawn"] < 60


def test_counts_of_preprocessing(capsys: Capture, tmp_path: Path, sentences: Sentences) -> None:
    """However few samples are looked at."""
    _, tokenizer = sentences
    folder = tokenizer_folder(str(tmp_path / "q"))
    folder.mkdir()
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    odd = [[tokenizer.unknown] * 3 + [10] * 7, [10] * 10]
    facts = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    described = write_sentences(tmp_path / "q", [*[odd] * 4, odd[1:]] * 20, **facts)
    replace(described, one_sentence=20, unknown_tokens=240).write(str(tmp_path / "q"))
    words = ["--samples", "0", "--statistics", "300", "--data-path", str(tmp_path / "q")]
    text = printed(capsys, *words)
    assert [numbers_in(line) for line in text.splitlines()[2:4]] == [[20], [240, 13, 33]]
    assert table(text)["tokens that are [UNK]"] == [pytest.approx(15, abs=0.5)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_sample_of_gpt2(capsys: Capture, documents: Documents, shuffle: bool) -> None:
    """With the flags of pretrain_gpt2.py; {text} counts in no loss."""
    prefix, tokenizer = documents
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    flags["shuffle"] = shuffle
    training, _, _ = open_splits(
        open_corpus([prefix], None), split="29,1,0", seq_length=32, seed=5, **flags
    )
    batch = training.batch(range(3, 7))
    words = ["--data-path", prefix, *["--seq-length", "32", "--seed", "5", "--statistics", "0"]]
    words += ["--samples", "4", "--first", "3"]
    words += [switch(name, value) for name, value in flags.items()]
    text = printed(capsys, *words)
    shown = re.split(r"sample (\d+): ", text)[1:]
    assert shown[::2] == ["3", "4", "5", "6"]
    for row, (facts, *lines) in enumerate(each.strip().splitlines() for each in shown[1::2]):
        tokens, starts = batch.tokens[row], batch.document_starts[row]
        firsts = np.unique(starts).tolist()
        counted = int(batch.loss_mask[row].sum())
        assert numbers_in(facts) == [32, len(firsts), counted]
        ends = [*firsts[1:], 32]
        assert [numbers_in(line) for line in lines if line.startswith("  tokens ")] == [
            [first, end - 1, 0, end - first - 1, first]
            for first, end in zip(firsts, ends, strict=True)
        ]
        shown_text = "".join(line.strip() for line in lines if line.startswith("    "))
        assert (
            shown_text.count("{<|endoftext|>}") == 32 - counted == (tokens == tokenizer.eod).sum()
        )
        whole = tokenizer.decode(tokens.tolist()).replace(" ", "")
        assert re.sub("[{} ]", "", shown_text) == whole
        assert lines[-1].endswith(repr(tokenizer.decode([batch.labels[row, -1]])))


def test_statistics_of_gpt2(capsys: Capture, documents: Documents, tmp_path: Path) -> None:
    words = ["--data-path", documents[0], "--seq-length", "32", "--samples", "0"]
    rows = table(printed(capsys, *words, "--statistics", "400", "--eod-mask-loss"))
    share = 100 * 300 / IndexedDataset(documents[0]).num_tokens
    assert rows["end marks"] == [pytest.approx(share, abs=0.5), pytest.approx(share, abs=0.01)]
    assert sum(rows["end marks"]) + sum(rows["tokens that count in the loss"]) == pytest.approx(200)
    assert 50 < rows["samples of several documents"][0] < 100
    assert table(printed(capsys, *words))["tokens that count in the loss"] == [100, 100]
    write_data_of_tokenizer(tmp_path / "q", [[*[50] * 9, 260]] * 600)  # a tenth are marks
    blend = [words[0], "3", words[1], "1", str(tmp_path / "q"), *words[2:]]
    rows, share = table(printed(capsys, *blend)), 0.75 * share + 0.25 * 10
    assert rows["end marks"] == [pytest.approx(share, abs=0.5), pytest.approx(share, abs=0.01)]


REFUSED = """
sentences --data-path nowhere | sentences --samples -1 | sentences --split 0,1,1
sentences --mask-prob 0.9 | sentences --eod-mask-loss | documents --split 0,1,1
documents --seq-length 9999 | documents --vocab-file nowhere
"""


@pytest.mark.parametrize(("row", "flag"), by_last_flag(REFUSED))
def test_refusals(request: pytest.FixtureRequest, row: str, flag: str) -> None:
    kind, *words = row.split()
    given = ["--data-path", request.getfixturevalue(kind)[0], "--statistics", "5"]
    given += ["--seq-length", "64", *words]
    assert refused(lambda each: main(each, {}), given) == flag


def test_it_runs_as_a_program_without_torch(sentences: Sentences) -> None:
    program = str(ROOT / "tools" / "inspect_data.py")
    words = ["--data-path", sentences[0], "--samples", "1", "--statistics", "10"]
    command = [sys.executable, "-X", "importtime", program, *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "sample 0" in ended.stdout
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)
