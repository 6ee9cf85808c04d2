"""De-duplication: recall, precision and the one that stays, against brute force; signatures."""

import itertools
import json
import random
from collections.abc import Iterable
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron.errors import UsageError
from tests.refusals import refusal
from tests.tools.corpus.lines import dropped, duplicates, manifest, read_jsonl, write_jsonl
from tools.corpus.dedup import Settings, run, signatures
from tools.corpus.dedup.candidates import Buckets
from tools.corpus.dedup.clusters import Clusters, best_edges, join_all, roots_of
from tools.corpus.dedup.signatures import SHINGLES, Bands, Shingle, Shingler
from tools.corpus.dedup.verify import EDGE, Sets
from tools.corpus.files import write_shard

WORDS = [f"{a}{b}{c}" for a in "bcdfg" for b in "aeiou" for c in ("st", "rn", "nd", "ll", "x")]
Records = list[dict[str, Any]]


def text_of(draw: random.Random, length: int = 150) -> str:
    return " ".join(draw.choices(WORDS, k=length))


def edited(draw: random.Random, text: str, share: float) -> str:
    words = text.split()
    for place in draw.sample(range(len(words)), round(share * len(words))):
        words[place] = draw.choice(WORDS)
    return " ".join(words)


def corpus(seed: int, originals: int, share: float) -> Records:
    """Originals with one to three edited copies each, in no order."""
    draw = random.Random(seed)
    texts = []
    for _ in range(originals):
        texts.append(text_of(draw))
        texts += [
            edited(draw, texts[-1], draw.uniform(0, share)) for _ in range(draw.randint(1, 3))
        ]
    draw.shuffle(texts)
    return [
        {"id": f"d{draw.randrange(10**9):09}", "source": draw.choice("ab"), "text": text, "n": n}
        for n, text in enumerate(texts)
    ]


def similarities(records: Records, shingle: Shingle = "char5") -> dict[tuple[int, int], float]:
    shingler = Shingler(shingle, 0)
    sets = [set(shingler.shingle_set(record["text"]).tolist()) for record in records]
    return {
        (i, j): len(sets[i] & sets[j]) / len(sets[i] | sets[j])
        for i, j in itertools.combinations(range(len(sets)), 2)
    }


def stay_by_definition(records: Records, edges: list[tuple[int, int]]) -> set[str]:
    """The smallest id of everything that hangs together."""
    cluster = {n: {n} for n in range(len(records))}
    for a, b in edges:
        if cluster[a] is not cluster[b]:
            cluster[a] |= cluster[b]
            for n in cluster[b]:
                cluster[n] = cluster[a]
    return {min(records[n]["id"] for n in members) for members in cluster.values()}


