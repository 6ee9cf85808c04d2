"""GPT-2's tokenizer, and all kinds by the names that --tokenizer-type knows."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from megatron.data.base_tokenizer import Tokenizer as Tokenizer  # for all who take one
from megatron.data.base_tokenizer import read_given
from megatron.data.wordpiece import BertTokenizer, BertWordPieceCase, BertWordPieceLowerCase

END_OF_DOCUMENT = "<|endoftext|>"


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level byte-pair encoding.

    Text that spells the end mark is encoded as the ordinary characters it is made of.
    """

    kind = "GPT2BPETokenizer"
    names: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}

    def __init__(self, vocab_file: str | None, merge_file: str | None) -> None:
        """Raises ValueError or OSError, naming the flag, for a file that is not as it should be."""
        import tokenizers

        vocab_content = read_given("--vocab-file", vocab_file)
        vocabulary = _parse_vocabulary(vocab_content, f"--vocab-file {vocab_file}")
        missing = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        if missing or END_OF_DOCUMENT not in vocabulary:
            raise ValueError(
                f"--vocab-file {vocab_file} lacks {END_OF_DOCUMENT} or some of the 256 bytes; "
                "GPT-2's own vocab.json, or one of tools/train_tokenizer.py, would work"
            )
        merge_content = read_given("--merge-file", merge_file)
        merges = _parse_merges(merge_content, f"--merge-file {merge_file}", vocabulary)
        self.files = dict(zip(self.names.values(), (vocab_content, merge_content), strict=True))
        self.vocab_size = len(vocabulary)
        self.eod = vocabulary[END_OF_DOCUMENT]
        # Of the content: how the files are formatted does not count.
        content = json.dumps([sorted(vocabulary, key=vocabulary.__getitem__), merges])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        self.library = bpe


def _parse_vocabulary(content: bytes, given: str) -> dict[str, int]:
    """{token: id}, the ids being 0, 1, 2, ... in some order; given: flag and file."""
    try:
        vocabulary: Any = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{given} is not JSON: {error}") from error
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [None]
    if any(type(each) is not int for each in ids) or set(ids) != set(range(len(ids))):
        raise ValueError(f"{given} is no JSON object of tokens with the ids 0, 1, 2, ...")
    return vocabulary


def _parse_merges(
    content: bytes, given: str, vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    try:
        # Any line end, as when a file is read as text.
        lines = content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{given} is not UTF-8 text: {error}") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ValueError(
                f"{given}, line {number}: {line!r} merges no tokens of --vocab-file; files that "
                "belong together would work"
            )
        merges.append((left, right))
    return merges


TOKENIZERS: dict[str, type[GPT2BPETokenizer] | type[BertTokenizer]] = {
    maker.kind: maker for maker in (GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase)
}


def build_tokenizer(kind: str, vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """The tokenizer of this kind; ValueError or OSError, naming the flag, where it cannot be."""
    maker = _maker(kind)
    given = {"vocab_file": vocab_file, "merge_file": merge_file}
    for parameter, file in given.items():
        if file is not None and parameter not in maker.names:
            raise ValueError(
                f"{_flag(parameter)} {file} is not for --tokenizer-type {kind}; {file_flags(kind)} "
                "alone would work"
            )
    return maker(**{parameter: given[parameter] for parameter in maker.names})


def file_names(kind: str) -> tuple[str, ...]:
    """What the files of a tokenizer of this kind are called in a folder, ValueError for none."""
    return tuple(_maker(kind).names.values())


def file_flags(kind: str) -> str:
    """The flags that name these files, for messages: "--vocab-file and --merge-file"."""
    return " and ".join(map(_flag, _maker(kind).names))


def read_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """The tokenizer of this kind whose files are in the folder, as Tokenizer.files names them.

    Raises ValueError, naming the folder and the file, where one is missing or damaged.
    """
    maker = _maker(kind)
    files: dict[str, str | None] = {
        parameter: str(folder / name) for parameter, name in maker.names.items()
    }
    try:
        return maker(**files)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {error}; {file_flags(kind)} would work"
        ) from error


def _maker(kind: str) -> type[GPT2BPETokenizer] | type[BertTokenizer]:
    if kind not in TOKENIZERS:
        raise ValueError(f"--tokenizer-type {kind} is unknown; known: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[kind]


def _flag(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"
