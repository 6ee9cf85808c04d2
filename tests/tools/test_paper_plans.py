"""The plans of scripts/paper: every command is one that its program takes, only what is compared
differs, and what cannot be run is refused."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import tyro

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from tasks.main import find_module, split_task
from tests.refusals import field_of, refusal
from tests.tools.papers import write_folder, write_race
from tools.command import ROOT, Command
from tools.corpus.settings import parse_settings
from tools.paper.data import FILES, LAMBADA, RACE_DEV, WIKITEXT103
from tools.paper.figure6 import plan as figure6_plan
from tools.paper.figure6.__main__ import figure6
from tools.paper.figure6.report import report as figure6_report
from tools.paper.figure7 import plan as figure7_plan
from tools.paper.figure7.__main__ import figure7
from tools.paper.figure7.report import report as figure7_report
from tools.paper.miniature import plan as miniature_plan
from tools.paper.miniature.__main__ import miniature
from tools.paper.miniature.passages import passages
from tools.paper.miniature.report import report as miniature_report
from tools.preprocess_data import Settings as PreprocessSettings
from tools.stages import Stage
from tools.train_tokenizer import train_tokenizer

PRESETS = ROOT / "scripts" / "presets"
MINIATURE = miniature_plan.Settings(
    data=Path("/data"),
    output=ROOT / "runs" / "miniature",
    gpt2_preset=PRESETS / "miniature_gpt2.toml",
    bert_preset=PRESETS / "miniature_bert.toml",
    tensor_parallel=2,
    vocab_size=8192,
    overlapping_eval=32,
    race_train=700,
    race_dev=200,
)
FIGURE7 = figure7_plan.Settings(
    data=Path("/data"),
    output=ROOT / "runs" / "figure7",
    preset=PRESETS / "figure7_bert.toml",
    depths=(6, 12),
    rates=(2e-3, 5e-4),
    vocab_size=2048,
)
SIZES = ("2x64", "4x128", "6x256")
FIGURE6 = figure6_plan.Settings(
    data=Path("/data"),
    output=ROOT / "runs" / "figure6",
    preset=PRESETS / "figure6.toml",
    sizes=SIZES,
    vocab_size=8192,
    overlapping_eval=64,
)
NO_ROWS = (("2x64",), ("2x64", "2x64"), ("4x128", "2x64"), ("2x64", "4-128"))
FUNCTIONS = {
    "tools/train_tokenizer.py": train_tokenizer,
    "tools.paper.miniature.passages": passages,
    "tools.paper.miniature.report": miniature_report,
    "tools.paper.figure6.report": figure6_report,
    "tools.paper.figure7.report": figure7_report,
}


def plans() -> dict[str, list[Stage]]:
    processes = miniature_plan.choose_processes(MINIATURE, 0, 2)
    return {
        "miniature": miniature_plan.plan(MINIATURE, processes, 2),
        "figure6": figure6_plan.plan(FIGURE6, 0, 2),
        "figure7": figure7_plan.plan(FIGURE7, 2),
        "figure7 without data": figure7_plan.plan(replace(FIGURE7, data=None), 2),
    }


def program_of(command: Command) -> tuple[str, list[str], int]:
    """(file or module, its arguments, processes)."""
    words, world = [*command.argv[1:], *command.tuning], 1
    if words[:2] == ["-m", "torch.distributed.run"]:
        world = int(words[words.index("--nproc-per-node") + 1])
        words = words[words.index("--nproc-per-node") + 2 :]
    if words[0] == "-m":
        words = words[1:]
    return words[0], words[1:], world


def parse_command(command: Command) -> Any:
    """The settings that the program makes of the flags; an error where it would refuse them."""
    program, flags, world = program_of(command)
    if program in ("pretrain_gpt2.py", "pretrain_bert.py"):
        config = PretrainGPT2Config if "gpt2" in program else PretrainBertConfig
        settings = parse(config, flags, {})
        settings.check(world)
        return settings
    if program == "tasks/main.py":
        name, rest = split_task(flags)
        return parse(find_module(name).Settings, rest, {})
    if program == "tools/preprocess_data.py":
        return parse(PreprocessSettings, flags, {})
    if program.startswith("tools.corpus."):
        return parse_settings(program, flags)
    function = FUNCTIONS[program]

    @wraps(function)
    def stub(**values: Any) -> Any:
        return values

    return tyro.cli(stub, args=flags)


@pytest.mark.parametrize("name", plans())
def test_every_command_is_one_that_its_program_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where the folders of what it writes are there, as they are in a run."""
    monkeypatch.chdir(tmp_path)
    Path("scripts").symlink_to(ROOT / "scripts")
    commands = [command for stage in plans()[name] for command in stage.commands]
    for command in commands:
        if "--output" in command.argv:
            output = Path(command.argv[command.argv.index("--output") + 1])
            output.parent.mkdir(parents=True, exist_ok=True)
    parsed = [parse_command(command) for command in commands]
    if name == "figure6":
        runs = [each.model for each in parsed if isinstance(each, PretrainGPT2Config)]
        found = [f"{run.num_layers}x{run.hidden_size}" for run in runs]
        assert found == list(SIZES)
    if name.startswith("figure7"):
        berts = [each for each in parsed if isinstance(each, PretrainBertConfig)]
        found = [(r.model.residual_order, r.model.num_layers, r.optimizer.lr) for r in berts]
        both = [(depth, rate) for rate in FIGURE7.rates for depth in FIGURE7.depths]
        assert found == [(order, *each) for each in both for order in ("pre-ln", "post-ln")]


