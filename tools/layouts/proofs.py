"""Proofs of tensor-parallel plans, run by every rank of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.huggingface.config import HuggingFaceConfig
from megatron.huggingface.plan import PlanError
from megatron.huggingface.proof import NoProofError, Proof, prove
from megatron.parallel.mesh import build_mesh

Outcome = Proof | PlanError | NoProofError
"""An error says why there is no proof."""


def prove_at(configs: Sequence[HuggingFaceConfig], sizes: Sequence[int]) -> list[list[Outcome]]:
    """The outcome for each config at each tensor size. Every rank of a launch calls this; the data
    axis takes the remaining ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes = [build_mesh({"tensor": size}, torch.device("cpu")) for size in sizes]
    found = [[_outcome(config, mesh) for mesh in meshes] for config in configs]
    dist.destroy_process_group()
    return found


def _outcome(config: HuggingFaceConfig, mesh: Any) -> Outcome:
    try:
        return prove(config, mesh)
    except (PlanError, NoProofError) as error:
        return error
