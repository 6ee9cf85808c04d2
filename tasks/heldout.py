"""A model on documents it has never seen: perplexities, bits per byte, last-word cloze.

Conventions. Every document is read after an end mark and closes with one. *Tokens* are those of the
text and its closing mark; *words* are runs of non-blanks; *bytes* are UTF-8. The same total
negative log-likelihood, closing marks included, is divided by each. The n-gram models predict the
same tokens.
"""

from __future__ import annotations

import lzma
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import positive
from megatron.config.parallel import ParallelConfig
from megatron.config.trained import TrainedConfig
from megatron.data.description import Description
from megatron.data.indexed import IndexedDataset
from megatron.data.splits import split_documents
from megatron.data.tokenizer import Tokenizer
from tasks.common import EvaluationConfig, Joined, Scores, Sliding, Task, Window
from tasks.ngram import bigram_perplexity, unigram_perplexity
from tools.corpus.records import parse_line
from tools.corpus.shards import cut, find_shards, read_lines

# The last word of a paragraph and what follows it: a full stop, a bracket, quotes.
LAST_WORD = re.compile(r"(?P<context>.*\S)(?P<word> [A-Za-z]+)[^A-Za-z\s]*\s*\Z", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Settings:
    trained: TrainedConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    input: tuple[Path, ...]
    """Held-out documents, a JSON object a line: files, or folders that a corpus step filled."""

    json_key: str = "text"
    """Key of a line's text."""

    train_data: str
    """Prefix of the training data, for the n-gram models."""

    cloze_passages: int = 500
    """Paragraphs of which the last word is asked for, spread evenly over the documents."""

    cloze_words: int = 20
    """Words a paragraph needs to be one of them."""

    def __post_init__(self) -> None:
        positive(self, "cloze_passages", "cloze_words")


@dataclass(frozen=True)
class HeldOut(Task):
    """The windows of all documents, then one for each cloze passage."""

    texts: Sequence[str]
    documents: Sequence[Sequence[int]]  # their tokens
    bad_lines: int
    train: NDArray[np.integer]
    tokenizer: Tokenizer
    stream: Joined
    windows: Joined

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> Window:
        return self.windows[number]

    def score(self, scores: Scores, written: Sequence[Sequence[int]]) -> dict[str, Any]:
        text, cloze = scores[: len(self.stream)], scores[len(self.stream) :]
        vocabulary, end = self.tokenizer.vocab_size, self.tokenizer.eod
        heldout = np.concatenate([[*tokens, end] for tokens in self.documents])
        tokens, words = int(text.tokens.sum()), sum(len(each.split()) for each in self.texts)
        assert tokens == len(heldout)
        raw = "\n".join(self.texts).encode()
        return {
            "documents": len(self.texts),
            "bad_lines": self.bad_lines,
            "tokens": tokens,
            "words": words,
            "bytes": len(raw),
            "token_perplexity": text.perplexity(tokens),
            "word_perplexity": text.perplexity(words),
            "bits_per_byte": -float(text.log_probability.sum()) / log(2) / len(raw),
            "xz_bits_per_byte": 8 * len(lzma.compress(raw, preset=9)) / len(raw),
            "cloze_accuracy": float(cloze.all_hit.mean()) if len(cloze) else None,
            "cloze_passages": len(cloze),
            "unigram_perplexity": unigram_perplexity(self.train, heldout, vocabulary),
            "bigram_perplexity": bigram_perplexity(self.train, heldout, vocabulary),
        }


def prepare(settings: Settings, manifest: dict[str, Any], tokenizer: Tokenizer) -> HeldOut:
    """Raise ValueError or OSError, naming the flag, for what cannot be evaluated."""
    texts, bad_lines = read_texts(settings.input, settings.json_key)
    train = training_tokens(settings.train_data, manifest)
    documents = tokenizer.encode_batch(texts)
    length = manifest["config"]["data"]["seq_length"]
    half = max(1, length // 2)
    marked = [np.array([tokenizer.eod, *each, tokenizer.eod], np.int32) for each in documents]
    stream = Joined([Sliding(each, length, half, reach_back=True) for each in marked])
    windows = Joined([stream, list(cloze_windows(texts, tokenizer, length, settings))])
    return HeldOut(texts, documents, bad_lines, train, tokenizer, stream, windows)


def read_texts(paths: Sequence[Path], key: str) -> tuple[list[str], int]:
    """The documents of JSON lines, and how many lines hold none; each of those is named."""
    texts, bad_lines = [], 0
    for unit in cut(find_shards(paths), sys.maxsize):
        for line in read_lines(unit):
            try:
                texts.append(parse_line(line, key)[key])
            except ValueError as error:
                bad_lines += 1
                place = f"{unit.file}, byte {line.offset}"
                warnings.warn(f"--input {place} left out: {error}", stacklevel=2)
    if not texts:
        names = " ".join(map(str, paths))
        raise ValueError(
            f'--input {names} holds no documents; a line of {{"{key}": "..."}} each would work'
        )
    return texts, bad_lines


def training_tokens(prefix: str, manifest: dict[str, Any]) -> NDArray[np.integer]:
    """The tokens of the documents that the model was trained on, end marks included."""
    try:
        data, description = IndexedDataset(prefix), Description.read(prefix)
    except (ValueError, OSError) as error:
        raise ValueError(f"--train-data: {error}") from error
    if description is not None and description.tokenizer_fingerprint != manifest["tokenizer"]:
        raise ValueError(
            f"--train-data {prefix} was made with the tokenizer "
            f"{description.tokenizer_fingerprint[:12]}, the model with {manifest['tokenizer'][:12]}"
            "; the --data-path that the model was trained on would work"
        )
    train, _, _ = split_documents(manifest["config"]["data"]["split"], len(data.documents) - 1)
    tokens = data.token_range(train)
    return data.tokens[tokens.start : tokens.stop]


def cloze_windows(
    texts: Sequence[str], tokenizer: Tokenizer, length: int, settings: Settings
) -> Iterator[Window]:
    """Paragraphs whose last word is to be told from the paragraph before it, spread evenly."""
    passages = [
        found
        for text in texts
        for paragraph in text.split("\n\n")
        if len(paragraph.split()) >= settings.cloze_words
        and (found := LAST_WORD.match(paragraph.strip()))
    ]
    every = max(1, len(passages) // settings.cloze_passages)
    for found in passages[::every][: settings.cloze_passages]:
        word = tokenizer.encode(found["word"])
        tokens = [tokenizer.eod, *tokenizer.encode(found["context"]), *word][-length - 1 :]
        yield Window(tokens[:-1], tokens[1:], len(tokens) - 1 - len(word))
