"""The plans of scripts/paper: every command is one that its program takes; what is refused."""

import functools
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from tasks.main import find_module, split_task
from tests.tools.papers import write_folder, write_race
from tools.command import ROOT, Command
from tools.corpus.program import parse_settings
from tools.paper.data import FILES, LAMBADA, RACE_DEV, RACE_TRAIN, WIKITEXT103
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
FUNCTIONS = {
    "tools/train_tokenizer.py": train_tokenizer,
    "tools.paper.miniature.passages": passages,
    "tools.paper.miniature.report": miniature_report,
    "tools.paper.figure6.report": figure6_report,
    "tools.paper.figure7.report": figure7_report,
}


def miniature_stages(cores: int = 2, gpus: int = 0) -> list[Stage]:
    processes = miniature_plan.choose_processes(MINIATURE, gpus, cores)
    return miniature_plan.plan(MINIATURE, processes, cores)


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
    """What the program makes of the flags; an error where it would refuse them."""
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

    @functools.wraps(function)
    def stub(**values: Any) -> Any:
        return values

    return tyro.cli(stub, args=flags)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """--output is refused where its folder is not there, and that of a plan need not be."""
    monkeypatch.setattr("tasks.common.writable", lambda *_: None)
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("stage", miniature_stages(), ids=lambda stage: stage.name)
def test_every_command_of_the_miniature_is_one_that_its_program_takes(stage: Stage) -> None:
    for command in stage.commands:
        parse_command(command)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("data", [Path("/data"), None])
def test_every_command_of_figure_7_is_one_that_its_program_takes(data: Path | None) -> None:
    stages = figure7_plan.plan(replace(FIGURE7, data=data), 2)
    parsed = [parse_command(command) for stage in stages for command in stage.commands]
    runs = [each for each in parsed if isinstance(each, PretrainBertConfig)]
    found = [(r.model.residual_order, r.model.num_layers, r.optimizer.lr) for r in runs]
    both = [(depth, rate) for rate in FIGURE7.rates for depth in FIGURE7.depths]
    assert found == [(order, *each) for each in both for order in ("pre-ln", "post-ln")]


def test_both_orders_are_trained_alike_but_for_the_order() -> None:
    for stage in figure7_plan.plan(FIGURE7, 2):
        if stage.side_by_side:
            one, other = (program_of(command)[1] for command in stage.commands)
            differing = {
                flag for flag, a, b in zip(one, one[1:], other[1:], strict=False) if a != b
            }
            assert differing == {"--residual-order", "--metrics-file"}


def test_what_is_trained_on_holds_no_text_that_is_evaluated_on() -> None:
    clean = miniature_stages()[1]
    cut = next(c for c in clean.commands if c.argv[2] == "tools.corpus.decontaminate")
    flags = list(cut.argv)
    evaluated = flags[flags.index("--evaluation") + 1 :]
    assert evaluated[:2] == [f"/data/{WIKITEXT103}", f"/data/{LAMBADA}"]
    assert evaluated[2].startswith("runs/miniature/corpus/race-dev/")


def test_missing_files_are_all_named_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    (folder / LAMBADA).unlink()
    (folder / RACE_DEV).write_bytes(b"")
    with pytest.raises(OSError, match="lacks .*RACE_dev.tar.xz, .*lambada_test_first500.jsonl"):
        miniature(folder, output=tmp_path / "out")
    with pytest.raises(OSError, match="is not a folder"):
        figure7(tmp_path / "nowhere", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "files"),
    [("miniature", FILES), ("figure6", FILES), ("figure7", (RACE_TRAIN,))],
)
def test_the_scripts_name_missing_files_before_anything_is_installed(
    tmp_path: Path, script: str, files: tuple[str, ...]
) -> None:
    # A copy without scripts/setup.sh could install nothing.
    copy = tmp_path / "scripts" / "paper"
    copy.mkdir(parents=True)
    for name in (f"{script}.sh", "start.sh"):
        (copy / name).write_bytes((ROOT / "scripts" / "paper" / name).read_bytes())
    for flags in (["--data", str(tmp_path)], [f"--data={tmp_path}"]):
        command = ["bash", str(copy / f"{script}.sh"), "--fresh", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        assert f"lacks {', '.join(f'{tmp_path}/{name}' for name in files)};" in ended.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"race_dev": 0}, "--race-dev 0: must be"),
        ({"vocab_size": 100}, "--vocab-size 100"),
        ({"tensor_parallel": 3}, "--tensor-model-parallel-size 3"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        miniature(write_folder(tmp_path / "data"), output=tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": (6, 6)}, "--depths 6 6"),
        ({"rates": ()}, "--rates"),
        ({"depths": (0,)}, "--depths 0"),
    ],
)
def test_depths_and_rates_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        figure7_plan.check_settings(replace(FIGURE7, **changes))


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


def test_an_archive_without_passages_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar", "w") as members:
        members.add(__file__, "other/test.py")
    with pytest.raises(ValueError, match="--archive .*: must be RACE"):
        passages(tmp_path / "other.tar", 1, tmp_path / "out")
    (tmp_path / "cut.tar.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="--archive .*: must be a whole archive"):
        passages(tmp_path / "cut.tar.xz", 1, tmp_path / "out")
