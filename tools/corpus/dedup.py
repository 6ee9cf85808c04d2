"""Near-duplicates above a Jaccard similarity removed, exactly one of each cluster kept.

Character 5-grams; MinHash signatures cut into bands find candidate pairs (section 4.1's
locality-sensitive hashing); every candidate is verified by its exact similarity.  All in memory.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from tools.corpus.jsonl import Funnel, Record, placed, read_records, run, write_record

SHINGLE = 5  # characters
BANDS, ROWS = 32, 4  # a pair at 0.7 misses every bucket once in 6,500 times: (1 - 0.7^4)^32
PERMUTATIONS = BANDS * ROWS
Words = npt.NDArray[np.uint64]


def dedup(input: tuple[Path, ...], output: Path, report: Path, threshold: float = 0.7) -> None:
    """Keep one document of each cluster of near-duplicates: the one with the smallest id.

    Documents are linked when the Jaccard similarity of their character 5-grams (lower case, runs
    of white space as one blank) is above the threshold; a cluster is all that hangs together.

    Args:
        input: jsonl files with a "text" and, better, a unique "id" in each line.
        output: the jsonl file to write, in the order of the input.
        report: a JSON file for what was dropped, by source.
        threshold: Jaccard similarity, 0 to 1.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"--threshold {threshold}: has to be between 0 and 1")
    funnel = Funnel(
        "dedup", threshold=threshold, shingle=SHINGLE, permutations=PERMUTATIONS,
        bands=BANDS, rows=ROWS,
    )  # fmt: skip
    records = list(read_records(input, funnel))
    clusters = find_clusters([record["text"] for record in records], threshold)
    keepers = {min(cluster, key=lambda i: order_key(records[i])) for cluster in clusters}
    with placed(output) as file:
        for number, record in enumerate(records):
            if number in keepers:
                write_record(file, record, funnel)
            else:
                funnel.drop(record["text"], f"near-duplicate above Jaccard {threshold}")
    funnel.write(
        report,
        clusters=sum(len(cluster) > 1 for cluster in clusters),
        sources=retention(records, keepers),
    )


def order_key(record: Record) -> tuple[str, str]:
    return str(record.get("id", "")), record["text"]


def retention(records: Sequence[Record], keepers: set[int]) -> dict[str, dict[str, int]]:
    """Documents in and kept of each "source" that the records name."""
    sources = [str(record.get("source", "unnamed")) for record in records]
    kept = Counter(sources[number] for number in keepers)
    return {name: {"input": n, "output": kept[name]} for name, n in Counter(sources).items()}


def find_clusters(texts: Sequence[str], threshold: float) -> list[list[int]]:
    """Numbers of the texts, grouped: linked by similarity above `threshold`, or alone."""
    clusters = Clusters(len(texts))
    normal = [normalise(text) for text in texts]
    first: dict[str, int] = {}  # equal texts are linked here, so that no bucket is full of them
    for number, text in enumerate(normal):
        clusters.join(first.setdefault(text, number), number)
    distinct = list(first.values())
    sets = [shingles(normal[number]) for number in tqdm(distinct, desc="dedup: shingles")]
    signatures = np.stack([signature(s) for s in tqdm(sets, desc="dedup: signatures")])
    refuted: set[tuple[int, int]] = set()
    for i, j in candidates(signatures):
        pair = distinct[i], distinct[j]
        if (i, j) in refuted or clusters.together(*pair):
            continue
        if jaccard(sets[i], sets[j]) > threshold:
            clusters.join(*pair)
        else:
            refuted.add((i, j))
    return clusters.groups()


def normalise(text: str) -> str:
    return " ".join(text.lower().split())


def mix(words: Words) -> Words:
    """A bijection of 64 bits that spreads every bit over all (the finaliser of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def polynomial(columns: Iterable[Words], count: int) -> Words:
    """One 64-bit hash for each of `count` rows given column by column."""
    hashes = np.zeros(count, np.uint64)
    for column in columns:
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + column
    return mix(hashes)


def shingles(text: str) -> Words:
    """The sorted distinct hashes of the text's 5-grams of characters; a shorter text is one."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    count = max(len(points) - SHINGLE + 1, 1)
    width = min(SHINGLE, len(points))
    return np.unique(polynomial((points[k : k + count] for k in range(width)), count))


def jaccard(a: Words, b: Words) -> float:
    """Similarity of two sets given as sorted distinct hashes."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)


FACTORS, OFFSETS = np.random.default_rng(1909).integers(
    2**64, size=(2, PERMUTATIONS, 1), dtype=np.uint64
)
FACTORS |= np.uint64(1)  # odd: a bijection of 64 bits


def signature(hashes: Words, block: int = 4096) -> Words:
    """MinHash, [PERMUTATIONS]: the smallest hash under each permutation; blocks fit the cache."""
    parts = [hashes[k : k + block] for k in range(0, len(hashes), block)]
    return np.min([(FACTORS * part + OFFSETS).min(axis=1) for part in parts], axis=0)


def candidates(signatures: Words) -> Iterator[tuple[int, int]]:
    """All pairs i < j that share a bucket, band by band; a pair may come once in each band.

    signatures: [documents, PERMUTATIONS].
    """
    for band in tqdm(range(BANDS), desc="dedup: pairs"):
        rows = signatures[:, band * ROWS : (band + 1) * ROWS]
        keys = polynomial(rows.T, len(rows))
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order])) + 1
        for bucket in np.split(order, starts):
            yield from combinations(bucket.tolist(), 2)


class Clusters:
    """Union-find over the numbers 0 to n - 1."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def root(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def together(self, i: int, j: int) -> bool:
        return self.root(i) == self.root(j)

    def join(self, i: int, j: int) -> None:
        self.parent[self.root(i)] = self.root(j)

    def groups(self) -> list[list[int]]:
        members: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self.parent)):
            members[self.root(i)].append(i)
        return list(members.values())


if __name__ == "__main__":
    run(dedup)
