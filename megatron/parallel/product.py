"""Products of matrices, by the faster of the two libraries that torch has on a CPU.

torch gives all products in fp32 to MKL, which takes AVX-512 on Intel's processors alone; oneDNN,
which torch has for narrow dtypes and for its compiler, takes it wherever it is there. AMD's Zen 5
computes 512 bits at once, so that oneDNN is twice as fast there, in fp32 as well (see
docs/results/speed.md); Zen 4 computes them in halves and was not measured.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ZEN_5 = 26  # a family, as processors count it
SMALL = 2**20  # multiplications; of fewer, the call of oneDNN costs more than it saves
TURNED_BYTES = 2**22  # of the gradients of a result, at once; else piece by piece, which is slower
STEP = 16  # of tokens and other rows: oneDNN keeps a megabyte of code for each size it has met
PIECE_BYTES = 2**20  # of a weight's gradient, on its way to where it is added


@cache
def is_faster_by_onednn() -> bool:
    """Whether oneDNN takes more of this processor than MKL does."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _told("vendor_id") == "AuthenticAMD"
        and int(_told("cpu family") or 0) >= ZEN_5
    )


def _told(name: str) -> str:
    """What the system says of its first processor, or nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    line = re.search(rf"^{name}\s*: (\S+)", text, re.MULTILINE)
    return line[1] if line else ""


def _goes_to_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and len(x) * weight.numel() >= SMALL
        and len(x) % STEP == x.shape[1] % STEP == 0
        and is_faster_by_onednn()
        # Of any other strides oneDNN takes its reference, which is a thousand times as slow.
        and (weight.is_contiguous() or weight.T.is_contiguous())
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of two matrices, [n, in] and [out, in], in any strides; not to be differentiated."""
    if _goes_to_onednn(x, weight):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return result
    return F.linear(x, weight, bias)


def add_gradient_(place: Tensor, dy: Tensor, x: Tensor, *, is_filled: bool) -> None:
    """Add dy' x to `place`, or write it there; dy [n, out] and x [n, in], all of one dtype."""
    if not _goes_to_onednn(dy.T, x.T):
        if is_filled:
            place.addmm_(dy.T, x)
        else:
            torch.mm(dy.T, x, out=place)
        return
    # oneDNN writes into no tensor that is there, and copies what is turned: both are kept small.
    turned, steps = dy.T, PIECE_BYTES // (max(x.shape) * x.itemsize * STEP)
    at_once = STEP * max(1, steps)
    if dy.nbytes <= TURNED_BYTES:
        turned = turned.contiguous()
    for start in range(0, len(turned), at_once):
        rows = slice(start, start + at_once)
        gradient = product(turned[rows], x.T)
        if is_filled:
            place[rows].add_(gradient)
        else:
            place[rows].copy_(gradient)
