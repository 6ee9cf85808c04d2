"""Each example as a program, and beside plain torch in one process, in fp64."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import mlp_2d, own_dataset, own_loop, tensor_parallel_mlp, zero_own_model
from examples.zero_own_model import Model
from megatron.api import (
    GPT2Config,
    GradientBuckets,
    MasterWeights,
    Mesh,
    OptimizerConfig,
    RandomText,
    Samples,
    build_state,
    learning_rate,
    materialize,
    serial_mesh,
)
from tests import plain, threads
from tests.dist import Pool, on_ranks
from tests.programs import run_script
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks, scatter_weights, whole_slices, whole_weights, wide

ROOT = Path(__file__).resolve().parents[2]
# Others are no programs, are run below, or have a test file of their own beside this one.
OTHERS = {"own_model", "mlp_2d", "zero_own_model"}
EXAMPLES = sorted(
    file
    for file in (ROOT / "examples").glob("*.py")
    if file.stem not in OTHERS and not Path(__file__).with_name(f"test_{file.name}").exists()
)
STEPS = 4
TEXT = own_dataset.Characters(bytes(range(256)) * 3, seed=1)


def printed(file: str | Path, *words: object, folder: Path) -> np.ndarray:
    """The numbers of each step that the program prints on two processes."""
    text = run_script(ROOT / file, *words, world=2, folder=folder)
    lines = [line for line in text.splitlines() if line.startswith("step")]
    return np.array([[*map(float, re.findall(r"\d+(?:\.\d+)?", line))] for line in lines])


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_prints_the_same_at_each_layout(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    axis = "--tensor" if '"--tensor"' in text else "--pipeline"
    start = partial(printed, file, folder=tmp_path)
    found, other = start(axis, 2, "--steps", 3), [axis, 1]
    assert len(found) == 3
    assert ('"--save"' in text) == (file.stem == "own_loop")
    if file.stem == "own_loop":  # and it goes on where it ended
        other += ["--save", tmp_path / "save"]
        assert len(start(axis, 2, "--steps", 1, *other[2:])) == 1
        found = found[1:]
    assert start(*other, "--steps", 3) == pytest.approx(found, abs=2e-4)


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
        # The gradient of a key's bias is zero but for rounding, which Adam divides by itself.
        rows = [0, 2] if name.endswith("qkv.bias") else slice(None)
        close(found.after[name][rows], weight.detach()[rows], msg=name)
    if found.logits is not None:
        close(found.logits, expected.logits, atol=1e-9)


def test_another_seed_is_other_samples() -> None:
    other = own_dataset.Characters(bytes(range(256)) * 3, seed=2)
    assert not np.array_equal(TEXT.batch(range(4)).tokens, other.batch(range(4)).tokens)


@pytest.mark.parametrize("name", GPT2S)
def test_gpt2_is_that_of_plain_torch(gloo: Pool, name: str) -> None:
    for tensor in (1, 2):
        for found in gloo.run(2, train_gpt2, name, tensor):
            assert_equal(found, plain_gpt2(name, found.before))


WIDTH = 8
MODES = [
    ("1d", {"tensor": 4}),
    ("2d", {"row": 2, "column": 2}),
    ("2d", {"data": 2, "row": 2, "column": 2}),
    ("2.5d", {"depth": 2, "row": 2, "column": 2}),
    ("3d", {"weight": 2, "input": 2, "output": 2}),
]


@cache
def initial_mlp_weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    weights = whole_weights(mlp_2d.build(serial_mesh(), WIDTH))
    return {name: each.double() for name, each in weights.items()}


def train_mlp_2d(mesh: Mesh, weights: dict[str, Tensor]) -> None:
    with torch.device("meta"):
        model = mlp_2d.build(mesh, WIDTH)
    materialize(model, device=mesh.device, dtype=torch.float64, seed=None)
    scatter_weights(model, weights)
    twin = mlp_2d.plain_twin(model, WIDTH)
    losses = list(mlp_2d.train(mesh, model, twin, WIDTH, STEPS))
    assert len({loss for loss, _ in losses}) == STEPS
    for loss, expected in losses:
        assert loss == pytest.approx(expected, rel=1e-12)
    after = dict(twin.named_parameters())
    torch.testing.assert_close(whole_weights(model), after, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("mode", "sizes"), MODES, ids=str)
def test_the_mlp_of_every_mode_is_plain_torch(mode: str, sizes: dict[str, int]) -> None:
    threads.run(mode, sizes, train_mlp_2d, initial_mlp_weights())


@pytest.mark.parametrize(("processes", "mode"), [(1, "1d"), (4, "2d")])
def test_mlp_2d_prints_both_losses_and_what_ranks_hold(
    tmp_path: Path, processes: int, mode: str
) -> None:
    words = ("--mode", mode, "--width", 8, "--steps", 2)
    text = run_script(Path(mlp_2d.__file__), *words, world=processes, folder=tmp_path)
    losses = re.findall(r"loss (\S+) \| plain torch (\S+)", text)
    assert len(losses) == 2
    assert all(float(loss) == pytest.approx(float(other), abs=2e-4) for loss, other in losses)
    held = re.findall(r"rank \d+ holds (\d+) parameters", text)
    assert len(held) == processes
    least, vectors = 2 * mlp_2d.INSIDE * 8 * 8 // processes, 8 + 3 * mlp_2d.INSIDE * 8
    assert all(least < int(each) <= least + vectors for each in held)


@on_ranks(2)
def test_a_model_on_meta_is_filled_one_weight_at_a_time() -> None:
    mesh = mesh_of_ranks(1)
    values = Model().double()
    with torch.device("meta"):
        model = Model().double()
    gradients = GradientBuckets.for_master_weights(model, mesh=mesh, zero_stage=3)
    assert not any(each.is_meta for each in model.parameters())
    optimizer = MasterWeights(gradients, OptimizerConfig())
    optimizer.fill((name, each) for name, each in values.named_parameters())
    refusal(lambda: optimizer.fill([("blocks.7.up.bias", torch.zeros(256))]), "blocks.7.up.bias")
    whole, expected = whole_slices(optimizer.weights()), zero_own_model.evaluate(mesh, values)
    for name, each in values.named_parameters():
        assert torch.equal(whole[f"model.{name}"], each), name
    assert zero_own_model.evaluate(mesh, model) == pytest.approx(expected, rel=1e-12)
    narrow = MasterWeights(
        GradientBuckets.for_master_weights(Model().bfloat16(), mesh=mesh), OptimizerConfig()
    )
    narrow.fill(values.named_parameters())
    for name, master in whole_slices(narrow.masters()).items():
        assert torch.equal(master, dict(values.named_parameters())[name].float()), "not rounded"


def test_zero_own_model_is_a_plain_loop_and_goes_on_at_another_stage(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, mesh, expected = Model(), serial_mesh(), []
    optimizer = plain.adamw(model, OptimizerConfig(weight_decay=0.1))
    for step in range(STEPS):
        numbers = range(step * zero_own_model.BATCH, (step + 1) * zero_own_model.BATCH)
        loss = zero_own_model.loss_of(model, mesh, numbers)
        norm = plain.update(optimizer, loss, zero_own_model.CLIP)
        expected.append((step + 1, loss.item(), norm.item()))
    start = partial(printed, "examples/zero_own_model.py", "--save", tmp_path, folder=tmp_path)
    found = [*start("--zero-stage", 3, "--steps", 2), *start("--zero-stage", 1, "--steps", STEPS)]
    assert np.array(found) == pytest.approx(np.array(expected), abs=2e-4)
