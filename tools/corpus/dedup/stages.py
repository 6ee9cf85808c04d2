"""The stages of `tools.corpus.dedup`, in order, with the files that each passes to the next."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.files import atomic_writer
from megatron.data.json_lines import WORK, read_shard
from tools.corpus import external
from tools.corpus.dedup import candidates, clusters, verify
from tools.corpus.dedup.index import (
    FIRST_BAND,
    ID,
    TEXT,
    Block,
    Index,
    Part,
    block_name,
    index_unit,
)
from tools.corpus.dedup.signatures import Bands, Shingler
from tools.corpus.engine import StepRun, Task, sum_funnels
from tools.corpus.files import Count, Funnel, concatenate, documents, write_shard
from tools.corpus.settings import StepSettings, say

PAIRS_OF_A_TASK = 500_000
PAIR_BYTES = 100  # memory of a candidate pair while it is merged and verified
MOST_DOCUMENTS = 1 << 32  # a pair of numbers is one uint64
COPY, NEAR = "same normalised text", "near-duplicate"  # reasons to drop a document

Files = tuple[Path, ...]


@dataclass(frozen=True)
class DedupConfig:
    """Rules for which documents are near-duplicates, and which of them stays."""

    shingler: Shingler
    bands: Bands
    threshold: Fraction
    max_bucket: int
    priority: tuple[str, ...]
    max_cluster: int | None
    """Number of documents; with a larger cluster nothing is removed."""


@dataclass(frozen=True)
class DedupResult:
    """The documents to remove."""

    removed: Files
    clusters: int
    sources: Counter[str]
    """Number of removed documents, by source."""
    largest: list[dict[str, Any]]


class Stages:
    """Each method runs a stage, or a few that belong together; called in this order."""

    def __init__(self, step: StepRun, config: DedupConfig) -> None:
        self._step = step
        self._config = config
        self._memory = step.settings.memory_bytes

    def _folder(self, name: str) -> Path:
        return self._step.output / WORK / f"arrays-{name}"

    def _files(self, name: str, tasks: Sequence[Task]) -> Files:
        return tuple(self._folder(name) / f"{task.key}.npy" for task in tasks)

    def index(self) -> tuple[Index, Funnel]:
        """The index of the corpus, and input counts.  Raises ValueError if there is no document."""
        step, config, folder = self._step, self._config, self._folder("index")
        tasks = []
        for unit in step.units:
            arguments = (unit, step.settings, folder, config.shingler, config.bands)
            tasks.append(Task(unit.name, arguments, unit.stop - unit.start))
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

    def _parts(self, index: Index, column: int, row_bytes: int) -> list[Part]:
        parts = external.count_parts(len(index), self._memory, row_bytes)
        return [Part(column, number, parts) for number in range(parts)]

    def copies(self, index: Index) -> Files:
        """Documents that another of the same normalised text represents."""
        return self._by_column("copies", candidates.find_copies, index, TEXT, candidates.ROW_BYTES)

    def ids(self, index: Index) -> Files:
        """Documents whose id a previous one has too."""
        return self._by_column("ids", candidates.find_equal_ids, index, ID, candidates.NAME_BYTES)

    def _by_column(
        self, name: str, function: Callable[..., int], index: Index, column: int, row_bytes: int
    ) -> Files:
        parts = self._parts(index, column, row_bytes)
        tasks = [Task(part.name, (self._folder(name), index, part)) for part in parts]
        self._step.stage(name, function, tasks)
        return self._files(name, tasks)

    def pairs(self, index: Index, copies: Files) -> tuple[Files, dict[str, int]]:
        """Candidate pairs, each once, and facts of the buckets."""
        config, folder = self._config, self._folder("pairs")
        limits = float(config.threshold), config.max_bucket, self._memory
        tasks = [
            Task(part.name, (folder, index, part, copies, *limits))
            for band in range(config.bands.count)
            for part in self._parts(index, FIRST_BAND + band, candidates.ROW_BYTES)
        ]
        results = self._step.stage("pairs", candidates.find_pairs, tasks)
        split = sum(result["split"] for result in results)
        if split:
            say(f"warning: {split} buckets of more than {config.max_bucket} documents were split")
        buckets = {
            "split": split,
            "largest": max(result["largest"] for result in results),
            "bound": config.max_bucket,
        }
        found = tuple(folder / name for result in results for name in result["files"])
        count = sum(result["pairs"] for result in results)
        most = min(PAIRS_OF_A_TASK, self._memory // PAIR_BYTES)
        bounds = itertools.pairwise(candidates.bounds_of(found, count, most))
        tasks = [
            Task(f"{k:06}", (self._folder("candidates"), f"{k:06}", found, first, last))
            for k, (first, last) in enumerate(bounds)
        ]
        self._step.stage("candidates", candidates.merge_pairs, tasks)
        return self._files("candidates", tasks), buckets

    def edges(self, index: Index, pairs: Files) -> tuple[Files, list[dict[str, float]]]:
        """Pairs whose exact similarity meets the threshold, and the histogram of similarities."""
        config, sets, folder = self._config, self._folder("sets"), self._folder("edges")
        needed = tuple(file.with_name(f"{file.stem}.needed.npy") for file in pairs)
        tasks = [
            Task(unit.name, (sets, index, k, needed, config.shingler))
            for k, unit in enumerate(index.units)
        ]
        self._step.stage("sets", verify.write_sets, tasks)
        share = self._memory // 8
        tasks = [
            Task(file.stem, (folder, file, sets, index, config.threshold, share)) for file in pairs
        ]
        results = self._step.stage("edges", verify.verify_pairs, tasks)
        bins = verify.BIN
        histogram = [
            {"from": k / bins, "to": (k + 1) / bins, "pairs": n}
            for k, n in enumerate(np.sum(results, axis=0).tolist())
            if n
        ]
        return self._files("edges", tasks), histogram

    def select(self, index: Index, edges: Files, copies: Files, ids: Files) -> DedupResult:
        """Choose the documents to remove."""
        labels, folder = self._folder("clusters"), self._folder("removed")
        tasks = [Task("all", (labels, len(index), edges, copies, self._memory))]
        (clustered,) = self._step.stage("clusters", clusters.connected_components, tasks)
        parts = max(1, -(-clustered * clusters.MEMBER_BYTES // self._memory))
        task = clusters.ClusterTask(
            index=index,
            labels=labels / "labels.npy",
            edges=edges,
            copies=copies,
            renamed=ids,
            sets=self._folder("sets"),
            priority=self._config.priority,
            max_cluster=self._config.max_cluster,
            memory=self._memory,
            parts=parts,
        )
        tasks = [Task(f"{part:04}", (folder, task, part)) for part in range(parts)]
        results = self._step.stage("removed", clusters.select_kept, tasks)
        sources = Counter[str]()
        for result in results:
            sources.update(result["sources"])
        largest = [cluster for result in results for cluster in result["largest"]]
        largest.sort(key=lambda cluster: (-cluster["size"], cluster["kept_id"]))
        return DedupResult(
            removed=self._files("removed", tasks),
            clusters=sum(result["clusters"] for result in results),
            sources=sources,
            largest=largest[: clusters.LARGEST],
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


def write_unit(
    number: int, settings: StepSettings, folder: Path, index: Index, files: Files
) -> dict[str, Any]:
    """Write the shard of a unit's documents that stay, and its lines of duplicates.jsonl.

    files: of the removed documents, each with its lines beside it.
    """
    unit, removed = index.units[number], []
    first, last = index.unit_firsts[number : number + 2]
    for path in files:
        rows = external.mapped(path)
        start, end = np.searchsorted(rows["number"], [first, last])
        removed += [(*row, path.with_suffix(".jsonl")) for row in rows[start:end].tolist()]
    removed.sort()
    with atomic_writer(folder / f"{unit.name}.jsonl") as target, contextlib.ExitStack() as stack:
        sources = {path: stack.enter_context(path.open("rb")) for *_, path in removed}
        for _, line, _, path in removed:
            sources[path].seek(line)
            target.write(sources[path].readline())
    is_copy = {document: copy for document, _, copy, _ in removed}
    funnel = Funnel()
    rows = index.rows(number)
    row = next(rows, None)
    with write_shard(settings.output, f"part-{unit.name}", settings.compress) as shard:
        for line in read_shard(unit.file, unit.start, unit.stop):
            if row is None or line.offset != row[1]:
                continue  # holds no document; the index has counted it
            document, _, size, source = row
            if document in is_copy:
                counts = funnel.dropped.setdefault(COPY if is_copy[document] else NEAR, {})
            else:
                counts = funnel.output
                shard.write(line.content)
            counts.setdefault(source, Count()).add(size)
            row = next(rows, None)
    assert row is None
    return {"funnel": funnel.to_json(), "shard": shard.facts}
