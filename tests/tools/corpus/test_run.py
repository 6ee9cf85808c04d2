"""A run as a file describes it: in order, once, never on stale work, and refused where it errs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from tests.data.samples import write_tokenizer_json
from tests.tools.corpus.lines import content, manifest, read_jsonl, write_jsonl
from tools.corpus.__main__ import main
from tools.corpus.early import check_early
from tools.corpus.pipeline import read_description
from tools.corpus.run import Settings, jobs_until, run
from tools.corpus.split import Settings as SplitSettings
from tools.corpus.split import run as run_split

ROOT = Path(__file__).resolve().parents[3]
STEPS = """
[clean]
min_tokens = 20
[dedup]
jaccard = 0.7
[split]
ratio = "4:1"
"""


def corpus(folder: Path) -> Path:
    """English, with two near-duplicates."""
    records = [
        {"text": text, "id": name, "source": "topics"} for name, text in sorted(topics.items())
    ]
    records += [{**record, "id": record["id"] + " again"} for record in records[:2]]
    return write_jsonl(folder / "raw.jsonl", records)


def description(folder: Path, steps: str = STEPS, head: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "corpus.toml"
    given = "" if "input" in head else f'input = ["{corpus(folder)}"]\n'
    file.write_text(f'output = "{folder / "out"}"\nworkers = 1\n{given}{head}{steps}')
    return file


def go(file: Path, **more: Any) -> None:
    run(Settings(config=file, **{"plan": False, **more}))


def times(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")
    }


def test_the_steps_run_in_order_each_on_what_the_last_one_left(tmp_path: Path) -> None:
    go(description(tmp_path))
    out = tmp_path / "out"
    facts = [manifest(out / step) for step in ("clean", "dedup", "split")]
    assert facts[0]["input"]["documents"] == len(topics) + 2
    assert facts[0]["output"] == facts[1]["input"]
    assert facts[1]["output"] == facts[2]["input"]
    copies = len(topics) + 2 - len(set(topics.values()))
    assert facts[1]["dropped"]["same normalised text"]["documents"] >= copies >= 2
    left = len(read_jsonl(out / "split" / "train")) + len(read_jsonl(out / "split" / "valid"))
    assert left == facts[2]["output"]["documents"]


def test_a_removal_far_above_that_of_the_sample_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.corpus.plan.check", lambda *_: 0.001)
    with pytest.raises(ValueError, match=r"\[dedup\] .* would go, and 0.1% were expected"):
        go(file := description(tmp_path), plan=True)
    file.write_text(file.read_text().replace("[split]", "expected_removal = 0.5\n[split]"))
    go(file, plan=True)  # the file's word counts


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    file = description(tmp_path)
    go(file)
    before = times(tmp_path)
    go(file, plan=True)
    assert times(tmp_path) == before
    assert not (tmp_path / "out" / "plan.json").exists()  # nothing was left to plan


def test_a_changed_step_is_refused_and_with_overwrite_redone_with_all_after_it(
    tmp_path: Path,
) -> None:
    file = description(tmp_path)
    go(file)
    before = times(tmp_path)
    changed = description(tmp_path / "b", STEPS.replace("0.7", "0.5"))
    file.write_text(changed.read_text().replace(str(tmp_path / "b"), str(tmp_path)))
    with pytest.raises(ValueError, match="jaccard 0.7 instead of 0.5") as refused:
        go(file)
    assert f"python -m tools.corpus run {file} --overwrite" in str(refused.value)
    assert times(tmp_path / "out") == {
        name.removeprefix("out/"): time for name, time in before.items() if "out/" in name
    }
    go(file, overwrite=True)
    after = times(tmp_path)
    assert manifest(tmp_path / "out" / "dedup")["settings"]["jaccard"] == 0.5
    for name, when in before.items():
        if name.startswith("out/"):
            assert (after[name] == when) == name.startswith("out/clean")


def test_a_step_put_in_between_makes_the_later_ones_stale(tmp_path: Path) -> None:
    file = description(tmp_path, "[clean]\nmin_tokens = 20\n[split]\n")
    go(file)
    file.write_text(file.read_text().replace("[split]", "[dedup]\n[split]"))
    with pytest.raises(ValueError, match=r"\[split\] .* was made from other input"):
        go(file)


def test_several_sources_are_extracted_and_come_together(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in list(topics)[:5]:
        (texts / f"{name}.txt").write_text(topics[name])
    with tarfile.open(tmp_path / "more.tar.xz", "w:xz") as archive:
        archive.add(texts, "texts")
    steps = f"""
