"""The sample is drawn from all over, bounded and repeatable; what it says comes near the truth."""

import json
import multiprocessing
import random
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.dist import PRELOADED
from tests.refusals import field_of, refusal
from tests.tools.corpus import test_run
from tests.tools.corpus.lines import manifest, read_jsonl, write_jsonl
from tools.corpus import plan
from tools.corpus.pipeline import read_description
from tools.corpus.settings import program


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Each job has a fork of what has been imported. A new Python, as in production, has those of
    test_run.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
        yield


def corpus(folder: Path, count: int = 4000, files: int = 5) -> list[Path]:
    dice = random.Random(5)
    words = [f"word{k}" for k in range(500)]
    records = [
        {"text": " ".join(dice.choices(words, k=dice.randint(5, 120))), "id": f"d{k}"}
        for k in range(count)
    ]
    return [write_jsonl(folder / f"{k}.jsonl", records[k::files]) for k in range(files)]


def description(folder: Path, steps: str, count: int = 4000) -> Path:
    inputs = [*map(str, corpus(folder / "in", count))]
    return test_run.description(folder, steps, f"input = {inputs}\n")


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    steps = json.loads((folder / "out" / "plan.json").read_text())["steps"]
    return {each["name"]: each for each in steps}


def sample(folder: Path, paths: list[Path], budget: int, seed: int = 1) -> list[Path]:
    files = [plan.File(path, path.stat().st_size, False) for path in paths]
    return plan.draw(files, sum(file.size for file in files), budget, seed, folder)


def test_a_sample_is_whole_lines_each_once_and_the_same_for_a_seed(tmp_path: Path) -> None:
    paths = corpus(tmp_path)
    known = {f"d{k}" for k in range(4000)}
    drawn = [sample(tmp_path / str(k), paths, 80_000, seed) for k, seed in enumerate((1, 1, 2))]
    copies, again, other = ([path.read_bytes() for path in each] for each in drawn)
    assert copies == again != other
    ids = [record["id"] for path in drawn[0] for record in read_jsonl(path)]
    assert len(ids) == len(set(ids)) > 100
    assert set(ids) <= known
    assert sum(map(len, copies)) == pytest.approx(80_000, rel=0.2)
    assert len(copies) >= plan.PLACES
    assert {path.name for path in drawn[0]} == {path.name for path in paths}
    whole = sample(tmp_path / "whole", paths, 10**9)
    assert sorted(record["id"] for path in whole for record in read_jsonl(path)) == sorted(known)


