"""Signatures of texts.

MB of text per CPU second, from str to 128 permutations, normalising and shingling included, on
generated text (`corpus_generator.py`), another in every round. First every contender has to
estimate the similarities of near-duplicates planted in it, on average to within 0.05 (0.03 is to be
expected). rensa gets shingles as strings, or hashes by the plain twin of this project's kernel.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.corpus_generator import five_grams, generate, read
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, scratch
from benchmarks.report import Results
from tools.corpus.shingles import PERMUTATIONS, SHINGLES, Shingle, Shingler

OURS, SPEED, RATIO = "this project", "MB per CPU second", "this project's speed / its"
NAMES = (OURS, f"{OURS}, plain numpy", "datasketch", "rensa", "rensa from hashes made in numpy")


def sign(name: str, shingle: Shingle, texts: Sequence[str]) -> Any:
    """[texts, PERMUTATIONS]"""
    shingler = Shingler(shingle, seed=1, use_numba=name == OURS)
    if OURS in name:
        return shingler.sign_texts(texts)
    sets: Iterable[set[str]] = map(five_grams, texts)
    if shingle == "word5":
        split = (text.lower().split() for text in texts)
        sets = ({" ".join(w[k : k + 5]) for k in range(max(1, len(w) - 4))} for w in split)
    if name == "datasketch":
        from datasketch import MinHash

        encoded = ([each.encode() for each in own] for own in sets)
        signed = MinHash.generator(encoded, num_perm=PERMUTATIONS)
        return np.stack([each.hashvalues for each in signed])
    from rensa import RMinHash

    if name == "rensa":
        by_strings = RMinHash.digests_from_token_sets
        return np.array([by_strings([[*own]], PERMUTATIONS, 1)[0] for own in sets])
    hashes = [shingler.hashes(shingler.points(text)) for text in texts]
    starts = np.cumsum([0, *map(len, hashes)], dtype=np.uint64)
    by_hashes = RMinHash.digest_matrix_from_flat_token_hashes
    return np.array(by_hashes(np.concatenate(hashes), starts, PERMUTATIONS, 1).to_rows())


def run(rank: Rank, name: str, shingle: Shingle, folder: str) -> Turn:
    documents, pairs = (read(Path(folder, str(rank.round), each)) for each in ("shards", "truth"))
    texts = [each["text"] for each in documents]
    signed = dict(zip([d["id"] for d in documents], sign(name, "char5", texts), strict=True))
    errors = [np.mean(signed[p["id"]] == signed[p["of"]]) - p["jaccard"] for p in pairs]
    if (error := float(np.abs(errors).mean())) > 0.05:
        raise ValueError(f"{name} misses the planted similarities by {error:.3f}")
    sign(name, shingle, texts[:20])
    size = sum(len(text.encode()) for text in texts)
    return lambda: {"bytes": size, "error": error, "texts": len(sign(name, shingle, texts))}


def contenders(flags: Flags, text: tuple[Path, ...] = (), size: str = "4MB") -> Iterator[Contender]:
    """Sign text of this size, made of JSON lines; by default of English of this Python."""
    for seed in range(flags.rounds or QUESTION.rounds):
        generate(scratch() / str(seed), text, size, seed, workers=1)
    for shingle, name in product(SHINGLES, NAMES):
        arguments = {"name": name, "shingle": shingle, "folder": str(scratch())}
        needs = () if OURS in name else (name.split()[0],)
        yield Contender(name, run, arguments, group=shingle, needs=needs)


def result(found: Results) -> str:
    speeds = [found.median(shingle, OURS, SPEED) for shingle in SHINGLES]
    ratios = [found.median(shingle, "datasketch", RATIO) for shingle in SHINGLES]
    said = f"{speeds[0]:.0f} MB/s of character 5-grams and {speeds[1]:.0f} MB/s of word 5-grams"
    return f"{said}, {ratios[0]:.0f} and {ratios[1]:.0f} times as fast as datasketch."


COLUMNS = (
    Column(SPEED, "bytes", "{:.1f}", per="cpu", unit=1e6),
    Column(RATIO, "cpu", "{:.1f}", "its / first"),
    Column("error of a similarity", "error", "{:.3f}"),
)
QUESTION = Question(contenders, COLUMNS, result, rounds=6, warm_up=0, picture="bars")

if __name__ == "__main__":
    QUESTION.run()
