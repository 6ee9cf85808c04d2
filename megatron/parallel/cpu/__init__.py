"""Kernels of our own for CPUs, where torch's are slow or inexact.

Everything works without this folder, in plain torch: parallel/kernels.py is all that knows of it.
"""

from megatron.parallel.cpu.block_attention import attention, pays_in_blocks
from megatron.parallel.cpu.fast_dropout import dropout
from megatron.parallel.cpu.onednn import (
    add_matmul_onednn_,
    goes_to_onednn,
    has_few_rows,
    matmul_few_rows,
    matmul_onednn,
    padded_rows,
)
from megatron.parallel.cpu.wide_norm import layer_norm

__all__ = [
    "add_matmul_onednn_",
    "attention",
    "dropout",
    "goes_to_onednn",
    "has_few_rows",
    "layer_norm",
    "matmul_few_rows",
    "matmul_onednn",
    "padded_rows",
    "pays_in_blocks",
]
