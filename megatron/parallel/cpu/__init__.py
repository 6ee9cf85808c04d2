"""Kernels of our own for CPUs, where torch's are slow or inexact.

Everything works without this folder, in plain torch: parallel/kernels.py is all that knows of it,
and takes these where they apply.
"""

from megatron.parallel.cpu.functional import (
    NARROW,
    block_attention,
    dropout,
    narrow_layer_norm,
    pays_in_blocks,
)
from megatron.parallel.cpu.onednn import (
    add_matmul_onednn_,
    goes_to_onednn,
    has_few_rows,
    matmul_few_rows,
    matmul_onednn,
    padded_rows,
)

__all__ = [
    "NARROW",
    "add_matmul_onednn_",
    "block_attention",
    "dropout",
    "goes_to_onednn",
    "has_few_rows",
    "matmul_few_rows",
    "matmul_onednn",
    "narrow_layer_norm",
    "padded_rows",
    "pays_in_blocks",
]
