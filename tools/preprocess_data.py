"""From JSON lines, or text files, to a tokenised data set.

    python tools/preprocess_data.py --input FILE|FOLDER... --output-prefix P --workers N ...
    python tools/preprocess_data.py verify P_text_document

The first leaves P_text_document.bin, .idx and .json, or with much text several pairs
P_text_document_00000.bin, .idx and so on beside one .json, which training reads as one data set;
and P_text_document.tokenizer/, the tokenizer's files, which training's checkpoints then hold.
What is written does not depend on the workers.  Lines that hold no document are set aside in
P_text_document.rejected.jsonl.  With --split-sentences, for BERT, each sentence is a sequence of
its own, and the name is P_text_sentence.  A share of [UNK] above --max-unknown is refused; so is
text in lower case for a vocabulary with capitals.  After a crash the same command goes on from
where it was.
With --output FOLDER instead of a prefix it is a step like those of tools.corpus: FOLDER gets
text_document.*, rejected.jsonl and a manifest.  The second command checks the files.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import functools
import importlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.checks import UsageError, positive, share
from megatron.config.parse import parse
from megatron.data.indexed import OPTIONAL_COUNTS, Description
from megatron.data.json_lines import MANIFEST, find_shards
from megatron.data.text_checks import MAX_UNKNOWN, count_casing, judge_casing, judge_unknown
from megatron.data.tokenizer import BertTokenizer, BertWordPieceLowerCase, file_names
from megatron.data.tokenizer_base import Tokenizer
from tools.corpus.manifest import read_manifest
from tools.corpus.program import Unfinished, running, say
from tools.corpus.settings import parse_size
from tools.corpus.shards import Unit
from tools.corpus.step import StepRun
from tools.corpus.tasks import Task
from tools.corpus.units import sum_funnels
from tools.data_files import join_descriptions, move_data_set, verify
from tools.outcome import find_data_set, left_out, move_out, shard_facts, summary
from tools.sentences import splitter
from tools.tokenise import (
    PARTS,
    TokenSettings,
    encode_unit,
    group_units,
    join_shard,
    load_encoder,
    load_tokenizer,
    sample_texts,
    unit_bytes,
)

WAVE = 64  # shards whose tokens may stand on disk twice at a time
MARGIN = 2  # times --max-unknown that a sample may hold before all is read


@dataclass(frozen=True, kw_only=True)
class Settings:
    input: tuple[Path, ...]
    """Files of JSON lines, a document a line, and *.txt, each a document (plain, .gz or .zst), or
    folders of them."""

    json_key: str = "text"
    """Key of a line's text; it is part of the name of what is written."""

    output_prefix: str | None = None
    """P, for P_text_document.bin and its companions.  `verify P_text_document` in place of all
    flags checks them."""

    output: Path | None = None
    """Instead of a prefix: a folder to fill, as the steps of tools.corpus do."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """Kind of tokenizer."""

    vocab_file: Path | None = field(default=None, metadata={"alias": "tokenizer_model"})
    """The tokenizer's vocabulary: vocab.json, vocab.txt of a WordPiece, or for a
    HuggingFaceTokenizer tokenizer.json or its folder. Also spelt --tokenizer-model."""

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
    is there and gives the reference's ids on a set of tricky strings. A HuggingFaceTokenizer is
    always encoded by tokenizers."""

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
    """Replace a data set that is there, or what other settings or other input have left in the
    folder --output."""

    def __post_init__(self) -> None:
        positive(self, "workers")
        share(self, "max_unknown")
        if (self.output is None) == (self.output_prefix is None):
            raise UsageError(
                "--output-prefix",
                self.output_prefix,
                "P, for files P_text_document.*, or left out with --output FOLDER",
                works=("--output-prefix", "P") if self.output is None else (),
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
        return load_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file)


def run(settings: Settings) -> None:
    """Write the data set.  ValueError, naming the flag, where that cannot be."""
    start = time.monotonic()
    check(settings)
    chosen = token_settings(settings)
    if settings.overwrite or not (chosen.output / MANIFEST).exists():
        check_sample(settings, chosen)
    with StepRun("tokenise", chosen, by_unit=False) as step:
        if not step.done:
            tokenise(step, settings)
        if settings.output is None:
            files = settings.tokenizer.files
            line = move_out(settings.folder, settings.filled, settings.data_path, files)
            say(f"{settings.data_path}: {line}, in {time.monotonic() - start:.1f} s")


