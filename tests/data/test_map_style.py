"""Documents of `datasets` and of parquet: the same texts, numbers and identity from each."""

import json
import os
import random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.data.documents import open_documents
from megatron.data.map_style import ColumnDocuments, open_map_style, open_named
from megatron.errors import UsageError
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("datasets_cache")

TEXTS = [f"text {number} " * (number % 5 + 1) for number in range(40)]
# Rows that are left out, at the beginning, in a row, and at the end.
ROWS = [None, *TEXTS[:3], "", "\u2003\n", *TEXTS[3:], " "]

SPLITS = ("train", "test")

Rows = Sequence[str | None]


def table(rows: Rows) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"id": list(range(len(rows))), "text": rows})


def saved(folder: Path, rows: Rows = ROWS, shards: int = 3) -> Path:
    table(rows).save_to_disk(folder / "saved", num_shards=shards)
    return folder / "saved"


def saved_splits(folder: Path, rows: Rows = ROWS) -> Path:
    splits = {"train": table(rows), "test": table(["of test"])}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")
    return folder / "splits"


def parquet(file: Path, rows: Rows = ROWS, group: int = 7, *, is_coded: bool = False) -> Path:
    """is_coded: as a column of categories is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = pa.array(rows, pa.string())
    columns = {"text": text.dictionary_encode() if is_coded else text, "id": range(len(rows))}
    pq.write_table(pa.table(columns), file, row_group_size=group, compression="none")
    return file


def parquet_folder(folder: Path, rows: Rows = ROWS) -> Path:
    """Named as on the hub, two files for training and one of another split."""
    for number, part in enumerate([rows[:11], rows[11:]]):
        parquet(folder / "hub" / "data" / f"train-{number:05}-of-00002.parquet", part)
    parquet(folder / "hub" / "data" / "test-00000-of-00001.parquet", ["of test"])
    return folder / "hub"


def configurations(folder: Path) -> Path:
    """A clone of a data set on the hub, with two configurations."""
    lines = ["---", "configs:"]
    for name, rows in (("one", TEXTS), ("two", ["of two"])):
        parquet(folder / "clone" / name / "train-00000-of-00001.parquet", rows)
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train"]
        lines += [f"    path: {name}/train-*"]
    (folder / "clone" / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder / "clone"


def json_folder(folder: Path, rows: Rows = ROWS) -> Path:
    (folder / "lines").mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}) for text in rows]
    (folder / "lines" / "train.jsonl").write_text("\n".join(lines))
    (folder / "lines" / "test.jsonl").write_text('{"text": "of test"}')
    return folder / "lines"


def shuffled(rows: Rows = ROWS) -> ColumnDocuments:
    """A map-style object of the user's own, with a mapping of indices."""
    order = random.Random(1).sample(range(len(rows)), len(rows))
    laid = table([rows[number] for number in order])
    dataset = laid.select([order.index(number) for number in range(len(rows))])
    return ColumnDocuments("mine", dataset, "text")


SOURCES: dict[str, Callable[[Path], ColumnDocuments]] = {
    "saved": lambda to: open_map_style(str(saved(to))),
    "saved in another way": lambda to: open_map_style(str(saved(to, shards=1))),
    "saved splits": lambda to: open_map_style(str(saved_splits(to))),
    "parquet": lambda to: open_map_style(str(parquet(to / "a.parquet"))),
    "parquet of one group": lambda to: open_map_style(str(parquet(to / "b.parquet", group=99))),
    "parquet of categories": lambda to: open_map_style(
        str(parquet(to / "c.parquet", is_coded=True))
    ),
    "parquet folder": lambda to: open_map_style(str(parquet_folder(to))),
    "parquet folder, named": lambda to: open_named(str(parquet_folder(to))),
    "JSON folder": lambda to: open_named(str(json_folder(to))),
    "JSON file": lambda to: open_named(str(json_folder(to) / "train.jsonl")),
    "shuffled object": lambda to: shuffled(),
}


def texts_of(documents: ColumnDocuments) -> list[str]:
    return [documents.text(number) for number in range(documents.num_documents)]


