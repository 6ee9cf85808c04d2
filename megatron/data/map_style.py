"""Documents from a column of text of map-style data of `datasets`, opened by the flags.

| flag | data | read from |
|---|---|---|
| --data-path | a folder of `save_to_disk` | its Arrow files, in place |
| --data-path | parquet, a file or a folder | a copy of the text column in the cache of `datasets` |
| --dataset-name | an argument of `load_dataset` | a copy of all columns in the same cache |

Arrow is memory-mapped: the text of a random row takes 10 us. Parquet has no access by row: a row
decodes its whole row group, 200 ms for the 100 MB that `datasets` writes by default (one core,
snappy), so that it is copied once. A copy is valid while path, size and modification time stay the
same.

The texts are read once as a whole (some 0.5 s per GB if the disk is as fast), to find the rows
without text and to hash the others. The result is kept beside the data and is valid while sizes and
modification times of the files stay the same. The hash is of the texts in their order, not of the
files: `save_to_disk` writes equal texts to different files whenever its version, shards, or an
index mapping differ.

`datasets` is imported only where such data are opened, which takes half a second.
"""

from __future__ import annotations

import glob
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.cache import Entries, scan_once
from megatron.data.files import DataError
from megatron.data.json_lines import NOT_SHARDS, warn_not_read
from megatron.errors import UsageError
from megatron.libraries import Library

datasets, pa = Library("datasets"), Library("pyarrow")
pc, pq = Library("pyarrow.compute"), Library("pyarrow.parquet")

DATA_PATH, DATASET_NAME = "--data-path", "--dataset-name"
BATCH_ROWS = 1000  # rows read together in the one pass
DEFAULT_SPLIT = "train"
ENDINGS = (".txt", ".jsonl", ".json", ".csv", ".parquet")  # of files with texts


