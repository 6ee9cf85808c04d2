"""Proofs of plans, by every rank of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.huggingface import HuggingFaceConfig
from megatron.models.proof import NoProofError, Proof, prove
from megatron.parallel.mesh import build_mesh
from megatron.parallel.plan import PlanError

Outcome = Proof | str
"""The latter is why there is none."""


def prove_at(configs: Sequence[HuggingFaceConfig], sizes: Sequence[int]) -> list[list[Outcome]]:
    """Of each config at each tensor size; every rank of a launch calls this, the data axis takes
    the ranks that are left."""
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
        return str(error)
