"""Step 1: turns published corpora into shards of JSON lines {"text", "source", "id", "url"?, ...}.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import UsageError
from tools.corpus.engine import StepRun, Task, keep_rejected, sum_funnels
from tools.corpus.files import Funnel, Record, ShardWriter, document_id, dump_record, write_shard
from tools.corpus.formats import (
    Fault,
    Item,
    json_parser,
    parse_text,
    read_json_lines,
    read_listed,
    read_packed,
    read_wet,
)
from tools.corpus.parts import (
    LINES,
    Format,
    Loose,
    Part,
    find_parts,
    group,
    listed_parts,
    write_listing,
)
from tools.corpus.settings import StepSettings, program

KEYED = (*LINES, "json")
SHARD_UNITS = 8  # a shard ends at this many --unit; an archive may make several shards
PROBED_PARTS = 8
PROBED_ITEMS = 100


@dataclass(frozen=True, kw_only=True)
class Settings(StepSettings):
    input: tuple[Path, ...]
    """Files in the --format, or folders that hold them at any depth; for jsonl, *.jsonl, *.json
    and *.txt directly in the folder."""

    format: Format
    """Format of the input."""

    source: str
    """Name of the corpus, written into every record; documents are counted by it."""

    key: str = "text"
    """Field of the JSON objects that holds the text; it is called text in the output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.source.strip():
            raise UsageError("--source", '""', "a name", works=("--source", "wikipedia"))
        if self.key != "text" and self.format not in KEYED:
            raise UsageError(
                "--key",
                self.key,
                f"left out with --format {self.format}: {', '.join(KEYED)} have fields",
                works=("--key", "text"),
            )


def run(settings: Settings) -> None:
    parts, loose = find_parts(settings.input, settings.format, settings.unit_bytes)
    units = [part.unit for part in parts]
    with StepRun("extract", settings, units + [each.unit for each in loose]) as step:
        if step.done:
            return
        listed = list_loose(step, loose) if loose else []
        step.units = [  # the manifest's inputs, numbered so that each group has a number
            dataclasses.replace(part.unit, number=k) for k, part in enumerate([*parts, *listed])
        ]
        roots = tuple(str(each.root if each.root.is_dir() else each.root.parent) for each in loose)
        check_fit(parts, listed, roots, settings)
        groups = [*group(parts, settings.unit_bytes), *([part] for part in listed)]
        tasks = [
            Task(f"{k:05}", (k, tuple(each), roots, settings), sum(part.bytes for part in each))
            for k, each in enumerate(groups)
        ]
        results = step.stage("shards", extract_group, tasks)
        funnel = sum_funnels(results)
        step.finish(funnel, [shard for result in results for shard in result["shards"]])


def list_loose(step: StepRun, loose: Sequence[Loose]) -> list[Part]:
    """Single files as ranges of a listing."""
    listing = step.work / "files.jsonl"
    task = Task("files", (tuple(loose), step.settings.unit_bytes, listing))
    [ranges] = step.stage("listing", write_listing, [task])
    return listed_parts(listing, ranges)


def read_part(part: Part, roots: tuple[str, ...], settings: Settings) -> Iterator[Item]:
    """roots: the folders that a listing refers to."""
    if settings.format in LINES:
        return read_json_lines(part, settings.key)
    if settings.format == "wet":
        return read_wet(part)
    parse = json_parser(settings.key) if settings.format == "json" else parse_text
    if part.name:
        return read_packed(part, parse)
    return read_listed(part, roots, parse)


def extract_group(
    number: int, parts: Sequence[Part], roots: tuple[str, ...], settings: Settings
) -> dict[str, Any]:
    """Write parts as shards."""
    funnel = Funnel()
    with open_shards(number, settings) as shards:
        for item in itertools.chain.from_iterable(
            read_part(part, roots, settings) for part in parts
        ):
            if isinstance(item, Fault):
                funnel.set_aside(item.file, item.offset, item.content, item.reason)
                continue
            record = shape(item, settings)
            funnel.enter(record)
            if not record["text"] or record["text"].isspace():
                funnel.drop(record, "empty text")
                continue
            line = dump_record(record)
            funnel.keep(record)
            shards.write(line)
    keep_rejected(settings, dataclasses.replace(parts[0].unit, number=number), funnel)
    return {"funnel": funnel.to_json(), "shards": shards.facts}


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


class Shards:
    """Writes one shard after another, so that none exceeds what the next step reads as one."""

    def __init__(self, number: int, settings: Settings, stack: contextlib.ExitStack) -> None:
        self._number = number
        self._settings = settings
        self._stack = stack
        self._full = SHARD_UNITS * settings.unit_bytes
        self._written: list[ShardWriter] = []

    def write(self, line: bytes) -> None:
        if not self._written or self._written[-1].bytes >= self._full:
            self._stack.close()
            name = f"part-{self._number:05}-{len(self._written):03}"
            shard = write_shard(self._settings.output, name, self._settings.compress)
            self._written.append(self._stack.enter_context(shard))
        self._written[-1].write(line)

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [shard.facts for shard in self._written]


@contextlib.contextmanager
def open_shards(number: int, settings: Settings) -> Iterator[Shards]:
    with contextlib.ExitStack() as stack:
        yield Shards(number, settings, stack)


def check_fit(
    parts: Sequence[Part], listed: Sequence[Part], roots: tuple[str, ...], settings: Settings
) -> None:
    """Probe some parts.  Raises ValueError if everything in them would be rejected."""
    first: Fault | None = None
    for all_parts in (parts, listed):
        for part in all_parts[:: max(1, len(all_parts) // PROBED_PARTS)]:
            for item in itertools.islice(read_part(part, roots, settings), PROBED_ITEMS):
                if not isinstance(item, Fault):
                    return
                first = first or item
    if first is not None:
        raise ValueError(unfit(settings, first))


def unfit(settings: Settings, fault: Fault) -> str:
    place = f"{fault.file}, byte {fault.offset}: {fault.reason}"
    key = f" with --key {settings.key}" if settings.format in KEYED else ""
    hint = "; WikiExtractor has to run with --json" if settings.format == "wikiextractor" else ""
    return f"--format {settings.format}{key} does not fit --input: {place}{hint}"


if __name__ == "__main__":
    program("tools.corpus.extract")
