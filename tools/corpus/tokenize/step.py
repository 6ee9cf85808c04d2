"""From JSON lines, or text files, to a tokenised data set.

    python tools/preprocess_data.py --input FILE|FOLDER... --output-prefix P --workers N ...
    python tools/preprocess_data.py verify P_text_document

The first command writes P_text_document.bin, .idx and .json, or for large input several pairs
P_text_document_00000.bin, .idx and so on with one .json, which training reads as one data set. It
also writes the tokenizer's files to P_text_document.tokenizer/, which checkpoints then include.
The output does not depend on the number of workers.  Lines that hold no document are written to
P_text_document.rejected.jsonl.  With --split-sentences, for BERT, each sentence is a separate
sequence, and the name is P_text_sentence.  A share of [UNK] above --max-unknown is an error; so is
lower-case text for a vocabulary with capitals.  After a crash the same command resumes.
With --output FOLDER instead of a prefix it is a step like those of tools.corpus: FOLDER gets
text_document.*, rejected.jsonl and a manifest.  The second command verifies the files.
"""

import contextlib
import functools
import glob
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.checks import positive, share
from megatron.config.parse import parse
from megatron.data.files import with_suffix
from megatron.data.indexed import OPTIONAL_COUNTS, Description
from megatron.data.json_lines import MANIFEST, find_shards
from megatron.data.text_checks import MAX_UNKNOWN, count_casing, judge_casing, judge_unknown
from megatron.data.tokenizer import (
    UNKNOWN,
    BertTokenizer,
    BertWordPieceLowerCase,
    Tokenizer,
    file_names,
)
from megatron.errors import UsageError
from tools.corpus.engine import RUN, StepRun, Task, remove, sum_counts
from tools.corpus.files import BAD_LINE, DAMAGED_FILE, Unit, read_manifest
from tools.corpus.settings import Unfinished, parse_size, running, say
from tools.corpus.tokenize.encode import (
    NO_TOKEN,
    PARTS,
    TokenSettings,
    encode_unit,
    group_units,
    join_shard,
    load_encoder,
    load_tokenizer,
    sample_texts,
    splitter,
    unit_bytes,
)
from tools.corpus.tokenize.writer import join_descriptions, move_data_set, verify

WAVE = 64  # most shards whose tokens are on disk twice at the same time
REJECTED = ".rejected.jsonl"  # ending of the rejected lines beside a prefix
MARGIN = 2  # the share of [UNK] in a sample may be this times --max-unknown; more fails early


