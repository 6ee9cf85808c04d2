"""The tokenizer of a folder in HuggingFace's form, and the files of one for a folder.

A byte-level BPE stands in vocab.json and merges.txt, or in tokenizer.json alone, as transformers
writes it since its version 5; either way it is checked to be GPT-2's kind and no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.data.tokenizer import END_OF_DOCUMENT, Tokenizer, build_tokenizer, read_tokenizer
from tools.convert.folder import read_object

KIND = "GPT2BPETokenizer"
FILES = ("vocab.json", "merges.txt")
FLAGS = ("--vocab-file", "--merge-file")

# What tokenizer.json has to say, so that it encodes as GPT-2 does: a part of it, an option of the
# part, and the values that are GPT-2's; an option that is not there is as in GPT-2.
ENCODING: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("pre_tokenizer", "type", ("ByteLevel",)),
    ("pre_tokenizer", "add_prefix_space", (False,)),
    ("pre_tokenizer", "use_regex", (True,)),
    ("model", "type", ("BPE",)),
    ("model", "dropout", (None, 0.0)),
    ("model", "continuing_subword_prefix", (None, "")),
    ("model", "end_of_word_suffix", (None, "")),
    ("model", "byte_fallback", (False,)),
    ("model", "ignore_merges", (False,)),
    ("decoder", "type", ("ByteLevel",)),
    ("post_processor", "type", (None, "ByteLevel", "TemplateProcessing")),
    ("post_processor", "special_tokens", ({},)),
)
# The same of tokenizer_config.json.
ADDING = ("add_prefix_space", "add_bos_token", "add_eos_token")


def find_tokenizer(
    folder: Path, vocab_file: str | None, merge_file: str | None, vocab_size: int
) -> Tokenizer:
    """The folder's tokenizer, or that of the two files; where there are both they have to agree.

    vocab_size: of the model. Raises ValueError or OSError, naming the file, for a tokenizer that
    is missing, not GPT-2's kind, or of another size.
    """
    found = dict(_tokenizers(folder, vocab_file, merge_file))
    if not found:
        raise FileNotFoundError(
            f"{folder} has no tokenizer, neither {' and '.join(FILES)} nor tokenizer.json; "
            "--vocab-file and --merge-file would work"
        )
    (name, tokenizer), *others = found.items()
    for other, another in others:
        if another.fingerprint != tokenizer.fingerprint:
            raise ValueError(f"{name} and {other} are not the same tokenizer; one of them is wrong")
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"{folder / 'config.json'}: vocab_size is {vocab_size}, but the tokenizer ({name}) has "
            f"{tokenizer.vocab_size} ids; the model's own tokenizer would work"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether transformers finds one in the folder."""
    return any((folder / name).is_file() for name in (FILES[0], "tokenizer.json"))


def _tokenizers(
    folder: Path, vocab_file: str | None, merge_file: str | None
) -> Iterator[tuple[str, Tokenizer]]:
    """(what it was read from, tokenizer) for each of the places where one is."""
    _check_added(folder)
    if vocab_file is not None or merge_file is not None:
        name = f"--vocab-file {vocab_file} with --merge-file {merge_file}"
        yield name, build_tokenizer(KIND, vocab_file, merge_file)
    if all((folder / name).is_file() for name in FILES):
        yield f"{folder / FILES[0]} with {FILES[1]}", read_tokenizer(KIND, folder)
    if (folder / "tokenizer.json").is_file():
        yield str(folder / "tokenizer.json"), _read_json(folder / "tokenizer.json")


def _check_added(folder: Path) -> None:
    """What stands beside the tokenizer adds no token to its vocabulary or to a text."""
    config = folder / "tokenizer_config.json"
    if config.is_file():
        content = read_object(config)
        for option in ADDING:
            if content.get(option):
                raise ValueError(f"{config}: {option} is true; GPT-2's tokenizer adds nothing")
        added = content.get("added_tokens_decoder", {}).values()
        _check_only_end_mark(config, (token["content"] for token in added))
    if (folder / "added_tokens.json").is_file():
        _check_only_end_mark(
            folder / "added_tokens.json", read_object(folder / "added_tokens.json")
        )


def _check_only_end_mark(file: Path, tokens: Iterable[str]) -> None:
    if others := sorted(set(tokens) - {END_OF_DOCUMENT}):
        raise ValueError(
            f"{file} adds the token {others[0]!r}; GPT-2's tokenizer has {END_OF_DOCUMENT} alone"
        )


def _read_json(file: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json."""
    content = read_object(file)
    if content.get("normalizer") is not None:
        raise ValueError(f"{file}: it has a normalizer, and GPT-2's tokenizer has none")
    for part, option, allowed in ENCODING:
        value = (content.get(part) or {}).get(option, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{file}: {part}.{option} is {json.dumps(value)}; in a GPT-2 tokenizer it is "
                f"{' or '.join(map(json.dumps, allowed))}"
            )
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    _check_only_end_mark(file, added)
    model = content.get("model") or {}
    if missing := {"vocab", "merges"} - model.keys():
        raise ValueError(f"{file}: its model has no {min(missing)}")
    vocabulary = {**model["vocab"], **added}
    with TemporaryDirectory() as place:
        write_files(Path(place), vocabulary, map(_merge, model["merges"]))
        try:
            return read_tokenizer(KIND, Path(place))
        except ValueError as error:
            said = str(error.__cause__ or error)
            for flag, name, what in zip(FLAGS, FILES, ("vocab", "merges"), strict=True):
                said = said.replace(f"{flag} {Path(place) / name}", f"model.{what}")
            raise ValueError(f"{file}: {said}") from error


def _merge(merge: str | list[str]) -> str:
    """A merge as merges.txt has it: "a b", or in newer files ["a", "b"]."""
    return merge if isinstance(merge, str) else " ".join(merge)


def write_files(folder: Path, vocabulary: Mapping[str, int], merges: Iterable[str]) -> None:
    """Write vocab.json and merges.txt, with the first line that some readers skip unread."""
    (folder / FILES[0]).write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *merges, ""]
    (folder / FILES[1]).write_text("\n".join(lines), encoding="utf-8", newline="\n")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, positions: int) -> None:
    """Write what AutoTokenizer loads, and what its older versions do.

    positions: the longest text in tokens, of which transformers warns.
    """
    import transformers

    vocabulary = json.loads(tokenizer.files[FILES[0]])
    lines = tokenizer.files[FILES[1]].decode().splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    pairs = [tuple(line.split(" ")) for line in merges]
    theirs = transformers.GPT2Tokenizer(vocab=vocabulary, merges=pairs, model_max_length=positions)
    theirs.save_pretrained(folder)
    write_files(folder, vocabulary, merges)
