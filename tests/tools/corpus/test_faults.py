"""Every step on every fault: killed, cut into other units, given what is no document."""

import gzip
import json
import os
import signal
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
from backports import zstd

from megatron.data.indexed import IndexedDataset
from megatron.data.json_lines import LONGEST_LINE, find_shards, open_shard
from tests.data.samples import write_tokenizer
from tests.files import before_calls
from tests.programs import start_ranks
from tests.tools.corpus.lines import content, duplicates, manifest, read_jsonl, stages, write_jsonl
from tests.tools.corpus.steps_of_tests import recorded
from tools.corpus.__main__ import main
from tools.corpus.files import cut

TEXT = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
GERMAN = "Das ist ein kurzer Text in deutscher Sprache, der hier nicht bleiben darf. "


class Step(NamedTuple):
    """A step with the flags that make it work on a small corpus."""

    name: str
    flags: tuple[str, ...]
    lines: bool = False
    """Whether it takes lines that are no JSON."""

    def run(
        self, inputs: list[Path], output: Path, *flags: str, unit: str = "8KB", workers: int = 1
    ) -> dict[str, Any]:
        """Here; the manifest, if it came to one."""
        settings = output.parent / "settings"  # files that flags name
        settings.mkdir(exist_ok=True)
        write_tokenizer(settings)
        passages = [passage(k)[50:300] for k in range(0, 100, 9)]
        (settings / "eval.txt").write_text("\n\n".join(passages))
        words = ["--input", *map(str, inputs), "--output", str(output), "--workers", str(workers)]
        words += ["--shard-size" if self.name == "tokenise" else "--unit", unit]
        words += [flag.replace("FOLDER", str(settings)) for flag in (*self.flags, *flags)]
        main([self.name, *words])
        return manifest(output) if (output / "manifest.json").exists() else {}


STEPS = {
    step.name: step
    for step in (
        Step("extract", ("--format", "jsonl", "--source", "wikipedia")),
        Step("urls", (), lines=True),
        Step("clean", ("--min-tokens", "8")),
        Step("decontaminate", ("--evaluation", "FOLDER/eval.txt", "--min-tokens", "8")),
        Step("dedup", ("--max-cluster", "100")),
        Step("split", ("--ratio", "3:1", "--shard-size", "20KB")),
        Step("tokenise", ("--vocab-file", "FOLDER/vocab.json",
                          "--merge-file", "FOLDER/merges.txt", "--append-eod")),
    )
}  # fmt: skip
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def passage(k: int) -> str:
    """A few sentences of English, other ones for every k."""
    return TEXT[700 * k : 700 * k + 400 + 37 * k % 300]


def documents(count: int = 100) -> list[dict[str, Any]]:
    """Documents of two sources: near-duplicates, copies, short and German ones, equal ids, none."""
    records: list[dict[str, Any]] = []
    for k in range(count):
        record = {"text": passage(k), "id": f"id-{k}", "n": k, "source": ("cc", "web")[k % 2]}
        records.append(record)
        if k % 5 == 0:
            records.append({**record, "id": f"near-{k}", "text": passage(k) + " And more."})
        if k % 7 == 0:
            records.append({**record, "source": "copies"})
        if k % 11 == 0:
            records.append({"text": passage(k)[:20]})
        if k % 13 == 0:
            records.append({"text": GERMAN * 5, "title": str(k)})
    return records


def urls(count: int = 1500) -> list[str]:
    hosts = ("www.example.org", "imgur.com", "news.example.com", "no_host", "m.example.net")
    return [f"http://{hosts[k % 5]}/{k % 17}/page-{k * k % 700}.html" for k in range(count)]


