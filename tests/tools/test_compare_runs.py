"""Runs compared: the step at which their figures part, against the values in their files, and the
module that differs where one weight is changed, for each kind of model and layout."""

import json
import shutil
import subprocess
import sys
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatron.checkpoint.format import read_manifest, seal
from megatron.data.files import sha256
from megatron.errors import flag
from megatron.train.diagnose import OUTPUT
from tests.huggingface import write_folder
from tests.programs import ROOT, finished, lines_of, newest, run_script, values_of
from tests.refusals import by_last_flag, field_of, refusal, refused
from tests.tiny import mesh_of_ranks, samples, tiny_config, tiny_model
from tests.tools.corpus.lines import read_jsonl, write_jsonl
from tools import compare_runs
from tools.layouts import activations
from tools.layouts.activations import beyond, compare_models
from tools.report.runs import PLACES, figures_of, relative_gap

SHAPE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16"
SHAPE += " --attention-dropout 0 --hidden-dropout 0"
STEPS = "--train-iters 4 --log-interval 1 --eval-interval 2 --eval-iters 1"
UP = "transformer.layers.3.mlp.up"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, of the same again, and of runs with another setting."""
    folder = tmp_path_factory.mktemp("runs")
    others = {"lr": "--lr 0.01", "seed": "--seed 2", "deeper": "--num-layers 5"}
    for name in ("a", "again", *others):
        words = f"{STEPS} --lr 0.001 --save-interval 2 --save {folder / name}"
        words += f" {others.get(name, '')}"
        finished(words, folder=folder, shape=SHAPE)
    return folder


@pytest.fixture(autouse=True)
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def compare(words: str, folder: Path, status: int) -> Any:
    """The JSON of the program, which has to end with this status."""
    file = folder / "result.json"
    assert compare_runs.main([*words.split(), "--json", str(file)], {}) == status
    return json.loads(file.read_text())


def figure(result: Any, name: str) -> Any:
    (found,) = (each for each in result["figures"] if each["figure"] == name)
    return found


def settings(result: Any) -> dict[str, tuple[Any, Any]]:
    return {each["setting"]: (each["a"], each["b"]) for each in result["settings"]}


def record(folder: Path, **changes: Any) -> Path:
    """A copy of the record of run a with each line of a step changed. changes: functions of the
    line."""
    lines = read_jsonl(Path("a", "metrics.jsonl"))
    for line in lines:
        line |= {key: change(line) for key, change in changes.items() if key in line}
    return write_jsonl(folder / "changed.jsonl", lines)


def test_the_same_run_twice(tmp_path: Path) -> None:
    result = compare("a again", tmp_path, 0)
    assert {*settings(result)} == {"--save", "command"}
    names = {"loss", "lr", "grad_norm", "samples", "validation_loss"}
    assert names <= {each["figure"] for each in result["figures"]}
    for each in result["figures"]:
        assert each["common_steps"] == (2 if each["figure"].startswith("validation") else 4)
        assert each["first"]["step"] is each["largest"]["step"] is None
    assert not [name for name in result["figures"] if "second" in name["figure"]]


@pytest.mark.parametrize("name", ["lr", "seed"])
def test_where_runs_part(name: str, tmp_path: Path) -> None:
    result = compare(f"a {name}", tmp_path, 1)
    expected = {"lr": (0.001, 0.01), "seed": (1234, 2)}[name]
    changed = {key for key in settings(result) if key.startswith("--")}
    assert changed == {f"--{name}", "--save"}
    assert settings(result)[f"--{name}"] == expected
    for key in ("loss", "grad_norm", "lr", "validation_loss"):
        steps = [line["step"] for line in lines_of(Path("a"), key)]
        pairs = zip(values_of(Path("a"), key), values_of(Path(name), key), strict=True)
        gaps = {step: (a, b, abs(a - b) / a) for step, (a, b) in zip(steps, pairs, strict=True)}
        first = next((step for step, (a, b, _) in gaps.items() if a != b), None)
        found = figure(result, key)
        assert found["first"]["step"] == first
        if first is not None:
            at = found["first"]
            assert (at["a"], at["b"], at["difference"]) == pytest.approx(gaps[first], rel=1e-12)
            largest = found["largest"]
            assert largest["difference"] == max(gap for _, _, gap in gaps.values())
            assert gaps[largest["step"]][2] == largest["difference"]
    # A learning rate shows in the losses from the second step on.
    assert figure(result, "loss")["first"]["step"] == {"lr": 2, "seed": 1}[name]


def test_tolerance(tmp_path: Path) -> None:
    other = record(tmp_path, loss=lambda line: line["loss"] * (1 + 1e-3 * line["step"]))
    for tolerance, first, status in ((0, 1, 1), (1.5e-3, 2, 1), (3.9e-3, 4, 1), (4.1e-3, None, 0)):
        result = compare(f"a {other} --tolerance {tolerance}", tmp_path, status)
        assert figure(result, "loss")["first"]["step"] == first
        assert figure(result, "loss")["largest"]["step"] == 4
        assert figure(result, "loss")["largest"]["difference"] == pytest.approx(4e-3)


def test_a_value_that_is_no_number(tmp_path: Path) -> None:
    other = record(tmp_path, loss=lambda line: None if line["step"] > 2 else line["loss"])
    result = compare(f"a {other} --tolerance 1e9", tmp_path, 1)
    value = values_of(Path("a"))[2]
    assert figure(result, "loss")["first"] == {"step": 3, "a": value, "b": None, "difference": None}
    assert figure(result, "grad_norm")["first"]["step"] is None
    compare(f"{other} {other}", tmp_path, 0)  # no number in both is the same


def test_what_fp16_skips_is_compared() -> None:
    scaling = {"loss_scale": 2.0, "skipped_steps": 3}
    line = {"step": 1, "loss": 2.0, "elapsed_seconds": 1.0, **scaling, "tokens_per_second": 5.0}
    assert figures_of([line]) == {name: {1: line[name]} for name in ("loss", *scaling)}


def test_no_common_step(tmp_path: Path) -> None:
    other = record(tmp_path, step=lambda line: line["step"] + 10)
    result = compare(f"a {other}", tmp_path, 2)
    assert result["steps"] == {"a": [1, 2, 3, 4], "b": [11, 12, 13, 14], "common": 0}


def test_a_run_of_one_point(tmp_path: Path) -> None:
    lines = read_jsonl(Path("a/metrics.jsonl"))
    of_steps = [n for n, line in enumerate(lines) if "loss" in line]
    write_jsonl(tmp_path / "metrics.jsonl", lines[: of_steps[0] + 1])
    result = compare(f"{tmp_path} a", tmp_path, 0)
    assert result["steps"] == {"a": [1], "b": [1, 2, 3, 4], "common": 1}
    assert "validation_loss" in result["only_b"]
    assert figure(result, "loss")["common_steps"] == 1


def test_a_resumed_run_tells_what_it_changed(tmp_path: Path) -> None:
    save = tmp_path / "resumed"
    shutil.copytree("a", save)
    shutil.rmtree(save / "step_00000004")
    words = f"{STEPS} --lr 0.01 --save {save} --load {save}"
    finished(words, folder=tmp_path, shape=SHAPE)
    result = compare(f"a {save}", tmp_path, 1)
    changed = {each["setting"]: each for each in result["changes"]["b"]}
    assert changed["--lr"] == {"step": 2, "setting": "--lr", "before": 0.001, "after": 0.01}
    assert changed.keys().isdisjoint(PLACES)
    assert result["changes"]["a"] == []
    assert "--lr" not in settings(result)  # that of its start
    # Lines of steps that were done again are those of the new rate.
    assert figure(result, "lr")["first"]["step"] == 3
    assert figure(result, "loss")["first"]["step"] == 4


def test_a_record_without_settings(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", read_jsonl(Path("a/metrics.jsonl"))[1:])
    result = compare(f"{tmp_path} lr", tmp_path, 1)
    assert (result["settings"], result["unknown"]) == ([], ["A"])


def test_epochs_of_fine_tuning_are_compared(tmp_path: Path) -> None:
    for name, accuracy in (("one", 0.5), ("other", 0.75)):
        lines = [
            {"step": 0, "config": {"part": None}},
            {"step": 5, "seed": 1, "epoch": 1, "train_loss": None, "accuracy": 0.25},
            {"step": 9, "seed": 1, "epoch": 2, "train_loss": 1.5, "accuracy": accuracy},
        ]
        write_jsonl(tmp_path / name, lines)
    result = compare(f"{tmp_path / 'one'} {tmp_path / 'other'}", tmp_path, 1)
    assert {each["figure"] for each in result["figures"]} == {"train_loss", "accuracy"}
    assert figure(result, "accuracy")["first"]["step"] == 9
    assert figure(result, "train_loss")["first"]["step"] is None


@pytest.mark.parametrize(
    "words", ["nowhere a", "a nowhere", "empty a", "a text", "a a/step_00000002"]
)
def test_what_is_no_run(words: str, tmp_path: Path) -> None:
    Path("empty").mkdir(exist_ok=True)
    Path("text").write_text("a text\n7\n{}\n")
    error = refusal(lambda: compare_runs.main(words.split(), {}))
    assert field_of(error) == ("B" if words.startswith("a ") else "A")


LAST = """
a again --tolerance -1 | a again --json nowhere/result.json | a again --step 2
a again --dtype fp32
a again --activations --samples 0 | a again --activations --samples 5
a again --activations --step 3
"""


@pytest.mark.parametrize(
    ("words", "field"), [*by_last_flag(LAST), ("a nowhere --activations", "B")]
)
def test_refusals(words: str, field: str) -> None:
    assert refused(partial(compare_runs.main, environ={}), words) == field


def test_records_need_no_torch() -> None:
    code = "import sys; from tools.compare_runs import main; main(['a', 'again'], {})"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, check=True)


def copied(run: Path | str, folder: Path, key: str) -> Path:
    """A copy of a run with the last element of a tensor in its newest checkpoint changed."""
    copy = Path(shutil.copytree(run, folder / "changed"))
    checkpoint = newest(copy)
    manifest = read_manifest(checkpoint)
    one = manifest["tensors"][key]["slices"][-1]
    file, name = checkpoint / one["file"], one.get("tensor", key)
    tensors = load_file(file)
    tensors[name].view(-1)[-1] += 0.5
    save_file(tensors, file)
    manifest["files"][one["file"]] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    (checkpoint / "manifest.json").write_text(json.dumps(seal(manifest)))
    return copy


def first(result: Any, *kinds: str) -> tuple[str, str] | None:
    """(what it is, its name) of the first tensor that differs."""
    rows = beyond([each for each in result["tensors"] if each["what"] in kinds], 0)
    return (rows[0]["what"], rows[0]["name"]) if rows else None


FORWARD, BACKWARD = ("output", "loss"), ("gradient of output", "gradient")


def weights(result: Any) -> list[str]:
    return [each["name"] for each in beyond(result["weights"], 0)]


def test_equal_modules(tmp_path: Path) -> None:
    result = compare("a again --activations", tmp_path, 0)
    assert (weights(result), first(result, *FORWARD, *BACKWARD)) == ([], None)
    assert len(result["tensors"]) > 100
    assert result["step"] == 4


def test_a_weight_of_layer_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copied("a", tmp_path, f"model.{UP}.weight")
    result = compare(f"a {other} --activations", tmp_path, 1)
    assert weights(result) == [f"{UP}.weight"]
    assert first(result, *FORWARD) == ("output", UP)
    assert UP in capsys.readouterr().out
    outputs = (each for each in result["tensors"] if each["what"] == "output")
    found = {each["name"]: each["difference"] for each in outputs}
    assert found["transformer.layers.3.mlp_norm"] == found["transformer.layers.2"] == 0
    assert found["transformer.layers.3"] > 0
    # One of 128 columns of h = 32 changes by one element.
    assert 1e-3 < found[UP] < 1
    compare(f"a {other} --activations --tolerance 100", tmp_path, 0)
    assert compare(f"a {other} --activations --step 2", tmp_path, 0)["step"] == 2


def test_the_samples_and_the_loss_are_those_of_the_next_step(tmp_path: Path) -> None:
    result = compare("a seed --activations --step 2 --samples 4 --dtype fp32", tmp_path, 1)
    assert result["samples"] == [8, 4]
    (loss,) = result["losses"]
    assert loss["a"] == pytest.approx(values_of(Path("a"))[2], rel=1e-6)
    assert loss["b"] != pytest.approx(values_of(Path("seed"))[2], rel=1e-6)  # A's samples


@pytest.mark.parametrize(
    ("name", "value", "module"),
    [
        ("layernorm_epsilon", 1e-3, "transformer.layers.0.attention_norm"),
        ("activation", "relu", "transformer.layers.0.mlp.down"),
        ("hidden_dropout", 0.5, None),
        ("recompute_granularity", "full", None),
        ("make_vocab_size_divisible_by", 7, None),
    ],
)
def test_settings_of_the_model(
    name: str, value: object, module: str | None, tmp_path: Path
) -> None:
    other = Path(shutil.copytree("a", tmp_path / "changed"))
    manifest = read_manifest(newest(other))
    manifest["config"]["model"][name] = value
    (newest(other) / "manifest.json").write_text(json.dumps(seal(manifest)))
    result = compare(f"a {other} --activations", tmp_path, int(module is not None))
    assert [*settings(result)] == [flag(name)]
    assert settings(result)[flag(name)][1] == value
    assert weights(result) == []
    found = first(result, *FORWARD, *BACKWARD)
    assert found == (None if module is None else ("output", module))


def test_models_of_other_modules(tmp_path: Path) -> None:
    result = compare("a deeper --activations", tmp_path, 1)
    assert (result["only_a"], result["only_b"]) == ([], ["transformer.layers.4"])
    assert settings(result) == {"--num-layers": (4, 5)}
    assert len(weights(result)) == len(result["weights"]) == 52
    swapped = compare("deeper a --activations", tmp_path, 1)
    assert (swapped["only_a"], swapped["only_b"]) == (["transformer.layers.4"], [])


def test_a_model_that_cannot_read_the_samples(tmp_path: Path) -> None:
    """Other vocabularies, and fewer positions."""
    save, fewer = tmp_path / "other", "--vocab-size 500 --max-position-embeddings 8 --seq-length 8"
    finished(f"{STEPS} --train-iters 1 --save {save} {fewer}", folder=tmp_path, shape=SHAPE)
    for given in (["a", str(save)], [str(save), "a"]):
        given.append("--activations")
        assert field_of(refusal(partial(compare_runs.main, given, {}))) == "B"


def test_a_difference_in_the_backward_alone() -> None:
    mesh = mesh_of_ranks(1)
    one, other = (tiny_model(mesh, tiny_config()).eval() for _ in range(2))
    name = "transformer.layers.1.mlp.down"
    other.get_submodule(name).register_full_backward_hook(lambda _, dx, __: (2 * dx[0],))
    result = compare_models(one, other, samples(2), mesh)
    assert (weights(result), first(result, *FORWARD)) == ([], None)
    # Its own gradients are the same; those of what comes before it are doubled.
    assert first(result, *BACKWARD) == ("gradient of output", "transformer.layers.1.mlp.up")


def test_activations_that_are_no_numbers() -> None:
    mesh, name = mesh_of_ranks(1), "transformer.layers.1.mlp.down"
    one, other, again = (tiny_model(mesh, tiny_config()).eval() for _ in range(3))
    for each in (other, again):
        each.get_parameter(f"{name}.bias").data[0] = torch.nan
    result = compare_models(one, other, samples(2), mesh)
    assert first(result, *FORWARD) == ("output", name)
    assert {x["difference"] for x in result["tensors"] if x["name"] == name} == {None}
    assert result["losses"][0]["b"] is None
    other = tiny_model(mesh, tiny_config()).eval()
    other.get_parameter(f"{name}.bias").data[0] = torch.nan
    result = compare_models(other, again, samples(2), mesh)
    assert (weights(result), first(result, *FORWARD, *BACKWARD)) == ([], None)


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [(2.0, 0.0, 1), (0.0, 2.0, inf), (0.0, 0.0, 0), (2.0, None, inf), (None, 2.0, inf)],
)
def test_a_gap_is_over_the_first(a: float | None, b: float | None, gap: float) -> None:
    assert relative_gap(a, b) == gap


def test_a_module_that_works_in_place() -> None:
    """On the output of the one before it."""

    def shift(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        given[0].add_(1.0)

    mesh = mesh_of_ranks(1)
    one, other = (tiny_model(mesh, tiny_config()).eval() for _ in range(2))
    for each in (one, other):
        each.get_submodule("transformer.layers.1").register_forward_pre_hook(shift)
    result = compare_models(one, other, samples(2), mesh)
    assert first(result, *FORWARD, *BACKWARD) is None


def test_what_is_almost_nothing_is_measured_by_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the gradient of what has none: zero in one run, rounding in the other."""
    large, nothing = torch.ones(4), [torch.zeros(4), torch.full([4], 1e-30)]

    def run_step(model: Any, batch: Any, mesh: Any, see: Any) -> dict[str, float]:
        see((OUTPUT, "large", 1), large)
        see((OUTPUT, "nothing", 1), nothing.pop(0))
        return {}

    monkeypatch.setattr(activations, "run_step", run_step)
    result = compare_models(nn.Module(), nn.Module(), samples(2), mesh_of_ranks(1))
    assert not beyond(result["tensors"], 1e-6)


