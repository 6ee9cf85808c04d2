"""GeLU by the sigmoid, beside torch's by the tanh."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.gelu import gelu


def both(x: Tensor, approximate: str) -> tuple[list[Tensor], list[Tensor]]:
    """(value and gradient of ours, of torch's) at x."""
    x = x.clone().requires_grad_()
    pair = []
    for y in (gelu(x, approximate), F.gelu(x, approximate=approximate)):
        pair.append([y.detach(), *torch.autograd.grad(y, x, torch.ones_like(x))])
    return pair[0], pair[1]


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_it_equals_torchs(approximate: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, 0.0, 1e4])]).double()
    ours, theirs = both(x, approximate)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 3e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
)
def test_its_error_is_that_of_rounding(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.linspace(-6, 6, 4001).to(dtype)
    ours, _ = both(x, "tanh")
    _, truth = both(x.double(), "tanh")
    for own, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(own.double(), true, rtol=tolerance, atol=tolerance)
