"""The sidecar P.json of a data set: what made it, what it holds, and which shards it is of."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from megatron.data.files import (
    flush_directory,
    flush_to_disk,
    tokenizer_folder,
    with_suffix,
    write_atomically,
)

NOTED = ("sentences", "one_sentence", "unknown_tokens")  # counts that not every data set has


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """One of several pairs that are read as one data set."""

    name: str
    """What follows the prefix of the data set in the names of its .bin and .idx."""
    documents: int
    tokens: int
    bin_sha256: str
    idx_sha256: str
    sentences: int | None = None
    one_sentence: int | None = None
    unknown_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Description:
    tokenizer_type: str
    tokenizer_fingerprint: str
    vocab_size: int
    eod: int | None
    """The mark that every document ends with; None where none was appended."""
    documents: int
    tokens: int
    bin_sha256: str
    """Of a data set of several shards: of their checksums, one a line; so is idx_sha256."""
    idx_sha256: str
    shards: tuple[ShardFacts, ...] = ()
    """In order; none where the data set is one pair of its own name."""
    shuffled: bool | None = None
    """Whether the documents stand in random order; None where it was not noted."""
    sentences: int | None = None
    """How many there are, a sequence each, as BERT reads them; None where a sequence is a whole
    document, as GPT-2 reads it."""
    one_sentence: int | None = None
    """Documents of one sentence, which BERT passes over; None where not split, or not noted."""
    unknown_tokens: int | None = None
    """Tokens that are [UNK]; None where the tokenizer has no such mark, or it was not noted."""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Of asdict(), or of a file; TypeError for what is neither."""
        shards = tuple(ShardFacts(**each) for each in content.get("shards", ()))
        return cls(**{**content, "shards": shards})

    @classmethod
    def read(cls, prefix: str) -> Self | None:
        """That of the data set, None where it has none; ValueError for a damaged one."""
        file = with_suffix(prefix, ".json")
        if not file.exists():
            return None
        try:
            description = cls.from_json(json.loads(file.read_bytes()))
        except (ValueError, TypeError, AttributeError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{file} should be a JSON object of {names}: {error}") from error
        totals = _totals(description.shards) if description.shards else {}
        if any(getattr(description, name) != total for name, total in totals.items()):
            raise ValueError(f"{file} is damaged: what it says of its shards does not add up")
        return description

    def write(self, prefix: str) -> None:
        """Put the sidecar in place, whole."""
        content = json.dumps(asdict(self), indent=2).encode() + b"\n"
        write_atomically(with_suffix(prefix, ".json"), content)


def join_descriptions(shards: Sequence[Description]) -> Description:
    """That of a data set of these, in their order; the same one again if it is alone."""
    if len(shards) == 1:
        return shards[0]
    kept = [field.name for field in fields(ShardFacts) if field.name != "name"]
    facts = tuple(
        ShardFacts(name=f"_{number:05}", **{name: getattr(shard, name) for name in kept})
        for number, shard in enumerate(shards)
    )
    return replace(shards[0], **_totals(facts), shards=facts)


def _totals(shards: Sequence[ShardFacts]) -> dict[str, Any]:
    """What is said of a data set of these."""
    totals: dict[str, Any] = {}
    for name in ("documents", "tokens", *NOTED):
        noted = [count for shard in shards if (count := getattr(shard, name)) is not None]
        totals[name] = sum(noted) if noted else None
    for name in ("bin_sha256", "idx_sha256"):
        lines = "\n".join(getattr(shard, name) for shard in shards)
        totals[name] = hashlib.sha256(lines.encode()).hexdigest()
    return totals


def place(
    staged: Sequence[str], prefix: str, description: Description, tokenizer: Mapping[str, bytes]
) -> None:
    """Move shards to where `prefix` is, and write its sidecar and the tokenizer's files.

    staged: prefixes of the shards, on the same file system.  tokenizer: {name: content}.  At no
    moment do files of two data sets mix: until the last index is in place, the data set is absent.
    After a crash the same call goes on, as a shard that is no longer where it was staged has been
    moved.
    """
    targets = [prefix + shard.name for shard in description.shards] or [prefix]
    old = None
    with contextlib.suppress(ValueError):  # a damaged one is about to be replaced
        old = Description.read(prefix)
    if old != description:
        # The older data set goes, but for the .bin files that are about to be replaced; its sidecar
        # goes last, for it says which shards there are.
        prefixes = [prefix, *(prefix + shard.name for shard in (old.shards if old else ()))]
        for each in prefixes:
            with_suffix(each, ".idx").unlink(missing_ok=True)
        for each in prefixes:
            if each not in targets:
                with_suffix(each, ".bin").unlink(missing_ok=True)
        with_suffix(prefix, ".json").unlink(missing_ok=True)
    _move(staged, targets, ".bin")
    _place_tokenizer(prefix, tokenizer)
    description.write(prefix)
    _move(staged, targets, ".idx")
    flush_directory(with_suffix(prefix, ".json").parent)


def _move(sources: Sequence[str], targets: Sequence[str], suffix: str) -> None:
    for source, target in zip(sources, targets, strict=True):
        if (file := with_suffix(source, suffix)).exists():
            file.replace(with_suffix(target, suffix))


def _place_tokenizer(prefix: str, files: Mapping[str, bytes]) -> None:
    """All files or none; a folder that holds just these is left as it is."""
    folder = tokenizer_folder(prefix)
    staging = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    if folder.is_dir() and files == {file.name: file.read_bytes() for file in folder.iterdir()}:
        return
    staging.mkdir()
    for name, content in files.items():
        with (staging / name).open("wb") as stream:
            stream.write(content)
            flush_to_disk(stream)
    flush_directory(staging)
    if folder.exists():
        shutil.rmtree(folder)
    staging.replace(folder)
