"""Layouts compared by a user's own command: equal ones, unequal ones, and what is refused;
names of layouts."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parallel import TrainingParallelConfig
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from tests.data.samples import write_data
from tests.refusals import field_of, refusal
from tools.layouts import compare as compare_layouts
from tools.layouts.compare import largest, read_settings, row
from tools.layouts.layout import layout_of, parse_layout
from tools.layouts.meters import Counts
from tools.layouts.train import Report

SMALL = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "vocab_size": 96,  # no padding at t = 2 either
    "make_vocab_size_divisible_by": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 10,
    "lr": 1e-3,
}
CUT = "tensor=2,sequence"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    """Its dropout, precision and layout do not hold in a comparison."""
    asked = SMALL | {"hidden_dropout": 0.1, "embedding_dropout": 0.1, "fp16": True}
    file = tmp_path / "small.toml"
    lines = [f"{name} = {json.dumps(each)}\n" for name, each in asked.items()]
    file.write_text("".join([*lines, "tensor_model_parallel_size = 2\nsequence_parallel = true\n"]))
    return file


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the ranks leaves signals to pytest; variables that it sets are as before later."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, os.environ.get(name, value))


def compare(preset: Path, *arguments: str) -> tuple[int, Any]:
    """(the program's status, the rows of its JSON file)."""
    file = preset.with_suffix(".json")
    words = ["--preset", str(preset), "--json", str(file), "--steps", "2", *arguments]
    try:
        status = compare_layouts.main(words, {})
    except SystemExit as stop:
        status = int(str(stop.code))
    return status, json.loads(file.read_text()) if file.exists() else None


def test_equal_layouts(preset: Path) -> None:
    status, rows = compare(preset, "serial", "tensor=2", f"data=2,{CUT}", "data=2,zero=2")
    assert status == 0
    names = ["serial", "tensor=2", "tensor=2,data=2,sequence", "data=2,zero=2"]
    assert [each["layout"] for each in rows] == names
    for each in rows:
        for name in compare_layouts.DIFFERENCES:
            assert each[f"{name}_difference"] < 1e-12
        for name in ("matmul_flops", "parameter_bytes", "saved_bytes", "sent_bytes", "calls"):
            assert len(each[name]) == parse_layout(each["layout"]).ranks
    assert len({sum(each["matmul_flops"]) for each in rows}) == 1
    assert rows[0]["calls"] == [{}]
    assert {*rows[2]["sent_bytes"][0]} == {"data", "tensor"}
    for name in ("parameter_bytes", "saved_bytes"):
        assert rows[1][name][0] < 0.8 * rows[0][name][0]
    assert rows[2]["saved_bytes"][0] < 0.8 * rows[1]["saved_bytes"][0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--fp16", "--initial-loss-scale", "2**23", "--steps", "8"),  # whose first steps overflow
        ("--kind", "bert", "--no_bf16", "--hidden_dropout=0.1", "--attention-dropout", "0.1"),
    ],
    ids=["fp16 that overflows", "a BERT in fp32 with dropout"],
)
def test_models_and_precisions(preset: Path, arguments: tuple[str, ...]) -> None:
    status, (row,) = compare(preset, CUT, *arguments)
    assert status == 0
    assert row["loss_difference"] < 1e-2


def test_different_layouts(preset: Path, tmp_path: Path) -> None:
    """Here on data of one's own: dropout that attention's kernel draws depends on the layout."""
    write_data(tmp_path / "data", [[*range(1, 90)]] * 20)
    words = ["--data-path", str(tmp_path / "data"), "--vocab-size", "100"]
    words += ["--attention-dropout", "0.5", "--attention-dropout-rng", "kernel"]
    words += ["--lr-warmup-iters", "9", "--bf16"]  # after which weights hardly move
    status, (row,) = compare(preset, "tensor=2", *words)
    assert status == 1
    assert row["gradient_difference"] > 0.1


