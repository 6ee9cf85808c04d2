"""Compares what the step dedup kept with an exact join of all pairs, which makes no sketches.

    python benchmarks/exact_join.py --input RACE.jsonl --kept DIR

Documents are sets of their 5-grams, as text and not as hashes.  Any two of a Jaccard similarity of
the step's --jaccard or more are an edge; of each connected component the document of the smallest
(source priority, id) stays.  Flags of the step are read from its manifest.  All sets are in memory.
The status is 1 where the step kept others.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.parse import parse, whole_program
from megatron.data.files import write_atomically
from megatron.data.json_lines import find_shards
from megatron.errors import UsageError
from tools.corpus.files import (
    DocumentCounts,
    cut,
    document_id,
    read_documents,
    read_manifest,
    source_of,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    input: tuple[Path, ...]
    """The step's input: files of JSON lines, or folders of them; ids have to be distinct."""

    kept: Path
    """The step's output folder."""

    json: Path | None = None
    """File to write the counts and the ids that differ to."""


def documents(paths: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """(id, source, text) of all documents."""
    for unit in cut(find_shards(paths), 1 << 60):
        for document in read_documents(unit, DocumentCounts()):
            yield document_id(document.record), source_of(document.record), document.text


def gram_sets(texts: Sequence[str], shingle: str) -> list[np.ndarray]:
    """Each text's distinct 5-grams of characters or words, as sorted numbers, rare grams first."""
    numbers: dict[Any, int] = {}
    sets = []
    for text in texts:
        units: Any = " ".join(text.lower().split())
        if shingle == "word5":
            units = tuple(units.split(" "))
        grams = {units[k : k + 5] for k in range(max(1, len(units) - 4))}
        sets.append(np.array([numbers.setdefault(gram, len(numbers)) for gram in grams]))
    counts = np.bincount(np.concatenate(sets))
    ranks = np.empty(len(counts), np.int64)
    ranks[np.argsort(counts, kind="stable")] = np.arange(len(counts))
    return [np.sort(ranks[each]) for each in sets]


def exact_pairs(sets: Sequence[np.ndarray], least: Fraction) -> Iterator[tuple[int, int]]:
    """All pairs (i, j), i > j, with a Jaccard similarity of at least `least`.

    Only pairs that cannot be similar enough are skipped.  Similar sets A and B share at least
    `least` |A| grams, so one of the first |A| - ceil(`least` |A|) + 1 of A, and likewise of B.  Let
    A's first grams end before B's.  Then a shared gram is among the first of both, or is one of
    the ceil(`least` |A|) - 1 of A after these.
    """
    sizes = np.array([len(each) for each in sets])
    behind = np.array([ceil(least * len(each)) - 1 for each in sets])
    firsts = [grams[: len(grams) - rest] for grams, rest in zip(sets, behind.tolist(), strict=True)]
    ends = np.array([first[-1] for first in firsts])
    owners = np.repeat(np.arange(len(sets)), sizes - behind)
    grams = np.concatenate(firsts)
    order = np.argsort(grams, kind="stable")
    owners, grams = owners[order], grams[order]  # the documents by gram
    bounds = np.searchsorted(grams, np.arange(grams[-1] + 2)).tolist()
    share = float(least / (1 + least))  # of |A| + |B| that a similar pair shares at least
    for i, first in enumerate(firsts):
        having = [owners[bounds[gram] : bounds[gram + 1]] for gram in first.tolist()]
        counts = np.bincount(np.concatenate(having), minlength=len(sets))[:i]
        most = counts + np.where(ends[i] < ends[:i], behind[i], behind[:i])
        most = np.minimum(most, np.minimum(sizes[i], sizes[:i]))
        needed = share * (sizes[i] + sizes[:i]) - 1e-6
        for j in np.flatnonzero((counts > 0) & (most >= needed)).tolist():
            shared = len(np.intersect1d(sets[i], sets[j], assume_unique=True))
            if shared >= least * int(sizes[i] + sizes[j] - shared):
                yield i, j


def exact_join(
    found: Sequence[tuple[str, str, str]], shingle: str, least: Fraction, priority: Sequence[str]
) -> tuple[int, set[str]]:
    """(number of pairs, ids of the documents that stay).  found: (id, source, text)."""
    order = {source: k for k, source in enumerate(priority)}
    roots = list(range(len(found)))

    def root(number: int) -> int:
        while roots[number] != number:
            number = roots[number]
        return number

    pairs = 0
    for i, j in exact_pairs(gram_sets([text for *_, text in found], shingle), least):
        roots[root(i)] = root(j)
        pairs += 1
    clusters: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for number, (name, source, _) in enumerate(found):
        clusters[root(number)].append((order.get(source, len(order)), name))
    return pairs, {min(members)[1] for members in clusters.values()}


def compare(settings: Settings) -> dict[str, Any]:
    manifest = read_manifest(settings.kept)
    if manifest is None or manifest["step"] != "dedup":
        raise UsageError("--kept", settings.kept, "a folder that the step dedup has finished")
    found = list(documents(settings.input))
    if not found:
        raise UsageError("--input", settings.input[0], "files or folders with documents")
    if len({name for name, *_ in found}) < len(found):
        raise UsageError("--input", settings.input[0], "of documents with distinct ids")
    flags = manifest["settings"]
    least = Fraction(str(flags["jaccard"]))
    pairs, kept = exact_join(found, flags["shingle"], least, flags["source_priority"])
    by_step = {name for name, *_ in documents([settings.kept])}
    return {
        "documents": len(found),
        "shingle": flags["shingle"],
        "jaccard": flags["jaccard"],
        "seed": flags["seed"],
        "pairs": pairs,
        "kept_by_join": len(kept),
        "kept_by_step": len(by_step),
        "kept_by_step_alone": sorted(by_step - kept),
        "kept_by_join_alone": sorted(kept - by_step),
    }


def main(argv: Sequence[str] | None = None) -> None:
    with whole_program({}):
        settings = parse(Settings, sys.argv[1:] if argv is None else argv, {}, description=__doc__)
        facts = compare(settings)
        if settings.json is not None:
            write_atomically(settings.json, json.dumps(facts, indent=1).encode() + b"\n")
        print(
            f"{facts['documents']} documents, {facts['pairs']} pairs of a {facts['shingle']} "
            f"Jaccard similarity from {facts['jaccard']}: the exact join keeps "
            f"{facts['kept_by_join']}, the step with seed {facts['seed']} {facts['kept_by_step']}"
        )
        different = False
        for who in ("step", "join"):
            if names := facts[f"kept_by_{who}_alone"]:
                print(f"kept by the {who} alone: {', '.join(names)}")
                different = True
    sys.exit(int(different))


if __name__ == "__main__":
    main()
