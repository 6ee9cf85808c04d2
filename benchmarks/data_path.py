"""What the data path gives: tokens/s of the sampler and the data set alone, beside training's.

    python benchmarks/data_path.py [--model gpt2|bert] [--tokens N] [--seq-length N]
        [--micro-batch-size N] [--training FILE] [--json FILE]

A data set of random ids, of documents as long as OpenWebText's, is written to a temporary folder,
opened as pretrain_gpt2.py or pretrain_bert.py opens it, and read by what feeds the training loop,
one thread: from the page cache, and with the cache dropped before every round. For GPT-2 a data set
of a trillion tokens is opened, too. It is sparse: its index says documents of the same length, but
only the entries that opening reads are written; the rest of the index and all tokens are holes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison import quantiles
from benchmarks.data_sets import (
    DOCUMENT,
    SPLIT,
    vocabulary_of,
    write_documents,
    write_sentences,
    write_sparse,
)
from benchmarks.machine import JsonFile, facts, markdown, told, write_json
from benchmarks.turns import ResidentMemory
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from megatron.data.batch import Batch, Samples
from megatron.train.inputs import Inputs, open_bert_inputs, open_gpt2_inputs
from megatron.train.loader import prefetch

TRILLION = 10**12
WANTED = 20  # times the tokens/s of training
# Of a rank, about where the best public recipes would put GPT-2 124M on one H200.
GPU = 575_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str
    seq_length: int
    micro_batch_size: int
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Of the sparse data set."""

    tokens: int
    documents: int
    seconds: float
    memory_bytes: int
    index_bytes: int
    written_bytes: int
    """That its files take on disk."""
    tokens_per_second: float
    """Then read from it."""


def open_inputs(prefix: Path, settings: Settings) -> Inputs:
    """As the program does, with a model that nothing is computed of."""
    words = (
        f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --train-iters 1 --split {SPLIT}"
    )
    length = str(settings.seq_length)
    arguments = [*words.split(), "--seq-length", length, "--max-position-embeddings", length]
    arguments += ["--data-path", str(prefix)]
    if settings.model == "gpt2":
        return open_gpt2_inputs(parse(PretrainGPT2Config, arguments, {}))
    arguments += ["--vocab-file", str(vocabulary_of(prefix))]
    return open_bert_inputs(parse(PretrainBertConfig, arguments, {}))


def fed(data: Samples, settings: Settings) -> Iterator[list[Batch]]:
    """Step after step of a rank that is alone."""
    size = settings.global_batch_size
    return prefetch(
        data,
        range(0, size * 10**9, size),
        micro_batch_size=settings.micro_batch_size,
        data_rank=0,
        data_size=1,
    )


def speed(steps: Iterator[list[Batch]], count: int) -> float:
    """Tokens/s of the next steps."""
    start = time.perf_counter()
    tokens = sum(batch.num_tokens for _ in range(count) for batch in next(steps))
    return tokens / (time.perf_counter() - start)


def fill_cache(file: Path) -> None:
    # In another process, whose memory is not counted.
    subprocess.run(["cat", str(file)], stdout=subprocess.DEVNULL, check=True)


def drop_cache(file: Path) -> None:
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


PLACES = {"page cache": fill_cache, "disk": drop_cache}


def measure(
    prefix: Path, settings: Settings, rounds: int, steps: int
) -> tuple[dict[str, list[float]], int]:
    """(tokens/s of each round, by where the data lay; growth of the memory after the first)."""
    inputs = open_inputs(prefix, settings)
    coming = fed(inputs.train, settings)
    speed(coming, steps)
    memory = ResidentMemory()
    speeds: dict[str, list[float]] = {place: [] for place in PLACES}
    for _ in range(rounds):
        for place, prepare in PLACES.items():
            prepare(prefix.with_suffix(".bin"))
            speeds[place].append(speed(coming, steps))
    return speeds, memory.peak()


def open_sparse(prefix: Path, settings: Settings, tokens: int, steps: int) -> Opening:
    documents = write_sparse(prefix, tokens)
    memory, start = ResidentMemory(), time.perf_counter()
    inputs = open_inputs(prefix, settings)
    seconds, growth = time.perf_counter() - start, memory.peak()
    files = [prefix.with_suffix(suffix).stat() for suffix in (".idx", ".bin")]
    return Opening(
        tokens=documents * DOCUMENT,
        documents=documents,
        seconds=seconds,
        memory_bytes=growth,
        index_bytes=files[0].st_size,
        written_bytes=512 * sum(file.st_blocks for file in files),
        tokens_per_second=speed(fed(inputs.train, settings), steps),
    )


