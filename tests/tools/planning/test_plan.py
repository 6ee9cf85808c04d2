"""tools/plan.py as its users run it."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.planning.presets import NAMES, PRESETS, preset
from tools import plan
from tools.planning.anchor import find_hardware

ROOT = Path(__file__).parents[3]
PRESET = str(PRESETS / "gpt2_scaling_8.3b.toml")
SMALL = str(PRESETS / "gpt2_8.3b.toml")  # its batch is given


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/plan.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def planned(tmp_path: Path, *arguments: str) -> dict:
    file = tmp_path / "plan.json"
    plan.main([*arguments, "--json", str(file)], {})
    return json.loads(file.read_text())


def test_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, "--preset", PRESET, "--gpus", "512", "--hardware", "dgx2h")
    assert found["parameters"] == 8_314_143_744
    held = found["memory_per_rank_bytes"]
    kinds = ("weights", "gradients", "masters", "moments", "activations", "logits", "one_layer")
    most = max(held["logits"], held["one_layer"])
    assert held["total"] == sum(held[kind] for kind in kinds[:5]) + most
    assert found["fits"] is True
    for axis in ("tensor", "data"):
        sums = found["communication_per_step"][axis]
        phases = sums["by_phase"].values()
        assert sums["calls"] == sum(each["calls"] for each in phases) > 0
        assert sums["bytes"] == sum(each["bytes"] for each in phases) > 0
    seconds = found["predicted_step_seconds"]
    parts = sum(value for kind, value in seconds.items() if "hidden" not in kind)
    assert parts == pytest.approx(2 * seconds["total"])
    assert found["tokens_per_second"] == pytest.approx(512 * 1024 / seconds["total"])
    useful = found["flops_per_step"] / (seconds["total"] * 512 * 130e12)
    assert found["mfu"] == pytest.approx(useful)
    assert f"MFU {100 * useful:.1f} %" in capsys.readouterr().out


def test_settings_after_the_preset_win(tmp_path: Path) -> None:
    found = planned(tmp_path, "--preset", PRESET, "--gpus", "64", "--hardware", "h200",
                    "--tensor-model-parallel-size", "4", "--bf16", "--no-fp16")  # fmt: skip
    assert found["model"]["tensor"] == 4
    assert found["model"]["data"] == 16
    assert found["model"]["precision"] == "bf16"
    assert found["peak_flops_per_second"] == 989e12


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_planned(name: str, tmp_path: Path) -> None:
    size = preset(name).parallel.tensor_model_parallel_size
    found = planned(tmp_path, "--preset", str(PRESETS / f"{name}.toml"), "--gpus", str(size),
                    "--hardware", "dgx-a100")  # fmt: skip
    assert found["model"]["kind"] == ("bert" if "bert" in name else "gpt2")
    assert found["predicted_step_seconds"]["total"] > 0


def test_a_kind_can_be_given(tmp_path: Path) -> None:
    preset = tmp_path / "own.toml"
    preset.write_text((PRESETS / "figure7_bert.toml").read_text())
    hardware = tmp_path / "bert_laboratory.toml"
    hardware.write_text((ROOT / "scripts" / "hardware" / "cpu.toml").read_text())
    words = ("--preset", str(preset), "--gpus", "1", "--vocab-size", "2048")
    words += ("--hardware", str(hardware))
    assert planned(tmp_path, *words)["model"]["kind"] == "gpt2"
    assert planned(tmp_path, "--kind", "bert", *words)["model"]["kind"] == "bert"
    assert planned(tmp_path, "--kind=bert", *words)["model"]["kind"] == "bert"


def test_an_answer_takes_less_than_five_processor_seconds() -> None:
    run("--preset", PRESET, "--gpus", "512")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("--preset", PRESET, "--gpus", "512", "--search")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert not done.returncode, done.stderr
    assert after.ru_utime - before.ru_utime < 5
    code = "import sys; from tools import plan; print('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert loaded.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "8"), "--preset"),
        (("--preset", PRESET, "--gpus", "12"), "--tensor-model-parallel-size 4"),
        (("--preset", PRESET, "--gpus", "8", "--hardware", "dgx2"), "--hardware"),
        (("--preset", PRESET, "--gpus", "8", "--bf16", "--no-fp16"), "bf16"),
        (("figure5", "--hardware", "h200"), "--hardware"),
        (("--preset", SMALL, "--gpus", "5"), "--gpus 4 works"),
        (("--preset", SMALL, "--gpus", "8", "--seq-length", "2048"), "--seq-length 1024 works"),
        (("--preset", SMALL, "--gpus", "1", "--seq-length", "2048"), "error: --"),
    ],
)
def test_what_cannot_be_answered_is_told(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan.main(arguments, {})
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[peak.fp32]", "[peak.fp64]", "KeyError: 'fp32'"),
        ("[memory_bandwidth]\nvalue = ", "[memory_bandwidth]\nvalue = 0 #", "above 0"),
        ("[memory]\nvalue = ", "[memory]\nvalue = '900 GB' #", "TypeError"),
        ("name = ", "name == ", "TOMLDecodeError"),
    ],
)
def test_hardware_that_cannot_be_is_refused(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "scripts" / "hardware" / "cpu.toml").read_text()
    assert old in text
    (tmp_path / "own.toml").write_text(text.replace(old, new))
    with pytest.raises(SystemExit, match="2"):
        plan.main(("--preset", PRESET, "--gpus", "8", "--hardware", f"{tmp_path}/own.toml"), {})
    told = capsys.readouterr().err
    assert "own.toml: must be a description" in told
    assert message in told


def test_what_does_not_fit_is_told_with_what_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--preset", PRESET, "--gpus", "512", "--tensor-model-parallel-size", "2")
    found = planned(tmp_path, *arguments)
    assert found["fits"] is False
    assert {each["tensor"] for each in found["layouts"]} >= {8}
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    plan.main(["--preset", PRESET, "--gpus", "512", "--picture", str(file)], {})
    assert file.read_bytes().startswith(b"\x89PNG")


def test_figure_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "figure5.json", tmp_path / "figure5.png"
    plan.main(
        ["figure5", "--hardware", "dgx2h", "--json", str(file), "--picture", str(picture)], {}
    )
    found = json.loads(file.read_text())
    paper = [(each["gpus"], each["paper"]) for each in found["figure_5"]]
    assert paper == [(1, 100), (2, 95), (4, 82), (8, 77), (64, 96), (128, 83), (256, 79), (512, 74)]
    seven = [abs(each["predicted"] - each["paper"]) for each in found["figure_5"][1:]]
    assert found["figure_5"][0]["predicted"] == 100
    assert found["mean_error"] == pytest.approx(sum(seven) / 7)
    assert found["mean_error_of_always_82"] == pytest.approx(44 / 7)
    assert [each["paper"] for each in found["strong_scaling"]] == [1.0, 1.64, 2.34, 2.98]
    # What the model has to get right, whatever the constants: the order of everything.
    for rows in (found["heads"], [*found["strong_scaling"]][::-1]):
        predicted = [each["predicted"] for each in rows]
        assert predicted == sorted(predicted, reverse=True)
    assert found["mean_error_of_version_1.0"] < 3
    assert "predicted  paper" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_this_machine_is_described(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    done = run("--measure", str(file))
    assert not done.returncode, done.stderr
    here = find_hardware(str(file))
    assert here.attained_share == 1
    assert here.peaks["fp32"] > 1e9
    assert here.memory_bandwidth > 1e8
    assert here.default_precision in here.peaks
    found = planned(tmp_path, "--preset", str(PRESETS / "quickstart.toml"), "--gpus", "1",
                    "--hardware", str(file))  # fmt: skip
    assert found["fits"]


@pytest.mark.slow
def test_its_all_reduces_are_measured_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "tools/plan.py", "--measure", str(file)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    here = find_hardware(str(file))
    assert here.devices_per_server == 2
    assert here.base_latency > 0
    assert "2 ranks" in here.sources["link_bandwidth"]
