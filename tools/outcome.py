"""What becomes of a data set in a folder: it is moved to a prefix, and summed up in a line."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.data.description import Description
from megatron.data.files import with_suffix
from megatron.data.placing import place
from tools.corpus.records import BAD_LINE, DAMAGED_FILE
from tools.corpus.shards import MANIFEST
from tools.tokenise import NO_TOKEN

REJECTED = ".rejected.jsonl"


def take_out(folder: Path, filled: str, prefix: str, tokenizer: Mapping[str, bytes]) -> str:
    """Move the data set and what was set aside to the prefix, for the folder to go; a summary.

    filled: prefix of the data set in the folder.  tokenizer: {name: content} of its files.
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
    place([filled + name for name in names], prefix, description, tokenizer)
    shutil.rmtree(folder)
    sentences = "" if description.sentences is None else f"{description.sentences} sentences, "
    shards = f" in {len(names)} shards" if len(names) > 1 else ""
    reasons = f" in {beside} ({_reasons(beside)})" if _set_aside(manifest) else ""
    return (
        f"{description.documents} documents, {sentences}{description.tokens} tokens{shards}; "
        + ", ".join(left_out(manifest, reasons))
    )


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
