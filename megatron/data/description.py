"""The sidecar P.json of a data set: what made it, and what it should hold."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from megatron.data.files import with_suffix, write_atomically

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


def join_descriptions(parts: Sequence[Description]) -> Description:
    """That of a data set of these, in their order; the same one again if it is alone."""
    if len(parts) == 1:
        return parts[0]
    shards = tuple(
        ShardFacts(
            name=f"_{number:05}",
            documents=part.documents,
            tokens=part.tokens,
            bin_sha256=part.bin_sha256,
            idx_sha256=part.idx_sha256,
            **{name: getattr(part, name) for name in NOTED},
        )
        for number, part in enumerate(parts)
    )
    return replace(parts[0], **_totals(shards), shards=shards)


def _totals(shards: Sequence[ShardFacts]) -> dict[str, Any]:
    """What is said of a data set of these."""
    return {
        "documents": sum(shard.documents for shard in shards),
        **{name: _sum_noted([getattr(shard, name) for shard in shards]) for name in NOTED},
        "tokens": sum(shard.tokens for shard in shards),
        "bin_sha256": _sum_of_sums([shard.bin_sha256 for shard in shards]),
        "idx_sha256": _sum_of_sums([shard.idx_sha256 for shard in shards]),
    }


def _sum_noted(counts: Sequence[int | None]) -> int | None:
    noted = [count for count in counts if count is not None]
    return sum(noted) if noted else None


def _sum_of_sums(checksums: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(checksums).encode()).hexdigest()
