"""Documents of `datasets` and of parquet: the same texts, numbers and identity from each."""

import json
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.data.columns import ColumnDocuments, DatasetColumn, ParquetColumn
from megatron.data.documents import open_documents
from megatron.data.files import DataError
from megatron.data.map_style import open_map_style, open_named
from tests.dist import PATIENCE
from tests.refusals import field_of, refusal

TEXTS = [f"text {number} " * (number % 5 + 1) for number in range(40)]
# What is left out, at the beginning, in a row, and at the end.
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


def parquet(file: Path, rows: Rows = ROWS, group: int = 7) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {"text": pa.array(rows, pa.string()), "id": range(len(rows))}
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
    return ColumnDocuments("mine", DatasetColumn(dataset, "text", "mine"))


SOURCES: dict[str, Callable[[Path], ColumnDocuments]] = {
    "saved": lambda to: open_map_style(str(saved(to))),
    "saved in another way": lambda to: open_map_style(str(saved(to, shards=1))),
    "saved splits": lambda to: open_map_style(str(saved_splits(to))),
    "parquet": lambda to: open_map_style(str(parquet(to / "a.parquet"))),
    "parquet of one group": lambda to: open_map_style(str(parquet(to / "b.parquet", group=99))),
    "parquet folder": lambda to: open_map_style(str(parquet_folder(to))),
    "parquet folder, named": lambda to: open_named(str(parquet_folder(to))),
    "JSON folder": lambda to: open_named(str(json_folder(to))),
    "JSON file": lambda to: open_named(str(json_folder(to) / "train.jsonl")),
    "shuffled object": lambda to: shuffled(),
}


def texts_of(documents: ColumnDocuments) -> list[str]:
    return [documents.text(number) for number in range(documents.num_documents)]


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_texts_in_order_and_the_same_identity(
    source: str, tmp_path: Path, datasets_cache: Path
) -> None:
    with pytest.warns(UserWarning, match=r"4 of 44 rows .* row 0$"):
        documents = SOURCES[source](tmp_path)
    assert texts_of(documents) == TEXTS
    assert [ROWS[documents.row(number)] for number in range(len(TEXTS))] == TEXTS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert documents.content == open_map_style(str(saved(tmp_path / "w", TEXTS))).content
    is_named = source.startswith("JSON") or "named" in source
    assert any(datasets_cache.rglob("*.arrow")) == is_named  # nothing else is copied


@pytest.mark.parametrize(
    "other",
    [["ab", "c"], ["a", "c", "b"], ["a", "b"], ["abc"], ["a", "b", "C"], ["a", "b", "c", "d"]],
)
def test_other_texts_have_another_identity(tmp_path: Path, other: list[str]) -> None:
    contents = {
        open_map_style(str(parquet(tmp_path / f"{len(rows)}.parquet", rows))).content
        for rows in (["a", "b", "c"], other)
    }
    assert len(contents) == 2


def test_other_splits_and_parts_of_one(tmp_path: Path, datasets_cache: Path) -> None:
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
def test_no_text_stays_in_memory(tmp_path: Path, kind: Callable[[Path, Rows], Path]) -> None:
    path = str(kind(tmp_path, ["some text" * 100_000] * 20))
    before = pa.total_allocated_bytes()
    documents = open_map_style(path)
    assert documents.num_documents == 20
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_text_that_is_no_utf8_is_left_out(tmp_path: Path) -> None:
    good = [f"row {number}".encode() for number in range(2500)]
    rows = [b"\xff" if number in (0, 1200, 2499) else text for number, text in enumerate(good)]
    ends = pa.array([0, *(sum(map(len, rows[: k + 1])) for k in range(len(rows)))], pa.int32())
    buffers = [None, ends.buffers()[1], pa.py_buffer(b"".join(rows))]
    column = pa.Array.from_buffers(pa.string(), len(rows), buffers)
    pq.write_table(pa.table({"text": column}), tmp_path / "bad.parquet")
    with pytest.warns(UserWarning, match="3 of 2500 rows"):
        documents = open_map_style(str(tmp_path / "bad.parquet"))
    assert texts_of(documents) == [row.decode() for row in rows if row != b"\xff"]


