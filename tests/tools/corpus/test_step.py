"""A step fills its folder once, whole, the same for everybody, and goes on where it was stopped."""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.data.files import sha256
from megatron.data.json_lines import find_shards
from tests.dist import PATIENCE
from tests.tools.corpus.lines import content, manifest, read_jsonl, write_jsonl
from tests.tools.corpus.steps_of_tests import Settings, run
from tools.corpus import extract
from tools.corpus.program import Unfinished, program
from tools.corpus.records import Count, Funnel
from tools.corpus.settings import StepSettings, parse_size
from tools.corpus.shards import cut
from tools.corpus.step import StepRun

TOY = "tests.tools.corpus.steps_of_tests"
ROOT = Path(__file__).parents[3]


def corpus(folder: Path, files: int = 3, fatal: int | None = None) -> Path:
    """Files of 40 documents, cut into 4 units each by --unit 1KB."""
    for k in range(files):
        records: list[dict[str, Any]] = [
            {"text": f"document {i} of {k}", "n": i} for i in range(40)
        ]
        if k == fatal:
            records[20]["text"] = "fatal"
        write_jsonl(folder / f"{k}.jsonl", records)
    with (folder / "0.jsonl").open("a") as file:
        file.write("no document\n")
    (folder / "calls").touch()
    return folder


def toy(folder: Path, output: Path, **more: Any) -> Settings:
    files = tuple(sorted(folder.glob("*.jsonl")))
    return Settings(input=files, output=output, **{"workers": 1, "unit": "500B", **more})


def calls(folder: Path) -> list[str]:
    """What was called since this was asked last."""
    done = (folder / "calls").read_text().splitlines()
    (folder / "calls").write_text("")
    return done


