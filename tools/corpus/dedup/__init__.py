"""Removes near-duplicates; keeps exactly one document of each cluster (section 4.1).

    python tools/corpus.py dedup --input clean --output unique
    python tools/corpus.py dedup --input clean --output unique --jaccard 0.8 --workers 8

Text is normalised (lower case, runs of white space as one blank, none at the ends) and becomes the
set of its 5-grams, of characters or of words.  MinHash signatures of 128 permutations, cut into
bands, find candidate pairs.  Every candidate is verified by the exact Jaccard similarity of the
sets: it is an edge where |A n B| / |A u B| is at least --jaccard, compared in integers.  Documents
connected by edges form a cluster; the one with the smallest (source priority, id) stays, for any
shards and workers.  An id is the record's own, or else the first 128 bits of the SHA-256
of the text; the k-th further document of an id gets "-k".

Kept records are written unchanged, as shards.  duplicates.jsonl has a line for each removed one:
{"id", "kept_id", "jaccard", "via", "via_jaccard"}.  `jaccard` is the similarity with the kept one,
which in a chain may lie below the threshold; `via` is the most similar document of an edge.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron.config.checks import at_least, share
from megatron.data.json_lines import WORK, read_shard
from megatron.errors import UsageError
from tools.corpus import external
from tools.corpus.dedup import candidates, clusters, verify
from tools.corpus.dedup.index import FIRST_BAND, ID, TEXT, Block, Index, Part, index_unit
from tools.corpus.dedup.signatures import PERMUTATIONS, Bands, Shingle, Shingler
from tools.corpus.engine import StepRun, Task, sum_counts
from tools.corpus.files import (
    DocumentCounts,
    concatenate,
    documents,
    scratch_writer,
    write_shard,
)
from tools.corpus.settings import ShardSettings, say, warn_of_unknown

PAIRS_OF_A_TASK = 500_000
PAIR_BYTES = 100  # memory of a candidate pair while it is merged and verified
MOST_DOCUMENTS = 1 << 32  # a pair of numbers is one uint64
COPY, NEAR = "same normalised text", "near-duplicate"  # reasons to drop a document
FEW = 100  # documents; the loss of a smaller source is not checked
SHOWN_TEXT = 2000  # characters of a duplicate in the report

Files = tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Settings(ShardSettings):
    shingle: Shingle = "char5"
    """Elements of a document's set: its 5-grams of characters, or of words."""

    jaccard: float = 0.7
    """Least similarity of near-duplicates, over 0 and up to 1."""

    bands: int = 25
    """Number of bands that the signature is cut into; bands x rows is at most 128."""

    rows: int = 5
    """Number of values of the signature in each band."""

    seed: int = 1
    """Seed of the permutations."""

    source_priority: tuple[str, ...] = ()
    """Sources whose documents are kept in preference to others, the most preferred first."""

    max_bucket: int = 500
    """A bucket of more documents is compared in pieces of similar ones, in several orders; this can
    miss pairs that share no other band."""

    max_cluster: int = 10_000
    """A larger cluster stops the run."""

    max_source_loss: float = 0.9
    """A source of 100 documents or more that loses a larger share stops the run."""

    expected_removal: float | None = None
    """Share of the documents expected to be removed, as tools.corpus.plan estimates it; the run
    stops if more than 3 x this + 0.02 would be removed."""

    allow_large_removal: bool = False
    """Continue where --max-cluster, --max-source-loss or --expected-removal would stop the run."""

    no_parameters: ClassVar = frozenset(  # they decide whether the run continues
        {"max_cluster", "max_source_loss", "expected_removal", "allow_large_removal"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.jaccard <= 1:
            raise UsageError(
                "--jaccard", self.jaccard, "over 0 and at most 1", works=("--jaccard", "0.7")
            )
        if self.bands < 1 or self.rows < 1 or self.bands * self.rows > PERMUTATIONS:
            raise UsageError(
                "--bands",
                self.bands,
                f"above 0, and with {{}} {self.rows} make a product of at most {PERMUTATIONS}",
                "--rows",
                works=("--bands", "25", "--rows", "5"),
            )
        at_least(self, seed=0, max_bucket=2, max_cluster=2)
        share(self, "max_source_loss", "expected_removal")

    @property
    def shingler(self) -> Shingler:
        return Shingler(self.shingle, self.seed)

    @property
    def threshold(self) -> Fraction:
        return Fraction(str(self.jaccard))  # as it is written: 0.7 is 7/10


@dataclass(frozen=True)
class DedupResult:
    """The documents to remove."""

    removed: Files
    clusters: int
    sources: Counter[str]
    """Number of removed documents, by source."""
    largest: list[dict[str, Any]]


def run(settings: Settings) -> None:
    bands = Bands(settings.bands, settings.rows)
    with StepRun("dedup", settings) as step:
        if step.done:
            return
        print_recall(bands, settings.jaccard)
        stages = Stages(step, settings)
        index, accounting = stages.index(bands)
        warn_of_unknown("--source-priority", settings.source_priority, accounting.input)
        copies, ids = stages.copies(index), stages.ids(index)
        pairs, buckets = stages.pairs(index, copies)
        edges, histogram = stages.edges(index, pairs)
        result = stages.select(index, edges, copies, ids)
        stop_if_absurd(settings, index, accounting, result)
        kept, shards = stages.kept(index, result.removed)
        accounting.add(kept)
        step.finish(
            accounting,
            shards,
            permutations=PERMUTATIONS,
            recall_curve=recall_curve(bands),
            buckets=buckets,
            jaccard_histogram=histogram,
            clusters=result.clusters,
            largest_clusters=with_texts(index, result.largest),
        )


def recall_curve(bands: Bands) -> list[dict[str, float]]:
    grid = [k / 20 for k in range(2, 21)]
    return [{"jaccard": each, "recall": round(bands.recall(each), 6)} for each in grid]


def print_recall(bands: Bands, threshold: float) -> None:
    """Print the share of pairs that the bands find, by similarity; warn if it is too small."""
    points = [threshold + (1 - threshold) * k / 4 for k in range(4)]
    said = ", ".join(f"{bands.recall(each):.2%} at {each:.3g}" for each in points)
    say(f"dedup: share of similar pairs that the bands find, by Jaccard similarity: {said}")
    if bands.recall(threshold) < 0.95:
        say(
            f"warning: dedup: --bands {bands.count} --rows {bands.rows} find few pairs at "
            f"--jaccard {threshold}; more bands of fewer rows would find more"
        )


def stop_if_absurd(
    settings: Settings, index: Index, accounting: DocumentCounts, result: DedupResult
) -> None:
    """Raises UsageError, and prints the largest clusters, if too much is removed to be right."""
    faults: list[tuple[str, float, str]] = []  # flag, its value, what it has to be
    largest = result.largest[0]["size"] if result.largest else 0
    if largest > settings.max_cluster:
        text = f"at least {largest}, the documents of the largest cluster"
        faults.append(("--max-cluster", settings.max_cluster, text))
    for source, count in sorted(accounting.input.items()):
        lost = result.sources[source]
        if count.documents >= FEW and lost / count.documents > settings.max_source_loss:
            text = f"larger: of the source {source} {lost} of {count.documents} would be removed"
            faults.append(("--max-source-loss", settings.max_source_loss, text))
    rate = result.sources.total() / max(1, documents(accounting.input))
    expected = settings.expected_removal
    if expected is not None and rate > 3 * expected + 0.02:
        text = f"larger: {rate:.1%} of the documents would be removed"
        faults.append(("--expected-removal", expected, text))
    if not faults:
        return
    for cluster in with_texts(index, result.largest[:3]):
        say(f"cluster of {cluster['size']} documents, {cluster['kept_id']} would stay:")
        for member in cluster["members"]:
            say(f"  {member['id']}: {' '.join(member['text'].split())[:200]!r}")
    if not settings.allow_large_removal:
        for flag, value, text in faults[1:]:
            say(f"dedup: {flag} {value} must be {text}, too")
        raise UsageError(*faults[0], works=("--allow-large-removal",))
    for flag, value, text in faults:
        say(f"warning: dedup: {flag} {value} should be {text}")


def with_texts(index: Index, clusters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The clusters with the beginnings of their members' texts."""
    numbers = sorted({member["number"] for each in clusters for member in each["members"]})
    texts = dict(index.texts(np.array(numbers, np.int64)))
    return [
        {
            **cluster,
            "members": [
                {name: member[name] for name in ("id", "source", "jaccard")}
                | {"text": texts[member["number"]][:SHOWN_TEXT]}
                for member in cluster["members"]
            ],
        }
        for cluster in clusters
    ]


class Stages:
    """Each method runs a stage, or a few that belong together; called in this order."""

    def __init__(self, step: StepRun, settings: Settings) -> None:
        self._step = step
        self._settings = settings
        self._memory = settings.memory_bytes

    def _folder(self, stage: str) -> Path:
        return self._step.output / WORK / f"arrays-{stage}"

    def _run(
        self, name: str, function: Callable[..., Any], calls: Mapping[str, tuple[Any, ...]]
    ) -> tuple[list[Any], Files]:
        """Run a stage.  calls: arguments of each task, by its key, after the stage's own folder.
        Returns the results, and the file KEY.npy of each task in the folder."""
        folder = self._folder(name)
        weights = {unit.name: unit.stop - unit.start for unit in self._step.units}
        tasks = [
            Task(key, (folder, *arguments), weights.get(key, 1)) for key, arguments in calls.items()
        ]
        results = self._step.stage(name, function, tasks)
        return results, tuple(folder / f"{key}.npy" for key in calls)

    def index(self, bands: Bands) -> tuple[Index, DocumentCounts]:
        """The index of the corpus, and input counts.  Raises ValueError if there is no document."""
        settings, units = self._settings, self._step.units
        arguments = (settings, settings.shingler, bands)
        calls = {unit.name: (unit, *arguments) for unit in units}
        results, _ = self._run("signatures", index_unit, calls)
        accounting = sum_counts(results)
        blocks = tuple(
            Block(unit, name, count)
            for unit, result in enumerate(results)
            for name, count in result["blocks"]
        )
        if not blocks:
            self._step.list_dropped(accounting)  # raises it
        index = Index(self._folder("signatures"), tuple(units), blocks)
        if len(index) >= MOST_DOCUMENTS:
            raise ValueError(f"--input holds {len(index)} documents; under 2^32 would work")
        index.save()
        return index, accounting

    def _parts(self, index: Index, column: int, row_bytes: int) -> list[Part]:
        parts = external.count_parts(len(index), self._memory, row_bytes)
        return [Part(column, number, parts) for number in range(parts)]

    def copies(self, index: Index) -> Files:
        """Documents that another of the same normalised text represents."""
        parts = self._parts(index, TEXT, candidates.ROW_BYTES)
        calls = {part.name: (index, part) for part in parts}
        return self._run("copies", candidates.find_copies, calls)[1]

    def ids(self, index: Index) -> Files:
        """Documents whose id a previous one has too."""
        parts = self._parts(index, ID, candidates.NAME_BYTES)
        calls = {part.name: (index, part) for part in parts}
        return self._run("ids", candidates.find_equal_ids, calls)[1]

    def pairs(self, index: Index, copies: Files) -> tuple[Files, dict[str, int]]:
        """Candidate pairs, each once, and facts of the buckets."""
        settings = self._settings
        limits = float(settings.threshold), settings.max_bucket, self._memory
        calls: dict[str, tuple[Any, ...]] = {
            part.name: (index, part, copies, *limits)
            for band in range(settings.bands)
            for part in self._parts(index, FIRST_BAND + band, candidates.ROW_BYTES)
        }
        results, _ = self._run("pairs", candidates.find_pairs, calls)
        split = sum(result["split"] for result in results)
        if split:
            say(f"warning: {split} buckets of more than {settings.max_bucket} documents were split")
        buckets = {
            "split": split,
            "largest": max(result["largest"] for result in results),
            "bound": settings.max_bucket,
        }
        folder, count = self._folder("pairs"), sum(result["pairs"] for result in results)
        found = tuple(folder / name for result in results for name in result["files"])
        most = min(PAIRS_OF_A_TASK, self._memory // PAIR_BYTES)
        bounds = itertools.pairwise(candidates.bounds_of(found, count, most))
        calls = {f"{k:06}": (f"{k:06}", found, *ends) for k, ends in enumerate(bounds)}
        return self._run("candidates", candidates.merge_pairs, calls)[1], buckets

    def edges(self, index: Index, pairs: Files) -> tuple[Files, list[dict[str, float]]]:
        """Pairs whose exact similarity meets the threshold, and the histogram of similarities."""
        settings, sets = self._settings, self._folder("sets")
        needed = tuple(file.with_name(f"{file.stem}.needed.npy") for file in pairs)
        calls: dict[str, tuple[Any, ...]] = {
            unit.name: (index, k, needed, settings.shingler) for k, unit in enumerate(index.units)
        }
        self._run("sets", verify.write_sets, calls)
        limits = settings.threshold, self._memory // 8
        calls = {file.stem: (file, sets, index, *limits) for file in pairs}
        results, files = self._run("edges", verify.verify_pairs, calls)
        bins = verify.BIN
        histogram = [
            {"from": k / bins, "to": (k + 1) / bins, "pairs": n}
            for k, n in enumerate(np.sum(results, axis=0).tolist())
            if n
        ]
        return files, histogram

    def select(self, index: Index, edges: Files, copies: Files, ids: Files) -> DedupResult:
        """Choose the documents to remove."""
        settings = self._settings
        calls: dict[str, tuple[Any, ...]] = {"labels": (len(index), edges, copies, self._memory)}
        (clustered,), (labels,) = self._run("clusters", clusters.connected_components, calls)
        parts = max(1, -(-clustered * clusters.MEMBER_BYTES // self._memory))
        task = clusters.ClusterTask(
            index=index,
            labels=labels,
            edges=edges,
            copies=copies,
            renamed=ids,
            sets=self._folder("sets"),
            priority=settings.source_priority,
            max_cluster=None if settings.allow_large_removal else settings.max_cluster,
            memory=self._memory,
            parts=parts,
        )
        calls = {f"{part:04}": (task, part) for part in range(parts)}
        results, removed = self._run("removed", clusters.select_kept, calls)
        sources = Counter[str]()
        for result in results:
            sources.update(result["sources"])
        largest = [cluster for result in results for cluster in result["largest"]]
        largest.sort(key=lambda cluster: (-cluster["size"], cluster["kept_id"]))
        return DedupResult(
            removed=removed,
            clusters=sum(result["clusters"] for result in results),
            sources=sources,
            largest=largest[: clusters.LARGEST],
        )

    def kept(self, index: Index, removed: Files) -> tuple[DocumentCounts, list[dict[str, Any]]]:
        """Write the shards and duplicates.jsonl.  Returns document counts, facts of the shards."""
        calls = {
            unit.name: (k, self._settings, index, removed) for k, unit in enumerate(index.units)
        }
        results, files = self._run("shards", write_unit, calls)
        lines = [file.with_suffix(".jsonl") for file in files]
        concatenate(lines, self._step.output / "duplicates.jsonl")
        return sum_counts(results), [result["shard"] for result in results]


def write_unit(
    folder: Path, number: int, settings: ShardSettings, index: Index, files: Files
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
    with scratch_writer(folder / f"{unit.name}.jsonl") as target, contextlib.ExitStack() as stack:
        sources = {path: stack.enter_context(path.open("rb")) for *_, path in removed}
        for _, line, _, path in removed:
            sources[path].seek(line)
            target.write(sources[path].readline())
    is_copy = {document: copy for document, _, copy, _ in removed}
    accounting = DocumentCounts()
    rows = index.rows(number)
    row = next(rows, None)
    with write_shard(settings.output, f"part-{unit.name}", settings.compress) as shard:
        for line in read_shard(unit.file, unit.start, unit.stop):
            if row is None or line.offset != row[1]:
                continue  # holds no document; the index has counted it
            document, _, size, source = row
            if document in is_copy:
                counts = accounting.dropped[COPY if is_copy[document] else NEAR]
            else:
                counts = accounting.output
                shard.write(line.content)
            counts[source].add(size)
            row = next(rows, None)
    assert row is None
    return {"accounting": accounting.to_json(), "shard": shard.facts}