[extract.web]
input = ["{tmp_path / "more.tar.xz"}"]
format = "openwebtext"
source = "web"
[extract.files]
input = ["{texts}"]
format = "text"
source = "files"
[split]
ratio = "1:1"
"""
    go(description(tmp_path, steps))
    assert {
        name: count["documents"]
        for name, count in manifest(tmp_path / "out" / "split")["input"]["sources"].items()
    } == {"topics": len(topics) + 2, "web": 5, "files": 5}


def test_until_ends_the_run_there(tmp_path: Path) -> None:
    file = description(tmp_path)
    go(file, until="clean")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["clean"]
    with pytest.raises(ValueError, match="--until"):
        go(file, until="tokenise")


def test_flags_win_over_the_table_and_the_table_over_the_head(tmp_path: Path) -> None:
    file = description(tmp_path, '[clean]\ncompress = "gzip"\n[dedup]\n', 'compress = "zstd"\n')
    jobs = read_description(file).jobs({})
    assert [job.settings.compress for job in jobs] == ["gzip", "zstd"]
    jobs = read_description(file).jobs({"compress": "none", "workers": 3})
    assert {(job.settings.compress, job.settings.workers) for job in jobs} == {("none", 3)}


def test_both_sides_are_tokenised_and_the_report_reads_every_folder(tmp_path: Path) -> None:
    pytest.importorskip("tools.corpus.report")
    steps = STEPS + "[tokenise]\nvocab_file = 'v.json'\nmerge_file = 'm.txt'\n[report]\n"
    jobs = read_description(description(tmp_path, steps)).jobs({})
    out = tmp_path / "out"
    assert [job.name for job in jobs][-3:] == ["tokenise.train", "tokenise.valid", "report"]
    assert [list(map(Path, job.settings.input)) for job in jobs[-3:-1]] == [
        [out / "split" / "train"],
        [out / "split" / "valid"],
    ]
    assert list(jobs[-1].settings.input) == [job.output for job in jobs[:-1]]
    assert len(jobs_until(jobs, "tokenise")) == 5


@pytest.mark.parametrize(
    ("steps", "head", "message"),
    [
        ("[dedup]\njacard = 0.8\n", "", r"corpus.toml: \[dedup\] jacard .* did you mean jaccard"),
        ("[dedup]\njaccard = 1.8\n", "", r"corpus.toml: \[dedup\] jaccard = 1.8"),
        ("[dedup]\nseed = 'x'\n", "", r"corpus.toml: \[dedup\] seed"),
        ("[clean]\n[dedup]\nengine = 'x'\n", "", r"\[dedup\] engine"),
        ("[tokenise]\nappend_eod = 'true'\n", "", r"\[tokenise\] append_eod: true or false"),
        ("[extract.c4]\nformat = 'wet'\ninput = ['x']\n", "", r"\[extract.c4\] needs source"),
        ("[decontaminate]\n", "", r"\[decontaminate\] needs evaluation"),
        ("[dedup]\noutput = 'x'\n", "", r"\[dedup\] output: `run` sets it"),
        ("[dedup]\nshard = '0/2'\n", "", r"\[dedup\] shard: `run` sets it"),
        ("[split]\n[tokenise]\nvocab = 'v'\n", "", r"\[tokenise\] vocab .* mean vocab_file"),
        ("[dedupe]\n", "", "the tables: dedupe is unknown; did you mean dedup"),
        (
            "[dedup]\n",
            "worker = 3\n",
            "first table: worker is unknown; did you mean workers",
        ),
        ("[dedup]\n", "input = []\n", r"nothing to read; input = .* or a table \[extract.NAME\]"),
        ("[dedup]\n", "input = 'x'\n", "input: a list such as"),
        ("", "", "no step; a table such as"),
        ("[extract]\nformat = 'wet'\n", "", r"\[extract.wikipedia\], would work"),
        ("[extract.a]\nformat = 'wet'\nsource = 'a'\n", "", r"\[extract.a\] needs input ="),
        ("[dedup]\n[dedup.seed]\n", "", "a table in a table"),
        ("[dedup\n", "", "no TOML"),
    ],
)
def test_a_bad_description_is_refused_before_anything_starts(
    tmp_path: Path, steps: str, head: str, message: str
) -> None:
    file = description(tmp_path, steps, head)
    with pytest.raises(ValueError, match=message):
        go(file)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("step", "lines", "wrong", "works"),
    [
        ("tokenise", ["split_sentences = true", "append_eod = true"], 1, "append_eod = false"),
        ("dedup", ["jaccard = 1.8"], 0, "jaccard = 0.7"),
        ("clean", ['memory = "500"'], 0, 'memory = "500MB"'),
        ("clean", ['scheduler = "slrm"'], 0, 'scheduler = "local"'),
        ("split", ['ratio = "x"'], 0, 'ratio = "29:1"'),
        ("clean", ["min_tokens = 0"], 0, "min_tokens = 128"),
        (
            "extract.a",
            ["format = 'wet'", "input = ['x']", "source = ''"],
            2,
            'source = "wikipedia"',
        ),
        ("dedup", ["workers = 0"], 0, f"workers = {len(os.sched_getaffinity(0))}"),
    ],
)
def test_a_cure_is_a_line_of_the_file_and_works_there(
    tmp_path: Path, step: str, lines: list[str], wrong: int, works: str
) -> None:
    def jobs(*lines: str) -> None:
        head = "" if "extract" in step else "input = ['x']\n"
        (tmp_path / "run.toml").write_text("\n".join([f"output = 'o'\n{head}[{step}]", *lines]))
        read_description(tmp_path / "run.toml").jobs({})

    with pytest.raises(ValueError, match=re.escape(works)) as refused:
        jobs(*lines)
    assert "--" not in str(refused.value)
    jobs(*[works if number == wrong else line for number, line in enumerate(lines)])


def test_a_description_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none.toml"):
        go(tmp_path / "none.toml")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        go(tmp_path)


DECONTAMINATE = "[clean]\n[decontaminate]\nevaluation = ['{}']\ntitles = ['{}']\n"


@pytest.mark.parametrize(
    ("steps", "head", "message"),
    [
        ("[dedup]\n", "input = ['/none/x.jsonl']\n", "corpus.toml: input /none/x.jsonl: no such"),
        ("[split]\n[tokenise]\nvocab_file = '/none/v'\n", "", r"\[tokenise\] vocab_file /none/v: "),
        ("[split]\n[tokenise]\n", "", r"\[tokenise\] vocab_file is missing"),
        (DECONTAMINATE.format("/none/e", __file__), "", r"nate\] evaluation /none/e: no such"),
        (DECONTAMINATE.format(__file__, "/none/t"), "", r"nate\] titles /none/t: no such"),
        ("[extract.a]\nformat = 'wet'\nsource = 'a'\ninput = ['/none/w']\n[split]\n", "",
         r"\[extract.a\] input /none/w: no such file"),
        (f"[clean]\n[decontaminate]\nevaluation = ['{__file__}']\nvocab_file = '{__file__}'\n", "",
         r"\[decontaminate\] vocab_file .*test_run.py is not JSON"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("plan", [True, False])
def test_what_a_later_step_would_miss_is_named_before_the_first(
    tmp_path: Path, steps: str, head: str, message: str, plan: bool
) -> None:
    file = description(tmp_path, steps, head)
    with pytest.raises(ValueError, match=message):
        go(file, plan=plan)
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_may_be_the_folder_of_a_tokenizer_json(tmp_path: Path) -> None:
    folder = write_tokenizer_json(tmp_path / "json")
    steps = f"[tokenise]\ntokenizer_type = 'HuggingFaceTokenizer'\nvocab_file = '{folder}'\n"
    made = read_description(description(tmp_path, STEPS + steps))
    check_early(made, made.jobs({}))


def test_what_the_run_itself_makes_need_not_be_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = description(tmp_path, STEPS + "[report]\n")
    file.write_text(file.read_text().replace(str(tmp_path / "out"), "out"))
    for scheduler in ("local", "slurm"):  # jobs elsewhere get paths from the root
        made = read_description(file)
        check_early(made, made.jobs({"scheduler": scheduler}))
    beside = "[extract.a]\nformat = 'wet'\nsource = 'a'\ninput = ['{}']\n"
    file = description(tmp_path, beside.format(tmp_path / "raw"))
    with pytest.raises(ValueError, match="raw"):  # a neighbour of OUTPUT
        go(file)


def test_overwrite_reaches_the_steps_and_not_the_sample_of_the_plan(tmp_path: Path) -> None:
    file = description(tmp_path, "[split]\n[report]\n")
    go(file, plan=True, overwrite=True)
    told = json.loads((tmp_path / "out" / "plan.json").read_text())["steps"]
    assert [each["note"] for each in told] == [""]


def test_the_usual_steps_run_without_a_file(tmp_path: Path) -> None:
    given = {"config": None, "output": tmp_path / "out", "plan": False, "workers": 1}
    run(Settings(input=(corpus(tmp_path),), **given))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["clean", "dedup", "split"]
    with pytest.raises(ValueError, match="--overwrite"):
        run(Settings(input=(write_jsonl(tmp_path / "b.jsonl", [{"text": "b"}]),), **given))
    with pytest.raises(ValueError, match="^--input"):
        Settings(input=(tmp_path,))


def test_the_files_that_come_with_the_project_describe_runs() -> None:
    files = sorted((ROOT / "scripts" / "corpus").glob("*.toml"))
    assert len(files) == 2
    for file in files:
        assert read_description(file).jobs({})


def program(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.corpus", *arguments],
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_name_runs_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("extract", "clean", "decontaminate", "dedup", "split", "report",
                 "run", "plan", "urls", "harvest"):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert not ended.value.code
        assert f"usage: python -m tools.corpus.{name} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["dedupe"])
    assert ended.value.code == 2
    assert "dedupe is unknown; extract, clean, " in capsys.readouterr().err


def test_the_command_plans_runs_and_ends_with_2_on_an_error(tmp_path: Path) -> None:
    ended = program("run", str(description(tmp_path, "[split]\nratio = '3:1'\n")))
    assert ended.returncode == 0, ended.stderr
    assert "core time" in ended.stdout
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["steps"][0]["name"] == "split"
    assert read_jsonl(tmp_path / "out" / "split" / "train")
    ended = program("run", str(tmp_path / "none.toml"))
    assert ended.returncode == 2
    assert "none.toml" in ended.stderr


def test_kill_9_and_the_same_command_again_with_more_workers(tmp_path: Path) -> None:
    file, out = description(tmp_path), tmp_path / "out"
    go(file)
    whole = content(out)
    shutil.rmtree(out)  # in the same place again: duplicates.jsonl names files
    killed = subprocess.Popen(
        [sys.executable, "-m", "tools.corpus", "run", str(file), "--no-plan"],
        cwd=ROOT, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (out / "dedup" / ".work").exists() and killed.poll() is None:
        time.sleep(0.001)
    killed.kill()
    assert killed.wait() in (-signal.SIGKILL, 0)  # on a busy machine it may have come to its end
    ended = program("run", str(file), "--no-plan", "--workers", "2")
    assert ended.returncode == 0, ended.stderr
    assert content(out) == whole


SBATCH = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
for word in "$@"; do
    [[ $word == --array=* ]] && last=${word#--array=0-}
    [[ $word == --* ]] && shift || break
done
export SLURM_JOB_ID=7 SLURM_SUBMIT_DIR="$PWD"
if [[ -n ${last:-} ]]; then
    export SLURM_ARRAY_TASK_COUNT=$((last + 1))
    for ((k = 0; k <= last; k++)); do SLURM_ARRAY_TASK_ID=$k bash "$@" >&2; done
else
    bash "$@" >&2
fi
echo "7;cluster"
"""


