"""Attention with dropout by coordinates in torch's flex_attention: the formula, in fp64 on a CPU,
where it is compiled without a kernel."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from megatron.parallel import flex_dropout
from megatron.parallel.dropout import row_keys
from megatron.parallel.flex_dropout import causal, flex_or_blocks
from megatron.parallel.layers import AttentionCore
from megatron.parallel.mesh import Axis, serial_mesh
from tests.parallel.test_block_attention import (
    BATCH,
    HEADS,
    SIZE,
    document_mask,
    formula,
    key_mask,
    keys_of,
)

LENGTH = 133  # two blocks, of which the second is not full


@dataclass(frozen=True)
class Case:
    """mask: None is causal. heads: of queries; those of keys and values are HEADS."""

    name: str
    mask: Tensor | None
    heads: int
    p: float

    def __str__(self) -> str:
        return f"{self.name}-{self.heads}-{self.p}"

    def formula(self, inputs: Sequence[Tensor], keys: Tensor) -> Tensor:
        q, k, v = inputs
        return formula(q, k, v, self.mask, self.p)


CASES = [
    Case("causal", None, 2 * HEADS, 0.5),
    Case("keys", key_mask(LENGTH), HEADS, 0.1),
    Case("documents", document_mask(LENGTH), 2 * HEADS, 0.5),
]


def draw(case: Case) -> tuple[list[Tensor], Tensor, Tensor]:
    """(q, k and v, keys, a gradient of the result) in fp64."""
    generator = torch.manual_seed(0)
    shapes = [(BATCH, heads, LENGTH, SIZE) for heads in (case.heads, HEADS, HEADS, case.heads)]
    *inputs, d_out = (torch.randn(each, generator=generator).double() for each in shapes)
    return [each.requires_grad_() for each in inputs], keys_of(LENGTH, case.heads), d_out


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention refuses there a backward, which it has."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "eager") -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_formula(case: Case) -> None:
    """Queries all of whose keys are dropped included."""
    inputs, keys, d_out = draw(case)
    attend = compiled(flex_dropout.flex_dropout)
    found = attend(*inputs, case.mask, case.mask is None, case.p, keys)
    expected = case.formula(inputs, keys)
    assert case.p < 0.5 or (expected == 0).all(-1).any()
    own, wanted = (torch.autograd.grad(each, inputs, d_out) for each in (found, expected))
    torch.testing.assert_close((found, *own), (expected, *wanted), rtol=1e-14, atol=3e-14)


def test_a_query_that_may_look_nowhere_is_0() -> None:
    inputs, keys, d_out = draw(CASES[0])
    mask = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    mask[1] = False
    found = compiled(flex_dropout.flex_dropout)(*inputs, mask, False, 0.1, keys)
    assert (found[1] == 0).all()
    assert (found[0] != 0).any()
    for each in torch.autograd.grad(found, inputs, d_out):
        assert each.isfinite().all()
        assert (each[1] == 0).all()


def test_a_compiled_rank_drops_what_blocks_drop_in_its_heads() -> None:
    (q, k, v), _, _ = draw(replace(CASES[0], heads=HEADS))
    rows = row_keys(torch.arange(BATCH), torch.arange(LENGTH))
    whole = AttentionCore(serial_mesh(), 5, 0.3, "core")(q, k, v, None, True, rows)
    mesh = replace(serial_mesh(), inner_hidden=Axis("inner_hidden", HEADS, 2))
    core = AttentionCore(mesh, 5, 0.3, "core", drop=flex_or_blocks)
    parts = [each[:, 2:] for each in (q, k, v)]
    found = compiled(core)(*parts, None, True, rows)
    torch.testing.assert_close(found, whole[:, 2:], rtol=1e-14, atol=1e-14)
    assert torch.equal(core(*parts, None, True, rows), whole[:, 2:])  # not compiled


@pytest.mark.parametrize("length", [7, 256, 300])
def test_the_blocks_are_those_of_torch(length: int) -> None:
    device = torch.device("cpu")
    for mask in (None, document_mask(length), key_mask(length)):
        rule, count = causal, None
        if mask is not None:
            whole, count = mask.expand(-1, 1, length, length), len(mask)
            rule = lambda b, h, i, j, whole=whole: whole[b, 0, i, j]  # noqa: E731
        wanted = create_block_mask(rule, count, None, length, length, device=device)
        found = flex_dropout.block_table(mask, mask is None, length, length, device)
        assert found is not None
        for its, expected in zip(found.as_tuple()[:-1], wanted.as_tuple()[:-1], strict=True):
            torch.testing.assert_close(its, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_outside_of_flex_attention_nothing_has_the_size_of_the_scores(case: Case) -> None:
    """And the compiler's kernel takes what is in it: each output has a gradient, by which it is
    multiplied, and no function of a score has a constant tensor."""
    sizes, calls = set[int](), Counter[str]()

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            calls[str(node.target)] += 1
            if node.target is torch.ops.higher_order.flex_attention_backward:
                assert None not in node.args[:7]
            values = node.meta.get("val")
            for each in values if isinstance(values, tuple | list) else [values]:
                sizes.add(each.numel() if isinstance(each, Tensor) else 0)
        for function in graph.children():
            assert not any(node.op == "get_attr" for node in function.graph.nodes)
        return make_boxed_func(graph.forward)

    inputs, keys, d_out = draw(case)
    attend = compiled(flex_dropout.flex_dropout, aot_autograd(fw_compiler=note))
    attend(*inputs, case.mask, case.mask is None, case.p, keys).backward(d_out)
    assert calls["flex_attention"] == calls["flex_attention_backward"] == 2
    assert max(sizes) < BATCH * case.heads * LENGTH**2
