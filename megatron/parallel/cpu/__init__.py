"""Kernels of our own for CPUs, where torch's are slow or inexact.

Everything works without this folder, in plain torch: parallel/kernels.py is all that knows of it.
"""

from megatron.parallel.cpu.block_attention import attention, pays_in_blocks
from megatron.parallel.cpu.fast_dropout import dropout
from megatron.parallel.cpu.onednn import add_matmul_, matmul, matmul_few_rows
from megatron.parallel.cpu.wide_norm import layer_norm

__all__ = [
    "add_matmul_",
    "attention",
    "dropout",
    "layer_norm",
    "matmul",
    "matmul_few_rows",
    "pays_in_blocks",
]
