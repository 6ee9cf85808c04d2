"""The flags of tools/preprocess_data.py, and what follows from them alone."""

import os
from dataclasses import dataclass
from pathlib import Path

from megatron.config.checks import UsageError, positive, share
from megatron.data.tokenizer import Tokenizer
from megatron.data.wordpiece import MAX_UNKNOWN
from tools.tokenise import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Settings:
    input: tuple[Path, ...]
    """Files of JSON lines, a document a line (plain, .gz or .zst), or folders of them."""

    json_key: str = "text"
    """Key of a line's text; it is part of the name of what is written."""

    output_prefix: str | None = None
    """P, for P_text_document.bin and its companions; what is there is replaced.  `verify
    P_text_document` in place of all flags checks them."""

    output: Path | None = None
    """Instead of a prefix: a folder to fill, as the steps of tools.corpus do."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """Kind of tokenizer."""

    vocab_file: Path | None = None
    """The tokenizer's vocabulary (vocab.json, or vocab.txt of a WordPiece)."""

    merge_file: Path | None = None
    """The byte-pair encoding's merges (merges.txt)."""

    append_eod: bool = False
    """End each document with an end-of-document mark."""

    split_sentences: bool = False
    """Keep the sentences of a document apart, as pretrain_bert.py reads them, for a data set
    P_text_sentence.  A line end ends a sentence; its rules are those of English."""

    max_unknown: float = MAX_UNKNOWN
    """Largest share of a WordPiece's tokens that may be [UNK]; more is an error, and above 0.01
    there is a warning.  A BPE has no [UNK]."""

    allow_lower_case: bool = False
    """Take text without capitals though the vocabulary, a BertWordPieceCase, has them."""

    encoder: str = "auto"
    """Library that encodes: tokenizers, the reference; gigatoken, a hundred times as fast, for a
    BPE; words, the reference once for each word, for a WordPiece; auto is one of these two where it
    is there and gives the reference's ids on a set of tricky strings."""

    shard_size: str = "1GB"
    """How much input becomes one .bin and .idx, at most; a compressed file is not cut."""

    workers: int = len(os.sched_getaffinity(0))
    """Processes, or jobs with --scheduler slurm.  They do not change what is written."""

    scheduler: str = "local"
    """local, slurm, or the address of a Dask scheduler such as tcp://host:8786."""

    shard: str | None = None
    """K/N: do only every N-th task from the K-th on (K from 0), as an array of jobs does; repeat
    until nothing is left, then run the command without it."""

    overwrite: bool = False
    """Replace what other settings or other input have left in the folder --output."""

    def __post_init__(self) -> None:
        positive(self, "workers")
        share(self, "max_unknown")
        if (self.output is None) == (self.output_prefix is None):
            raise UsageError(
                "--output-prefix",
                self.output_prefix,
                "P, for files P_text_document.*, or left out with --output FOLDER",
                works=("--output-prefix", "P"),
            )
        if self.split_sentences and self.append_eod:
            raise UsageError(
                "--append-eod",
                None,
                "left out with --split-sentences, which keeps documents apart without a mark",
                works=("--no-append-eod",),
            )

    @property
    def name(self) -> str:
        return f"{self.json_key}_{'sentence' if self.split_sentences else 'document'}"

    @property
    def data_path(self) -> str:
        """Prefix of the data set."""
        return f"{self.output_prefix}_{self.name}" if self.output is None else self.filled

    @property
    def folder(self) -> Path:
        """Where the work is done; one beside a prefix goes when all has been taken out of it."""
        return self.output or Path(f"{self.data_path}.work")

    @property
    def filled(self) -> str:
        """Prefix of the data set in the folder."""
        return str(self.folder / self.name)

    @property
    def given(self) -> str:
        """The input, flag and files, for messages."""
        return f"--input {' '.join(map(str, self.input))}"

    @property
    def tokenizer(self) -> Tokenizer:
        """One for each process."""
        files = self.vocab_file, self.merge_file
        return load_tokenizer(self.tokenizer_type, *files, self.encoder)
