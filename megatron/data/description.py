"""The sidecar P.json of a data set: what made it, and what it should hold."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Self

from megatron.data.files import flush_to_disk, temporary, with_suffix


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
    idx_sha256: str

    @classmethod
    def read(cls, prefix: str) -> Self | None:
        """That of the data set, None where it has none; ValueError for a damaged one."""
        file = with_suffix(prefix, ".json")
        if not file.exists():
            return None
        try:
            return cls(**json.loads(file.read_bytes()))
        except (ValueError, TypeError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{file} should be a JSON object of {names}: {error}") from error

    def write(self, prefix: str) -> None:
        """Put the sidecar in place, whole."""
        file = with_suffix(prefix, ".json")
        with temporary(file).open("wb") as stream:
            stream.write(json.dumps(asdict(self), indent=2).encode() + b"\n")
            flush_to_disk(stream)
        temporary(file).replace(file)
