"""Matrix multiplication by the faster of the two libraries that torch has on a CPU.

torch multiplies fp32 by MKL, which uses AVX-512 on Intel's processors only; oneDNN, which torch
uses for half dtypes, uses it on every processor that has it. AMD's Zen 5 computes 512 bits at once,
so oneDNN is twice as fast there (docs/results/kernels.md); Zen 4 computes them in halves. On a
processor where oneDNN does not support a half dtype, torch multiplies it number by number.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ZEN_5 = 26  # cpu family in /proc/cpuinfo
SMALL = 2**20  # multiplications; below, the call of oneDNN costs more than it saves
ROW_MULTIPLE = 16  # oneDNN compiles and keeps a megabyte of code for each new size
FEW_ROWS, TALL = 8, 8192  # rows of x; rows of a weight, such as an output layer's
TRANSPOSED_BYTES = 2**22  # dy up to this size is transposed at once, a larger one by chunk
CHUNK_BYTES = 2**20  # of a weight's gradient, on its way to the buffer
EMULATED = {
    dtype
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
    if torch.backends.mkldnn.is_available()
    and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
}
"""Half dtypes that are emulated: fp32 is multiplied ten times as fast on this processor."""


@cache
def is_faster_by_onednn() -> bool:
    """Whether oneDNN is faster than MKL on this processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    family = re.search(r"^cpu family\s*: (\d+)", text, re.MULTILINE)
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in text
        and family is not None
        and int(family[1]) >= ZEN_5
    )


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies x [n, in] by weight [out, in] faster than torch does by default."""
    return (
        not torch.compiler.is_compiling()
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and len(x) * weight.numel() >= SMALL
        and len(x) % ROW_MULTIPLE == x.shape[1] % ROW_MULTIPLE == 0
        and is_faster_by_onednn()
        # With any other strides oneDNN runs its reference, a thousand times as slow.
        and (weight.is_contiguous() or weight.T.is_contiguous())
    )


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """kernels.matmul by oneDNN, for sizes where that is faster."""
    # torch 2.11 to 2.13 have no public function that multiplies fp32 by oneDNN.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def matmul_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """kernels.matmul in fp32, with the result rounded once."""
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide).to(x.dtype)


def add_matmul_(out: Tensor, dy: Tensor, x: Tensor, *, accumulate: bool) -> None:
    """kernels.add_matmul_ by oneDNN, for dy' and x' where that is faster."""
    # oneDNN cannot write into an existing tensor and copies a transposed one: both are kept small.
    chunk = ROW_MULTIPLE * max(1, CHUNK_BYTES // (max(x.shape) * x.itemsize * ROW_MULTIPLE))
    transposed = dy.T.contiguous() if dy.nbytes <= TRANSPOSED_BYTES else dy.T
    for start in range(0, len(transposed), chunk):
        rows = slice(start, start + chunk)
        gradient = matmul(transposed[rows], x.T, None)
        if accumulate:
            out[rows].add_(gradient)
        else:
            out[rows].copy_(gradient)


def has_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether x has so few rows, and weight so many, that `matmul_few_rows` is faster."""
    return len(weight) >= TALL and len(x) <= FEW_ROWS and x.dtype == torch.float32


def matmul_few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x weight' in fp32, as generation uses it.

    The library multiplies a large matrix by two to eight columns at the speed of memory, but takes
    2 to 8 times as long for one column, or with the operands swapped.
    """
    columns = x.T if x.shape[0] > 1 else x.repeat(2, 1).T
    return (weight @ columns).T[: x.shape[0]]
