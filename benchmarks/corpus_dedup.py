"""De-duplication.

Each round generates new text whose near-duplicates are known. Signatures are computed from str to
128 permutations of character 5-grams, normalisation included; they have to estimate the known
similarities to within 0.05 on average (0.03 is expected). The whole is the command
`python tools/corpus.py dedup` with one worker, start and imports included. Its peer, datasketch's
MinHashLSH in a process that is already running, drops a document with an exact similarity of at
least 0.7 to an earlier one. Both find candidates by chance, 99 in a hundred at a similarity of 0.7.
Known pairs from 0.7 up that are missed, and documents removed without reason, are counted; a run
fails where they are more than 0.1 % of the documents.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.corpus_generator import five_grams, generate, read
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.watched import watched
from megatron.libraries import Library
from tools.corpus.dedup.signatures import PERMUTATIONS, Shingler

datasketch, rensa = Library("datasketch"), Library("rensa")

OURS, DATASKETCH, RENSA = "this project", "datasketch", "rensa"
SIGNATURES, WHOLE = "signatures", "the whole"
SPEED, RATIO = "MB per CPU second", "this project's speed / its"


def sign(name: str, texts: list[str]) -> Any:
    """[texts, PERMUTATIONS]"""
    if name == OURS:
        shingler = Shingler("char5", seed=1)
        return np.array([shingler.sign(shingler.hashes(shingler.points(each))) for each in texts])
    if name == DATASKETCH:
        encoded = ([gram.encode() for gram in five_grams(text)] for text in texts)
        return np.array(
            [m.hashvalues for m in datasketch.MinHash.generator(encoded, num_perm=PERMUTATIONS)]
        )
    of_sets = rensa.RMinHash.digests_from_token_sets
    return np.array([of_sets([[*five_grams(text)]], PERMUTATIONS, 1)[0] for text in texts])


def deduplicate(name: str, shards: Path, texts: dict[str, str]) -> tuple[set[str], Figures]:
    """(ids of the documents kept, figures)"""
    if name == OURS:
        with TemporaryDirectory() as folder:
            words = ["tools/corpus.py", "dedup", "--input", shards, "--output", folder]
            used = watched(*words, "--workers", 1)
            return {each["id"] for each in read(Path(folder), "part-*")}, used
    index = datasketch.MinHashLSH(num_perm=128, params=(25, 5))
    empty, kept = datasketch.MinHash(128), set()
    for key, text in texts.items():
        own, signature = five_grams(text), empty.copy()
        signature.update_batch([gram.encode() for gram in own])
        others = (five_grams(texts[other]) for other in index.query(signature))
        if all(len(own & other) < 0.7 * len(own | other) for other in others):
            kept.add(key)
        index.insert(key, signature)
    return kept, {}


def run(rank: Rank, group: str, name: str, folder: str) -> Turn:
    made = Path(folder, str(rank.round))
    texts = {each["id"]: each["text"] for each in read(made / "shards")}
    values, pairs = [*texts.values()], read(made / "truth")
    size = sum(len(text.encode()) for text in values)

    def whole() -> Figures:
        kept, used = deduplicate(name, made / "shards", texts)
        truth = texts.keys() - {each["id"] for each in pairs if each["jaccard"] >= 0.7}
        missed, wrong = len(kept - truth), len(truth - kept)
        if missed + wrong > 0.001 * len(texts):
            raise ValueError(f"{name} misses {missed} and removes {wrong} without reason")
        return {**used, "bytes": size, "missed": missed, "wrong": wrong}

    if group == WHOLE:
        return whole
    signed = dict(zip(texts, sign(name, values), strict=True))
    errors = [np.mean(signed[p["id"]] == signed[p["of"]]) - p["jaccard"] for p in pairs]
    if (error := float(np.abs(errors).mean())) > 0.05:
        raise ValueError(f"{name} misses the known similarities by {error:.3f}")

    def signatures() -> Figures:
        sign(name, values)
        return {"bytes": size, "error": error}

    return signatures


def contenders(
    flags: Flags, text: tuple[Path, ...] = (), size: str = "20MB"
) -> Iterator[Contender]:
    """De-duplicate JSON lines of this size, made from `text` (default: files of this Python)."""
    for seed in range(flags.rounds or QUESTION.rounds):
        generate(scratch() / str(seed), text, size, seed)
    for group, names in {SIGNATURES: (OURS, DATASKETCH, RENSA), WHOLE: (OURS, DATASKETCH)}.items():
        for name in names:
            arguments = {"group": group, "name": name, "folder": str(scratch())}
            needs = [] if name == OURS else [name]
            yield Contender(name, run, arguments, group=group, needs=needs)


QUESTION = Question(
    contenders,
    (
        Column(SPEED, "bytes", "{:.1f}", per="cpu", unit=1e6),
        Column(RATIO, "cpu", "{:.1f}", "its / first"),
        Column("error of a similarity", "error", "{:.3f}"),
        Column("known pairs missed", "missed", "{:.0f}"),
        Column("removed without reason", "wrong", "{:.0f}"),
    ),
    lambda found: (
        f"De-duplication runs at {found.median(WHOLE, OURS, SPEED):.0f} MB per CPU second, "
        f"{found.median(WHOLE, DATASKETCH, RATIO):.0f} times as fast as datasketch; signatures of "
        f"character 5-grams are {found.median(SIGNATURES, DATASKETCH, RATIO):.0f} times as fast."
    ),
    rounds=2,
    warm_up=0,
)

if __name__ == "__main__":
    QUESTION.run()
