"""Finds the tokenizer in a folder in HuggingFace's format, or in files given by flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.data.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    file_flags,
    file_names,
    read_tokenizer,
)
from megatron.errors import UsageError
from tools.convert.folder import read_object
from tools.convert.tokenizing import (
    ADDED,
    CONFIG,
    JSON,
    Tokenizing,
    check_added,
    check_config,
    read_json,
)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The flags that name a tokenizer."""

    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_type: str | None = None
    no_tokenizer: bool = False

    @property
    def has_files(self) -> bool:
        return self.vocab_file is not None or self.merge_file is not None


@dataclass(frozen=True, kw_only=True)
class NoTokenizer:
    """Stands in for a missing tokenizer: has its kind, but no ids for any text.

    Its empty fingerprint matches that of every tokenizer with at most the model's number of ids.
    """

    kind: str
    fingerprint: str = ""

    @property
    def files(self) -> Mapping[str, bytes]:
        return {}


def find_tokenizer(
    folder: Path, tokenizing: Tokenizing, given: Given, vocab_size: int
) -> Tokenizer | NoTokenizer:
    """The tokenizer of the folder or of the given files; if there are both, they must be the same.
    With --no-tokenizer the folder's is ignored.

    vocab_size: rows of the model's word embedding. Raises ValueError or OSError, naming the file,
    if the tokenizer is missing, of another kind, or has more ids.
    """
    kind = given.tokenizer_type or tokenizing.kind_of({})
    _check_kind(kind, tokenizing)
    if given.no_tokenizer:
        if given.has_files:
            raise UsageError(
                "--no-tokenizer",
                None,
                "left out beside --vocab-file and --merge-file",
                works=("--no-no-tokenizer",),
            )
        return NoTokenizer(kind=kind)
    found = dict(_tokenizers(folder, tokenizing, given))
    if not found:
        files = dict.fromkeys([" and ".join(file_names(kind)), JSON])
        raise FileNotFoundError(
            f"{folder} has no tokenizer, which is {' or '.join(files)}; {file_flags(kind)} would "
            "work, or --no-tokenizer for the weights alone"
        )
    (name, tokenizer), *others = found.items()
    for other, another in others:
        if another.fingerprint != tokenizer.fingerprint:
            raise ValueError(f"{name} and {other} are not the same tokenizer; one of them is wrong")
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{folder / 'config.json'}: vocab_size is {vocab_size}, but the tokenizer ({name}) has "
            f"{tokenizer.vocab_size} ids; a tokenizer of at most {vocab_size} would work"
        )
    return tokenizer


def has_tokenizer(folder: Path, tokenizing: Tokenizing) -> bool:
    """Whether transformers finds a tokenizer in the folder."""
    return any((folder / name).is_file() for name in (tokenizing.files[0], JSON))


def _tokenizers(
    folder: Path, tokenizing: Tokenizing, given: Given
) -> Iterator[tuple[str, Tokenizer]]:
    """(source for messages, tokenizer) for each source that has one."""
    kind = given.tokenizer_type or tokenizing.kind_of({})
    if kind == HuggingFaceTokenizer.kind:
        if given.has_files:
            flags = f"--vocab-file {given.vocab_file}"
            yield flags, build_tokenizer(kind, given.vocab_file, given.merge_file)
        if (folder / JSON).is_file():
            yield str(folder / JSON), build_tokenizer(kind, str(folder), None)
        return
    kind = _check_beside(folder, tokenizing, given.tokenizer_type)
    files = tokenizing.files
    if given.has_files:
        flags = [f"--vocab-file {given.vocab_file}", f"--merge-file {given.merge_file}"]
        yield (
            " with ".join(flags[: len(files)]),
            build_tokenizer(kind, given.vocab_file, given.merge_file),
        )
    if all((folder / name).is_file() for name in files):
        yield " with ".join([str(folder / files[0]), *files[1:]]), _read(folder, tokenizing, kind)
    if (file := folder / JSON).is_file():
        yield str(file), read_json(file, read_object(file), tokenizing)


def _read(folder: Path, tokenizing: Tokenizing, kind: str) -> Tokenizer:
    try:
        return read_tokenizer(kind, folder)
    except ValueError as error:
        raise ValueError(tokenizing.cured(str(error), CONFIG)) from error


def _check_beside(folder: Path, tokenizing: Tokenizing, tokenizer_type: str | None) -> str:
    """The kind according to the flag or the files beside the tokenizer. Checks that these files add
    no token to the tokenizer or to a text."""
    content = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    check_config(folder / CONFIG, content, tokenizing)
    if (folder / ADDED).is_file():
        check_added(folder / ADDED, read_object(folder / ADDED), tokenizing)
    kind = tokenizing.kind_of(content)
    if tokenizer_type in (None, kind):
        return kind
    if content and kind in tokenizing.kinds:
        raise UsageError(
            "--tokenizer-type",
            tokenizer_type,
            f"that of {folder / CONFIG}",
            works=("--tokenizer-type", kind),
        )
    return tokenizer_type


def _check_kind(kind: str, tokenizing: Tokenizing) -> None:
    if kind not in tokenizing.known:
        raise UsageError(
            "--tokenizer-type",
            kind,
            f"{tokenizing.whose}: {' or '.join(tokenizing.known)}",
            works=("--tokenizer-type", tokenizing.kind_of({})),
        )
