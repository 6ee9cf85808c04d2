"""A model on documents it has never seen: perplexities, bits per byte, last-word cloze.

Every document starts with the model's begin mark, or an end mark where the model has none, and ends
with an end mark. The total negative log-likelihood, final marks included, is divided by tokens, by
words and by bytes. The n-gram models predict the same tokens.
"""

from __future__ import annotations

import lzma
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import IndexedDataset
from megatron.data.json_lines import find_shards, parse_line, read_shard
from megatron.data.order import split_documents
from megatron.data.tokenizer import Tokenizer
from megatron.errors import UsageError
from megatron.train.trained import begin_of
from tasks.ngram import bigram_perplexity, unigram_perplexity
from tasks.protocol import Scores, Sliding, Task, TaskSettings, Window, encode_targets

CONVENTIONS = {
    "documents": "lines with a text",
    "bad_lines": "lines without one, left out",
    "tokens": "of the texts, and an end mark after each",
    "words": "runs of characters of the texts that are not blank",
    "bytes": "UTF-8 bytes of the texts, with a line end between two",
    "token_perplexity": "exp(nll / tokens); nll is the sum of -ln p of all tokens, end marks "
    "included, each document read alone, after the begin mark or, of a model without one, an end "
    "mark, in windows of the --seq-length that "
    "the model was trained with, half a window apart",
    "word_perplexity": "exp(nll / words)",
    "bits_per_byte": "nll / ln 2 / bytes",
    "xz_bits_per_byte": "what xz at level 9 makes of the texts: 8 x its bytes / bytes",
    "cloze_accuracy": "passages of which every token of the last word is the most probable one, "
    "given the paragraph and the word's own tokens before it; null without passages",
    "cloze_passages": "paragraphs of 20 words or more that end in a word of the letters A to Z, at "
    "most 500 of them, spread evenly over the documents",
    "unigram_perplexity": "exp(nll / tokens) of the frequencies of --train-data's training part",
    "bigram_perplexity": "the same of a bigram model of it (interpolated modified Kneser-Ney)",
}
CLOZE_PASSAGES, CLOZE_WORDS = 500, 20  # passages at most, and words of each at least
# The last word of a paragraph and what follows it: a full stop, a bracket, quotes.
LAST_WORD = re.compile(r"(?P<context>.*\S)(?P<word> [A-Za-z]+)[^A-Za-z\s]*\s*\Z", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    input: tuple[Path, ...]
    """Held-out documents, one JSON object per line: files, or output folders of a corpus step."""

    json_key: str = "text"
    """Key of the text in a line's object."""

    train_data: str
    """Prefix of the training data, for the n-gram models."""

    @property
    def files(self) -> list[Path]:
        return find_shards(self.input)


@dataclass(frozen=True)
class HeldOut(Task):
    """The windows of all documents, then one for each cloze passage."""

    texts: Sequence[str]
    documents: Sequence[Sequence[int]]  # their tokens
    bad_lines: int
    train: NDArray[np.integer]
    tokenizer: Tokenizer
    windows: Sequence[Window]
    cloze_passages: int  # number of cloze passages, which are the last windows

    def score(self, scores: Scores, continuations: Sequence[Sequence[int]]) -> dict[str, Any]:
        first = len(scores) - self.cloze_passages
        text, cloze = scores[:first], scores[first:]
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
            "cloze_passages": len(cloze),
            "word_perplexity": text.perplexity(words),
            "bits_per_byte": -float(text.log_probability.sum()) / log(2) / len(raw),
            "xz_bits_per_byte": 8 * len(lzma.compress(raw, preset=9)) / len(raw),
            "cloze_accuracy": float(cloze.all_hit.mean()) if len(cloze) else None,
            "unigram_perplexity": unigram_perplexity(self.train, heldout, vocabulary),
            "bigram_perplexity": bigram_perplexity(self.train, heldout, vocabulary),
            "token_perplexity": text.perplexity(tokens),
            "conventions": CONVENTIONS,
        }


def prepare(settings: Settings, manifest: dict[str, Any], tokenizer: Tokenizer) -> HeldOut:
    """Raises ValueError or OSError, naming the flag, for input that cannot be evaluated."""
    texts, bad_lines = read_texts(settings.input, settings.json_key)
    train = training_tokens(settings.train_data, manifest)
    documents = tokenizer.encode_batch(texts)
    length = manifest["config"]["data"]["seq_length"]
    half = max(1, length // 2)
    first = begin_of(manifest, tokenizer) or [tokenizer.eod]
    marked = [np.array([*first, *each, tokenizer.eod], np.int32) for each in documents]
    windows = [window for each in marked for window in Sliding(each, length, half, reach_back=True)]
    cloze = list(cloze_windows(texts, tokenizer, first, length))
    return HeldOut(texts, documents, bad_lines, train, tokenizer, windows + cloze, len(cloze))


def read_texts(paths: Sequence[Path], key: str) -> tuple[list[str], int]:
    """(documents of the files, number of lines without one); warns of each such line."""
    texts, bad_lines = [], 0
    for file in find_shards(paths):
        if not file.stat().st_size:
            continue
        for line in read_shard(file, key=key):
            try:
                texts.append(parse_line(line, key)[key])
            except ValueError as error:
                bad_lines += 1
                place = f"{file}, byte {line.offset}"
                warnings.warn(f"--input {place} left out: {error}", stacklevel=2)
    if not texts:
        names = " ".join(map(str, paths))
        raise ValueError(
            f'--input {names} holds no documents; a line of {{"{key}": "..."}} each would work'
        )
    return texts, bad_lines


def training_tokens(prefix: str, manifest: dict[str, Any]) -> NDArray[np.integer]:
    """Tokens of the documents that the model was trained on, end marks included."""
    try:
        data = IndexedDataset(prefix)
    except (ValueError, OSError) as error:
        raise ValueError(f"--train-data: {error}") from error
    description = data.description
    known = manifest["tokenizer"]  # empty where the weights were imported without a tokenizer
    if known and description is not None and description.tokenizer_fingerprint != known:
        raise ValueError(
            f"--train-data {prefix} was made with the tokenizer "
            f"{description.tokenizer_fingerprint[:12]}, the model with {known[:12]}"
            "; the --data-path that the model was trained on would work"
        )
    split = manifest["config"]["data"]["split"]
    try:
        train, _, _ = split_documents(split, data.num_documents)
    except UsageError as error:
        allowed = f"a data set with documents for each part of the model's --split {split}"
        raise UsageError("--train-data", prefix, allowed) from error
    tokens = data.token_range(train)
    return data.read(tokens.start, tokens.stop)


def cloze_windows(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    first: Sequence[int],
    length: int,
) -> Iterator[Window]:
    """Paragraphs, spread evenly, whose last word is predicted from the rest of the paragraph.

    first: ids put before each paragraph.
    """
    passages = [
        found
        for text in texts
        for paragraph in text.split("\n\n")
        if len(paragraph.split()) >= CLOZE_WORDS and (found := LAST_WORD.match(paragraph.strip()))
    ]
    count = min(CLOZE_PASSAGES, len(passages))
    chosen = [passages[number * len(passages) // count] for number in range(count)]
    contexts, targets = ([found[part] for found in chosen] for part in ("context", "word"))
    for context, word in encode_targets(tokenizer, ["--input"] * count, contexts, targets):
        tokens = [*first, *context, *word][-length - 1 :]
        yield Window(tokens[:-1], tokens[1:], len(tokens) - 1 - len(word))