def check(settings: Settings) -> None:
    # A manifest in the work folder is of a run that was cut off while it put its files in place.
    may_replace = settings.overwrite or (settings.folder / MANIFEST).exists()
    if settings.output is None and not may_replace and (found := find_data_set(settings.data_path)):
        prefix = str(settings.output_prefix)
        works = ("--output-prefix", prefix, "--overwrite")
        raise UsageError("--output-prefix", prefix, f"new ({found} is there)", works=works)
    is_bert = isinstance(settings.tokenizer, BertTokenizer)
    if settings.split_sentences and not is_bert:
        raise UsageError(
            "--tokenizer-type",
            settings.tokenizer_type,
            "a kind with the marks that --split-sentences needs, which is for pretrain_bert.py",
            works=("--tokenizer-type", "BertWordPieceLowerCase"),
        )
    if is_bert and not settings.split_sentences:
        warn("without --split-sentences pretrain_bert.py does not read what is written")
    elif not settings.append_eod and not settings.split_sentences:
        warn("without --append-eod documents run into each other in training")


def say_warning(warning: str | None) -> None:
    if warning:
        say(f"warning: {warning}")


@functools.cache
def warn(message: str) -> None:
    """Once in a process: a run of the corpus pipeline tokenises training and validation."""
    say_warning(message)


def token_settings(settings: Settings) -> TokenSettings:
    """Checks input and tokenizer, and says which encoder it is."""
    shard_bytes = parse_size("--shard-size", settings.shard_size)
    total = sum(file.stat().st_size for file in find_shards(settings.input))
    tokenizer, vocab_file = settings.tokenizer, settings.vocab_file
    if vocab_file is not None and vocab_file.is_dir():  # the tokenizer has found it there
        vocab_file /= file_names(settings.tokenizer_type)[0]
    files = vocab_file, settings.merge_file
    encoder = load_encoder(settings.tokenizer_type, *files, settings.encoder)
    chosen = TokenSettings(
        input=settings.input,
        output=settings.folder,
        workers=settings.workers,
        scheduler=settings.scheduler,
        shard=settings.shard,
        unit=f"{unit_bytes(total, shard_bytes)}B",
        overwrite=settings.overwrite or (settings.output is None and settings.shard is None),
        json_key=settings.json_key,
        tokenizer_type=settings.tokenizer_type,
        vocab_file=vocab_file,
        merge_file=settings.merge_file,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod if settings.append_eod else None,
        unknown=tokenizer.unknown if isinstance(tokenizer, BertTokenizer) else None,
        sentences=splitter() if settings.split_sentences else None,
        encoder=encoder.name,
        shard_bytes=shard_bytes,
        shuffled=are_shuffled(settings.input),
    )
    sentences = f"; sentences: {splitter()}" if settings.split_sentences else ""
    say(f"encoder: {encoder.description}{sentences}")
    return chosen


def check_sample(settings: Settings, chosen: TokenSettings) -> None:
    """ValueError at once where the input surely does not fit the vocabulary."""
    tokenizer, where = settings.tokenizer, f"{settings.given}, a sample of it"
    if not isinstance(tokenizer, BertTokenizer):
        return
    texts = sample_texts(chosen.units(), settings.json_key)
    works = f"--tokenizer-type {BertWordPieceLowerCase.kind} with a vocabulary without capitals"
    allow, casing = settings.allow_lower_case, count_casing(texts)
    say_warning(judge_casing(where, casing, tokenizer, allow=allow, works=works))
    ids, _ = chosen.load_encoder().arrays(texts)
    count = int((ids == tokenizer.unknown).sum())
    if count > MARGIN * settings.max_unknown * len(ids):
        check_unknown(settings, where, count, len(ids))


def check_unknown(settings: Settings, where: str, count: int, tokens: int) -> None:
    works = "a --vocab-file that tools/train_tokenizer.py makes of the same input"
    say_warning(judge_unknown(where, count, tokens, settings.max_unknown, works))


def are_shuffled(paths: Sequence[Path]) -> bool | None:
    """True if every path is of a folder whose manifest says so; else None: it is not known."""
    manifests = [read_manifest(path if path.is_dir() else path.parent) for path in paths]
    return all(found and found.get("shuffled") for found in manifests) or None