class ColumnDocuments:
    """The rows of a column that hold text, numbered in their order.

    Implements megatron.data.documents.Documents. Rows without text (null, empty, blank, not UTF-8)
    are left out.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        column: str,
        cache: tuple[Path, Sequence[Path], Sequence[str]] | None = None,
    ) -> None:
        """name: flag and value, for messages. dataset: a map-style `datasets.Dataset`, which may be
        shuffled or selected. cache: of the one pass, the first arguments of scan_once.

        Warns of rows without text; raises UsageError if the dataset is not map-style, if the column
        does not hold text, and if no row does.
        """
        flag, _, value = name.partition(" ")
        if not isinstance(dataset, datasets.Dataset):
            allowed = f"a data set with access by row, not a {type(dataset).__name__}; "
            allowed += "`python tools/stream_to_jsonl.py` makes JSON lines of it"
            raise UsageError(flag, value or None, allowed)
        check_column(column, dataset.features.arrow_schema, name)
        self.name, self._column = name, column
        self._rows = dataset.select_columns([column]).with_format(None)
        scan = partial(_scan, self._rows)
        texts = dict(scan()) if cache is None else scan_once(*cache, scan)
        without = texts["without"]
        self.content = f"SHA-256 {texts['digest']} of texts"
        self.num_documents = len(dataset) - len(without)
        # Number of documents before each row that is left out.
        self._before = without - np.arange(len(without))
        if not self.num_documents:
            allowed = f"of text in one of {len(dataset)} rows at least, or read by another {{}}"
            raise UsageError(flag, value or None, allowed, "--text-column")
        if len(without):
            warnings.warn(
                f"{name}: {len(without)} of {len(dataset)} rows hold no text and are left out; the "
                f"first is row {without[0]}",
                stacklevel=3,
            )

    def row(self, number: int) -> int:
        """Row of the document of this number, counted from 0."""
        return number + int(np.searchsorted(self._before, number, side="right"))

    def location(self, number: int) -> str:
        return f"{self.name}, row {self.row(number)}"

    def text(self, number: int) -> str:
        """Raises DataError if the column has changed."""
        text: str | None = self._rows[self.row(number)][self._column]
        if text is None:
            row = self.location(number)
            raise DataError(f"{row} has changed since it was opened; unchanged files work")
        return text


def _scan(rows: Any) -> Entries:
    """One pass over a dataset of one column. digest: SHA-256, in hex, of the texts; without: int64,
    rows without text.

    Lengths and bytes have separate hashes, so that the result does not depend on batches.
    """
    sizes, content = hashlib.sha256(), hashlib.sha256()
    without, row = [np.empty(0, np.int64)], 0
    for table in rows.with_format("arrow").iter(BATCH_ROWS):
        texts = table.column(0).combine_chunks().cast(pa.large_string())
        has_text = _has_text(texts)
        without.append(row + np.flatnonzero(~has_text))
        row += len(texts)
        if not has_text.all():
            texts = texts.filter(pa.array(has_text))
        sizes.update(pc.binary_length(texts).to_numpy(zero_copy_only=False).tobytes())
        _, offsets, values = texts.buffers()
        if len(texts):
            ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
            content.update(memoryview(values)[ends[0] : ends[-1]])
    yield "digest", hashlib.sha256(sizes.digest() + content.digest()).hexdigest()
    yield "without", np.concatenate(without)


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


def check_column(column: str, schema: Any, name: str) -> None:
    """UsageError, naming the text columns, if the Arrow schema has no such column of text."""

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        strings = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view
        return any(test(kind) for test in (*strings, pa.types.is_null))

    texts = [field.name for field in schema if is_text(field.type)]
    if column not in texts:
        kind = f" (it is {schema.field(column).type})" if column in schema.names else ""
        allowed = f"a column of text of {name}{kind}: {', '.join(texts) or 'there is none'}"
        raise UsageError("--text-column", column, allowed, works=texts[0] if texts else ())


def names_map_style(path: str) -> bool:
    """Whether a path of --data-path is a folder or a parquet file."""
    return Path(path).is_dir() or path.endswith(".parquet")


def open_map_style(
    path: str, *, column: str = "text", split: str | None = None, config: str | None = None
) -> ColumnDocuments:
    """The documents of a folder of `save_to_disk`, of a parquet file, or of a folder of these.

    split: the split of a folder that holds several, by default "train". config: the configuration
    of a folder of parquet whose README.md names several. Files are found as by
    `datasets.load_dataset`. Raises UsageError for anything else.
    """
    source, name = Path(path), f"{DATA_PATH} {path}"
    if source.is_file():
        check_no_choice(name, split=split, config=config)
        return _open_parquet(source, [source], column, "", name)
    if not source.is_dir():
        raise UsageError(DATA_PATH, path, "a file or folder that exists")
    if is_saved(source):
        check_no_choice(name, config=config)
        try:
            dataset = datasets.load_from_disk(source, keep_in_memory=False)
        except (ValueError, OSError, KeyError) as error:
            allowed = f"whole and undamaged, as the folder saved again is ({one_line(error)})"
            raise UsageError(DATA_PATH, path, allowed) from error
        if isinstance(dataset, datasets.DatasetDict):
            split = choose_split(split, list(dataset), name)
            dataset = dataset[split]
        else:
            check_no_choice(name, split=split, only=dataset.split)
        return _open_dataset(dataset, source, column, split or "", name)
    # No data is copied.
    with TemporaryDirectory() as cache, one_line_errors(DATA_PATH, path, config):
        try:
            builder = datasets.load_dataset_builder(
                str(source.resolve()), name=config, cache_dir=cache
            )
        except datasets.data_files.EmptyDatasetError as error:
            allowed = "a folder of datasets' save_to_disk or of *.parquet, or a file named *.jsonl "
            raise UsageError(DATA_PATH, path, f"{allowed}or *.parquet") from error
    files = {key: list(map(Path, paths)) for key, paths in builder.config.data_files.items()}
    if not all(file.suffix == ".parquet" for paths in files.values() for file in paths):
        raise UsageError(DATA_PATH, path, "a folder of *.parquet", works=(DATASET_NAME, path))
    split = choose_split(split, list(files), name)
    return _open_parquet(source, files[split], column, f"{config or ''} {split}", name)


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))


def _open_parquet(
    path: Path, files: Sequence[Path], column: str, selection: str, name: str
) -> ColumnDocuments:
    """Copies the column of each file to Arrow, unless that was done before.

    Raises UsageError, naming the file, for one that is damaged.
    """
    values = [str(path) if len(files) == 1 else f"{path} ({file.name})" for file in files]
    rows = []
    for file, value in zip(files, values, strict=True):  # all of them before the first copy
        with one_line_errors(DATA_PATH, value):
            metadata = pq.read_metadata(file)
        check_column(column, metadata.schema.to_arrow_schema(), f"{DATA_PATH} {value}")
        rows.append(metadata.num_rows)
    features = datasets.Features({column: datasets.Value("large_string")})
    how = {"columns": [column], "features": features, "batch_size": BATCH_ROWS}
    copies = [datasets.Dataset.from_dict({column: []}, features)]
    for file, value, count in zip(files, values, rows, strict=True):
        if count:  # `datasets` copies no file without rows
            with one_line_errors(DATA_PATH, value):
                pattern = glob.escape(str(file.absolute()))
                size = f"{file.stat().st_size}-bytes"  # path and time are in the copy's key already
                copies.append(datasets.Dataset.from_parquet(pattern, config_name=size, **how))
    whole = datasets.concatenate_datasets(copies)
    return ColumnDocuments(name, whole, column, (path, files, (column, selection)))


def _open_dataset(
    dataset: Any, beside: Path | None, column: str, selection: str, name: str
) -> ColumnDocuments:
    """beside: path next to which the result of the pass is cached; None for the first Arrow
    file."""
    files = [Path(each["filename"]) for each in dataset.cache_files]
    cache = (beside or files[0], files, (column, selection)) if files else None
    return ColumnDocuments(name, dataset, column, cache)


def choose_split(split: str | None, splits: Sequence[str], name: str) -> str:
    """The split, by default "train"; UsageError, naming the others, if it is not there."""
    chosen = split or DEFAULT_SPLIT
    if chosen not in splits:
        allowed = f"a split of {name}: {', '.join(splits)}"
        raise UsageError("--dataset-split", chosen, allowed, works=splits[0])
    return chosen


def check_no_choice(
    name: str, *, split: str | None = None, config: str | None = None, only: object = None
) -> None:
    """UsageError if a configuration is asked for, of data that have none, or a split, of data that
    are the split `only`, or None for no split."""
    if config is not None:
        raise UsageError("--dataset-config", config, f"left out: {name} has no configurations")
    if split is not None and split != str(only):
        kind = "not divided into splits" if only is None else f"the split {only}"
        raise UsageError("--dataset-split", split, f"left out: {name} is {kind}")


def open_named(
    name: str, *, config: str | None = None, split: str | None = None, column: str = "text"
) -> ColumnDocuments:
    """The documents of `datasets.load_dataset`, by row; arguments as in load_named."""
    dataset = load_named(name, config=config, split=split)
    selection = f"{config or ''} {split or DEFAULT_SPLIT}"
    return _open_dataset(dataset, None, column, selection, f"{DATASET_NAME} {name}")


def load_named(
    name: str, *, config: str | None = None, split: str | None = None, streaming: bool = False
) -> Any:
    """`datasets.load_dataset` of a data set on the hub, or of a local folder or file.

    split: by default "train"; also "train[:10%]" or "train+test". Returns a datasets.Dataset, or
    with `streaming` an IterableDataset. Raises UsageError in one line.
    """
    path = Path(name)
    split = split or DEFAULT_SPLIT
    if is_saved(path):
        raise UsageError(DATASET_NAME, name, "no folder of save_to_disk", works=(DATA_PATH, name))
    where: dict[str, Any] = {"path": name}
    if path.exists():  # resolved, as the library takes the name of "." to be empty
        path = path.resolve()
        where = {"path": str(path)}
        if path.is_file():  # one of the data files of its folder
            where = {"path": str(path.parent), "data_files": [path.name]}
    with one_line_errors(DATASET_NAME, name, config):
        builder = datasets.load_dataset_builder(**where, name=config)
        if hasattr(builder.config, "sample_by"):  # by default text files are read by lines
            builder = datasets.load_dataset_builder(**where, name=config, sample_by="document")
        if path.is_dir() and builder.config.name == "default":  # it reads one kind per folder
            splits = (builder.config.data_files or {}).values()
            read = {Path(file) for files in splits for file in files}
            no_texts = {*NOT_SHARDS, "dataset_infos.json"}  # of corpus steps, and of `datasets`
            others = (
                str(file.relative_to(path))
                for file in sorted(path.rglob("*"))
                if file.suffix in ENDINGS and file.name not in no_texts and file not in read
            )
            works = "a folder with files of one kind is read whole"
            warn_not_read(f"{DATASET_NAME} {name}", others, works)
        if not streaming:
            builder.download_and_prepare()
    try:
        open_split = builder.as_streaming_dataset if streaming else builder.as_dataset
        return open_split(split=split)
    except StopIteration as error:  # of the library, for a file without a byte
        raise UsageError(DATASET_NAME, name, "data with a row") from error
    except ValueError as error:  # the library names the splits that are there
        allowed = f"a split of {DATASET_NAME} {name} ({one_line(error)})"
        raise UsageError("--dataset-split", split, allowed) from error


@contextmanager
def one_line_errors(flag: str, value: str, config: str | None = None) -> Iterator[None]:
    """Turns errors of `datasets`, while it finds or copies data, into UsageError of the flag."""
    try:
        yield
    except UsageError:
        raise
    except ConnectionError as error:
        allowed = f"a local path where the hub cannot be reached ({one_line(error)})"
        raise UsageError(flag, value, allowed) from error
    except (OSError, datasets.exceptions.DatasetsError, pa.ArrowException) as error:
        allowed = f"data that can be read ({one_line(error.__cause__ or error)})"
        raise UsageError(flag, value, allowed) from error
    except RuntimeError as error:  # a folder with a script
        raise UsageError(flag, value, f"a folder of data files ({one_line(error)})") from error
    except ValueError as error:  # the library names the configs that are there
        if config:
            allowed = f"a configuration of {flag} {value} ({one_line(error)})"
            raise UsageError("--dataset-config", config, allowed) from error
        allowed = "given with a {} that it has ({})"
        raise UsageError(flag, value, allowed, "--dataset-config", one_line(error)) from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
