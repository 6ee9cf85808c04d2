"""Named random number generators, derived and not carried along.

Every draw of dropout comes from a generator that is seeded by (seed, step, micro-batch, data rank,
name) and, inside the tensor-parallel region, by the tensor rank too (paper, section 3: residual
dropout is the same on all tensor ranks, dropout inside the region differs). So no order of
execution, no recomputation and no resume can change a draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.parallel.mesh import Mesh


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed that is a function of the key alone, on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that dropout draws from: `F.dropout` and sdpa take no other."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class NamedRNGs:
    """Those of one model on one rank, at one (step, micro-batch): see `at`."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        self.seed = seed
        self.mesh = mesh
        self.position = (0, 0)

    @contextmanager
    def at(self, step: int, micro_batch: int) -> Iterator[None]:
        before, self.position = self.position, (step, micro_batch)
        try:
            yield
        finally:
            self.position = before

    def shared(self, name: str) -> AbstractContextManager[None]:
        """Draws inside are equal on the ranks of a tensor-parallel group."""
        return self._fork(name)

    def per_rank(self, name: str) -> AbstractContextManager[None]:
        """Draws inside differ between the ranks of a tensor-parallel group."""
        return self._fork(name, self.mesh.tensor.rank)

    @contextmanager
    def _fork(self, name: str, *inner: int) -> Iterator[None]:
        generator = default_generator(self.mesh.device)
        state = generator.get_state()
        generator.manual_seed(
            derive_seed(self.seed, "draw", *self.position, self.mesh.batch.rank, name, *inner)
        )
        try:
            yield
        finally:
            generator.set_state(state)

    def checkpoint(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Call `function` and keep only its arguments; the backward runs it again.

        The second run draws the same numbers, because it restores the position of the first.
        Without gradients there is no second run.
        """
        if not torch.is_grad_enabled():
            return function(*arguments)
        position = self.position
        result: Tensor = checkpoint(
            function,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self.at(*position)),
        )
        return result
