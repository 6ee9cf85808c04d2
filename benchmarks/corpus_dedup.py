"""De-duplication as a whole.

Here it is `python -m tools.corpus.dedup` with one worker, start and imports included, its memory
that of all its processes. datasketch's MinHashLSH in memory, in a process that runs already, drops
what has an exact similarity (character 5-grams) of 0.7 with an earlier document. Both find
candidates by chance, at 0.7 99 in a hundred: in the generated text, another in every round, known
pairs from 0.7 up that are missed are counted, and what is removed without reason; a run fails where
these are more than 0.1 % of the documents.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_generator import five_grams, generate, read
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.report import Results
from benchmarks.watched import watched

OURS, RATIO = "this project", "its CPU seconds / this project's"


def ours(shards: Path) -> tuple[set[str], Figures]:
    """(ids of what is kept, figures)"""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tools.corpus.dedup", "--input", str(shards), "--output"]
        used = watched([*command, folder, "--workers", "1"])
        return {each["id"] for each in read(Path(folder), "part-*")}, used


def datasketch(shards: Path) -> tuple[set[str], Figures]:
    from datasketch import MinHash, MinHashLSH

    index, empty = MinHashLSH(num_perm=128, params=(25, 5)), MinHash(128)
    texts, kept = {each["id"]: each["text"] for each in read(shards)}, set()
    for name, text in texts.items():
        own, signature = five_grams(text), empty.copy()
        signature.update_batch([gram.encode() for gram in own])
        others = (five_grams(texts[other]) for other in index.query(signature))
        if all(len(own & other) < 0.7 * len(own | other) for other in others):
            kept.add(name)
        index.insert(name, signature)
    return kept, {}


def run(rank: Rank, name: str, folder: str) -> Turn:
    made = Path(folder, str(rank.round))
    names = {each["id"] for each in read(made / "shards")}
    truth = names - {each["id"] for each in read(made / "truth") if each["jaccard"] >= 0.7}

    def turn() -> Figures:
        kept, used = (ours if name == OURS else datasketch)(made / "shards")
        missed, wrong = len(kept - truth), len(truth - kept)
        if missed + wrong > 0.001 * len(names):
            raise ValueError(f"{name} misses {missed} and removes {wrong} without reason")
        return {**used, "documents": len(names), "missed": missed, "wrong": wrong}

    return turn


def contenders(
    flags: Flags, text: tuple[Path, ...] = (), size: str = "20MB"
) -> Iterator[Contender]:
    """De-duplicate text of this size, made of JSON lines; by default English of this Python."""
    for seed in range(flags.rounds or QUESTION.rounds):
        generate(scratch() / str(seed), text, size, seed)
    for name, needs in ((OURS, ()), ("datasketch", ("datasketch",))):
        yield Contender(name, run, {"name": name, "folder": str(scratch())}, needs=needs)


def result(found: Results) -> str:
    seconds, ratio = found.median("", OURS, "CPU seconds"), found.median("", "datasketch", RATIO)
    return f"{seconds:.1f} CPU seconds, where datasketch takes {ratio:.0f} times as many."


COLUMNS = (
    Column("CPU seconds", "cpu", "{:.1f}"),
    Column(RATIO, "cpu", "{:.1f}", "its / first"),
    Column("seconds", "wall", "{:.1f}"),
    Column("peak MB", "peak_bytes", "{:,.0f}", unit=1e6),
    Column("documents", "documents", "{:,.0f}"),
    Column("planted pairs missed", "missed", "{:.0f}"),
    Column("removed without reason", "wrong", "{:.0f}"),
)
QUESTION = Question(contenders, COLUMNS, result, rounds=2, warm_up=0)

if __name__ == "__main__":
    QUESTION.run()
