"""Moves the data set of a finished run from its folder to a prefix, and summarizes it in a line."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.data.files import with_suffix
from megatron.data.indexed import Description
from megatron.data.json_lines import MANIFEST
from megatron.data.tokenizer import UNKNOWN
from tools.corpus.files import BAD_LINE, DAMAGED_FILE
from tools.corpus.settings import say
from tools.data_files import move_data_set
from tools.tokenise import NO_TOKEN

REJECTED = ".rejected.jsonl"


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
    shutil.rmtree(folder)
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
