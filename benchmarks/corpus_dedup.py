"""The whole de-duplication beside datasketch's MinHashLSH in memory, in turn in one run.

    python benchmarks/corpus_dedup.py --text FILE [--size 30MB] [--rounds N] [--json FILE]

Ours is `python -m tools.corpus.dedup` with one worker.  The peer reads the same shards, signs,
looks up and verifies candidates by exact similarity, and joins clusters.  Every round has text of
its own, made by corpus_generator.py.  Both find candidates by chance, at a Jaccard of 0.7 99 in a
hundred: the planted pairs from 0.7 up that each has missed are told, and what they keep may differ
by no more than LARGEST_DIFFERENCE of the documents.
"""

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median

import orjson
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_generator import generate
from benchmarks.corpus_signatures import shingles
from benchmarks.corpus_watch import Taken, measure_apart, run_watched
from benchmarks.machine import JsonFile, facts, markdown, told, write_json
from tools.corpus.shingles import PERMUTATIONS

BANDS, ROWS = 25, 5
JACCARD = 0.7
LARGEST_DIFFERENCE = 0.002


def dedup_in_memory(shards: str) -> list[str]:
    """The ids that MinHashLSH with exact verification keeps: the smallest of each cluster."""
    from datasketch import MinHash, MinHashLSH

    records = [
        orjson.loads(line) for file in sorted(Path(shards).iterdir()) for line in file.open()
    ]
    empty, index = MinHash(PERMUTATIONS), MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, ROWS))
    leader = list(range(len(records)))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    for number, record in enumerate(records):
        own = set(shingles(record["text"], "char5"))
        signature = empty.copy()
        signature.update_batch([each.encode() for each in own])
        for other in index.query(signature):
            theirs = set(shingles(records[other]["text"], "char5"))
            if 10 * len(own & theirs) >= 7 * len(own | theirs):
                leader[find(number)] = find(other)
        index.insert(number, signature)
    clusters: dict[int, list[str]] = {}
    for number, record in enumerate(records):
        clusters.setdefault(find(number), []).append(record["id"])
    return sorted(map(min, clusters.values()))


def dedup_as_a_step(shards: Path, output: Path) -> Taken:
    """One worker; before: nothing, for it is a program of its own."""
    command = [sys.executable, "-m", "tools.corpus.dedup", "--input", str(shards)]
    command += ["--output", str(output), "--shingle", "char5", "--jaccard", str(JACCARD)]
    used = run_watched([*command, "--workers", "1"], output.with_suffix(".log"))
    assert used.status == 0, output.with_suffix(".log").read_text()[-2000:]
    kept = [orjson.loads(line)["id"] for file in output.glob("part-*") for line in file.open()]
    return Taken(sorted(kept), used.wall_seconds, used.cpu_seconds, 0, used.resident)


def dedup(text: Path, size: str = "30MB", rounds: int = 2, json_file: JsonFile = None) -> None:
    """The step with one worker against datasketch in memory.

    Args:
        text: JSON lines of real text, or a folder of them.
        size: of the corpus of each round.
        rounds: times that both are timed in turn, each on text of its own.
        json_file: where every round's figures are written.
    """
    taken: dict[str, list[Taken]] = {"ours": [], "datasketch": []}
    missed: dict[str, list[int]] = {name: [] for name in taken}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "made")
            generate((text,), made, size, seed=number)
            for name in list(taken) if number % 2 else list(taken)[::-1]:
                if name == "ours":
                    result = dedup_as_a_step(made / "shards", Path(folder, "out"))
                else:
                    result = measure_apart(dedup_in_memory, str(made / "shards"))
                taken[name].append(result)
                missed[name].append(count_missed(made / "truth.jsonl", result.result))
    differences = [
        len(set(ours.result) ^ set(theirs.result))
        for ours, theirs in zip(*taken.values(), strict=True)
    ]
    kept = len(taken["ours"][0].result)
    assert max(differences) <= LARGEST_DIFFERENCE * kept, f"not the same job: {differences}"
    record = facts("numba", "datasketch") | {"size": size, "kept": kept}
    record["kept by one alone"] = differences
    print(told(record))
    print(dedup_table(taken, missed))
    runs_of = {
        name: [asdict(each) | {"result": len(each.result)} for each in runs]
        for name, runs in taken.items()
    }
    write_json(json_file, record | {"runs": runs_of, "missed": missed})


def count_missed(truth: Path, kept: list[str]) -> int:
    """Planted pairs at the threshold and above of which both documents were kept."""
    left = set(kept)
    pairs = [orjson.loads(line) for line in truth.read_bytes().splitlines()]
    return sum(
        pair["jaccard"] >= JACCARD and pair["id"] in left and pair["of"] in left for pair in pairs
    )


def dedup_table(taken: dict[str, list[Taken]], missed: dict[str, list[int]]) -> str:
    lines = [
        [
            name,
            f"{median(each.cpu_seconds for each in runs):.1f}",
            f"{median(each.wall_seconds for each in runs):.1f}",
            f"{max(each.peak for each in runs) / 1e6:.0f}",
            sum(missed[name]),
        ]
        for name, runs in taken.items()
    ]
    return markdown(["who", "CPU seconds", "seconds", "peak, MB", "planted pairs missed"], lines)


if __name__ == "__main__":
    tyro.cli(dedup)
