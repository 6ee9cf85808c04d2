"""A run as a file describes it: in order, once, never on stale work, and refused where it errs."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from tests.data.samples import write_tokenizer_json
from tests.programs import ROOT
from tests.refusals import refusal, refused
from tests.tools.corpus.lines import content, manifest, read_jsonl, stages, write_jsonl
from tools.corpus.pipeline import preflight, read_description
from tools.corpus.run import Settings, jobs_until, run
from tools.corpus.settings import program

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


def assert_refused(file: Path, *words: str, **more: Any) -> None:
    """The error with which the run ends names all these words."""
    error = str(refusal(partial(go, file, **more), lines=3))
    assert not [word for word in words if word not in error], error


def times(folder: Path) -> dict[str, int]:
    out = folder / "out"
    return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in out.rglob("*.jsonl")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run that has come to its end, beside its output."""
    file = description(tmp_path_factory.mktemp("finished"))
    go(file)
    return file


def test_the_steps_run_in_order_each_on_what_the_last_one_left(finished: Path) -> None:
    out = finished.parent / "out"
    facts = [manifest(out / step) for step in ("clean", "dedup", "split")]
    assert facts[0]["input"]["documents"] == len(topics) + 2
    assert facts[0]["output"] == facts[1]["input"]
    assert facts[1]["output"] == facts[2]["input"]
    copies = len(topics) + 2 - len(set(topics.values()))
    assert facts[1]["dropped"]["same normalised text"]["documents"] >= copies >= 2
    left = len(read_jsonl(out / "split" / "train")) + len(read_jsonl(out / "split" / "valid"))
    assert left == facts[2]["output"]["documents"]
    before = times(finished.parent)
    go(finished, plan=True)
    assert times(finished.parent) == before
    assert not (out / "plan.json").exists()  # nothing was left to plan


def test_a_changed_step_is_refused_and_with_overwrite_redone_with_all_after_it(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished.parent, tmp_path, dirs_exist_ok=True)
    before = times(tmp_path)
    file = description(tmp_path, STEPS.replace("0.7", "0.5"))
    assert_refused(file, "jaccard 0.7", "0.5", f"python tools/corpus.py run {file} --overwrite")
    assert times(tmp_path) == before
    go(file, overwrite=True)
    after = times(tmp_path)
    assert manifest(tmp_path / "out" / "dedup")["settings"]["jaccard"] == 0.5
    for name, when in before.items():
        assert (after[name] == when) == name.startswith("clean")
    first = " ".join(read_jsonl(tmp_path / "raw.jsonl")[0]["text"].split())
    (tmp_path / "test.txt").write_text(first)
    between = f"[decontaminate]\nevaluation = ['{tmp_path / 'test.txt'}']\n"
    file.write_text(file.read_text() + between)
    assert_refused(file, "[dedup]", "--overwrite")  # which gets other input


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
    file = description(tmp_path, steps)
    go(file, until="extract")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["extract"]
    # The cure does the rest.
    assert refused(lambda words: go(file, until=words[1]), "--until tokenise") == "--until"
    sources = manifest(tmp_path / "out" / "split")["input"]["sources"]
    assert {name: count["documents"] for name, count in sources.items()} == {
        "topics": len(topics) + 2, "web": 5, "files": 5,
    }  # fmt: skip


def test_flags_win_over_the_table_and_the_table_over_the_head(tmp_path: Path) -> None:
    file = description(tmp_path, '[clean]\ncompress = "gzip"\n[dedup]\n', 'compress = "zstd"\n')
    jobs = read_description(file).jobs({})
    assert [job.settings.compress for job in jobs] == ["gzip", "zstd"]
    jobs = read_description(file).jobs({"compress": "none", "workers": 3})
    assert {(job.settings.compress, job.settings.workers) for job in jobs} == {("none", 3)}


def test_both_sides_are_tokenised_and_the_report_reads_every_folder(tmp_path: Path) -> None:
    steps = STEPS + "[tokenise]\nvocab_file = 'v.json'\nmerge_file = 'm.txt'\n[report]\n"
    jobs = read_description(description(tmp_path, steps)).jobs({})
    split = tmp_path / "out" / "split"
    assert [job.name for job in jobs][-3:] == ["tokenise.train", "tokenise.valid", "report"]
    inputs = [list(map(Path, job.settings.input)) for job in jobs[-3:]]
    assert inputs == [[split / "train"], [split / "valid"], [job.output for job in jobs[:-1]]]
    assert len(jobs_until(jobs, "tokenise")) == 5


