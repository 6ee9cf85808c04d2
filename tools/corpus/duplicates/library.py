"""Candidate pairs by the library datasketch: the reference for our own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.libraries import Library
from tools.corpus.duplicates.grouping import look_up
from tools.corpus.duplicates.index import Bands, Index, save
from tools.corpus.duplicates.pairs import pack
from tools.corpus.shingles import PERMUTATIONS, Shingler

datasketch = Library("datasketch")


def find_pairs_by_datasketch(
    folder: Path, index: Index, copies: Sequence[Path], shingler: Shingler, bands: Bands
) -> dict[str, Any]:
    """Write the pairs that datasketch's MinHashLSH finds with the same bands; in memory.

    Raises MissingLibrary if it cannot be imported.
    """
    numbers = np.arange(len(index))
    numbers = numbers[look_up(copies, numbers, numbers) == numbers]
    lsh = datasketch.MinHashLSH(num_perm=PERMUTATIONS, params=(bands.count, bands.rows))
    found = [np.empty(0, np.uint64)]
    for number, text in index.documents(numbers):
        sketch = datasketch.MinHash(num_perm=PERMUTATIONS, seed=shingler.seed)
        sketch.update_batch(each.tobytes() for each in shingler.shingle_set(text))
        others = np.array(lsh.query(sketch), np.int64)
        found.append(pack(np.full_like(others, number), others))
        lsh.insert(number, sketch)
    pairs = np.unique(np.concatenate(found))
    save(folder / "all.npy", pairs)
    return {"pairs": len(pairs), "files": ["all.npy"], "split": 0, "largest": 0}
