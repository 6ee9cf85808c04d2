"""The data path.

Tokens/s of only the sampler and the data set, compared with a GPU's: the data path has to be 20
times as fast as training, and one H200 would train GPT-2 124M at about 575,000 tokens/s with the
best public recipes. A data set of random ids, in documents as long as OpenWebText's, is opened as
in pretrain_gpt2.py and read by the training loop's prefetch with one thread: from the page cache,
and with the cache dropped before every turn. A data set of a trillion tokens is sparse: except for
the parts that opening reads, its index and all its tokens are holes. Memory is the peak of opening,
and the growth over all steps after the first ones.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.processes import peak_memory
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.batch import Samples, TextBatch
from megatron.data.files import sampled_sha256
from megatron.data.indexed import HEADER, Description
from megatron.data.order import split_documents
from megatron.train.inputs import prefetch
from tools.corpus.tokenize.writer import IndexedDatasetWriter, pack_header
from tools.layouts.job import open_samples

DOCUMENT = 1100  # tokens, on average; OpenWebText has 9.0e9 in 8.0e6 documents
STEPS, STEP, MICRO = 32, 64, 8  # steps per turn, samples per step and per micro-batch
EOD, TYPE = 50256, np.dtype("<u2")
FACTS: Figures = {"tokenizer_type": "random", "tokenizer_fingerprint": "random"}
FACTS |= {"eod": EOD, "vocab_size": EOD + 1, "shuffled": True}
SPLIT = "949,50,1"
CACHE, DISK, SPARSE = "from the page cache", "from the disk", "a sparse trillion"
RATIO = "x an H200's at 124M"


def write_data(prefix: Path, tokens: int) -> None:
    """Random ids, with an end mark after each document."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), TYPE) as writer:
        while writer.tokens < tokens:
            sizes = random.lognormal(np.log(DOCUMENT) - 0.5, 1.0, 2000).astype(np.int32) + 1
            ids = random.integers(EOD, size=sizes.sum(), dtype=TYPE)
            ids[np.cumsum(sizes) - 1] = EOD
            writer.add(ids, sizes)
        writer.commit(**FACTS)


def write_sparse(prefix: Path, documents: int) -> None:
    """Documents of equal length; their tokens are zeros that take no space."""
    index, binary = prefix.with_suffix(".idx"), prefix.with_suffix(".bin")
    index.write_bytes(pack_header(TYPE, documents, documents))
    os.truncate(index, HEADER.size + 20 * documents + 8)
    sizes = np.memmap(index, "<i4", "r+", HEADER.size, documents)
    pointers = np.memmap(index, "<i8", "r+", HEADER.size + 4 * documents, documents)
    starts = np.memmap(index, "<i8", "r+", HEADER.size + 12 * documents, documents + 1)
    read = [*(part.start for part in split_documents(SPLIT, documents)), documents - 1]
    sizes[read], starts[[*read, documents]] = DOCUMENT, [*read, documents]
    pointers[read] = np.multiply(read, DOCUMENT * TYPE.itemsize)
    binary.touch()
    os.truncate(binary, documents * DOCUMENT * TYPE.itemsize)
    counts: Figures = {"documents": documents, "tokens": documents * DOCUMENT}
    samples = {
        "bin_sample_sha256": sampled_sha256(binary),
        "idx_sample_sha256": sampled_sha256(index),
    }
    Description(**FACTS, **counts, **samples, bin_sha256="", idx_sha256="").write(str(prefix))


def configure(*words: str) -> PretrainGPT2Config:
    """The settings of these flags, with a model that is never computed."""
    model = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"]
    return parse(PretrainGPT2Config, [*model, "--train-iters", "1", *words], {})


def read(data: Samples, first: int, num_workers: int = 1) -> Figures:
    """Reads the steps of a turn from sample `first` on; timing starts before the prefetch."""
    wall, cpu = time.perf_counter(), time.process_time()
    starts, own = range(first, first + STEPS * STEP, STEP), {"data_rank": 0, "data_size": 1}
    coming = prefetch(data, starts, micro_batch_size=MICRO, num_workers=num_workers, **own)
    found = Counter[str]()
    for step in coming:
        for batch in step:
            found.update(figures_of(batch))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {**found, "wall": wall, "cpu": cpu}


def figures_of(batch: TextBatch) -> dict[str, int]:
    """places: tokens and padding. cut: number of documents longer than a sample."""
    found = {"tokens": batch.num_tokens, "places": batch.tokens.size, "samples": batch.num_samples}
    return found if batch.num_cut is None else found | {"cut": batch.num_cut}


def run(rank: Rank, name: str, prefix: str) -> Turn:
    config = configure("--split", SPLIT, "--data-path", prefix)
    binary, peak, start = Path(f"{prefix}.bin"), peak_memory("cpu"), time.perf_counter()
    data, numbers = open_samples(config)[0], count(0, STEPS * STEP)
    facts = {"opening": time.perf_counter() - start, "opened": peak()}
    facts["index"] = binary.with_suffix(".idx").stat().st_size
    read(data, next(numbers))
    peak = peak_memory("cpu")

    def turn() -> Figures:
        if name == CACHE:  # read by another process, whose memory does not count
            subprocess.run(["cat", str(binary)], stdout=subprocess.DEVNULL, check=True)
        elif name == DISK:
            with binary.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return {**facts, **read(data, next(numbers)), "peak_bytes": peak()}

    return turn


def contenders(flags: Flags, tokens: int = 200_000_000) -> Iterator[Contender]:
    """Read 32 steps per turn, of 64 samples of 1024, from a data set of so many tokens."""
    write_data(scratch() / "data", tokens)
    write_sparse(scratch() / "sparse", 10**12 // DOCUMENT)
    for name, file in {CACHE: "data", DISK: "data", SPARSE: "sparse"}.items():
        yield Contender(name, run, {"name": name, "prefix": str(scratch() / file)})


QUESTION = Question(
    contenders,
    (
        Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
        Column(RATIO, "tokens", "{:,.1f}", per="wall", unit=575_000),
        Column("seconds to open", "opening", "{:.3f}"),
        Column("MiB to open", "opened", "{:.1f}", unit=2**20),
        Column("more MiB", "peak_bytes", "{:.1f}", unit=2**20),
        Column("index, GB", "index", "{:.1f}", unit=1e9),
    ),
    lambda found: (
        "As many tokens as one H200 would take at 124M, of which 20 times are wanted: "
        f"{found.median('', CACHE, RATIO):.0f} times from the page cache and "
        f"{found.median('', DISK, RATIO):.0f} times from the disk."
    ),
    turns=3,
    together=False,
)

if __name__ == "__main__":
    QUESTION.run()