EXTRACT = "[extract.a]\nformat = 'wet'\nsource = 'a'\n"
EVALUATION = "[clean]\n[decontaminate]\nevaluation = ['{}']\ntitles = ['{}']\n"


# Steps, what stands before the first table, and words of the error: table, key and what was meant.
@pytest.mark.parametrize(
    ("steps", "head", "words"),
    [
        ("[dedup]\njacard = 0.8\n", "", "[dedup] jacard jaccard"),
        ("[tokenise]\nappend_eod = 'true'\n", "", "[tokenise] append_eod true false"),
        ("[extract.c4]\nformat = 'wet'\ninput = ['x']\n", "", "[extract.c4] source"),
        ("[decontaminate]\n", "", "[decontaminate] evaluation"),
        ("[dedup]\noutput = 'x'\n", "", "[dedup] output"),
        ("[dedupe]\n", "", "dedupe dedup"),
        ("[dedup]\n", "worker = 3\n", "worker workers"),
        ("[dedup]\n", "input = []\n", "input [extract.NAME]"),
        ("", "", "[dedup]"),
        ("[extract]\nformat = 'wet'\n", "", "[extract] format [extract.wikipedia]"),
        (EXTRACT, "", "[extract.a] input"),
        ("[dedup\n", "", ""),
        # A file that a later step would miss is named before the first.
        ("[dedup]\n", "input = ['/none/x.jsonl']\n", "input /none/x.jsonl"),
        ("[split]\n[tokenise]\nvocab_file = '/none/v'\n", "", "[tokenise] vocab_file /none/v"),
        (EVALUATION.format(__file__, "/none/t"), "", "[decontaminate] titles /none/t"),
        (f"[clean]\n[decontaminate]\nevaluation = ['{__file__}']\nvocab_file = '{__file__}'\n",
         "", "[decontaminate] vocab_file test_run.py"),
    ],
)  # fmt: skip
def test_a_bad_description_is_refused_before_anything_starts(
    tmp_path: Path, steps: str, head: str, words: str
) -> None:
    file = description(tmp_path, steps, head)
    for is_planned in (True, False):
        assert_refused(file, str(file), *words.split(), plan=is_planned)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("step", "lines", "wrong", "works"),
    [
        ("tokenise", ["split_sentences = true", "append_eod = true"], 1, "append_eod = false"),
        ("split", ['ratio = "x"'], 0, 'ratio = "29:1"'),
        ("extract.a", ["format = 'wet'", "input = ['x']", "source = ''"], 2,
         'source = "wikipedia"'),
        ("dedup", ["workers = 0"], 0, f"workers = {len(os.sched_getaffinity(0))}"),
    ],
)  # fmt: skip
def test_a_cure_is_a_line_of_the_file_and_works_there(
    tmp_path: Path, step: str, lines: list[str], wrong: int, works: str
) -> None:
    def jobs(*lines: str) -> None:
        head = "" if "extract" in step else "input = ['x']\n"
        (tmp_path / "run.toml").write_text("\n".join([f"output = 'o'\n{head}[{step}]", *lines]))
        read_description(tmp_path / "run.toml").jobs({})

    error = str(refusal(partial(jobs, *lines)))
    assert works in error
    assert "--" not in error
    jobs(*[works if number == wrong else line for number, line in enumerate(lines)])


def test_a_description_that_is_not_there_is_named(tmp_path: Path) -> None:
    for file in (tmp_path / "none.toml", tmp_path):
        assert_refused(file, str(file))


def test_a_vocabulary_may_be_the_folder_of_a_tokenizer_json(tmp_path: Path) -> None:
    folder = write_tokenizer_json(tmp_path / "json")
    steps = f"[tokenise]\ntokenizer_type = 'HuggingFaceTokenizer'\nvocab_file = '{folder}'\n"
    made = read_description(description(tmp_path, STEPS + steps))
    preflight(made, made.jobs({}))


