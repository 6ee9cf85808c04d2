"""The data path.

Tokens/s of the sampler and the data set alone, beside a GPU's. A data set of random ids, in
documents as long as OpenWebText's, is opened as pretrain_gpt2.py or pretrain_bert.py opens it and
read by what feeds the training loop, one thread: from the page cache, and with the cache dropped
before every turn. Memory is its growth after the first steps. For GPT-2 a data set of a trillion
tokens is opened, too. It is sparse: its index says documents of the same length, but only the
entries that opening reads are written; the rest of the index and all tokens are holes. The data
path has to be 20 times as fast as training: one H200 would take about 575,000 tokens/s at GPT-2
124M by the best public recipes.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.processes import peak_memory
from benchmarks.report import Results
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from megatron.data.batch import Batch
from megatron.data.indexed import HEADER, Description, token_dtype
from megatron.data.order import split_documents
from megatron.data.tokenizer import MARKS, BertWordPieceLowerCase
from megatron.train.inputs import Inputs, open_bert_inputs, open_gpt2_inputs
from megatron.train.loader import prefetch
from tools.data_files import IndexedDatasetWriter, pack_header

DOCUMENT, SENTENCE = 1100, 25  # tokens, on average; OpenWebText has 9.0e9 in 8.0e6 documents
VOCABULARY = {"gpt2": 50257, "bert": 30522}
SPLIT = "949,50,1"
CACHE, DISK, SPARSE = "from the page cache", "from the disk", "opening a sparse data set"
RATIO = "x an H200's at 124M"


def lengths(random: np.random.Generator, mean: int, count: int) -> NDArray[np.int32]:
    drawn = random.lognormal(np.log(mean) - 0.5, 1.0, count)
    return np.maximum(2, drawn).astype(np.int32)


def write_data(prefix: Path, model: str, tokens: int) -> None:
    """Random ids: for GPT-2 with an end mark after each document; for BERT in sentences, with a
    vocabulary of which a third are pieces that go on with a word."""
    random, size, counts = np.random.default_rng(0), VOCABULARY[model], None
    facts: dict[str, Any] = {"tokenizer_type": "random", "tokenizer_fingerprint": "random"}
    if model == "bert":
        words = [f"{'##' * (n % 3 == 0)}{n}" for n in range(size - len(MARKS))]
        vocabulary = prefix.with_suffix(".txt")
        vocabulary.write_text("\n".join([*MARKS, *words]))
        own = BertWordPieceLowerCase(str(vocabulary))
        facts = {"tokenizer_type": own.kind, "tokenizer_fingerprint": own.fingerprint}
    dtype = token_dtype(size)
    with IndexedDatasetWriter(str(prefix), dtype, sentences=model == "bert") as writer:
        while writer.tokens < tokens:
            sizes = lengths(random, DOCUMENT, 2000)
            if model == "bert":
                counts = 1 + sizes // SENTENCE
                sizes = lengths(random, SENTENCE, int(counts.sum()))
            ids = random.integers(len(MARKS), size - 1, sizes.sum(), dtype)
            if model == "gpt2":
                ids[np.cumsum(sizes) - 1] = size - 1
            writer.add(ids, sizes, counts)
        eod = size - 1 if model == "gpt2" else None
        writer.commit(**facts, eod=eod, vocab_size=size, shuffled=True)


def write_sparse(prefix: Path, documents: int) -> None:
    """A data set for GPT-2 in documents of one length, whose tokens are zeros that take no room."""
    size, tokens = VOCABULARY["gpt2"], documents * DOCUMENT
    dtype, index = token_dtype(size), prefix.with_suffix(".idx")
    bounds = [*accumulate((4 * documents, 8 * documents, 8 * documents + 8), initial=HEADER.size)]
    index.write_bytes(pack_header(dtype, documents, documents))
    os.truncate(index, bounds[-1])
    whole = np.memmap(index, np.uint8, "r+")
    sizes, pointers, starts = (
        whole[bounds[k] : bounds[k + 1]].view(kind) for k, kind in enumerate(("<i4", "<i8", "<i8"))
    )
    for document in (*(p.start for p in split_documents(SPLIT, documents)), documents - 1):
        sizes[document], starts[document] = DOCUMENT, document
        pointers[document] = document * DOCUMENT * dtype.itemsize
    starts[documents] = documents
    prefix.with_suffix(".bin").touch()
    os.truncate(prefix.with_suffix(".bin"), tokens * dtype.itemsize)
    facts: dict[str, Any] = {
        "documents": documents,
        "tokens": tokens,
        "vocab_size": size,
        "eod": size - 1,
    }
    facts |= dict.fromkeys(("tokenizer_type", "tokenizer_fingerprint"), "random")
    Description(**facts, bin_sha256="", idx_sha256="", shuffled=True).write(str(prefix))


def open_inputs(prefix: str, model: str, seq_length: int) -> Inputs:
    """As the program does, with a model that nothing is computed of."""
    words = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"]
    words += ["--train-iters", "1", "--split", SPLIT, "--data-path", prefix]
    words += ["--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length)]
    if model == "gpt2":
        return open_gpt2_inputs(parse(PretrainGPT2Config, words, {}))
    words += ["--vocab-file", f"{prefix}.txt"]
    return open_bert_inputs(parse(PretrainBertConfig, words, {}))


def run(rank: Rank, name: str, prefix: str, model: str, seq_length: int, steps: int) -> Turn:
    binary, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")

    def opened() -> tuple[Iterator[list[Batch]], Figures]:
        start = time.perf_counter()
        data, starts = open_inputs(prefix, model, seq_length).train, range(0, 64 * 10**9, 64)
        coming = prefetch(data, starts, micro_batch_size=8, data_rank=0, data_size=1)
        return coming, {"opening": time.perf_counter() - start}

    def read(coming: Iterator[list[Batch]]) -> Figures:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = sum(batch.num_tokens for _ in range(steps) for batch in next(coming))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"tokens": tokens, "wall": wall, "cpu": cpu}

    def open_sparse() -> Figures:
        peak = peak_memory("cpu")
        coming, seconds = opened()
        sizes = {"peak_bytes": peak(), "index": index.stat().st_size}
        on_disk = 512 * (binary.stat().st_blocks + index.stat().st_blocks)
        return {**seconds, **sizes, "on_disk": on_disk, **read(coming)}

    if name == SPARSE:
        return open_sparse
    coming, seconds = opened()
    read(coming)
    peak = peak_memory("cpu")

    def turn() -> Figures:
        if name == CACHE:  # in another process, whose memory is not counted
            subprocess.run(["cat", str(binary)], stdout=subprocess.DEVNULL, check=True)
        else:
            with binary.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return {**seconds, **read(coming), "peak_bytes": peak()}

    return turn


def result(found: Results) -> str:
    cache, disk = (found.median(found.rows[0][0], name, RATIO) for name in (CACHE, DISK))
    said = f"{cache:.0f} times from the page cache and {disk:.0f} times from the disk"
    holds = "as wanted" if min(cache, disk) >= 20 else "which is less than the 20 wanted"
    return f"As many tokens as one H200 would take at 124M: {said}, {holds}."


def contenders(
    flags: Flags,
    model: Literal["gpt2", "bert"] = "gpt2",
    tokens: int = 200_000_000,
    seq_length: int = 1024,
    steps: int = 32,
) -> Iterator[Contender]:
    """Read so many steps a turn, of 64 samples, from a data set of so many tokens."""
    write_data(scratch() / "data", model, tokens)
    names = {CACHE: "data", DISK: "data"}
    if model == "gpt2":
        write_sparse(scratch() / "sparse", 10**12 // DOCUMENT)
        names[SPARSE] = "sparse"
    own = {"model": model, "seq_length": seq_length, "steps": steps}
    for name, file in names.items():
        arguments = {**own, "name": name, "prefix": str(scratch() / file)}
        yield Contender(name, run, arguments, group=model)


COLUMNS = (
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(RATIO, "tokens", "{:,.1f}", per="wall", unit=575_000),
    Column("CPU seconds", "cpu", "{:.3f}"),
    Column("seconds to open", "opening", "{:.3f}"),
    Column("MiB of memory", "peak_bytes", "{:.1f}", unit=2**20),
    Column("index, GB", "index", "{:.1f}", unit=1e9),
    Column("KiB on disk", "on_disk", "{:.0f}", unit=1024),
)
QUESTION = Question(contenders, COLUMNS, result, turns=3, together=False)

if __name__ == "__main__":
    QUESTION.run()
