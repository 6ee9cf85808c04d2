"""Figure 3 of the Colossal-AI paper: what is planned of every tensor-parallel mode equals what its
formula says and what ranks hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.parallel.kernels import use_cpu_kernels
from megatron.train.state import build_state
from megatron.train.step import count, forward_backward, train_step
from tests.dist import Pool
from tests.tiny import live_memories
from tests.tools.plan.counted import batches
from tools.layouts.layout import parse_layout
from tools.layouts.work import Meter
from tools.plan import __main__ as plan
from tools.plan import figure3
from tools.plan.figure3 import COUNTED, LAYOUTS, Model, coefficients, hops, sent

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SMALL = Model(hidden=256, heads=8, sequence=128, batch=8, vocabulary=4000, device="cpu")
DEPTH = 3


@pytest.mark.parametrize("layout", [*LAYOUTS, "tensor=9:2d", "tensor=27:3d"])
def test_a_layer_sends_what_the_formula_says(layout: str) -> None:
    n, h, width = COUNTED.batch * COUNTED.sequence, COUNTED.hidden, 4
    tokens, weights = coefficients(layout)
    expected = width * (tokens * n * h + weights * h**2)
    step, calls = COUNTED.step(layout, 1), COUNTED.layer(layout)
    if (mode := parse_layout(layout).mode) != "1d":
        # Two norms: mean and squares of every token gathered, two sums of them all-reduced.
        side, own = step.config.parallel.side, n / step.batch_ranks
        expected += width * 2 * (2 * own * (side - 1) + 2 * 2 * own * (side - 1) / side)
    assert sent(calls, step) == pytest.approx(expected, abs=sum(calls.values()))
    # Four are of norms; SUMMA goes in as many steps as a side has ranks.
    side = step.config.parallel.side
    number = {"1d": 4, "3d": 32 + 4}.get(mode, 24 * side + 4)
    assert sum(calls.values()) == number
    if mode == "3d":
        assert hops(calls, step) == 38 * (side - 1)


def held_by_rank(layouts: list[str]) -> list[tuple[int, int]]:
    return [held(each) for each in layouts]


def held(layout: str) -> tuple[int, int]:
    """Bytes of weights, gradients and the optimizer's state that are there after a step, and of
    what is there between a forward and its backward."""
    config = SMALL.step(layout, DEPTH).config
    mesh, samples = parse_layout(layout).mesh(CPU), batches(config)
    before = sum(live_memories().values())
    state = build_state(config.model, mesh, SMALL.vocabulary, seed=0, dtype=torch.float32)
    train_step(state, samples, 1e-3)
    lasting = sum(live_memories().values()) - before
    counts, kept, model = count(state, samples), list[int](), state.model
    there = [*model.parameters(), *(bucket.gradients for bucket in state.gradients.buckets)]
    meter, loss = Meter(mesh, there, follows_real=True), model.loss

    def last(*arguments: Any) -> Any:
        terms = loss(*arguments)
        terms.register_hook(lambda _: kept.append(meter.live))  # when the backward begins
        return terms

    model.loss = last
    with meter:
        forward_backward(state, samples, counts)
    return lasting, kept[0]


@pytest.mark.skipif(not use_cpu_kernels, reason="torch's attention keeps other tensors")
@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_hold_what_is_planned(gloo: Pool, ranks: int) -> None:
    layouts = [each for each in LAYOUTS if parse_layout(each).ranks == ranks]
    for found in gloo.run(ranks, held_by_rank, layouts):
        for layout, (lasting, kept) in zip(layouts, found, strict=True):
            step = SMALL.step(layout, DEPTH)
            assert lasting == pytest.approx(sum(step.lasting.values()), rel=0.01), layout
            assert kept == pytest.approx(step.activations, rel=0.02), layout


def test_the_command_finds_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four GPUs, of which it makes a picture; a rank's memory is divided by four."""
    monkeypatch.setattr(figure3, "LAYOUTS", LAYOUTS[:2])
    monkeypatch.setattr(figure3, "CUBES", {})
    file, picture = tmp_path / "figure3.json", tmp_path / "figure3.png"
    words = ["figure3", "--json", str(file), "--picture", str(picture)]
    assert plan.main(words, {}) == 0
    found = json.loads(file.read_text())
    committed = json.loads((ROOT / "docs" / "results" / "figure3.json").read_text())
    for name in ("memory_per_rank", "largest_model", "sent_per_layer"):
        assert found[name] == [row for row in committed[name] if row["gpus"] == 4], name
    assert found["model"] == committed["model"]
    assert picture.read_bytes().startswith(b"\x89PNG")
