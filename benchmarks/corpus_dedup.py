"""The whole of de-duplication beside datasketch's MinHashLSH in memory.

Here it is `python -m tools.corpus.dedup` with one worker, start and imports included, its memory
that of all its processes. The peer reads the same shards in a process that runs already, signs,
looks up and verifies candidates by exact similarity of character 5-grams, and joins clusters.
Every round has generated text of its own, in which the near-duplicates are known. Both find
candidates by chance, at a Jaccard of 0.7 99 in a hundred: the table counts the planted pairs from
0.7 up that each has missed and what was removed without reason, and a run in which these are more
than 0.1 % of the documents fails.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson

from benchmarks.corpus_generator import corpora, five_grams, jaccard, read
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
from benchmarks.report import Results
from benchmarks.watched import watched
from tools.corpus.shingles import PERMUTATIONS

BANDS, ROWS, JACCARD = 25, 5, 0.7
MOST_WRONG = 0.001  # of the documents
OURS, RATIO = "this project", "its CPU seconds / this project's"


def ours(rank: Rank, folder: str) -> Turn:
    made = Path(folder, "text", str(rank.round))

    def turn() -> dict[str, Any]:
        with TemporaryDirectory() as output:
            command = [sys.executable, "-m", "tools.corpus.dedup", "--input", str(made / "shards")]
            command += ["--output", output, "--shingle", "char5", "--jaccard", str(JACCARD)]
            used = watched([*command, "--workers", "1"])
            lines = [line for file in Path(output).glob("part-*") for line in file.open("rb")]
            kept = {orjson.loads(line)["id"] for line in lines}
        return {**vars(used), **compared(made, kept)}

    return turn


def datasketch(rank: Rank, folder: str) -> Turn:
    from datasketch import MinHash, MinHashLSH

    made = Path(folder, "text", str(rank.round))

    def turn() -> dict[str, Any]:
        records, _ = read(made)
        index = MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, ROWS))
        leader = list(range(len(records)))

        def find(number: int) -> int:
            while leader[number] != number:
                number = leader[number]
            return number

        empty = MinHash(PERMUTATIONS)
        for number, record in enumerate(records):
            own, signature = five_grams(record["text"]), empty.copy()
            signature.update_batch([each.encode() for each in own])
            for other in index.query(signature):
                if jaccard(own, five_grams(records[other]["text"])) >= JACCARD:
                    low, high = sorted((find(number), find(other)))
                    leader[high] = low
            index.insert(number, signature)
        kept = {record["id"] for k, record in enumerate(records) if leader[k] == k}
        return compared(made, kept)

    return turn


def compared(made: Path, kept: set[str]) -> dict[str, int]:
    """What was kept beside the truth: of a pair from JACCARD up the first document stays."""
    documents, pairs = read(made)
    removed = {pair["id"] for pair in pairs if pair["jaccard"] >= JACCARD}
    truth = {each["id"] for each in documents} - removed
    missed, wrong = len(kept - truth), len(truth - kept)
    return {"documents": len(documents), "kept": len(kept), "missed": missed, "wrong": wrong}


def failure(found: Results) -> str:
    for (_, name), rounds in found.rounds.items():
        for each in rounds:
            if each["missed"] + each["wrong"] > MOST_WRONG * each["documents"]:
                return f"{name} misses {each['missed']} and removes {each['wrong']} without reason"
    return ""


def main(flags: Flags, text: tuple[Path, ...] = (), size: str = "20MB") -> None:
    """Compare de-duplication.

    Args:
        text: JSON lines of real text, or folders of them; by default English of this Python.
        size: of the corpus of a round.
    """
    with corpora({"text": size}, flags.rounds or 2, text) as folder:
        arguments = {"folder": str(folder)}
        question = Question(
            title="De-duplication as a whole",
            method=__doc__,
            contenders=[
                Contender(name=OURS, run=ours, arguments=arguments),
                Contender(
                    name="datasketch", run=datasketch, arguments=arguments, needs=("datasketch",)
                ),
            ],
            columns=(
                Column("CPU seconds", "cpu", "{:.1f}"),
                Column(RATIO, "cpu", "{:.1f}", "its / first"),
                Column("seconds", "wall", "{:.1f}"),
                Column("peak MB", "peak_bytes", "{:,.0f}", unit=1e6),
                Column("documents", "documents", "{:,.0f}"),
                Column("kept", "kept", "{:,.0f}"),
                Column("planted pairs missed", "missed", "{:.0f}"),
                Column("removed without reason", "wrong", "{:.0f}"),
            ),
            result=lambda found: (
                f"{found.median('', OURS, 'CPU seconds'):.1f} CPU seconds for {size}, where "
                f"datasketch takes {found.median('', 'datasketch', RATIO):.0f} times as many."
            ),
            failure=failure,
            rounds=2,
            warm_up=0,
            packages=("numba", "datasketch"),
            settings={"size": size},
        )
        ask(question, flags)


if __name__ == "__main__":
    cli(main)
