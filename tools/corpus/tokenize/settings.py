"""Settings of tokenising, and what follows from them: names of files, facts of the tokenizer."""

import glob
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.config.checks import share
from megatron.data.json_lines import WORK, find_shards
from megatron.data.text_checks import MAX_UNKNOWN
from megatron.data.tokenizer import BertTokenizer, Tokenizer, file_names
from megatron.errors import UsageError
from megatron.libraries import load
from tools.corpus.files import read_manifest
from tools.corpus.settings import StepSettings, as_parameter, parse_size
from tools.corpus.tokenize.encoders import Encoder, load_encoder, load_tokenizer

SMALLEST_UNIT, LARGEST_UNIT = 1 << 18, 1 << 25  # bytes
UNITS = 64  # least number, unless units become too small, to give work to all workers


@dataclass(frozen=True, kw_only=True)
class Settings(StepSettings):
    # Workers get what cached properties hold along with the settings, and need not compute it.

    json_key: str = "text"
    """Key of the text in a line; it is part of the output's name."""

    output_prefix: str | None = None
    """P, for P_text_document.bin and the other files.  `verify P_text_document` in place of all
    flags checks them."""

    output: Path | None = None  # type: ignore[assignment]
    """Output folder, instead of a prefix, as for the steps of tools.corpus."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """Kind of tokenizer."""

    vocab_file: Path | None = field(default=None, metadata={"alias": "tokenizer_model"})
    """The tokenizer's vocabulary: vocab.json, vocab.txt of a WordPiece, or for a
    HuggingFaceTokenizer tokenizer.json or its folder. Also spelt --tokenizer-model."""

    merge_file: Path | None = None
    """The byte-pair encoding's merges (merges.txt)."""

    append_eod: bool | None = None
    """End each document with an end-of-document mark. On by default, except with
    --split-sentences."""

    split_sentences: bool = False
    """Write each sentence as a sequence, as pretrain_bert.py needs, to a data set P_text_sentence.
    A line end ends a sentence; other rules are those of English."""

    max_unknown: float = MAX_UNKNOWN
    """Largest share of a WordPiece's tokens that may be [UNK]; more is an error, and above 0.01
    there is a warning.  A BPE has no [UNK]."""

    allow_lower_case: bool = False
    """Accept text without capitals for a vocabulary with capitals (BertWordPieceCase)."""

    encoder: str = "auto"
    """Library that encodes: tokenizers, the reference; gigatoken, a hundred times as fast, for a
    BPE; words, the reference once for each word, for a WordPiece; auto selects one of the last two
    if it is installed and gives the reference's ids on a set of tricky strings. A
    HuggingFaceTokenizer is always encoded by tokenizers."""

    shard_size: str = "1GB"
    """Largest amount of input for one .bin and .idx; a compressed file is not split."""

    memory: str = "500MB"
    """Memory of a job of Slurm; tokenising itself needs little."""

    overwrite: bool = False
    """Replace an existing data set, or the results of other settings or other input in the folder
    --output."""

    def __post_init__(self) -> None:
        share(self, "max_unknown")
        if (self.output is None) == (self.output_prefix is None):
            raise UsageError(
                "--output-prefix",
                self.output_prefix,
                "P, for files P_text_document.*, or left out with {} FOLDER",
                "--output",
                works=("--output-prefix", "P") if self.output is None else (),
            )
        if self.output is None:  # the work folder is beside the data set, which is moved out of it
            object.__setattr__(self, "output", Path(f"{self.data_path}.work"))
        if self.split_sentences and self.append_eod:
            raise UsageError(
                "--append-eod",
                None,
                "left out with {}, which keeps documents apart without a mark",
                "--split-sentences",
                works=("--no-append-eod",),
            )
        super().__post_init__()
        self.shard_bytes  # noqa: B018, the property checks what it reads

    @property
    def name(self) -> str:
        return f"{self.json_key}_{'sentence' if self.split_sentences else 'document'}"

    @property
    def folder(self) -> Path:
        """--output, or with a prefix the work folder."""
        assert self.output is not None
        return self.output

    @property
    def inside(self) -> str:
        """Prefix of the data set in the folder."""
        return str(self.folder / self.name)

    @property
    def data_path(self) -> str:
        """Prefix of the data set."""
        return self.inside if self.output_prefix is None else f"{self.output_prefix}_{self.name}"

    @property
    def files(self) -> list[str]:
        """Patterns of the data set's files in the folder."""
        name = glob.escape(self.name)
        return [name + end for end in (".bin", ".idx", ".json", ".tokenizer", "_[0-9]*")]

    def part(self, unit: str, suffix: str) -> Path:
        """One of the files that a unit was encoded into."""
        return self.folder / WORK / "parts" / f"{unit}{suffix}"

    def staged(self, shard: int) -> str:
        """Prefix of a shard before it is moved to its final place."""
        return str(self.folder / WORK / "staged" / f"{shard:05}")

    @property
    def input_words(self) -> str:
        """The input's flag and files, for messages."""
        return f"--input {' '.join(map(str, self.input))}"

    @property
    def may_replace(self) -> bool:
        return self.overwrite or (self.output_prefix is not None and self.shard is None)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; built once per process."""
        return load_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file)

    def load_encoder(self, choice: str | None = None) -> Encoder:
        """The encoder of this name, by default of --encoder; built once per process."""
        files = self.vocab_file, self.merge_file
        return load_encoder(self.tokenizer_type, *files, choice or self.encoder)

    @cached_property
    def encoder_name(self) -> str:
        """Name of the encoder that --encoder selects here. Workers take the same one, or fail: a
        machine without it would select another."""
        return self.load_encoder().name

    @property
    def appends_eod(self) -> bool:
        return not self.split_sentences if self.append_eod is None else self.append_eod

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenizer; it covers vocab_size and the marks."""
        return self.tokenizer.fingerprint

    @cached_property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @cached_property
    def eod(self) -> int | None:
        """Id of the mark at the end of every document, if there is one."""
        return self.tokenizer.eod if self.appends_eod else None

    @cached_property
    def unknown(self) -> int | None:
        """Id of [UNK], if the tokenizer has one."""
        return self.tokenizer.unknown if isinstance(self.tokenizer, BertTokenizer) else None

    @property
    def shard_bytes(self) -> int:
        """Bytes of input for one shard of output."""
        return parse_size("--shard-size", self.shard_size)

    @cached_property
    def unit_bytes(self) -> int:
        """Gives UNITS units or more, none larger than a shard."""
        total = sum(file.stat().st_size for file in find_shards(self.input))
        return min(max(total // UNITS, SMALLEST_UNIT), LARGEST_UNIT, self.shard_bytes)

    @cached_property
    def shuffled(self) -> bool | None:
        """True if every path is in a folder whose manifest says so, else None (unknown)."""
        folders = [path if path.is_dir() else path.parent for path in self.input]
        manifests = map(read_manifest, folders)
        return all(found and found.get("shuffled") for found in manifests) or None

    def parameters(self) -> dict[str, Any]:
        vocab_file = self.vocab_file
        if vocab_file is not None and vocab_file.is_dir():  # the tokenizer found its file in it
            vocab_file /= file_names(self.tokenizer_type)[0]
        return {
            "encoder": self.encoder_name,
            "eod": self.eod,
            "fingerprint": self.fingerprint,
            "json_key": self.json_key,
            "merge_file": as_parameter(self.merge_file),
            "sentences": splitter() if self.split_sentences else None,
            "shard_bytes": self.shard_bytes,
            "shuffled": self.shuffled,
            "tokenizer_type": self.tokenizer_type,
            "unit": f"{self.unit_bytes}B",
            "vocab_file": as_parameter(vocab_file),
            "vocab_size": self.vocab_size,
        }


def splitter() -> str:
    """Name and version of the library that splits sentences. Raises MissingLibrary."""
    load("sentencex", "--no-split-sentences")
    return f"sentencex {version('sentencex')}"