@pytest.mark.parametrize(
    "arguments",
    [("--fp16", "--initial-loss-scale", "2**40"), ("--lr", "1e-300", "--min-lr", "0")],
    ids=["every step overflows", "no weight moves"],
)
def test_equal_numbers_that_say_nothing_end_with_status_2(
    preset: Path, arguments: tuple[str, ...]
) -> None:
    status, (row,) = compare(preset, "serial", *arguments)
    assert status == 2
    assert row["loss_difference"] == 0


def test_failure(preset: Path, capfd: pytest.CaptureFixture[str]) -> None:
    diverges = ("--lr", "1e30", "--bf16", "--against", "tensor=2")
    assert compare(preset, "tensor=2", *diverges) == (2, None)
    assert "layout tensor=2" in capfd.readouterr().err


# By the field that is refused.
REFUSED = {
    "LAYOUT": """context=2,context=2 | context=2:ring | context=1:p2p | context=4,sequence
        tensor=4:2d,context=2 | tensor=2,tensor=2 | tensor=0 | tensor=4:4d | tensor=8:2.5d:0
        data=2,sequence | tensor=2,virtual=2 | pipeline=2,schedule=zbv | --steps 2""",
    "--tensor-model-parallel-size": "tensor=8:2d | tensor=4:3d",
    "layout": """pipeline=2 | pipeline=2,virtual=2 --num-layers 3 | tensor=3 | data=3
        tensor=2,sequence --seq-length 15 | context=2 --seq-length 15
        context=2:p2p --seq-length 18 | context=8 | pipeline=1,schedule=interleaved""",
    "--tensor-parallel-depth": "tensor=8:2d:2 | tensor=8:2.5d:2 --tensor-parallel-depth 2",
    "--pipeline-model-parallel-size": "tensor=2 --pipeline-model-parallel-size 2",
    VIRTUAL: f"tensor=2 {VIRTUAL}=1",
    "--pipeline-schedule": "tensor=2 --pipeline-schedule 1f1b",
    "--model-parallel-size": "tensor=2 --model-parallel-size 2",
    "--tensor-parallel-mode": "tensor=4:2d --tensor-parallel-mode 2d",
    "--no-sequence-parallel": "tensor=2 --no_sequence_parallel",
    "--save": "tensor=2 --save checkpoints",
    "--metrics-file": "tensor=2 --metrics_file=m.jsonl",
    "--kind": "tensor=2 --kind llamas",
    "--data-path": "tensor=2 --data-path nowhere",
    "--stepz": "tensor=2 --stepz 2",
}
ROWS = [(row, field) for field, rows in REFUSED.items() for row in re.split(r"[|\n]", rows)]


@pytest.mark.parametrize(("words", "field"), ROWS)
def test_refusals(preset: Path, words: str, field: str) -> None:
    given = ["--preset", str(preset), *words.split()]
    assert field_of(refusal(lambda: compare_layouts.main(given, {}))) == field


def test_presets(preset: Path) -> None:
    plain, precision = read_settings(["--preset", str(preset), CUT], {})
    assert precision == "fp64"
    assert (plain.model.hidden_dropout, plain.model.dropout_of_embeddings) == (0, 0)
    asked, precision = read_settings(
        ["--preset", str(preset), CUT, "--hidden_dropout=0.2", "--bf16"], {}
    )
    assert precision == "bf16"
    assert (asked.model.hidden_dropout, asked.model.dropout_of_embeddings) == (0.2, 0.2)
    pure, precision = read_settings(["--preset", str(preset), CUT, "--pure-bf16"], {})
    assert (precision, pure.precision.pure_bf16, pure.precision.fp16) == ("bf16", True, False)


