"""Attention with dropout by coordinates in flex_attention's kernel, beside fp64 on a CPU."""

from math import prod

import pytest
import torch

from megatron.parallel.flex_dropout import flex_dropout
from tests.parallel.test_flex_dropout import CASES, Case, draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("case", "dtype", "bound"),
    [*((case, torch.bfloat16, 2e-2) for case in CASES), (CASES[0], torch.float32, 5e-3)],
    ids=str,
)
def test_it_is_as_exact_as_its_dtype(case: Case, dtype: torch.dtype, bound: float) -> None:
    """fp32 at the precision of TF32, which the compiler's kernel may multiply in."""
    torch._dynamo.reset()
    inputs, keys, d_out = draw(case)
    rounded = [each.detach().to(dtype) for each in inputs]
    wide = [each.double().requires_grad_() for each in rounded]
    expected = case.formula(wide, keys)
    on_gpu = [each.to(CUDA).requires_grad_() for each in rounded]
    mask = None if case.mask is None else case.mask.to(CUDA)
    compiled = torch.compile(flex_dropout, fullgraph=True, dynamic=False)
    found = compiled(*on_gpu, mask, case.mask is None, case.p, keys.to(CUDA))
    wanted = (expected, *torch.autograd.grad(expected, wide, d_out))
    own = torch.autograd.grad(found, on_gpu, d_out.to(CUDA, dtype))
    for its, value in zip((found, *own), wanted, strict=True):
        assert (its.cpu().double() - value).norm() < bound * value.norm()
    assert (found.cpu()[expected == 0] == 0).all()


def test_no_probabilities_are_stored() -> None:
    """Where they would take 512 MiB."""
    torch._dynamo.reset()
    shape = (1, 4, 8192, 64)
    inputs = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    inputs = [each.requires_grad_() for each in inputs]
    keys = torch.randint(2**60, shape[:3], device=CUDA)
    compiled = torch.compile(flex_dropout, fullgraph=True, dynamic=False)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compiled(*inputs, None, True, 0.1, keys).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 20 * 2 * prod(shape) < 2 * 4 * 8192**2 / 4
