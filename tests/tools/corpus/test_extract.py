"""Published forms of corpora into shards of JSON lines."""

import bz2
import gc
import gzip
import io
import json
import lzma
import os
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import field_of, refusal
from tests.tools.corpus.lines import content, manifest, read_jsonl, write_jsonl
from tools.corpus import extract as module
from tools.corpus import readers
from tools.corpus.extract import Settings, run
from tools.corpus.files import Unit
from tools.corpus.readers import SourceSplit, find_input, read, walk


def extract(output: Path, *inputs: Path, format: str, **more: Any) -> list[dict[str, Any]]:
    settings = {"source": "web", "workers": 1} | more
    run(Settings(input=inputs, output=output, format=format, **settings))
    return read_jsonl(output)


def rejected(output: Path) -> list[dict[str, Any]]:
    return read_jsonl(output / "rejected.jsonl")


def tar_of(files: dict[str, bytes], compress: Any = bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return bytes(compress(buffer.getvalue()))


def wet_record(number: int, text: bytes, kind: str = "conversion") -> bytes:
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a.com/{number}\r\n"
        f"WARC-Date: 2020-01-0{number}T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:id-{number}>\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text + b"\r\n\r\n"


def test_json_lines_get_one_shape_and_keep_their_fields(tmp_path: Path) -> None:
    lines = [
        {"title": "T", "body": "one", "url": "http://a.com", "id": 7, "big": 2**70},
        {"body": "two", "text": "a summary", "source": "elsewhere"},
    ]
    path = write_jsonl(tmp_path / "in.jsonl", lines)
    records = extract(tmp_path / "out", path, format="jsonl", key="body")
    assert list(records[0]) == ["text", "source", "id", "url", "title", "big"]
    assert records[0] | {"title": "T", "big": 2**70} == records[0]
    assert (records[0]["text"], records[0]["id"]) == ("one", "7")
    assert records[1] == {
        "text": "two", "source": "web", "id": "3fc4ccfe745870e2c0d99f71f30ff065",
        "original_text": "a summary", "original_source": "elsewhere",
    }  # fmt: skip


def test_pages_of_wikipedia_are_found_in_their_folders(tmp_path: Path) -> None:
    pages = [
        {"id": str(k), "url": f"u{k}", "title": f"T{k}", "text": f"text {k}"} for k in range(4)
    ]
    write_jsonl(tmp_path / "wiki" / "AA" / "wiki_00", [pages[0], pages[1] | {"text": ""}])
    write_jsonl(tmp_path / "wiki" / "AA" / "wiki_01", [pages[2]])
    (tmp_path / "wiki" / "AB").mkdir()
    packed = bz2.compress(json.dumps(pages[3]).encode() + b"\n")
    (tmp_path / "wiki" / "AB" / "wiki_00.bz2").write_bytes(packed)
    (tmp_path / "wiki" / "log.txt").write_text("no page")
    records = extract(tmp_path / "out", tmp_path / "wiki", format="wikiextractor", source="wiki")
    assert records == [pages[k] | {"source": "wiki"} for k in (0, 2, 3)]
    assert manifest(tmp_path / "out")["dropped"]["empty text"]["documents"] == 1


def test_the_archive_of_archives_of_openwebtext_is_streamed(tmp_path: Path) -> None:
    inner = {
        f"web/subset{k}_data.xz": tar_of(
            {f"{k}-{j}.txt": f"text {k}{j}".encode() for j in range(2)}, lzma.compress
        )
        for k in range(2)
    }
    path = tmp_path / "owt.tar.xz"
    path.write_bytes(tar_of({**inner, "web/note.txt": b"beside"}, lzma.compress))
    records = extract(tmp_path / "out", path, format="openwebtext")
    assert [(each["id"].removeprefix("owt/web/"), each["text"]) for each in records] == [
        *((f"subset{k}_data/{k}-{j}.txt", f"text {k}{j}") for k in (0, 1) for j in (0, 1)),
        ("note.txt", "beside"),
    ]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out", path]


def test_the_members_of_an_archive_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of({f"{k}.txt": b"text" for k in range(3000)}))
    split = SourceSplit(Unit(0, str(path), 0, 1, 1, 0), path.name, 1)
    members = read(split, (), "text", "text")
    assert len([next(members) for _ in range(3000)]) == 3000
    # They are counted, as memory includes that of threads which other tests have left.
    assert sum(type(each) is readers.Member for each in gc.get_objects()) < 10
    assert list(members) == []


