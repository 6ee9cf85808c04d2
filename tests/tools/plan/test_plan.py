"""tools/plan.py as its users run it. The plan of an unmodified GPT-2 or Llama says what that of our
own layers says: matmuls, parameters and what crosses the ranks."""

import json
import shlex
import subprocess
import sys
from collections import Counter
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse
from megatron.errors import UsageError
from megatron.parallel.schedules import schedule
from tests.refusals import field_of, refusal, refused
from tests.tools.plan.counted import preset
from tools.layouts.job import program_of
from tools.layouts.work import Call, Matmul
from tools.plan import __main__ as plan
from tools.plan.__main__ import main
from tools.plan.hardware import gpu_here, load_hardware
from tools.plan.search import check, near
from tools.plan.software import find_hardware
from tools.plan.trace import Step

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in (ROOT / "scripts" / "presets").glob("*.toml"))
LARGE = "--preset gpt2_scaling_8.3b"
SMALL = "--preset gpt2_8.3b"  # its batch is given
TWENTY = "--preset gpt2_scaling_2.5b"
SIZES = "--pipeline 4 --micro-batches 8"  # of a schedule
OWN = "--kind tests.models.own_kind:KIND --preset quickstart --hardware cpu"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


def planned(tmp_path: Path, arguments: str, *more: str) -> dict[str, Any]:
    """The content of the JSON; the exit status also says that the plan fits."""
    file = tmp_path / "plan.json"
    status = plan.main([*shlex.split(arguments), *more, "--json", str(file)], {})
    found: dict[str, Any] = json.loads(file.read_text())
    assert status == (0 if found["fits"] else 1)
    return found


def leaves(found: object, path: str = "") -> dict[str, object]:
    """Every figure and word of JSON, by where it is."""
    if not isinstance(found, (dict, list)):
        return {path: found}
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    return {k: v for name, each in pairs for k, v in leaves(each, f"{path}/{name}").items()}