@dataclass(frozen=True, kw_only=True)
class Settings:
    input: tuple[Path, ...]
    """Files of JSON lines, one document per line, and *.txt files, one document each (plain, .gz
    or .zst), or folders of them."""

    json_key: str = "text"
    """Key of the text in a line; it is part of the output's name."""

    output_prefix: str | None = None
    """P, for P_text_document.bin and the other files.  `verify P_text_document` in place of all
    flags checks them."""

    output: Path | None = None
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

    workers: int = len(os.sched_getaffinity(0))
    """Number of processes, or of jobs with --scheduler slurm; does not change the output."""

    scheduler: str = "local"
    """local, slurm, or the address of a Dask scheduler such as tcp://host:8786."""

    shard: str | None = None
    """K/N: do only every N-th task, starting with the K-th (K from 0), for job arrays; repeat until
    no task is left, then run the command without this flag."""

    overwrite: bool = False
    """Replace an existing data set, or the results of other settings or other input in the folder
    --output."""

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
    def appends_eod(self) -> bool:
        return not self.split_sentences if self.append_eod is None else self.append_eod

    @property
    def name(self) -> str:
        return f"{self.json_key}_{'sentence' if self.split_sentences else 'document'}"

    @property
    def files(self) -> list[str]:
        """Patterns of the data set's files in the folder."""
        name = glob.escape(self.name)
        return [name + end for end in (".bin", ".idx", ".json", ".tokenizer", "_[0-9]*")]

    @property
    def data_path(self) -> str:
        """Prefix of the data set."""
        return f"{self.output_prefix}_{self.name}" if self.output is None else self.filled

    @property
    def folder(self) -> Path:
        """The work folder; with a prefix it is beside it, and removed when all is moved out."""
        return self.output or Path(f"{self.data_path}.work")

    @property
    def filled(self) -> str:
        """Prefix of the data set in the folder."""
        return str(self.folder / self.name)

    @property
    def given(self) -> str:
        """The input's flag and files, for messages."""
        return f"--input {' '.join(map(str, self.input))}"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; built once per process."""
        return load_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file)


def run(settings: Settings) -> None:
    """Write the data set.  Raises ValueError, naming the flag, if that is impossible."""
    start = time.monotonic()
    check(settings)
    chosen = token_settings(settings)
    if settings.overwrite or not (chosen.output / MANIFEST).exists():
        check_sample(settings, chosen)
    with StepRun("tokenise", chosen, by_unit=False, files=settings.files) as step:
        if not step.done:
            tokenise(step, settings)
        if settings.output is None:
            files = settings.tokenizer.files
            line = move_out(settings.folder, settings.filled, settings.data_path, files)
            say(f"{settings.data_path}: {line}, in {time.monotonic() - start:.1f} s")


def check(settings: Settings) -> None:
    # A manifest in the work folder is from a run that was killed while it moved its files.
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
    elif not settings.appends_eod and not settings.split_sentences:
        warn("with --no-append-eod documents run into each other in training")


def say_warning(warning: str | None) -> None:
    if warning:
        say(f"warning: {warning}")


@functools.cache
def warn(message: str) -> None:
    """Warn once per process: the corpus pipeline tokenises training and validation data in it."""
    say_warning(message)


def token_settings(settings: Settings) -> TokenSettings:
    """Checks input and tokenizer, and prints which encoder is used."""
    shard_bytes = parse_size("--shard-size", settings.shard_size)
    total = sum(file.stat().st_size for file in find_shards(settings.input))
    tokenizer, vocab_file = settings.tokenizer, settings.vocab_file
    if vocab_file is not None and vocab_file.is_dir():  # the tokenizer found its file in it
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
        eod=tokenizer.eod if settings.appends_eod else None,
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
    """Raise ValueError early if a sample shows that the input does not fit the vocabulary."""
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
    """True if every path is in a folder whose manifest says so, else None (unknown)."""
    manifests = [read_manifest(path if path.is_dir() else path.parent) for path in paths]
    return all(found and found.get("shuffled") for found in manifests) or None


def tokenise(step: StepRun, settings: Settings) -> None:
    """Tokenise the input into the step's folder."""
    chosen = step.settings
    assert isinstance(chosen, TokenSettings)
    results, parts = encode_and_join(step, chosen)
    accounting = sum_counts(results)
    staged = [chosen.staged(number) for number, part in enumerate(parts) if part]
    if not staged:
        shutil.rmtree(step.output if settings.output is None else step.work)
        check_json_key(settings, results, is_empty=True)
        raise ValueError(
            f"{settings.given} holds no document; " + ", ".join(left_out(accounting.to_json()))
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
        accounting,
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
    """Warn of lines without the key of --json-key; raise UsageError if no document is left."""
    count = sum(result["lines_without_key"] for result in results)
    if not count:
        return
    characters: dict[str, int] = {}  # {other key: characters of its text}
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
    """(results of all units, descriptions of all shards, None for a shard without text)."""
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


def move_out(folder: Path, filled: str, prefix: str, tokenizer: Mapping[str, bytes]) -> str:
    """Move data set and rejected lines to the prefix, remove the folder, and return a summary.

    filled: prefix of the data set in the folder.  tokenizer: {name: content} of its files.  Another
    data set at the prefix is replaced, with a message.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes())
    description = Description.read(filled)
    assert description is not None
    inside, beside = folder / "rejected.jsonl", with_suffix(prefix, REJECTED)
    if not _set_aside(manifest):
        beside.unlink(missing_ok=True)
    elif inside.exists():  # otherwise it was moved before a crash
        inside.replace(beside)
    line = summary(manifest, description, beside)
    if (replaced := find_data_set(prefix, unless=description)) is not None:
        say(f"replaced {replaced}")
    staged = [filled + name for name in description.pairs]
    move_data_set(staged, prefix, description, tokenizer)
    # Without the manifest it is no data set; run.json, the last, shows that a step wrote the rest.
    remove(sorted(folder.iterdir(), key=lambda path: (path.name != MANIFEST, path.name == RUN)))
    folder.rmdir()
    return line


def summary(manifest: Mapping[str, Any], description: Description, rejected: Path) -> str:
    """A line that sums up the data set. rejected: the file of the rejected lines, if any."""
    sentences = "" if description.sentences is None else f"{description.sentences} sentences, "
    shards = f" in {len(description.shards)} shards" if description.shards else ""
    unknown = ""
    if description.unknown_tokens is not None:
        unknown = f" ({description.unknown_tokens / description.tokens:.2%} {UNKNOWN})"
    reasons = f" in {rejected} ({_reasons(rejected)})" if _set_aside(manifest) else ""
    return (
        f"{description.documents} documents, {sentences}{description.tokens} tokens{unknown}"
        f"{shards}; " + ", ".join(left_out(manifest, reasons))
    )


def find_data_set(prefix: str, unless: Description | None = None) -> str | None:
    """Describes the data set at the prefix; None if there is none, or if it equals `unless`."""
    if not any(with_suffix(prefix, suffix).exists() for suffix in (".json", ".idx")):
        return None
    old = None
    with contextlib.suppress(ValueError):  # the sidecar may be damaged
        old = Description.read(prefix)
    if old is None:
        return prefix
    if old == unless:
        return None
    return f"{prefix}, of {old.documents} documents and {old.tokens} tokens"


def shard_facts(description: Description, data_path: str) -> Iterator[dict[str, Any]]:
    """Facts about the .bin files, for a manifest."""
    for name, facts in description.pairs.items():
        file = with_suffix(data_path + name, ".bin")
        yield {
            "name": file.name,
            "documents": facts.documents,
            "bytes": file.stat().st_size,
            "sha256": facts.bin_sha256,
        }


def left_out(counts: Mapping[str, Any], reasons: str = "") -> Iterator[str]:
    """The parts of the input that are not in the data set.  counts: DocumentCounts as JSON."""
    bad = _set_aside(counts)
    yield f"{bad} lines set aside{reasons}" if bad else "no line set aside"
    if empty := _dropped(counts, NO_TOKEN):
        yield f"{empty} documents {NO_TOKEN} left out"
    if empty := counts.get("empty_sentences", 0):
        yield f"{empty} sentences {NO_TOKEN} left out"
    if single := counts.get("one_sentence", 0):
        yield f"{single} documents of one sentence, which BERT passes over"


def _set_aside(counts: Mapping[str, Any]) -> int:
    """Number of lines that hold no document."""
    return _dropped(counts, BAD_LINE) + _dropped(counts, DAMAGED_FILE)


def _dropped(counts: Mapping[str, Any], reason: str) -> int:
    return int(counts["dropped"].get(reason, {}).get("documents", 0))


def _reasons(rejected: Path) -> str:
    with rejected.open("rb") as lines:
        reasons = Counter(json.loads(line)["reason"].partition(" (")[0] for line in lines)
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())


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
