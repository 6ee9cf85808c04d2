"""The commands of scripts/paper: every one is one that its program takes, only what is compared
differs, and settings that cannot be run are refused."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse, parse_call
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from tasks.main import find_module, split_task
from tests.refusals import field_of, refusal
from tests.tools.papers import write_folder, write_race
from tools.corpus.settings import parse_settings
from tools.corpus.tokenize.settings import Settings as PreprocessSettings
from tools.experiments import figure6, figure7, miniature, quickstart
from tools.experiments.passages import passages
from tools.experiments.runner import ROOT, Command, Machine, Stage
from tools.experiments.stages import FILES, LAMBADA, RACE_DEV, WIKITEXT103
from tools.train_tokenizer import train_tokenizer

CPU = Machine(0, 2)
DATA = Path("/data")
FIGURE7 = figure7.Settings(data=DATA, depths=(6, 12), rates=(2e-3, 5e-4))
SIZES = ("2x64", "4x128", "6x256")
UNCOMPARABLE = (("2x64",), ("2x64", "2x64"), ("4x128", "2x64"), ("2x64", "4-128"))
FUNCTIONS = {
    "tools/train_tokenizer.py": train_tokenizer,
    "tools.experiments.passages": passages,
}


def experiments() -> dict[str, Sequence[Stage]]:
    return {
        "quickstart": quickstart.list_stages(quickstart.Settings(), CPU),
        "miniature": miniature.list_stages(miniature.Settings(data=DATA), CPU),
        "figure6": figure6.list_stages(figure6.Settings(data=DATA), CPU),
        "figure7": figure7.list_stages(FIGURE7, CPU),
        "figure7 without data": figure7.list_stages(replace(FIGURE7, data=None), CPU),
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
    """The settings that the program makes of the flags; an error if it refuses them."""
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
    if program == "tools/generate.py":
        return None  # it reads its checkpoint; the quickstart runs it whole
    if program.startswith("tools.corpus."):
        return parse_settings(program, flags)
    return parse_call(FUNCTIONS[program], flags, {})


@pytest.mark.parametrize("name", experiments())
def test_every_command_is_one_that_its_program_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The folders of what it writes exist, as in a run."""
    monkeypatch.chdir(tmp_path)
    Path("scripts").symlink_to(ROOT / "scripts")
    commands = [command for stage in experiments()[name] for command in stage.commands]
    for command in commands:
        if "--output" in command.argv:
            output = Path(command.argv[command.argv.index("--output") + 1])
            output.parent.mkdir(parents=True, exist_ok=True)
    parsed = [parse_command(command) for command in commands]
    if name == "figure6":
        runs = [each.model for each in parsed if isinstance(each, PretrainGPT2Config)]
        assert [f"{run.num_layers}x{run.hidden_size}" for run in runs] == list(SIZES)
    if name.startswith("figure7"):
        berts = [each for each in parsed if isinstance(each, PretrainBertConfig)]
        values = [(r.model.residual_order, r.model.num_layers, r.optimizer.lr) for r in berts]
        both = [(depth, rate) for rate in FIGURE7.rates for depth in FIGURE7.depths]
        assert values == [(order, *each) for each in both for order in ("pre-ln", "post-ln")]


def differing(one: Command, other: Command) -> set[str]:
    """The flags whose values differ."""
    ours, theirs = (program_of(command)[1] for command in (one, other))
    return {flag for flag, a, b in zip(ours, ours[1:], theirs[1:], strict=False) if a != b}


def test_compared_runs_are_trained_and_evaluated_alike() -> None:
    pairs = [stage.commands for stage in experiments()["figure7"] if stage.is_parallel]
    assert pairs
    for one, other in pairs:
        assert differing(one, other) == {"--residual-order", "--metrics-file"}
    stages = {stage.name: stage for stage in experiments()["figure6"]}
    for name in SIZES[1:]:
        flags = {"--num-layers", "--hidden-size", "--save", "--metrics-file"}
        assert differing(stages[SIZES[0]].commands[0], stages[name].commands[0]) == flags
    for task in ("wikitext103", "lambada"):
        first, *others = stages[task].commands
        for size, other in zip(SIZES[1:], others, strict=True):
            assert differing(first, other) == {"--load", "--output"}
            folder = f"runs/figure6/runs/{size}"
            assert {f"{folder}/checkpoints", f"{folder}/{task}.json"} <= {*other.argv}


