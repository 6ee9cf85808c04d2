"""Signatures of texts beside those of datasketch and rensa, in turn in one run.

    python benchmarks/corpus_signatures.py --text FILE [--rounds N] [--megabytes N] [--json FILE]

MB of text per CPU second, from str to 128 permutations, normalising and shingling included, on text
that corpus_generator.py makes afresh for every round.  Before anything is timed every contestant
has to estimate the similarities of planted near-duplicates.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import orjson
import tyro
from numpy.typing import NDArray

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_generator import Plan, make_shard
from benchmarks.machine import JsonFile, facts, installed, markdown, spread, told, write_json
from tools.corpus.shingles import PERMUTATIONS, SHINGLES, Shingle, Shingler

LARGEST_ERROR = 0.05  # mean over the planted pairs; 0.03 to be expected of 128 permutations
Signer = Callable[[Sequence[str], Shingle], NDArray[Any]]


def sign_ours(texts: Sequence[str], shingle: Shingle) -> NDArray[Any]:
    return Shingler(shingle, seed=1).sign_texts(texts)


def sign_ours_in_numpy(texts: Sequence[str], shingle: Shingle) -> NDArray[Any]:
    return Shingler(shingle, seed=1, use_numba=False).sign_texts(texts)


def sign_with_datasketch(texts: Sequence[str], shingle: Shingle) -> NDArray[Any]:
    from datasketch import MinHash

    empty = MinHash(PERMUTATIONS)
    signatures = []
    for text in texts:
        signature = empty.copy()
        signature.update_batch([each.encode() for each in shingles(text, shingle)])
        signatures.append(signature.hashvalues)
    return np.stack(signatures)


def sign_with_rensa(texts: Sequence[str], shingle: Shingle) -> NDArray[Any]:
    from rensa import RMinHash

    return np.array(
        [
            RMinHash.digests_from_token_sets([shingles(t, shingle)], PERMUTATIONS, 1)[0]
            for t in texts
        ]
    )


def sign_with_rensa_from_hashes(texts: Sequence[str], shingle: Shingle) -> NDArray[Any]:
    """The shingles hashed in numpy, by the plain twin of our kernel."""
    from rensa import RMinHash

    shingler = Shingler(shingle, seed=1, use_numba=False)
    hashes = [shingler.hashes(shingler.points(text)) for text in texts]
    starts = np.cumsum([0, *map(len, hashes)], dtype=np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate(hashes), starts, PERMUTATIONS, 1
    )
    return np.array(matrix.to_rows())


def shingles(text: str, shingle: Shingle) -> list[str]:
    """The distinct ones, as Python strings."""
    words = text.lower().split()
    if shingle == "word5":
        return list({" ".join(words[k : k + 5]) for k in range(max(1, len(words) - 4))})
    line = " ".join(words)
    return list({line[k : k + 5] for k in range(max(1, len(line) - 4))})


SIGNERS: dict[str, tuple[str | None, Signer]] = {
    "ours": (None, sign_ours),
    "ours, plain numpy": (None, sign_ours_in_numpy),
    "datasketch": ("datasketch", sign_with_datasketch),
    "rensa": ("rensa", sign_with_rensa),
    "rensa from hashes made in numpy": ("rensa", sign_with_rensa_from_hashes),
}


class Corpus(NamedTuple):
    texts: list[str]
    planted: list[tuple[int, int, float]]
    """(place of a near-duplicate, of its original, exact character 5-gram similarity)"""

    @property
    def megabytes(self) -> float:
        return sum(len(text.encode()) for text in self.texts) / 1e6


def fresh_corpus(text: Path, shard: int, megabytes: float) -> Corpus:
    """Documents that no other shard holds; only the pairs within it."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = max(1, round(megabytes / 0.09))
        made = make_shard(Plan((str(text),), 1234, 20), shard, blocks, folder)
        lines = Path(folder, "shards", made["name"]).read_bytes().splitlines()
        truth = Path(folder, "parts", f"{shard:05}.jsonl").read_bytes().splitlines()
    records = [orjson.loads(line) for line in lines]
    places = {record["id"]: k for k, record in enumerate(records)}
    pairs = [orjson.loads(line) for line in truth]
    return Corpus(
        [record["text"] for record in records],
        [(places[p["id"]], places[p["of"]], p["jaccard"]) for p in pairs if p["of"] in places],
    )


def signatures(
    text: Path, rounds: int = 6, megabytes: float = 4, json_file: JsonFile = None
) -> None:
    """MB per CPU second of each contestant.

    Args:
        text: JSON lines of real text, or a folder of them.
        rounds: times that all are timed in turn, each on text of its own.
        megabytes: of text in a round.
        json_file: where every round's figures are written.
    """
    signers: dict[str, Signer] = installed(SIGNERS)
    check_estimates(signers, fresh_corpus(text, 0, 2))
    speeds: dict[str, dict[str, list[float]]] = {
        shingle: {name: [] for name in signers} for shingle in SHINGLES
    }
    for number in range(rounds):
        corpus = fresh_corpus(text, 1 + number, megabytes)
        for shingle in SHINGLES:
            for name in list(signers) if number % 2 else list(signers)[::-1]:
                start = time.process_time()
                signers[name](corpus.texts, shingle)
                seconds = time.process_time() - start
                speeds[shingle][name].append(corpus.megabytes / seconds)
    record = facts("numpy", "numba", "datasketch", "rensa") | {"rounds": rounds}
    print(told(record))
    print(signature_table(speeds))
    write_json(json_file, record | {"MB per CPU second": speeds})


def check_estimates(signers: dict[str, Signer], corpus: Corpus) -> None:
    """That all do the same job, which also warms them up."""
    for name, signer in signers.items():
        signer(corpus.texts[:20], "word5")
        signed = signer(corpus.texts, "char5")
        assert signed.shape == (len(corpus.texts), PERMUTATIONS), (name, signed.shape)
        error = mean(abs((signed[a] == signed[b]).mean() - j) for a, b, j in corpus.planted)
        assert error < LARGEST_ERROR, f"{name} misses the planted similarities by {error:.3f}"


def signature_table(speeds: dict[str, dict[str, list[float]]]) -> str:
    rows = []
    for shingle, by_name in speeds.items():
        for name, values in by_name.items():
            ratios = [a / b for a, b in zip(by_name["ours"], values, strict=True)]
            rows.append([shingle, name, spread(values), spread(ratios)])
    return markdown(["shingle", "who", "MB per CPU second", "ours is so many times faster"], rows)


if __name__ == "__main__":
    tyro.cli(signatures)
