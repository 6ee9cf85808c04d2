"""Data sources compared.

The same documents, English text from this Python installation as in the quickstart, in the formats
that `--data-path` accepts: packed into a .bin and .idx pair, Megatron's format; and with --pad as
JSON lines, as a folder of `save_to_disk` and as parquet. --mock-data, random tokens, is compared,
too. The tokenizer is a BPE trained on them, unless one is given. Tokens exclude padding.

Reading uses only the data set and its threads: 32 steps of 64 samples of 1024 tokens, from the page
cache. Megatron-Core reads the packed files with its GPTDataset and torch's DataLoader, 8 samples at
a time, in the same process or in two others, Megatron-LM's default. The first opening checks and
identifies a whole source, and Megatron-Core builds its order of samples; later openings reuse the
results. A step is the quickstart's: GPT-2 of 3.7 M parameters, 4 samples of 256 tokens, fp32, one
process with two compute threads. Waiting is the time in next() of the batches, without a run's
first step, which always waits. With --pad longer documents are tokenised whole, and then cut.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from benchmarks.corpus_generator import texts_of
from benchmarks.data_path import MICRO, STEP, STEPS, configure, figures_of, read
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.processes import ROOT
from benchmarks.report import Results
from megatron.data.tokenizer import GPT2BPETokenizer
from megatron.libraries import Library
from megatron.train.inputs import prefetch
from tools.layouts.job import open_samples

datasets, orjson = Library("datasets"), Library("orjson")

PACKED, LINES, SAVED, PARQUET = "packed", "JSON lines, padded", "saved, padded", "parquet, padded"
CORE, READING, TRAINING = "Megatron-Core", "reading, 1024 tokens", "a step, 256 tokens"
SPEED, WAITING, PADDING = "tokens/s", "waiting, %", "padding, %"


def start(*words: str) -> None:
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


def write_sources(texts: Sequence[str], tokenizer: Path | None, size: int) -> dict[str, list[str]]:
    """Flags to read each source. tokenizer: a folder; if None, one of `size` ids is trained."""
    lines, saved, parquet, packed = (
        str(scratch() / name) for name in ("text.jsonl", "saved", "text.parquet", "packed")
    )
    Path(lines).write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"text": list(texts)})
    table.save_to_disk(saved)
    table.to_parquet(parquet)
    if tokenizer is None:
        tokenizer = scratch() / "tokenizer"
        how = ["--vocab-size", str(size), "--output", str(tokenizer), "--input", lines]
        start("tools/train_tokenizer.py", *how)
    files = [str(tokenizer.resolve() / name) for name in ("vocab.json", "merges.txt")]
    own = ["--vocab-file", files[0], "--merge-file", files[1]]
    how = ["--workers", "2", "--output-prefix", packed, "--input", lines]
    start("tools/preprocess_data.py", *own, *how)
    return {
        PACKED: [*own, "--data-path", f"{packed}_text_document"],
        LINES: [*own, "--data-path", lines, "--pad"],
        SAVED: [*own, "--data-path", saved, "--pad"],
        PARQUET: [*own, "--data-path", parquet, "--pad"],
        "mock": ["--mock-data", "--vocab-size", str(GPT2BPETokenizer(*files).vocab_size)],
    }


def seconds_to_open(open_source: Callable[[], object]) -> Figures:
    times = [time.perf_counter()]
    for _ in range(2):
        open_source()
        times.append(time.perf_counter())
    return {"opening": times[1] - times[0], "reopening": times[2] - times[1]}


def reading(rank: Rank, words: Sequence[str], num_workers: int) -> Turn:
    config, numbers, files = configure(*words), count(0, STEPS * STEP), list[Path]()
    data, _ = open_samples(config)
    if "--data-path" in words:
        path = Path(words[words.index("--data-path") + 1])
        files = [*path.iterdir()] if path.is_dir() else [*path.parent.glob(f"{path.name}*")]

    def turn() -> Figures:
        for file in files:
            os.utime(file)  # cached results are valid only for one modification time
        opening = seconds_to_open(partial(open_samples, config))
        return opening | read(data, next(numbers), num_workers)

    return turn


def megatron_core(rank: Rank, words: Sequence[str], num_workers: int) -> Turn:
    """Opens and reads as Megatron-LM does, for a training of as many samples as a turn reads."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    _, vocabulary, _, merges, _, prefix = words
    tokenizer = GPT2BPETokenizer(vocabulary, merges)
    needed = {"vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod, "unique_identifiers": {}}
    config = partial(
        GPTDatasetConfig,
        random_seed=1234,
        sequence_length=1024,
        blend=([prefix], None),
        split="29,1,0",
        tokenizer=SimpleNamespace(**needed),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )

    def build(cache: str) -> GPTDataset:
        sizes, own = [STEPS * STEP, 0, 0], config(path_to_cache=cache)
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, own).build()[0]

    batches = BatchSampler(SequentialSampler(range(STEPS * STEP)), MICRO, drop_last=True)
    own = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = DataLoader(build(str(scratch() / "order")), batch_sampler=batches, **own)

    def turn() -> Figures:
        with TemporaryDirectory() as cache:
            opening = seconds_to_open(partial(build, cache))
        start = time.perf_counter()
        tokens = sum(batch["tokens"].numel() for batch in loader)
        wall = time.perf_counter() - start
        return {**opening, "tokens": tokens, "places": tokens, "wall": wall}

    return turn