def test_a_batch_that_all_layouts_divide(preset: Path, tmp_path: Path) -> None:
    config, precision = read_settings(["--preset", str(preset), "data=2"], {})
    config = replace(config, training=replace(config.training, global_batch_size=None))
    jobs = compare_layouts.plan(config, precision, ["data=2", "data=3"], tmp_path)
    assert {job.config.training.global_batch_size for job in jobs.values()} == {2 * 2 * 3}


def test_nan_loss() -> None:
    counts = Counts(calls=Counter())
    found, wanted = (
        Report(
            device="cpu",
            losses=[1.0, loss],
            norms=[2.0, float("inf")],  # a step that both have skipped
            gradient_difference=0.0,
            weight_difference=0.0,
            counts=counts,
        )
        for loss in (float("nan"), 1.0)
    )
    both = row("tensor=2", [found], wanted)
    assert (both["loss_difference"], both["norm_difference"]) == (None, 0)
    assert not compare_layouts.is_within(None, 1.0)
    assert largest([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)


def test_settings_of_a_layout(preset: Path) -> None:
    words = "virtual=2,tensor=2,schedule=interleaved,data=2,pipeline=2,sequence,context=2:p2p"
    layout = parse_layout(words)
    assert layout.ranks == 16
    flags = f"--pipeline-model-parallel-size 2 {VIRTUAL} 2"
    flags += " --pipeline-schedule interleaved --model-parallel-size 2 --sequence-parallel"
    flags += " --context-parallel-size 2 --cp-comm-type p2p"
    asked = parse(PretrainGPT2Config, ["--preset", str(preset), *flags.split()], {})
    assert TrainingParallelConfig(**layout.settings) == asked.parallel
    with preset.open("a") as file:  # what it says of stages does not hold
        file.write("pipeline_model_parallel_size = 2\ndecoder_first_pipeline_num_layers = 1\n")
    config, precision = read_settings(["--preset", str(preset), "serial", "--num-layers=4"], {})
    names = ["serial", layout.name, "pipeline=4", "schedule=1f1b"]
    jobs = compare_layouts.plan(config, precision, names, preset.parent)
    assert list(jobs) == names
    assert jobs["serial"].config.parallel == TrainingParallelConfig()
    for name, ranks, stages in zip(names, (1, 16, 4, 1), (1, 2, 4, 1), strict=True):
        assert jobs[name].ranks == ranks
        assert jobs[name].config.parallel.pipeline_model_parallel_size == stages


# Names, and other words of the same layouts.
NAMES = {
    "serial": ("context=1", "pipeline=1,virtual=1", "data=1,tensor=1"),
    "tensor=2,data=3,sequence": ("sequence,data=3,tensor=2",),
    "tensor=4:2d,data=2": ("data=2,tensor=4:2d",),
    "tensor=8:2.5d:2,zero=1": ("zero=1,tensor=8:2.5d:2",),
    "tensor=8:3d,pipeline=2": (),
    "context=2": ("context=2:a2a",),
    "context=2,zero=1": (),
    "context=2:p2p,data=2,zero=3": (),
    "pipeline=2,virtual=2,schedule=interleaved": ("schedule=interleaved,virtual=2,pipeline=2",),
    "tensor=2,context=2,data=2,pipeline=2,schedule=zb-h1,zero=1": (),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_of_settings_is_the_one_that_they_are_of(name: str) -> None:
    layout = parse_layout(name)
    assert layout_of(TrainingParallelConfig(**layout.settings), layout.ranks, 4) == layout
    assert {parse_layout(words).name for words in (name, *NAMES[name])} == {name}


def test_settings_in_other_words_are_the_same_layout() -> None:
    layers = TrainingParallelConfig(
        pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1
    )
    assert layout_of(layers, 4, 8) == parse_layout("data=2,pipeline=2,virtual=4")
    zero = TrainingParallelConfig(use_distributed_optimizer=True)
    assert layout_of(zero, 4, 8) == parse_layout("data=4,zero=1")
    assert layout_of(zero, 1, 8) == parse_layout("serial")