def dedup(
    folder: Path, records: Records, shards: int = 1, **settings: Any
) -> tuple[set[str], Records]:
    """(ids that stay, lines of duplicates.jsonl)."""
    size = -(-len(records) // shards)
    inputs = [
        write_jsonl(folder / f"in-{k}.jsonl", records[k * size : (k + 1) * size])
        for k in range(shards)
    ]
    settings = {"workers": 1, "allow_large_removal": True, **settings}
    run(Settings(input=tuple(inputs), output=folder / "out", **settings))
    return {record["id"] for record in read_jsonl(folder / "out")}, duplicates(folder / "out")


@pytest.mark.parametrize("shingle", SHINGLES)
def test_what_stays_is_what_brute_force_keeps(tmp_path: Path, shingle: Shingle) -> None:
    records = corpus(1, 60, 0.10 if shingle == "char5" else 0.06)
    every = similarities(records, shingle)
    edges = {pair: j for pair, j in every.items() if j >= 0.7}
    kept, lines = dedup(tmp_path, records, shingle=shingle, bands=42, rows=3)
    assert kept == stay_by_definition(records, list(edges))
    assert 20 < len(lines) < len(records) - 50
    by_id = {record["id"]: n for n, record in enumerate(records)}
    for line in lines:
        pair = tuple(sorted((by_id[line["id"]], by_id[line["kept_id"]])))
        assert line["jaccard"] == every[pair]
        via = tuple(sorted((by_id[line["id"]], by_id[line["via"]])))
        assert line["via_jaccard"] == every[via] >= 0.7
        # The first of equal texts goes through another text, the others through the first.
        text = records[by_id[line["id"]]]["text"]
        if any(r["text"] == text and r["id"] < line["id"] for r in records):
            assert line["via_jaccard"] == 1
        else:
            assert line["via_jaccard"] == max(
                j
                for (a, b), j in edges.items()
                if by_id[line["id"]] in (a, b) and records[a]["text"] != records[b]["text"]
            )
    assert {line["kept_id"] for line in lines} <= kept
    assert kept | {line["id"] for line in lines} == set(by_id)


def test_recall_is_as_expected_in_every_bin_from_the_threshold_up(tmp_path: Path) -> None:
    draw = random.Random(3)
    records: Records = []
    for share in np.linspace(0.01, 0.4, 1500):
        text = text_of(draw)
        records += [{"text": text}, {"text": edited(draw, text, share)}]
    for n, record in enumerate(records):
        record["id"] = f"{n:06}"
    shingler = Shingler("char5", 0)
    bins: dict[int, list[bool]] = {}
    _, lines = dedup(tmp_path, records)
    removed = {line["id"] for line in lines}
    for n in range(0, len(records), 2):
        a, b = (set(shingler.shingle_set(records[n + k]["text"]).tolist()) for k in (0, 1))
        jaccard = len(a & b) / len(a | b)
        found = records[n + 1]["id"] in removed
        assert jaccard >= 0.7 or not found  # precision is 1
        if jaccard >= 0.7:
            bins.setdefault(int(jaccard * 20), []).append(found)
    assert sorted(bins) == [14, 15, 16, 17, 18, 19]
    for found in bins.values():
        assert len(found) > 50
        assert np.mean(found) >= 0.99


def test_the_threshold_is_met_in_integers(tmp_path: Path) -> None:
    # 10 characters of 14 distinct 5-grams in all, 7 and 10 in the sets: 7/10 is not below 0.7.
    first, second = "abcdefghijk", "abcdefghijkxyz"
    shingler = Shingler("char5", 0)
    sizes = [len(shingler.shingle_set(text)) for text in (first, second)]
    assert sizes == [7, 10]
    records = [{"id": "a", "text": first}, {"id": "b", "text": second}]
    kept, lines = dedup(tmp_path / "met", records, bands=64, rows=2)
    assert kept == {"a"}
    assert lines[0]["jaccard"] == 0.7
    kept, _ = dedup(tmp_path / "missed", records, bands=64, rows=2, jaccard=0.7000001)
    assert kept == {"a", "b"}


def test_little_memory_and_compression_change_nothing(tmp_path: Path) -> None:
    """Nor do shards and units, as test_faults.py has it of every step."""
    records = corpus(5, 25, 0.10)
    records[3] = {**records[7], "n": 3}  # an exact copy under the same id
    records[5]["text"] = "  " + records[9]["text"].upper()  # equal when normalised
    records += [{"id": "one", "text": text_of(random.Random(17))}] * 24  # all in one part of many

    def result(name: str, **settings: Any) -> tuple[Records, list[str]]:
        _, lines = dedup(tmp_path / name, records, **settings)
        return read_jsonl(tmp_path / name / "out"), sorted(map(json.dumps, lines))

    assert result("small", memory="4KB", compress="gzip") == result("plain")


def test_priority_of_sources_goes_before_the_id(tmp_path: Path) -> None:
    text = text_of(random.Random(6))
    sources, texts = ("web", "books", "news"), (text, text + " end", text)
    records = [
        {"id": str(n), "source": source, "text": each}
        for n, (source, each) in enumerate(zip(sources, texts, strict=True), 1)
    ]
    kept, lines = dedup(tmp_path, records, source_priority=("news", "books"))
    assert kept == {"3"}
    assert {(each["id"], each["via"]) for each in lines} == {("1", "3"), ("2", "3")}


def test_records_without_an_id_are_known_by_their_text(tmp_path: Path) -> None:
    draw = random.Random(7)
    text, other = text_of(draw), text_of(draw)
    records = [{"text": text, "n": 0}, {"text": other}, {"text": text, "n": 2}, {"text": text}]
    write_jsonl(tmp_path / "in.jsonl", records)
    run(Settings(input=(tmp_path / "in.jsonl",), output=tmp_path / "out", workers=1))
    assert read_jsonl(tmp_path / "out") == records[:2]  # as they came, without an id
    lines = duplicates(tmp_path / "out")
    name = lines[0]["kept_id"]
    assert len(name) == 32
    assert [line["id"] for line in lines] == [f"{name}-1", f"{name}-2"]
    assert {(line["kept_id"], line["jaccard"], line["via"]) for line in lines} == {(name, 1, name)}


def test_documents_of_one_id_are_told_apart_and_an_id_that_is_made_is_nobody_elses(
    tmp_path: Path,
) -> None:
    draw = random.Random(8)
    texts = [text_of(draw) for _ in range(3)]
    records = [{"id": "same", "text": text} for text in [*texts, texts[0]]]
    (kept, there), (_, back) = (
        dedup(tmp_path / name, order) for name, order in (("a", records), ("b", records[::-1]))
    )
    assert len(read_jsonl(tmp_path / "a" / "out")) == 3
    assert (len(there), there, kept) == (1, back, {"same"})
    names = ["a", "a", "a", "a-1", "a-5", "b", "a-2"]
    records = [{"id": name, "text": texts[0]} for name in names]
    kept, lines = dedup(tmp_path / "c", records, shards=2)
    made = {line["id"] for line in lines}
    assert (kept, len({*made, "a"})) == ({"a"}, len(names))
    assert {"a-1", "a-5", "a-2", "b"} < made


def test_chains_are_one_cluster_and_say_so(tmp_path: Path) -> None:
    draw = random.Random(9)
    texts = [text_of(draw, 300)]
    words = texts[0].split()
    for step in range(1, 6):  # each differs from the one before in other words
        words[step * 40 : step * 40 + 12] = draw.choices(WORDS, k=12)
        texts.append(" ".join(words))
    records = [{"id": f"{n}", "text": text} for n, text in enumerate(texts)]
    kept, lines = dedup(tmp_path, records, jaccard=0.85)
    assert kept == {"0"}
    assert lines[-1]["jaccard"] < 0.85 < lines[-1]["via_jaccard"]
    assert lines[-1]["via"] == "4"


def test_lines_say_where_the_documents_were(tmp_path: Path) -> None:
    dedup(tmp_path, corpus(14, 20, 0.05), shards=3)
    lines = read_jsonl(tmp_path / "out" / "duplicates.jsonl")
    assert {line["file"] for line in lines} == {str(tmp_path / f"in-{k}.jsonl") for k in range(3)}
    for line in lines:
        for name, place in (("id", ""), ("kept_id", "kept_")):
            with Path(line[place + "file"]).open("rb") as file:
                file.seek(line[place + "offset"])
                assert json.loads(file.readline())["id"] == line[name]


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_a_unit_of_many_documents_is_indexed_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: str
) -> None:
    records = corpus(16, 60, 0.08)
    whole = dedup(tmp_path / "whole", records)
    with write_shard(tmp_path, "in", compress) as shard:
        for record in records:
            shard.write(json.dumps(record).encode())
    [path] = tmp_path.glob("in.jsonl*")
    monkeypatch.setattr("tools.corpus.dedup.index.BLOCK", 7)
    run(Settings(input=(path,), output=tmp_path / "out", workers=1, allow_large_removal=True))
    assert {record["id"] for record in read_jsonl(tmp_path / "out")} == whole[0]
    assert duplicates(tmp_path / "out") == whole[1]


