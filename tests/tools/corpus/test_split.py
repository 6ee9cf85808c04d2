"""Sides and order by keyed hashes of ids: the same whatever the sharding, workers and company."""

import gzip
import itertools
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.data.files import sha256
from megatron.data.json_lines import find_shards
from tests.refusals import field_of, refusal
from tests.tools.corpus.lines import content, manifest, read_jsonl, write_jsonl
from tools.corpus.files import known_checksums
from tools.corpus.settings import Unfinished
from tools.corpus.split import OBJECT_BYTES, SIDES, Settings, run


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {"text": "word " * draw.randint(1, 60), "id": f"d{k}", "source": "ab"[k % 2]}
        for k in range(count)
    ]


def split(folder: Path, *inputs: Path, **more: Any) -> Path:
    output = folder / "out"
    run(Settings(input=inputs, output=output, **{"workers": 1, "shard_size": "20KB", **more}))
    return output


def ids(folder: Path) -> list[str]:
    return [record["id"] for record in read_jsonl(folder)]


def test_nothing_is_lost_and_sides_do_not_overlap(tmp_path: Path) -> None:
    """Shards are even, and of the size that was asked."""
    source = write_jsonl(tmp_path / "in.jsonl", records(4000))
    out = split(tmp_path, source, shard_size="100KB")
    train, valid = read_jsonl(out / "train"), read_jsonl(out / "valid")
    assert sorted(train + valid, key=lambda r: int(r["id"][1:])) == records(4000)
    assert len(valid) == pytest.approx(133, abs=45)
    facts = manifest(out)
    assert facts["sides"]["train"]["documents"] == len(train)
    assert facts["sides"]["valid"]["bytes"] == sum(len(record["text"]) for record in valid)
    assert facts["output"]["documents"] == facts["input"]["documents"] == 4000
    sizes = [shard["bytes"] for shard in manifest(out / "train")["shards"]]
    assert len(sizes) == -(-sum(sizes) // 100_000)
    assert max(sizes) < 1.3 * sum(sizes) / len(sizes)
    evenness = facts["largest_shard_to_mean"]["train"]
    assert evenness == pytest.approx(max(sizes) * len(sizes) / sum(sizes), abs=1e-4)


def test_the_order_of_documents_and_files_changes_no_byte(tmp_path: Path) -> None:
    documents = records(600)
    one = split(tmp_path / "one", write_jsonl(tmp_path / "in.jsonl", documents))
    random.Random(1).shuffle(documents)
    files = [write_jsonl(tmp_path / "many" / f"{k}.jsonl", documents[k::7]) for k in range(7)]
    other = split(tmp_path / "two", *files, unit="5KB")
    for side in SIDES:
        files_of = [content(each / side) for each in (one, other)]
        shards = [json.loads(each.pop("manifest.json"))["shards"] for each in files_of]
        assert files_of[0] == files_of[1]
        assert shards[0] == shards[1]


def test_a_compressed_file_larger_than_memory_comes_in_several_runs(tmp_path: Path) -> None:
    documents = write_jsonl(tmp_path / "in.jsonl", records(2000))
    whole = split(tmp_path / "whole", documents)
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(documents.read_bytes()))
    with pytest.raises(Unfinished):
        split(tmp_path, packed, memory="200KB", shard="0/1")
    runs = [each.read_bytes() for each in (tmp_path / "out/.work/runs").glob("00000-*.lines")]
    assert len(runs) > 2
    assert max(len(run) + OBJECT_BYTES * run.count(b"\n") for run in runs) < 101_000, "half of it"
    out = split(tmp_path, packed, memory="200KB")
    for side in SIDES:
        assert read_jsonl(out / side) == read_jsonl(whole / side)


def test_a_document_keeps_its_side_in_other_company(tmp_path: Path) -> None:
    documents = records(400)
    few = split(tmp_path / "few", write_jsonl(tmp_path / "few.jsonl", documents[:200]), ratio="3:1")
    all_ = split(tmp_path / "all", write_jsonl(tmp_path / "all.jsonl", documents), ratio="3:1")
    for side in SIDES:
        there = ids(all_ / side)
        assert ids(few / side) == [name for name in there if int(name[1:]) < 200]


def test_the_shuffle_parts_neighbours_and_another_seed_shuffles_otherwise(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", records(1000))
    orders = [ids(split(tmp_path / str(seed), source, seed=seed) / "train") for seed in (1, 2)]
    for order in orders:
        numbers = [int(name[1:]) for name in order]
        near = sum(abs(a - b) <= 10 for a, b in itertools.pairwise(numbers))
        assert near < 60  # 19 expected
    assert set(orders[0]) != set(orders[1])
    both = set(orders[0]) & set(orders[1])
    one, other = ([name for name in order if name in both] for order in orders)
    assert one != other


@pytest.mark.filterwarnings("ignore:.* not read")
def test_a_side_is_read_when_it_is_whole_and_files_of_others_stay(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", records(300))
    out, train = tmp_path / "out", tmp_path / "out" / "train"
    with pytest.raises(Unfinished):
        split(tmp_path, source, compress="zstd", shard="0/1")
    assert list(train.glob("part-*"))
    assert field_of(refusal(partial(find_shards, [train]))) == "--input"
    stale = train / "part-00099.jsonl.zst"  # as a run on more input leaves it
    mine = ("notes.md", "part-00000.jsonl/mine")
    for name in mine:
        (train / name).parent.mkdir(exist_ok=True)
        (train / name).write_text("mine")
    stale.write_text("stale")
    split(tmp_path, source, compress="zstd")
    assert not stale.exists()
    assert [(train / name).read_text() for name in mine] == ["mine"] * 2
    for folder in (out, train, out / "valid"):
        facts = manifest(folder)
        assert facts["shuffled"] is True
        assert all(sha256(folder / s["name"]) == s["sha256"] for s in facts["shards"])
    for side in SIDES:
        names = [shard.name for shard in find_shards([out / side])]
        assert sorted(known_checksums(out / side)) == names
    assert not list(out.rglob(".work"))


def test_an_empty_side_is_refused(tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", records(7))
    same = write_jsonl(tmp_path / "same.jsonl", [{"text": "a"}] * 2)  # without an id
    for source, ratio in ((few, "500:1"), (few, "1:500"), (same, "29:1")):
        error = refusal(partial(split, tmp_path / f"{source.stem} {ratio}", source, ratio=ratio))
        assert field_of(error) == "--ratio"
