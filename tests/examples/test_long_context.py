"""Attention of one's own module over a context axis, beside the same in plain torch."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import long_context
from examples.long_context import BATCH, CLIP
from megatron.api import build_mesh, serial_mesh
from tests import plain
from tests.dist import Pool
from tests.programs import run_script

LENGTH, STEPS = 32, 3


class PlainCore(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None, is_causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)


def train(size: int, kind: str) -> tuple[list[tuple[float, float]], dict[str, Tensor], Tensor]:
    """(losses and norms, weights, positions of this rank's tokens)."""
    mesh = build_mesh({"context": size}, "cpu", cp_comm_type=kind)
    torch.manual_seed(1)
    model = long_context.Model(mesh, LENGTH).double()
    steps = list(long_context.train(mesh, model, STEPS))
    return steps, {name: each.detach() for name, each in model.named_parameters()}, model.positions


@pytest.fixture(scope="module")
def expected() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    torch.manual_seed(1)
    model = long_context.Model(serial_mesh(), LENGTH).double()
    model.core = PlainCore()
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for first in range(0, STEPS * BATCH, BATCH):
        tokens, labels = long_context.draw(range(first, first + BATCH), LENGTH)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        norm = plain.update(optimizer, loss, CLIP)
        steps.append((loss.item(), norm.item()))
    return steps, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize(("size", "kind"), [(4, "p2p"), (2, "p2p"), (4, "a2a")], ids=str)
def test_ring_attention_in_a_module_of_torch_is_plain_torch(
    gloo: Pool, expected: tuple[list[tuple[float, float]], dict[str, Tensor]], size: int, kind: str
) -> None:
    """Two of four ranks share a sample, and the others read other samples."""
    ranks = gloo.run(4, train, size, kind)
    for steps, weights, _ in ranks:
        assert np.array(steps) == pytest.approx(np.array(expected[0]), rel=1e-11)
        torch.testing.assert_close(weights, expected[1], rtol=1e-9, atol=1e-10)
    held = torch.cat([positions for *_, positions in ranks[:size]])
    assert held.sort()[0].tolist() == [*range(LENGTH)]


def test_the_program_prints_the_same_on_four_ranks(tmp_path: Path) -> None:
    """And says how many tokens a rank has."""
    file, words = Path(long_context.__file__), ("--seq-length", LENGTH, "--steps", 2)
    alone = run_script(file, *words, folder=tmp_path)
    ring = run_script(file, *words, "--cp-comm-type", "p2p", world=4, folder=tmp_path)
    found = []
    for text, held in ((alone, LENGTH), (ring, LENGTH // 4)):
        rows = [re.findall(r"\d+(?:\.\d+)?", line) for line in text.splitlines() if "loss" in line]
        assert [[*map(int, row[3:])] for row in rows] == [[held, LENGTH]] * 2
        found.append([float(each) for row in rows for each in row[:3]])
    assert found[1] == pytest.approx(found[0], abs=2e-4)