def test_what_the_run_itself_makes_need_not_be_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = description(tmp_path, STEPS + "[report]\n")
    file.write_text(file.read_text().replace(str(tmp_path / "out"), "out"))
    for scheduler in ("local", "slurm"):  # jobs elsewhere get paths from the root
        made = read_description(file)
        preflight(made, made.jobs({"scheduler": scheduler}))
    raw = tmp_path / "raw"  # a neighbour of OUTPUT
    assert_refused(description(tmp_path, f"{EXTRACT}input = ['{raw}']\n"), str(raw))


def test_the_usual_steps_run_without_a_file(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "out"), "--no-plan", "--workers", "1", "--input"]
    usual = partial(program, "tools.corpus.run")
    raw = str(corpus(tmp_path))
    assert "memory" in str(refusal(partial(usual, [*words, raw, "--memory", "1B"])))
    usual([*words, raw])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["clean", "dedup", "split"]
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": "b"}])
    assert "--overwrite" in str(refusal(partial(usual, [*words, str(other)]), lines=3))


def test_the_files_that_come_with_the_project_describe_runs() -> None:
    files = sorted((ROOT / "scripts" / "corpus").glob("*.toml"))
    assert len(files) == 2
    for file in files:
        assert read_description(file).jobs({})


def test_the_command_plans_and_runs(tmp_path: Path) -> None:
    """--overwrite reaches the steps and not the sample of the plan."""
    file = description(tmp_path, "[split]\nratio = '3:1'\n[report]\n")
    command = [sys.executable, "tools/corpus.py", "run", str(file), "--overwrite"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    record = json.loads((tmp_path / "out" / "plan.json").read_text())["steps"]
    assert [(each["name"], each["note"]) for each in record] == [("split", "")]
    assert read_jsonl(tmp_path / "out" / "split" / "train")


# Tells what it was called with, and unless nothing is to run runs a job or an array of them.
SBATCH = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
for word in "$@"; do
    [[ $word == --array=* ]] && last=${word#--array=0-}
    [[ $word == --* ]] && shift || break
done
export SLURM_JOB_ID=7 SLURM_SUBMIT_DIR="$PWD"
if [[ -n ${NOTHING:-} ]]; then
    :
elif [[ -n ${last:-} ]]; then
    export SLURM_ARRAY_TASK_COUNT=$((last + 1))
    for ((k = 0; k <= last; k++)); do SLURM_ARRAY_TASK_ID=$k bash "$@" >&2; done
else
    bash "$@" >&2
fi
echo "7;cluster"
"""


def submit(folder: Path, step: str, *flags: str, **environ: str) -> list[str]:
    """Calls of sbatch by scripts/slurm/corpus_array.sh."""
    fake, log = folder / "bin" / "sbatch", folder / f"{step}.log"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(SBATCH)
    fake.chmod(0o755)
    environ |= {"PATH": f"{fake.parent}:{os.environ['PATH']}", "LOG": str(log)}
    command = ["bash", "scripts/slurm/corpus_array.sh", step, *flags]
    subprocess.run(command, cwd=ROOT, env=os.environ | environ, check=True, capture_output=True)
    return log.read_text().splitlines()


def test_the_array_of_jobs_writes_what_one_process_writes(tmp_path: Path) -> None:
    raw = corpus(tmp_path)
    flags = ["--input", str(raw), "--shard-size", "40KB", "--unit", "50KB", "--ratio", "3:1"]
    array = [*flags, "--output", str(tmp_path / "array")]
    jobs = submit(tmp_path, "split", *array, PYTHON=sys.executable, ARRAY="2", STAGES="3")
    assert ["--array=0-1" in job for job in jobs] == [True, True, True, False]  # one too many
    assert ["--dependency=afterok:7 " in job for job in jobs] == [False, True, True, True]
    one = [*flags, "--output", str(tmp_path / "one"), "--workers", "1"]
    program("tools.corpus.split", one)
    assert content(tmp_path / "array") == content(tmp_path / "one")


def test_there_is_an_array_for_every_stage(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("http://example.com/a\n")
    words = ["--input", str(tmp_path), "--output", str(tmp_path / "urls"), "--workers", "1"]
    program("tools.corpus.urls", words)
    steps = [finished.parent / "out" / step for step in ("clean", "dedup", "split")]
    for folder in (*steps, tmp_path / "urls"):
        jobs = submit(tmp_path, folder.name, "--input", "x", NOTHING="1")
        needed = {*stages(folder)} - {"checksums"}  # of the last job
        assert sum("--array=" in job for job in jobs) == len(needed)
