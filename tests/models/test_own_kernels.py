"""Norms and activations of transformers on our kernels compute what transformers does; those of
another formula stay as they are."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from megatron.huggingface.replacements import use_own_kernels
from megatron.parallel.compare import KeepFP64

WIDTH = 96


class OnePlusWeight(LlamaRMSNorm):
    """With Llama's attributes, as a later version of its class could be."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x * torch.rsqrt(x.pow(2).mean(-1, True) + self.variance_epsilon)


class Gated(LlamaRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else gate * y


KNOWN: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(WIDTH, 1e-3),
    "Llama's norm": lambda: LlamaRMSNorm(WIDTH, 1e-3),
    "Qwen3's norm": lambda: Qwen3RMSNorm(WIDTH, 1e-3),
    "MT5's norm, by other code": lambda: MT5LayerNorm(WIDTH, 1e-3),
    "GPT-2's GELU": NewGELUActivation,
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "layer norm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "Gemma's norm": lambda: GemmaRMSNorm(WIDTH),
    "one plus the weight": lambda: OnePlusWeight(WIDTH),
    "Olmo2's norm, which rounds after the weight": lambda: Olmo2RMSNorm(WIDTH),
    "a norm with a gate": lambda: Gated(WIDTH),
    "another GELU": GELUTanh,
}


def pair(make: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """(as transformers has it, on our kernels), with the same weights."""
    torch.manual_seed(0)
    theirs = nn.Sequential(make())
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    theirs.to(dtype)
    ours = deepcopy(theirs)
    use_own_kernels(ours)
    return theirs, ours


@pytest.mark.parametrize("name", KNOWN)
def test_known_modules_on_own_kernels_equal_transformers(name: str) -> None:
    theirs, ours = pair(KNOWN[name], torch.float64)
    assert type(ours[0]).forward is not type(theirs[0]).forward
    x, dy = torch.randn(2, 3, 5, WIDTH, dtype=torch.float64).unbind()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    with KeepFP64():
        found = [model(leaf) for model, leaf in zip((theirs, ours), leaves, strict=True)]
        for each in found:
            each.backward(dy)
    pairs: list[list[Any]] = [found, [leaf.grad for leaf in leaves]]
    both = zip(theirs.parameters(), ours.parameters(), strict=True)
    pairs += [[one.grad, other.grad] for one, other in both]
    for one, other in pairs:
        assert (one - other).norm() <= 1e-13 * one.norm()


@pytest.mark.parametrize("name", KNOWN)
def test_in_bf16_rounded_as_there(name: str) -> None:
    """An RMSNorm's output is rounded where transformers rounds it, before the weight and after
    it; GELU, which transformers rounds at every step, differs by that."""
    theirs, ours = pair(KNOWN[name], torch.bfloat16)
    x = torch.randn(64, 3, WIDTH, dtype=torch.bfloat16).requires_grad_()
    expected, found = theirs(x), ours(x)
    assert found.dtype == expected.dtype
    if "norm" in name:
        assert (found != expected).float().mean() < 1e-3  # ties, which another order of sums turns
    else:
        torch.testing.assert_close(found, expected, rtol=2**-5, atol=2**-8)


@pytest.mark.parametrize("name", OTHERS)
def test_modules_of_another_formula_stay(name: str) -> None:
    theirs, ours = pair(OTHERS[name], torch.float64)
    assert type(ours[0]) is type(theirs[0])
