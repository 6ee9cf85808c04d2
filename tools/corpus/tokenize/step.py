"""From JSON lines, or text files, to a tokenised data set.

    python tools/preprocess_data.py --input corpus/split/train --output-prefix P --append-eod \\
        --vocab-file vocab.json --merge-file merges.txt --workers 8
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
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.parse import parse
from megatron.data.files import with_suffix
from megatron.data.indexed import OPTIONAL_COUNTS, Description
from megatron.data.json_lines import MANIFEST
from megatron.data.text_checks import count_casing, judge_casing, judge_unknown
from megatron.data.tokenizer import UNKNOWN, BertTokenizer, BertWordPieceLowerCase
from megatron.errors import UsageError
from tools.corpus.engine import REJECTED, RUN, StepRun, Task, remove, sum_counts
from tools.corpus.files import BAD_LINE, DAMAGED_FILE, Unit
from tools.corpus.settings import Unfinished, running, say
from tools.corpus.tokenize.encode import (
    NO_TOKEN,
    PARTS,
    encode_unit,
    group_units,
    join_shard,
    sample_texts,
)
from tools.corpus.tokenize.settings import Settings, splitter
from tools.corpus.tokenize.writer import join_descriptions, move_data_set, verify

WAVE = 64  # most shards whose tokens are on disk twice at the same time
MARGIN = 2  # the share of [UNK] in a sample may be this times --max-unknown; more fails early


def run(settings: Settings) -> None:
    """Write the data set.  Raises ValueError, naming the flag, if that is impossible."""
    start = time.monotonic()
    check(settings)
    sentences = f"; sentences: {splitter()}" if settings.split_sentences else ""
    say(f"encoder: {settings.load_encoder().description}{sentences}")
    if settings.overwrite or not (settings.folder / MANIFEST).exists():
        check_sample(settings)
    with StepRun("tokenise", settings, by_unit=False, files=settings.files) as step:
        if not step.done:
            tokenise(step, settings)
        if settings.output_prefix is not None:
            line = move_out(settings)
            say(f"{settings.data_path}: {line}, in {time.monotonic() - start:.1f} s")


def check(settings: Settings) -> None:
    # A manifest in the work folder is from a run that was killed while it moved its files.
    may_replace = settings.overwrite or (settings.folder / MANIFEST).exists()
    prefix = settings.output_prefix
    if prefix is not None and not may_replace and (found := find_data_set(settings.data_path)):
        works = ("--output-prefix", prefix, "--overwrite")
        raise UsageError("--output-prefix", prefix, f"new ({found} is there)", works=works)
    is_bert = settings.unknown is not None
    if settings.split_sentences and not is_bert:
        raise UsageError(
            "--tokenizer-type",
            settings.tokenizer_type,
            "a kind with the marks that {} needs, which is for pretrain_bert.py",
            "--split-sentences",
            works=("--tokenizer-type", BertWordPieceLowerCase.kind),
        )
    if is_bert and not settings.split_sentences:
        warn("without --split-sentences pretrain_bert.py does not read what is written")
    elif not settings.appends_eod and not settings.split_sentences:
        warn("with --no-append-eod documents run into each other in training")


def print_warning(warning: str | None) -> None:
    if warning:
        say(f"warning: {warning}")


@functools.cache
def warn(message: str) -> None:
    """Warn once per process: the corpus pipeline tokenises training and validation data in it."""
    print_warning(message)


def check_sample(settings: Settings) -> None:
    """Raise ValueError early if a sample shows that the input does not fit the vocabulary."""
    tokenizer, where = settings.tokenizer, f"{settings.input_words}, a sample of it"
    if not isinstance(tokenizer, BertTokenizer):
        return
    texts = sample_texts(settings.units(), settings.json_key)
    works = f"--tokenizer-type {BertWordPieceLowerCase.kind} with a vocabulary without capitals"
    allow, casing = settings.allow_lower_case, count_casing(texts)
    print_warning(judge_casing(where, casing, tokenizer, allow=allow, works=works))
    ids, _ = settings.load_encoder().arrays(texts)
    count = int((ids == tokenizer.unknown).sum())
    if count > MARGIN * settings.max_unknown * len(ids):
        check_unknown(settings, where, count, len(ids))


def check_unknown(settings: Settings, where: str, count: int, tokens: int) -> None:
    works = "a --vocab-file that tools/train_tokenizer.py makes of the same input"
    print_warning(judge_unknown(where, count, tokens, settings.max_unknown, works))


def tokenise(step: StepRun, settings: Settings) -> None:
    """Tokenise the input into the step's folder."""
    results, parts = encode_and_join(step, settings)
    accounting = sum_counts(results)
    staged = [settings.staged(number) for number, part in enumerate(parts) if part]
    if not staged:
        shutil.rmtree(step.work if settings.output_prefix is None else step.output)
        check_json_key(settings, results, is_empty=True)
        raise ValueError(
            f"{settings.input_words} holds no document; "
            + ", ".join(left_out(accounting.to_json()))
        )
    check_json_key(settings, results, is_empty=False)
    if settings.shard is not None:
        raise Unfinished("tokenise: all is done but the last step: run without --shard")
    description = join_descriptions([Description.from_json(part) for part in parts if part])
    unknown = description.unknown_tokens or 0
    try:
        check_unknown(settings, settings.input_words, unknown, description.tokens)
    except ValueError as error:
        raise ValueError(
            f"{error}; no file was put in place, and with a larger --max-unknown the run goes on "
            f"from {step.output}"
        ) from error
    move_data_set(staged, settings.inside, description, settings.tokenizer.files)
    manifest = step.finish(
        accounting,
        list(shard_facts(description, settings.inside)),
        place=settings.data_path,
        tokens=description.tokens,
        shuffled=description.shuffled,
        **{name: getattr(description, name) for name in OPTIONAL_COUNTS},
        empty_sentences=sum(result["empty_sentences"] for result in results),
    )
    if settings.output_prefix is None:
        line = summary(manifest, description, step.output / REJECTED)
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
    lack = f"{count} lines of {settings.input_words} have no text under it"
    keys = f"their keys: {', '.join(characters) or 'none'}"
    if not is_empty:
        print_warning(f"--json-key {settings.json_key}: {lack}; {keys}")
        return
    longest = max(characters, key=characters.__getitem__, default=None)
    works = ("--json-key", longest) if longest is not None and characters[longest] else ()
    allowed = f"a key with text ({lack}; {keys})"
    raise UsageError("--json-key", settings.json_key, allowed, works=works)


