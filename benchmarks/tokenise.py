"""JSON lines to a uint16 .bin beside a Pool of `tokenizers`, timed in turn in one run.

    python benchmarks/tokenise.py --text FILE --vocab-file vocab.json --merge-file merges.txt
        [--size 100MB] [--peer-size 8MB] [--workers N] [--rounds N] [--real FILE] [--json FILE]

Every round has text of its own, made by corpus_generator.py from another seed, and new processes,
whose caches are empty.  The peer (pool_of_tokenizers.py) gets less of such text, for it is much
slower.  Before anything is timed both encode the same text, and the bytes are compared.  MB are
those of the JSON lines, CPU seconds those of all processes.  The start (imports and the making of
the vocabulary), of which the peer's shorter run has a larger share, is timed on one line in the
same round; the ratio is of what is left.  --real adds a row of ours on real text, which each
process reads once: in it no sentence recurs.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_generator import generate
from benchmarks.corpus_watch import Usage, run_watched
from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from megatron.data.json_lines import find_shards

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "ours": ROOT / "tools" / "preprocess_data.py",
    "peer": ROOT / "benchmarks" / "pool_of_tokenizers.py",
}


@dataclass(frozen=True, kw_only=True)
class Files:
    """The tokenizer."""

    vocab_file: Path
    """The tokenizer's vocabulary (vocab.json)."""

    merge_file: Path
    """The byte-pair encoding's merges (merges.txt)."""


@dataclass(frozen=True)
class Timing:
    megabytes: float
    usage: Usage
    start: Usage
    """Of a run on one line."""

    @property
    def whole_speed(self) -> float:
        """MB per CPU second, the start included."""
        return self.megabytes / self.usage.cpu_seconds

    @property
    def speed(self) -> float:
        return self.megabytes / (self.usage.cpu_seconds - self.start.cpu_seconds)


def encode(which: str, shards: Sequence[Path], files: Files, workers: int, folder: Path) -> Usage:
    """One run of ours or of the peer, which leaves WHICH.bin in the folder."""
    words = {"ours": ["--append-eod", "--overwrite", "--output-prefix",
                      str(folder / "ours")],
             "peer": ["--output", str(folder / "peer.bin")]}[which]  # fmt: skip
    command = [
        sys.executable, str(PROGRAMS[which]), "--input", *map(str, shards), *words,
        "--vocab-file", str(files.vocab_file.resolve()),
        "--merge-file", str(files.merge_file.resolve()), "--workers", str(workers),
    ]  # fmt: skip
    usage = run_watched(command, folder / "log")
    if usage.status:
        raise RuntimeError(f"{which} failed: {(folder / 'log').read_text()[-2000:]}")
    return usage


def measure(which: str, shards: Sequence[Path], files: Files, workers: int, folder: Path) -> Timing:
    line = folder / "line.jsonl"
    line.write_text('{"text": "one"}\n')
    start = encode(which, [line], files, workers, folder)
    size = sum(shard.stat().st_size for shard in shards)
    return Timing(size / 1e6, encode(which, shards, files, workers, folder), start)


def run_round(
    text: Path, sizes: dict[str, str], files: Files, workers: int, seed: int
) -> dict[str, Timing]:
    """Both on new text; which is first changes from round to round."""
    with tempfile.TemporaryDirectory() as name:
        shards = {}
        for which, size in sizes.items():
            folder = Path(name) / which
            generate((text,), folder, size, near_duplicates=0, seed=seed, workers=workers)
            shards[which] = find_shards([folder / "shards"])
        order = list(sizes) if seed % 2 else list(sizes)[::-1]
        return {which: measure(which, shards[which], files, workers, Path(name)) for which in order}


def compare(text: Path, size: str, files: Files, workers: int) -> None:
    """That both write the same tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate((text,), folder / "made", size, near_duplicates=0, seed=99, workers=workers)
        shards = find_shards([folder / "made" / "shards"])
        for which in PROGRAMS:
            encode(which, shards, files, workers, folder)
        written = folder / "ours_text_document.bin", folder / "peer.bin"
        if written[0].read_bytes() != written[1].read_bytes():
            raise RuntimeError("the tokens are not those of the peer")


def benchmark(
    files: tyro.conf.OmitArgPrefixes[Files],
    text: Path,
    real: Path | None = None,
    size: str = "100MB",
    peer_size: str = "8MB",
    workers: int = 1,
    rounds: int = 5,
    json_file: JsonFile = None,
) -> None:
    """Run and print.

    Args:
        text: JSON lines of real text, whose sentences the text is made of.
        real: JSON lines of real text that ours is timed on besides.
        size: of the text of each round.
        peer_size: of the peer's.
        workers: processes of both.
        rounds: times that both are run.
        json_file: where every round's figures are written.
    """
    compare(text, peer_size, files, workers)
    sizes = {"ours": size, "peer": peer_size}
    done = [run_round(text, sizes, files, workers, seed) for seed in range(rounds)]
    rows = [row("generated", done)]
    alone: list[Timing] = []
    if real is not None:
        with tempfile.TemporaryDirectory() as name:
            alone = [
                measure("ours", [real.resolve()], files, workers, Path(name)) for _ in range(rounds)
            ]
        rows.append(["real", *both_speeds(alone, 1), "-", "-", "-"])
    record = facts("tokenizers", "gigatoken", "orjson", "numpy")
    record |= {"size": size, "peer_size": peer_size, "workers": workers, "rounds": rounds}
    print(told(record))
    header = [
        "text",
        "ours, MB per CPU second",
        "with the start",
        "peer",
        "with the start",
        "ratio",
    ]
    print(markdown(header, rows))
    runs: list[Any] = [{name: asdict(timing) for name, timing in each.items()} for each in done]
    write_json(json_file, record | {"runs": runs, "real": [asdict(each) for each in alone]})


def row(name: str, done: Sequence[dict[str, Timing]]) -> list[str]:
    ours, peer = ([each[which] for each in done] for which in ("ours", "peer"))
    ratios = [one.speed / other.speed for one, other in zip(ours, peer, strict=True)]
    return [name, *both_speeds(ours, 1), *both_speeds(peer, 2), spread(ratios)]


def both_speeds(timings: Sequence[Timing], digits: int) -> list[str]:
    return [
        spread([each.speed for each in timings], digits),
        spread([each.whole_speed for each in timings], digits),
    ]


if __name__ == "__main__":
    tyro.cli(benchmark)