def test_the_array_of_jobs_writes_what_one_process_writes(tmp_path: Path) -> None:
    raw = corpus(tmp_path)
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(SBATCH)
    fake.chmod(0o755)
    flags = ["--input", str(raw), "--shard-size", "40KB", "--unit", "50KB", "--ratio", "3:1"]
    environ = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environ |= {"LOG": str(tmp_path / "log"), "ARRAY": "2", "STAGES": "3"}
    ended = subprocess.run(
        ["bash", "scripts/slurm/corpus_array.sh", "tools.corpus.split", *flags,
         "--output", str(tmp_path / "array")],
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    jobs = (tmp_path / "log").read_text().splitlines()
    assert ["--array=0-1" in job for job in jobs] == [True, True, True, False]  # one too many
    assert ["--dependency=afterok:7 " in job for job in jobs] == [False, True, True, True]
    one = SplitSettings(
        input=(raw,), output=tmp_path / "one", workers=1, shard_size="40KB", unit="50KB",
        ratio="3:1",
    )  # fmt: skip
    run_split(one)
    assert content(tmp_path / "array") == content(tmp_path / "one")


LOGGING = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
echo 7
"""


def test_there_is_an_array_for_every_stage(tmp_path: Path) -> None:
    go(description(tmp_path))
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(LOGGING)
    fake.chmod(0o755)
    for step in ("clean", "dedup", "split"):
        log = tmp_path / f"{step}.log"
        environ = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "LOG": str(log)}
        subprocess.run(
            ["bash", "scripts/slurm/corpus_array.sh", f"tools.corpus.{step}", "--input", "x"],
            cwd=ROOT, env={**os.environ, **environ}, check=True,
        )  # fmt: skip
        stages = json.loads((tmp_path / "out" / step / "run.json").read_text())["stages"]
        needed = [stage for stage in stages if stage["stage"] != "checksums"]  # of the last job
        assert log.read_text().count("--array=") == len(needed)