def test_the_pass_is_kept_until_the_files_change(tmp_path: Path) -> None:
    """Told by a change that keeps size and time of the file, which no user makes."""
    file = parquet(tmp_path / "a.parquet", ["apple", "pear"])
    first = open_map_style(str(file)).content
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"pple", b"ngle"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_map_style(str(file)).content == first
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for each in list(tmp_path.glob("*a.parquet*")):
        each.rename(moved / each.name)
    assert open_map_style(str(moved / "a.parquet")).content == first
    os.utime(moved / "a.parquet")
    assert open_map_style(str(moved / "a.parquet")).content != first


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_what_is_kept_is_of_one_column(tmp_path: Path, kind: str) -> None:
    """Each has its nulls at other rows."""
    columns = {"text": ["a", None, "b"], "body": [None, "c", "d"]}
    path = tmp_path / "a.parquet"
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        path = tmp_path / "saved"
        datasets.Dataset.from_dict(columns).save_to_disk(path)
    for column, texts in (("text", ["a", "b"]), ("body", ["c", "d"]), ("text", ["a", "b"])):
        with pytest.warns(UserWarning, match="1 of 3 rows"):
            assert texts_of(open_map_style(str(path), column=column)) == texts


class Changing:
    """A column that changes."""

    def __init__(self, rows: list[str | None]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> str | None:
        return self.rows[row]

    def batches(self) -> Iterator[pa.Array]:
        yield pa.array(self.rows, pa.string())


def test_a_row_that_has_lost_its_text_is_told_of(tmp_path: Path) -> None:
    column = Changing(["a", "b"])
    documents = ColumnDocuments("--data-path x", column)
    column.rows[1] = None
    assert documents.text(0) == "a"
    with pytest.raises(DataError, match="^--data-path x, row 1 "):
        documents.text(1)
    for empty in (
        DatasetColumn(table([None, "b"]), "text", "mine"),
        ParquetColumn([parquet(tmp_path / "a.parquet", [None, "b"])], "text", "mine"),
    ):
        assert (empty[0], empty[1]) == (None, "b")


@pytest.mark.filterwarnings("ignore:.*rows hold no text")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_damaged_page_names_flag_and_file(tmp_path: Path, when: str) -> None:
    folder = parquet_folder(tmp_path)
    documents = None if when == "before" else open_map_style(str(folder))
    file = folder / "data" / "train-00001-of-00002.parquet"
    with file.open("r+b") as stream:
        stream.seek(4)
        stream.write(b"\xff" * 40)
    with pytest.raises(DataError, match=f"^--data-path {folder} .{file.name}. ") as refused:
        (documents or open_map_style(str(folder))).text(10)
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:.*rows hold no text")
@pytest.mark.parametrize("damage", ["a folder", "no archive"])
def test_a_kept_pass_that_cannot_be_read_or_written_is_made_again(
    tmp_path: Path, damage: str
) -> None:
    file = parquet(tmp_path / "a.parquet")
    first = open_map_style(str(file))
    (kept,) = set(tmp_path.iterdir()) - {file}
    kept.unlink()
    kept.mkdir() if damage == "a folder" else kept.write_bytes(b"PK\x03\x04")
    again = open_map_style(str(file))
    assert (again.content, texts_of(again)) == (first.content, TEXTS)


@pytest.mark.filterwarnings("ignore:.* hold no ")
def test_what_is_kept_is_no_data_to_load_dataset(tmp_path: Path, datasets_cache: Path) -> None:
    open_map_style(str(parquet(tmp_path / "folder" / "a.parquet")))
    assert texts_of(open_named(str(tmp_path / "folder"))) == TEXTS
    lines = json_folder(tmp_path)
    open_documents(str(lines / "train.jsonl"))
    assert texts_of(open_named(str(lines))) == TEXTS


@pytest.mark.parametrize(("cached_bytes", "decoded"), [(1 << 20, 2), (1, 20)])
def test_decoded_row_groups_are_kept_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_bytes: int, decoded: int
) -> None:
    file, calls, read = (
        parquet(tmp_path / "a.parquet", TEXTS[:20], 10),
        [],
        (pq.ParquetFile.read_row_group),
    )

    def counted(self: pq.ParquetFile, *given: object, **more: object) -> pa.Table:
        calls.append(given)
        return read(self, *given, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    column = ParquetColumn([file], "text", "mine", cached_bytes)
    rows = [row for pair in zip(range(10), range(10, 20), strict=True) for row in pair]
    assert [column[row] for row in rows] == [TEXTS[row] for row in rows]
    assert len(calls) == decoded


def test_a_group_that_two_threads_decode_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = parquet(tmp_path / "a.parquet", TEXTS[:20], 10)
    room = pq.read_table(file, columns=["text"]).nbytes + 100
    together, calls, read = threading.Barrier(2), list[int](), pq.ParquetFile.read_row_group

    def read_together(self: pq.ParquetFile, number: int, **more: object) -> pa.Table:
        calls.append(number)
        if len(calls) <= 2:
            together.wait(timeout=PATIENCE)
        return read(self, number, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_together)
    column = ParquetColumn([file], "text", "mine", room)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(column.__getitem__, (0, 1))) == TEXTS[:2]
    assert [column[row] for row in (10, 2, 11)] == [TEXTS[10], TEXTS[2], TEXTS[11]]
    assert calls == [0, 0, 1]


