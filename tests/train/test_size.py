"""GPT-2 355M of the paper's table 2 with the real vocabulary: trained at t = 2, read at t = 1."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.config.checkpoints import read_manifest, step_folders
from megatron.data.gpt2 import open_splits
from megatron.data.indexed import IndexedDatasetWriter, token_dtype
from megatron.data.sources import open_corpus
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, mean_losses
from megatron.train.objectives import NextToken

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, SEQUENCE, STEPS = 50_257, 1024, 3
SPLIT = "3,1,0"
PARAMETERS = 354_823_168  # 12 L h^2 + 13 L h + (v + s) h + 2 h, as OpenAI's model of this size


def write_data(prefix: str) -> None:
    """Documents of which small ids are far more frequent, so that there is something to learn."""
    random = np.random.default_rng(0)
    documents, length = 40, 256
    tokens = (VOCABULARY * random.random(documents * length) ** 6).astype(token_dtype(VOCABULARY))
    tokens[length - 1 :: length] = VOCABULARY - 1
    with IndexedDatasetWriter(prefix, tokens.dtype) as writer:
        writer.add(tokens, np.full(documents, length, np.int32))
        writer.commit(
            tokenizer_type="GPT2BPETokenizer",
            tokenizer_fingerprint="ids that are no text",
            vocab_size=VOCABULARY,
            eod=VOCABULARY - 1,
        )


def pretrain(prefix: str, save: Path) -> tuple[float, int]:
    """Run the program; (wall seconds, peak memory in bytes of the largest of its processes)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "pretrain_gpt2.py", "--preset=scripts/presets/gpt2_355m.toml"]
    command += ["--tensor-model-parallel-size=2", "--micro-batch-size=1", "--global-batch-size=1"]
    command += [f"--seq-length={SEQUENCE}", f"--train-iters={STEPS}"]
    # Without warm-up the first steps of Adam need a lower rate than the preset's.
    command += ["--lr=2e-6", "--min-lr=2e-6", "--lr-warmup-iters=0"]
    # Dropout of attention is several times slower on a CPU, and fp16 brings nothing there.
    command += ["--no-fp16", "--no-bf16", "--attention-dropout=0", "--hidden-dropout=0"]
    command += ["--log-interval=1", "--eval-iters=1", f"--split={SPLIT}"]
    command += [f"--data-path={prefix}", f"--save={save}"]
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return time.monotonic() - start, 1024 * usage.ru_maxrss


def serial_loss(prefix: str, checkpoint: Path) -> float:
    mesh = serial_mesh()
    model = load_model(checkpoint, mesh)
    corpus = open_corpus([prefix], tokenizer=None)
    seed = read_manifest(checkpoint)["config"]["training"]["seed"]  # fixes the order of samples
    _, validation, _ = open_splits(corpus, split=SPLIT, seq_length=SEQUENCE, seed=seed)
    assert validation is not None
    return mean_losses(model, NextToken(), validation, 1, 1, mesh)["loss"]


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "checkpoints"
    # Gigabytes, which pytest would keep.
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)


@pytest.mark.slow
def test_355m_trains_at_2_and_is_the_same_model_at_1(tmp_path: Path, save: Path) -> None:
    prefix = str(tmp_path / "ids_text_document")
    write_data(prefix)
    seconds, peak = pretrain(prefix, save)
    facts = json.loads((save / "run.json").read_text())
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    (validation_loss,) = (line["validation_loss"] for line in lines if "validation_loss" in line)
    assert facts["parameters"] == PARAMETERS
    assert facts["layout"] == {"tensor_parallel_size": 2, "data_parallel_size": 1}

    losses = [line["loss"] for line in steps]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(np.log(VOCABULARY), abs=0.5), "it knows nothing yet"
    assert losses == sorted(losses, reverse=True), "it learns"

    checkpoint = step_folders(save)[0]
    loss = serial_loss(prefix, checkpoint)
    assert loss == pytest.approx(validation_loss, rel=1e-5)

    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    times = ", ".join(f"{SEQUENCE / line['tokens_per_second']:.1f}" for line in steps)
    print(f"\n{seconds:.0f} s in all, seconds per step {times}")
    print(f"peak memory of a process {peak / 1e9:.2f} GB, checkpoint {size / 1e9:.2f} GB")
    print(f"training loss {losses}; validation loss {validation_loss} at t = 2, {loss} at t = 1")
