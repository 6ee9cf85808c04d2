"""LAMBADA (section 5.3): predicts the last word of a passage from the rest of the passage.

The paper's accuracy is the strict one: every token of the word has to be the most probable one,
given the passage and the word's previous tokens (teacher forcing).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizer import Tokenizer
from megatron.models.registry import positions_of
from megatron.train.trained import begin_of
from tasks.protocol import Prompts, Scores, Task, TaskSettings, Window, encode_targets
from tasks.readers.inputs import Place, read_text
from tasks.wikitext103 import TITLE

CURE = (
    'LAMBADA\'s test set would work: one {"text": "..."} a line, or the release in plain text, '
    "one passage a line"
)
LONGEST_WORD = 16  # tokens after which free decoding gives up
CONVENTIONS = {
    "target": "the last word of the passage, after its last blank (U+0020), with that blank and "
    "the white space before it; its tokens are those of the whole passage after those of the "
    "context, which starts with the model's begin mark if it has one",
    "strict_accuracy": "the paper's: every token of the target is the most probable one, given the "
    "context and the target's tokens before it; of equally probable ones the lowest id counts",
    "last_token_accuracy": "the same of the target's last token alone",
    "greedy_accuracy": "the most probable token is appended until the text after its first blank "
    f"holds white space, at most {LONGEST_WORD} times; the word is right where it is the target, "
    "or the target and then neither letters nor digits",
    "last_word_perplexity": "exp of the mean over passages of -ln p(target)",
    "target_token_perplexity": "exp of the mean over the targets' tokens of -ln p(token)",
    "num_examples": "passages, which all figures are of",
    "num_tokens": "of the passages whole, begin mark, context and target",
    "num_target_tokens": "of the targets alone",
    "num_words": "runs of characters of the passages that are not blank",
    "num_bytes": "UTF-8 bytes of the passages, without what parts them in the file",
    "num_bytes_of_targets": "UTF-8 bytes of the targets, their blanks included",
    "truncated_contexts": "passages of more tokens than the model reads; of their contexts all "
    "figures but greedy_accuracy lack the start; they count all the same",
    "truncated_prompts": "contexts too long to leave room for the tokens of greedy_accuracy, which "
    "lacks their start; they count all the same",
    "targets_with_line_ends": "passages whose last blank stands before a line end, as in 'of', two "
    "line ends, 'Power': strict_accuracy and both perplexities ask for the line ends too, and "
    "greedy_accuracy, which stops at the first one, counts any text after it as wrong",
}


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    valid_data: Path
    """The passages: one {"text": ...} per line, or the original release in plain text."""


@dataclass(frozen=True)
class LambadaPassage:
    """tokens: begin mark, if any, and the whole passage; context: how many of these tokens are
    before the target."""

    text: str
    target: str
    tokens: NDArray[np.int32]
    context: int


class Lambada(Task):
    """One window per passage, and the passage's context as a prompt."""

    prompts: Prompts

    def __init__(
        self, passages: Sequence[LambadaPassage], form: str, positions: int, tokenizer: Tokenizer
    ) -> None:
        """positions: the model's number of positions; a longer passage loses its start."""
        self.passages, self.form, self.positions = passages, form, positions
        self.tokenizer = tokenizer
        longest = min(LONGEST_WORD, positions - 1)
        contexts = [each.tokens[: each.context][longest - positions :] for each in passages]
        self.prompts = Prompts(contexts, self.ends_word, longest, tokenizer.ends)

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, number: int) -> Window:
        passage = self.passages[number]
        tokens = passage.tokens[-self.positions - 1 :]
        target = len(passage.tokens) - passage.context
        return Window(tokens[:-1], tokens[1:], len(tokens) - 1 - target)

    def ends_word(self, new: Sequence[int]) -> bool:
        """Whether these tokens go on after a first word, or do not start with a blank."""
        text = self.tokenizer.decode_after(new)
        return not text.startswith(" ") or any(map(str.isspace, text[1:]))

    def score(self, scores: Scores, continuations: Sequence[Sequence[int]]) -> dict[str, Any]:
        passages, count = self.passages, len(self)
        right = sum(
            spells(self.tokenizer.decode_after(new), passage.target)
            for passage, new in zip(passages, continuations, strict=True)
        )
        return {
            "num_examples": count,
            "num_tokens": sum(len(each.tokens) for each in passages),
            "num_target_tokens": int(scores.tokens.sum()),
            "num_words": sum(len(each.text.split()) for each in passages),
            "num_bytes": sum(len(each.text.encode()) for each in passages),
            "num_bytes_of_targets": sum(len(each.target.encode()) for each in passages),
            "truncated_contexts": sum(len(each.tokens) > self.positions + 1 for each in passages),
            "truncated_prompts": sum(
                each.context > len(prompt)
                for each, prompt in zip(passages, self.prompts.tokens, strict=True)
            ),
            "targets_with_line_ends": sum("\n" in each.target for each in passages),
            "target_token_perplexity": scores.perplexity(int(scores.tokens.sum())),
            "last_word_perplexity": scores.perplexity(count),
            "greedy_accuracy": right / count,
            "last_token_accuracy": float(scores.last_hit.mean()),
            "strict_accuracy": float(scores.all_hit.mean()),
            "protocol": {
                "file": self.form,
                "detokenisation": "none: the passages are read as they are in the file",
                "window": f"one passage; of a longer one the last {self.positions} tokens, of a "
                f"prompt to go on from the last {self.positions - self.prompts.most}",
            },
            "conventions": CONVENTIONS,
        }


