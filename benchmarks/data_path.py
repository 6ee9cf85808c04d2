"""What the data path gives: tokens/s of the sampler and the data set alone, beside a GPU's.

A data set of random ids, in documents as long as OpenWebText's, is opened as pretrain_gpt2.py or
pretrain_bert.py opens it and read by what feeds the training loop, one thread: from the page cache,
and with the cache dropped before every turn. Memory is its growth after the first steps. For GPT-2
a data set of a trillion tokens is opened, too. It is sparse: its index says documents of the same
length, but only the entries that opening reads are written; the rest of the index and all tokens
are holes. The data path has to be 20 times as fast as training: one H200 would take about 575,000
tokens/s at GPT-2 124M by the best public recipes; --training adds this machine's fastest step.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
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

GPU, WANTED = 575_000, 20
DOCUMENT, SENTENCE = 1100, 25  # tokens, on average; OpenWebText has 9.0e9 in 8.0e6 documents
SPREAD = 1.0  # of the logarithm of their lengths
AT_ONCE = 2000  # documents that are drawn together
VOCABULARY = {"gpt2": 50257, "bert": 30522}
SPLIT = "949,50,1"
CACHE, DISK, SPARSE = "from the page cache", "from the disk", "opening a sparse data set"
RATIO = "x an H200's at 124M"
RANDOM: dict[str, Any] = {"tokenizer_type": "random", "tokenizer_fingerprint": "random"}


def lengths(random: np.random.Generator, mean: int, count: int) -> NDArray[np.int32]:
    drawn = random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.maximum(2, drawn).astype(np.int32)


def write_data(prefix: Path, model: str, tokens: int) -> None:
    """Random ids: for GPT-2 with an end mark after each document; for BERT in sentences, with a
    vocabulary of which a third are pieces that go on with a word."""
    random, size = np.random.default_rng(0), VOCABULARY[model]
    facts, counts = {**RANDOM, "eod": size - 1}, None
    if model == "bert":
        words = [f"{'##' * (n % 3 == 0)}{n}" for n in range(size - len(MARKS))]
        vocabulary = prefix.with_suffix(".txt")
        vocabulary.write_text("".join(f"{token}\n" for token in [*MARKS, *words]))
        own = BertWordPieceLowerCase(str(vocabulary))
        facts = {"tokenizer_type": own.kind, "tokenizer_fingerprint": own.fingerprint, "eod": None}
    dtype = token_dtype(size)
    with IndexedDatasetWriter(str(prefix), dtype, sentences=model == "bert") as writer:
        while writer.tokens < tokens:
            sizes = lengths(random, DOCUMENT, AT_ONCE)
            if model == "bert":
                counts = 1 + sizes // SENTENCE
                sizes = lengths(random, SENTENCE, int(counts.sum()))
                ids = random.integers(len(MARKS), size, sizes.sum(), dtype)
            else:
                ids = random.integers(0, size - 1, sizes.sum(), dtype)
                ids[np.cumsum(sizes) - 1] = size - 1
            writer.add(ids, sizes, counts)
        writer.commit(**facts, vocab_size=size, shuffled=True)


def write_sparse(prefix: Path, tokens: int) -> int:
    """A data set for GPT-2 in documents of one length; returns their number. Its samples are
    zeros, and it takes next to no room."""
    size, documents = VOCABULARY["gpt2"], tokens // DOCUMENT
    dtype, index = token_dtype(size), prefix.with_suffix(".idx")
    counts = (4 * documents, 8 * documents, 8 * (documents + 1))
    ends = list(accumulate(counts, initial=HEADER.size))
    with index.open("wb") as stream:
        stream.write(pack_header(dtype, documents, documents))
        stream.truncate(ends[-1])
    whole = np.memmap(index, np.uint8, "r+")
    sizes, pointers, starts = (
        whole[first:end].view(kind)
        for first, end, kind in zip(ends, ends[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    for document in (*(p.start for p in split_documents(SPLIT, documents)), documents - 1):
        sizes[document], starts[document] = DOCUMENT, document
        pointers[document] = document * DOCUMENT * dtype.itemsize
    starts[documents] = documents
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(documents * DOCUMENT * dtype.itemsize)
    facts = {**RANDOM, "vocab_size": size, "eod": size - 1, "shuffled": True}
    facts |= {"documents": documents, "tokens": documents * DOCUMENT}
    Description(**facts, bin_sha256="", idx_sha256="").write(str(prefix))
    return documents


def open_inputs(prefix: str, model: str, seq_length: int) -> Inputs:
    """As the program does, with a model that nothing is computed of."""
    words = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"]
    words += ["--train-iters", "1", "--split", SPLIT, "--data-path", prefix]
    words += ["--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length)]
    if model == "gpt2":
        return open_gpt2_inputs(parse(PretrainGPT2Config, words, {}))
    return open_bert_inputs(
        parse(PretrainBertConfig, [*words, "--vocab-file", f"{prefix}.txt"], {})
    )


def run(
    rank: Rank, name: str, prefix: str, model: str, seq_length: int, batches: list[int], steps: int
) -> Turn:
    """batches: samples of a micro-batch and of a step."""
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]

    def opened() -> tuple[Iterator[list[Batch]], float]:
        """(steps, seconds)."""
        start = time.perf_counter()
        data = open_inputs(prefix, model, seq_length).train
        starts = range(0, batches[1] * 10**9, batches[1])
        coming = prefetch(data, starts, micro_batch_size=batches[0], data_rank=0, data_size=1)
        return coming, time.perf_counter() - start

    def read(coming: Iterator[list[Batch]]) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = sum(batch.num_tokens for _ in range(steps) for batch in next(coming))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"tokens": tokens, "wall": wall, "cpu": cpu}

    def open_sparse() -> dict[str, Any]:
        peak = peak_memory("cpu")
        coming, seconds = opened()
        facts = {"opening": seconds, "peak_bytes": peak(), "index": files[1].stat().st_size}
        facts["on_disk"] = 512 * sum(file.stat().st_blocks for file in files)
        return {**read(coming), **facts}

    if name == SPARSE:
        return open_sparse
    coming, seconds = opened()
    read(coming)
    peak = peak_memory("cpu")

    def turn() -> dict[str, Any]:
        if name == CACHE:  # in another process, whose memory is not counted
            subprocess.run(["cat", str(files[0])], stdout=subprocess.DEVNULL, check=True)
        else:
            with files[0].open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return {**read(coming), "opening": seconds, "peak_bytes": peak()}

    return turn


def fastest(file: Path) -> tuple[str, float]:
    """(whose, tokens/s) of the fastest training in what benchmarks/train_step.py wrote."""
    found = {}
    for record in json.loads(file.read_text()):
        for each in record["contenders"]:
            seconds = [wall for own in each["rounds"] for wall in own["wall"]]
            if seconds and "tokens" in each["rounds"][0]:
                speed = each["rounds"][0]["tokens"] / median(seconds)
                found[f"{each['name']}, {each['group']}"] = speed
    if not found:
        raise ValueError(f"--training {file} holds no figures of benchmarks/train_step.py")
    return max(found.items(), key=lambda pair: pair[1])


def result(found: Results) -> str:
    group = found.rows[0][0]
    ratios = [found.median(group, name, RATIO) for name in (CACHE, DISK)]
    said = [
        f"{ratio:.0f} times from the {name.split(' the ')[1]}"
        for ratio, name in zip(ratios, (CACHE, DISK), strict=True)
    ]
    holds = "as wanted" if min(ratios) >= WANTED else f"which is less than the {WANTED} wanted"
    return f"As many tokens as one H200 would take at 124M: {' and '.join(said)}, {holds}."


def main(
    flags: Flags,
    model: Literal["gpt2", "bert"] = "gpt2",
    tokens: int = 200_000_000,
    seq_length: int | None = None,
    micro_batch_size: int = 8,
    global_batch_size: int = 64,
    steps: int = 32,
    sparse_tokens: int = 10**12,
    training: Path | None = None,
) -> None:
    """Measure the data path.

    Args:
        model: whose samples.
        tokens: of the data set that is written.
        seq_length: of a sample; 1024 for GPT-2 and 512 for BERT if not given.
        micro_batch_size: samples of a batch.
        global_batch_size: samples of a step.
        steps: of a turn.
        sparse_tokens: of the data set that is only opened, for GPT-2.
        training: JSON of benchmarks/train_step.py, for the ratio to training.
    """
    length = seq_length or {"gpt2": 1024, "bert": 512}[model]
    settings: dict[str, Any] = {"model": model, "seq_length": length, "steps": steps}
    settings["batches"] = [micro_batch_size, global_batch_size]
    columns = [
        Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
        Column(RATIO, "tokens", "{:,.1f}", per="wall", unit=GPU),
        Column("CPU seconds", "cpu", "{:.3f}"),
        Column("seconds to open", "opening", "{:.3f}"),
        Column("MiB of memory", "peak_bytes", "{:.1f}", unit=2**20),
        Column("index, GB", "index", "{:.1f}", unit=1e9),
        Column("KiB on disk", "on_disk", "{:.0f}", unit=1024),
    ]
    if training is not None:
        whose, speed = fastest(training)
        columns.insert(2, Column(f"x {whose}", "tokens", "{:,.0f}", per="wall", unit=speed))
    with TemporaryDirectory() as folder:
        data, sparse = (Path(folder, name) for name in ("data", "sparse"))
        write_data(data, model, tokens)
        names = {CACHE: data, DISK: data}
        if model == "gpt2":
            documents = write_sparse(sparse, sparse_tokens)
            settings["sparse"] = f"{documents * DOCUMENT:,} tokens in {documents:,} documents"
            names[SPARSE] = sparse
        common = {key: settings[key] for key in ("model", "seq_length", "steps", "batches")}
        question = Question(
            title="The data path",
            method=__doc__,
            contenders=[
                Contender(
                    name=name,
                    group=model,
                    run=run,
                    arguments={**common, "name": name, "prefix": str(prefix)},
                )
                for name, prefix in names.items()
            ],
            columns=columns,
            result=result,
            rounds=5,
            turns=3,
            together=False,
            packages=("numpy",),
            settings={**settings, "tokens": tokens},
        )
        ask(question, flags)


if __name__ == "__main__":
    cli(main)
