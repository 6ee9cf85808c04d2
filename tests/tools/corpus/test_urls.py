"""Lists of URLs: what is dropped for which reason, and repeats found in parts; equal keys in sorted
runs on disk."""

import gzip
import json
import random
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.json_lines import open_shard
from tests.refusals import field_of, refusal
from tests.tools.corpus.lines import dropped, manifest, read_jsonl
from tools.corpus import external
from tools.corpus.urls import Settings, judge, load_blacklists, run


def urls(output: Path, *inputs: Path, **more: Any) -> list[str]:
    run(Settings(input=inputs, output=output, **{"workers": 1} | more))
    kept = []
    for name in (shard["name"] for shard in manifest(output)["shards"]):
        with open_shard(output / name) as stream:
            kept += stream.read().decode().splitlines()
    return kept


def write_list(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("reason", "listed"),
    [
        (None, """http://a.com | https://en.news.example.org:8080/a/b.html?c=d#e
            http://10.0.0.1/page | HTTP://EXAMPLE.COM/Page | http://example.com/a.b/c
            http://example.com/über/straße | http://myamazon.com/page
            http://news.google.example.com/x | http://about.me.com/jpg | http://company.ai"""),
        ("too short", "a.com/x"),
        ("malformed", """ftp://example.com/page | http://localhost/page | http://exa mple.com/page
            http://example.com/a page | example.com/page | http://-a.com/page
            http://[::1]/page"""),
        ("blacklisted domain", """https://i.imgur.com/abc | https://WWW.Amazon.co.uk/dp/1
            https://de.wikipedia.org./wiki/A | https://v.redd.it./abc
            http://youtube.com:80?v=1"""),
        ("blacklisted extension", """http://example.com/photo.JPG
            http://example.com/files.d/paper.pdf?page=3#top"""),
    ],
)  # fmt: skip
def test_a_url_is_judged_by_its_parts(tmp_path: Path, reason: str | None, listed: str) -> None:
    blacklists = load_blacklists(Settings(input=(), output=tmp_path))
    every = [url.strip() for line in listed.split("\n") for url in line.split(" | ")]
    assert {url: judge(url, blacklists) for url in every} == dict.fromkeys(every, reason)


def test_more_can_be_blacklisted(tmp_path: Path) -> None:
    domains = write_list(tmp_path / "domains", ["# a comment", "", "Sub.Example.com  # two"])
    extensions = write_list(tmp_path / "extensions", [".HTM", "php"])
    settings = Settings(
        input=(), output=tmp_path, domain_blacklist=(domains,), extension_blacklist=(extensions,)
    )
    blacklists = load_blacklists(settings)
    assert judge("http://a.sub.example.com/x", blacklists) == "blacklisted domain"
    assert judge("http://example.com/x", blacklists) is None
    assert judge("http://imgur.com/x", blacklists) == "blacklisted domain"
    assert judge("http://example.com/x.htm", blacklists) == "blacklisted extension"


def test_every_line_is_kept_or_counted_by_its_reason(tmp_path: Path) -> None:
    good = ["http://example.com/1", "http://example.com/2"]
    path = tmp_path / "in.txt"
    lines = [good[0], "", "x", "no url at all", f"  {good[1]}\r", good[0], "http://imgur.com/a"]
    lines += ["http://example.com/a.png", "http://example.com/" + "x" * 70_000, good[1]]
    path.write_bytes("\n".join(lines).encode() + b"\nhttp://example.com/\xff")
    assert urls(tmp_path / "out", path) == good
    assert dropped(manifest(tmp_path / "out")) == {
        "bad line": 2, "blacklisted domain": 1, "blacklisted extension": 1, "duplicate": 2,
        "malformed": 1, "too short": 1,
    }  # fmt: skip
    rejected = read_jsonl(tmp_path / "out" / "rejected.jsonl")
    assert [each["reason"].partition(" ")[0] for each in rejected] == ["line", "'utf-8'"]