def test_text_that_is_evaluated_on_is_not_trained_on() -> None:
    clean = experiments()["miniature"][1]
    cut = next(c for c in clean.commands if c.argv[2] == "tools.corpus.decontaminate")
    flags = list(cut.argv)
    evaluated = flags[flags.index("--evaluation") + 1 :]
    assert evaluated[:2] == [f"/data/{WIKITEXT103}", f"/data/{LAMBADA}"]
    assert evaluated[2].startswith("runs/miniature/corpus/race-dev/")


def test_missing_files_are_all_named_before_anything_is_written(tmp_path: Path) -> None:
    data, output = write_folder(tmp_path / "data"), tmp_path / "out"
    (data / LAMBADA).unlink()
    (data / RACE_DEV).write_bytes(b"")
    nowhere = tmp_path / "nowhere"
    for experiment, folder in ((miniature, data), (figure6, data), (figure7, nowhere)):
        settings = experiment.Settings(data=folder, output=output)
        error = refusal(partial(experiment.run, settings))
        assert field_of(error) == "--data"
        if folder == data:
            assert all(name in str(error) for name in (LAMBADA, RACE_DEV))
    assert not output.exists()


def test_a_script_helps_and_names_missing_files_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    # A copy without scripts/setup.sh could install nothing.
    for name in ("quickstart.sh", "test.sh", "paper/miniature.sh", "paper/start.sh"):
        copy = tmp_path / "scripts" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / "scripts" / name).read_bytes())

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = ["bash", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    ended = run("scripts/paper/miniature.sh", "--fresh", "--data", tmp_path)
    assert ended.returncode == 2
    assert all(f"{tmp_path}/{name}" in ended.stderr for name in FILES)
    for name in ("quickstart.sh", "test.sh", "paper/miniature.sh"):
        for flag in ("--help", "-h"):
            ended = run(f"scripts/{name}", flag)
            assert (ended.returncode, ended.stderr) == (0, "")
            assert name in ended.stdout


@pytest.mark.parametrize(
    ("experiment", "changes", "field"),
    [
        (miniature, {"race_dev": 0}, "--race-dev"),
        (miniature, {"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size"),
        (figure6, {"overlapping_eval": 0}, "--overlapping-eval"),
        (figure6, {"vocab_size": 100}, "--vocab-size"),
        *((figure6, {"sizes": sizes}, "--sizes") for sizes in UNCOMPARABLE),
        (figure6, {"sizes": ("2x64", "4x130")}, "--num-attention-heads"),
        (figure7, {"depths": (6, 6)}, "--depths"),
        (figure7, {"rates": ()}, "--rates"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_before_anything_is_written(
    tmp_path: Path, experiment: Any, changes: Mapping[str, Any], field: str
) -> None:
    data, output = write_folder(tmp_path / "data"), tmp_path / "out"
    settings = experiment.Settings(data=data, output=output, **changes)
    assert field_of(refusal(lambda: experiment.run(settings))) == field
    assert not output.exists()


def test_fewer_passages_are_part_of_more_and_of_both_levels(tmp_path: Path) -> None:
    archive = tmp_path / "race.tar.xz"
    write_race(archive, "RACE/train", iter(["text"] * 40))
    unpacked = {}
    for count in (8, 20, 99):
        folder = tmp_path / str(count)
        passages(archive, count, folder)
        unpacked[count] = {str(path.relative_to(folder)) for path in folder.rglob("*.txt")}
    assert [len(each) for each in unpacked.values()] == [8, 20, 40]
    assert unpacked[8] < unpacked[20] < unpacked[99]
    assert {name.split("/")[0] for name in unpacked[8]} == {"middle", "high"}
    archive.write_bytes(b"no archive")
    assert field_of(refusal(lambda: passages(archive, 1, tmp_path / "out"))) == "--archive"
