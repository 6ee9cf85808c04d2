"""Turns published corpora into shards of JSON lines {"text", "source", "id", "url"?, ...}.

    python tools/corpus.py extract --input c4 --output raw --format jsonl --source c4
    python tools/corpus.py extract --input crawl.warc.wet.gz --output raw --format wet --source cc

    jsonl          JSON lines with their text under --key: RealNews, CC-Stories, C4; and *.txt
    wikiextractor  output of WikiExtractor with --json: files wiki_00 in folders AA, AB, ...
    openwebtext    archives of text files, also archives of such archives, as published; read
                   like text
    text           text files in folders and archives, one document each
    json           files of one JSON object each, in folders and archives, text under --key: RACE
    wet            WET files of Common Crawl, .warc.wet.gz

Archives and lines may be compressed (.gz .bz2 .xz .zst); nothing is unpacked to disk.  A record
keeps its other fields.  Its id is its own (a WET record's is the WARC-Record-ID); a text file's is
its path under --input, including that of an archive; otherwise it is a hash of the text.  Input
that cannot be read is listed in rejected.jsonl, with file and offset.  Hidden files are skipped.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron.errors import UsageError
from tools.corpus import readers
from tools.corpus.engine import StepRun, Task, keep_rejected, sum_counts
from tools.corpus.files import (
    DocumentCounts,
    Record,
    ShardWriter,
    document_id,
    dump_record,
    grouped,
    write_shard,
)
from tools.corpus.settings import ShardSettings, program

SHARD_UNITS = 8  # a shard ends at this many --unit; an archive may make several shards
PROBED_SPLITS = 8
PROBED_ITEMS = 100


@dataclass(frozen=True, kw_only=True)
class Settings(ShardSettings):
    input: tuple[Path, ...]
    """Files in the --format, or folders that hold them at any depth; for jsonl, *.jsonl, *.json
    and *.txt directly in the folder."""

    format: readers.Format
    """Format of the input."""

    source: str
    """Name of the corpus, written into every record; documents are counted by it."""

    key: str = "text"
    """Field of the JSON objects that holds the text; it is called text in the output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.source.strip():
            raise UsageError("--source", '""', "a name", works=("--source", "wikipedia"))
        if self.key != "text" and self.format not in readers.KEYED:
            raise UsageError(
                "--key",
                self.key,
                f"left out with {{}} {self.format}: {', '.join(readers.KEYED)} have fields",
                "--format",
                works=("--key", "text"),
            )


def run(settings: Settings) -> None:
    splits, loose = readers.find_input(settings.input, settings.format, settings.unit_bytes)
    units = [split.unit for split in splits]
    with StepRun("extract", settings, units + [each.unit for each in loose]) as step:
        if step.done:
            return
        listed: list[readers.SourceSplit] = []
        if loose:
            listing = step.work / "files.jsonl"
            task = Task("files", (tuple(loose), settings.unit_bytes, listing))
            [ranges] = step.stage("listing", readers.write_listing, [task])
            listed = readers.listed(listing, ranges)
        step.units = [  # the manifest's inputs, numbered so that each group has a number
            dataclasses.replace(split.unit, number=k) for k, split in enumerate([*splits, *listed])
        ]
        roots = tuple(str(each.root if each.root.is_dir() else each.root.parent) for each in loose)
        check_format([splits, listed], roots, settings)
        small = grouped(splits, attrgetter("bytes"), settings.unit_bytes)
        groups = [*small, *([split] for split in listed)]
        tasks = [
            Task(f"{k:05}", (k, tuple(each), roots, settings), sum(split.bytes for split in each))
            for k, each in enumerate(groups)
        ]
        results = step.stage("shards", extract_group, tasks)
        accounting = sum_counts(results)
        step.finish(accounting, [shard for result in results for shard in result["shards"]])


def extract_group(
    number: int, splits: Sequence[readers.SourceSplit], roots: tuple[str, ...], settings: Settings
) -> dict[str, Any]:
    """Write a group as shards, none of which exceeds what the next step reads as one."""
    accounting = DocumentCounts()
    shards: list[ShardWriter] = []
    with contextlib.ExitStack() as stack:
        for item in itertools.chain.from_iterable(
            readers.read(split, roots, settings.format, settings.key) for split in splits
        ):
            if isinstance(item, readers.Fault):
                accounting.set_aside(item.file, item.offset, item.content, item.reason)
                continue
            record = shape(item, settings)
            accounting.enter(record)
            if not record["text"] or record["text"].isspace():
                accounting.drop(record, "empty text")
                continue
            accounting.keep(record)
            if not shards or shards[-1].bytes >= SHARD_UNITS * settings.unit_bytes:
                stack.close()
                name = f"part-{number:05}-{len(shards):03}"
                shard = write_shard(settings.output, name, settings.compress)
                shards.append(stack.enter_context(shard))
            shards[-1].write(dump_record(record))
    keep_rejected(settings, dataclasses.replace(splits[0].unit, number=number), accounting)
    return {"accounting": accounting.to_json(), "shards": [shard.facts for shard in shards]}


def shape(record: Record, settings: Settings) -> Record:
    """The record in this project's form; a field whose name is needed here becomes original_..."""
    text = record.pop(settings.key)
    if "text" in record:
        record["original_text"] = record.pop("text")
    if record.get("source", settings.source) != settings.source:
        record["original_source"] = record.pop("source")
    first = {"text": text, "source": settings.source, "id": record.get("id")}
    first["id"] = document_id(first)
    if "url" in record:
        first["url"] = record["url"]
    return {**first, **record, **first}  # fields of `first` come first, with its values


def check_format(
    kinds: Sequence[Sequence[readers.SourceSplit]], roots: tuple[str, ...], settings: Settings
) -> None:
    """Probe some splits of each kind.  Raises UsageError if everything would be rejected."""
    first: readers.Fault | None = None
    for splits in kinds:
        for split in splits[:: max(1, len(splits) // PROBED_SPLITS)]:
            items = readers.read(split, roots, settings.format, settings.key)
            for item in itertools.islice(items, PROBED_ITEMS):
                if not isinstance(item, readers.Fault):
                    return
                first = first or item
    if first is None:
        return
    key = f" with --key {settings.key}" if settings.format in readers.KEYED else ""
    hint = "; WikiExtractor has to run with --json" if settings.format == "wikiextractor" else ""
    raise UsageError(
        "--format",
        f"{settings.format}{key}",
        f"that of --input; {first.file}, byte {first.offset}: {first.reason}{hint}",
    )


if __name__ == "__main__":
    program("tools.corpus.extract")
