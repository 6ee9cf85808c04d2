"""The sample is drawn from all over, bounded and repeatable; what it says comes near the truth."""

import json
import random
import tarfile
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tools.corpus.lines import manifest, read_jsonl, write_jsonl
from tools.corpus import plan as module
from tools.corpus.estimate import removal
from tools.corpus.pipeline import read_description
from tools.corpus.plan import Settings, free_disk, free_memory, run
from tools.corpus.program import program
from tools.corpus.sample import PLACES, File, draw, input_files


def corpus(folder: Path, count: int = 4000, files: int = 5) -> list[Path]:
    draw = random.Random(5)
    words = [f"word{k}" for k in range(500)]
    records = [
        {"text": " ".join(draw.choices(words, k=draw.randint(5, 120))), "id": f"d{k}"}
        for k in range(count)
    ]
    return [write_jsonl(folder / f"{k}.jsonl", records[k::files]) for k in range(files)]


def description(folder: Path, steps: str, count: int = 4000) -> Path:
    inputs = ", ".join(f'"{path}"' for path in corpus(folder / "in", count))
    file = folder / "corpus.toml"
    head = f'output = "{folder / "out"}"\ninput = [{inputs}]\nworkers = 1\n'
    file.write_text(head + steps)
    return file


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    steps = json.loads((folder / "out" / "plan.json").read_text())["steps"]
    return {each["name"]: each for each in steps}


def sample(folder: Path, paths: list[Path], budget: int, seed: int = 1) -> list[Path]:
    files = [File(path, path.stat().st_size, False) for path in paths]
    return draw(files, sum(file.size for file in files), budget, seed, folder)


def test_a_sample_is_whole_lines_of_the_corpus_each_once(tmp_path: Path) -> None:
    paths = corpus(tmp_path)
    known = {record["id"] for path in paths for record in read_jsonl(path)}
    copies = sample(tmp_path / "sample", paths, 80_000)
    ids = [record["id"] for path in copies for record in read_jsonl(path)]
    assert len(ids) == len(set(ids)) > 100
    assert set(ids) <= known
    assert sum(path.stat().st_size for path in copies) == pytest.approx(80_000, rel=0.2)
    assert len(copies) >= PLACES
    assert {path.name for path in copies} == {path.name for path in paths}