def encode_and_join(step: StepRun, settings: Settings) -> tuple[list[Any], list[Any]]:
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


def move_out(settings: Settings) -> str:
    """Move data set and rejected lines to the prefix, remove the folder, and return a summary.

    Another data set at the prefix is replaced, with a message.
    """
    folder, prefix = settings.folder, settings.data_path
    manifest = json.loads((folder / MANIFEST).read_bytes())
    description = Description.read(settings.inside)
    assert description is not None
    rejected, target = folder / REJECTED, with_suffix(prefix, f".{REJECTED}")
    if not _set_aside(manifest):
        target.unlink(missing_ok=True)
    elif rejected.exists():  # otherwise it was moved before a crash
        rejected.replace(target)
    line = summary(manifest, description, target)
    if (replaced := find_data_set(prefix, unless=description)) is not None:
        say(f"replaced {replaced}")
    staged = [settings.inside + name for name in description.pairs]
    move_data_set(staged, prefix, description, settings.tokenizer.files)
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
    reasons = ""
    if _set_aside(manifest):
        with rejected.open("rb") as lines:
            found = Counter(json.loads(line)["reason"].partition(" (")[0] for line in lines)
        listed = ", ".join(f"{count} {reason}" for reason, count in found.most_common())
        reasons = f" in {rejected} ({listed})"
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


def main(argv: Sequence[str]) -> None:
    with running():
        if argv[:1] == ["verify"]:
            if len(argv) != 2 or argv[1].startswith("-"):
                raise ValueError("verify takes one prefix: verify P_text_document would work")
            report = verify(argv[1])
            compared = "as its .json says" if report.described else "no .json to compare with"
            print(
                f"{argv[1]}: sound, {compared}; {report.documents} documents, "
                f"{report.sequences} sequences, {report.tokens} tokens, "
                f"highest id {report.highest_id}"
            )
            return
        run(parse(Settings, argv, os.environ, description=__doc__))