def command(settings: Settings, *more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", TOY, "--input", *map(str, settings.input)]
    line += ["--output", str(settings.output), "--workers", str(settings.workers)]
    line += ["--unit", settings.unit, *more]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run on tmp_path/in writes."""
    run(toy(corpus(tmp_path / "in"), tmp_path / "expected"))
    calls(tmp_path / "in")
    return content(tmp_path / "expected")


def test_a_step_writes_shards_a_manifest_and_what_it_set_aside(tmp_path: Path) -> None:
    run(toy(corpus(tmp_path / "in"), tmp_path / "out"))
    records = read_jsonl(tmp_path / "out")
    assert [record["number"] for record in records] == list(range(120))
    assert records[41]["text"] == "document 1 of 1!"
    found = manifest(tmp_path / "out")
    assert found["step"] == "toy"
    assert found["numbered"] == found["output"]["documents"] == 120
    assert found["input"]["documents"] == 121
    assert found["dropped"]["bad line"]["documents"] == 1
    assert [each["name"] for each in found["inputs"]] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert [each["sha256"] for each in found["inputs"]] == [
        sha256(path) for path in sorted((tmp_path / "in").glob("*.jsonl"))
    ]
    assert {each["name"] for each in found["shards"]} | {
        "manifest.json", "run.json", "rejected.jsonl",
    } == {path.name for path in (tmp_path / "out").iterdir()}  # fmt: skip
    [bad] = read_jsonl(tmp_path / "out" / "rejected.jsonl")
    assert bad["file"].endswith("in/0.jsonl")
    assert bad["reason"].startswith("not JSON")


def test_a_finished_step_calls_nothing_again(
    tmp_path: Path, expected: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run(toy(tmp_path / "in", tmp_path / "expected", workers=2))
    assert calls(tmp_path / "in") == []
    assert "nothing is left to do" in capsys.readouterr().err
    assert content(tmp_path / "expected") == expected


def test_work_that_a_crash_left_beside_the_manifest_goes(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    left = tmp_path / "expected" / ".work" / "number" / "00000.done.json"
    left.parent.mkdir(parents=True)
    left.touch()
    run(toy(tmp_path / "in", tmp_path / "expected"))
    assert calls(tmp_path / "in") == []
    assert content(tmp_path / "expected") == expected


def interrupt(folder: Path, output: Path, **more: Any) -> int:
    """A run that stops at the document "fatal"; how many tasks it did."""
    (folder / "raise").touch()
    with pytest.raises(ValueError, match="a fatal document"):
        run(toy(folder, output, **more))
    (folder / "raise").unlink()
    return len(calls(folder)) - 1  # the last was in vain


def test_a_run_that_was_stopped_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", fatal=1)
    run(toy(folder, tmp_path / "expected"))
    every = calls(folder)
    for workers in (1, 2):
        output = tmp_path / f"out{workers}"
        did = interrupt(folder, output)
        assert 0 < did < len(every)
        with pytest.raises(ValueError, match="--input"):
            find_shards([output])
        run(toy(folder, output, workers=workers))
        assert len(calls(folder)) == len(every) - did
        assert content(output) == content(tmp_path / "expected")


def test_a_changed_file_redoes_its_units_and_all_that_follows(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", fatal=2)
    interrupt(folder, tmp_path / "out")
    write_other(folder / "1.jsonl")
    run(toy(folder, tmp_path / "out"))
    units = cut(sorted(folder.glob("*.jsonl")), 500)
    mine = [unit.name for unit in units if unit.file == str(folder / "1.jsonl")]
    again = [f"count {name}" for name in mine] + [f"number {unit.name}" for unit in units]
    assert calls(folder) == again


def write_other(path: Path, before: bytes = b"document 7", after: bytes = b"DOCUMENT 7") -> None:
    path.write_bytes(path.read_bytes().replace(before, after))
    os.utime(path, (1, 1))


def write_words(folder: Path) -> dict[str, Any]:
    (folder.parent / "words.txt").write_text("a")
    return {"words": folder.parent / "words.txt"}


# What changes after a step has finished, or was stopped: the input, the output, or settings.
Change = Callable[[Path, Path], Any]
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
}


def changed(change: Change, folder: Path, output: Path) -> dict[str, Any]:
    """Settings other than before."""
    more = change(folder, output)
    return more if isinstance(more, dict) else {}


@pytest.mark.parametrize("change", OF_FINISHED.values(), ids=OF_FINISHED)
def test_a_finished_step_is_not_taken_for_another_and_made_again_on_demand(
    change: Change, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    folder, output = tmp_path / "in", tmp_path / "expected"
    more = changed(change, folder, output)
    before = content(output)
    with pytest.raises(ValueError, match="^--output "):
        run(toy(folder, output, **more))
    assert content(output) == before
    run(toy(folder, output, overwrite=True, **more))
    run(toy(folder, tmp_path / "fresh", **more))
    assert content(output) == content(tmp_path / "fresh")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_stopped_step_leaves_nothing_of_what_it_was_begun_with(
    change: Change, tmp_path: Path
) -> None:
    folder, output = corpus(tmp_path / "in", fatal=2), tmp_path / "out"
    interrupt(folder, output)
    more = changed(change, folder, output)
    run(toy(folder, output, **more))
    run(toy(folder, tmp_path / "fresh", **more))
    assert content(output) == content(tmp_path / "fresh")


def test_a_share_refuses_other_settings_than_those_that_were_stopped(tmp_path: Path) -> None:
    folder, output = corpus(tmp_path / "in", fatal=1), tmp_path / "out"
    interrupt(folder, output)
    with pytest.raises(ValueError, match="^--output .* unit "):
        run(toy(folder, output, unit="900B", shard="0/2"))  # others may be at work
    with pytest.raises(ValueError, match="^--output .* toy"):
        StepRun("other", toy(folder, output)).__enter__()


def test_settings_of_files_are_their_content(tmp_path: Path) -> None:
    folder, words = corpus(tmp_path / "in"), tmp_path / "words.txt"
    words.write_text("a")
    run(toy(folder, tmp_path / "out", words=words))
    os.utime(words, (1, 1))
    run(toy(folder, tmp_path / "out", words=words))
    words.write_text("b")
    with pytest.raises(ValueError, match="^--output .* words "):
        run(toy(folder, tmp_path / "out", words=words))
    words.unlink()
    with pytest.raises(ValueError, match="words.txt"):
        run(toy(folder, tmp_path / "out", words=words))


def test_the_same_content_is_the_same_input_wherever_it_lies(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = tmp_path / "in", tmp_path / "expected"
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "calls").unlink()
    os.utime(folder / "1.jsonl", (1, 1))
    run(toy(folder, output))
    run(toy(tmp_path / "copy", output))
    monkeypatch.chdir(tmp_path)
    run(toy(Path("in"), Path("expected")))
    assert calls(folder) == []
    assert content(output) == expected


def test_a_relative_path_is_recognised_without_reading_the_input(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.corpus.manifest.sha256", None)
    monkeypatch.chdir(tmp_path)
    run(toy(Path("in"), Path("expected")))
    assert content(tmp_path / "expected") == expected


@pytest.mark.parametrize("name", ["mine.txt", "manifest.json", "part-00000.jsonl"])
def test_files_of_others_are_refused_and_kept(name: str, tmp_path: Path) -> None:
    folder, output = corpus(tmp_path / "in"), tmp_path / "out"
    output.mkdir()
    (output / name).write_text("{}")
    with pytest.raises(ValueError, match="--output"):
        run(toy(folder, output))
    assert (output / name).read_text() == "{}"
    with pytest.raises(ValueError, match="--output"):
        run(toy(folder, output))  # and not: another run is filling it
    if name != "mine.txt":  # by its name, a step wrote it
        run(toy(folder, output, overwrite=True))
        assert (output / name).read_text() != "{}"


@pytest.mark.parametrize("name", ["mine.txt", "mine/part-00000.jsonl", "train/mine.txt", "a.part"])
def test_nothing_but_what_steps_write_is_ever_removed(name: str, tmp_path: Path) -> None:
    folder, output = corpus(tmp_path / "in", fatal=1), tmp_path / "out"
    interrupt(folder, output)
    (output / name).parent.mkdir(exist_ok=True)
    (output / name).write_text("mine")
    for more in ({"mark": "?"}, {"mark": "?", "overwrite": True}):  # afresh, or over it
        with pytest.raises(
            ValueError, match=f"--output .*{name.split('/')[-1 if 'train' in name else 0]}"
        ):
            run(toy(folder, output, **more))
    run(toy(folder, output))
    with pytest.raises(ValueError, match="--output"):
        run(toy(folder, output, mark="?", overwrite=True))
    assert (output / name).read_text() == "mine"
    assert manifest(output)["settings"]["mark"] == "!"


def test_overwriting_removes_all_that_steps_write(tmp_path: Path) -> None:
    folder, output = corpus(tmp_path / "in"), tmp_path / "out"
    (output / "train" / ".work").mkdir(parents=True)
    written = ["train/manifest.json", "train/part-00000.jsonl.gz", "duplicates.jsonl", "run.json"]
    written += ["part-00000-001.jsonl", "part-00001.txt.zst", f"part-00009.jsonl.{'0a' * 16}.part"]
    written += ["text_document.json", "text_document-00000-of-00002.bin"]
    for name in written:
        (output / name).write_text("{}")
    run(toy(folder, output, overwrite=True))
    run(toy(folder, tmp_path / "fresh"))
    assert content(output) == content(tmp_path / "fresh")


def test_an_output_that_is_a_file_is_named(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in")
    with pytest.raises(ValueError, match="--output"):
        run(toy(folder, folder / "0.jsonl"))


def test_input_is_not_filled_as_output(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in")
    before = content(folder)
    (tmp_path / "link").symlink_to(folder)
    for output in (folder, tmp_path, tmp_path / "link"):
        for overwrite in (False, True):
            with pytest.raises(ValueError, match="--input"):
                run(toy(folder, output, overwrite=overwrite))
    assert content(folder) == before
    run(toy(folder, folder / "out"))  # a folder in a folder is no input


def test_output_in_a_folder_that_is_searched_at_any_depth_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in" / "AA").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "AA" / "wiki_00", [{"text": "a"}])
    (tmp_path / "in" / "a.txt").write_text("a")
    for format in ("wikiextractor", "text"):
        settings = extract.Settings(
            input=(tmp_path / "in",), output=tmp_path / "in" / "out", format=format, source="a"
        )
        with pytest.raises(ValueError, match="--output"):
            extract.run(settings)
    assert not (tmp_path / "in" / "out").exists()


def test_input_that_is_given_twice_is_named(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in")
    (tmp_path / "link.jsonl").symlink_to(folder / "1.jsonl")
    for second in (folder, folder / "1.jsonl", tmp_path / "link.jsonl"):
        settings = toy(folder, tmp_path / "out")
        inputs = (*settings.input, second)
        with pytest.raises(ValueError, match="--input"):
            run(dataclasses.replace(settings, input=inputs))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_is_stopped_ends_with_one_line_and_no_worker_left(
    number: signal.Signals, status: int, workers: int, tmp_path: Path
) -> None:
    folder = corpus(tmp_path / "in", fatal=1)
    (folder / "wait").touch()
    line = [sys.executable, "-m", TOY, "--input", *map(str, sorted(folder.glob("*.jsonl")))]
    line += ["--output", str(tmp_path / "out"), "--unit", "500B", "--workers", str(workers)]
    stopped = subprocess.Popen(
        line, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for _ in range(int(PATIENCE * 20)):
        if (folder / "waiting").exists():
            break
        time.sleep(0.05)
    if number == signal.SIGINT:  # a terminal sends it to all
        os.killpg(stopped.pid, number)
    else:
        stopped.send_signal(number)
    _, said = stopped.communicate(timeout=PATIENCE)
    assert stopped.returncode == status
    assert said.splitlines()[-1] == "stopped; the same command goes on from there"
    assert "Traceback" not in said
    worker = int((folder / "waiting").read_text())
    assert not Path(f"/proc/{worker}").exists()
    (folder / "wait").unlink()
    run(toy(folder, tmp_path / "out"))
    run(toy(folder, tmp_path / "fresh"))
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_a_second_run_in_the_same_folder_is_refused(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    settings = toy(tmp_path / "in", tmp_path / "out")
    with StepRun("toy", settings):
        second = command(settings)
        assert second.returncode == 2
        assert second.stderr.startswith("error: --output")
        assert second.stderr.count("\n") == 1
    run(settings)
    assert content(settings.output) == expected


def test_shares_and_a_whole_run_do_not_work_side_by_side(tmp_path: Path) -> None:
    folder, output = corpus(tmp_path / "in"), tmp_path / "out"
    first, second = (toy(folder, output, shard=f"{k}/2") for k in (0, 1))
    refused = pytest.raises(ValueError, match="--output")
    with StepRun("toy", first), StepRun("toy", second), refused:
        run(toy(folder, output))


def all_shares(folder: Path, output: Path, order: list[str], **more: Any) -> list[str]:
    """Run the shares in this order; the messages with which they end."""
    messages = []
    for shard in order:
        with pytest.raises(Unfinished) as unfinished:
            run(toy(folder, output, shard=shard, **more))
        messages.append(str(unfinished.value))
    return messages


@pytest.mark.parametrize(
    "order",
    [
        ["0/2", "1/2", "0/2"],
        ["1/2", "0/2", "1/2"],
        ["0/2"],
        ["2/3", "2/3", "0/3", "1/3", "2/3", "0/3"],
        ["0/50"],
        ["0/1"],
        ["0/2", "1/3"],
    ],
)
def test_shares_in_any_order_and_a_final_run_write_the_same(
    order: list[str], tmp_path: Path, expected: dict[str, bytes]
) -> None:
    output = tmp_path / "out"
    all_shares(tmp_path / "in", output, order)
    assert not (output / "manifest.json").exists()
    run(toy(tmp_path / "in", output))
    assert content(output) == expected


def test_shares_do_every_task_once_and_say_what_is_left(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    messages = all_shares(tmp_path / "in", tmp_path / "out", ["0/2", "1/2", "0/2", "1/2"])
    assert re.search("of the stage count, of which others have .* tasks left", messages[0])
    assert "of the stage number" in messages[1]
    assert "run without --shard" in messages[2]
    done = calls(tmp_path / "in")
    assert len(done) == len(set(done))
    run(toy(tmp_path / "in", tmp_path / "out"))
    assert calls(tmp_path / "in") == []


def test_shards_are_compressed_on_demand(tmp_path: Path, expected: dict[str, bytes]) -> None:
    for compress, ending in (("gzip", ".gz"), ("zstd", ".zst")):
        output = tmp_path / compress
        run(toy(tmp_path / "in", output, compress=compress, workers=2))
        assert read_jsonl(output) == read_jsonl(tmp_path / "expected")
        shard = manifest(output)["shards"][0]
        assert shard["name"] == f"part-00000.jsonl{ending}"
        assert shard["bytes"] == (output / shard["name"]).stat().st_size


def test_a_step_reads_what_a_step_wrote_and_takes_its_checksums(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.corpus.manifest.sha256", None)
    second = Settings(input=(tmp_path / "expected",), output=tmp_path / "out", workers=1)
    run(second)
    first = json.loads(expected["manifest.json"])["shards"]
    assert [each["sha256"] for each in manifest(tmp_path / "out")["inputs"]] == [
        shard["sha256"] for shard in first
    ]


@pytest.mark.parametrize("foreign", ["[]", '{"shards": ["a"]}', "no json", "7"])
def test_the_manifest_of_somebody_else_is_no_matter(foreign: str, tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in")
    (folder / "manifest.json").write_text(foreign)
    run(toy(folder, tmp_path / "out"))
    assert all(len(each["sha256"]) == 64 for each in manifest(tmp_path / "out")["inputs"])


def test_a_checksum_is_not_taken_for_a_file_that_was_changed(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    shard = tmp_path / "expected" / "part-00000.jsonl"
    with shard.open("a") as file:
        file.write('{"text": "more"}\n')
    run(Settings(input=(tmp_path / "expected",), output=tmp_path / "out", workers=1))
    [first, *_] = manifest(tmp_path / "out")["inputs"]
    assert first["sha256"] == sha256(shard)


def test_input_that_changes_while_it_is_read_is_no_result(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in")
    with StepRun("toy", toy(folder, tmp_path / "out")) as step:
        os.utime(folder / "1.jsonl", (1, 1))
        with pytest.raises(ValueError, match="--input"):
            step.finish(Funnel(input={"a": Count(1, 1)}, output={"a": Count(1, 1)}), [])
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_document_that_is_lost_stops_the_step(tmp_path: Path) -> None:
    funnel = Funnel()
    funnel.enter({"text": "a"})
    lost = pytest.raises(RuntimeError, match="toy: 1 documents came in and 0 were kept or dropped")
    with StepRun("toy", toy(corpus(tmp_path / "in"), tmp_path / "out")) as step, lost:
        step.finish(funnel, [])
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 3)])
def test_a_shard_that_was_lost_or_cut_after_it_was_written_stops_the_step(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder, output = corpus(tmp_path / "in", fatal=2), tmp_path / "out"
    interrupt(folder, output)
    damage(output / "part-00001.jsonl")
    with pytest.raises(RuntimeError, match=r"part-00001.jsonl is not as a worker wrote it"):
        run(toy(folder, output))
    assert not (output / "manifest.json").exists()


def full(settings: Settings) -> str:
    ended = command(settings)
    assert ended.returncode == 2
    [error] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: step toy: ")
    assert "No space left on device" in error
    assert "Traceback" not in ended.stderr
    return error


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_stops_the_step_and_it_goes_on_when_there_is_room(
    workers: int, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    records = [{"text": "long " * 200, "n": n} for n in range(200)]
    write_jsonl(folder / "0.jsonl", records)
    (folder / "calls").touch()
    run(toy(folder, tmp_path / "expected", unit="20KB"))
    every = calls(folder)
    with small_disk(tmp_path / "disk", "128k"):
        settings = toy(folder, tmp_path / "disk" / "out", unit="20KB", workers=workers)
        full(settings)
        assert not list(settings.output.rglob("*.part"))
        assert 0 < len(list(settings.output.glob("part-*"))) < len(every) // 2
        full(settings)
        remount = ["mount", "-o", "remount,size=10m", str(tmp_path / "disk")]
        subprocess.run(remount, check=True)
        calls(folder)
        assert command(settings).returncode == 0
        assert 0 < len(calls(folder)) < len(every)
        assert content(settings.output) == content(tmp_path / "expected")


def test_a_disk_that_is_full_at_any_file_stops_the_step_by_name(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open
    for room in range(1, 60, 3):
        files = itertools.count()

        def open_while_there_is_room(path: Path, *arguments: Any, **more: Any) -> Any:
            if path.name.endswith(".part") and next(files) >= room:  # noqa: B023
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return opened(path, *arguments, **more)

        settings = toy(tmp_path / "in", tmp_path / f"out{room}")
        monkeypatch.setattr(Path, "open", open_while_there_is_room)
        try:
            run(settings)
        except OSError as error:
            assert "step toy: [Errno 28] No space left on device" in str(error)  # noqa: PT017
        else:
            break
        monkeypatch.setattr(Path, "open", opened)
        run(settings)
        assert content(settings.output) == expected
    assert 30 < room < 58


def test_an_error_of_a_task_ends_the_program_with_one_line(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", fatal=1)
    (folder / "raise").touch()
    for workers in (1, 2):
        ended = command(toy(folder, tmp_path / "out", workers=workers))
        assert ended.returncode == 2
        assert "Traceback" not in ended.stderr
        last = ended.stderr.splitlines()[-1]
        assert re.fullmatch(r"error: .*/1\.jsonl, byte \d+: a fatal document", last)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "0"], "--workers 0"),
        (["--unit", "32"], "--unit"),
        (["--unit", "99B"], "--unit"),
        (["--memory", "999B"], "--memory"),
        (["--unit", "fast"], "--unit"),
        (["--memory", "0"], "--memory"),
        (["--shard", "2/2"], "--shard"),
        (["--shard", "one"], "--shard"),
        (["--shard", "0/2", "--overwrite"], "--overwrite"),
        (["--scheduler", "nonsense"], "--scheduler"),
        (["--input", "none.jsonl"], "--input"),
    ],
)
def test_flags_that_make_no_sense_are_named_before_anything_starts(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = corpus(tmp_path / "in", files=1)
    argv = ["--input", str(folder / "0.jsonl"), "--output", str(tmp_path / "out"), *flags]
    with pytest.raises(SystemExit) as ended:
        program(TOY, argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sizes_are_what_they_say() -> None:
    sizes = {"32MB": 32 * 10**6, "1.5GB": 1_500_000_000, "7B": 7, "2K": 2000, "1tb": 10**12}
    for text, size in sizes.items():
        assert parse_size("--unit", text) == size
    for text in ("", "7", "1.5", "B", "-1MB", "1e", "MB", "1XB", "nan", "inf", "0.1B"):
        with pytest.raises(ValueError, match="--unit"):
            parse_size("--unit", text)


def test_the_settings_of_a_manifest_leave_out_what_changes_nothing() -> None:
    settings = StepSettings(input=(Path("a"),), output=Path("b"))
    assert settings.parameters() == {"compress": "none", "unit": "32MB"}