TEXTS_IN_TAR = tar_of({f"{k}.txt": f"text {k} ".encode() * 300 for k in range(5)})
HEADER = TEXTS_IN_TAR.index(b"2.txt\0")


DAMAGED = {
    "header changed": TEXTS_IN_TAR[: HEADER + 100] + b"#" * 40 + TEXTS_IN_TAR[HEADER + 140 :],
    "cut in a text": TEXTS_IN_TAR[: HEADER + 1000],
    "cut before a header": TEXTS_IN_TAR[:HEADER],
    "cut in a header": TEXTS_IN_TAR[: HEADER + 10],
    "two in one": TEXTS_IN_TAR + tar_of({"y": b"two"}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_archive_gives_what_comes_before_and_is_named(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(DAMAGED[damage])
    records = extract(tmp_path / "out", path, format="text")
    kept = 5 if damage == "two in one" else 2
    assert [each["id"] for each in records] == [f"a/{k}.txt" for k in range(kept)]
    assert [each["file"] for each in rejected(tmp_path / "out")] == [str(path)]


@pytest.mark.parametrize("ending", ["xz", "gz"])
def test_a_compressed_archive_cut_in_the_middle_loses_its_rest_alone(
    tmp_path: Path, ending: str
) -> None:
    compress = {"xz": lzma.compress, "gz": gzip.compress}[ending]
    noise = {f"{k}.txt": os.urandom(3000).hex().encode() for k in range(50)}
    packed = tar_of(noise, compress)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"a.tar.{ending}").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "in" / f"b.tar.{ending}").write_bytes(tar_of({"x": b"other"}, compress))
    records = extract(tmp_path / "out", tmp_path / "in", format="text")
    assert 10 < len(records) < 40
    assert records[-1] == {"text": "other", "source": "web", "id": "b/x"}
    [bad] = rejected(tmp_path / "out")
    assert bad["file"].endswith(f"a.tar.{ending}")


def test_bytes_that_are_no_text_and_links_are_set_aside_by_name(tmp_path: Path) -> None:
    buffer = io.BytesIO(tar_of({"good": b"\xef\xbb\xbftext", "./bad": b"\xff\xfe", "none": b""}))
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "good"
        archive.addfile(link)
    (tmp_path / "a.tar").write_bytes(buffer.getvalue())
    records = extract(tmp_path / "out", tmp_path / "a.tar", format="text")
    assert [each["text"] for each in records] == ["text"]
    assert [field_of(each["reason"]) for each in rejected(tmp_path / "out")] == ["a/bad", "a/link"]
    assert manifest(tmp_path / "out")["dropped"]["empty text"]["documents"] == 1


def folder_of_texts(folder: Path, count: int) -> Path:
    for k in range(count):
        file = folder / f"d{k % 3}" / f"{k:03}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text {k} " * 20)
    return folder


def test_a_folder_of_texts_is_read_in_groups_that_no_worker_count_changes(tmp_path: Path) -> None:
    folder = folder_of_texts(tmp_path / "in", 60)
    (folder / "d1" / "bad.txt").write_bytes(b"\xff")
    (folder / "d1" / "gone.txt").symlink_to("nowhere")
    (folder / "d1" / "p.txt.gz").write_bytes(gzip.compress(b"packed"))
    (folder / ".hidden").write_text("no input")
    single = tmp_path / "single.md"
    single.write_text("alone")
    results = []
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        records = extract(out, folder, single, format="text", unit="2KB", workers=workers)
        results.append(content(out))
    assert results[0] == results[1]
    ids = [each["id"] for each in records]
    texts = sorted(f"d{k % 3}/{k:03}.txt" for k in range(60))
    assert ids == ["d1/p.txt", *texts, "single.md"]
    assert 4 < len(manifest(tmp_path / "out1")["shards"]) < 12
    names = [Path(each["file"]).name for each in rejected(tmp_path / "out1")]
    assert names == ["bad.txt", "gone.txt"]