def write_input(step: Step, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    if step.lines:
        (folder / "a.txt").write_text("\n".join(urls()))
        return [folder / "a.txt"]
    return [write_jsonl(folder / "a.jsonl", documents())]


def distribute(lines: list[bytes], folder: Path, ending: str) -> list[Path]:
    """The same lines in seven files, in order; some compressed, one empty."""
    folder.mkdir()
    paths = []
    size = -(-len(lines) // 6)
    packers: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("", bytes), (".gz", gzip.compress), (".zst", zstd.compress),
    ]  # fmt: skip
    for k, start in enumerate([*range(0, len(lines), size), len(lines)]):
        more, pack = packers[k % 3] if start < len(lines) else packers[0]
        path = folder / f"{k}{ending}{more}"
        path.write_bytes(pack(b"".join(line + b"\n" for line in lines[start : start + size])))
        paths.append(path)
    return paths


def tasks_of(output: Path) -> int:
    return sum(stages(output).values())


def done(output: Path) -> dict[Path, int]:
    """The markers of the tasks that an unfinished run has done, and when."""
    return {each: each.stat().st_mtime_ns for each in output.glob(".work/*/*.done.json")}


def run_tasks(step: Step, inputs: list[Path], output: Path, *flags: str) -> list[Path]:
    """The markers of the tasks that a run does."""
    with recorded() as markers:
        step.run(inputs, output, *flags)
    return markers


def work(step: Step, inputs: list[Path], output: Path, at: int, open_file: bool) -> None:
    """Dies at the first file that is put in place after it has done `at` tasks, of a task's output
    if open_file."""
    earlier = done(output).items()

    def die(_: str, given: Sequence[Any]) -> None:
        is_marker = str(given[1]).endswith(".done.json")
        if len(done(output).items() - earlier) >= at and not (open_file and is_marker):
            os.kill(os.getpid(), signal.SIGKILL)

    with before_calls(die, "os.rename", "os.replace"):
        step.run(inputs, output)


def kill_at(step: Step, inputs: list[Path], output: Path, at: int, open_file: bool) -> bool:
    """Run with one worker, which is killed there; whether it came so far."""
    target = partial(work, step, inputs, output, at, open_file)
    with start_ranks(target, range(1), 1, output.parent) as running:
        (code,) = running.wait()
    assert code in (0, -signal.SIGKILL)
    return code != 0


Undisturbed = Callable[[Step], tuple[list[Path], Path]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A step's two input files, and the output of two workers that nothing disturbs, made once."""

    @cache
    def run(step: Step) -> tuple[list[Path], Path]:
        folder = tmp_path_factory.mktemp(step.name)
        [first] = write_input(step, folder / "in")
        lines = first.read_bytes().splitlines(keepends=True)
        rest, half = first.with_name(f"b{first.suffix}"), len(lines) // 2
        first.write_bytes(b"".join(lines[:half]))
        rest.write_bytes(b"".join(lines[half:]))
        step.run([first, rest], folder / "out", workers=2)
        return [first, rest], folder / "out"

    return run


@every_step
def test_a_step_that_is_killed_again_and_again_ends_with_the_same_bytes(
    step: Step, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """After nearly all tasks on longer input, and on what it became while a file is written."""
    (inputs, whole), output = undisturbed(step), tmp_path / "out"
    tasks, after = tasks_of(whole), inputs[1].read_bytes()
    assert tasks > 8
    more = inputs[0].read_bytes().splitlines(keepends=True)[:30]
    inputs[1].write_bytes(b"".join([*more, after[len(after) // 9 :]]))
    assert kill_at(step, inputs, output, tasks - 1, open_file=False)
    first = done(output).items()
    inputs[1].write_bytes(after)
    assert kill_at(step, inputs, output, 2, open_file=True)
    with pytest.raises(ValueError, match="^--input "):
        find_shards([output], (".jsonl", ".txt"))
    second = [marker for marker, _ in done(output).items() - first]
    third = run_tasks(step, inputs, output)
    # The first stage is done for the units of the first file, which stand; later ones depend on the
    # other file, too. Tokenise starts afresh: its last stage removes files of the one before.
    reused = 0 if step.name == "tokenise" else len(cut(inputs[:1], 8000, lambda _: False))
    assert second
    assert len({*second, *third}) == len(second + third) == tasks - reused
    assert content(output) == content(whole)


@every_step
def test_shares_and_a_last_run_write_what_one_run_writes(
    step: Step, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    (inputs, whole), output = undisturbed(step), tmp_path / "out"
    did = [run_tasks(step, inputs, output, "--shard", each) for each in ["1/2", "0/2", "2/3"] * 2]
    assert all(did[:2])
    assert not (output / "manifest.json").exists()
    every = [*chain.from_iterable(did), *run_tasks(step, inputs, output)]
    assert len({*every}) == len(every) == tasks_of(whole)
    assert content(output) == content(whole)


def kept(output: Path) -> list[Any]:
    """All lines that were written, in order; of a tokenised data set, the documents."""
    if list(output.glob("*.bin")):
        data = IndexedDataset(str(output / "text_document"))
        ranges = [data.token_range(range(i, i + 1)) for i in range(data.num_documents)]
        return [data.read(each.start, each.stop).tolist() for each in ranges]
    folders = [output / "train", output / "valid"] if (output / "train").exists() else [output]
    lines = []
    for folder in folders:
        for path in find_shards([folder], (".jsonl", ".txt")):
            with open_shard(path) as stream:
                lines += [folder.name.encode() + b" " + line for line in stream]
    return [line.removeprefix(b"out") for line in lines]


@every_step
def test_one_shard_or_many_give_the_same_documents(step: Step, tmp_path: Path) -> None:
    [whole] = write_input(step, tmp_path / "in")
    paths = distribute(whole.read_bytes().splitlines(), tmp_path / "many", whole.suffix)
    results = []
    for name, inputs, unit in (("1", [whole], "1GB"), ("2", [whole], "3KB"), ("3", paths, "2KB")):
        output = tmp_path / name / "out"
        output.parent.mkdir()
        facts = step.run(inputs, output, unit=unit)
        facts = {each: facts[each] for each in ("input", "output", "dropped", "pieces")}
        results.append((facts, kept(output), sorted(map(json.dumps, duplicates(output)))))
    assert results[0][1]
    assert len(results[0][1]) == results[0][0]["output"]["documents"]
    for other in results[1:]:
        assert other == results[0]


EMPTY = [b'{"text": ""}', b'{"text": " \\n\\t\\u2003"}']
BAD = [
    *EMPTY, b"not json", b'{"text": "two"} {"text": "records"}', b'["a list"]', b"null",
    b'{"body": "no text"}', b'{"text": null}', b'{"text": ["a"]}', b'{"text": "\xff"}',
    b'{"text": "half \\ud83d"}', b'{"text": "\\ude00 half"}',
    b'{"text": "good", "title": "\\ud800"}', b'{"text": "good", "\\ud800": 1}',
    b'{"text": "good", "more": [{"a": ["\\ud800"]}]}', b'{"text": "raw \x00 byte"}',
    b'\x00{"text": "good"}', b"\x00" * 40, '{"text": "good"}'.encode("utf-16-le"),
    b'{"text": "good", "n": ' + b"1" * 5000 + b"}",
    b'{"text": "good", "n": 1e30, "more": ' + b"[" * 201 + b"]" * 201 + b"}",
]  # fmt: skip


def bad_input(step: Step, folder: Path) -> tuple[list[Path], list[tuple[str, int]], int]:
    """(files, (file, offset) of all that is no document, documents that are)."""
    good = [json.dumps(record).encode() for record in documents(60)]
    bad = list(BAD)
    if step.lines:
        good = [url.encode() for url in urls(300)]
        bad = [b"http://example.org/\xff", b"\xed\xa0\x80" * 10]
    elif step.name == "extract":  # there, a document of no text is one, and dropped
        bad = [line for line in BAD if line not in EMPTY]
    ending = ".txt" if step.lines else ".jsonl"
    folder.mkdir()
    mixed, places = b"", []
    for k, line in enumerate(good[: len(good) // 2]):
        mixed += line + (b"\r\n" if k % 2 else b"\n\n")
        if k < len(bad):
            places.append(("b" + ending, len(mixed)))
            mixed += bad[k] + b"\n"
    assert len(places) == len(bad)
    (folder / f"b{ending}").write_bytes(mixed)
    with (folder / f"c{ending}").open("wb") as file:  # a line of 64 MB and more, of NUL bytes
        file.write(good[-1] + b"\n")
        places.append((file.name.rpartition("/")[2], file.tell()))
        file.truncate(LONGEST_LINE + 1000)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + good[-2] + b"\n")
    (folder / f"d{ending}").touch()
    rest = b"".join(line + b"\n" for line in good[len(good) // 2 : -2])
    packed = gzip.compress(rest, mtime=0)
    (folder / f"e{ending}.gz").write_bytes(packed + packed[:5])  # of a second part, cut short
    places.append((f"e{ending}.gz", len(rest)))
    return sorted(folder.iterdir()), places, len(good)


@every_step
def test_what_is_no_document_is_set_aside_with_its_place_and_nothing_is_lost(
    step: Step, tmp_path: Path
) -> None:
    inputs, places, good = bad_input(step, tmp_path / "in")
    facts = step.run(inputs, tmp_path / "out", unit="40MB")
    rejected = read_jsonl(tmp_path / "out" / "rejected.jsonl")
    assert sorted((Path(bad["file"]).name, bad["offset"]) for bad in rejected) == sorted(places)
    assert all(bad["reason"] for bad in rejected)
    assert facts["dropped"]["bad line"]["documents"] == len(places) - 1
    assert facts["dropped"]["file cut short or damaged"]["documents"] == 1
    assert facts["input"]["documents"] == good + len(places)
    dropped = sum(each["documents"] for each in facts["dropped"].values())
    assert facts["output"]["documents"] + dropped == facts["input"]["documents"] + facts["pieces"]
    assert len(kept(tmp_path / "out")) == facts["output"]["documents"] > 20


@pytest.mark.parametrize("name", ["clean", "decontaminate", "dedup", "split"])
def test_lines_that_do_not_change_are_passed_on_byte_for_byte(name: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    head = f'{{ "n": 1.50e3,  "big": {10**30}, "text2" : null, "x": "\\/", "text":'
    texts = [f"{passage(k)} caf\u00e9" for k in range(60)]
    lines = {text: f"{head}{json.dumps(text)}}} \n".encode() for text in texts}
    path.write_bytes(b"".join(lines.values()))
    STEPS[name].run([path], tmp_path / "out")
    written = [line.partition(b" ")[2] for line in kept(tmp_path / "out")]
    same = [line for line in written if json.loads(line)["text"] in lines]
    assert len(same) > 40
    assert {*same} <= {*lines.values()}
