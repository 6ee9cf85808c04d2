"""The paper's smallest models at their real size: trained at t = 2, read at t = 1, exported."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.format import read_manifest, step_folders
from megatron.checkpoint.load import verify
from megatron.data.bert import open_bert_splits
from megatron.data.gpt2 import open_splits
from megatron.data.indexed import token_dtype
from megatron.data.sources import open_corpus
from megatron.data.tokenizer import build_tokenizer
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, mean_losses
from tests.data.samples import write_data

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
SPLIT = "3,1,0"
GPT2_VOCABULARY = 50_257
GPT2_PARAMETERS = 354_823_168  # 12 L h^2 + 13 L h + (v + s) h + 2 h, as OpenAI's of this size
BERT_VOCABULARY = 30_522
BERT_PARAMETERS = 336_226_108  # as transformers' BertForPreTraining of BERT-Large
BERT_TOKENIZER = "BertWordPieceLowerCase"


def write_pages(prefix: Path, data: Path) -> tuple[str, str]:
    """(the data set, the vocabulary): sentences of real web pages in the ids of BERT's own."""
    vocabulary = str(data / "bert" / "vocab.txt")
    command = [sys.executable, "tools/preprocess_data.py", "--split-sentences"]
    command += ["--input", str(data / "neardup" / "c4_sample.jsonl.gz")]
    command += ["--tokenizer-type", BERT_TOKENIZER, "--vocab-file", vocabulary]
    subprocess.run([*command, "--output-prefix", str(prefix)], cwd=ROOT, check=True)
    return f"{prefix}_text_sentence", vocabulary


def pretrain(program: str, preset: str, *words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", program, f"--preset=scripts/presets/{preset}.toml"]
    command += ["--tensor-model-parallel-size=2", "--micro-batch-size=1", "--global-batch-size=1"]
    command += [f"--train-iters={STEPS}", "--lr-decay-iters=3"]
    # Without warm-up the first steps of Adam need a lower rate than the preset's.
    command += ["--lr=2e-6", "--min-lr=2e-6", "--lr-warmup-iters=0"]
    # Dropout of attention is several times slower on a CPU, and fp16 brings nothing there.
    command += ["--no-fp16", "--no-bf16", "--attention-dropout=0", "--hidden-dropout=0"]
    command += ["--log-interval=1", "--eval-iters=1", f"--split={SPLIT}", *words]
    subprocess.run(command, cwd=ROOT, check=True)


def serial_loss(open_data: Callable[..., tuple[Any, ...]], prefix: str, path: Path) -> float:
    """The validation loss of the checkpoint in one process."""
    mesh = serial_mesh()
    seed = read_manifest(path)["config"]["training"]["seed"]  # fixes the order of samples
    corpus = open_corpus([prefix], tokenizer=None)
    _, validation, _ = open_data(corpus, split=SPLIT, seed=seed)
    model = load_model(verify(path, mesh), mesh)
    return sum(mean_losses(model, model, validation, 1, 1, mesh).values())


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "checkpoints"
    # Gigabytes, which pytest would keep.
    for folder in ("checkpoints", "exported"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)


def check(
    save: Path, parameters: int, first: float, learnt: str, open_data: Any, prefix: str
) -> None:
    """A run that knew nothing at its first step, with a loss of `first`, and whose loss of this
    name falls; open_data: (corpus, split=, seed=)."""
    facts = json.loads((save / "run.json").read_text())
    assert facts["parameters"] == parameters
    assert facts["layout"] == {"tensor_parallel_size": 2, "data_parallel_size": 1}
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == STEPS
    assert steps[0]["loss"] == pytest.approx(first, abs=0.8), "it knows nothing yet"
    losses = [line[learnt] for line in steps]
    assert losses == sorted(losses, reverse=True), "it learns"
    (validation_loss,) = (line["validation_loss"] for line in lines if "validation_loss" in line)
    alone = serial_loss(open_data, prefix, step_folders(save)[0])
    assert alone == pytest.approx(validation_loss, rel=1e-5)


@pytest.mark.sweep
def test_gpt2_355m_trains_at_2_and_is_the_same_model_at_1(tmp_path: Path, save: Path) -> None:
    # Small ids are far more frequent, so that there is something to learn.
    prefix, random = tmp_path / "ids_text_document", np.random.default_rng(0)
    tokens = GPT2_VOCABULARY * random.random((40, 256)) ** 6
    tokens[:, -1] = eod = GPT2_VOCABULARY - 1
    ids = tokens.astype(token_dtype(GPT2_VOCABULARY))
    write_data(prefix, ids, vocab_size=GPT2_VOCABULARY, eod=eod)
    places = (f"--data-path={prefix}", f"--save={save}", "--seq-length=1024")
    pretrain("pretrain_gpt2.py", "gpt2_355m", *places)
    open_data = partial(open_splits, seq_length=1024)
    check(save, GPT2_PARAMETERS, np.log(GPT2_VOCABULARY), "loss", open_data, str(prefix))


@pytest.mark.sweep
def test_bert_336m_trains_at_2_and_exports(tmp_path: Path, save: Path, test_data: Path) -> None:
    prefix, vocabulary = write_pages(tmp_path / "pages", test_data)
    places = (f"--data-path={prefix}", f"--save={save}")
    pretrain("pretrain_bert.py", "bert_336m", *places)
    open_data = partial(
        open_bert_splits,
        tokenizer=build_tokenizer(BERT_TOKENIZER, vocabulary, None),
        seq_length=512,
        mask_prob=0.15,
        short_seq_prob=0.1,
        max_ngram_size=3,
    )
    # The order of two segments is one bit more that it does not know; that of so few samples is
    # learnt by heart, and each is in the way of the next.
    first = np.log(BERT_VOCABULARY) + np.log(2)
    check(save, BERT_PARAMETERS, first, "mlm_loss", open_data, prefix)
    # The export ends with the logits of both heads in both programs, or fails.
    command = [sys.executable, "tools/convert_hf.py", "export"]
    command += ["--from", str(save), "--output", str(tmp_path / "exported")]
    subprocess.run(command, cwd=ROOT, check=True)
