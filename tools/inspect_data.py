"""Show samples as text, and statistics of many samples beside the expected values.

    python tools/inspect_data.py --data-path P_text_sentence --samples 2 --statistics 2000
    python tools/inspect_data.py --data-path P_text_document --seq-length 1024 --eod-mask-loss

Prints the samples that pretrain_bert.py, or for whole documents pretrain_gpt2.py, would train on
with the same flags. In a sample of BERT {[MASK] <- word} shows what the model reads and what it has
to predict. A sample of GPT-2 is shown document by document, with positions and the tokens attended
to; {text} does not count in the loss.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import non_negative
from megatron.config.parse import parse, whole_program
from megatron.config.training import BertDataConfig
from megatron.data.bert import MASK_SHARE, RANDOM_SHARE, SPECIAL, BertDataset, BertSample
from megatron.data.gpt2 import GPT2Batch, GPT2Dataset, open_splits
from megatron.data.indexed import IndexedDataset
from megatron.data.sources import Corpus, find_tokenizer, open_corpus, require_sequences
from megatron.data.tokenizer import BertTokenizer, GPT2BPETokenizer, Tokenizer, build_tokenizer
from megatron.errors import UsageError, flag, switch
from megatron.train.inputs import open_bert_data

WIDTH = 100  # characters per line
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
    """Number of samples of the training split to show."""

    first: int = 0
    """Number of the first sample shown."""

    statistics: int = 2000
    """Number of samples, from number 0 on, that the statistics cover."""

    seed: int = 1234
    """Seed of the training run whose samples are shown."""

    reset_position_ids: bool = False
    """GPT-2 only: restart positions at 0 after each end-of-document mark."""

    reset_attention_mask: bool = False
    """GPT-2 only: let no token attend to an earlier document."""

    eod_mask_loss: bool = False
    """GPT-2 only: leave out the loss where the input is an end-of-document mark."""

    data: BertDataConfig = field(default_factory=BertDataConfig)

    def __post_init__(self) -> None:
        non_negative(self, "samples", "first", "statistics", "seed")


class Row(NamedTuple):
    """A line of the table of statistics; found and expected are shares, at most 1."""

    name: str
    found: float
    expected: float | None = None

    def __str__(self) -> str:
        expected = "" if self.expected is None else f"{100 * self.expected:.2f} %"
        return f"{self.name:<44}{f'{100 * self.found:.2f} %':>12}{expected:>12}".rstrip()


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with whole_program(environ):
        settings = parse(Settings, arguments, environ)
        if reads_documents(settings.data.data_path):
            corpus, documents_tokenizer, data = open_gpt2(settings)
            lines = [described(corpus, documents_tokenizer), ""]
            lines += shown_gpt2(data, corpus, documents_tokenizer, settings)
        else:
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
                if getattr(settings, name):
                    allowed = "left out, as --data-path is not of whole documents"
                    raise UsageError(flag(name), None, allowed, works=(switch(name, False),))
            tokenizer, inputs = open_bert_data(settings.data, settings.seed)
            assert isinstance(inputs.train, BertDataset)
            lines = [described(inputs.corpus, tokenizer), ""]
            lines += shown_bert(inputs.train, tokenizer, settings)
        print("\n".join(lines))


def reads_documents(data_path: Sequence[str]) -> bool:
    """Whether the last data set is one of whole documents; False if it cannot be opened."""
    try:
        return not IndexedDataset(data_path[-1]).has_sentences
    except (IndexError, ValueError, OSError):
        return False


def described(corpus: Corpus, tokenizer: Tokenizer) -> str:
    lines = [f"tokenizer {tokenizer.kind}, {tokenizer.vocab_size:,} ids"]
    for source in corpus.sources:
        data, known = source.data, source.data.description
        lines.append(
            f"{data.prefix}: {data.num_documents:,} documents of {data.num_sequences:,} sequences "
            f"and {data.num_tokens:,} tokens"
        )
        if known is not None and known.one_sentence is not None:
            lines.append(f"  {known.one_sentence:,} of the documents have one sentence only")
        if known is not None and known.unknown_tokens is not None:
            share = known.unknown_tokens / data.num_tokens
            lines.append(f"  {known.unknown_tokens:,} of the tokens are [UNK] ({share:.2%})")
    return "\n".join(lines)


def open_gpt2(settings: Settings) -> tuple[Corpus, Tokenizer, GPT2Dataset]:
    """The corpus, its tokenizer, and the training split."""
    data, given = settings.data, None
    if data.vocab_file or data.merge_file:
        kind = GPT2BPETokenizer.kind if data.merge_file else data.tokenizer_type
        given = build_tokenizer(kind, data.vocab_file, data.merge_file)
    corpus = open_corpus(data.data_path, given)
    require_sequences(corpus, sentences=False)
    tokenizer = given or find_tokenizer(corpus)
    if tokenizer is None:
        what = "given, with --merge-file or --tokenizer-type"
        allowed = f"{what}, as no tokenizer is beside --data-path"
        raise UsageError("--vocab-file", None, allowed)
    train, _, _ = open_splits(
        corpus,
        split=data.split,
        seq_length=data.seq_length,
        seed=settings.seed,
        shuffle=data.shuffle,
        reset_position_ids=settings.reset_position_ids,
        reset_attention_mask=settings.reset_attention_mask,
        eod_mask_loss=settings.eod_mask_loss,
    )
    if train is None:
        allowed = "such that a document is left for training"
        raise UsageError("--split", data.split, allowed, works=("--split", "1,0,0"))
    return corpus, tokenizer, train


def shown_gpt2(
    data: GPT2Dataset, corpus: Corpus, tokenizer: Tokenizer, settings: Settings
) -> Iterator[str]:
    for number in range(settings.first, settings.first + settings.samples):
        yield shown_documents(number, data.batch([number]), corpus.eod, tokenizer)
    if settings.statistics:
        yield heading(settings.statistics)
        yield from map(str, gpt2_statistics(data, corpus, settings))
        if corpus.eod is None:
            yield "\nThe documents have no end marks: where one begins does not show in a sample."


def shown_documents(number: int, batch: GPT2Batch, eod: int | None, tokenizer: Tokenizer) -> str:
    """The only sample of the batch as text, document by document."""
    tokens, is_counted, positions = batch.tokens[0], batch.loss_mask[0] > 0, batch.positions[0]
    bounds = [0, *(np.flatnonzero(tokens[:-1] == eod) + 1).tolist(), len(tokens)]
    lines = [
        f"sample {number}: {len(tokens)} tokens of {len(bounds) - 1} documents, "
        f"{int(is_counted.sum())} count in the loss"
    ]
    for first, end in pairwise(bounds):
        facts = f"tokens {first} to {end - 1}, positions {positions[first]} to {positions[end - 1]}"
        if batch.document_starts is not None:
            facts += f", attends from token {batch.document_starts[0, first]} on"
        runs = np.split(np.arange(first, end), np.flatnonzero(np.diff(is_counted[first:end])) + 1)
        texts = [
            tokenizer.decode(tokens[run].tolist()) if is_counted[run[0]]
            else f"{{{tokenizer.decode(tokens[run].tolist())}}}"
            for run in runs
        ]  # fmt: skip
        lines += [f"  {facts}:", _wrapped("".join(texts))]
    after = tokenizer.decode_after([int(batch.labels[0, -1])])
    return "\n".join([*lines, f"  and to be predicted after them: {after!r}", ""])


def gpt2_statistics(data: GPT2Dataset, corpus: Corpus, settings: Settings) -> Iterator[Row]:
    """Rows of statistics. Expected shares are those of the whole data sets, by their weights."""
    batches = [data.batch(some) for some in _chunks(range(settings.statistics))]
    is_mark = np.concatenate([batch.tokens == corpus.eod for batch in batches])
    in_loss = np.concatenate([batch.loss_mask for batch in batches])
    marks = 0.0
    if corpus.eod is not None:
        total = sum(source.weight for source in corpus.sources)
        for source in corpus.sources:
            share = float(source.weight / total)
            marks += share * source.data.num_documents / source.data.num_tokens
    yield Row("end marks", is_mark.mean(), marks)
    counted = 1 - marks if settings.eod_mask_loss else 1
    yield Row("tokens that count in the loss", in_loss.mean(), counted)
    yield Row("samples of several documents", is_mark[:, :-1].any(axis=1).mean())
    ids = np.unique(np.concatenate([np.unique(batch.tokens) for batch in batches]))
    yield Row("ids of the vocabulary that occur", len(ids) / corpus.vocab_size)


def heading(samples: int) -> str:
    return f"{f'{samples} samples':<44}{'found':>12}{'expected':>12}"


def shown_bert(data: BertDataset, tokenizer: BertTokenizer, settings: Settings) -> Iterator[str]:
    numbers = range(settings.first, settings.first + settings.samples)
    for number, sample in zip(numbers, data.samples(numbers) if numbers else [], strict=True):
        yield shown_pair(number, sample, tokenizer, settings.data.seq_length)
    if settings.statistics:
        yield heading(settings.statistics)
        yield from map(str, bert_statistics(data, tokenizer, settings))
        yield NOTES.format(statistics=settings.statistics)


def shown_pair(number: int, sample: BertSample, tokenizer: BertTokenizer, seq_length: int) -> str:
    real = SPECIAL + sum(map(len, sample.labels))
    facts = [
        f"sample {number}: segments {'swapped' if sample.pair.is_swapped else 'in order'}",
        f"{real} tokens and {seq_length - real} of padding",
        f"{sum(int(each.sum()) for each in sample.is_masked)} to be predicted",
    ]
    if sample.pair.truncated:
        facts.append(f"{sample.pair.truncated} did not fit")
    if sample.pair.is_short:
        facts.append("short on purpose")
    segments = zip(sample.labels, sample.is_masked, sample.tokens, strict=True)
    first, second = (marked(*segment, tokenizer) for segment in segments)
    texts = _wrapped(f"[CLS] {first} [SEP]\n{second} [SEP]")
    return "\n".join([", ".join(facts), texts, ""])


def marked(
    labels: NDArray[np.int64],
    is_masked: NDArray[np.bool_],
    tokens: NDArray[np.int64],
    tokenizer: BertTokenizer,
) -> str:
    """The text of a segment, with {input text <- text to predict} for each masked n-gram."""
    texts = []
    for run in np.split(np.arange(len(labels)), np.flatnonzero(np.diff(is_masked)) + 1):
        text = tokenizer.decode(labels[run].tolist())
        if is_masked[run[0]]:
            text = f"{{{tokenizer.decode(tokens[run].tolist())} <- {text}}}"
        texts.append(text)
    return " ".join(texts)


def bert_statistics(
    data: BertDataset, tokenizer: BertTokenizer, settings: Settings
) -> Iterator[Row]:
    """Unused shares of the text and of the samples' tokens depend on the documents: nothing is
    expected of them."""
    config, count = settings.data, settings.statistics
    samples = [each for some in _chunks(range(count)) for each in data.samples(some)]
    is_masked = np.concatenate([each for sample in samples for each in sample.is_masked])
    labels = np.concatenate([each for sample in samples for each in sample.labels])
    tokens = np.concatenate([each for sample in samples for each in sample.tokens])
    words = [each for sample in samples for each in _words(sample, tokenizer)]
    yield Row("tokens to be predicted", is_masked.mean(), config.mask_prob)
    yield Row("words to be predicted, whole", np.concatenate(words).mean(), config.mask_prob)
    is_mark = tokens[is_masked] == tokenizer.mask
    is_kept = tokens[is_masked] == labels[is_masked]
    for name, found, expected in (
        ("as [MASK]", is_mark, MASK_SHARE),
        ("as a random id", ~is_mark & ~is_kept, RANDOM_SHARE),
        ("as it stands", is_kept, 1 - MASK_SHARE - RANDOM_SHARE),
    ):
        yield Row(f"token to be predicted read {name}", found.mean(), expected)
    longest = config.max_ngram_size
    runs = np.bincount(np.concatenate([_runs(each) for each in words]), minlength=longest + 1)
    total = sum(1 / n for n in range(1, longest + 1))
    for n in range(1, longest + 1):
        yield Row(f"n-grams of {n} word{'s' if n > 1 else ''}", runs[n] / runs.sum(), 1 / n / total)
    pairs = [sample.pair for sample in samples]
    swapped = float(np.mean([pair.is_swapped for pair in pairs]))
    yield Row("swapped pairs", swapped, 0.5)
    short = float(np.mean([pair.is_short for pair in pairs]))
    yield Row("samples short on purpose", short, config.short_seq_prob)
    padding = 1 - (len(labels) + SPECIAL * count) / (count * config.seq_length)
    truncated = sum(pair.truncated for pair in pairs)
    counts = [each.one_sentence(count) for each in data.splits]
    single, documents = map(sum, zip(*counts, strict=True))
    yield Row("padding", padding)
    yield Row("tokens that did not fit", truncated / (len(labels) + truncated))
    spare = sum(sample.is_spare for sample in samples)
    yield Row("spare numbers, another block drawn", spare / count)
    yield Row("documents of one sentence, passed over", single / documents)
    yield Row("tokens that are [UNK]", (labels == tokenizer.unknown).mean())


def _words(sample: BertSample, tokenizer: BertTokenizer) -> Iterator[NDArray[np.bool_]]:
    """For each segment, bool [words]: whether all pieces of the word are to be predicted."""
    for ids, is_masked in zip(sample.labels, sample.is_masked, strict=True):
        is_start = ~tokenizer.is_continuation[ids]
        is_start[0] = True
        yield np.logical_and.reduceat(is_masked, np.flatnonzero(is_start))


def _runs(where: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The length of each run of True."""
    edges = np.flatnonzero(np.diff(where.astype(np.int8), prepend=0, append=0))
    return edges[1::2] - edges[::2]


def _chunks(numbers: range) -> Iterator[range]:
    for start in range(0, len(numbers), AT_ONCE):
        yield numbers[start : start + AT_ONCE]


def _wrapped(text: str) -> str:
    """The text with every line indented and wrapped at blanks."""
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(wrapper.fill(line) for line in text.split("\n") if line.strip())


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