def fastest(file: Path) -> tuple[str, float]:
    """(whose, tokens/s) of the fastest training in what benchmarks/train_step.py wrote: the figures
    of one run, or of several by name."""
    content = json.loads(file.read_text())
    runs = {file.stem: content} if "contenders" in content else content
    found = {
        f"{name} ({run})": figures["tokens_per_second"]["median"]
        for run, record in runs.items()
        for name, figures in record.get("contenders", {}).items()
    }
    if not found:
        raise SystemExit(f"error: {file} holds no figures of benchmarks/train_step.py")
    return max(found.items(), key=lambda pair: pair[1])


def beside(speeds: dict[str, list[float]], whose: str, training: float) -> dict[str, Any]:
    """How many times faster than training the data path is, by where the data lay."""
    ratios = {place: quantiles([each / training for each in rounds])
              for place, rounds in speeds.items()}  # fmt: skip
    return {"whose": whose, "tokens_per_second": training, "ratios": ratios}


def verdict(compared: dict[str, Any]) -> str:
    whose, training = compared["whose"], compared["tokens_per_second"]
    lines = [f"beside {whose}, {training:,.0f} tokens/s:"]
    for place, ratio in compared["ratios"].items():
        times = ratio["median"]
        holds = "at least" if times >= WANTED else "less than"
        lines.append(f"  {times:,.1f} times as many from the {place}, {holds} the {WANTED} wanted")
    return "\n".join(lines)


def table(speeds: dict[str, list[float]]) -> str:
    rows = []
    for place, rounds in speeds.items():
        found = quantiles(rounds)
        rows.append([place, *(f"{found[name]:,.0f}" for name in ("median", "p10", "p90"))])
    return markdown(["read from the", "tokens/s", "10th percentile", "90th"], rows)


def told_opening(opening: Opening) -> str:
    return (
        f"{opening.tokens:,} tokens in {opening.documents:,} documents opened in "
        f"{opening.seconds:.3f} s with {opening.memory_bytes / 2**20:.1f} MiB of memory (an index "
        f"of {opening.index_bytes / 1e9:.1f} GB; both files sparse, on disk "
        f"{opening.written_bytes / 1024:.0f} KiB); samples of zeros read from it: "
        f"{opening.tokens_per_second:,.0f} tokens/s"
    )


def data_path(
    model: Literal["gpt2", "bert"] = "gpt2",
    tokens: int = 200_000_000,
    seq_length: int | None = None,
    micro_batch_size: int = 8,
    global_batch_size: int = 64,
    rounds: int = 12,
    steps: int = 32,
    sparse_tokens: int = TRILLION,
    training: Path | None = None,
    json_file: JsonFile = None,
) -> None:
    """Measure and print.

    Args:
        model: whose samples.
        tokens: of the data set that is written.
        seq_length: of a sample; 1024 for GPT-2 and 512 for BERT if not given.
        micro_batch_size: samples of a batch.
        global_batch_size: samples of a step.
        rounds: of steps from the page cache and from the disk in turn.
        steps: of a round.
        sparse_tokens: of the data set that is only opened, for GPT-2.
        training: JSON of benchmarks/train_step.py, for the ratio to training.
        json_file: where every figure is written.
    """
    settings = Settings(
        model=model,
        seq_length=seq_length or {"gpt2": 1024, "bert": 512}[model],
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
    )
    record = {**facts("numpy"), **asdict(settings), "tokens": tokens, "rounds": rounds}
    print(told(record))
    compared = [("one H200 at GPT-2 124M", GPU), *([fastest(training)] if training else [])]
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "data")
        (write_documents if model == "gpt2" else write_sentences)(prefix, tokens)
        speeds, growth = measure(prefix, settings, rounds, steps)
        print(table(speeds))
        print(f"memory: {growth / 2**20:+.1f} MiB at most after the first round")
        record |= {"tokens_per_second": speeds, "memory_growth_bytes": growth}
        if model == "gpt2":
            opening = open_sparse(Path(folder, "sparse"), settings, sparse_tokens, steps)
            print(told_opening(opening))
            record["opening"] = asdict(opening)
    record["beside"] = [beside(speeds, *each) for each in compared]
    print("\n".join(verdict(each) for each in record["beside"]))
    write_json(json_file, record)


if __name__ == "__main__":
    tyro.cli(data_path)
