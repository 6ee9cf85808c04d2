"""Documents from a column of text, of a map-style `datasets.Dataset` or of parquet files.

| what is read | how | text of a random row |
|---|---|---|
| a folder of `save_to_disk` | memory-mapped Arrow | 10 us |
| parquet that fits in the cache | a row group is decoded once | 20 us |
| other parquet | a row group is decoded for each row | 1 to 200 ms |
| `load_dataset(name or path)` | memory-mapped Arrow, which it copies to its cache once | 10 us |

Parquet has no access by row: reading a row decodes its whole row group, and in shuffled order every
sample is in another group. That takes 1 ms for a group of 0.3 MB of text, 2 ms for 3 MB, 30 ms for
28 MB and 200 ms for the 100 MB that `datasets` writes by default (one core, snappy, 110 MB in all).
The groups used last are kept, up to 256 MiB. If the column is larger, `--dataset-name` on the same
files is faster: it copies them to Arrow once.

Each source is read once as a whole (some 0.5 s per GB if the disk is as fast), to find the rows
without text and to hash the others. The result is kept beside the data and is valid while sizes and
modification times of the files stay the same. The hash is of the texts in their order, not of the
files: `save_to_disk` writes equal texts to different files whenever its version, shards, or an
index mapping differ.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.files import DataError, ScanCache
from megatron.libraries import Library

datasets, pa = Library("datasets"), Library("pyarrow")
pc, pq = Library("pyarrow.compute"), Library("pyarrow.parquet")

BATCH_ROWS = 1000  # rows read together in the one pass
CACHED_BYTES = 256 << 20  # of decoded row groups
LARGE_GROUP = 4 << 20  # bytes of text; decoding a larger group for each sample is slow


class TextColumn(Protocol):
    """A column of text, row by row and as a whole."""

    def __len__(self) -> int:
        """Rows."""
        ...

    def __getitem__(self, row: int) -> str | None:
        """The text of a row that has one; safe in any thread."""
        ...

    def batches(self) -> Iterator[Any]:
        """pyarrow arrays of the texts of all rows, in their order."""
        ...


class ColumnDocuments:
    """The rows of a column that hold text, numbered in their order.

    Implements megatron.data.documents.Documents. Rows without text (null, empty, blank, not UTF-8)
    are left out.
    """

    def __init__(self, name: str, column: TextColumn, *, cache: ScanCache | None = None) -> None:
        """name: flag and value, for messages. cache: where the result of the pass is kept.

        Warns of rows without text; raises ValueError if no row has text.
        """
        self.name, self._column = name, column
        found = _scan(column) if cache is None else cache.find(partial(_scan, column))
        digest, without = str(found["digest"]), found["without"]
        self.content = f"SHA-256 {digest} of texts"
        self.num_documents = len(column) - len(without)
        # Number of documents before each row that is left out.
        self._before = without - np.arange(len(without))
        if not self.num_documents:
            raise ValueError(
                f"{name} holds no text in any of its {len(column)} rows; another --text-column, or "
                "other data, would work"
            )
        if len(without):
            warnings.warn(
                f"{name}: {len(without)} of {len(column)} rows hold no text and are left out; the "
                f"first is row {without[0]}",
                stacklevel=3,
            )

    def row(self, number: int) -> int:
        """Row of the document of this number, counted from 0."""
        return number + int(np.searchsorted(self._before, number, side="right"))

    def place(self, number: int) -> str:
        return f"{self.name}, row {self.row(number)}"

    def text(self, number: int) -> str:
        """Raises DataError if the column has changed."""
        if (text := self._column[self.row(number)]) is None:
            raise DataError(
                f"{self.place(number)} holds no text: it has changed since the whole was read; "
                "files that stay as they are work"
            )
        return text


def _scan(column: TextColumn) -> dict[str, NDArray[Any]]:
    """One pass over the column. digest: SHA-256, in hex, of the texts; without: int64, rows without
    text.

    Lengths and bytes have separate hashes, so that the result does not depend on batches.
    """
    sizes, content = hashlib.sha256(), hashlib.sha256()
    without, row = [np.empty(0, np.int64)], 0
    for batch in column.batches():
        texts = batch.cast(pa.large_string())
        good = _has_text(texts)
        if not good.all():
            without.append(row + np.flatnonzero(~good))
            texts = texts.filter(pa.array(good))
        row += len(batch)
        sizes.update(pc.binary_length(texts).to_numpy(zero_copy_only=False).tobytes())
        _, offsets, values = texts.buffers()
        if len(texts):
            ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
            content.update(memoryview(values)[ends[0] : ends[-1]])
    whole = hashlib.sha256(sizes.digest() + content.digest())
    return {"digest": np.array(whole.hexdigest()), "without": np.concatenate(without)}


def _has_text(texts: Any) -> NDArray[np.bool_]:
    """Whether each text is not null, is UTF-8, and holds more than white space."""
    try:
        blank = pc.or_kleene(pc.utf8_is_space(texts), pc.equal(pc.binary_length(texts), 0))
    except pa.ArrowInvalid:  # not UTF-8 somewhere in the batch
        if len(texts) == 1:
            return np.array([False])
        half = len(texts) // 2
        return np.concatenate([_has_text(texts[:half]), _has_text(texts[half:])])
    return ~pc.fill_null(blank, True).to_numpy(zero_copy_only=False)


class DatasetColumn:
    """A column of a map-style `datasets.Dataset`, which may be shuffled or selected."""

    def __init__(self, dataset: Any, column: str, name: str) -> None:
        """Raises ValueError, naming the flag, if the dataset is not map-style or the column does
        not hold text."""
        if not isinstance(dataset, datasets.Dataset):
            raise ValueError(
                f"{name} is a {type(dataset).__name__}, which has no access by row; a file of "
                "JSON lines that `python -m tools.stream_to_jsonl` writes from it works"
            )
        check_column(column, dataset.features.arrow_schema, name)
        self._dataset = dataset.select_columns([column]).with_format(None)
        self._name = column

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> str | None:
        found: str | None = self._dataset[row][self._name]
        return found

    def batches(self) -> Iterator[Any]:
        for table in self._dataset.with_format("arrow").iter(BATCH_ROWS):
            yield table.column(0).combine_chunks()


class ParquetColumn:
    """A column of parquet files, one after another; keeps the row groups used last decoded."""

    def __init__(
        self, files: Sequence[Path], column: str, name: str, cached_bytes: int = CACHED_BYTES
    ) -> None:
        """cached_bytes: most bytes of decoded text kept; the row group read last always is.

        Warns if most samples will decode a large row group.
        """
        self._files, self._column, self._cached_bytes = files, column, cached_bytes
        self._names = [name if len(files) == 1 else f"{name} ({file.name})" for file in files]
        self._metadata = list[Any]()
        for number, file in enumerate(files):
            with self._named_errors(number):
                self._metadata.append(pq.read_metadata(file, memory_map=True))
        for each, file_name in zip(self._metadata, self._names, strict=True):
            check_column(column, each.schema.to_arrow_schema(), file_name)
        groups = [
            (file, group, each.row_group(group).num_rows)
            for file, each in enumerate(self._metadata)
            for group in range(each.num_row_groups)
        ]
        self._groups = [(file, group) for file, group, _ in groups]
        self._ends = np.array(list(accumulate(rows for *_, rows in groups)), np.int64)
        self._decoded: OrderedDict[int, Any] = OrderedDict()
        self._decoded_bytes = 0
        self._lock = threading.Lock()
        sizes = [self._text_bytes(file, group) for file, group in self._groups]
        mean = sum(sizes) // max(1, len(sizes))
        if len(sizes) > 1 and sum(sizes) > cached_bytes and mean > LARGE_GROUP:
            warnings.warn(
                f"{name}: a shuffled sample decodes a row group of {mean >> 20} MiB of text, some "
                f"{2 * (mean >> 20)} ms; --dataset-name in place of --data-path, which copies the "
                "text to Arrow once, or smaller row groups are faster",
                stacklevel=4,
            )

    def _text_bytes(self, file: int, group: int) -> int:
        found = self._metadata[file].row_group(group)
        columns = (found.column(each) for each in range(found.num_columns))
        return sum(
            each.total_uncompressed_size for each in columns if each.path_in_schema == self._column
        )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> str | None:
        number = int(np.searchsorted(self._ends, row, side="right"))
        texts = self._decode(number)
        found: str | None = texts[row - int(self._ends[number]) + len(texts)].as_py()
        return found

    def _decode(self, number: int) -> Any:
        """The texts of a row group.

        Decoding runs outside the lock: two threads that need the same group at the same time both
        decode it.
        """
        with self._lock:
            if number in self._decoded:
                self._decoded.move_to_end(number)
                return self._decoded[number]
        file, group = self._groups[number]
        with self._open(file) as parquet:
            found = parquet.read_row_group(group, columns=[self._column], use_threads=False)
        texts = found.column(0)
        with self._lock:
            if number not in self._decoded:
                self._decoded[number] = texts
                self._decoded_bytes += texts.nbytes
            while self._decoded_bytes > self._cached_bytes and len(self._decoded) > 1:
                self._decoded_bytes -= self._decoded.popitem(last=False)[1].nbytes
        return texts

    @contextmanager
    def _open(self, file: int) -> Iterator[Any]:
        """A new reader, because readers are not thread-safe; the footer is not read again.

        Memory-mapped: only the text column's pages are read.
        """
        known = self._metadata[file]
        with (
            self._named_errors(file),
            pq.ParquetFile(self._files[file], metadata=known, memory_map=True) as parquet,
        ):
            yield parquet

    @contextmanager
    def _named_errors(self, file: int) -> Iterator[None]:
        """Turns read errors into DataError, which names the flag and the file."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{self._names[file]} is damaged, or has changed: {reason}; the file written again "
                "works"
            ) from error

    def batches(self) -> Iterator[Any]:
        for file in range(len(self._files)):
            with self._open(file) as parquet:
                wanted = {"batch_size": BATCH_ROWS, "columns": [self._column]}
                for batch in parquet.iter_batches(**wanted, use_threads=False):
                    yield batch.column(0)


def check_column(column: str, schema: Any, name: str) -> None:
    """ValueError, naming the text columns, if the Arrow schema has no such column of text."""

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return any(
            test(kind)
            for test in (
                pa.types.is_string,
                pa.types.is_large_string,
                pa.types.is_string_view,
                pa.types.is_null,
            )
        )

    texts = [field.name for field in schema if is_text(field.type)]
    if column not in texts:
        found = f" (it is {schema.field(column).type})" if column in schema.names else ""
        there = (
            f"but {', '.join(texts)}; --text-column {texts[0]} works" if texts else "nor another"
        )
        raise ValueError(
            f"--text-column {column}: {name} has no such column of text{found}, {there}"
        )