@pytest.mark.parametrize(("group", "warned"), [(5, True), (1, False), (10, False)])
def test_large_row_groups_that_do_not_fit_are_told_of(
    tmp_path: Path, group: int, warned: bool
) -> None:
    rows = [f"{number}" * (1 << 20) for number in range(10)]
    file = parquet(tmp_path / "a.parquet", rows, group)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ParquetColumn([file], "text", "mine", cached_bytes=1 << 20)
        assert bool(seen) == warned
        ParquetColumn([file], "text", "mine")  # all of it fits
        assert len(seen) == warned


@pytest.mark.parametrize("source", ["saved", "parquet", "object"])
def test_any_thread_may_ask(source: str, tmp_path: Path) -> None:
    if source == "parquet":  # of which one group is kept at a time
        column = ParquetColumn([parquet(tmp_path / "a.parquet", TEXTS)], "text", "mine", 1)
        documents = ColumnDocuments("mine", column)
    else:
        path = str(saved(tmp_path, TEXTS))
        documents = shuffled(TEXTS) if source == "object" else open_map_style(path)
    numbers = random.Random(0).choices(range(len(TEXTS)), k=2000)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(documents.text, numbers))
    assert found == [TEXTS[number] for number in numbers]


@pytest.mark.parametrize(
    ("flag", "works", "ask"),
    [
        ("--text-column body", "--text-column text", lambda to: (saved(to), {"column": "body"})),
        ("--text-column id", "--text-column text", lambda to: (saved(to), {"column": "id"})),
        (
            "--text-column id",
            "--text-column text",
            lambda to: (parquet(to / "a.parquet"), {"column": "id"}),
        ),
        ("--dataset-split other", "train, test", lambda to: (saved_splits(to), {"split": "other"})),
        (
            "--dataset-split other",
            "train, test",
            lambda to: (parquet_folder(to), {"split": "other"}),
        ),
        ("--dataset-split test", "leave out", lambda to: (saved(to), {"split": "test"})),
        ("--dataset-config a", "leave out", lambda to: (saved_splits(to), {"config": "a"})),
        (
            "--dataset-config a",
            "leave out",
            lambda to: (parquet(to / "a.parquet"), {"config": "a"}),
        ),
        ("--data-path", "'one', 'two'", lambda to: (configurations(to), {})),
        ("--dataset-config a", "'one', 'two'", lambda to: (configurations(to), {"config": "a"})),
        (
            "--dataset-split test",
            "leave out",
            lambda to: (parquet(to / "a.parquet"), {"split": "test"}),
        ),
        ("--data-path", "--dataset-name", lambda to: (json_folder(to), {})),
        ("--data-path", "save_to_disk", lambda to: (to, {})),
        ("--data-path", "nowhere.parquet", lambda to: (to / "nowhere.parquet", {})),
        ("--data-path", "no text in any", lambda to: (parquet(to / "a.parquet", [None, " "]), {})),
        ("--data-path", "0 rows", lambda to: (parquet(to / "a.parquet", []), {})),
    ],
)
def test_a_path_that_does_not_fit_is_refused_by_its_flag(
    tmp_path: Path, flag: str, works: str, ask: Callable[[Path], tuple[Path, dict[str, str]]]
) -> None:
    path, more = ask(tmp_path)
    with pytest.raises(ValueError, match=f"^{flag}") as refused:
        open_map_style(str(path), **more)
    assert works in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "there", "more"),
    [
        ("--dataset-config other", "default", {"config": "other"}),
        ("--dataset-split other", "'train', 'test'", {"split": "other"}),
        ("--text-column body", "--text-column text", {"column": "body"}),
    ],
)
def test_what_a_named_one_lacks_is_refused_by_its_flag(
    tmp_path: Path, datasets_cache: Path, flag: str, there: str, more: dict[str, str]
) -> None:
    name = str(json_folder(tmp_path, TEXTS))
    assert open_named(name).num_documents == len(TEXTS)
    with pytest.raises(ValueError, match=f"^{flag}") as refused:
        open_named(name, **more)
    assert there in str(refused.value)
    assert "\n" not in str(refused.value)


