"""Seeds that are a function of a key. Initial values and dropout need no generator state."""

from __future__ import annotations

import hashlib

import torch

from megatron.parallel.mesh import Mesh


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed that depends only on the key, and not on the machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_kernels(seed: int, mesh: Mesh, step: int, micro_batch: int, *stage: int) -> None:
    """Seed the default generators, from which attention's kernel draws its dropout. A resumed run
    draws the same as an undisturbed one at the same layout. Ranks draw for their own heads.

    stage: the virtual pipeline stage, if this rank has several."""
    where = (axis.rank for axis in mesh.axes)
    torch.manual_seed(derive_seed(seed, "kernels", step, micro_batch, *where, *stage))