def test_a_plan_adds_up(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    found = planned(tmp_path, f"{LARGE} --gpus 512 --hardware dgx2h", "--picture", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["parameters"] == 8_314_143_744
    held = found["memory_per_rank_bytes"]
    kinds = ("weights", "gradients", "masters", "moments", "activations")
    most = max(held["logits"], held["one_layer"])
    assert held["total"] == sum(held[kind] for kind in kinds) + most
    for axis in ("tensor", "data"):
        sums = found["communication_per_step"][axis]
        phases = sums["by_phase"].values()
        for key in ("calls", "bytes"):
            assert sums[key] == sum(each[key] for each in phases) > 0
    # g and f: of the embedding and the loss, and of 72 layers, all of which are recomputed.
    phases = found["communication_per_step"]["tensor"]["by_phase"]
    calls = {name: each["calls"] for name, each in phases.items()}
    assert calls == {"forward": 148, "recomputation": 144, "backward": 144, "agreement": 1}
    seconds = found["predicted_step_seconds"]
    parts = sum(value for kind, value in seconds.items() if "hidden" not in kind)
    assert parts == pytest.approx(2 * seconds["total"])
    assert found["tokens_per_second"] == pytest.approx(512 * 1024 / seconds["total"])
    useful = found["flops_per_step"] / (seconds["total"] * 512 * 130e12)
    assert found["mfu"] == pytest.approx(useful)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_planned(name: str, tmp_path: Path) -> None:
    size = prod(preset(name).parallel.sizes.values())
    found = planned(tmp_path, f"--preset {name} --gpus {size} --hardware dgx-a100")
    kinds = (kind for kind in ("bert", "llama", "vit") if kind in name)
    assert found["model"]["kind"] == next(kinds, "gpt2")
    assert found["predicted_step_seconds"]["total"] > 0


def test_the_tensor_parallel_mode_is_planned(tmp_path: Path) -> None:
    words = "--preset quickstart --gpus 8 --hardware p100 --global-batch-size 32"
    mode = "--tensor-parallel-mode 2d --tensor-model-parallel-size 4"
    found, of_1d = (planned(tmp_path, f"{words} {each}") for each in (mode, ""))
    model = found["model"]
    assert (model["tensor_mode"], model["tensor"], model["data"]) == ("2d", 4, 2)
    assert model["micro_batches"] == 2  # of 4 samples on each of 2 x 2 ranks
    assert [*found["communication_per_step"]] == ["data", "row", "column"]
    assert found["flops_per_step"] == of_1d["flops_per_step"]


def test_every_stage_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--preset gpt2_xl_colossalai --gpus 8 --hardware dgx-a100 --no-fp16"
    virtual = "--num-virtual-stages-per-pipeline-rank 3 --pipeline-partition uniform"
    found = planned(tmp_path, f"{words} {virtual}")
    model, stages = found["model"], found["stages"]
    assert (model["pipeline"], model["tensor"], model["data"]) == (2, 2, 2)
    assert (model["virtual_stages"], model["schedule"]) == (3, "interleaved")
    third = [*range(8)]
    assert [each["layers"] for each in stages] == [
        [first + number for first in (start, start + 16, start + 32) for number in third]
        for start in (0, 8)
    ]
    assert sum(each["parameters"] for each in stages) == found["parameters"] == 1_557_611_200
    totals = [each["memory_per_rank_bytes"]["total"] for each in stages]
    assert found["memory_per_rank_bytes"]["total"] == max(totals)
    # Two ranks: the word embedding is summed over the axis that messages take.
    m = model["micro_batches"]
    sent = [each["communication_per_step"]["pipeline"]["calls"] for each in stages]
    assert sent == [5 * m + 1, 5 * m + 1]
    bubble = found["idle_share_of_schedule"]
    assert bubble == pytest.approx(1 / (3 * m))
    assert found["pipeline"] == {
        "ranks": 2,
        "virtual_stages": 3,
        "schedule": "interleaved",
        "bubble": bubble,
        "largest_rank": totals.index(max(totals)),
        "memory_per_stage_bytes": totals,
    }
    most = totals.index(max(totals))
    assert f"(stage {most} needs most, of stages 0 to 1)" in capsys.readouterr().out
    assert found["predicted_step_seconds"]["pipeline_bubble"] > 0


def test_a_kind_can_be_given(tmp_path: Path) -> None:
    own, hardware = tmp_path / "own.toml", tmp_path / "bert_laboratory.toml"
    own.write_text((ROOT / "scripts" / "presets" / "figure7_bert.toml").read_text())
    hardware.write_text((ROOT / "scripts" / "hardware" / "cpu.toml").read_text())
    for kind, expected in (("", "gpt2"), ("--kind bert", "bert"), ("--kind=bert", "bert")):
        words = f"{kind} --preset {own} --gpus 1 --vocab-size 2048 --hardware {hardware}"
        assert planned(tmp_path, words)["model"]["kind"] == expected
    shape = "--hidden-size 48 --num-attention-heads 12 --seq-length 64"
    cut = "--gpus 2 --tensor-model-parallel-size 2"
    found = planned(tmp_path, f"{OWN} {shape} {cut} --search")
    assert found["model"]["settings"]["key_value_heads"] == 3
    assert found["communication_per_step"]["tensor"]["calls"] > 0
    assert {each["tensor"] for each in found["layouts"]} == {1, 2}


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        ("NVIDIA H100 80GB HBM3, 81559", "dgx-h100"),
        ("NVIDIA T400, 4096\nNVIDIA H200, 143771", "h200"),
        ("NVIDIA A100-SXM4-80GB, 81920", "dgx-a100"),
        ("Tesla P100-PCIE-16GB, 16280", "p100"),
        ("NVIDIA A100-SXM4-40GB, 40960", None),
        ("NVIDIA GeForce RTX 4090, 24564", None),
        ("NVIDIA-SMI has failed because it could not communicate with the driver", None),
        ("", None),
        (None, None),
    ],
)
def test_without_hardware_the_gpu_here_is_meant(
    listed: str | None, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listed is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{listed}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if name is not None:
        assert gpu_here() == name
        return
    with pytest.raises(UsageError) as error:
        gpu_here()
    assert error.value.flag == "--hardware"
    assert not listed or listed.splitlines()[0] in str(error.value)


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(UsageError) as error:
        load_hardware("h100")
    assert "dgx-h100 or h200" in error.value.allowed


@pytest.mark.parametrize(
    ("words", "iterations", "cost"),
    [("--days", 300_000, None), ("--days --tokens 1e9 --price 2", 1908, 2.0)],
)
def test_days_and_cost(words: str, iterations: int, cost: float | None, tmp_path: Path) -> None:
    found = planned(tmp_path, f"--preset gpt2_355m --gpus 64 --hardware dgx-a100 {words}")
    run, seconds = found["run"], found["predicted_step_seconds"]["total"]
    assert run["iterations"] == iterations
    assert run["tokens"] == iterations * found["tokens_per_step"]
    assert run["days"] == pytest.approx(iterations * seconds / 86_400)
    assert run["device_hours"] == pytest.approx(64 * 24 * run["days"])
    assert run["cost"] == (cost and pytest.approx(cost * run["device_hours"]))


def checked(words: list[str]) -> None:
    """The checks that refuse a run before anything is planned."""
    if words[0] == "schedule":
        plan.main(words, {})
        return
    config = parse(program_of(words, question=plan.QuestionConfig), words, {})
    check(config, config.question.gpus)
    if config.question.hardware is not None:
        load_hardware(config.question.hardware)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--gpus 8", "--preset"),
        (f"{LARGE} --gpus 12", "--tensor-model-parallel-size"),
        (f"{LARGE} --gpus 8 --hardware dgx2", "--hardware"),
        (f"{LARGE} --gpus 8 --kind gpt3", "--kind"),
        (f"{LARGE} --gpus 8 --kind tests.models.own_kind:IMAGES", "--kind"),
        # 20 heads on 8 ranks.
        (f"{TWENTY} --gpus 128 --tensor-model-parallel-size 8", "--tensor-model-parallel-size"),
        (f"{TWENTY} --gpus 256 --global-batch-size 512", "--global-batch-size"),
        (f"{SMALL} --gpus 5", "--gpus"),
        ("--preset gpt3_175b --gpus 32", "--pipeline-model-parallel-size"),
        ("--preset gpt3_175b --gpus 64 --pipeline-schedule zb-h1", "--pipeline-schedule"),
        (f"{OWN} --pipeline-model-parallel-size 2 --gpus 2", "--pipeline-model-parallel-size"),
        (f"{SMALL} --gpus 8 --seq-length 2048", "--seq-length"),
        (f"{SMALL} --gpus 8 --hardware dgx2h --optimizer-cpu-offload", "--optimizer-cpu-offload"),
        (f"{SMALL} --gpus 8 --cpu-offload-activations", "--cpu-offload-activations"),
        (f"{SMALL} --gpus 8 --tokens 1e9", "--tokens"),
        (f"{SMALL} --gpus 8 --price 2", "--price"),
        ("schedule --pipeline=2", "--micro-batches"),
        ("schedule --micro-batches=2", "--pipeline"),
        ("schedule --pipeline=0 --micro-batches=2", "--pipeline"),
        (f"schedule {SIZES} --kind=zb-v", "--kind"),
        (f"schedule {SIZES} --kind=interleaved", "--virtual"),
        (f"schedule {SIZES} --virtual=3", "--virtual"),
        (f"schedule {SIZES} --virtual=0", "--virtual"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: str, flag: str) -> None:
    assert refused(partial(plan.main, environ={}), words, retry=checked) == flag


def test_a_machine_without_what_is_asked_of_it_is_refused() -> None:
    program = partial(plan.main, environ={})
    study = refusal(partial(program, ["figure5", "--hardware", "h200"]))
    assert field_of(study) == "--hardware"
    words = f"{LARGE} --gpus 8 --hardware dgx2h --bf16 --no-fp16"
    assert "bf16" in str(refusal(partial(program, words.split())))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[peak.fp32]", "[peak.fp64]", "peak.fp32"),
        ("[memory_bandwidth]\nvalue = ", "[memory_bandwidth]\nvalue = 0 #", ""),
        ("[memory]\nvalue = ", "[memory]\nvalue = '900 GB' #", ""),
        ("name = ", "name == ", ""),
        ('software = "megatron 2019"', 'software = "megatron 2029"', "megatron 2029"),
        (
            "[memory]",
            "[all_reduce]\nsource = ''\nvalue.2 = [[8, 1.0], [8, 2.0]]\n[memory]",
            "all_reduce.2",
        ),
    ],
)
def test_hardware_that_cannot_be_is_refused(old: str, new: str, named: str, tmp_path: Path) -> None:
    text = (ROOT / "scripts" / "hardware" / "dgx2h.toml").read_text()
    assert old in text
    (tmp_path / "own.toml").write_text(text.replace(old, new))
    words = [*LARGE.split(), "--gpus", "8", "--hardware", f"{tmp_path}/own.toml"]
    error = refusal(partial(plan.main, words, {}))
    assert field_of(error) == "--hardware"
    assert named in str(error)


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        # One flag is enough in the first two rows: the fastest of those that are.
        (
            f"{LARGE} --gpus 8 --micro-batch-size 7 --recompute-granularity none",
            "--sequence-parallel",
        ),
        (
            f"{LARGE} --gpus 8 --tensor-model-parallel-size 2 --micro-batch-size 1",
            "--tensor-model-parallel-size 8 --global-batch-size 4",
        ),
        (
            f"{SMALL} --gpus 1 --tensor-model-parallel-size 1 --micro-batch-size 1 "
            "--global-batch-size 1",
            "--tensor-model-parallel-size 8 --gpus 8",
        ),
    ],
)
def test_the_smallest_change_that_fits_is_found(
    arguments: str, change: str, tmp_path: Path
) -> None:
    found = planned(tmp_path, f"{arguments} --hardware dgx2h")
    assert not found["fits"]
    assert found["smallest_change"] == change
    changed = planned(tmp_path, f"{arguments} --hardware dgx2h {change}")
    assert changed["fits"]
    assert changed["tokens_per_step"] == found["tokens_per_step"]