@pytest.mark.parametrize("source", SOURCES)
def test_same_texts_of_every_source(source: str, tmp_path: Path, datasets_cache: Path) -> None:
    with pytest.warns(UserWarning, match="4 of 44 "):
        documents = SOURCES[source](tmp_path)
    assert texts_of(documents) == TEXTS
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(documents.text, range(len(TEXTS)))] == TEXTS
    assert [ROWS[documents.row(number)] for number in range(len(TEXTS))] == TEXTS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert documents.content == open_map_style(str(saved(tmp_path / "w", TEXTS))).content
    is_copied = source.startswith(("JSON", "parquet"))
    assert any(datasets_cache.rglob("*.arrow")) == is_copied  # nothing else is


@pytest.mark.parametrize(
    "other",
    [["ab", "c"], ["a", "c", "b"], ["a", "b"], ["abc"], ["a", "b", "C"], ["a", "b", "c", "d"]],
)
def test_identity(tmp_path: Path, other: list[str]) -> None:
    contents = {
        open_map_style(str(parquet(tmp_path / f"{len(rows)}.parquet", rows))).content
        for rows in (["a", "b", "c"], other)
    }
    assert len(contents) == 2


def test_splits(tmp_path: Path, datasets_cache: Path) -> None:
    for folder in map(str, (saved_splits(tmp_path), parquet_folder(tmp_path))):
        assert texts_of(open_map_style(folder, split="test")) == ["of test"]
    named = str(json_folder(tmp_path, TEXTS))
    assert texts_of(open_named(named, split="test")) == ["of test"]
    # All from the same Arrow file.
    parts = {"train": TEXTS, "train[:3]": TEXTS[:3], "train[1:4]": TEXTS[1:4]}
    for split, texts in parts.items():
        documents = open_named(named, split=split)
        assert texts_of(documents) == texts
        alone = parquet(tmp_path / f"{len(texts)}{texts[0]}.parquet", texts)
        assert documents.content == open_map_style(str(alone)).content
    table(["x"]).save_to_disk(tmp_path / "one")
    assert texts_of(open_map_style(str(tmp_path / "one"))) == ["x"]


@pytest.mark.parametrize("kind", [saved, lambda to, rows: parquet(to / "a.parquet", rows)])
def test_memory(tmp_path: Path, kind: Callable[[Path, Rows], Path]) -> None:
    path = str(kind(tmp_path, ["some text" * 100_000] * 20))
    before = pa.total_allocated_bytes()
    documents = open_map_style(path)
    assert documents.num_documents == 20
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    good = [f"row {number}".encode() for number in range(2500)]
    rows = [b"\xff" if number in (0, 1200, 2499) else text for number, text in enumerate(good)]
    ends = pa.array([0, *(sum(map(len, rows[: k + 1])) for k in range(len(rows)))], pa.int32())
    buffers = [None, ends.buffers()[1], pa.py_buffer(b"".join(rows))]
    column = pa.Array.from_buffers(pa.string(), len(rows), buffers)
    pq.write_table(pa.table({"text": column}), tmp_path / "bad.parquet")
    with pytest.warns(UserWarning, match="3 of 2500 "):
        documents = open_map_style(str(tmp_path / "bad.parquet"))
    assert texts_of(documents) == [row.decode() for row in rows if row != b"\xff"]


def test_scan_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    """Shown by a change that keeps size and time of the file, which no user makes, while the copy
    of its column is made anew."""
    file, moved = parquet(tmp_path / "a.parquet", ["apple", "pear"]), tmp_path / "elsewhere"
    first = open_map_style(str(file)).content
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"pple", b"ngle"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    moved.mkdir()
    for each in list(tmp_path.glob("*a.parquet*")):
        each.rename(moved / each.name)
    assert open_map_style(str(moved / "a.parquet")).content == first
    os.utime(moved / "a.parquet")
    assert open_map_style(str(moved / "a.parquet")).content != first


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_cache_is_of_one_column(tmp_path: Path, kind: str) -> None:
    """Each has its nulls at other rows."""
    columns = {"text": ["a", None, "b"], "body": [None, "c", "d"]}
    path = tmp_path / "a.parquet"
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        path = tmp_path / "saved"
        datasets.Dataset.from_dict(columns).save_to_disk(path)
    for column, texts in (("text", ["a", "b"]), ("body", ["c", "d"]), ("text", ["a", "b"])):
        with pytest.warns(UserWarning, match="1 of 3 "):
            assert texts_of(open_map_style(str(path), column=column)) == texts


