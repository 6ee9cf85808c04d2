"""WikiText103: perplexities as in the paper (section 5.3, appendix E) and as others count.

One total log-probability gives many perplexities: per sub-word token or per word, for different
ways to count words. Each is in the record, under its own name and with its convention. The file is
one stream of tokens and is read once. --per-document adds the figures of lm-evaluation-harness,
which reads each article alone, in a second pass without overlap: twice the time without
--overlapping-eval, and a thirtieth more with the paper's 32 and a window of 1024.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.checks import at_most, positive
from megatron.data.tokenizer import Tokenizer
from megatron.models.registry import positions_of
from megatron.train.trained import begin_of
from tasks.protocol import Scores, Sliding, Task, TaskSettings, WindowSequence
from tasks.readers.inputs import read_text

CURE = "the raw wiki.valid.tokens or wiki.test.tokens of WikiText103 would work"
TITLE = re.compile(r"\s*= (?!=).*(?<!=) =\s*")  # " = Title = ", and not " = = Section = = "
CONVENTIONS = {
    "token_perplexity": "exp(nll / num_scored_tokens): every token but the first of the file",
    "word_perplexity": "the paper's: exp(nll / num_original_tokens), the pieces of the stripped "
    "file cut at single blanks",
    "word_perplexity_plain_words": "exp(nll / num_words), runs of characters that are not blank",
    "word_perplexity_authors_code": "exp(nll / (num_original_tokens - 1)): what the program of the "
    "paper's authors printed",
    "word_perplexity_per_document": "lm-evaluation-harness's: each article alone, after the begin "
    "mark or, of a model without one, an end mark, detokenised by itself, in non-overlapping "
    "windows of which the last reaches back to be full; over the pieces of the raw article cut at "
    "runs of blanks, empty ones included",
    "bits_per_byte": "nll / ln 2 / num_bytes, UTF-8 bytes of the file as it is",
    "bits_per_byte_detokenised": "nll / ln 2 / num_bytes_detokenised",
    "bits_per_byte_per_document": "lm-evaluation-harness's: articles as above, over their bytes",
    "nll": "the sum of -ln p of the scored tokens; the whole file is one stream of tokens, without "
    "end marks",
    "num_tokens": "of the whole file, detokenised",
    "num_scored_tokens": "all of num_tokens but the first, which nothing predicts",
    "num_original_tokens": "pieces of the stripped file cut at single blanks, as the paper's "
    "authors count: line ends are no cuts, and two blanks have an empty piece between them",
    "num_words": "runs of characters of the file that are not blank",
    "num_words_per_document": "what word_perplexity_per_document is over: the pieces of all "
    "articles, each cut at runs of blanks, with the empty pieces at its ends",
    "num_bytes": "UTF-8 bytes of the file as it is",
    "num_bytes_detokenised": "UTF-8 bytes of the whole file, detokenised",
    "num_documents": "articles, each from its title to the next one's; what stands before the "
    "first title counts as one unless it is blank",
    "window": "tokens that the model reads at most to predict one",
    "stride": "tokens from the start of a window to that of the next",
}


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    valid_data: Path
    """wiki.test.tokens or wiki.valid.tokens, as released."""

    overlapping_eval: int | None = None
    """Stride of the window, which is also the number of tokens scored per window (32 in the paper);
    the whole window if not given."""

    window: int | None = None
    """Largest number of tokens that the model reads at once; all its positions if not given."""

    per_document: bool = False
    """Add the figures of lm-evaluation-harness, which reads each article alone: a second pass over
    the file, in windows that do not overlap."""

    def __post_init__(self) -> None:
        positive(self, "window", "overlapping_eval")


@dataclass(frozen=True)
class WikiText103(Task):
    """The windows of the whole file and, with --per-document, those of the articles after them."""

    text: str
    detokenised: str
    articles: Sequence[str]
    stream: Sliding
    windows: WindowSequence

    def score(self, scores: Scores, continuations: Sequence[Sequence[int]]) -> dict[str, Any]:
        stream, alone = scores[: len(self.stream)], scores[len(self.stream) :]
        num_scored = int(stream.tokens.sum())
        assert num_scored == len(self.stream.tokens) - 1
        original, words = len(self.text.strip().split(" ")), len(self.text.split())
        size, size_detokenised = len(self.text.encode()), len(self.detokenised.encode())
        per_document: dict[str, float] = {}
        if len(alone):
            pieces = sum(len(re.split(r"\s+", article)) for article in self.articles)
            size_of_articles = sum(len(article.encode()) for article in self.articles)
            per_document = {
                "num_words_per_document": pieces,
                "bits_per_byte_per_document": bits(alone) / size_of_articles,
                "word_perplexity_per_document": alone.perplexity(pieces),
            }
        figures = {
            "num_tokens": len(self.stream.tokens),
            "num_scored_tokens": num_scored,
            "num_original_tokens": original,
            "num_words": words,
            "num_bytes": size,
            "num_bytes_detokenised": size_detokenised,
            "num_documents": len(self.articles),
            "window": self.stream.length,
            "stride": self.stream.stride,
            "nll": -float(stream.log_probability.sum()),
            **per_document,
            "bits_per_byte": bits(stream) / size,
            "bits_per_byte_detokenised": bits(stream) / size_detokenised,
            "token_perplexity": stream.perplexity(num_scored),
            "word_perplexity_authors_code": stream.perplexity(original - 1),
            "word_perplexity_plain_words": stream.perplexity(words),
            "word_perplexity": stream.perplexity(original),
        }
        protocol = {
            "detokenisation": "the rules of the paper's authors, on the whole file",
            "window": f"window k starts at token k x {self.stream.stride} and has up to "
            f"{self.stream.length} inputs; the first scores all it predicts, each later one "
            f"its last {self.stream.stride}; the last one is shorter",
        }
        conventions = {name: text for name, text in CONVENTIONS.items() if name in figures}
        return {**figures, "protocol": protocol, "conventions": conventions}


def bits(scores: Scores) -> float:
    return -float(scores.log_probability.sum()) / log(2)


def prepare(settings: Settings, manifest: dict[str, Any], tokenizer: Tokenizer) -> WikiText103:
    """Raises ValueError or OSError, naming the flag, for input that cannot be evaluated."""
    length, stride = choose_window(settings, manifest)
    text = read_articles(settings.valid_data)
    detokenised, articles = detokenise(text), cut_articles(text)
    stream = Sliding(np.array(tokenizer.encode(detokenised), np.int32), length, stride)
    if not len(stream):
        raise ValueError(f"--valid-data {settings.valid_data} has no second token; {CURE}")
    windows: WindowSequence = stream
    if settings.per_document:
        first = begin_of(manifest, tokenizer) or [tokenizer.eod]
        encoded = tokenizer.encode_batch([detokenise(article) for article in articles])
        alone = [
            Sliding(np.array([*first, *tokens], np.int32), length, length, reach_back=True)
            for tokens in encoded
        ]
        windows = [window for each in (stream, *alone) for window in each]
    return WikiText103(text, detokenised, articles, stream, windows)


def choose_window(settings: Settings, manifest: dict[str, Any]) -> tuple[int, int]:
    """(length, stride) of the window."""
    positions = positions_of(manifest)
    trained = manifest["config"]["data"]["seq_length"]
    length = settings.window or positions
    at_most(settings, "window", positions, "the model's positions")
    if length > trained:
        warnings.warn(
            f"the model was trained on {trained} tokens at a time and is asked to read {length}; "
            f"--window {trained} keeps to what it knows",
            stacklevel=2,
        )
    stride = settings.overlapping_eval or length
    # A longer stride would leave tokens out.
    at_most(settings, "overlapping_eval", length, "the window of")
    return length, stride


def read_articles(file: Path, flag: str = "--valid-data") -> str:
    """The file's text. Raises ValueError or OSError for a file without article titles."""
    text = read_text(flag, file, CURE)
    if not any(map(TITLE.fullmatch, text.split("\n"))):
        raise ValueError(
            f"{flag} {file} has no line that is a title, such as ' = Title = '; {CURE}"
        )
    return text


def cut_articles(text: str) -> list[str]:
    """The articles, each starting with its title, as in lm-evaluation-harness's data set."""
    articles: list[list[str]] = [[]]
    for line in text.split("\n"):
        if TITLE.fullmatch(line):
            articles.append([])
        articles[-1].append(line)
    return [page for lines in articles if (page := "\n".join(lines)).strip()]


def _inside(opening: str, closing: str) -> tuple[str, str]:
    """A rule that removes blanks just inside a pair of brackets or quotes."""
    start, end = re.escape(opening), re.escape(closing)
    return rf"{start}\s*([^{end}]*?)\s*{end}", rf"{opening}\1{closing}"


# Applied in this order, each to the result of the previous ones. The second is a mistake of the
# authors, meant for apostrophes before years; it is kept, to compare the numbers with theirs.
RULES = (
    ("s '", "s'"),
    ("/' [0-9]/", "/'[0-9]/"),
    *((f" @{re.escape(mark)}@ ", mark) for mark in "-,."),
    *((f" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    *(_inside(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenise(text: str) -> str:
    """Tokenised WikiText to plain text, by the rules of the paper's authors."""
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return text