def test_a_sample_is_the_same_for_the_same_seed_only(tmp_path: Path) -> None:
    paths = corpus(tmp_path)
    drawn = [
        [path.read_bytes() for path in sample(tmp_path / str(k), paths, 30_000, seed)]
        for k, seed in enumerate((1, 1, 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_sample_as_large_as_the_corpus_is_the_corpus(tmp_path: Path) -> None:
    paths = corpus(tmp_path, count=200)
    copies = sample(tmp_path / "sample", paths, 10**9)
    ids = [record["id"] for path in copies for record in read_jsonl(path)]
    assert sorted(ids) == sorted(f"d{k}" for k in range(200))


def test_of_what_is_packed_the_beginning_is_taken(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(500_000)
    (tmp_path / "x.jsonl.gz").write_bytes(noise)
    [copy] = sample(tmp_path / "sample", [tmp_path / "x.jsonl.gz"], 40_000)
    assert copy.name == "x.jsonl.gz"
    assert copy.read_bytes() == noise[: copy.stat().st_size]
    assert copy.stat().st_size == pytest.approx(40_000, rel=0.01)


def test_files_that_are_documents_are_taken_whole(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for k in range(300):
        (texts / f"{k}.txt").write_text(f"text {k} " * 50)
    settings = SimpleNamespace(input=(texts,), format="text", unit_bytes=10**6)
    files = list(input_files(settings))
    assert len(files) == 300
    total = sum(file.size for file in files)
    copies = draw(iter(files), total, total // 8, 1, tmp_path / "sample")
    assert PLACES <= len(copies) < 100
    for path in copies:
        assert path.read_bytes() == (texts / path.name).read_bytes()


def test_an_estimate_comes_near_what_the_run_takes(tmp_path: Path) -> None:
    file = description(tmp_path, '[clean]\nmin_tokens = 60\nlanguage = "any"\n[split]\n', 8000)
    run(Settings(config=file, sample="300KB"))
    for job in read_description(file).jobs({}):
        job.run()
        truth, told = manifest(job.output), kept(tmp_path)[job.name]
        assert told["documents_in"] == pytest.approx(truth["input"]["documents"], rel=0.1)
        assert told["documents_out"] == pytest.approx(truth["output"]["documents"], rel=0.1)
        assert told["text_out"] == pytest.approx(truth["output"]["bytes"], rel=0.1)
        written = sum(path.stat().st_size for path in job.output.rglob("*.jsonl"))
        assert told["disk"] == pytest.approx(written, rel=0.15)
        assert told["memory"] > 10e6
        assert told["core_seconds"] > 0
    assert kept(tmp_path)["split"]["temporary"] > 0.9 * kept(tmp_path)["split"]["text_out"]
    split, clean = kept(tmp_path)["split"], kept(tmp_path)["clean"]
    assert split["memory"] > clean["text_out"]  # it holds what it sorts


def test_archives_are_planned_from_their_beginning(tmp_path: Path) -> None:
    draw = random.Random(1)
    with tarfile.open(tmp_path / "web.tar.xz", "w:xz") as archive:
        for k in range(1500):
            file = tmp_path / "one.txt"
            file.write_text(" ".join(f"{draw.getrandbits(40):x}" for _ in range(40)))
            archive.add(file, f"{k}.txt")
    source = f'input = ["{tmp_path / "web.tar.xz"}"]\nformat = "openwebtext"\nsource = "web"\n'
    file = tmp_path / "corpus.toml"
    file.write_text(f'output = "{tmp_path / "out"}"\n[extract.web]\n{source}[split]\n')
    run(Settings(config=file, sample="100KB", workers=1))
    told = kept(tmp_path)
    assert told["extract.web"]["documents_out"] == pytest.approx(1500, rel=0.4)
    assert told["split"]["documents_in"] == told["extract.web"]["documents_out"]


def test_a_plan_is_kept_and_made_again_where_something_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = description(tmp_path, "[split]\n", 500)
    tried: list[int] = []
    real = module.estimate

    def counted(*arguments: Any) -> Any:
        tried.append(1)
        return real(*arguments)

    monkeypatch.setattr(module, "estimate", counted)
    run(Settings(config=file))
    run(Settings(config=file))
    assert len(tried) == 1
    file.write_text(file.read_text() + "seed = 2\n")
    run(Settings(config=file))
    assert len(tried) == 2


def test_too_little_disk_is_refused_naming_step_need_and_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = description(tmp_path, "[split]\n")
    monkeypatch.setattr(module, "free_disk", lambda folder: 100_000)
    with pytest.raises(ValueError, match=r"split: \S+ MB of disk are needed in .* 100 kB are free"):
        run(Settings(config=file))
    run(Settings(config=file, allow_overcommit=True))
    assert "warning: split:" in capsys.readouterr().err


def test_too_little_memory_is_refused_unless_others_do_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = description(tmp_path, '[split]\nunit = "100KB"\n')
    monkeypatch.setattr(module, "free_memory", lambda: 3 * 10**8)
    with pytest.raises(ValueError, match=r"split: .* of memory .* --workers [1-5] .* would work"):
        run(Settings(config=file, workers=8))
    file.write_text(file.read_text() + 'scheduler = "slurm"\n')
    run(Settings(config=file, workers=8))


def test_what_is_done_needs_no_more_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = '[clean]\nmin_tokens = 1\nlanguage = "any"\n[split]\n'
    file = description(tmp_path, steps)
    run(Settings(config=file))
    need = kept(tmp_path)["split"]["disk"] + kept(tmp_path)["split"]["temporary"]
    monkeypatch.setattr(module, "free_disk", lambda folder: need + 1)
    with pytest.raises(ValueError, match="split: "):
        run(Settings(config=file))
    read_description(file).jobs({})[0].run()
    run(Settings(config=file))


def test_a_step_that_fails_on_the_sample_is_not_estimated_nor_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = description(tmp_path, "[clean]\nmin_tokens = 5000\n[split]\n", 300)
    run(Settings(config=file))
    told = kept(tmp_path)
    assert told["clean"]["note"].startswith("not estimated: clean: none of ")
    assert told["split"]["note"] == "not estimated: after clean"
    assert "split: not estimated" in capsys.readouterr().out


def test_settings_that_a_step_refuses_on_the_sample_end_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = '[extract.x]\nformat = "jsonl"\nkey = "body"\nsource = "x"\n'
    file = description(tmp_path, f'{steps}input = ["{tmp_path / "in"}"]\n[split]\n', 300)
    with pytest.raises(SystemExit) as ended:
        program("tools.corpus.plan", [str(file)])
    assert ended.value.code == 2
    assert f"error: {file}: [extract.x] --format jsonl with --key" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_a_file_the_usual_steps_are_planned(tmp_path: Path) -> None:
    english = write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": t} for t in topics.values()])
    run(Settings(input=(english.parent,), output=tmp_path / "out", workers=2))
    assert list(kept(tmp_path)) == ["clean", "dedup", "split"]
    assert kept(tmp_path)["clean"]["removal"] is None


def test_what_dedup_removes_is_hardly_more_than_the_sample_says(tmp_path: Path) -> None:
    text = {"text": " ".join(f"word{k}" for k in range(40))}
    file = description(tmp_path, "[dedup]\n", count=4000)
    write_jsonl(tmp_path / "in" / "0.jsonl", [*read_jsonl(tmp_path / "in" / "0.jsonl"), text, text])
    total = sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    run(Settings(config=file, sample=f"{total // 2}B"))
    assert 1 / 4002 < (kept(tmp_path)["dedup"]["removal"] or 0) < 0.01
    facts = {"documents_in": 1000, "documents_out": 910}
    most = removal(facts, 4.0)
    assert most is not None
    assert 4 * 0.09 < most < 1.4 * 4 * 0.09
    assert removal(facts, 40.0) is None  # of so small a sample it would say nothing


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "^--input"),
        ({"input": (Path("x"),)}, "^--input"),
        ({"config": Path("x"), "output": Path("y")}, "^--input"),
        ({"config": Path("x"), "sample": "lots"}, "--sample lots"),
    ],
)
def test_a_request_that_cannot_be_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**more)


def test_the_command_ends_with_2_where_it_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = description(tmp_path, "[split]\n", 500)
    monkeypatch.setattr(module, "free_disk", lambda folder: 10)
    with pytest.raises(SystemExit) as ended:
        program("tools.corpus.plan", [str(file)])
    assert ended.value.code == 2
    assert "error: split: " in capsys.readouterr().err


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
        # No group, no limit, and one above what the machine has.
        ("0::/\n", V2.format(below=""), {"memory.stat": "anon 1\n"}, 9 * 1024),
        ("0::/a\n", V2.format(below=""), group("a", 2, "max", 7, 1), 9 * 1024),
        ("0::/a\n", V2.format(below=""), group("a", 2, "20000", 7, 1), 9 * 1024),
        # Its own, less what is used, but for the cache of files; that of another group.
        ("0::/a\n", V2.format(below=""), group("a", 2, "5000", 3000, 1000), 3000),
        ("0::/a\n", V2.format(below=""), group("b", 2, "5000", 3000, 1000), 9 * 1024),
        ("0::/a\n", V2.format(below=""), group("a", 2, "5000", 7000, 1000), 0),
        # A Slurm job: the step has none, the job has.
        (
            "0::/slurm/job_7/step_0/task_0\n",
            V2.format(below=""),
            group("slurm/job_7/step_0", 2, "max", 9, 9) | group("slurm/job_7", 2, "6000", 2000, 500)
            | group("slurm", 2, "8000", 3000, 0),
            4500,
        ),
        # Both versions, where v2 has no controller; the same where a container mounts its group.
        (
            "5:cpu,cpuacct:/x\n4:memory:/slurm/job_7\n1:name=systemd:/\n0::/\n",
            V1.format(top="/") + V2.format(below="/unified"),
            group("memory/slurm/job_7", 1, NONE, 9, 0) | group("memory", 1, NONE, 9, 9)
            | group("memory/slurm", 1, "7000", 3000, 1000),
            5000,
        ),
        (
            "4:memory:/docker/f00\n0::/\n",
            V1.format(top="/docker/f00"),
            group("memory", 1, "4000", 1500, 500),
            3000,
        ),
        (
            "4:memory:/docker/f00/in\n0::/\n",
            V1.format(top="/docker/f00"),
            group("memory/in", 1, "3000", 500, 0) | group("memory", 1, "4000", 1500, 500),
            2500,
        ),
    ],
)  # fmt: skip
def test_free_memory_is_the_least_that_a_group_of_the_process_has_left(
    tmp_path: Path, cgroup: str, mounts: str, files: dict[str, str], left: int
) -> None:
    assert free_memory(write_machine(tmp_path, cgroup, mounts, files)) == left


def test_free_space_is_that_of_the_place_to_be(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "a" / "b") == pytest.approx(free_disk(tmp_path), rel=0.05)
    assert 10**7 < free_memory() < 10**14