def test_one_of_several_configurations_is_named(tmp_path: Path, datasets_cache: Path) -> None:
    folder = json_folder(tmp_path, TEXTS)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in SPLITS)
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert texts_of(open_named(str(folder), config="test")) == ["of test"]
    assert texts_of(open_named(str(folder), config="train")) == TEXTS
    with pytest.raises(ValueError, match=r"^--dataset-name .* --dataset-config .*'train', 'test'"):
        open_named(str(folder))


def test_a_configuration_of_a_folder_of_parquet(tmp_path: Path, datasets_cache: Path) -> None:
    folder = str(configurations(tmp_path))
    for name, texts in (("one", TEXTS), ("two", ["of two"]), ("one", TEXTS)):
        assert texts_of(open_map_style(folder, config=name)) == texts
        assert texts_of(open_documents(folder, config=name)) == texts
    assert not list(datasets_cache.iterdir())


def test_names_are_relative_to_where_the_program_runs(
    tmp_path: Path, datasets_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(json_folder(tmp_path, TEXTS))
    for name in (".", "train.jsonl", "../lines"):
        assert texts_of(open_named(name)) == TEXTS
    parquet(Path("a.parquet"), TEXTS)
    assert texts_of(open_map_style("a.parquet")) == TEXTS
    monkeypatch.chdir(saved(tmp_path, TEXTS))
    assert texts_of(open_map_style(".")) == TEXTS


def test_a_text_file_is_a_document(tmp_path: Path, datasets_cache: Path) -> None:
    (tmp_path / "sub").mkdir()
    texts = {"a.txt": "one\n\ntwo\n", "b.txt": "three\n", "sub/c.txt": "four"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    alone = tmp_path / "a.txt"
    error = refusal(lambda: open_documents(str(alone)))
    assert field_of(error) == "--data-path"
    assert f"--dataset-name {alone}" in str(error)
    assert texts_of(open_named(str(alone))) == [texts["a.txt"]]
    assert texts_of(open_named(str(tmp_path))) == [*texts.values()]
    (tmp_path / "d.jsonl").write_text('{"text": "five"}')
    with pytest.warns(UserWarning, match=r"d\.jsonl"):
        assert texts_of(open_named(str(tmp_path))) == [*texts.values()]


@pytest.mark.parametrize("fault", ["nowhere", "empty", "no JSON", "saved", "script"])
def test_a_name_without_data_is_refused(tmp_path: Path, datasets_cache: Path, fault: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no JSON").mkdir()
    (tmp_path / "no JSON" / "a.jsonl").write_text('{"text": "a"}\n{"text"\n')
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("import datasets")
    saved(tmp_path)
    with pytest.raises(ValueError, match="^--dataset-name") as refused:
        open_named(str(tmp_path / fault))
    assert ("--data-path" in str(refused.value)) == (fault == "saved")


@pytest.mark.parametrize("damage", ["no shard", "no text", "cut"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = parquet(tmp_path / "a.parquet") if damage == "cut" else saved(tmp_path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "no text":
        (path / "state.json").write_text("{}")
    else:
        next(path.glob("*.arrow")).unlink()
    with pytest.raises(ValueError, match=f"^--data-path {path}"):
        open_map_style(str(path))


def test_a_stream_is_refused() -> None:
    stream = table(TEXTS).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"tools\.stream_to_jsonl"):
        DatasetColumn(stream, "text", "mine")
