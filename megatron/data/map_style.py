"""Opens data of `datasets` by the flags: saved folders, parquet, `load_dataset`.

--data-path names a folder of `save_to_disk` or parquet files, which are not copied; --dataset-name
is the argument of `datasets.load_dataset`, which copies the data to Arrow in its cache once.
`datasets` is imported only where one of these is opened, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.data.columns import ColumnDocuments, DatasetColumn, ParquetColumn
from megatron.data.files import ScanCache
from megatron.data.json_lines import NOT_SHARDS, warn_not_read
from megatron.libraries import Library

datasets, pa = Library("datasets"), Library("pyarrow")

DEFAULT_SPLIT = "train"
ENDINGS = (".txt", ".jsonl", ".json", ".csv", ".parquet")  # of files with texts


def names_map_style(path: str) -> bool:
    """Whether a path of --data-path is a folder or a parquet file."""
    return Path(path).is_dir() or path.endswith(".parquet")


def open_map_style(
    path: str, *, column: str = "text", split: str | None = None, config: str | None = None
) -> ColumnDocuments:
    """The documents of a folder of `save_to_disk`, of a parquet file, or of a folder of these.

    split: the split of a folder that holds several, by default "train". config: the configuration
    of a folder of parquet whose README.md names several. Files are found as by
    `datasets.load_dataset`. Raises ValueError, naming the flag, for anything else.
    """
    folder, name = Path(path), f"--data-path {path}"
    if folder.is_file():
        check_only_split(split, None, name)
        check_no_config(config, name)
        return _open_parquet(folder, [folder], column, "", name)
    if not folder.is_dir():
        raise ValueError(f"{name}: there is no such file")
    if is_saved(folder):
        check_no_config(config, name)
        return _open_saved(folder, column, split, name)
    files = _find_files(folder, config, name)
    if not all(file.suffix == ".parquet" for each in files.values() for file in each):
        raise ValueError(f"{name} is no folder of *.parquet; --dataset-name {path} reads it")
    chosen = choose_split(split, list(files), name)
    return _open_parquet(folder, files[chosen], column, f"{config or ''} {chosen}", name)


def _find_files(folder: Path, config: str | None, name: str) -> dict[str, list[Path]]:
    """The files of each split of a configuration; nothing is copied."""
    with TemporaryDirectory() as cache, one_line_errors(name, config):
        try:
            builder = datasets.load_dataset_builder(
                str(folder.resolve()), name=config, cache_dir=cache
            )
        except datasets.data_files.EmptyDatasetError as error:
            raise ValueError(
                f"{name} is neither a folder of datasets' save_to_disk nor one of *.parquet; a "
                "file named *.jsonl or *.parquet works"
            ) from error
    return {split: list(map(Path, files)) for split, files in builder.config.data_files.items()}


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))


def _open_parquet(
    path: Path, files: Sequence[Path], column: str, selection: str, name: str
) -> ColumnDocuments:
    texts = ParquetColumn(files, column, name)
    return ColumnDocuments(name, texts, cache=ScanCache(path, files, column, selection))


def _open_saved(folder: Path, column: str, split: str | None, name: str) -> ColumnDocuments:
    try:
        found = datasets.load_from_disk(folder, keep_in_memory=False)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(
            f"{name} is damaged or not whole: {one_line(error)}; the folder saved again works"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        found = found[split := choose_split(split, list(found), name)]
    else:
        check_only_split(split, found.split, name)
    return _open_dataset(found, folder, column, split or "", name)


def _open_dataset(
    dataset: Any, beside: Path | None, column: str, selection: str, name: str
) -> ColumnDocuments:
    """beside: path next to which the result of the pass is kept; None for the first Arrow file."""
    texts = DatasetColumn(dataset, column, name)
    files = [Path(each["filename"]) for each in dataset.cache_files]
    place = beside or next(iter(files), None)
    cache = ScanCache(place, files, column, selection) if place and files else None
    return ColumnDocuments(name, texts, cache=cache)


def choose_split(split: str | None, known: Sequence[str], name: str) -> str:
    """The split, by default "train"; ValueError, naming the known ones, if it is not known."""
    chosen = split or DEFAULT_SPLIT
    if chosen not in known:
        raise ValueError(
            f"--dataset-split {chosen}: {name} has {', '.join(known)}; "
            f"--dataset-split {known[0]} works"
        )
    return chosen


def check_only_split(split: str | None, only: object, name: str) -> None:
    """ValueError if a split is asked for and the data are another split, or have none."""
    if split is not None and split != str(only):
        found = "not divided into splits" if only is None else f"the split {only}"
        raise ValueError(f"--dataset-split {split}: {name} is {found}; leave out --dataset-split")


def check_no_config(config: str | None, name: str) -> None:
    """ValueError if a configuration is asked for and the data have none."""
    if config is not None:
        raise ValueError(
            f"--dataset-config {config}: {name} has no configurations; leave out --dataset-config"
        )


def open_named(
    name: str, *, config: str | None = None, split: str | None = None, column: str = "text"
) -> ColumnDocuments:
    """The documents of `datasets.load_dataset`, by row; arguments as in load_named."""
    dataset = load_named(name, config=config, split=split)
    selection = f"{config or ''} {split or DEFAULT_SPLIT}"
    return _open_dataset(dataset, None, column, selection, f"--dataset-name {name}")


def load_named(
    name: str, *, config: str | None = None, split: str | None = None, streaming: bool = False
) -> Any:
    """`datasets.load_dataset` of a data set on the hub, or of a local folder or file.

    split: by default "train"; also "train[:10%]" or "train+test". Returns a datasets.Dataset, or
    with `streaming` an IterableDataset. Raises ValueError, naming the flag, in one line.
    """
    flag, wanted, path = f"--dataset-name {name}", split or DEFAULT_SPLIT, Path(name)
    if is_saved(path):
        raise ValueError(f"{flag} is a folder of save_to_disk; --data-path {name} works")
    where: dict[str, Any] = {"path": name}
    if path.exists():  # resolved, as the library takes the name of "." to be empty
        path = path.resolve()
        where = {"path": str(path)}
        if path.is_file():  # one of the data files of its folder
            where = {"path": str(path.parent), "data_files": [path.name]}
    with one_line_errors(flag, config):
        builder = datasets.load_dataset_builder(**where, name=config)
        if hasattr(builder.config, "sample_by"):  # by default text files are read by lines
            builder = datasets.load_dataset_builder(**where, name=config, sample_by="document")
        if path.is_dir() and builder.config.name == "default":
            _warn_of_others(path, builder.config.data_files or {}, flag)
        if not streaming:
            builder.download_and_prepare()
    try:
        read = builder.as_streaming_dataset if streaming else builder.as_dataset
        return read(split=wanted)
    except ValueError as error:  # the library names the splits that are there
        raise ValueError(f"--dataset-split {wanted} of {flag}: {one_line(error)}") from error


def _warn_of_others(folder: Path, splits: Mapping[Any, Sequence[str]], flag: str) -> None:
    """Warns of text files that `datasets` leaves out, because it reads one kind per folder."""
    read = {Path(file) for files in splits.values() for file in files}
    found = (file for file in sorted(folder.rglob("*")) if file.suffix in ENDINGS)
    no_texts = {*NOT_SHARDS, "dataset_infos.json"}  # of corpus steps, and of `datasets`
    others = (str(file.relative_to(folder)) for file in found if file not in read)
    others = (name for name in others if Path(name).name not in no_texts)
    warn_not_read(flag, others, "a folder with files of one kind is read whole")


@contextmanager
def one_line_errors(flag: str, config: str | None) -> Iterator[None]:
    """Turns errors of `datasets`, while it finds or copies data, into ValueError of the flag."""
    try:
        yield
    except ConnectionError as error:
        raise ValueError(
            f"{flag} is no local folder, and the hub cannot be reached ({one_line(error)}); the "
            "path of a local copy works"
        ) from error
    except RuntimeError as error:  # a folder with a script
        raise ValueError(f"{flag}: {one_line(error)}; a folder of data files works") from error
    except (OSError, datasets.exceptions.DatasetsError, pa.ArrowException) as error:
        raise ValueError(f"{flag}: {one_line(error.__cause__ or error)}") from error
    except ValueError as error:  # the library names the configs that are there
        if str(error).startswith(flag):
            raise
        given = f"--dataset-config {config} of {flag}" if config else f"{flag} --dataset-config C"
        raise ValueError(f"{given}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
