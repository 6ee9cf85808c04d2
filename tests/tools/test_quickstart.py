"""The quickstart: its plan, its processes, what it refuses, what its report tells."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.indexed import IndexedDataset
from megatron.train.metrics import read_metrics
from tests.data.samples import write_data
from tests.refusals import refusal
from tools.command import ROOT
from tools.page import training
from tools.processes import Processes, count_gpus, visible_gpus
from tools.quickstart.__main__ import quickstart
from tools.quickstart.enough import check_samples
from tools.quickstart.page import samples
from tools.quickstart.plan import Settings, choose_processes, plan, pretrain_stage

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


def test_gpus_are_used_where_one_model_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the command may be given from any folder
    assert choose_processes(SETTINGS, 0, 8) == Processes(2, 1, 4, "cpu", 4)
    assert choose_processes(SETTINGS, 1, 1) == Processes(2, 1, 4, "cpu", 1)
    assert choose_processes(SETTINGS, 5, 8) == Processes(2, 2, 2, "cuda", 2)
    assert choose_processes(SETTINGS, 7, 8) == Processes(2, 2, 2, "cuda", 2)
    assert choose_processes(SETTINGS, 8, 8) == Processes(2, 4, 1, "cuda", 1)
    three = replace(SETTINGS, tensor_parallel=3)
    assert "--tensor-model-parallel-size 3" in str(refusal(lambda: choose_processes(three, 0, 8)))


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


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [([200] * 19, None), ([200] * 10, 200), ([2000], 0), ([257] * 2, None), ([256] * 2, 256)],
)
def test_a_corpus_gives_training_and_validation_a_sample_each(
    tmp_path: Path, sizes: list[int], tokens: int | None
) -> None:
    """tokens: of the smaller part where it is too small."""
    write_data(tmp_path / "data", [[1] * size for size in sizes])
    data = IndexedDataset(str(tmp_path / "data"))
    if tokens is None:
        check_samples(data, 256)
    else:
        assert f" {tokens} tokens" in str(refusal(lambda: check_samples(data, 256)))


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
    ("content", "changes", "named"),
    [
        (None, {}, "c.jsonl"),
        ("", {}, "c.jsonl"),
        ('{"body": 1}\n{}\n', {}, "c.jsonl, byte 0"),
        ('{"text": "in"}\n', {"vocab_size": 256}, "--vocab-size"),  # no room for the bytes
        ('{"text": "in"}\n', {"vocab_file": Path("vocab.json")}, "--vocab-file"),  # alone
    ],
)
def test_a_bad_corpus_or_vocabulary_is_refused(
    tmp_path: Path, content: str | None, changes: dict[str, Any], named: str
) -> None:
    corpus = tmp_path / "c.jsonl"
    if content is not None:
        corpus.write_text(content)
    assert named in str(refusal(lambda: quickstart(corpus, out=tmp_path / "out", **changes)))
    assert not (tmp_path / "out").exists()


def test_samples_are_shown_as_text() -> None:
    page = samples([{"prompt": "<b>", "text": "<b> <script>&"}])
    assert "&lt;script&gt;&amp;" in page
    assert "<script" not in page


def test_rewound_steps_count_in_no_figure(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"step": k, "samples": 8 * k, "loss": 9 / k, "tokens_per_second": 100.0 * k}
        for k in (1, 2, 3)
    ]
    steps += [{"step": 3, "validation_loss": 3.5}]
    steps += [steps[0] | {"step": 4, "tokens_per_second": 9e9, "rewound": True}]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in steps))
    figures = {"steps": 3, "samples": 24, "tokens_per_second": 200, "train_loss": 3}
    assert training(read_metrics(file)) == figures | {"validation_loss": 3.5}
