"""Repairs text with ftfy; keeps documents that are in English and long enough (section 4.1).

    python tools/corpus.py clean --input raw --output clean
    python tools/corpus.py clean --input raw --output clean --min-tokens 64 --workers 8

The language is identified before the repair (CLD2, on up to 4000 characters), so that documents
dropped for their language need no repair.  A text in which CLD2 finds no language, such as a table,
code or a list of names, is dropped too, and counted separately.  Length is counted after the
repair: in tokens with --vocab-file and --merge-file, otherwise in pieces of GPT-2's pre-tokenizer,
each of which is one or more tokens.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers.pre_tokenizers import ByteLevel

from megatron.errors import UsageError
from tools.corpus.engine import StepRun, map_units
from tools.corpus.files import (
    DocumentCounts,
    ShardWriter,
    Unit,
    dump_record,
    read_documents,
    source_of,
)
from tools.corpus.language import UNKNOWN, identify, names
from tools.corpus.repair import mend_newlines, repair
from tools.corpus.settings import LengthSettings, program, warn_of_unknown
from tools.corpus.tokenize.encoders import load_encoder

ANY = "any"
CHARACTERS_A_WORD = 16  # in the part of a text that is examined first; English has 6
WHOLE_WORDS = re.compile(r".*[!-~](?= )", re.DOTALL)
PRE_TOKENIZER = ByteLevel(add_prefix_space=False, use_regex=True)


@dataclass(frozen=True, kw_only=True)
class Settings(LengthSettings):
    language: str = "en"
    """Code of the language to keep; any keeps all documents and identifies no language."""

    newlines: tuple[str, ...] = ("cc-stories",)
    """Sources whose superfluous newlines are removed: lines that are wrapped to a width of 40 to
    120 characters are joined, and more than two newlines in a row become two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.language != ANY and self.language not in names().keys() - {UNKNOWN}:
            raise UsageError(
                "--language",
                self.language,
                "a code that CLD2 knows such as de, or any",
                works=("--language", "en"),
            )


def check(settings: Settings) -> None:
    token_counter(settings)  # raises an error if the files are no vocabulary


def run(settings: Settings) -> None:
    check(settings)
    with StepRun("clean", settings) as step:
        if step.done:
            return
        accounting, shards, counters = map_units(step, clean_unit)
        step.finish(
            accounting,
            shards,
            unit_of_length=settings.unit_of_length,
            repaired=counters["repaired"],
            newlines_removed=counters["newlines removed"],
            languages=_histogram(counters, "language"),
            lengths={
                when: _histogram(counters, f"characters {when}") for when in ("before", "after")
            },
        )
        if settings.newlines != Settings.newlines:
            warn_of_unknown("--newlines", settings.newlines, accounting.input)


def clean_unit(
    unit: Unit, settings: Settings, accounting: DocumentCounts, shard: ShardWriter
) -> dict[str, int]:
    """Clean one shard.  Returns counts: documents changed, documents by language and by length."""
    counters = Counter[str]()
    count_tokens = token_counter(settings)
    for document in read_documents(unit, accounting):
        record, before = document.record, document.text
        counters[f"characters before:{octave(before)}"] += 1
        if settings.language != ANY:
            language = identify(before)
            counters[f"language:{language}"] += 1
            if language != settings.language:
                is_unknown = language == UNKNOWN
                accounting.drop(record, "language unknown" if is_unknown else "another language")
                continue
        text = repair(before)
        counters["repaired"] += text != before
        if source_of(record) in settings.newlines:
            mended = mend_newlines(text)
            counters["newlines removed"] += mended != text
            text = mended
        if not text or text.isspace():
            accounting.drop(record, "empty once repaired")
            continue
        if not has_tokens(text, settings.min_tokens, count_tokens):
            accounting.drop(record, f"under {settings.min_tokens} {settings.unit_of_length}")
            continue
        counters[f"characters after:{octave(text)}"] += 1
        record["text"] = text
        accounting.keep(record)
        shard.write(document.line if text == before else dump_record(record))
    return counters


def has_tokens(text: str, least: int, count_tokens: Callable[[str], int]) -> bool:
    """Whether the text has at least `least` tokens; most texts need not be encoded to know.

    GPT-2's pre-tokenizer splits a text wherever a blank follows a non-blank.  So no token spans two
    words, and there are at least as many tokens as words.  The text before such a split has the
    same tokens by itself as within the whole text.
    """
    head = text[: CHARACTERS_A_WORD * least]
    if len(head.encode().split(None, least)) >= least:  # bytes: at ASCII's blanks only
        return True
    whole_words = WHOLE_WORDS.match(head)
    if len(head) < len(text) and whole_words and count_tokens(whole_words[0]) >= least:
        return True
    return count_tokens(text) >= least


def token_counter(settings: LengthSettings) -> Callable[[str], int]:
    """Function that counts a text's tokens or pieces.  Raises ValueError or OSError, naming the
    flag, if there is no such tokenizer."""
    if settings.unit_of_length == "pieces":
        return count_pieces
    encoder = load_encoder("GPT2BPETokenizer", settings.vocab_file, settings.merge_file)
    return lambda text: int(encoder.arrays([text])[1][0])


def count_pieces(text: str) -> int:
    """Number of pieces into which GPT-2's pre-tokenizer splits the text."""
    return len(PRE_TOKENIZER.pre_tokenize_str(text))


def octave(text: str) -> int:
    """The largest power of two that is not above the text's length in characters."""
    return 1 << len(text).bit_length() - 1


def _histogram(counters: Counter[str], name: str) -> dict[str, int]:
    """{bucket: documents} of the counters named "name:bucket"; numbers in ascending order."""
    keys = [key for key in counters if key.startswith(f"{name}:")]
    keys.sort(key=lambda key: (len(key), key))
    return {key.partition(":")[2]: counters[key] for key in keys}


if __name__ == "__main__":
    program("tools.corpus.clean")
