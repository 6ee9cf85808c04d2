"""The stages of `tools.corpus.dedup`, in order, with the files that each passes to the next."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.json_lines import WORK
from tools.corpus.duplicates.clusters import LARGEST, MEMBER_BYTES, Deciding, connect, decide
from tools.corpus.duplicates.grouping import (
    NAME_BYTES,
    ROW_BYTES,
    find_copies,
    find_equal_ids,
    parts_of,
)
from tools.corpus.duplicates.index import (
    FIRST_BAND,
    ID,
    TEXT,
    Bands,
    Block,
    Index,
    block_name,
    index_unit,
)
from tools.corpus.duplicates.kept import write_unit
from tools.corpus.duplicates.library import find_pairs_by_datasketch
from tools.corpus.duplicates.pairs import bounds_of, find_pairs, merge_pairs
from tools.corpus.duplicates.sets import BIN, verify_pairs, write_sets
from tools.corpus.engine import StepRun, Task, sum_funnels
from tools.corpus.files import Funnel, concatenate, documents
from tools.corpus.settings import say
from tools.corpus.shingles import Shingler

PAIRS_OF_A_TASK = 500_000
PAIR_BYTES = 100  # memory of a candidate pair while it is merged and verified
MOST_DOCUMENTS = 1 << 32  # a pair of numbers is one uint64

Files = tuple[Path, ...]


@dataclass(frozen=True)
class Rules:
    """Rules for which documents are near-duplicates, and which of them stays."""

    shingler: Shingler
    bands: Bands
    threshold: Fraction
    max_bucket: int
    priority: tuple[str, ...]
    max_cluster: int | None
    """Number of documents; with a larger cluster nothing is decided."""
    by_datasketch: bool


@dataclass(frozen=True)
class Found:
    """Result of choose()."""

    removed: Files
    clusters: int
    sources: Counter[str]
    """Number of removed documents, by source."""
    largest: list[dict[str, Any]]


class Stages:
    """Each method runs a stage, or a few that belong together; called in this order."""

    def __init__(self, step: StepRun, rules: Rules) -> None:
        self._step = step
        self._rules = rules
        self._memory = step.settings.memory_bytes

    def _folder(self, name: str) -> Path:
        return self._step.output / WORK / f"arrays-{name}"

    def _files(self, name: str, keys: Sequence[str]) -> Files:
        return tuple(self._folder(name) / f"{key}.npy" for key in keys)

    def index(self) -> tuple[Index, Funnel]:
        """The index of the corpus, and input counts.  Raises ValueError if there is no document."""
        step, rules = self._step, self._rules
        folder = self._folder("index")
        bands = None if rules.by_datasketch else rules.bands
        tasks = [
            Task(
                unit.name,
                (unit, step.settings, folder, rules.shingler, bands),
                unit.stop - unit.start,
            )
            for unit in step.units
        ]
        results = step.stage("signatures", index_unit, tasks)
        funnel = sum_funnels(results)
        blocks = tuple(
            Block(number, block_name(unit, k), count)
            for number, (unit, result) in enumerate(zip(step.units, results, strict=True))
            for k, count in enumerate(result["blocks"])
        )
        if not blocks:
            raise ValueError(
                f"--input holds no document in {documents(funnel.input)} lines; each has to "
                'be {"text": "..."}'
            )
        index = Index(folder, tuple(step.units), blocks)
        if len(index) >= MOST_DOCUMENTS:
            raise ValueError(f"--input holds {len(index)} documents; under 2^32 would work")
        index.save()
        return index, funnel

    def copies(self, index: Index) -> Files:
        """Documents that another of the same normalised text represents."""
        return self._by_column("copies", find_copies, index, TEXT, ROW_BYTES)

    def ids(self, index: Index) -> Files:
        """Documents whose id a previous one has too."""
        return self._by_column("ids", find_equal_ids, index, ID, NAME_BYTES)

    def _by_column(
        self, name: str, function: Callable[..., int], index: Index, column: int, row_bytes: int
    ) -> Files:
        parts = parts_of(range(column, column + 1), len(index), self._memory, row_bytes)
        tasks = [Task(part.name, (self._folder(name), index, part)) for part in parts]
        self._step.stage(name, function, tasks)
        return self._files(name, [part.name for part in parts])

    def pairs(self, index: Index, copies: Files) -> tuple[Files, dict[str, int]]:
        """Candidate pairs, each once, and facts of the buckets."""
        rules, folder = self._rules, self._folder("pairs")
        function: Callable[..., dict[str, Any]] = find_pairs
        if rules.by_datasketch:
            function = find_pairs_by_datasketch
            tasks = [Task("all", (folder, index, copies, rules.shingler, rules.bands))]
        else:
            columns = range(FIRST_BAND, FIRST_BAND + rules.bands.count)
            limits = float(rules.threshold), rules.max_bucket, self._memory
            tasks = [
                Task(part.name, (folder, index, part, copies, *limits))
                for part in parts_of(columns, len(index), self._memory)
            ]
        results = self._step.stage("pairs", function, tasks)
        split = sum(result["split"] for result in results)
        if split:
            say(f"warning: {split} buckets of more than {rules.max_bucket} documents were split")
        buckets = {
            "split": split,
            "largest": max(result["largest"] for result in results),
            "bound": rules.max_bucket,
        }
        found = tuple(folder / name for result in results for name in result["files"])
        return self._merge(found, sum(result["pairs"] for result in results)), buckets

    def _merge(self, found: Files, pairs: int) -> Files:
        bounds = bounds_of(found, pairs, min(PAIRS_OF_A_TASK, self._memory // PAIR_BYTES))
        tasks = [
            Task(f"{k:06}", (self._folder("candidates"), f"{k:06}", found, first, last))
            for k, (first, last) in enumerate(itertools.pairwise(bounds))
        ]
        self._step.stage("candidates", merge_pairs, tasks)
        return self._files("candidates", [task.key for task in tasks])

    def edges(self, index: Index, pairs: Files) -> tuple[Files, list[dict[str, float]]]:
        """Pairs whose exact similarity meets the threshold, and the histogram of similarities."""
        rules, sets, folder = self._rules, self._folder("sets"), self._folder("edges")
        needed = tuple(file.with_name(f"{file.stem}.needed.npy") for file in pairs)
        tasks = [
            Task(unit.name, (sets, index, k, needed, rules.shingler))
            for k, unit in enumerate(index.units)
        ]
        self._step.stage("sets", write_sets, tasks)
        share = self._memory // 8
        tasks = [
            Task(file.stem, (folder, file, sets, index, rules.threshold, share)) for file in pairs
        ]
        results = self._step.stage("edges", verify_pairs, tasks)
        counts = np.sum(results, axis=0).tolist()
        histogram = [
            {"from": k / BIN, "to": (k + 1) / BIN, "pairs": n} for k, n in enumerate(counts) if n
        ]
        return self._files("edges", [task.key for task in tasks]), histogram

    def choose(self, index: Index, edges: Files, copies: Files, ids: Files) -> Found:
        """Choose the documents to remove."""
        labels = self._folder("clusters")
        (clustered,) = self._step.stage(
            "clusters", connect, [Task("all", (labels, len(index), edges, copies, self._memory))]
        )
        deciding = Deciding(
            index=index,
            labels=labels / "labels.npy",
            edges=edges,
            copies=copies,
            renamed=ids,
            sets=self._folder("sets"),
            priority=self._rules.priority,
            most=self._rules.max_cluster,
            memory=self._memory,
            parts=max(1, -(-clustered * MEMBER_BYTES // self._memory)),
        )
        folder = self._folder("removed")
        tasks = [Task(f"{part:04}", (folder, deciding, part)) for part in range(deciding.parts)]
        results = self._step.stage("removed", decide, tasks)
        sources = Counter[str]()
        for result in results:
            sources.update(result["sources"])
        largest = [cluster for result in results for cluster in result["largest"]]
        largest.sort(key=lambda cluster: (-cluster["size"], cluster["kept_id"]))
        return Found(
            removed=self._files("removed", [task.key for task in tasks]),
            clusters=sum(result["clusters"] for result in results),
            sources=sources,
            largest=largest[:LARGEST],
        )

    def kept(self, index: Index, removed: Files) -> tuple[Funnel, list[dict[str, Any]]]:
        """Write the shards and duplicates.jsonl.  Returns document counts, facts of the shards."""
        settings, folder = self._step.settings, self._folder("lines")
        tasks = [
            Task(unit.name, (k, settings, folder, index, removed), unit.stop - unit.start)
            for k, unit in enumerate(index.units)
        ]
        results = self._step.stage("shards", write_unit, tasks)
        lines = [folder / f"{unit.name}.jsonl" for unit in index.units]
        concatenate(lines, self._step.output / "duplicates.jsonl")
        return sum_funnels(results), [result["shard"] for result in results]
