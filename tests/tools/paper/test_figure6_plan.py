"""The plan of scripts/paper/figure6.sh: its programs take it; only sizes differ."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.pretrain import PretrainGPT2Config
from tests.tools.papers import write_folder
from tests.tools.test_paper_plans import PRESETS, parse_command, program_of
from tools.command import ROOT
from tools.paper.data import LAMBADA
from tools.paper.figure6.__main__ import figure6
from tools.paper.figure6.plan import Settings, check_settings, plan

SIZES = ("2x64", "4x128", "6x256")
FIGURE6 = Settings(
    data=Path("/data"),
    output=ROOT / "runs" / "figure6",
    preset=PRESETS / "figure6.toml",
    sizes=SIZES,
    vocab_size=8192,
    overlapping_eval=64,
)


def test_every_command_is_one_that_its_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.common.writable", lambda *_: None)
    monkeypatch.chdir(ROOT)
    stages = plan(FIGURE6, 0, 2)
    assert [stage.name for stage in stages] == [
        "corpus", "clean", "gpt2-data", *SIZES, "wikitext103", "lambada", "report",
    ]  # fmt: skip
    parsed = [parse_command(command) for stage in stages for command in stage.commands]
    runs = [each for each in parsed if isinstance(each, PretrainGPT2Config)]
    assert [(run.model.num_layers, run.model.hidden_size) for run in runs] == [
        (2, 64), (4, 128), (6, 256),
    ]  # fmt: skip


def test_the_sizes_are_trained_alike_but_for_their_size() -> None:
    trainings = [stage for stage in plan(FIGURE6, 0, 2) if stage.name in SIZES]
    one, *others = (program_of(stage.commands[0])[1] for stage in trainings)
    for other in others:
        differing = {flag for flag, a, b in zip(one, one[1:], other[1:], strict=False) if a != b}
        assert differing == {"--num-layers", "--hidden-size", "--save", "--metrics-file"}


def test_each_evaluation_is_of_every_size_by_one_convention() -> None:
    for stage in plan(FIGURE6, 0, 2):
        if stage.name in ("wikitext103", "lambada"):
            flags = [list(program_of(command)[1]) for command in stage.commands]
            places = [(each.pop(each.index("--load") + 1), each.pop()) for each in flags]
            assert flags == flags[:1] * len(SIZES)
            folder = "runs/figure6/runs"
            assert places == [
                (f"{folder}/{name}/checkpoints", f"{folder}/{name}/{stage.name}.json")
                for name in SIZES
            ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("2x64",), "--sizes 2x64: two or more"),
        (("2x64", "2x64"), "each once"),
        (("4x128", "2x64"), "the smaller before the larger"),
        (("2x64", "4-128"), "--sizes 4-128: layers and hidden size"),
        (("2x64", "0x128"), "--sizes 0x128"),
        (("2x64", "4x130"), "--hidden-size 130"),
    ],
)
def test_sizes_that_are_no_row_are_refused(sizes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(replace(FIGURE6, sizes=sizes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"overlapping_eval": 0}, "--overlapping-eval 0"), ({"vocab_size": 100}, "--vocab-size 100")],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = write_folder(tmp_path / "data")
    with pytest.raises(ValueError, match=message):
        figure6(data, output=tmp_path / "out", **changes)
    (data / LAMBADA).unlink()
    with pytest.raises(OSError, match="lacks .*lambada"):
        figure6(data, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
