"""From JSON lines to a tokenised data set.

    python tools/preprocess_data.py --input FILE [FILE...] --output-prefix P --workers N ...
    python tools/preprocess_data.py verify P_text_document

The first leaves P_text_document.bin, .idx and .json, the same whatever the number of workers; lines
that hold no document are set aside in P_text_document.rejected.jsonl. The second checks them.
"""

import gzip
import json
import multiprocessing
import os
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron.config.checks import SettingError, positive
from megatron.config.parse import parse, user_errors
from megatron.data.files import flush_to_disk, temporary, with_suffix
from megatron.data.indexed import IndexedDatasetWriter, token_dtype
from megatron.data.jsonl import parse_document
from megatron.data.tokenizer import build_tokenizer
from megatron.data.verify import verify

BATCH_BYTES = 1 << 18  # of JSON lines that a worker takes at a time: some 0.2 s of work
AHEAD = 4  # batches for each worker that are read but not yet written, which bounds the memory


@dataclass(frozen=True, kw_only=True)
class Settings:
    input: tuple[str, ...]
    """Files of JSON lines, a document a line; those named .gz are decompressed."""

    json_key: str = "text"
    """Key of a line's text; it is part of the name of what is written."""

    output_prefix: str
    """P, for P_text_document.bin and its companions."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """Kind of tokenizer."""

    vocab_file: str | None = None
    """The tokenizer's vocabulary (vocab.json)."""

    merge_file: str | None = None
    """The byte-pair encoding's merges (merges.txt)."""

    append_eod: bool = False
    """End each document with an end-of-document mark."""

    workers: int = 1
    """Processes that encode."""

    def __post_init__(self) -> None:
        positive(self, "workers")
        if not self.input:
            raise SettingError("--input names no file")
        for file in self.input:
            if not Path(file).is_file():
                raise SettingError(f"--input {file}: no such file")
            if not Path(file).stat().st_size:
                raise SettingError(f"--input {file} is empty; a JSON object a line would work")

    @property
    def data_path(self) -> str:
        """Prefix of the data set."""
        return f"{self.output_prefix}_{self.json_key}_document"


@dataclass(frozen=True, kw_only=True)
class Batch:
    file: str
    first_line: int
    lines: list[bytes]
    size: int
    """Bytes of the file on disk that it stands for."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    tokens: NDArray[Any]
    sizes: NDArray[np.int32]
    rejected: list[dict[str, Any]]
    size: int


class RejectedLines:
    """The file of lines that hold no document, as {file, line, reason}; none where all do."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reasons: Counter[str] = Counter()
        self._stream = temporary(file).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        temporary(self.file).unlink(missing_ok=True)

    def add(self, line: dict[str, Any]) -> None:
        self.reasons[line["reason"]] += 1
        self._stream.write(json.dumps(line).encode() + b"\n")

    def commit(self) -> None:
        flush_to_disk(self._stream)
        if self.reasons:
            temporary(self.file).replace(self.file)
        else:
            self.file.unlink(missing_ok=True)


def preprocess(settings: Settings) -> str:
    """Write the data set; returns a summary. ValueError where no document is left."""
    start = time.monotonic()
    tokenizer = _tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file)
    Path(settings.data_path).parent.mkdir(parents=True, exist_ok=True)
    total = sum(Path(file).stat().st_size for file in settings.input)
    with (
        IndexedDatasetWriter(settings.data_path, token_dtype(tokenizer.vocab_size)) as writer,
        RejectedLines(with_suffix(settings.data_path, ".rejected.jsonl")) as rejected,
        tqdm(total=total, unit="B", unit_scale=True, desc="preprocess", disable=None) as bar,
    ):
        for encoded in _encode_all(settings):
            writer.add(encoded.tokens, encoded.sizes)
            for line in encoded.rejected:
                rejected.add(line)
            bar.update(encoded.size)
        rejected.commit()
        aside = _set_aside(rejected)
        if not writer.documents:
            raise ValueError(f"--input {' '.join(settings.input)} holds no document; {aside}")
        written = writer.commit(
            tokenizer_type=tokenizer.kind,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod if settings.append_eod else None,
        )
    return (
        f"{settings.data_path}: {written.documents} documents, {written.tokens} tokens, in "
        f"{time.monotonic() - start:.1f} s; {aside}"
    )


def encode(settings: Settings, batch: Batch) -> Encoded:
    """Tokens of the batch's documents; a pure function that runs in a worker."""
    tokenizer = _tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file)
    texts, rejected = [], []
    for number, line in enumerate(batch.lines, start=batch.first_line):
        try:
            texts.append(parse_document(line, settings.json_key))
        except ValueError as error:
            rejected.append({"file": batch.file, "line": number, "reason": str(error)})
    end = [tokenizer.eod] if settings.append_eod else []
    documents = [ids + end for ids in tokenizer.encode_batch(texts)]
    return Encoded(
        tokens=np.fromiter(chain.from_iterable(documents), token_dtype(tokenizer.vocab_size)),
        sizes=np.array([len(ids) for ids in documents], np.int32),
        rejected=rejected,
        size=batch.size,
    )


_tokenizer = cache(build_tokenizer)


def _encode_all(settings: Settings) -> Iterator[Encoded]:
    """All batches in order, a bounded number of them under way."""
    context = multiprocessing.get_context("spawn")
    under_way: deque[Future[Encoded]] = deque()
    with ProcessPoolExecutor(settings.workers, context, initializer=_use_one_thread) as pool:
        for batch in _batches(settings.input):
            under_way.append(pool.submit(encode, settings, batch))
            if len(under_way) == AHEAD * settings.workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def _use_one_thread() -> None:
    """A worker is one of --workers: the tokenizers library would take all cores for each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _batches(files: Sequence[str]) -> Iterator[Batch]:
    for file in files:
        with Path(file).open("rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if file.endswith(".gz") else raw
            first_line, position = 1, 0
            try:
                while lines := stream.readlines(BATCH_BYTES):
                    size = raw.tell() - position
                    yield Batch(file=file, first_line=first_line, lines=lines, size=size)
                    first_line, position = first_line + len(lines), position + size
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"--input {file} is no whole gzip file: {error}") from error


def _set_aside(rejected: RejectedLines) -> str:
    if not rejected.reasons:
        return "no line set aside"
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.reasons.most_common())
    return f"{rejected.reasons.total()} lines set aside in {rejected.file} ({reasons})"


def _verify(prefix: str) -> str:
    report = verify(prefix)
    compared = "as its .json says" if report.described else "no .json to compare with"
    return (
        f"{prefix}: sound, {compared}; {report.documents} documents, {report.sequences} sequences, "
        f"{report.tokens} tokens, highest id {report.highest_id}"
    )


def main(argv: Sequence[str]) -> None:
    with user_errors(os.environ):
        if argv[:1] == ["verify"]:
            if len(argv) != 2:
                raise ValueError("verify takes one prefix: verify P_text_document would work")
            print(_verify(argv[1]))
        else:
            print(preprocess(parse(Settings, argv, os.environ)), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