def test_json_lines_are_no_text(tmp_path: Path) -> None:
    """Nor is a text no document among lines."""
    folder = folder_of_texts(tmp_path / "in", 3)
    lines = write_jsonl(folder / "d0" / "lines.jsonl", [{"body": "a line"}])
    for format in ("text", "openwebtext"):
        for given in (folder, lines):
            error = refusal(partial(extract, tmp_path / "out", given, format=format))
            assert field_of(error) == "--format"
    found = extract(tmp_path / "out", lines.parent, format="jsonl", key="body")
    assert [each["text"] for each in found] == ["text 0 " * 20, "a line"]
    (tmp_path / "a.tar").write_bytes(tar_of({"good": b"text", "b.jsonl": lines.read_bytes()}))
    records = extract(tmp_path / "packed", tmp_path / "a.tar", format="text")
    assert [each["text"] for each in records] == ["text"]
    assert len(rejected(tmp_path / "packed")) == 1


def test_a_change_in_a_folder_of_texts_is_no_longer_the_same_input(tmp_path: Path) -> None:
    folder = folder_of_texts(tmp_path / "in", 5)
    again = partial(extract, tmp_path / "out", folder, format="text")
    assert again() == again()
    (folder / "d0" / "000.txt").write_text("TEXT 0 " * 20)  # of the same length
    assert field_of(refusal(again)) == "--output"


def test_a_folder_is_walked_once_whatever_its_names(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "in", 3)
    (tmp_path / "in" / "d0" / "up").symlink_to(tmp_path / "in")
    names = ["d0/000.txt", "d1/001.txt", "d2/002.txt"]
    assert [name for name, _ in walk(tmp_path / "in")] == names
    (tmp_path / "in" / os.fsdecode(b"caf\xe9\n.txt")).write_text("text")  # no UTF-8
    records = extract(tmp_path / "out", tmp_path / "in", format="text")
    assert [each["id"] for each in records] == ["caf\\udce9\n.txt", *names]


def test_the_pages_of_a_wet_file_come_with_url_and_id(tmp_path: Path) -> None:
    records = [wet_record(1, b"about", "warcinfo")]
    records += [wet_record(k, f"page {k}\nschön".encode()) for k in (2, 3)]
    (tmp_path / "in").mkdir()
    wet = b"".join(map(gzip.compress, [*records, wet_record(4, b"\n")]))
    (tmp_path / "in" / "CC-1.warc.wet.gz").write_bytes(wet)
    pages = extract(tmp_path / "out", tmp_path / "in", format="wet")
    assert pages == [
        {"text": f"page {k}\nschön", "source": "web", "id": f"id-{k}",
         "url": f"http://a.com/{k}", "timestamp": f"2020-01-0{k}T00:00:00Z"} for k in (2, 3)
    ]  # fmt: skip
    facts = manifest(tmp_path / "out")
    assert (facts["input"]["documents"], list(facts["dropped"])) == (3, ["empty text"])