def test_long_chains_are_connected_in_few_rounds() -> None:
    count = 1 << 17
    order = np.random.default_rng(0).permutation(count)
    parent = np.arange(count)
    join_all(parent, order[:-1], order[1:])  # minutes, if each round went one step
    assert np.all(roots_of(parent, np.arange(count)) == 0)


def test_a_family_larger_than_a_bucket_may_be_keeps_one(tmp_path: Path) -> None:
    words = text_of(random.Random(18), 300).split()  # all are alike, each with one other word
    texts = [" ".join([*words[:k], "otherwise", *words[k + 1 :]]) for k in range(290)]
    records = [{"id": f"{n:04}", "text": text} for n, text in enumerate(texts)]
    for seed, limit in ((1, 20), (2, 100)):
        random.Random(seed).shuffle(records)
        kept, _ = dedup(tmp_path / str(seed), records, max_bucket=limit, seed=seed)
        assert kept == {"0000"}


def test_how_a_bucket_is_split_does_not_depend_on_the_order(tmp_path: Path) -> None:
    draw = random.Random(19)
    text = text_of(draw, 60)
    records = [{"id": f"{n:04}", "text": edited(draw, text, 0.12)} for n in range(400)]
    results = []
    for seed in range(3):
        random.Random(seed).shuffle(records)
        kept, lines = dedup(tmp_path / str(seed), records, max_bucket=10, bands=3, rows=2)
        results.append((kept, sorted(map(json.dumps, lines))))
    assert manifest(tmp_path / "0" / "out")["buckets"]["split"] > 0
    assert results[0] == results[1] == results[2]


