"""Model FLOPs utilisation (MFU): FLOPs that the model needs over those that the GPU could do.

A token of a training step needs 6 N + 12 L d s FLOPs, as in PaLM (arXiv 2204.02311, appendix B):

    N      weights of matmuls: all with two dims, without tables that are only looked up. A head
           that is tied to the word embedding counts by the share of the tokens that it scores
    L d s  layers x width of their heads x tokens of a sequence; half of it if attention is counted
           as causal

Recomputation and padding do not count. The peak is that of dense half-precision matmuls in the
vendor's datasheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megatron.config.pretrain import PretrainConfig
from megatron.parallel.sharding import sharding_specs
from megatron.train.state import TrainState

PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
}
"""FLOP/s by a part of the device's name; the first that fits."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of a training step per token, or per sample where samples are counted."""

    full: float
    """With all of attention."""
    causal: float | None
    """With the half of attention that is not masked; None if attention is not causal."""
    peak: float | None
    """FLOP/s of a device; None if it is not known."""
    about: str
    """Formula and peak, for the log."""


def flops_of(config: PretrainConfig, state: TrainState) -> Flops | None:
    """The FLOPs of a run (every rank calls this); None if the width of attention is not known."""
    mesh, model, length = state.mesh, config.model, config.seq_length
    width = model.attention_width
    if width is None:
        return None
    own = mesh.pipeline.rank, matmul_weights(state.model, config.scored)
    n = sum(dict(mesh.control.gather(own)).values())
    units = config.tokens_per_unit
    full, half = units * (6 * n + 12 * width * length), units * (6 * n + 6 * width * length)
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    if state.precision == "fp32":  # whose peak depends on settings
        peak = None
    about = f"6 x {n:,.0f} + 12 x {width:,} x {length:,} FLOPs per token"
    if peak is not None:
        about = f"MFU is of {about} and {peak / 1e12:.0f} TFLOP/s, the peak of {name}"
    causal = half if model.is_causal else None
    return Flops(full=full, causal=causal, peak=peak, about=about)


def matmul_weights(model: Any, scored: float) -> float:
    """Weights of this pipeline stage's matmuls. scored: share of the tokens that the head reads."""
    # A kind of one's own need not say whether its head is tied.
    own = "word_embedding.weight" if getattr(model, "is_tied", False) else None
    tied = getattr(model, "tied_table", own)
    modules = model.named_modules()
    tables = {f"{name}.weight" for name, each in modules if "Embedding" in type(each).__name__}
    total = 0.0
    for name, spec in sharding_specs(model).items():
        is_weight = len(spec.shape) > 1 and "bias" not in name.rpartition(".")[2]
        if is_weight and name not in tables and spec.is_owner():
            total += prod(spec.shape)
        # On the first stage; the last one computes with the copy.
        if tied is not None and name.endswith(tied) and spec.is_owner():
            total += scored * model.vocab_size * spec.shape[1]
    return total
