"""Stages: run, reused, run again, failed; the report.  The commands here are small fakes."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.indexed import IndexedDataset
from tools.command import ROOT, Command, cause
from tools.data_files import IndexedDatasetWriter
from tools.processes import Processes, count_gpus, visible_gpus
from tools.quickstart.__main__ import quickstart
from tools.quickstart.enough import check_samples
from tools.quickstart.plan import Settings, choose_processes, plan, pretrain_stage
from tools.quickstart.report import report
from tools.stages import Stage, StageError, own_folder, run_stages, stamp_file

SETTINGS = Settings(
    corpus=None,
    json_key="text",
    out=ROOT / "runs" / "quickstart",
    preset=ROOT / "scripts" / "presets" / "quickstart.toml",
    train_iters=None,
    tensor_parallel=2,
    vocab_size=2048,
    vocab_file=None,
    merge_file=None,
)


def fake(out: Path, name: str, text: str, inputs: tuple[Path, ...] = ()) -> Stage:
    """A stage that writes `text` to a file and its own name to a diary."""
    script = (
        "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]);"
        "open(sys.argv[3], 'a').write(sys.argv[4] + ' ')"
    )
    argv = (sys.executable, "-c", script, str(out / name), text, str(out / "diary"), name)
    command = Command(argv=argv)
    return Stage(name=name, commands=(command,), inputs=inputs, outputs=(out / name,))


def diary(out: Path) -> list[str]:
    """The stages that ran since the last look."""
    file = out / "diary"
    ran = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return ran


def test_finished_stages_are_reused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stages = [fake(tmp_path, name, "x") for name in ("a", "b", "c")]
    own_folder(tmp_path, stages, fresh=False)
    run_stages(stages, tmp_path, tmp_path)
    assert diary(tmp_path) == ["a", "b", "c"]
    assert "reused" not in capfd.readouterr().out
    run_stages(stages, tmp_path, tmp_path)
    assert diary(tmp_path) == []
    assert capfd.readouterr().out.count("reused") == 3


def test_what_changed_runs_again_with_all_that_follows(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("1")
    first, *rest = [fake(tmp_path, name, "x") for name in ("a", "b", "c")]
    stages = [replace(first, inputs=(source,)), *rest]
    own_folder(tmp_path / "none", stages, fresh=False)
    (tmp_path / "stages").mkdir()
    run_stages(stages, tmp_path, tmp_path)
    diary(tmp_path)
    changed = [stages[0], fake(tmp_path, "b", "y"), stages[2]]
    run_stages(changed, tmp_path, tmp_path)
    assert diary(tmp_path) == ["b", "c"]
    (tmp_path / "b").write_text("cut off")
    run_stages(changed, tmp_path, tmp_path)
    assert diary(tmp_path) == ["b", "c"]
    source.write_text("2")
    run_stages(changed, tmp_path, tmp_path)
    assert diary(tmp_path) == ["a", "b", "c"]


def test_a_failure_names_stage_cause_and_command(tmp_path: Path) -> None:
    script = "import sys; sys.exit('error: --input x: no such file')"
    command = Command(argv=(sys.executable, "-c", script), environ={"OMP_NUM_THREADS": "1"})
    stages = [fake(tmp_path, "a", "x"), Stage(name="b", commands=(command,))]
    own_folder(tmp_path, stages, fresh=False)
    with pytest.raises(StageError) as failure:
        run_stages(stages, tmp_path, tmp_path)
    message = str(failure.value)
    assert "stage b failed (exit status 1)" in message
    assert "--input" in message
    assert f"cd {tmp_path} && OMP_NUM_THREADS=1 {sys.executable} -c 'import sys;" in message
    assert stamp_file(tmp_path, "a").exists()
    assert not stamp_file(tmp_path, "b").exists()


def test_a_stage_that_leaves_nothing_has_failed(tmp_path: Path) -> None:
    stage = Stage(
        name="a", commands=(Command(argv=(sys.executable, "-c", "")),), outputs=(tmp_path / "a",)
    )
    own_folder(tmp_path, [stage], fresh=False)
    with pytest.raises(StageError, match="left no"):
        run_stages([stage], tmp_path, tmp_path)


def test_the_cause_is_not_the_launchers_summary() -> None:
    tail = (
        "pretrain:  10%|#\rpretrain:  20%|##\nTraceback (most recent call last):\n"
        "RuntimeError: too hot\n"
        "E1121 04:00:00 1 torch/distributed/elastic/multiprocessing/api.py:984] failed\n"
        "Traceback (most recent call last):\n  ChildFailedError\n"
    )
    assert cause(tail).splitlines() == [
        "  pretrain:  20%|##",
        "  Traceback (most recent call last):",
        "  RuntimeError: too hot",
    ]


def test_fresh_deletes_only_what_the_quickstart_wrote(tmp_path: Path) -> None:
    out = tmp_path / "run"
    stages = [fake(out, "a", "x"), fake(out, "b", "x")]
    own_folder(out, stages, fresh=False)
    run_stages(stages, out, tmp_path)
    (out / "mine").write_text("kept")
    own_folder(out, stages[:1], fresh=True)
    assert {path.name for path in out.iterdir()} == {"mine", "diary", "stages"}
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "a").write_text("kept")
    for fresh in (False, True):
        with pytest.raises(ValueError, match="--out"):
            own_folder(foreign, [fake(foreign, "a", "x")], fresh=fresh)
    assert (foreign / "a").read_text() == "kept"


def test_gpus_are_used_where_one_model_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the command may be given from any folder
    assert choose_processes(SETTINGS, 0, 8) == Processes(2, 1, 4, "cpu", 4)
    assert choose_processes(SETTINGS, 1, 1) == Processes(2, 1, 4, "cpu", 1)
    assert choose_processes(SETTINGS, 5, 8) == Processes(2, 2, 2, "cuda", 2)
    assert choose_processes(SETTINGS, 7, 8) == Processes(2, 2, 2, "cuda", 2)
    assert choose_processes(SETTINGS, 8, 8) == Processes(2, 4, 1, "cuda", 1)
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 3"):
        choose_processes(replace(SETTINGS, tensor_parallel=3), 0, 8)


GPUS = {f"GPU-{name}": [] for name in ("8932f937", "8932aaaa", "5555", "7777")}
SPLIT = {"GPU-11": ["MIG-31", "MIG-32"], "GPU-22": []}


@pytest.mark.parametrize(
    ("visible", "instances", "count"),
    [
        *((None, GPUS, 4), ("", GPUS, 0), ("-1", GPUS, 0), ("NoDevFiles", GPUS, 0)),
        *(("0,-1,1", GPUS, 1), ("0,2,-1,1", GPUS, 2), ("2,1", GPUS, 2), (" 3 , 0", GPUS, 2)),
        *(("0,1,2,3", GPUS, 4), ("0,4,1", GPUS, 1), ("7", GPUS, 0), ("0,1,0", GPUS, 0)),
        *(("1,,2", GPUS, 1), ("0,-1,0", GPUS, 1), ("3gpu,0", GPUS, 2), ("all", GPUS, 0)),
        *(("GPU-5555,GPU-7777", GPUS, 2), ("GPU-8932f,GPU-5", GPUS, 2), ("GPU-8932", GPUS, 0)),
        *(("GPU-5,GPU-9,GPU-7", GPUS, 1), ("GPU-5,GPU-5555", GPUS, 0), ("GPU-5,0", GPUS, 1)),
        *(("0,GPU-5", GPUS, 1), ("GPU-8932F", GPUS, 1), ("MIG-31", GPUS, 0)),
        *(("0", {}, 0), (None, {}, 0)),
        *((None, SPLIT, 1), ("0,1", SPLIT, 1), ("1", SPLIT, 1), ("GPU-22", SPLIT, 1)),
        *(("MIG-31", SPLIT, 1), ("MIG-31,MIG-32", SPLIT, 1), ("MIG-9", SPLIT, 0)),
        *(("MIG-GPU-11/1/0", SPLIT, 1), ("MIG-GPU-22/1/0", SPLIT, 0), ("1,-1", SPLIT, 1)),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(
    visible: str | None, instances: dict[str, list[str]], count: int
) -> None:
    """By the rules of the CUDA programming guide and of NVIDIA's guide to MIG."""
    assert visible_gpus(visible, instances) == count


