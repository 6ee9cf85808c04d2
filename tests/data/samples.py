"""Small data sets and tokenizer files for tests."""

import json
import string
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace

from megatron.data.files import tokenizer_folder
from megatron.data.indexed import Description, token_dtype
from megatron.data.tokenizer import MARKS, GPT2BPETokenizer
from tools.corpus.tokenize.writer import IndexedDatasetWriter, join_descriptions, move_data_set

MERGES = ["t h", "th e", "i n", "Ġ the"]


def write_tokenizer(folder: Path) -> tuple[str, str]:
    """(vocab file, merge file) of a byte-level tokenizer with a few merges; 261 ids."""
    tokens = sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    vocabulary = {token: number for number, token in enumerate([*tokens, "<|endoftext|>"])}
    files = folder / "vocab.json", folder / "merges.txt"
    files[0].write_text(json.dumps(vocabulary))
    files[1].write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")
    return str(files[0]), str(files[1])


def write_tokenizer_json(folder: Path, *, config: Mapping[str, Any] | None = None) -> str:
    """A folder with the tokenizer.json of a byte-level tokenizer: 3 special tokens, then 260 ids.

    config: of a tokenizer_config.json beside it, if there is to be one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = ["[BOT]", "[EOT]", "[PAD]"]
    tokens = sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    vocabulary = {token: number for number, token in enumerate([*special, *tokens])}
    library = Tokenizer(BPE(vocabulary, [tuple(merge.split()) for merge in MERGES]))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    library.decoder = ByteLevelDecoder()
    library.add_special_tokens(special)
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def write_dropping_tokenizer(folder: Path) -> str:
    """A folder with a tokenizer.json that decodes a text without its first blank, as many do."""
    letters = ["[EOT]", "\u2581", *map(chr, range(33, 127))]
    library = Tokenizer(BPE({letter: n for n, letter in enumerate(letters)}, []))
    library.pre_tokenizer = Metaspace()
    library.decoder = MetaspaceDecoder()
    library.add_special_tokens(["[EOT]"])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return str(folder)


def write_wordpiece(folder: Path, *words: str) -> str:
    """A vocab.txt of a lower-case WordPiece: marks, [unused0], these words, pieces of others."""
    letters = [*string.ascii_lowercase, *string.digits]
    tokens = [MARKS[0], "[unused0]", *MARKS[1:], *".,!?-'\"[]()", *letters]
    tokens += [f"##{letter}" for letter in letters]
    tokens += ["the", "in", "##in", "##ing", *words]
    file = folder / "vocab.txt"
    file.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return str(file)


def write_texts(file: Path, texts: Iterable[str]) -> str:
    """JSON lines, a document each."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def short_texts(count: int, longest: int) -> list[str]:
    """Letters and blanks at random, up to `longest` before a last x."""
    random = Random(0)
    lengths = (random.randint(1, longest) for _ in range(count))
    return ["".join(random.choices("abcdefg ", k=length)) + "x" for length in lengths]


def write_sentences(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    *,
    tokenizer_type: str = "BertWordPieceLowerCase",
    vocab_size: int = 100,
    is_split: bool = True,
    **facts: Any,
) -> Description:
    """A data set of these sentences of documents, as --split-sentences leaves it."""
    dtype = token_dtype(vocab_size)
    facts = {"fingerprint": "f", "eod": None, "shuffled": True} | facts
    with IndexedDatasetWriter(str(prefix), dtype, sentences=is_split) as writer:
        for document in documents:
            sizes = np.array([len(sentence) for sentence in document], np.int32)
            tokens = np.concatenate([np.array(sentence, dtype) for sentence in document])
            of_documents = [np.array([len(document)], np.int32)] if is_split else []
            writer.add(tokens, sizes, *of_documents)
        return writer.commit(
            tokenizer_type=tokenizer_type,
            tokenizer_fingerprint=facts.pop("fingerprint"),
            vocab_size=vocab_size,
            **facts,
        )