def spells(text: str, target: str) -> bool:
    """Whether the text starts with the target (a blank and a word), and has no letter or digit
    between it and the next white space."""
    rest = text.removeprefix(target)
    if rest == text:
        return False
    word_end = rest.split()[0] if rest[:1].strip() else ""
    return not any(map(str.isalnum, word_end))


def prepare(settings: Settings, manifest: dict[str, Any], tokenizer: Tokenizer) -> Lambada:
    """Raises ValueError or OSError, naming the flag, for input that cannot be evaluated."""
    form, lines = read_passages(settings.valid_data)
    positions = positions_of(manifest)
    contexts = [_context_of(*line) for line in lines]
    places, texts = zip(*lines, strict=True)
    targets = [text[len(context) :] for text, context in zip(texts, contexts, strict=True)]
    begin, passages = begin_of(manifest, tokenizer), []
    encoded = encode_targets(tokenizer, places, contexts, targets)
    for place, text, target, (start, ids) in zip(places, texts, targets, encoded, strict=True):
        if len(ids) > positions:
            raise ValueError(f"{place}: more tokens in its last word than the model has positions")
        tokens = np.array([*begin, *start, *ids], np.int32)
        passages.append(LambadaPassage(text, target, tokens, len(begin + start)))
    return Lambada(passages, form, positions, tokenizer)


def read_passages(file: Path, flag: str = "--valid-data") -> tuple[str, list[tuple[Place, str]]]:
    """(format of the file, [(location, text) of each passage]). Raises ValueError, naming the line,
    for other formats."""
    text = read_text(flag, file, CURE)
    numbered = enumerate(text.removesuffix("\n").split("\n"), 1)
    whole = Place(f"{flag} {file}", CURE)
    lines = [(whole.at(f"line {number}"), line) for number, line in numbered]
    if text.lstrip().startswith(("{", "[{")):
        texts = []
        for place, line in lines:
            try:
                record = json.loads(line)
            except ValueError as error:
                raise place.error(f", is not JSON ({error})") from error
            texts.append((place, place.take(record, "text", str)))
        return '{"text": ...} a line', texts
    for place, line in lines:
        if TITLE.fullmatch(line):
            raise place.error(", is the title of a WikiText article")
    return "plain text, one passage a line", lines


def _context_of(place: Place, text: str) -> str:
    """Text before the last blank, without blanks at its end."""
    before, _, word = text.rpartition(" ")
    if not before.strip() or not word.strip():
        raise place.error(", does not end in a blank and a word after a context")
    return before.rstrip()