def training(rank: Rank, words: Sequence[str], steps: int) -> Turn:
    from benchmarks.steps import LEARNING_RATE, ours
    from megatron.train.step import train_step

    run = ours(rank, words)
    data, size = open_samples(run.config)[0], run.config.training.micro_batch_size
    first, own = count(0, (steps + 1) * size), {"data_rank": 0, "data_size": 1}
    own |= {"num_workers": run.config.data.num_workers}

    def turn() -> Figures:
        found, waited = Counter[str](), 0.0
        starts = range(next(first), sys.maxsize, size)  # threads keep reading to a turn's end
        with closing(prefetch(data, starts, micro_batch_size=size, **own)) as coming:
            train_step(run.state, next(coming), LEARNING_RATE)
            begun = time.perf_counter()
            for _ in range(steps):
                asked = time.perf_counter()
                (batch,) = next(coming)
                waited += time.perf_counter() - asked
                found.update(figures_of(batch))
                train_step(run.state, [batch], LEARNING_RATE)
            wall = time.perf_counter() - begun
        return {**found, "wall": wall, "step": wall / steps, "waiting": waited / wall}

    return turn


def contenders(
    flags: Flags,
    tokenizer: Path | None = None,
    text: tuple[Path, ...] = (),
    megabytes: float = 8.0,
    vocab_size: int = 2048,
    steps: int = 12,
    program_flags: str = "",
) -> Iterator[Contender]:
    """Read documents from each source, and train on them.

    Args:
        tokenizer: folder with vocab.json and merges.txt; if not given, a tokenizer is trained.
        text: files of JSON lines; by default English text from this Python installation.
        megabytes: MB of text.
        vocab_size: vocabulary size of the trained tokenizer.
        steps: training steps per turn.
        program_flags: flags of pretrain_gpt2.py: --program-flags="--num-layers 2 --hidden-size 64".
    """
    os.environ["HF_DATASETS_CACHE"] = str(scratch() / "datasets")  # each turn copies parquet anew
    sources = write_sources(list(texts_of(text, megabytes)), tokenizer, vocab_size)
    for (name, words), workers in product(sources.items(), (1, 2)):
        if workers == 1 or "--pad" in words:
            given = {"words": words, "num_workers": workers}
            yield Contender(threads(name, workers), reading, given, group=READING)
    for workers in (0, 2):
        given = {"words": sources[PACKED], "num_workers": workers}
        name = f"{CORE}, {workers} processes" if workers else CORE
        needs = ("megatron.core.datasets.gpt_dataset",)
        yield Contender(name, megatron_core, given, group=READING, needs=needs)
    # Shares come from as many documents as in reading: those of a few steps are too few.
    documents = read(open_samples(configure(*sources[LINES], "--seq-length", "256"))[0], 0)
    common = ["--preset", "quickstart", "--no-bf16", *shlex.split(program_flags)]
    for (name, words), workers in product(sources.items(), (1, 2)):
        given = {"words": [*common, *words, "--num-workers", str(workers)], "steps": steps}
        row, facts = threads(name, workers), {"documents": documents} if "--pad" in words else {}
        yield Contender(row, training, given, group=TRAINING, threads=2, facts=facts)


def threads(name: str, number: int) -> str:
    return f"{name}, {number} thread{'s' * (number > 1)}"


def padding(own: Figures, first: Figures) -> float:
    found = own.get("documents", own)
    return 100 * (1 - float(found["tokens"] / found["places"]))


def cut(own: Figures, first: Figures) -> float:
    found = own.get("documents", own)
    return 100 * float(found["cut"] / found["samples"])


def result(found: Results) -> str:
    rows = (threads(PACKED, 1), threads(LINES, 1), CORE, f"{CORE}, 2 processes")
    one, lines, core, two = (found.median(READING, row, SPEED) / 1e6 for row in rows)
    shares = [found.median(group, threads(LINES, 2), PADDING) for group in (READING, TRAINING)]
    return (
        f"A training step of the quickstart waits for data for {found.range(WAITING, '{:.2f}')} % "
        "of its time, whatever the source (the aim is less than 1 %).\n"
        f"A thread reads {one:.0f} million tokens/s of packed data (Megatron-Core {core:.0f} in "
        f"its own process, {two:.0f} through two others) and {lines:.2f} million of JSON lines.\n"
        f"Padding is {shares[0]:.0f} % of padded samples at 1024 tokens and {shares[1]:.0f} % at "
        "256; packed samples have none."
    )


QUESTION = Question(
    contenders,
    (
        Column(SPEED, "tokens", "{:,.0f}", per="wall"),
        Column("its / packed", "tokens", "{:.3g}", "its / first", per="wall"),
        Column(PADDING, padding, "{:.1f}"),
        Column("documents cut, %", cut, "{:.1f}"),
        Column("seconds to open first", "opening", "{:.3f}"),
        Column("to open again", "reopening", "{:.3f}"),
        Column("ms a step", "step", "{:.1f}", unit=1e-3),
        Column("step / packed", "step", "{:.3f}", "its / first"),
        Column(WAITING, "waiting", "{:.2f}", unit=1e-2),
    ),
    result,
    rounds=3,
    turns=2,
)

if __name__ == "__main__":
    QUESTION.run()
