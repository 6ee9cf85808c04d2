"""pretrain.py: every kind of model by --model, also one's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools.data_files import IndexedDatasetWriter

ROOT = Path(__file__).parents[1]
SIZES = (
    *("--num-layers", "1", "--hidden-size", "48", "--num-attention-heads", "12"),
    *("--max-position-embeddings", "32", "--seq-length", "32", "--micro-batch-size", "2"),
    *("--train-iters", "3", "--lr-warmup-iters", "0", "--eval-iters", "0", "--no-bf16"),
    *("--split", "9,1,0", "--log-interval", "1"),
)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], ["gpt2", "bert"]),
        (["--model", "gpt2", "--help"], ["--reset-position-ids", "--activation"]),
        (["--model=bert", "--help"], ["--mask-prob", "--untie-embeddings-and-output-weights"]),
        (["--model", "tests.models.own_kind:KIND", "--help"], ["--key-value-heads"]),
    ],
)
def test_help_names_the_kinds_and_the_flags_of_each(words: list[str], expected: list[str]) -> None:
    ended = run("pretrain.py", *words)
    assert ended.returncode == 0, ended.stderr
    assert all(word in ended.stdout for word in expected)


@pytest.mark.parametrize("words", [[], ["--model", "gpt9"], ["--model", "finetuned"]])
def test_a_kind_that_cannot_be_pretrained_is_refused(words: list[str]) -> None:
    ended = run("pretrain.py", *words)
    assert ended.returncode == 2
    assert "--model" in ended.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten documents of random tokens."""
    prefix, rng = tmp_path_factory.mktemp("data") / "text_document", np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(10):
            tokens = np.append(rng.integers(1, 101, 200), 0).astype(np.uint16)
            writer.add(tokens, np.array([len(tokens)], np.int32))
        writer.commit(
            tokenizer_type="random",
            tokenizer_fingerprint="random",
            vocab_size=101,
            eod=0,
            shuffled=True,
        )
    return prefix


def test_it_trains_as_the_papers_program_and_a_kind_of_ones_own(data: Path, tmp_path: Path) -> None:
    losses = {}
    programs = {
        "gpt2 alone": ["pretrain_gpt2.py"],
        "gpt2": ["pretrain.py", "--model", "gpt2"],
        "own": ["pretrain.py", "--model", "tests.models.own_kind:KIND"],
    }
    for name, words in programs.items():
        record = tmp_path / f"{name}.jsonl"
        ended = run(*words, *SIZES, "--data-path", data, "--metrics-file", record)
        assert ended.returncode == 0, ended.stderr
        lines = map(json.loads, record.read_text().splitlines())
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    assert len(losses["own"]) == 3
    assert losses["gpt2"] == losses["gpt2 alone"] != losses["own"]


def test_a_kind_whose_config_is_of_another_is_refused(data: Path) -> None:
    """Its model would not be built: a checkpoint is read by the kind that its config names."""
    misnamed = ["--model", "tests.models.own_kind:MISNAMED"]
    ended = run("pretrain.py", *misnamed, *SIZES, "--data-path", data)
    assert ended.returncode == 2, ended.stderr
    assert "--model" in ended.stderr