MOCK = "--mock-data --train-iters 1 --micro-batch-size 2 --global-batch-size 4"
SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
TEXT = f"{MOCK} {SIZES} --max-position-embeddings 16 --seq-length 16 --vocab-size 101"
TENSOR = "--tensor-model-parallel-size 2"
HF = "--seq-length 16 --hf-model qwen3 --random-weights"
LAYER = "transformer.layers.1"
# By kind: flags, and the weight that is changed. The first output that differs is its module's.
KINDS = {
    "gpt2": (f"{TEXT} --pipeline-model-parallel-size 2", f"model.{LAYER}.attention.qkv.weight"),
    "llama": (f"{TEXT} --zero-stage 3 --bf16 --recompute-granularity full",
              f"master.{LAYER}.mlp.down.weight"),
    "bert": (f"{TEXT} {TENSOR}", f"model.encoder.{LAYER}.mlp_norm.weight"),
    "vit": (f"{MOCK} {SIZES} --image-size 8", f"model.{LAYER}.mlp.up.bias"),
    "huggingface": (f"{MOCK} {HF} {TENSOR}", "model.model.model.layers.1.mlp.down_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_and_layouts(kind: str, tmp_path: Path) -> None:
    words, key = KINDS[kind]
    name, world = key.partition(".")[2], 1 if kind == "vit" else 2
    words += "" if "--bf16" in words else " --no-bf16"
    write_folder(Path("qwen3"), "qwen3")
    given = f"--model {kind} --save {tmp_path / 'run'} {words}"
    run_script(ROOT / "pretrain.py", *given.split(), world=world, folder=tmp_path)
    result = compare(f"{tmp_path / 'run'} {tmp_path / 'run'} --activations", tmp_path, 0)
    assert len(result["tensors"]) > 40
    other = copied(tmp_path / "run", tmp_path, key)
    result = compare(f"{tmp_path / 'run'} {other} --activations", tmp_path, 1)
    assert weights(result) == [name]
    assert first(result, *FORWARD) == ("output", name.rpartition(".")[0])
    if kind == "bert":
        error = refusal(lambda: compare_runs.main(["a", str(other), "--activations"], {}))
        assert field_of(error) == "B"