def tokenise(step: StepRun, settings: Settings) -> None:
    """Fill the folder."""
    chosen = step.settings
    assert isinstance(chosen, TokenSettings)
    results, parts = encode_and_join(step, chosen)
    funnel = sum_funnels(results)
    staged = [chosen.staged(number) for number, part in enumerate(parts) if part]
    if not staged:
        shutil.rmtree(step.output if settings.output is None else step.work)
        check_json_key(settings, results, is_empty=True)
        raise ValueError(
            f"{settings.given} holds no document; " + ", ".join(left_out(funnel.to_json()))
        )
    check_json_key(settings, results, is_empty=False)
    if settings.shard is not None:
        raise Unfinished("tokenise: all is done but the last step: run without --shard")
    description = join_descriptions([Description.from_json(part) for part in parts if part])
    goes_on = f"; nothing was put in place, and with the latter the run goes on from {step.output}"
    unknown = description.unknown_tokens or 0
    try:
        check_unknown(settings, settings.given, unknown, description.tokens)
    except ValueError as error:
        raise ValueError(f"{error}{goes_on}") from error
    move_data_set(staged, settings.filled, description, settings.tokenizer.files)
    manifest = step.finish(
        funnel,
        list(shard_facts(description, settings.filled)),
        place=settings.data_path,
        tokens=description.tokens,
        shuffled=description.shuffled,
        **{name: getattr(description, name) for name in OPTIONAL_COUNTS},
        empty_sentences=sum(result["empty_sentences"] for result in results),
    )
    if settings.output is not None:
        line = summary(manifest, description, step.output / "rejected.jsonl")
        say(f"{settings.data_path}: {line}")


def check_json_key(settings: Settings, results: Sequence[Any], *, is_empty: bool) -> None:
    """Warn of lines that lack the key of --json-key; UsageError where they left nothing."""
    count = sum(result["lines_without_key"] for result in results)
    if not count:
        return
    characters: dict[str, int] = {}  # of text under each other key
    for result in results:
        for key, size in result["other_keys"].items():
            characters[key] = characters.get(key, 0) + size
    lack = f"{count} lines of {settings.given} have no text under it"
    keys = f"their keys: {', '.join(characters) or 'none'}"
    if not is_empty:
        say_warning(f"--json-key {settings.json_key}: {lack}; {keys}")
        return
    longest = max(characters, key=characters.__getitem__, default=None)
    works = ("--json-key", longest) if longest is not None and characters[longest] else ()
    allowed = f"a key with text ({lack}; {keys})"
    raise UsageError("--json-key", settings.json_key, allowed, works=works)


def encode_and_join(step: StepRun, settings: TokenSettings) -> tuple[list[Any], list[Any]]:
    """(results of all units, Descriptions of all shards); None for a shard without text."""
    shards = list(enumerate(group_units(step.units, settings.shard_bytes)))
    results: list[Any] = []
    parts: list[Any] = []
    for first in range(0, len(shards), WAVE):
        wave = shards[first : first + WAVE]
        units = [unit for _, units in wave for unit in units]
        encoding = [Task(unit.name, (unit, settings), _size([unit])) for unit in units]
        joining = [
            Task(f"{number:05}", (number, tuple(unit.name for unit in units), settings),
                 _size(units))
            for number, units in wave
        ]  # fmt: skip
        results += step.stage(f"encode-{first:05}", encode_unit, encoding)
        parts += step.stage(f"join-{first:05}", join_shard, joining)
        for unit in units:
            for suffix in PARTS:
                settings.part(unit.name, suffix).unlink(missing_ok=True)
    return results, parts


def _size(units: Sequence[Unit]) -> int:
    return sum(unit.stop - unit.start for unit in units)


def _verify(prefix: str) -> str:
    report = verify(prefix)
    compared = "as its .json says" if report.described else "no .json to compare with"
    return (
        f"{prefix}: sound, {compared}; {report.documents} documents, {report.sequences} sequences, "
        f"{report.tokens} tokens, highest id {report.highest_id}"
    )


def main(argv: Sequence[str]) -> None:
    with running():
        if argv[:1] == ["verify"]:
            if len(argv) != 2 or argv[1].startswith("-"):
                raise ValueError("verify takes one prefix: verify P_text_document would work")
            print(_verify(argv[1]))
            return
        run(parse(Settings, argv, os.environ))


if __name__ == "__main__":  # by its name, so that workers find its functions
    importlib.import_module("tools.preprocess_data").main(sys.argv[1:])
