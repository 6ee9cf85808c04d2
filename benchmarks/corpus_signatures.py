"""Signatures of texts for de-duplication beside those of datasketch and rensa.

MB of text per CPU second, from str to 128 permutations, normalising and shingling included, on
generated text (`corpus_generator.py`) of its own in every round. Before anything is timed every
contender has to estimate the similarities of near-duplicates planted in it, on average to within
0.05 (0.03 is to be expected of 128 permutations). rensa gets the shingles as strings, or
their hashes, which the plain twin of this project's kernel makes in numpy.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.corpus_generator import corpora, five_grams, read
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
from benchmarks.report import Results
from tools.corpus.shingles import PERMUTATIONS, SHINGLES, Shingle, Shingler

LARGEST_ERROR, ROUNDS = 0.05, 6
OURS, SPEED, RATIO = "this project", "MB per CPU second", "this project's speed / its"
Signer = Callable[[Sequence[str]], Any]  # to [texts, PERMUTATIONS]


def shingles(text: str, shingle: Shingle) -> list[str]:
    """The distinct ones, as peers take them."""
    words = text.lower().split()
    if shingle == "char5":
        return [*five_grams(text)]
    return [*{" ".join(words[k : k + 5]) for k in range(max(1, len(words) - 4))}]


def datasketch(shingle: Shingle) -> Signer:
    from datasketch import MinHash

    def sign(texts: Sequence[str]) -> Any:
        encoded = ([each.encode() for each in shingles(text, shingle)] for text in texts)
        return np.stack([m.hashvalues for m in MinHash.generator(encoded, num_perm=PERMUTATIONS)])

    return sign


def rensa(shingle: Shingle) -> Signer:
    from rensa import RMinHash

    sign = RMinHash.digests_from_token_sets
    return lambda texts: np.array([sign([shingles(t, shingle)], PERMUTATIONS, 1)[0] for t in texts])


def rensa_from_hashes(shingle: Shingle) -> Signer:
    from rensa import RMinHash

    shingler = Shingler(shingle, seed=1, use_numba=False)

    def sign(texts: Sequence[str]) -> Any:
        hashes = [shingler.hashes(shingler.points(text)) for text in texts]
        starts = np.cumsum([0, *map(len, hashes)], dtype=np.uint64)
        digest = RMinHash.digest_matrix_from_flat_token_hashes
        return np.array(digest(np.concatenate(hashes), starts, PERMUTATIONS, 1).to_rows())

    return sign


SIGNERS: dict[str, Callable[[Shingle], Signer]] = {
    OURS: lambda shingle: Shingler(shingle, seed=1).sign_texts,
    f"{OURS}, plain numpy": lambda shingle: Shingler(shingle, seed=1, use_numba=False).sign_texts,
    "datasketch": datasketch,
    "rensa": rensa,
    "rensa from hashes made in numpy": rensa_from_hashes,
}


def run(rank: Rank, signer: str, shingle: Shingle, folder: str) -> Turn:
    documents, planted = read(Path(folder, "text", str(rank.round)))
    texts, sign = [each["text"] for each in documents], SIGNERS[signer](shingle)
    signed = SIGNERS[signer]("char5")(texts)
    own = {each["id"]: row for each, row in zip(documents, signed, strict=True)}
    found = np.array([(own[each["id"]] == own[each["of"]]).mean() for each in planted])
    error = float(np.abs(found - [each["jaccard"] for each in planted]).mean())
    if error > LARGEST_ERROR:
        raise ValueError(f"{signer} misses the planted similarities by {error:.3f}")
    sign(texts[:20])

    def turn() -> dict[str, Any]:
        sign(texts)
        return {"bytes": sum(len(text.encode()) for text in texts), "error": error}

    return turn


def result(found: Results) -> str:
    speeds, ratios = (
        [found.median(shingle, name, title) for shingle in ("char5", "word5")]
        for name, title in ((OURS, SPEED), ("datasketch", RATIO))
    )
    return (
        f"{speeds[0]:.0f} MB/s of character 5-grams and {speeds[1]:.0f} MB/s of word 5-grams, "
        f"{ratios[0]:.0f} and {ratios[1]:.0f} times as fast as datasketch."
    )


def main(flags: Flags, text: tuple[Path, ...] = (), size: str = "4MB") -> None:
    """Compare signatures.

    Args:
        text: JSON lines of real text, or folders of them; by default English of this Python.
        size: of the text of a round.
    """
    with corpora({"text": size}, flags.rounds or ROUNDS, text, workers=1) as folder:
        contenders = [
            Contender(
                name=name,
                group=shingle,
                run=run,
                arguments={"signer": name, "shingle": shingle, "folder": str(folder)},
                needs=() if OURS in name else (name.split()[0],),
            )
            for shingle in SHINGLES
            for name in SIGNERS
        ]
        question = Question(
            title="Signatures of texts",
            method=__doc__,
            contenders=contenders,
            columns=(
                Column(SPEED, "bytes", "{:.1f}", per="cpu", unit=1e6),
                Column(RATIO, "cpu", "{:.1f}", "its / first"),
                Column("error of a similarity", "error", "{:.3f}"),
            ),
            result=result,
            rounds=ROUNDS,
            warm_up=0,
            packages=("numpy", "numba", "datasketch", "rensa"),
            settings={"text": size},
            picture="bars",
        )
        ask(question, flags)


if __name__ == "__main__":
    cli(main)
