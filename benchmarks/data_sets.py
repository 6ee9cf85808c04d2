"""Data sets of random ids for benchmarks: documents as long as OpenWebText's, or sparse ones."""

from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import HEADER, Description, token_dtype
from megatron.data.order import split_documents
from megatron.data.tokenizer import MARKS, BertWordPieceLowerCase
from tools.data_files import IndexedDatasetWriter, pack_header

DOCUMENT = 1100  # tokens of one, on average; OpenWebText has 9.0e9 in 8.0e6
SENTENCE = 25
SPREAD = 1.0  # of the logarithm of their lengths
AT_ONCE = 2000  # documents that are drawn together
VOCABULARY = {"gpt2": 50257, "bert": 30522}
SPLIT = "949,50,1"


def write_documents(prefix: Path, tokens: int) -> None:
    """A data set for GPT-2: random ids, and an end mark after each document."""
    rng, eod = np.random.default_rng(0), VOCABULARY["gpt2"] - 1
    dtype = token_dtype(eod + 1)
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        while writer.tokens < tokens:
            sizes = lengths(rng, DOCUMENT, AT_ONCE)
            ids = rng.integers(0, eod, sizes.sum(), dtype)
            ids[np.cumsum(sizes) - 1] = eod
            writer.add(ids, sizes)
        writer.commit(
            tokenizer_type="random",
            tokenizer_fingerprint="random",
            vocab_size=eod + 1,
            eod=eod,
            shuffled=True,
        )


def write_sentences(prefix: Path, tokens: int) -> None:
    """A data set for BERT: random ids in sentences, and a vocabulary, a third of it pieces that go
    on with a word."""
    words = [f"{'##' * (n % 3 == 0)}{n}" for n in range(VOCABULARY["bert"] - len(MARKS))]
    vocabulary = vocabulary_of(prefix)
    vocabulary.write_text("".join(f"{token}\n" for token in [*MARKS, *words]))
    tokenizer, rng = BertWordPieceLowerCase(str(vocabulary)), np.random.default_rng(0)
    dtype = token_dtype(tokenizer.vocab_size)
    with IndexedDatasetWriter(str(prefix), dtype, sentences=True) as writer:
        while writer.tokens < tokens:
            counts = 1 + lengths(rng, DOCUMENT, AT_ONCE) // SENTENCE
            sizes = lengths(rng, SENTENCE, int(counts.sum()))
            ids = rng.integers(len(MARKS), tokenizer.vocab_size, sizes.sum(), dtype)
            writer.add(ids, sizes, counts)
        writer.commit(
            tokenizer_type=tokenizer.kind,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=None,
            shuffled=True,
        )


def lengths(rng: np.random.Generator, mean: int, count: int) -> NDArray[np.int32]:
    drawn = rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.maximum(2, drawn).astype(np.int32)


def vocabulary_of(prefix: Path) -> Path:
    return prefix.with_suffix(".txt")


def write_sparse(prefix: Path, tokens: int) -> int:
    """A data set for GPT-2 of so many tokens in documents of one length; returns their number.

    Of the index just what opening it with SPLIT reads is written. The rest and the tokens are holes
    in the files, so that it takes next to no room; its samples are zeros.
    """
    dtype = token_dtype(VOCABULARY["gpt2"])
    documents = tokens // DOCUMENT
    index, binary = (prefix.with_suffix(suffix) for suffix in (".idx", ".bin"))
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
    firsts = [part.start for part in split_documents(SPLIT, documents)]
    for document in (*firsts, documents - 1):
        sizes[document], starts[document] = DOCUMENT, document
        pointers[document] = document * DOCUMENT * dtype.itemsize
    starts[documents] = documents
    with binary.open("wb") as stream:
        stream.truncate(documents * DOCUMENT * dtype.itemsize)
    Description(
        tokenizer_type="random",
        tokenizer_fingerprint="random",
        vocab_size=VOCABULARY["gpt2"],
        eod=VOCABULARY["gpt2"] - 1,
        documents=documents,
        tokens=documents * DOCUMENT,
        bin_sha256="",
        idx_sha256="",
        shuffled=True,
    ).write(str(prefix))
    return documents
