"""Clusters of near-duplicates: what verified edges hold together, and the one that stays."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tools.corpus.duplicates.grouping import look_up
from tools.corpus.duplicates.index import Index, Numbers, save
from tools.corpus.duplicates.sets import EDGE, Sets
from tools.corpus.shards import placed

CHUNK = 1 << 20  # rows of a file handled at a time
MEMBER_BYTES = 600  # of a document in a cluster while it is decided
LARGEST = 10  # clusters that are told of
SHOWN = 4  # of the members of each
REMOVED = np.dtype([("number", "<i8"), ("line", "<i8"), ("copy", "?")])


def connect(
    folder: Path, count: int, edges: Sequence[Path], copies: Sequence[Path], memory: int
) -> int:
    """Write labels.npy, int64 [count]: the smallest document that each hangs together with.

    Kept in a file where it would not fit the memory.  Returns how many documents are in clusters.
    """
    path = folder / "labels.npy"
    folder.mkdir(parents=True, exist_ok=True)
    staged = path.with_name("labels.npy.part")
    parent = (
        np.empty(count, np.int64)
        if 8 * count <= memory
        else np.lib.format.open_memmap(staged, "w+", np.int64, (count,))
    )
    for start in range(0, count, CHUNK):
        parent[start : start + CHUNK] = np.arange(start, min(start + CHUNK, count))
    for a, b in itertools.chain(_chunks(edges, "a", "b"), _chunks(copies, "number", "other")):
        _join(parent, a, b)
    clustered = 0
    for start in range(0, count, CHUNK):
        block = parent[start : start + CHUNK]
        roots = _roots(parent, block)
        parent[start : start + CHUNK] = roots
        alone = roots == np.arange(start, start + len(roots))
        clustered += int((~alone).sum()) * 2  # each with its root, or fewer
    if isinstance(parent, np.memmap):
        parent.flush()
        staged.replace(path)
    else:
        save(path, parent)
    return clustered


def _chunks(files: Sequence[Path], *names: str) -> Iterator[list[Numbers]]:
    for file in files:
        rows = np.load(file)
        for start in range(0, len(rows), CHUNK):
            yield [rows[name][start : start + CHUNK] for name in names]


def _roots(parent: Numbers, numbers: Numbers) -> Numbers:
    roots = parent[numbers]
    while True:
        above = parent[roots]
        if np.array_equal(above, roots):
            return roots
        roots = above


def _join(parent: Numbers, a: Numbers, b: Numbers) -> None:
    """Hook the larger root of each edge below the smaller, until all edges lie within a tree."""
    while len(a):
        a, b = _roots(parent, a), _roots(parent, b)
        apart = a != b
        a, b = a[apart], b[apart]
        np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))


@dataclass(frozen=True)
class Deciding:
    """What is needed to choose who stays; files of the stages before."""

    index: Index
    labels: Path
    edges: tuple[Path, ...]
    copies: tuple[Path, ...]
    renamed: tuple[Path, ...]
    sets: Path
    priority: tuple[str, ...]
    memory: int
    parts: int

    def __repr__(self) -> str:
        return f"Deciding in {self.parts} parts by {self.priority}"

    def members(self, part: int) -> tuple[Numbers, Numbers]:
        """(numbers, sorted, of the documents in clusters; their clusters) of a part."""
        labels = np.load(self.labels, mmap_mode="r")
        found = [np.empty((2, 0), np.int64)]
        for start in range(0, len(labels), CHUNK):
            block = np.asarray(labels[start : start + CHUNK])
            numbers = np.arange(start, start + len(block))
            rows = (block != numbers) & (block % self.parts == part)
            found += [
                np.stack([numbers[rows], block[rows]]),
                np.stack([np.unique(block[rows])] * 2),
            ]
        both = np.unique(np.concatenate(found, axis=1), axis=1)
        return both[0], both[1]

    def edges_of(self, part: int) -> NDArray[Any]:
        """The verified edges within the clusters of a part."""
        labels = np.load(self.labels, mmap_mode="r")
        found = [np.empty(0, EDGE)]
        for file in self.edges:
            edges = np.load(file)
            found.append(edges[labels[edges["a"]] % self.parts == part])
        return np.concatenate(found)


@dataclass
class Clusters:
    """The documents of some clusters, sorted by number; places are into this order."""

    numbers: Numbers
    clusters: Numbers
    ids: list[str]
    sources: list[str]
    ranks: Numbers
    """[n]: place in the order of (cluster, priority of the source, id): the first of each stays."""
    keepers: Numbers
    """[n]: place of the document that stays."""
    equals: Numbers
    """[n]: place of the document that stood for it, and for all of the same normalised text."""
    leads: Numbers = field(init=False)
    """[n]: place of the first by rank of those of the same normalised text."""

    def __post_init__(self) -> None:
        best = np.full(len(self.numbers), len(self.numbers), np.int64)
        np.minimum.at(best, self.equals, self.ranks)
        by_rank = np.argsort(self.ranks)
        self.leads = by_rank[best[self.equals]]


def read_clusters(deciding: Deciding, part: int) -> Clusters:
    numbers, clusters = deciding.members(part)
    names = deciding.index.names(numbers)
    further = look_up(deciding.renamed, numbers, np.zeros_like(numbers)).tolist()
    ids = [f"{name}-{k}" if k else name for (name, _), k in zip(names, further, strict=True)]
    sources = [source for _, source in names]
    order = {source: k for k, source in enumerate(deciding.priority)}
    priorities = [order.get(source, len(order)) for source in sources]
    by_rank = sorted(range(len(numbers)), key=lambda k: (int(clusters[k]), priorities[k], ids[k]))
    ranks = np.empty(len(numbers), np.int64)
    ranks[by_rank] = np.arange(len(numbers))
    heads = np.searchsorted(clusters[by_rank], clusters)  # the first rank of each one's cluster
    equals = np.searchsorted(numbers, look_up(deciding.copies, numbers, numbers))
    return Clusters(
        numbers, clusters, ids, sources, ranks, np.array(by_rank, np.int64)[heads], equals
    )


def best_edges(found: Clusters, edges: NDArray[Any]) -> tuple[Numbers, NDArray[np.float64]]:
    """(place of the most similar document that an edge leads to, the similarity), by place.

    Of equally similar ones the first by rank.  Edges are between documents that stand for
    themselves; of the others the similarity is 0.
    """
    ends = [np.searchsorted(found.numbers, edges[name]) for name in ("a", "b")]
    here, there = np.concatenate(ends), np.concatenate(ends[::-1])
    similarity = np.tile(edges["shared"] / edges["union"], 2)
    there = found.leads[there]
    order = np.lexsort((found.ranks[there], -similarity, here))
    first = np.append(True, np.diff(here[order]) > 0) if len(order) else np.empty(0, bool)
    chosen = order[first]
    via, jaccard = np.arange(len(found.numbers)), np.zeros(len(found.numbers))
    via[here[chosen]] = there[chosen]
    jaccard[here[chosen]] = similarity[chosen]
    return via, jaccard


def decide(folder: Path, deciding: Deciding, part: int) -> dict[str, Any]:
    """Write who goes (REMOVED, by number) and for each its line of duplicates.jsonl.

    Returns counts of clusters and of those who go by source, and the largest clusters.
    """
    found = read_clusters(deciding, part)
    via, via_jaccard = best_edges(found, deciding.edges_of(part))
    copy = found.leads != np.arange(len(found.numbers))
    via = np.where(copy, found.leads, via[found.equals])
    via_jaccard = np.where(copy, 1.0, via_jaccard[found.equals])
    jaccard = _with_keepers(found, Sets(deciding.sets, deciding.index, deciding.memory // 8))
    goes = np.flatnonzero(found.keepers != np.arange(len(found.numbers)))
    removed = np.empty(len(goes), REMOVED)
    removed["number"], removed["copy"] = found.numbers[goes], copy[goes]
    with placed(folder / f"{part:04}.jsonl") as file:
        for row, k in enumerate(goes.tolist()):
            removed["line"][row] = file.tell()
            line = {
                "id": found.ids[k],
                "kept_id": found.ids[found.keepers[k]],
                "jaccard": float(jaccard[k]),
                "via": found.ids[via[k]],
                "via_jaccard": float(via_jaccard[k]),
            }
            file.write(orjson.dumps(line) + b"\n")
    save(folder / f"{part:04}.npy", removed)
    return {
        "clusters": len(np.unique(found.clusters)),
        "sources": dict(Counter(found.sources[k] for k in goes.tolist())),
        "largest": _largest(found, jaccard),
    }


def _with_keepers(found: Clusters, sets: Sets) -> NDArray[np.float64]:
    """[n]: exact similarity of each with the one that stays."""
    a, b = found.equals, found.equals[found.keepers]
    pairs, inverse = np.unique(np.stack([a, b]), axis=1, return_inverse=True)
    other = pairs[0] != pairs[1]
    jaccard = np.ones(pairs.shape[1])
    shared, union = sets.compare(found.numbers[pairs[0, other]], found.numbers[pairs[1, other]])
    jaccard[other] = shared / union
    return jaccard[inverse]


def _largest(found: Clusters, jaccard: NDArray[np.float64]) -> list[dict[str, Any]]:
    """The largest clusters with a few members each, the one that stays first."""
    ordered = np.argsort(found.ranks)
    labels, starts, sizes = np.unique(
        found.clusters[ordered], return_index=True, return_counts=True
    )
    first_ids = [found.ids[ordered[start]] for start in starts.tolist()]
    chosen = sorted(range(len(labels)), key=lambda k: (-int(sizes[k]), first_ids[k]))[:LARGEST]
    return [
        {
            "size": int(sizes[k]),
            "kept_id": first_ids[k],
            "members": [
                {
                    "number": int(found.numbers[place]),
                    "id": found.ids[place],
                    "source": found.sources[place],
                    "jaccard": float(jaccard[place]),
                }
                for place in ordered[starts[k] : starts[k] + min(SHOWN, sizes[k])].tolist()
            ],
        }
        for k in chosen
    ]
