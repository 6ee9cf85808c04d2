"""How one kind of tokenizer is converted, and how a folder in HuggingFace's format holds it.

The files are the same as this project's own, or only tokenizer.json, as transformers writes since
its version 5. Either way the tokenizer is checked to be of this kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer, file_names, read_tokenizer

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"

# Requirements on tokenizer.json: a part of it, an option of the part, and the allowed values. The
# first is the default of an absent option.
Parts = tuple[tuple[str, str, tuple[Any, ...]], ...]
# The same for tokenizer_config.json, which has no parts.
Options = tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """A tokenizer and its files. whose: its name in messages, such as "GPT-2's"."""

    whose: str

    kinds: tuple[str, ...]
    """Its names as values of --tokenizer-type; all have the same files."""

    takes_any_json: bool = False
    """Whether --tokenizer-type HuggingFaceTokenizer allows such a model another tokenizer, from
    any tokenizer.json."""

    marks: tuple[str, ...]
    """Special tokens. transformers recognizes them inside texts, and this project does not."""

    parts: Parts
    options: Options

    kind_of: Callable[[Mapping[str, Any]], str]
    """Maps the contents of tokenizer_config.json, {} if there is none, to the kind it means."""

    kind_of_json: Callable[[Mapping[str, Any]], str]
    """Maps the contents of a tokenizer.json, whose parts have been checked, to its kind."""

    write_files: Callable[[Path, Mapping[str, Any]], None]
    """Writes the tokenizer's files from the `model` of a tokenizer.json with all its tokens."""

    write: Callable[[Path, Tokenizer, int], None]
    """Writes the files that AutoTokenizer and its older versions load. The last argument is the
    number of tokens above which transformers warns."""

    around: Callable[[Any], tuple[list[int], list[int]]]
    """Ids that transformers adds before and after a text, and this project's encode does not."""

    cured: Callable[[str, str], str] = lambda said, file: said
    """Rewrites a message: options of the named file of the folder take the place of flags."""

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
    """Raise ValueError if tokenizer_config.json is of another kind or adds to the vocabulary."""
    for option, allowed in tokenizing.options:
        value = content.get(option, allowed[0])
        if isinstance(value, dict):  # a mark with its stripping rules, as older versions wrote it
            value = value.get("content")
        if value not in allowed:
            raise ValueError(
                f"{file}: {option} is {json.dumps(value)}; in {tokenizing.whose} tokenizer it is "
                f"{any_of(allowed)}"
            )
    added = content.get("added_tokens_decoder", {}).values()
    check_added(file, (token["content"] for token in added), tokenizing)


def check_added(file: Path, tokens: Iterable[str], tokenizing: Tokenizing) -> None:
    """Raise ValueError if any of the added tokens is not a mark."""
    if others := sorted(set(tokens) - set(tokenizing.marks)):
        raise ValueError(
            f"{file} adds the token {others[0]!r}; {tokenizing.whose} tokenizer has "
            f"{' '.join(tokenizing.marks)} alone{tokenizing.cure}"
        )


def read_json(file: Path, content: Mapping[str, Any], tokenizing: Tokenizing) -> Tokenizer:
    """The tokenizer in a tokenizer.json; raises ValueError, naming the file, for another kind."""
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