def write_data(
    prefix: Path, documents: Sequence[Sequence[int]], *, eod: int | None = 0, **facts: Any
) -> Description:
    """A data set of these documents, whose tokenizer is called "test"."""
    whole = [[document] for document in documents]
    return write_sentences(prefix, whole, tokenizer_type="test", is_split=False, eod=eod, **facts)


def stage_shards(folder: Path, shards: Sequence[Sequence[Any]]) -> tuple[list[str], Description]:
    """(prefixes of pairs that move_data_set() can join, the Description of the whole)."""
    (folder / "staged").mkdir(exist_ok=True)
    prefixes = [folder / "staged" / str(number) for number in range(len(shards))]
    found = [write_data(prefix, shard) for prefix, shard in zip(prefixes, shards, strict=True)]
    return [str(prefix) for prefix in prefixes], join_descriptions(found)


def write_shards(
    prefix: Path, shards: Sequence[Sequence[Any]], tokenizer: Mapping[str, bytes] | None = None
) -> str:
    """A data set of these documents of each shard."""
    staged, description = stage_shards(prefix.parent, shards)
    move_data_set(staged, str(prefix), description, tokenizer or {})
    return str(prefix)


def change(prefix: Path, suffix: str, position: int, content: bytes) -> None:
    """Overwrite bytes of a file in place."""
    with Path(f"{prefix}{suffix}").open("r+b") as stream:
        stream.seek(position)
        stream.write(content)


def write_data_of_tokenizer(
    prefix: Path, documents: Sequence[Sequence[int]], *, beside: bool = True
) -> GPT2BPETokenizer:
    """A data set whose sidecar names the tokenizer of write_tokenizer, which is returned.

    beside: leave the tokenizer's files as preprocessing does.
    """
    folder = tokenizer_folder(str(prefix))
    folder.mkdir(parents=True)
    tokenizer = GPT2BPETokenizer(*write_tokenizer(folder))
    description = write_data(prefix, documents, vocab_size=261, eod=260)
    fingerprint = tokenizer.fingerprint
    replace(description, tokenizer_type=tokenizer.kind, tokenizer_fingerprint=fingerprint).write(
        str(prefix)
    )
    if not beside:
        folder.rename(folder.with_suffix(".elsewhere"))
    return tokenizer


def forget_samples(prefix: Path) -> None:
    """Leave a sidecar as an older program wrote it, without samples of the files."""
    sidecar = Path(f"{prefix}.json")
    content = json.loads(sidecar.read_text())
    for part in (content, *content["shards"]):
        del part["bin_sample_sha256"], part["idx_sample_sha256"]
    sidecar.write_text(json.dumps(content))


def write_index(
    prefix: Path,
    sizes: Sequence[int],
    documents: Sequence[int],
    pointers: Sequence[int] | None = None,
) -> None:
    """An index alone, of uint16 tokens: sizes of the sequences, first sequences of documents, and
    where the sequences are in the .bin; by default one after another."""
    if pointers is None:
        pointers = [2 * start for start in accumulate(sizes, initial=0)][:-1]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(documents))
    for letter, numbers in (("i", sizes), ("q", pointers), ("q", documents)):
        index += struct.pack(f"<{len(numbers)}{letter}", *numbers)
    Path(f"{prefix}.idx").write_bytes(index)


def write_sparse(prefix: Path, last: Sequence[int]) -> int:
    """Two documents of 2^30 zeros, which take no room on disk, and `last`; returns where it is."""
    zeros = 2**30
    write_index(prefix, [zeros, zeros, len(last)], range(4))
    with Path(f"{prefix}.bin").open("wb") as stream:
        stream.seek(4 * zeros)
        stream.write(np.array(last, "<u2").tobytes())
    return 2 * zeros


@dataclass
class PlainTokenizer:
    """Has the name, size and fingerprint of write_data()'s tokenizer; encodes nothing."""

    kind: str = "test"
    vocab_size: int = 100
    eod: int = 0
    fingerprint: str = "f"