def test_another_band_splits_a_bucket_in_other_orders() -> None:
    bits = np.random.default_rng(0).integers(1 << 64, size=(40, 2), dtype=np.uint64)
    found = {"sketches": bits, "documents": np.zeros(40, [("digest", "<u8", 2)])}
    members = np.arange(40)
    buckets = Buckets(MagicMock(gather=lambda _, name: found[name]), members, 0.7)
    one, again, other = ([*map(list, buckets.split(members, band, 10))] for band in (2, 2, 3))
    assert one == again != other


def test_a_cluster_of_the_largest_size_is_removed(tmp_path: Path) -> None:
    records = [{"id": str(n), "text": text_of(random.Random(11))} for n in range(4)]
    limits = {"max_cluster": 4, "max_source_loss": 1.0, "expected_removal": 1.0}
    kept, _ = dedup(tmp_path, records, allow_large_removal=False, **limits)
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("name", "limit"), [("max_cluster", 5), ("max_source_loss", 0.05), ("expected_removal", 0.01)]
)
def test_an_absurd_removal_stops_the_run(
    tmp_path: Path, name: str, limit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, flag = {name: limit}, f"--{name.replace('_', '-')}"
    draw = random.Random(11)
    again = text_of(draw)
    texts = [again] * 12 + [text_of(draw) for _ in range(88)]  # 100 are checked, not fewer
    records = [{"id": f"{n:03}", "source": "a", "text": text} for n, text in enumerate(texts)]
    error = refusal(partial(dedup, tmp_path, records, allow_large_removal=False, **settings))
    assert isinstance(error, UsageError)
    assert (error.flag, error.works) == (flag, ("--allow-large-removal",))
    assert again[:60] in capsys.readouterr().err  # the largest clusters are shown
    assert not (tmp_path / "out" / "manifest.json").exists()
    plain, own = (Settings(input=(), output=tmp_path, **each) for each in ({}, settings))
    assert own.parameters() == plain.parameters()  # what was done before is not done again
    more: Any = {"workers": 1, "allow_large_removal": True, **settings}
    run(Settings(input=(tmp_path / "in-0.jsonl",), output=tmp_path / "out", **more))
    assert len(read_jsonl(tmp_path / "out")) == 89


def test_the_manifest_accounts_for_everything(tmp_path: Path) -> None:
    records = corpus(12, 9, 0.05)
    records[0]["text"] += "\u00e9"
    dedup(tmp_path, records)
    found = manifest(tmp_path / "out")
    assert set(dropped(found)) <= {"near-duplicate", "same normalised text"}
    for source in ("a", "b"):
        size = sum(len(r["text"].encode()) for r in records if r["source"] == source)
        every = found["output"], *found["dropped"].values()
        assert found["input"]["sources"][source]["bytes"] == size
        assert sum(each["sources"].get(source, {"bytes": 0})["bytes"] for each in every) == size
    largest = found["largest_clusters"]
    sizes = [each["size"] for each in largest]
    assert sizes == sorted(sizes, reverse=True)
    assert [len(each["members"]) for each in largest] == [min(4, size) for size in sizes]
    assert sizes[0] > sizes[-1] >= 2
    assert largest[0]["members"][0]["text"]
    assert sum(each["pairs"] for each in found["jaccard_histogram"]) > 0
    curve = {point["jaccard"]: point["recall"] for point in found["recall_curve"]}
    assert curve[0.7] == round(1 - (1 - 0.7**5) ** 25, 6) == round(Bands(25, 5).recall(0.7), 6)


def test_the_named_pairs_of_the_articles_are_found(test_data: Path, tmp_path: Path) -> None:
    lines = (test_data / "neardup" / "articles_1000.train").read_text().splitlines()
    truth = (test_data / "neardup" / "articles_1000.truth").read_text().splitlines()
    records = [dict(zip(("id", "text"), line.split(" ", 1), strict=True)) for line in lines]
    kept, found = dedup(tmp_path, records)
    pairs = {tuple(sorted(line.split())) for line in truth}
    assert {tuple(sorted((line["id"], line["kept_id"]))) for line in found} == pairs
    assert len(kept) == 1000 - len(pairs)


def test_a_text_file_is_a_document_that_goes_or_stays(tmp_path: Path) -> None:
    draw = random.Random(3)
    one, other = text_of(draw), text_of(draw)
    write_jsonl(tmp_path / "in" / "b.jsonl", [{"text": one}, {"text": text_of(draw)}])
    files = {"a": one, "c": edited(draw, other, 0.02), "d": other}
    for name, text in files.items():
        (tmp_path / "in" / f"{name}.txt").write_text(text)
    run(Settings(input=(tmp_path / "in",), output=tmp_path / "out", workers=1))
    kept = [record["text"] for record in read_jsonl(tmp_path / "out")]
    assert len(kept) == 3
    assert len({*kept} & {*files.values()}) == 2


# Normalised text, shingle sets and signatures: compiled and by definition

ALPHABET = "abc ABC\u00c4\u00df\u0130\u0416 \t\n\u00a0\u2003\u3000\U0001f600."


def test_white_space_is_what_python_takes_for_it() -> None:
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    spaces = map(chr, np.flatnonzero(signatures.SPACES).tolist())
    assert {c for c in every if c.isspace()} == {*spaces}


def mixed(word: int) -> int:
    """The finaliser of splitmix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def polynomial(digits: Iterable[int]) -> int:
    return reduce(lambda sum, digit: (sum * 0x9E3779B97F4A7C15 + digit) % 2**64, digits)


def test_a_hash_is_that_of_the_definition() -> None:
    """Signatures that a run has kept are valid for the next version: hashes do not change."""
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(ALPHABET, k=draw.randrange(60)))
        words = [[ord(c) for c in word] for word in " ".join(text.lower().split()).split(" ")]
        hashes = [mixed(polynomial([0, *word])) for word in words]
        letters = [ord(c) for c in " ".join(text.lower().split())]
        for shingle, units in zip(SHINGLES, (letters, hashes), strict=True):
            grams = [units[k : k + 5] for k in range(max(1, len(units) - 4))]
            expected = {mixed(polynomial([0, *gram])) for gram in grams}
            assert Shingler(shingle, 1).shingle_set(text).tolist() == sorted(expected)


def test_a_signature_is_the_minimum_under_each_permutation() -> None:
    shingler = Shingler("char5", 3)
    hashes = shingler.shingle_set("the smallest hash under each permutation")
    factors, offsets = shingler.permutations
    assert all(int(factor) % 2 for factor in factors)
    for place in range(signatures.PERMUTATIONS):
        least = min(
            ((int(x) >> 32) * int(factors[place]) + int(offsets[place])) % 2**32 for x in hashes
        )
        assert shingler.sign(hashes)[place] == least


def test_another_seed_permutes_otherwise() -> None:
    hashes = Shingler("char5", 1).shingle_set("some text or other")
    one, other = (Shingler("char5", seed).sign(hashes) for seed in (1, 2))
    assert (one == other).mean() < 0.1


def test_sets_are_read_again_only_after_memory_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def note(_: Sets, number: int) -> Any:
        read.append(number)
        return np.zeros(10, np.uint64)

    monkeypatch.setattr(Sets, "_read", note)
    sets = Sets(Path(), MagicMock(), 100)
    for number in (0, 1, 0, 2, 3, 2):  # two fit
        assert len(sets[number]) == 10
    assert read == [0, 1, 2, 3]


def test_of_equal_edges_in_several_files_the_first_by_rank_counts() -> None:
    places = np.arange(4)
    found = Clusters(places, 0 * places, [*"abcd"], [""] * 4, places, 0 * places, places, places)
    pairs = [(1, 3), (0, 3), (2, 3)]
    via, best = best_edges(found, [np.array([(*pair, 1, 2)], EDGE) for pair in pairs])
    assert (via.tolist(), best.tolist()) == ([3, 3, 3, 0], [0.5] * 4)
