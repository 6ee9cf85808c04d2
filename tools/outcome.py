"""What becomes of a data set in a folder: it is moved to a prefix, and summed up in a line."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.data.description import Description, ShardFacts, place
from megatron.data.files import with_suffix
from megatron.data.json_lines import MANIFEST
from megatron.data.wordpiece import UNKNOWN
from tools.corpus.program import say
from tools.corpus.records import BAD_LINE, DAMAGED_FILE
from tools.tokenise import NO_TOKEN

REJECTED = ".rejected.jsonl"


def take_out(folder: Path, filled: str, prefix: str, tokenizer: Mapping[str, bytes]) -> str:
    """Move the data set and what was set aside to the prefix, for the folder to go; a summary.

    filled: prefix of the data set in the folder.  tokenizer: {name: content} of its files.  A data
    set that is there and another is replaced, which is said.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes())
    description = Description.read(filled)
    assert description is not None
    inside, beside = folder / "rejected.jsonl", with_suffix(prefix, REJECTED)
    if not _set_aside(manifest):
        beside.unlink(missing_ok=True)
    elif inside.exists():  # or else it was moved before a crash
        inside.replace(beside)
    names = [shard.name for shard in description.shards] or [""]
    told = summary(manifest, description, beside)
    if (replaced := held(prefix, unless=description)) is not None:
        say(f"replaced {replaced}")
    place([filled + name for name in names], prefix, description, tokenizer)
    shutil.rmtree(folder)
    return told


def summary(manifest: Mapping[str, Any], description: Description, rejected: Path) -> str:
    """rejected: the file of the lines that were set aside, if there are any."""
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


def held(prefix: str, unless: Description | None = None) -> str | None:
    """What is known of a data set at the prefix; None where there is none, or `unless` itself."""
    if not any(with_suffix(prefix, suffix).exists() for suffix in (".json", ".idx")):
        return None
    old = None
    with contextlib.suppress(ValueError):  # a damaged sidecar says nothing of what is there
        old = Description.read(prefix)
    if old is None:
        return prefix
    if old == unless:
        return None
    return f"{prefix}, of {old.documents} documents and {old.tokens} tokens"


def shard_facts(description: Description, data_path: str) -> Iterator[dict[str, Any]]:
    """The .bin files, for a manifest."""
    for shard in description.shards or [description]:
        name = data_path + (shard.name if isinstance(shard, ShardFacts) else "") + ".bin"
        yield {
            "name": Path(name).name,
            "documents": shard.documents,
            "bytes": Path(name).stat().st_size,
            "sha256": shard.bin_sha256,
        }


def left_out(books: Mapping[str, Any], reasons: str = "") -> Iterator[str]:
    """What of the input is not in the data set.  books: a funnel's, or a manifest."""
    bad = _set_aside(books)
    yield f"{bad} lines set aside{reasons}" if bad else "no line set aside"
    if empty := _dropped(books, NO_TOKEN):
        yield f"{empty} documents {NO_TOKEN} left out"
    if empty := books.get("empty_sentences", 0):
        yield f"{empty} sentences {NO_TOKEN} left out"
    if single := books.get("one_sentence", 0):
        yield f"{single} documents of one sentence, which BERT passes over"


def _set_aside(books: Mapping[str, Any]) -> int:
    """Lines that hold no document."""
    return _dropped(books, BAD_LINE) + _dropped(books, DAMAGED_FILE)


def _dropped(books: Mapping[str, Any], reason: str) -> int:
    return int(books["dropped"].get(reason, {}).get("documents", 0))


def _reasons(rejected: Path) -> str:
    with rejected.open("rb") as lines:
        reasons = Counter(json.loads(line)["reason"].partition(" (")[0] for line in lines)
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