def test_figure_5_is_the_one_that_was_committed(tmp_path: Path) -> None:
    file, picture = tmp_path / "figure5.json", tmp_path / "figure5.png"
    words = ["figure5", "--hardware", "dgx2h", "--json", str(file), "--picture", str(picture)]
    assert plan.main(words, {}) == 0
    found = json.loads(file.read_text())
    committed = json.loads((ROOT / "docs" / "results" / "scaling.json").read_text())
    figures, expected = leaves(found), leaves(committed)
    assert figures.keys() == expected.keys()
    for place, value in expected.items():
        near = pytest.approx(value, rel=1e-12, abs=0) if isinstance(value, float) else value
        assert figures[place] == near, place
    assert picture.read_bytes().startswith(b"\x89PNG")


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.parametrize("launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)])
def test_this_machine_is_described(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Its all-reduces too, under torchrun."""
    file = tmp_path / "here.toml"
    if launcher:
        done = run(*launcher, "tools/plan.py", "--measure", str(file))
        assert not done.returncode, done.stderr
    else:
        assert plan.main(["--measure", str(file)], {}) == 0
    here = find_hardware(str(file))
    assert here.attained_share == 1
    assert here.default_precision in here.peaks
    assert here.devices_per_server == (2 if launcher else 1)
    assert launcher or here.base_latency == 0  # there is nobody to wait for
    assert planned(tmp_path, f"--preset quickstart --gpus 1 --hardware {file}")["fits"]


def test_the_layouts_near_one() -> None:
    found = {
        (each.parallel.tensor_model_parallel_size, each.training.micro_batch_size)
        for each in near(preset("gpt2_8.3b"), 512)
    }
    # 24 heads; 512 samples on 512 / t models.
    assert found == {(t, b) for t in (1, 2, 4, 8) for b in (1, 2, 4, 8, 16, 32, 64) if b <= t}


def test_a_search_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--preset quickstart --gpus 1 --hardware dgx-a100 --global-batch-size 4 --search"
    found = planned(tmp_path, words)
    first, *others = found["layouts"]
    assert first["batch"] == 4
    assert first["tie"]
    assert all(first["seconds"] <= each["seconds"] for each in others)
    assert len(others) + 1 == found["search"]["planned"]
    assert found["error_band"] is None
    text = capsys.readouterr().out
    for each in (*found["layouts"][:3], *found["neighbours"]):
        assert each["flags"] in text
    assert all(each["reason"] in text for each in found["neighbours"])


def test_a_schedule_is_written_drawn_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "own.json", tmp_path / "own.png"
    words = f"schedule --kind=zb-h1 {SIZES} --json={file} --picture={picture}"
    assert plan.main(words.split(), {}) == 0
    assert not capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(file.read_text())
    lists = schedule("zb-h1", 4, 8)
    assert found["actions"] == [[str(action) for action in actions] for actions in lists]
    assert found["actions"][3][:3] == ["3F0", "3I0", "3F1"]
    assert found["in_flight"] == [4, 4, 4, 4]
    assert found["idle_share"] == pytest.approx(3 / 24)
    words = f"schedule --kind=interleaved --virtual=2 {SIZES}"
    assert plan.main([*words.split(), f"--json={file}"], {}) == 0
    assert json.loads(file.read_text())["virtual"] == 2
    assert plan.main(words.split(), {}) == 0
    lines = [line.split()[2:5] for line in capsys.readouterr().out.splitlines()]
    first = [["0F0", "0F1", "0F2"], [".", "1F0", "1F1"], [".", ".", "2F0"], [".", ".", "."]]
    assert lines[:4] == first


COMMON = "--seq-length 64 --micro-batch-size 2 --train-iters 10 --no-bf16"
NATIVE = "--num-layers 5 --hidden-size 96 --num-attention-heads 4 --vocab-size 16384 "
NATIVE += "--hidden-dropout 0 --attention-dropout 0 "
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # flags of our own, and config.json
    "gpt2": (
        f"{NATIVE} --max-position-embeddings 64",
        {"n_layer": 5, "n_embd": 96, "n_head": 4, "n_positions": 64}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "llama": (
        f"{NATIVE} --ffn-hidden-size 192 --num-query-groups 2",
        {"num_hidden_layers": 5, "hidden_size": 96, "num_attention_heads": 4}
        | {"intermediate_size": 192, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unmodified_model_takes_what_our_own_takes(kind: str, tmp_path: Path) -> None:
    own, described = KINDS[kind]
    text = json.dumps({"model_type": kind, "vocab_size": 16_384, **described})
    (tmp_path / "config.json").write_text(text)
    common = f"{COMMON} --tensor-model-parallel-size 2"
    unmodified = f"--hf-model {tmp_path} {common}"
    native, found = step_of(kind, f"{own} {common}"), step_of("huggingface", unmodified)
    assert found.model.local == native.model.local
    assert found.parameters == native.parameters
    # A matmul computes the angles of rotary positions in transformers 5.17.
    equal = partial(pytest.approx, rel=1e-12 if kind == "gpt2" else 1e-5)
    assert matmul_flops(found) == equal(matmul_flops(native))
    assert sent(found, "tensor") == sent(native, "tensor")
    assert found.flops == equal(native.flops)
    file = tmp_path / "found.json"
    words = f"--kind huggingface {unmodified} --gpus 2 --hardware dgx2h --json {file}"
    assert main(words.split(), {}) == 0
    shown = json.loads(file.read_text())["model"]
    assert (shown["layers"], shown["hidden"], shown["heads"]) == (5, 96, 4)


def step_of(kind: str, words: str) -> Step:
    config = parse(program_of(["--kind", kind]), words.split(), {})
    config.check(2)
    return Step(config, 2, "fp32")


def matmul_flops(step: Step) -> int:
    matmuls = sum((work.matmuls for work in step.work.values()), Counter[Matmul]())
    return sum(times * each.flops for each, times in matmuls.items())


def sent(step: Step, axis: str) -> Counter[tuple[int, int, bool]]:
    """How many calls there are of each (bytes, passes, whether a matmul runs beside it)."""
    found = Counter[tuple[int, int, bool]]()
    for call, times in sum(step.calls.values(), Counter[Call]()).items():
        if call.axis == axis:
            found[call.bytes, call.passes, bool(call.beside)] += times
    return found
