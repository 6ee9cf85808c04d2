"""Removes near-duplicates; keeps exactly one document of each cluster (section 4.1).

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

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from megatron.config.checks import at_least, share
from megatron.errors import UsageError
from tools.corpus.dedup.index import Index
from tools.corpus.dedup.signatures import PERMUTATIONS, Bands, Shingle, Shingler
from tools.corpus.dedup.stages import DedupConfig, DedupResult, Stages
from tools.corpus.engine import StepRun
from tools.corpus.files import Funnel, documents
from tools.corpus.settings import StepSettings, say

FEW = 100  # documents; the loss of a smaller source is not checked
SHOWN_TEXT = 2000  # characters of a duplicate in the report


@dataclass(frozen=True, kw_only=True)
class Settings(StepSettings):
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
    """A bucket of more documents is split into pieces of neighbours, in several orders; a pair that
    no other band finds may be lost."""

    max_cluster: int = 10_000
    """A larger cluster stops the run."""

    max_source_loss: float = 0.9
    """A source of 100 documents or more that loses a larger share stops the run."""

    expected_removal: float | None = None
    """Share of the documents expected to be removed, as tools.corpus.plan estimates it from a
    sample; a share above three times that plus 0.02 stops the run."""

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
                f"above 0, and with --rows {self.rows} make a product of at most {PERMUTATIONS}",
                works=("--bands", "25", "--rows", "5"),
            )
        at_least(self, max_bucket=2, max_cluster=2)
        share(self, "max_source_loss", "expected_removal")

    @property
    def config(self) -> DedupConfig:
        return DedupConfig(
            shingler=Shingler(self.shingle, self.seed),
            bands=Bands(self.bands, self.rows),
            threshold=Fraction(str(self.jaccard)),  # as it is written: 0.7 is 7/10
            max_bucket=self.max_bucket,
            priority=self.source_priority,
            max_cluster=None if self.allow_large_removal else self.max_cluster,
        )


def run(settings: Settings) -> None:
    config = settings.config
    with StepRun("dedup", settings) as step:
        if step.done:
            return
        say_recall(config.bands, settings.jaccard)
        stages = Stages(step, config)
        index, funnel = stages.index()
        if unknown := [name for name in settings.source_priority if name not in funnel.input]:
            say(
                f"warning: dedup: --source-priority {' '.join(unknown)}: no document has this "
                f"source; there are {', '.join(sorted(funnel.input))}"
            )
        copies, ids = stages.copies(index), stages.ids(index)
        pairs, buckets = stages.pairs(index, copies)
        edges, histogram = stages.edges(index, pairs)
        result = stages.select(index, edges, copies, ids)
        stop_if_absurd(settings, index, funnel, result)
        kept, shards = stages.kept(index, result.removed)
        funnel.add(kept)
        step.finish(
            funnel,
            shards,
            permutations=PERMUTATIONS,
            recall_curve=recall_curve(config.bands),
            buckets=buckets,
            jaccard_histogram=histogram,
            clusters=result.clusters,
            largest_clusters=with_texts(index, result.largest),
        )


def recall_curve(bands: Bands) -> list[dict[str, float]]:
    grid = [k / 20 for k in range(2, 21)]
    return [{"jaccard": each, "recall": round(bands.recall(each), 6)} for each in grid]


def say_recall(bands: Bands, threshold: float) -> None:
    """Print the share of pairs that the bands find, by similarity; warn if it is too small."""
    points = [threshold + (1 - threshold) * k / 4 for k in range(4)]
    said = ", ".join(f"{bands.recall(each):.2%} at {each:.3g}" for each in points)
    say(f"dedup: of the pairs of a Jaccard similarity the bands find {said}")
    if bands.recall(threshold) < 0.95:
        say(
            f"warning: dedup: --bands {bands.count} --rows {bands.rows} find few pairs at "
            f"--jaccard {threshold}; more bands of fewer rows would find more"
        )


def stop_if_absurd(settings: Settings, index: Index, funnel: Funnel, result: DedupResult) -> None:
    """Raises ValueError, and prints the largest clusters, if too much is removed to be right."""
    complaints = []
    largest = result.largest[0]["size"] if result.largest else 0
    if largest > settings.max_cluster:
        complaints.append(
            f"a cluster has {largest} documents, over --max-cluster {settings.max_cluster}"
        )
    for source, count in sorted(funnel.input.items()):
        lost = result.sources[source] / max(1, count.documents)
        if count.documents >= FEW and lost > settings.max_source_loss:
            complaints.append(
                f"the source {source} would lose {lost:.0%} of its {count.documents} documents, "
                f"over --max-source-loss {settings.max_source_loss}"
            )
    rate = result.sources.total() / max(1, documents(funnel.input))
    expected = settings.expected_removal
    if expected is not None and rate > 3 * expected + 0.02:
        complaints.append(
            f"{rate:.1%} of the documents would be removed, and {expected:.1%} were expected"
        )
    if not complaints:
        return
    for cluster in with_texts(index, result.largest[:3]):
        say(f"cluster of {cluster['size']} documents, {cluster['kept_id']} would stay:")
        for member in cluster["members"]:
            say(f"  {member['id']}: {' '.join(member['text'].split())[:200]!r}")
    message = "; ".join(complaints)
    if not settings.allow_large_removal:
        raise ValueError(f"dedup: {message}; --allow-large-removal continues all the same")
    say(f"warning: dedup: {message}")


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
