"""A step fills its folder once, whole, the same for everybody. test_faults.py kills runs, changes
their input, and shares them out."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.data.files import sha256
from tests.files import FOLDER_CALLS, before_calls, cut_off
from tests.programs import ROOT
from tests.refusals import field_of, refusal
from tests.tools.corpus.lines import content, manifest, read_jsonl, stages, wait_until, write_jsonl
from tests.tools.corpus.steps_of_tests import TOY, Settings, corpus, recorded, run, toy
from tools.corpus import extract, split
from tools.corpus.engine import StepRun
from tools.corpus.files import Count, DocumentCounts
from tools.corpus.readers import Format


def refused_field(settings: Settings) -> str:
    return field_of(refusal(partial(run, settings)))


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    """The files that an undisturbed run on tmp_path/in writes."""
    run(toy(corpus(tmp_path / "in"), tmp_path / "expected"))
    return content(tmp_path / "expected")


def test_a_step_writes_shards_a_manifest_and_what_it_set_aside(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    out = tmp_path / "expected"
    records = read_jsonl(out)
    assert [record["number"] for record in records] == list(range(120))
    assert records[41]["text"] == "document 1 of 1!"
    found = manifest(out)
    assert (found["step"], found["numbered"]) == ("toy", 120)
    assert found["dropped"]["bad line"]["documents"] == 1
    assert (found["input"]["documents"], found["output"]["documents"]) == (121, 120)
    inputs = sorted((tmp_path / "in").glob("*.jsonl"))
    assert [(each["name"], each["sha256"]) for each in found["inputs"]] == [
        (path.name, sha256(path)) for path in inputs
    ]
    beside = {"manifest.json", "rejected.jsonl"}
    assert {each["name"] for each in found["shards"]} | beside == expected.keys()
    [bad] = read_jsonl(out / "rejected.jsonl")
    assert bad["file"] == str(inputs[0])


def interrupt(folder: Path, output: Path) -> None:
    """A run that stops at the document "fatal"."""
    (folder / "raise").touch()
    refusal(partial(run, toy(folder, output)))
    (folder / "raise").unlink()


def write_other(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"document 7", b"DOCUMENT 7"))
    os.utime(path, (1, 1))


# Functions that fill the folder, or change input, output or settings afterwards.
Change = Callable[[Path, Path], Any]


def write_words(folder: Path, text: str = "a") -> dict[str, Any]:
    (folder.parent / "words.txt").write_text(text)
    return {"words": folder.parent / "words.txt"}


def leave_work(folder: Path, output: Path) -> None:
    """As a crash between the manifest and the end does."""
    (output / ".work" / "number").mkdir(parents=True)
    (output / ".work" / "number" / "00000.done.json").touch()


def forget_files(folder: Path, output: Path) -> None:
    """As a run.json of an earlier version, which does not list the patterns of the files."""
    run = json.loads((output / "run.json").read_bytes())
    del run["files"]
    (output / "run.json").write_text(json.dumps(run))


def split_it(folder: Path, output: Path) -> None:
    """Another step, with folders in its folder."""
    files = tuple(sorted(folder.glob("*.jsonl")))
    split.run(split.Settings(input=files, output=output, workers=1, ratio="1:1"))


def begin_other(folder: Path, output: Path) -> None:
    with StepRun("other", toy(folder, output)):
        (output / "part-00099.jsonl").write_text("{}")


FILL: dict[str, Change] = {
    "complete": lambda folder, output: run(toy(folder, output)),
    "stopped": interrupt,
    "split": split_it,
    "other": begin_other,
}
PUT = ("mine.txt", "manifest.json", "part-00000.jsonl")  # by somebody else
NOTHING: dict[str, Change] = {
    "more workers": lambda folder, output: {"workers": 2},
    "time of input": lambda folder, output: os.utime(folder / "1.jsonl", (1, 1)),
    "work left": leave_work,
}
CHANGES: dict[str, Change] = {
    "mark": lambda folder, output: {"mark": "?"},
    "unit": lambda folder, output: {"unit": "900B"},
    "compress": lambda folder, output: {"compress": "gzip"},
    "words": lambda folder, output: write_words(folder),
    "input": lambda folder, output: write_other(folder / "1.jsonl"),
    "less input": lambda folder, output: write_jsonl(folder / "0.jsonl", [{"text": "one"}]),
}
OF_FINISHED: dict[str, Change] = {
    **CHANGES,
    "name of input": lambda folder, output: (folder / "2.jsonl").rename(folder / "3.jsonl"),
    "lost shard": lambda folder, output: (output / "part-00001.jsonl").unlink(),
    "cut shard": lambda folder, output: os.truncate(output / "part-00001.jsonl", 3),
    "lost manifest": lambda folder, output: (output / "manifest.json").unlink(),
    "earlier version": lambda folder, output: forget_files(folder, output) or {"mark": "?"},
}
EVERY: dict[str, Change] = {**NOTHING, **OF_FINISHED, "": lambda folder, output: None}
ANEW: list[tuple[dict[str, Any], str]] = [({}, "refused"), ({"overwrite": True}, "anew")]
# (what fills the folder, what changes then, flags, whether the folder is kept, refused or anew).
STATES: list[tuple[str, str, dict[str, Any], str]] = [
    *(("complete", each, {}, "kept") for each in NOTHING),
    *(("complete", each, {}, "refused") for each in OF_FINISHED),
    *(("complete", each, *ANEW[1]) for each in ("less input", "cut shard", "earlier version")),
    *(("stopped", each, {}, "anew") for each in CHANGES),
    *(("stopped", each, {"shard": "0/2"}, "refused") for each in ("unit", "mark")),
    *((other, "", *outcome) for other in ("split", "other") for outcome in ANEW),
    *((name, "", flags, "refused") for name in PUT for flags, _ in ANEW),
]
MINE = ("mine.txt", "mine/part-00000.jsonl", "train/mine.txt", "a.part", "text_document.json",
        "part-0 of my notes/mine.txt")  # fmt: skip


@pytest.mark.parametrize(
    ("fill", "change", "flags", "outcome"), STATES,
    ids=["-".join([fill, change, *flags, outcome]) for fill, change, flags, outcome in STATES],
)  # fmt: skip
def test_a_folder_is_kept_refused_or_made_anew(
    fill: str, change: str, flags: dict[str, Any], outcome: str, tmp_path: Path
) -> None:
    folder, output = corpus(tmp_path / "in", fatal=2), tmp_path / "out"
    if fill in PUT:
        output.mkdir()
        (output / fill).write_text("{}")
    else:
        FILL[fill](folder, output)
    filled = content(output)
    settings = EVERY[change](folder, output)
    settings = settings if isinstance(settings, dict) else {}
    changed = content(output)
    for name in MINE:
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("mine")
    with recorded() as tasks:
        if outcome == "refused":
            assert refused_field(toy(folder, output, **settings, **flags)) == "--output"
        else:
            run(toy(folder, output, **settings, **flags))
    assert bool(tasks) == (outcome == "anew")
    if outcome == "anew":
        run(toy(folder, tmp_path / "fresh", **settings))
        filled = content(tmp_path / "fresh")
    expected = changed if outcome == "refused" else filled
    assert content(output) == expected | dict.fromkeys(MINE, b"mine")


def test_nothing_outside_of_the_folder_is_removed(tmp_path: Path) -> None:
    """Whatever a run.json that came with a corpus says."""
    folder, output = corpus(tmp_path / "in"), tmp_path / "out"
    run(toy(folder, output))
    precious = tmp_path / "precious.txt"
    precious.touch()
    facts = json.loads((output / "run.json").read_bytes())
    for pattern in ("../precious*", str(precious)):
        (output / "run.json").write_text(json.dumps(facts | {"files": ["part-*", pattern]}))
        run(toy(folder, output, mark="?", overwrite=True))
        run(toy(folder, output, overwrite=True))
        assert precious.exists()


def test_an_overwriting_run_that_is_cut_off_anywhere_goes_on(tmp_path: Path) -> None:
    folder, unit = corpus(tmp_path / "in", files=1), {"unit": "1KB"}
    run(toy(folder, tmp_path / "before", **unit))
    run(toy(folder, tmp_path / "fresh", **unit, mark="?"))
    for steps in itertools.count():
        output = shutil.copytree(tmp_path / "before", tmp_path / str(steps))
        again = toy(folder, output, **unit, mark="?", overwrite=True)
        with cut_off(steps, *FOLDER_CALLS) as lost:
            run(again)
        if not lost:
            break
        run(again)
        assert content(output) == content(tmp_path / "fresh")
    assert steps > 6


def test_the_same_content_is_the_same_input_and_setting_wherever_it_lies(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    with recorded() as tasks:
        run(toy(tmp_path / "copy", tmp_path / "expected"))
        run(toy(Path("in"), Path("expected")))
    assert not tasks
    assert content(tmp_path / "expected") == expected
    settings = toy(Path("in"), Path("out"), **write_words(tmp_path / "in"))
    run(settings)
    os.utime(tmp_path / "words.txt", (1, 1))
    run(settings)
    write_words(tmp_path / "in", "b")
    assert refused_field(settings) == "--output"
    (tmp_path / "words.txt").unlink()
    assert refused_field(settings) == str(tmp_path / "words.txt")


def test_input_and_output_lie_apart(tmp_path: Path) -> None:
    folder, out = corpus(tmp_path / "in"), tmp_path / "out"
    before = content(folder)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "link.jsonl").symlink_to(folder / "1.jsonl")
    for output in (folder, tmp_path, tmp_path / "link"):
        for overwrite in (False, True):
            assert refused_field(toy(folder, output, overwrite=overwrite)) == "--input"
    assert refused_field(toy(folder, folder / "0.jsonl")) == "--output"
    for again in (folder, folder / "1.jsonl", tmp_path / "link.jsonl"):  # given twice
        settings = toy(folder, out)
        settings = dataclasses.replace(settings, input=(*settings.input, again))
        assert refused_field(settings) == "--input"
    assert content(folder) == before
    assert not out.exists()
    run(toy(folder, folder / "out"))  # a folder in a folder is no input
    raw = tmp_path / "raw"
    write_jsonl(raw / "AA" / "wiki_00", [{"text": "a"}])
    (raw / "a.txt").write_text("a")
    formats: tuple[Format, ...] = ("wikiextractor", "text")  # searched at any depth
    for format in formats:
        deep = extract.Settings(input=(raw,), output=raw / "out", format=format, source="a")
        assert field_of(refusal(partial(extract.run, deep))) == "--output"
    assert not (raw / "out").exists()


# A terminal sends SIGINT to all processes.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_worker_and_goes_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    folder, output = corpus(tmp_path / "in", fatal=1), tmp_path / "out"
    (folder / "wait").touch()
    settings = toy(folder, output)
    line = [sys.executable, "-m", TOY, "--input", *map(str, settings.input), "--unit", "500B",
            "--output", str(output), "--workers", "2"]  # fmt: skip
    stopped = subprocess.Popen(
        line, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until((folder / "waiting").exists)
    os.killpg(stopped.pid, number) if number == signal.SIGINT else stopped.send_signal(number)
    said = stopped.communicate()[1]
    assert stopped.returncode == 128 + number
    assert "Traceback" not in said
    worker = int((folder / "waiting").read_text())
    assert not Path(f"/proc/{worker}").exists()
    (folder / "wait").unlink()
    run(toy(folder, output))
    run(toy(folder, tmp_path / "fresh"))
    assert content(output) == content(tmp_path / "fresh")


def test_a_second_run_in_the_same_folder_is_refused(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    folder, output = tmp_path / "in", tmp_path / "out"
    shares = [toy(folder, output, shard=f"{k}/2") for k in (0, 1)]
    with StepRun("toy", shares[0]):
        unfinished = output / f"part-00000.jsonl.{'0a' * 16}.part"
        unfinished.touch()
        with StepRun("toy", shares[1]):
            assert refused_field(toy(folder, output)) == "--output"
            assert unfinished.exists()  # another share writes it
    with StepRun("toy", toy(folder, output)):
        assert refused_field(toy(folder, output)) == "--output"
    run(toy(folder, output))
    assert content(output) == expected
    stages = json.loads((output / "run.json").read_bytes())["stages"]
    assert all(each["peak_bytes"] > 2**23 for each in stages)


def test_a_folder_that_another_share_makes_first_is_taken(tmp_path: Path) -> None:
    settings, make = toy(corpus(tmp_path / "in"), tmp_path / "out", shard="1/2"), Path.mkdir
    with (
        before_calls(lambda _, given: make(given[0], exist_ok=True), "pathlib.Path.mkdir"),
        StepRun("toy", settings) as step,
    ):
        assert not step.done


def test_checksums_of_a_step_are_taken_unless_a_file_was_changed(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    shards = json.loads(expected["manifest.json"])["shards"]
    sums = [shard["sha256"] for shard in shards]
    for number in range(2):
        output = tmp_path / f"out{number}"
        run(Settings(input=(tmp_path / "expected",), output=output, workers=1))
        assert [each["sha256"] for each in manifest(output)["inputs"]] == sums
        assert stages(output)["checksums"] == number  # files that were read for them
        with (tmp_path / "expected" / shards[0]["name"]).open("a") as file:
            file.write('{"text": "more"}\n')
        sums[0] = sha256(tmp_path / "expected" / shards[0]["name"])


def test_what_is_not_whole_gets_no_manifest(tmp_path: Path) -> None:
    """Input that changes while it is read, and a document that is lost."""
    folder = corpus(tmp_path / "in")
    whole, lost = (
        DocumentCounts(input={"a": Count(1, 1)}, output={"a": Count(1, 1)}),
        DocumentCounts(),
    )
    lost.enter({"text": "a"})
    for number, accounting in enumerate((lost, whole)):
        with StepRun("toy", toy(folder, tmp_path / "out")) as step:
            os.utime(folder / "1.jsonl", (number, number))
            error = refusal(partial(step.finish, accounting, []))
        assert isinstance(error, ValueError) == (accounting is whole)
        assert not (tmp_path / "out" / "manifest.json").exists()
    with StepRun("toy", toy(folder, tmp_path / "out")) as step:
        for place in (tmp_path / "out", tmp_path / "out" / "train"):  # of a worker that died
            place.mkdir(exist_ok=True)
            (place / f"a.{'0a' * 16}.part").touch()
        step.finish(whole, [])
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 3)])
def test_a_shard_that_was_lost_or_cut_after_it_was_written_stops_the_step(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder, output = corpus(tmp_path / "in", fatal=2), tmp_path / "out"
    interrupt(folder, output)
    damage(output / "part-00001.jsonl")
    with pytest.raises(RuntimeError, match=r"part-00001\.jsonl"):
        run(toy(folder, output))
    assert not (output / "manifest.json").exists()


def test_a_disk_that_is_full_at_any_file_stops_the_step_until_there_is_room(
    tmp_path: Path, expected: dict[str, bytes], small_disk: Path
) -> None:
    free, block = (disk := os.statvfs(small_disk)).f_bavail, disk.f_bsize
    if free > 1000:
        pytest.skip("a small tmpfs cannot be mounted here")
    ballast, output = small_disk / "ballast", small_disk / "out"
    for room in range(1, free, 5):
        ballast.write_bytes(bytes((free - room) * block))
        settings = toy(tmp_path / "in", output, workers=2 if room == 21 else 1)
        try:
            run(settings)
        except OSError as error:
            assert f"toy: [Errno {errno.ENOSPC}]" in str(error)  # noqa: PT017
        else:
            break
        assert not list(output.rglob("*.part"))
        ballast.unlink()
        run(settings)
        assert content(output) == expected
        shutil.rmtree(output)
    assert room > 30
