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
from numpy.typing import NDArray

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


def draw(count: int, vocabulary: int) -> NDArray[Any]:
    """Ids of which small ones are far more frequent, so that there is something to learn."""
    random = np.random.default_rng(0)
    return (vocabulary * random.random(count) ** 6).astype(token_dtype(vocabulary))


def write_documents(prefix: Path) -> None:
    documents, length, eod = 40, 256, GPT2_VOCABULARY - 1
    tokens = draw(documents * length, GPT2_VOCABULARY)
    tokens[length - 1 :: length] = eod
    write_data(prefix, tokens.reshape(documents, length), vocab_size=GPT2_VOCABULARY, eod=eod)


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


def read_lines(save: Path) -> tuple[list[dict[str, float]], float]:
    """(the lines of the steps, the validation loss) of a run's record."""
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    (validation_loss,) = (line["validation_loss"] for line in lines if "validation_loss" in line)
    return [line for line in lines if "loss" in line], validation_loss


def serial_loss(open_data: Callable[..., tuple[Any, ...]], prefix: str, path: Path) -> float:
    """The validation loss of the checkpoint in one process; open_data: (corpus, split=, seed=)."""
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


def check(save: Path, parameters: int, first: float) -> Path:
    """The checkpoint of a run that knew nothing at its first step: a loss of `first`."""
    facts, (steps, _) = json.loads((save / "run.json").read_text()), read_lines(save)
    assert facts["parameters"] == parameters
    assert facts["layout"] == {"tensor_parallel_size": 2, "data_parallel_size": 1}
    losses = [line["loss"] for line in steps]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(first, abs=0.8), "it knows nothing yet"
    return step_folders(save)[0]


@pytest.mark.sweep
def test_gpt2_355m_trains_at_2_and_is_the_same_model_at_1(tmp_path: Path, save: Path) -> None:
    prefix = tmp_path / "ids_text_document"
    write_documents(prefix)
    places = (f"--data-path={prefix}", f"--save={save}", "--seq-length=1024")
    pretrain("pretrain_gpt2.py", "gpt2_355m", *places)
    checkpoint = check(save, GPT2_PARAMETERS, np.log(GPT2_VOCABULARY))
    losses = [line["loss"] for line in read_lines(save)[0]]
    assert losses == sorted(losses, reverse=True), "it learns"
    loss = serial_loss(partial(open_splits, seq_length=1024), str(prefix), checkpoint)
    assert loss == pytest.approx(read_lines(save)[1], rel=1e-5)


@pytest.mark.sweep
def test_bert_336m_trains_at_2_and_exports(tmp_path: Path, save: Path, test_data: Path) -> None:
    prefix, vocabulary = write_pages(tmp_path / "pages", test_data)
    places = (f"--data-path={prefix}", f"--save={save}")
    pretrain("pretrain_bert.py", "bert_336m", *places)
    # The order of two segments is one bit more that it does not know.
    checkpoint = check(save, BERT_PARAMETERS, np.log(BERT_VOCABULARY) + np.log(2))
    samples = partial(
        open_bert_splits,
        tokenizer=build_tokenizer(BERT_TOKENIZER, vocabulary, None),
        seq_length=512,
        mask_prob=0.15,
        short_seq_prob=0.1,
        max_ngram_size=3,
    )
    # The order of so few samples is learnt by heart, and each is in the way of the next.
    losses = [line["mlm_loss"] for line in read_lines(save)[0]]
    assert losses == sorted(losses, reverse=True), "it learns"
    loss = serial_loss(samples, prefix, checkpoint)
    assert loss == pytest.approx(read_lines(save)[1], rel=1e-5)
    # The export ends with the logits of both heads in both programs, or fails.
    command = [sys.executable, "tools/convert_hf.py", "export"]
    command += ["--from", str(save), "--output", str(tmp_path / "exported")]
    subprocess.run(command, cwd=ROOT, check=True)