def test_files_that_are_documents_are_taken_whole(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for k in range(300):
        (texts / f"{k}.txt").write_text(f"text {k} " * 50)
    settings = SimpleNamespace(input=(texts,), format="text", unit_bytes=10**6)
    files = list(plan.input_files(settings))
    assert len(files) == 300
    total = sum(file.size for file in files)
    copies = plan.draw(iter(files), total, total // 8, 1, tmp_path / "sample")
    assert plan.PLACES <= len(copies) < 100
    for path in copies:
        assert path.read_bytes() == (texts / path.name).read_bytes()


def test_an_estimate_comes_near_what_the_run_takes(tmp_path: Path) -> None:
    """Lines are drawn from all over, and an archive is judged by its beginning."""
    dice, packed = random.Random(1), tmp_path / "web.tar.xz"
    with tarfile.open(packed, "w:xz", preset=0) as archive:
        for k in range(400):
            file = tmp_path / "one.txt"
            file.write_text(" ".join(f"{dice.getrandbits(40):x}" for _ in range(80)))
            archive.add(file, f"{k}.txt")
    web = f'[extract.web]\ninput = ["{packed}"]\nformat = "openwebtext"\nsource = "web"\n'
    steps = '[clean]\nmin_tokens = 60\nlanguage = "any"\n[split]\n'
    file = description(tmp_path, web + steps, 8000)
    plan.run(plan.Settings(config=file, sample="300KB"))
    for job in read_description(file).jobs({}):
        job.run()
        truth, estimate = manifest(job.output), kept(tmp_path)[job.name]
        near = partial(pytest.approx, rel=0.4 if job.step == "extract" else 0.1)
        assert estimate["documents_in"] == near(truth["input"]["documents"])
        assert estimate["documents_out"] == near(truth["output"]["documents"])
        assert estimate["text_out"] == near(truth["output"]["bytes"])
        written = sum(path.stat().st_size for path in job.output.rglob("*.jsonl"))
        assert estimate["disk"] == near(written)
        assert estimate["memory"] > 10e6
        assert estimate["removal"] is None
    assert kept(tmp_path)["split"]["temporary"] > 0.9 * kept(tmp_path)["split"]["text_out"]
    split, clean = kept(tmp_path)["split"], kept(tmp_path)["clean"]
    assert split["memory"] > clean["text_out"]  # it holds what it sorts


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is planned, of clean and split."""
    folder = tmp_path_factory.mktemp("planned")
    file = description(folder, '[clean]\nmin_tokens = 1\nlanguage = "any"\n[split]\n', 500)
    plan.run(plan.Settings(config=file))
    return file


def faults(
    file: Path, *steps: str, flags: dict[str, Any] | None = None, **need: dict[str, int]
) -> list[str]:
    """Why these steps, which are left, cannot fit. need: of a step, in place of its estimate."""
    jobs = [job for job in read_description(file).jobs(flags or {}) if job.name in steps]
    estimate = kept(file.parent)
    estimates = [plan.Estimate(**{**estimate[name], **need.get(name, {})}) for name in estimate]
    return plan.find_faults(jobs, estimates, file.parent / "out")


def test_what_cannot_fit_is_named_by_step(planned: Path) -> None:
    disk, memory = plan.free_disk(planned.parent), plan.free_memory()
    both = "clean", "split"
    assert faults(planned, *both) == []
    for kind in ("disk", "temporary"):
        [fault] = faults(planned, *both, split={kind: 2 * disk})
        assert field_of(fault) == "split"
    large = {"disk": disk * 2 // 3}
    [fault] = faults(planned, *both, clean=large, split=large)
    assert field_of(fault) == "split"
    assert faults(planned, "split", clean=large, split=large) == []  # clean is done
    passing = {"temporary": disk * 2 // 3}  # gone before the next step
    assert faults(planned, *both, clean=passing, split=passing) == []
    need = {"memory": round(3.2 * memory)}
    [fault] = faults(planned, *both, flags={"workers": 8}, split=need)
    assert field_of(fault) == "split"
    assert "--workers 2 " in fault  # 8 / 3.2
    elsewhere = {"workers": 8, "scheduler": "slurm"}
    assert faults(planned, *both, flags=elsewhere, split=need) == []


def test_no_more_workers_are_busy_than_there_are_units(planned: Path) -> None:
    job, _ = read_description(planned).jobs({"workers": 8})
    names = ("documents_in", "documents_out", "text_out", "disk", "temporary")
    facts = {**dict.fromkeys(names, 1), "cpu_seconds": 6.0, "peak": 100}
    found = plan.scale(job, facts, 2.0, 50e6)  # two units
    assert (found.core_seconds, found.seconds, found.memory) == (12, 6, 200)


def test_the_command_refuses_what_cannot_fit_unless_it_is_told_to_go_on(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = planned.parent / "out" / "plan.json"
    before = record.read_text()
    estimate = json.loads(before)
    estimate["steps"][1]["disk"] = 10**18
    record.write_text(json.dumps(estimate))
    error = refusal(partial(program, "tools.corpus.plan", [str(planned)]))
    assert field_of(error) == "split"
    assert "--allow-overcommit" in str(error)
    program("tools.corpus.plan", [str(planned), "--allow-overcommit"])
    monkeypatch.setattr(plan, "try_jobs", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):  # nothing is kept for another seed
        plan.run(plan.Settings(config=planned, seed=2))
    record.write_text(before)


def test_a_step_that_fails_on_the_sample_is_not_estimated_nor_what_follows(tmp_path: Path) -> None:
    file = description(tmp_path, "[clean]\nmin_tokens = 5000\n[split]\n", 300)
    plan.run(plan.Settings(config=file))
    assert [bool(each["note"]) for each in kept(tmp_path).values()] == [True, True]


def test_settings_that_a_step_refuses_on_the_sample_end_the_plan(tmp_path: Path) -> None:
    steps = '[extract.x]\nformat = "jsonl"\nkey = "body"\nsource = "x"\n'
    file = description(tmp_path, f'{steps}input = ["{tmp_path / "in"}"]\n[split]\n', 300)
    error = refusal(partial(program, "tools.corpus.plan", [str(file)]))
    assert field_of(error) == str(file)
    assert "[extract.x]" in str(error)
    assert not (tmp_path / "out").exists()


def test_what_dedup_removes_is_hardly_more_than_the_sample_says(tmp_path: Path) -> None:
    text = {"text": " ".join(f"word{k}" for k in range(40))}
    file = description(tmp_path, "[dedup]\n", count=1000)
    write_jsonl(tmp_path / "in" / "0.jsonl", [*read_jsonl(tmp_path / "in" / "0.jsonl"), text, text])
    total = sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    plan.run(plan.Settings(config=file, sample=f"{total // 2}B"))
    assert 1 / 1002 < (kept(tmp_path)["dedup"]["removal"] or 0) < 0.04
    facts = {"documents_in": 1000, "documents_out": 910}
    most = plan.removal(facts, 4.0)
    assert most is not None
    assert 4 * 0.09 < most < 1.4 * 4 * 0.09
    assert plan.removal(facts, 40.0) is None  # of so small a sample it would say nothing


def test_a_removal_far_above_that_of_the_sample_stops_the_run(tmp_path: Path) -> None:
    file, record = test_run.description(tmp_path, "[dedup]\n"), tmp_path / "out" / "plan.json"
    plan.run(plan.Settings(config=file))
    made = json.loads(record.read_text())
    [dedup] = made["steps"]
    assert dedup["removal"] > 0.001
    changed = made | {"steps": [dedup | {"removal": 0.001}]}
    record.write_text(json.dumps(changed))
    test_run.assert_refused(file, "[dedup]", "expected_removal", plan=True)
    assert json.loads(record.read_text()) == changed  # the plan is kept
    file.write_text(file.read_text() + "expected_removal = 0.5\n")
    plan.run(plan.Settings(config=file))
    again, removal = record.read_text(), str(dedup["removal"])
    assert removal in again
    record.write_text(again.replace(removal, "0.001"))
    test_run.go(file, plan=True)  # the file's word counts


def write_machine(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """A /proc and /sys, where 9 KiB are free."""
    for name, text in {
        "proc/meminfo": "MemTotal: 20 kB\nMemAvailable:       9 kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": f"22 1 0:2 / /proc rw - proc proc rw\n{mounts}",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, version: int, limit: str, used: int, cache: int) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    stat = f"anon 1\n{names[2]} {cache}\n"
    texts = {names[0]: f"{limit}\n", names[1]: f"{used}\n", "memory.stat": stat}
    return {f"{folder}/{name}": text for name, text in texts.items()}


V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2 = "41 31 0:38 / /sys/fs/cgroup{below} rw - cgroup2 cgroup2 rw\n"
NONE = "9223372036854771712"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "left"),
    [
        # No group.
        ("0::/\n", V2.format(below=""), {"memory.stat": "anon 1\n"}, 9 * 1024),
        # Its own, less what is used, but for the cache of files.
        ("0::/a\n", V2.format(below=""), group("a", 2, "5000", 3000, 1000), 3000),
        ("0::/a\n", V2.format(below=""), group("a", 2, "5000", 7000, 1000), 0),
        # A Slurm job: the step has none, the job has.
        ("0::/slurm/job_7/step_0/task_0\n", V2.format(below=""),
         group("slurm/job_7/step_0", 2, "max", 9, 9) | group("slurm/job_7", 2, "6000", 2000, 500)
         | group("slurm", 2, "8000", 3000, 0), 4500),
        # Both versions, where v2 has no controller; the same where a container mounts its group.
        ("5:cpu,cpuacct:/x\n4:memory:/slurm/job_7\n1:name=systemd:/\n0::/\n",
         V1.format(top="/") + V2.format(below="/unified"),
         group("memory/slurm/job_7", 1, NONE, 9, 0) | group("memory", 1, NONE, 9, 9)
         | group("memory/slurm", 1, "7000", 3000, 1000), 5000),
        ("4:memory:/docker/f00/in\n0::/\n", V1.format(top="/docker/f00"),
         group("memory/in", 1, "3000", 500, 0) | group("memory", 1, "4000", 1500, 500), 2500),
    ],
)  # fmt: skip
def test_free_memory_is_the_least_that_a_group_of_the_process_has_left(
    tmp_path: Path, cgroup: str, mounts: str, files: dict[str, str], left: int
) -> None:
    assert plan.free_memory(write_machine(tmp_path, cgroup, mounts, files)) == left