@pytest.mark.filterwarnings("ignore:.*rows hold no text")
def test_damaged_page(tmp_path: Path) -> None:
    """The damage is found at the start; texts that were opened before stay as they are."""
    folder = parquet_folder(tmp_path)
    documents = open_map_style(str(folder))
    file = folder / "data" / "train-00001-of-00002.parquet"
    with file.open("r+b") as stream:
        stream.seek(4)
        stream.write(b"\xff" * 40)
    assert texts_of(documents) == TEXTS
    refusal(lambda: open_map_style(str(folder)), file.name, field="--data-path", lines=1)


def test_parquet_is_copied_once(tmp_path: Path, datasets_cache: Path) -> None:
    """The column alone, and again if time or size change; brackets are part of a name."""
    folder = tmp_path / "[a]*"
    folder.mkdir()
    columns = {"text": ["a"], "large": ["no text" * 10_000]}
    pq.write_table(pa.table(columns), folder / "a.parquet")

    def copies() -> set[Path]:
        return set(datasets_cache.rglob("*.arrow"))

    identities = set()

    def open_texts() -> list[str]:
        documents = open_map_style(str(folder / "a.parquet"))
        identities.add(documents.content)
        return texts_of(documents)

    assert open_texts() == ["a"]
    (first,) = copies()
    assert first.stat().st_size < 10_000
    assert open_texts() == ["a"]
    assert copies() == {first}
    for number, rows in enumerate((["changed"], ["once", "more"]), 2):
        parquet(folder / "a.parquet", rows)
        os.utime(folder / "a.parquet", ns=(0, 0))
        assert open_texts() == rows
        assert len(copies()) == len(identities) == number


@pytest.mark.filterwarnings("ignore:.* hold no ")
def test_cache_is_no_data(tmp_path: Path, datasets_cache: Path) -> None:
    open_map_style(str(parquet(tmp_path / "folder" / "a.parquet")))
    assert texts_of(open_named(str(tmp_path / "folder"))) == TEXTS
    lines = json_folder(tmp_path)
    open_documents(str(lines / "train.jsonl"))
    assert texts_of(open_named(str(lines))) == TEXTS


def test_object_without_access_by_row() -> None:
    stream, named = table(["a"]).to_iterable_dataset(), "python tools/stream_to_jsonl.py"
    refusal(lambda: ColumnDocuments("mine", stream, "text"), "IterableDataset", named, field="mine")


def cut(folder: Path) -> Path:
    file = parquet(folder / "a.parquet")
    file.write_bytes(file.read_bytes()[:-5])
    return file


def without(folder: Path, name: str) -> Path:
    """A saved folder whose file of this name is gone, or holds nothing."""
    file = next(saved(folder).glob(name))
    file.write_text("{}") if name == "state.json" else file.unlink()
    return file.parent


def one_file(folder: Path, rows: Rows = ROWS) -> Path:
    return parquet(folder / "a.parquet", rows)


def holding(folder: Path, name: str, text: str) -> Path:
    """A folder with one file."""
    (folder / "sub").mkdir()
    (folder / "sub" / name).write_text(text)
    return folder / "sub"


