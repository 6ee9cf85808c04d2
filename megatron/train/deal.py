"""Work that is shared out to the data-parallel ranks; needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh


def deal(lengths: Sequence[int], size: int, mesh: Mesh, name: str) -> Iterator[list[int]]:
    """The numbers of each batch of this rank, with a progress bar called `name`.

    lengths: of texts, in tokens. The longest come first: equal lengths pad little, and what does
    not fit in memory fails at once. size: texts of a batch.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    own = batches[mesh.data.rank :: mesh.data.size]
    is_shown = mesh.is_first and sys.stderr.isatty()  # a log would be full of it
    with tqdm(total=sum(map(len, own)), desc=name, disable=not is_shown) as bar:
        for numbers in own:
            yield numbers
            bar.update(len(numbers))
