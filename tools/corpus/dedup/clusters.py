"""Clusters of near-duplicates: documents connected by verified edges, and the one that stays."""

import itertools
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.libraries import Library
from tools.corpus import external
from tools.corpus.dedup.candidates import look_up
from tools.corpus.dedup.index import Index
from tools.corpus.dedup.verify import Sets
from tools.corpus.external import Numbers
from tools.corpus.files import scratch_writer

orjson = Library("orjson")

CHUNK = 1 << 20  # rows of a file handled at a time
MEMBER_BYTES = 600  # memory of a document in a cluster, in select_kept()
LARGEST = 10  # clusters that are reported
SHOWN = 4  # members of each that are reported
REMOVED = np.dtype([("number", "<i8"), ("line", "<i8"), ("copy", "?")])


def connected_components(
    folder: Path, count: int, edges: Sequence[Path], copies: Sequence[Path], memory: int
) -> int:
    """Write labels.npy, int64 [count]: the smallest document that each is connected to.

    Computed in a file if it exceeds `memory`.  Returns an upper bound of the documents in clusters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "labels.npy"
    staged = path.with_name(f"labels-{uuid.uuid4().hex}.part")
    parent: Numbers
    if 8 * count <= memory:
        parent = np.empty(count, np.int64)
    else:
        parent = np.lib.format.open_memmap(staged, "w+", np.int64, (count,))
        with staged.open("r+b") as file:  # a full disk is an OSError now, not a bus error later
            os.posix_fallocate(file.fileno(), 0, staged.stat().st_size)
    for start in range(0, count, CHUNK):
        parent[start : start + CHUNK] = np.arange(start, min(start + CHUNK, count))
    for a, b in itertools.chain(_chunks(edges, "a", "b"), _chunks(copies, "number", "other")):
        join_all(parent, a, b)
    clustered = 0
    for start in range(0, count, CHUNK):
        roots = roots_of(parent, parent[start : start + CHUNK])
        parent[start : start + CHUNK] = roots
        alone = roots == np.arange(start, start + len(roots))
        clustered += int((~alone).sum()) * 2  # each is counted with its root
    if isinstance(parent, np.memmap):
        parent.flush()
        staged.replace(path)
    else:
        external.save(path, parent)
    return clustered


def _chunks(files: Sequence[Path], *names: str) -> Iterator[list[Numbers]]:
    for file in files:
        rows = np.load(file)
        for start in range(0, len(rows), CHUNK):
            yield [rows[name][start : start + CHUNK] for name in names]


def roots_of(parent: Numbers, numbers: Numbers) -> Numbers:
    roots = parent[numbers]
    while True:
        above = parent[roots]
        if np.array_equal(above, roots):
            return roots
        parent[numbers] = roots = above  # path halving


def join_all(parent: Numbers, a: Numbers, b: Numbers) -> None:
    """Attach the larger root of each edge to the smaller, until every edge lies within a tree."""
    while len(a):
        a, b = roots_of(parent, a), roots_of(parent, b)
        apart = a != b
        a, b = a[apart], b[apart]
        np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))


@dataclass(frozen=True)
class ClusterTask:
    """Files of the previous stages, and rules, by which select_kept() chooses."""

    index: Index
    labels: Path
    edges: tuple[Path, ...]
    copies: tuple[Path, ...]
    renamed: tuple[Path, ...]
    sets: Path
    priority: tuple[str, ...]
    max_cluster: int | None
    """Documents; with a larger cluster, which is reported, nothing is removed."""
    memory: int
    parts: int

    def __repr__(self) -> str:
        """Distinguishes one from another when a task is looked up."""
        return f"{self.parts} parts by {self.priority} up to {self.max_cluster}"

    def members(self, part: int) -> tuple[Numbers, Numbers]:
        """(sorted numbers of the documents in the clusters of a part, their clusters)."""
        labels = external.mapped(self.labels)
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

    def edges_of(self, part: int) -> Iterator[NDArray[Any]]:
        """The verified edges within the clusters of a part, one file at a time."""
        labels = external.mapped(self.labels)
        for file in self.edges:
            edges = np.load(file)
            yield edges[labels[edges["a"]] % self.parts == part]


@dataclass(frozen=True)
class Clusters:
    """The documents of some clusters, sorted by number; a place is an index in this order."""

    numbers: Numbers
    clusters: Numbers
    ids: list[str]
    sources: list[str]
    ranks: Numbers
    """[n]: rank in the order of (cluster, source priority, id); the first of each cluster stays."""
    keepers: Numbers
    """[n]: place of the document that stays."""
    equals: Numbers
    """[n]: place of the document that represents all of the same normalised text."""
    leads: Numbers
    """[n]: place of the first by rank of all of the same normalised text."""


def read_clusters(task: ClusterTask, part: int) -> Clusters:
    numbers, clusters = task.members(part)
    names = list(task.index.names(numbers))
    further = look_up(task.renamed, numbers, np.zeros_like(numbers)).tolist()
    ids = [f"{name}-{k}" if k else name for (name, _), k in zip(names, further, strict=True)]
    sources = [source for _, source in names]
    order = {source: k for k, source in enumerate(task.priority)}
    priorities = [order.get(source, len(order)) for source in sources]
    ranked = sorted(range(len(numbers)), key=lambda k: (int(clusters[k]), priorities[k], ids[k]))
    by_rank = np.array(ranked, np.int64)
    ranks = np.empty(len(numbers), np.int64)
    ranks[by_rank] = np.arange(len(numbers))
    keepers = by_rank[np.searchsorted(clusters[by_rank], clusters)]
    equals = np.searchsorted(numbers, look_up(task.copies, numbers, numbers))
    best = np.full(len(numbers), len(numbers), np.int64)
    np.minimum.at(best, equals, ranks)
    leads = by_rank[best[equals]]
    return Clusters(numbers, clusters, ids, sources, ranks, keepers, equals, leads)


def best_edges(
    found: Clusters, files: Iterable[NDArray[Any]]
) -> tuple[Numbers, NDArray[np.float64]]:
    """Each document's edge to the most similar one; of equally similar ones, the first by rank.

    Edges connect representatives of their texts; the other end is the first by rank of a text.
    Returns (place of the other, its own if there is no edge; similarity), [n] each.
    """
    via, best = np.arange(len(found.numbers)), np.zeros(len(found.numbers))
    for edges in files:
        ends = [np.searchsorted(found.numbers, edges[name]) for name in ("a", "b")]
        here, there = np.concatenate(ends), found.leads[np.concatenate(ends[::-1])]
        similarity = np.tile(edges["shared"] / edges["union"], 2)
        order = np.lexsort((found.ranks[there], -similarity, here))
        order = order[np.diff(here[order], prepend=-1) > 0]  # the best of each
        here, there, similarity = here[order], there[order], similarity[order]
        as_good = (similarity == best[here]) & (found.ranks[there] < found.ranks[via[here]])
        better = (similarity > best[here]) | as_good
        via[here[better]] = there[better]
        best[here[better]] = similarity[better]
    return via, best


def select_kept(folder: Path, task: ClusterTask, part: int) -> dict[str, Any]:
    """Write the removed documents (REMOVED, by number) and their lines of duplicates.jsonl.

    Returns the number of clusters, removed documents by source, and the largest clusters.
    """
    found = read_clusters(task, part)
    sets = Sets(task.sets, task.index, task.memory // 8)
    _, sizes = np.unique(found.clusters, return_counts=True)
    removed = np.flatnonzero(found.keepers != np.arange(len(found.numbers)))
    if task.max_cluster is None or sizes.max(initial=0) <= task.max_cluster:
        via, similarity = best_edges(found, task.edges_of(part))
        copy = found.leads != np.arange(len(found.numbers))
        via = np.where(copy, found.leads, via[found.equals])
        similarity = np.where(copy, 1.0, similarity[found.equals])
        jaccard = similarity_with_keepers(found, removed, sets)
        where = list(task.index.places(found.numbers))
        rows = np.empty(len(removed), REMOVED)
        rows["number"], rows["copy"] = found.numbers[removed], copy[removed]
        with scratch_writer(folder / f"{part:04}.jsonl") as stream:
            for row, k in enumerate(removed.tolist()):
                rows["line"][row] = stream.tell()
                keeper = found.keepers[k]
                line = {
                    "id": found.ids[k],
                    "kept_id": found.ids[keeper],
                    "jaccard": float(jaccard[row]),
                    "via": found.ids[via[k]],
                    "via_jaccard": float(similarity[k]),
                    "file": where[k][0],
                    "offset": where[k][1],
                    "kept_file": where[keeper][0],
                    "kept_offset": where[keeper][1],
                }
                stream.write(orjson.dumps(line) + b"\n")
        external.save(folder / f"{part:04}.npy", rows)
    return {
        "clusters": len(sizes),
        "sources": dict(Counter(found.sources[k] for k in removed.tolist())),
        "largest": _largest(found, sets),
    }


def similarity_with_keepers(found: Clusters, places: Numbers, sets: Sets) -> NDArray[np.float64]:
    """[places]: exact similarity of each with the document of its cluster that stays."""
    if not len(places):
        return np.empty(0)
    a, b = found.equals[places], found.equals[found.keepers[places]]
    pairs, inverse = np.unique(np.stack([a, b]), axis=1, return_inverse=True)
    other = pairs[0] != pairs[1]
    jaccard = np.ones(pairs.shape[1])
    shared, union = sets.compare(found.numbers[pairs[0, other]], found.numbers[pairs[1, other]])
    jaccard[other] = shared / union
    return jaccard[inverse]


def _largest(found: Clusters, sets: Sets) -> list[dict[str, Any]]:
    """The largest clusters with a few members each; the first member is the one that stays."""
    ordered = np.argsort(found.ranks)
    labels, starts, sizes = np.unique(
        found.clusters[ordered], return_index=True, return_counts=True
    )
    first_ids = [found.ids[ordered[start]] for start in starts.tolist()]
    chosen = sorted(range(len(labels)), key=lambda k: (-int(sizes[k]), first_ids[k]))[:LARGEST]
    largest = []
    for k in chosen:
        places = ordered[starts[k] : starts[k] + min(SHOWN, sizes[k])]
        jaccard = similarity_with_keepers(found, places, sets)
        members = [
            {
                "number": int(found.numbers[place]),
                "id": found.ids[place],
                "source": found.sources[place],
                "jaccard": float(each),
            }
            for place, each in zip(places.tolist(), jaccard, strict=True)
        ]
        largest.append({"size": int(sizes[k]), "kept_id": first_ids[k], "members": members})
    return largest
