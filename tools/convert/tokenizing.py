"""What a conversion knows of one kind of tokenizer, and of a folder in HuggingFace's form with one.

Its files are this project's own, or tokenizer.json alone, as transformers writes it since its
version 5; either way it is checked to be of this kind and no other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.data.tokenizer import file_names, read_tokenizer
from megatron.data.tokenizer_base import Tokenizer
from megatron.data.tokenizer_json import HuggingFaceTokenizer

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"

# What tokenizer.json has to say: a part of it, an option of the part, and the values allowed; an
# option that is not there is the first of them.
Parts = tuple[tuple[str, str, tuple[Any, ...]], ...]
# The same of tokenizer_config.json.
Options = tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """A tokenizer and its files; whose: for messages, such as "GPT-2's"."""

    whose: str

    kinds: tuple[str, ...]
    """What --tokenizer-type calls it; all have the same files."""

    takes_any_json: bool = False
    """Whether such a model may have another tokenizer, of any tokenizer.json, if the flag
    --tokenizer-type HuggingFaceTokenizer says so."""

    marks: tuple[str, ...]
    """Tokens that are no text. transformers finds them in texts, and this project does not."""

    parts: Parts
    options: Options

    kind_of: Callable[[Mapping[str, Any]], str]
    """The kind that a tokenizer_config.json means, from what it says; {} where there is none."""

    kind_of_json: Callable[[Mapping[str, Any]], str]
    """The kind that a tokenizer.json is of, whose parts have been checked."""

    write_files: Callable[[Path, Mapping[str, Any]], None]
    """Write the tokenizer's files, from the `model` of a tokenizer.json with all its tokens."""

    write: Callable[[Path, Tokenizer, int], None]
    """Write what AutoTokenizer loads, and what its older versions do. The last argument is the
    longest text in tokens, of which transformers warns."""

    around: Callable[[Any], tuple[list[int], list[int]]]
    """Ids that transformers puts before and after a text, and this project's encode does not."""

    cured: Callable[[str, str], str] = lambda said, file: said
    """A message of this project with the words of a file of the folder, by its name, for flags."""

    @property
    def known(self) -> tuple[str, ...]:
        """Every kind that --tokenizer-type may name."""
        return (*self.kinds, *([HuggingFaceTokenizer.kind] if self.takes_any_json else []))

    @property
    def cure(self) -> str:
        """The end of a message that refuses a tokenizer.json."""
        flag = f"--tokenizer-type {HuggingFaceTokenizer.kind}"
        return f"; {flag} takes any other" if self.takes_any_json else ""

    @property
    def files(self) -> tuple[str, ...]:
        return file_names(self.kinds[0])


def any_of(values: Iterable[Any]) -> str:
    """For messages: values of JSON, one of which would work."""
    return " or ".join(map(json.dumps, values))


def check_config(file: Path, content: Mapping[str, Any], tokenizing: Tokenizing) -> None:
    """What a tokenizer_config.json says adds nothing to the vocabulary, and is of this kind."""
    for option, allowed in tokenizing.options:
        value = content.get(option, allowed[0])
        if isinstance(value, dict):  # a mark with its blanks, as older versions wrote it
            value = value.get("content")
        if value not in allowed:
            raise ValueError(
                f"{file}: {option} is {json.dumps(value)}; in {tokenizing.whose} tokenizer it is "
                f"{any_of(allowed)}"
            )
    added = content.get("added_tokens_decoder", {}).values()
    check_added(file, (token["content"] for token in added), tokenizing)


def check_added(file: Path, tokens: Iterable[str], tokenizing: Tokenizing) -> None:
    """Beside its vocabulary a tokenizer has no token but its marks."""
    if others := sorted(set(tokens) - set(tokenizing.marks)):
        raise ValueError(
            f"{file} adds the token {others[0]!r}; {tokenizing.whose} tokenizer has "
            f"{' '.join(tokenizing.marks)} alone{tokenizing.cure}"
        )


def read_json(file: Path, content: Mapping[str, Any], tokenizing: Tokenizing) -> Tokenizer:
    """The tokenizer in a tokenizer.json; ValueError, naming it, for one of another kind."""
    for part, option, allowed in tokenizing.parts:
        value = (content.get(part) or {}).get(option, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{file}: {part}.{option} is {json.dumps(value)}; in {tokenizing.whose} tokenizer "
                f"it is {any_of(allowed)}{tokenizing.cure}"
            )
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    check_added(file, added, tokenizing)
    model = content.get("model") or {}
    if "vocab" not in model:
        raise ValueError(f"{file}: its model has no vocab")
    model = {**model, "vocab": {**model["vocab"], **added}}
    with TemporaryDirectory() as place:
        try:
            tokenizing.write_files(Path(place), model)
            return read_tokenizer(tokenizing.kind_of_json(content), Path(place))
        except ValueError as error:
            said = str(error.__cause__ or error)
            for name in tokenizing.files:
                what = name.partition(".")[0]
                for flag in ("--vocab-file", "--merge-file"):
                    said = said.replace(f"{flag} {Path(place) / name}", f"model.{what}")
            raise ValueError(f"{file}: {tokenizing.cured(said, JSON)}") from error