def test_the_gpus_of_this_machine_are_those_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = (
        "GPU 0: NVIDIA H100 80GB (UUID: GPU-11)\nGPU 1: NVIDIA H100 80GB (UUID: GPU-22)\n"
        "  MIG 1g.10gb     Device  0: (UUID: MIG-31)\nGPU 2: NVIDIA H100 (UUID: GPU-33)\n"
    )
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{listing}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for visible, count in (("0,2,-1", 2), ("0,1", 1), ("-1", 0), ("MIG-31", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == count
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert count_gpus() == 0


def test_the_training_command_fits_its_processes() -> None:
    for gpus, steps in ((0, 1), (2, 2600), (5, None), (8, 50)):
        settings = replace(SETTINGS, train_iters=steps)
        processes = choose_processes(settings, gpus, 16)
        argv = pretrain_stage(settings, processes).commands[-1].argv
        world = int(argv[argv.index("--nproc-per-node") + 1])
        config = parse(PretrainGPT2Config, argv[argv.index("pretrain_gpt2.py") + 1 :], {})
        config.check(world)
        assert config.data_parallel_size(world) == processes.data_parallel
        assert config.global_batch_size(world) == 4
        assert config.training.train_iters == (steps or 2600)
        assert config.logging.log_interval <= config.training.train_iters


def test_the_corpus_goes_through_the_steps_and_each_reads_what_the_last_one_wrote() -> None:
    clean = plan(SETTINGS, Processes(2, 1, 4, "cpu", 1), 2)[1]
    assert [command.argv[2] for command in clean.commands] == [
        f"tools.corpus.{step}" for step in ("clean", "dedup", "split")
    ]
    flags = [dict(zip(c.argv[3::2], c.argv[4::2], strict=True)) for c in clean.commands]
    for before, after in itertools.pairwise(flags):
        assert after["--input"] == before["--output"]
    assert [str(output) for output in clean.outputs] == [
        str(ROOT / each["--output"]) for each in flags
    ]
    tokenizer, preprocess = plan(SETTINGS, Processes(2, 1, 4, "cpu", 1), 2)[2:4]
    for command in (*tokenizer.commands, *preprocess.commands):
        assert flags[-1]["--output"] + "/train" in command.argv


@pytest.mark.parametrize(("positions", "count"), [(256, 96), (64, 35), (20, 1)])
def test_samples_fit_the_positions_of_the_model(tmp_path: Path, positions: int, count: int) -> None:
    preset = tmp_path / "own.toml"
    text = SETTINGS.preset.read_text()
    for key in ("max_position_embeddings", "seq_length"):
        text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {positions}", text)
    preset.write_text(text)
    own = replace(SETTINGS, preset=preset)
    argv = plan(own, Processes(2, 1, 4, "cpu", 1), 2)[-2].commands[0].argv
    assert argv[argv.index("--max-new-tokens") + 1] == str(count)


def data_set(folder: Path, sizes: list[int]) -> IndexedDataset:
    prefix = str(folder / "data")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add(np.zeros(sum(sizes), np.uint16), np.array(sizes, np.int32))
        writer.commit(
            tokenizer_type="GPT2BPETokenizer", tokenizer_fingerprint="", vocab_size=300, eod=299
        )
    return IndexedDataset(prefix)


def test_a_corpus_too_small_for_a_sample_is_told_how_much_is_needed(tmp_path: Path) -> None:
    check_samples(data_set(tmp_path, [200] * 19), 256)
    with pytest.raises(ValueError, match="gets 200 tokens, .* about 20 documents"):
        check_samples(data_set(tmp_path, [200] * 10), 256)
    with pytest.raises(ValueError, match="gets 0 tokens"):
        check_samples(data_set(tmp_path, [2000]), 256)
    check_samples(data_set(tmp_path, [257] * 2), 256)
    with pytest.raises(ValueError, match="gets 256 tokens"):
        check_samples(data_set(tmp_path, [256] * 2), 256)


def test_a_folder_with_tools_of_its_own_and_a_relative_corpus(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    text = "This text is English but far too short to be kept"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text(text)
    (tmp_path / "mine" / "b.jsonl").write_text(json.dumps({"body": text}))
    script = (ROOT / "scripts" / "quickstart.sh").read_text()
    flags = shlex.split(script.splitlines()[-1])
    flags = flags[flags.index("-P") : -1]
    ended = subprocess.run(
        [sys.executable, *flags, "mine", "--out", "out", "--json-key", "body"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "stage clean failed" in ended.stderr
    assert "2 under 128 pieces" in ended.stderr
    assert (tmp_path / "out" / "stages" / "corpus.json").exists()


def test_a_corpus_of_ones_own_and_gpt2s_vocabulary_take_their_stages_place(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    own = replace(
        SETTINGS, corpus=tmp_path / "c", vocab_file=tmp_path / "v", merge_file=tmp_path / "m"
    )
    processes = Processes(2, 1, 4, "cpu", 1)
    stages = {stage.name: stage for stage in plan(own, processes, 2)}
    assert stages["corpus"].commands == stages["tokenizer"].commands == ()
    assert str(tmp_path / "c") in stages["clean"].commands[0].argv
    assert str(tmp_path / "v") in stages["preprocess"].commands[-1].argv
    assert list(stages) == [stage.name for stage in plan(SETTINGS, processes, 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "c.jsonl"), ("", "c.jsonl"), ('{"body": 1}\n{}\n', "c.jsonl, byte 0")],
)
def test_a_bad_corpus_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    corpus = tmp_path / "c.jsonl"
    if content is not None:
        corpus.write_text(content)
    with pytest.raises(ValueError, match=message):
        quickstart(corpus, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vocab-size"):
        quickstart(out=tmp_path / "out", vocab_size=256)
    assert not (tmp_path / "out").exists()


def test_one_vocabulary_file_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vocab-file"):
        quickstart(out=tmp_path / "out", vocab_file=tmp_path / "vocab.json")


def finished_run(out: Path) -> None:
    """A folder as the stages leave it, with made-up numbers."""
    own_folder(out, [], fresh=False)
    for stage in plan(SETTINGS, Processes(2, 1, 4, "cpu", 1), 2):
        commands = [str(command) for command in stage.commands]
        stamp = {"seconds": 2.0, "commands": commands, "facts": stage.facts, "outputs": {}}
        stamp_file(out, stage.name).write_text(json.dumps(stamp))
    count = {"documents": 9, "bytes": 12_345, "sources": {"a": {"documents": 9, "bytes": 12_345}}}
    step = {"settings": {}, "input": count, "output": count, "shards": [{"name": "x"}]}
    step |= {"dropped": {"not <English>": count}, "unit_of_length": "pieces", "repaired": 1}
    step |= {"sides": {"train": count, "valid": count}}
    for name in ("clean", "dedup", "split"):
        (out / "corpus" / name).mkdir(parents=True)
        (out / "corpus" / name / "manifest.json").write_text(json.dumps(step))
    (out / "corpus" / "harvest.json").write_text(json.dumps(step))
    bad = {"file": "raw.jsonl", "offset": 70, "reason": "not JSON"}
    (out / "corpus" / "clean" / "rejected.jsonl").write_text(json.dumps(bad) + "\n")
    layout = {"tensor_parallel_size": 2, "data_parallel_size": 1}
    described = {"layout": layout, "parameters": 5_000_000, "device": "cpu", "torch": "2.13.0"}
    (out / "run.json").write_text(json.dumps(described))
    lines = [{"step": k, "samples": 8 * k, "loss": 9 / k, "tokens_per_second": 100.0 * k}
              for k in (1, 2, 3)]  # fmt: skip
    lines += [{"step": 3, "validation_loss": 3.5}]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ("token", "word", "unigram", "bigram")
    scores = {f"{name}_perplexity": 50.0 + k for k, name in enumerate(names)}
    scores |= {"bits_per_byte": 1.5, "xz_bits_per_byte": 2.0, "cloze_accuracy": 0.25}
    scores |= {"tokens": 10, "words": 5, "bytes": 40, "documents": 2}
    (out / "evaluation.json").write_text(json.dumps(scores))
    samples = [{"prompt": "In order to", "text": "In order to <script>&"}]
    (out / "samples.json").write_text(json.dumps(samples))


def test_the_report_leaves_out_the_steps_that_were_rewound(tmp_path: Path) -> None:
    finished_run(tmp_path)
    line = {"step": 4, "samples": 32, "loss": 1.0, "tokens_per_second": 9e9, "rewound": True}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    report(tmp_path)
    training = json.loads((tmp_path / "report.json").read_text())["training"]
    assert (training["steps"], training["tokens_per_second"]) == (3, 200)
    html = (tmp_path / "report.html").read_text()
    assert "&lt;script&gt;" in html
    assert "<script" not in html