@pytest.mark.parametrize("run_length", [50, 1 << 19])
@pytest.mark.parametrize(("memory", "parts"), [("1GB", 1), ("20KB", 16)])
def test_the_first_of_equal_urls_stays_however_the_hashes_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, parts: int, run_length: int
) -> None:
    monkeypatch.setattr(external, "RUN", run_length)
    monkeypatch.setattr(external, "BLOCK", 7)
    draw = random.Random(1)
    lines = [f"http://site{draw.randrange(900)}.com/page" for _ in range(3000)]
    write_list(tmp_path / "a.txt", lines[:2000])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n".join(lines[2000:]).encode()))
    inputs = (tmp_path / "a.txt", tmp_path / "b.txt.gz")
    kept = urls(tmp_path / "out", *inputs, unit="9KB", memory=memory)
    assert kept == list(dict.fromkeys(lines))
    assert dropped(manifest(tmp_path / "out")) == {"duplicate": len(lines) - len(kept)}
    stages = json.loads((tmp_path / "out" / "run.json").read_text())["stages"]
    assert [each["tasks"] for each in stages if each["stage"] == "repeats"] == [parts]


def test_a_list_of_which_nothing_stays_is_an_error(tmp_path: Path) -> None:
    path = write_list(tmp_path / "in.txt", ['{"url": "http://example.com"}'] * 3)
    assert field_of(refusal(partial(urls, tmp_path / "out", path))) == "urls"
    assert not (tmp_path / "out" / "manifest.json").exists()


# Equal keys, grouped in bounded memory


def test_small_memory_means_more_parts() -> None:
    assert external.count_parts(1000, 80_000) == 1
    assert external.count_parts(1001, 80_000) == 2
    assert external.count_parts(10**9, 10**9) == 128


def test_a_part_does_not_grow_with_what_is_often_repeated(tmp_path: Path) -> None:
    same = [bytes(16)] * 1000
    external.write_rows(tmp_path, "00000", 4, same)
    assert (tmp_path / "00000.rows").stat().st_size == external.ROW.itemsize
    for part in range(4):
        external.find_repeats(tmp_path, part, ["00000"])
    assert list(external.repeats_of(tmp_path, "00000", 0, 4)) == list(range(1, 1000))


def test_hashes_are_equal_only_if_all_their_bits_are(tmp_path: Path) -> None:
    pairs = np.array([[1, 2], [1, 3], [2, 2], [1, 2]], "<u8")
    external.write_rows(tmp_path, "00000", 1, [pair.tobytes() for pair in pairs])
    external.find_repeats(tmp_path, 0, ["00000"])
    assert list(external.repeats_of(tmp_path, "00000", 0, 1)) == [3]


@pytest.mark.parametrize("parts", [1, 2, 64])
def test_groups_of_all_parts_are_those_of_a_plain_loop(tmp_path: Path, parts: int) -> None:
    draw = np.random.default_rng(0)
    pool = draw.integers(1 << 64, size=300, dtype=np.uint64)
    pool[:2] = 0, external.KEYS - 1
    blocks = [draw.choice(pool, (2, rows)) for rows in (1, 400, 250)]
    for number, block in enumerate(blocks):
        external.write_sorted(tmp_path / str(number), block)
    for column in range(2):
        expected = defaultdict(list)
        for row, key in enumerate(np.concatenate([block[column] for block in blocks]).tolist()):
            expected[key].append(row)
        found = []
        for part in range(parts):
            keys, numbers, first = [], [], 0
            for number, block in enumerate(blocks):
                some, rows = external.read_sorted(tmp_path / str(number), column, part, parts)
                keys.append(some)
                numbers.append(rows + first)
                first += block.shape[1]
            members, starts = external.group(np.concatenate(keys), np.concatenate(numbers))
            found += [each.tolist() for each in np.split(members, starts[1:-1]) if len(each)]
        assert found == [expected[key] for key in sorted(expected) if len(expected[key]) > 1]


def test_a_range_is_read_as_it_is_sliced(tmp_path: Path) -> None:
    for rows in (3, 5000):  # read at once, and by pages
        array = np.arange(2 * rows, dtype=np.int64).reshape(2, rows)
        external.save(tmp_path / "a.npy", array)
        where = external.span(array[1], rows + 1, rows + 3)
        assert where == slice(1, 3)
        assert (
            external.read(external.mapped(tmp_path / "a.npy"), where, 1).tolist()
            == array[1, 1:3].tolist()
        )
        assert external.span(array[0], 7, 7) in (slice(3, 3), slice(7, 7))
