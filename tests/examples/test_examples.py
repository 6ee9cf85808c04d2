"""Each example as a program, and beside plain torch in one process, in fp64."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import own_dataset, own_loop, tensor_parallel_mlp
from megatron.api import (
    GPT2Config,
    OptimizerConfig,
    RandomText,
    Samples,
    build_state,
    learning_rate,
)
from tests import plain
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, whole_weights

ROOT = Path(__file__).resolve().parents[2]
# Others have a test file of their own beside this one.
EXAMPLES = sorted(
    file
    for file in (ROOT / "examples").glob("*.py")
    if not Path(__file__).with_name(f"test_{file.name}").exists()
)
STEPS = 4
TEXT = own_dataset.Characters(bytes(range(256)) * 3, seed=1)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


def printed(file: Path, *words: str | Path, processes: int = 2) -> list[list[float]]:
    """The numbers of each line that the program prints on so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    ended = run(*launcher, file, *words)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("step")]
    return [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)] for line in lines]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_prints_the_same_at_each_layout(file: Path, tmp_path: Path) -> None:
    helped = run(file, "--help")
    assert helped.returncode == 0, helped.stderr
    axis = "--tensor" if "--tensor" in helped.stdout else "--pipeline"
    found = printed(file, axis, "2", "--steps", "4")
    other = [axis, "1"]
    if "--save" in helped.stdout:  # and it goes on where it ended
        assert len(printed(file, axis, "2", "--steps", "2", "--save", tmp_path)) == 2
        other += ["--save", str(tmp_path)]
        found = found[2:]
    assert np.array(printed(file, *other, "--steps", "4")) == pytest.approx(
        np.array(found), abs=2e-4
    )


@contextmanager
def wide() -> Iterator[None]:
    """What is built inside computes in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Run(NamedTuple):
    steps: list[tuple[float, float]]  # loss, gradient norm
    after: Mapping[str, Tensor]
    before: Mapping[str, Tensor] = {}
    logits: Tensor | None = None  # of the last step


def train_mlp(tensor: int) -> Run:
    mesh = mesh_of_ranks(tensor)
    torch.manual_seed(1)
    with wide():
        model = tensor_parallel_mlp.Residual(mesh)
        before = whole_weights(model)
        steps = list(tensor_parallel_mlp.train(mesh, model, STEPS))
    return Run(steps, whole_weights(model), before)


def plain_mlp(weights: Mapping[str, Tensor]) -> Run:
    hidden, size = tensor_parallel_mlp.HIDDEN, tensor_parallel_mlp.BATCH
    up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
    model = nn.ModuleDict({"norm": nn.LayerNorm(hidden), "up": up, "down": down}).double()
    model.load_state_dict(dict(weights))
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for first in range(0, STEPS * size, size):
        with wide():
            x = tensor_parallel_mlp.draw(range(first, first + size))
        loss = F.mse_loss(x + down(F.gelu(up(model["norm"](x)))), x.flip(-1))
        norm = plain.update(optimizer, loss, tensor_parallel_mlp.CLIP)
        steps.append((loss.item(), norm.item()))
    return Run(steps, dict(model.named_parameters()))


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_mlp_is_that_of_plain_torch(gloo: Pool, tensor: int) -> None:
    for found in gloo.run(2, train_mlp, tensor):
        assert_equal(found, plain_mlp(found.before))


class Example(NamedTuple):
    train: Callable[..., Any]  # state and steps to StepResults
    model: GPT2Config
    optimizer: OptimizerConfig
    lr: Callable[[int], float]
    vocabulary: int
    data: Samples
    batch: int


GPT2S = {
    "own_loop": Example(
        own_loop.train,
        own_loop.MODEL,
        own_loop.OPTIMIZER,
        lambda update: learning_rate(own_loop.OPTIMIZER, update, own_loop.DECAY_STEPS),
        own_loop.VOCABULARY,
        RandomText(vocabulary=own_loop.VOCABULARY, length=own_loop.SEQUENCE, seed=1),
        own_loop.BATCH,
    ),
    "own_dataset": Example(
        lambda state, steps: own_dataset.train(state, TEXT, steps),
        own_dataset.MODEL,
        OptimizerConfig(),
        lambda update: 1e-3,
        256,
        TEXT,
        own_dataset.BATCH,
    ),
}


def train_gpt2(name: str, tensor: int) -> Run:
    example, mesh = GPT2S[name], mesh_of_ranks(tensor)
    config = replace(example.model, hidden_dropout=0.0, attention_dropout=0.0)
    with wide():
        state = build_state(config, mesh, example.vocabulary, seed=1, optimizer=example.optimizer)
        before = whole_weights(state.model)
        results = list(example.train(state, STEPS))
    last = results[-1].outputs
    return Run(
        [(result.loss, result.grad_norm) for result in results],
        whole_weights(state.model),
        before,
        None if last is None else last.logits,
    )


def plain_gpt2(name: str, weights: Mapping[str, Tensor]) -> Run:
    example, steps = GPT2S[name], []
    model = plain.GPT2(weights, example.model.num_attention_heads)
    optimizer = plain.adamw(model, example.optimizer)
    for step in range(STEPS):
        batch = example.data.batch(range(step * example.batch, (step + 1) * example.batch))
        logits = model(batch)
        loss = plain.summed_loss(logits, batch) / batch.labels.size
        norm = plain.update(optimizer, loss, example.optimizer.clip_grad, example.lr(step + 1))
        steps.append((loss.item(), norm.item()))
    return Run(steps, dict(model.named_parameters()), logits=logits)


def assert_equal(found: Run, expected: Run, tolerance: float = 1e-10) -> None:
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(torch.tensor(found.steps), torch.tensor(expected.steps))
    for name, weight in expected.after.items():
        # Of a key's bias the gradient is zero but for rounding, which Adam divides by itself.
        rows = [0, 2] if name.endswith("qkv.bias") else slice(None)
        close(found.after[name][rows], weight.detach()[rows], msg=name)
    if found.logits is not None:
        close(found.logits, expected.logits, atol=1e-9)


@pytest.mark.parametrize("name", GPT2S)
def test_gpt2_is_that_of_plain_torch(gloo: Pool, name: str) -> None:
    for tensor in (1, 2):
        for found in gloo.run(2, train_gpt2, name, tensor):
            assert_equal(found, plain_gpt2(name, found.before))