def differing(one: Command, other: Command) -> set[str]:
    """The flags whose values differ."""
    ours, theirs = (program_of(command)[1] for command in (one, other))
    return {flag for flag, a, b in zip(ours, ours[1:], theirs[1:], strict=False) if a != b}


def test_runs_that_are_compared_are_trained_alike() -> None:
    pairs = [stage.commands for stage in plans()["figure7"] if stage.side_by_side]
    for one, other in pairs:
        assert differing(one, other) == {"--residual-order", "--metrics-file"}
    assert pairs
    sizes = [stage.commands[0] for stage in plans()["figure6"] if stage.name in SIZES]
    for other in sizes[1:]:
        names = {"--num-layers", "--hidden-size", "--save", "--metrics-file"}
        assert differing(sizes[0], other) == names


def test_each_evaluation_is_of_every_size_by_one_convention() -> None:
    for stage in plans()["figure6"]:
        if stage.name in ("wikitext103", "lambada"):
            flags = [list(program_of(command)[1]) for command in stage.commands]
            places = [(each.pop(each.index("--load") + 1), each.pop()) for each in flags]
            assert flags == flags[:1] * len(SIZES)
            folders = [f"runs/figure6/runs/{name}" for name in SIZES]
            assert places == [(f"{f}/checkpoints", f"{f}/{stage.name}.json") for f in folders]


def test_text_that_is_evaluated_on_is_not_trained_on() -> None:
    clean = plans()["miniature"][1]
    cut = next(c for c in clean.commands if c.argv[2] == "tools.corpus.decontaminate")
    flags = list(cut.argv)
    evaluated = flags[flags.index("--evaluation") + 1 :]
    assert evaluated[:2] == [f"/data/{WIKITEXT103}", f"/data/{LAMBADA}"]
    assert evaluated[2].startswith("runs/miniature/corpus/race-dev/")


def test_missing_files_are_all_named_before_anything_is_written(tmp_path: Path) -> None:
    data, output = write_folder(tmp_path / "data"), tmp_path / "out"
    (data / LAMBADA).unlink()
    (data / RACE_DEV).write_bytes(b"")
    for script in (miniature, figure6):
        error = str(refusal(partial(script, data, output=output)))
        assert all(named in error for named in ("--data", LAMBADA, RACE_DEV))
    assert "--data" in str(refusal(partial(figure7, tmp_path / "nowhere", output=output)))
    assert not output.exists()


def test_a_script_names_missing_files_before_anything_is_installed(tmp_path: Path) -> None:
    # A copy without scripts/setup.sh could install nothing.
    copy = tmp_path / "scripts" / "paper"
    copy.mkdir(parents=True)
    for name in ("miniature.sh", "start.sh"):
        (copy / name).write_bytes((ROOT / "scripts" / "paper" / name).read_bytes())
    command = ["bash", str(copy / "miniature.sh"), "--fresh", "--data", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert all(f"{tmp_path}/{name}" in ended.stderr for name in FILES)


@pytest.mark.parametrize(
    ("script", "changes", "named"),
    [
        (miniature, {"race_dev": 0}, "--race-dev"),
        (miniature, {"tensor_parallel": 3}, "--tensor-model-parallel-size 3"),
        (figure6, {"overlapping_eval": 0}, "--overlapping-eval 0"),
        (figure6, {"vocab_size": 100}, "--vocab-size 100"),
        *((figure6, {"sizes": sizes}, "--sizes") for sizes in NO_ROWS),
        (figure6, {"sizes": ("2x64", "4x130")}, "--hidden-size 130"),
        (figure7, {"depths": (6, 6)}, "--depths 6 6"),
        (figure7, {"rates": ()}, "--rates"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_before_anything_is_written(
    tmp_path: Path, script: Callable[..., None], changes: dict[str, Any], named: str
) -> None:
    data, output = write_folder(tmp_path / "data"), tmp_path / "out"
    assert named in str(refusal(lambda: script(data, output=output, **changes)))
    assert not output.exists()


def test_fewer_passages_are_part_of_more_and_of_both_levels(tmp_path: Path) -> None:
    archive = tmp_path / "race.tar.xz"
    write_race(archive, "RACE/train", iter(["text"] * 40))
    found = {}
    for count in (8, 20, 99):
        folder = tmp_path / str(count)
        passages(archive, count, folder)
        found[count] = {str(path.relative_to(folder)) for path in folder.rglob("*.txt")}
    assert [len(each) for each in found.values()] == [8, 20, 40]
    assert found[8] < found[20] < found[99]
    assert {name.split("/")[0] for name in found[8]} == {"middle", "high"}
    archive.write_bytes(b"no archive")
    assert field_of(refusal(lambda: passages(archive, 1, tmp_path / "out"))) == "--archive"