def test_damage_in_a_wet_file_costs_its_records_alone(tmp_path: Path) -> None:
    broken = [
        wet_record(2, b"two").replace(b"Content-Length: 3", b"Content-Length: x"),
        wet_record(3, b"\xff\xfe"),
        wet_record(4, b"four").replace(b"Content-Length: 4", b"Content-Length: 99999999999"),
    ]
    good = [wet_record(k, f"page {k}".encode()) for k in (1, 5)]
    path = tmp_path / "a.warc.wet"
    end = b"rubbish\nmore rubbish\n" + wet_record(6, b"long text")[:-8]
    path.write_bytes(good[0] + b"".join(broken) + good[1] + end)
    records = extract(tmp_path / "out", path, format="wet")
    assert [each["text"] for each in records] == ["page 1", "page 5"]
    bad = rejected(tmp_path / "out")
    starts = [len(good[0]) + sum(map(len, broken[:k])) for k in range(3)]
    starts.append(len(b"".join(broken + good)))
    assert [each["offset"] for each in bad[:4]] == starts
    assert len(bad) == 5
    noise = [wet_record(k, os.urandom(500).hex().encode()) for k in range(1, 6)]
    packed = b"".join(map(gzip.compress, noise))
    (tmp_path / "b.warc.wet.gz").write_bytes(packed[: len(packed) // 2])
    assert len(extract(tmp_path / "cut", tmp_path / "b.warc.wet.gz", format="wet")) == 2
    assert len(rejected(tmp_path / "cut")) == 1


def test_too_long_a_document_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 1000)
    texts = {"a": b"fits", "b": b"x" * 1001}
    (tmp_path / "t.tar").write_bytes(tar_of(texts))
    (tmp_path / "b.gz").write_bytes(gzip.compress(texts["b"]))
    (tmp_path / "b.txt").write_bytes(texts["b"])
    (tmp_path / "w.wet").write_bytes(b"".join(wet_record(1, text) for text in texts.values()))
    inputs = [tmp_path / name for name in ("t.tar", "b.gz", "b.txt")]
    assert len(extract(tmp_path / "out", *inputs, format="text")) == 1
    bad = rejected(tmp_path / "out")
    assert [Path(each["file"]).name for each in bad] == ["t.tar", "b.gz", "b.txt"]
    assert all("1001" in each["reason"] for each in bad)  # bytes
    assert len(extract(tmp_path / "wet", tmp_path / "w.wet", format="wet")) == 1


def test_a_large_archive_becomes_several_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_UNITS", 1)
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of({f"{k:03}": b"text " * 100 for k in range(40)}))
    records = extract(tmp_path / "out", path, format="text", unit="5KB")
    assert [each["id"] for each in records] == [f"a/{k:03}" for k in range(40)]
    shards = manifest(tmp_path / "out")["shards"]
    assert [each["documents"] for each in shards] == [10, 10, 10, 10]
    assert [each["name"] for each in shards][:2] == ["part-00000-000.jsonl", "part-00000-001.jsonl"]


@pytest.mark.parametrize(
    ("format", "file", "cure"),
    [("jsonl", "in.jsonl", "--key"), ("wikiextractor", "wiki_00", "--json"), ("wet", "a.wet", ""),
     ("json", "a.json", "")],
)  # fmt: skip
def test_a_format_that_does_not_fit_is_refused(
    tmp_path: Path, format: str, file: str, cure: str
) -> None:
    write_jsonl(tmp_path / file, [{"content": f"text {k}"} for k in range(300)])
    error = refusal(partial(extract, tmp_path / "out", tmp_path / file, format=format))
    assert field_of(error) == "--format"
    assert file in str(error)
    assert cure in str(error)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bad_lines_first_are_no_wrong_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{broken}\n" * 500)
    (tmp_path / "b.jsonl").write_bytes(b"{broken}\n" * 90 + b'{"text": "good"}\n')
    inputs = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert len(extract(tmp_path / "out", *inputs, format="jsonl")) == 1


def test_no_document_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": ""}] * 3)
    (tmp_path / "a.wet").write_bytes(wet_record(1, b"page", "response"))
    (tmp_path / "empty").mkdir()
    for given, format in ((path, "jsonl"), (tmp_path / "a.wet", "wet"),
                          (tmp_path / "empty", "wikiextractor")):  # fmt: skip
        refusal(partial(extract, tmp_path / format, given, format=format))
        assert not (tmp_path / format / "manifest.json").exists()


def test_race_is_a_corpus_of_articles(tmp_path: Path, test_data: Path) -> None:
    archive = test_data / "race" / "RACE_dev.tar.xz"
    records = extract(tmp_path / "out", archive, format="json", key="article", source="race")
    assert len(records) == 1389
    assert len({each["id"] for each in records}) == 1389
    assert sum(len(each["questions"]) for each in records) == 4887
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "race", filter="data")
    more = extract(tmp_path / "two", tmp_path / "race", format="json", key="article", source="race")
    assert sorted(more, key=lambda each: each["id"]) == sorted(records, key=lambda each: each["id"])


@pytest.mark.parametrize("name", ["a.warc.wet", "AA/wiki_00"])
def test_files_that_a_format_does_not_read_are_named(tmp_path: Path, name: str) -> None:
    for each in (name, "notes.txt"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text("x")
    with pytest.warns(UserWarning, match=r"notes\.txt"):
        (split,), _ = find_input([tmp_path], "wikiextractor" if "wiki" in name else "wet", 1 << 20)
    assert split.name == name