Make = Callable[[Path], Path]
# A maker of what --data-path or --dataset-name names, the arguments beside it, and what is refused.
PATHS: list[tuple[Make, dict[str, str], str]] = [
    *((make, {"column": "id"}, "--text-column") for make in (saved, one_file)),
    *((make, {"column": "body"}, "--text-column") for make in (saved, one_file)),
    *((make, {"split": "x"}, "--dataset-split") for make in (saved_splits, parquet_folder, saved)),
    (one_file, {"split": "test"}, "--dataset-split"),
    *((make, {"config": "a"}, "--dataset-config") for make in (saved_splits, one_file)),
    (configurations, {"config": "a"}, "--dataset-config"),
    *((make, {}, "--data-path") for make in (configurations, json_folder, cut, lambda to: to)),
    (lambda to: to / "absent.parquet", {}, "--data-path"),
    (lambda to: one_file(to, [None, " "]), {}, "--data-path"),
    (lambda to: one_file(to, []), {}, "--data-path"),
    (lambda to: without(to, "state.json"), {}, "--data-path"),
    (lambda to: without(to, "*.arrow"), {}, "--data-path"),
]
NAMES: list[tuple[Make, dict[str, str], str]] = [
    (json_folder, {"config": "other"}, "--dataset-config"),
    (json_folder, {"split": "other"}, "--dataset-split"),
    (json_folder, {"column": "body"}, "--text-column"),
    (lambda to: to, {}, "--dataset-name"),
    (lambda to: to / "absent", {}, "--dataset-name"),
    (lambda to: holding(to, "a.jsonl", '{"text": "a"}\n{"text"\n'), {}, "--dataset-name"),
    (lambda to: holding(to, "script.py", "import datasets"), {}, "--dataset-name"),
    (saved, {}, "--dataset-name"),
]
REFUSED = [(open_map_style, *row) for row in PATHS] + [(open_named, *row) for row in NAMES]


@pytest.mark.filterwarnings("ignore:.* hold no ")
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(tmp_path: Path, number: int) -> None:
    open_it, make, more, flag = REFUSED[number]
    path = str(make(tmp_path))
    error = refusal(lambda: open_it(path, **more), field=flag, kind=UsageError, lines=1)
    if make is saved and not more:
        assert "--data-path" in str(error)
    if more:  # without it the path is read
        open_it(path, config="one" if make is configurations else None)


def test_configurations(tmp_path: Path, datasets_cache: Path) -> None:
    folder = str(configurations(tmp_path))
    for name, texts in (("one", TEXTS), ("two", ["of two"]), ("one", TEXTS)):
        assert texts_of(open_map_style(folder, config=name)) == texts
        assert texts_of(open_documents(folder, config=name)) == texts
    assert len(list(datasets_cache.rglob("*.arrow"))) == 2  # each is copied once
    lines = json_folder(tmp_path, TEXTS)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in SPLITS)
    (lines / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert texts_of(open_named(str(lines), config="test")) == ["of test"]
    assert texts_of(open_named(str(lines), config="train")) == TEXTS
    refusal(lambda: open_named(str(lines)), "--dataset-config", field="--dataset-name")


def test_relative_names(
    tmp_path: Path, datasets_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(json_folder(tmp_path, TEXTS))
    for name in (".", "train.jsonl", "../lines"):
        assert texts_of(open_named(name)) == TEXTS
    parquet(Path("a.parquet"), TEXTS)
    assert texts_of(open_map_style("a.parquet")) == TEXTS
    monkeypatch.chdir(saved(tmp_path, TEXTS))
    assert texts_of(open_map_style(".")) == TEXTS


def test_text_files(tmp_path: Path, datasets_cache: Path) -> None:
    (tmp_path / "sub").mkdir()
    texts = {"a.txt": "one\n\ntwo\n", "b.txt": "three\n", "sub/c.txt": "four"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    alone = tmp_path / "a.txt"
    refusal(lambda: open_documents(str(alone)), f"--dataset-name {alone}", field="--data-path")
    assert texts_of(open_named(str(alone))) == [texts["a.txt"]]
    (tmp_path / "dataset_infos.json").write_text("{}")  # of no texts
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert texts_of(open_named(str(tmp_path))) == [*texts.values()]
    (tmp_path / "d.jsonl").write_text('{"text": "five"}')
    with pytest.warns(UserWarning, match=r"d\.jsonl"):
        assert texts_of(open_named(str(tmp_path))) == [*texts.values()]
