"""Show BERT's samples as text, and statistics of many beside what is to be expected.

    python tools/inspect_data.py --data-path P_text_sentence --samples 2 --statistics 2000

Prints what pretrain_bert.py would train on with the same flags. In a sample {[MASK] <- word} says
what the model reads and what it has to predict.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.checks import non_negative
from megatron.config.interrupt import interruptible
from megatron.config.parse import parse, user_errors
from megatron.config.training import BertDataConfig
from megatron.data.bert import BertDataset, BertSample
from megatron.data.masking import HIDDEN, RANDOM
from megatron.data.pairs import SPECIAL
from megatron.data.sources import Corpus
from megatron.data.wordpiece import BertTokenizer
from megatron.train.inputs import open_bert_data

WIDTH = 100  # characters of a line
AT_ONCE = 64  # samples read together
NOTES = """
Samples are numbered by tokens. A number is spare where its document has no block of sentences left
for it, as one of a single sentence never has: the sample is then of a block drawn from all. Many
such documents, or documents shorter than a sample, make many spare numbers; no text is lost by it.
Documents of one sentence are counted among at most {statistics:,} of a data set's training split.
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    samples: int = 2
    """Samples of the training split that are shown."""

    first: int = 0
    """Number of the first sample shown."""

    statistics: int = 2000
    """Samples, from number 0 on, that the statistics are of."""

    seed: int = 1234
    """Seed of the training whose samples are shown."""

    data: BertDataConfig = field(default_factory=BertDataConfig)

    def __post_init__(self) -> None:
        non_negative(self, "samples", "first", "statistics", "seed")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table of statistics: shares."""

    name: str
    found: float
    expected: float | None = None

    def __str__(self) -> str:
        cells = [
            "" if number is None else f"{100 * number:.2f} %"
            for number in (self.found, self.expected)
        ]
        return f"{self.name:<44}{cells[0]:>12}{cells[1]:>12}".rstrip()


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        settings = parse(Settings, arguments, environ)
        tokenizer, inputs = open_bert_data(settings.data, settings.seed)
        assert isinstance(inputs.train, BertDataset)
        lines = [described(inputs.corpus, tokenizer), ""]
        lines += shown(inputs.train, tokenizer, settings)
    print("\n".join(lines))


def described(corpus: Corpus, tokenizer: BertTokenizer) -> str:
    lines = [f"tokenizer {tokenizer.kind}, {tokenizer.vocab_size:,} ids"]
    for source in corpus.sources:
        data, known = source.data, source.description
        documents, sequences, tokens = len(data.documents) - 1, len(data.sizes), len(data.tokens)
        lines.append(
            f"{data.prefix}: {documents:,} documents of {sequences:,} sequences and {tokens:,} "
            "tokens"
        )
        if known is not None and known.one_sentence is not None:
            lines.append(f"  {known.one_sentence:,} of the documents have one sentence only")
        if known is not None and known.unknown_tokens is not None:
            share = known.unknown_tokens / tokens
            lines.append(f"  {known.unknown_tokens:,} of the tokens are [UNK] ({share:.2%})")
    return "\n".join(lines)


def shown(data: BertDataset, tokenizer: BertTokenizer, settings: Settings) -> Iterator[str]:
    numbers = range(settings.first, settings.first + settings.samples)
    for number, sample in zip(numbers, data.samples(numbers) if numbers else [], strict=True):
        yield shown_pair(number, sample, tokenizer, settings.data.seq_length)
    if settings.statistics:
        yield f"{f'{settings.statistics} samples':<44}{'found':>12}{'expected':>12}"
        yield from map(str, bert_statistics(data, tokenizer, settings))
        yield NOTES.format(statistics=settings.statistics)


def shown_pair(number: int, sample: BertSample, tokenizer: BertTokenizer, seq_length: int) -> str:
    real = SPECIAL + sum(map(len, sample.stands))
    facts = [
        f"sample {number}: segments {'swapped' if sample.pair.is_swapped else 'in order'}",
        f"{real} tokens and {seq_length - real} of padding",
        f"{sum(int(chosen.sum()) for chosen in sample.chosen)} to be predicted",
    ]
    if sample.pair.truncated:
        facts.append(f"{sample.pair.truncated} did not fit")
    if sample.pair.is_short:
        facts.append("short on purpose")
    segments = zip(sample.stands, sample.chosen, sample.reads, strict=True)
    first, second = (marked(*segment, tokenizer) for segment in segments)
    texts = _wrapped(f"[CLS] {first} [SEP]\n{second} [SEP]")
    return "\n".join([", ".join(facts), texts, ""])


def marked(
    stands: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    reads: NDArray[np.int64],
    tokenizer: BertTokenizer,
) -> str:
    """The text of a segment, with {what is read <- what is to be predicted} for each n-gram."""
    pieces = np.split(np.arange(len(stands)), np.flatnonzero(np.diff(chosen)) + 1)
    texts = []
    for piece in pieces:
        text = tokenizer.decode(stands[piece].tolist())
        if chosen[piece[0]]:
            text = f"{{{tokenizer.decode(reads[piece].tolist())} <- {text}}}"
        texts.append(text)
    return " ".join(texts)


def bert_statistics(
    data: BertDataset, tokenizer: BertTokenizer, settings: Settings
) -> Iterator[Row]:
    numbers, section = range(settings.statistics), settings.data
    samples = [each for some in _chunks(numbers) for each in data.samples(some)]
    yield from _of_masks(samples, tokenizer, section.mask_prob)
    yield from _of_ngrams(samples, tokenizer, section.max_ngram_size)
    swapped = np.mean([sample.pair.is_swapped for sample in samples])
    yield Row(name="swapped pairs", found=swapped, expected=0.5)
    short = np.mean([sample.pair.is_short for sample in samples])
    yield Row(name="samples short on purpose", found=short, expected=section.short_seq_prob)
    yield from _costs(data, samples, section.seq_length)
    ids = np.concatenate([each for sample in samples for each in sample.stands])
    yield Row(name="tokens that are [UNK]", found=(ids == tokenizer.unknown).mean())


def _of_masks(
    samples: Sequence[BertSample], tokenizer: BertTokenizer, mask_prob: float
) -> Iterator[Row]:
    chosen = np.concatenate([each for sample in samples for each in sample.chosen])
    stands = np.concatenate([each for sample in samples for each in sample.stands])[chosen]
    reads = np.concatenate([each for sample in samples for each in sample.reads])[chosen]
    yield Row(name="tokens to be predicted", found=chosen.mean(), expected=mask_prob)
    words = np.concatenate([each for sample in samples for each in _words(sample, tokenizer)])
    yield Row(name="words to be predicted, whole", found=words.mean(), expected=mask_prob)
    is_hidden, is_kept = reads == tokenizer.mask, reads == stands
    for name, found, expected in (
        ("as [MASK]", is_hidden, HIDDEN),
        ("as a random id", ~is_hidden & ~is_kept, RANDOM),
        ("as it stands", is_kept, 1 - HIDDEN - RANDOM),
    ):
        yield Row(name=f"token to be predicted read {name}", found=found.mean(), expected=expected)


def _of_ngrams(
    samples: Sequence[BertSample], tokenizer: BertTokenizer, longest: int
) -> Iterator[Row]:
    words = [each for sample in samples for each in _words(sample, tokenizer)]
    counts = np.bincount(np.concatenate([_runs(each) for each in words]), minlength=longest + 1)
    total = sum(1 / n for n in range(1, longest + 1))
    for n in range(1, longest + 1):
        found = counts[n] / counts.sum()
        name = f"n-grams of {n} word{'s' if n > 1 else ''}"
        yield Row(name=name, found=found, expected=1 / n / total)


def _costs(data: BertDataset, samples: Sequence[BertSample], seq_length: int) -> Iterator[Row]:
    """What of the text, and of a sample's room, is not used; it depends on the documents."""
    count = len(samples)
    content = sum(len(ids) for sample in samples for ids in sample.stands)
    truncated = sum(sample.pair.truncated for sample in samples)
    looked_at = [part.one_sentence(count) for part in data.parts]
    single, documents = map(sum, zip(*looked_at, strict=True))
    yield Row(name="padding", found=1 - (content + SPECIAL * count) / (count * seq_length))
    yield Row(name="tokens that did not fit", found=truncated / (content + truncated))
    spare = sum(sample.is_spare for sample in samples)
    yield Row(name="spare numbers, another block drawn", found=spare / count)
    yield Row(name="documents of one sentence, passed over", found=single / documents)


def _words(sample: BertSample, tokenizer: BertTokenizer) -> Iterator[NDArray[np.bool_]]:
    """Of each segment, which of its words are to be predicted, with all of their pieces."""
    for ids, chosen in zip(sample.stands, sample.chosen, strict=True):
        is_start = ~tokenizer.is_continuation[ids]
        is_start[0] = True
        yield np.logical_and.reduceat(chosen, np.flatnonzero(is_start))


def _runs(where: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The length of each run of True."""
    edges = np.flatnonzero(np.diff(where.astype(np.int8), prepend=0, append=0))
    return edges[1::2] - edges[::2]


def _chunks(numbers: range) -> Iterator[range]:
    for start in range(0, len(numbers), AT_ONCE):
        yield numbers[start : start + AT_ONCE]


def _wrapped(text: str) -> str:
    """Every line of the text, indented and cut at blanks."""
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(wrapper.fill(line) for line in text.split("\n") if line.strip())


if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
