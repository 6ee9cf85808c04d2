"""Train both orders at every depth, draw the losses and write them: figure 7 in miniature."""

import os
from pathlib import Path

from megatron.config.parse import find_preset
from tools.command import ROOT
from tools.paper.data import RACE_TRAIN, check_files
from tools.paper.figure7.plan import Settings, check_settings, plan
from tools.paper.program import carry_out
from tools.stages import run_program

PRESET = ROOT / "scripts" / "presets" / "figure7_bert.toml"
OWNER = "scripts/paper/figure7.sh"


def figure7(
    data: Path | None = None,
    output: Path = ROOT / "runs" / "figure7",
    depths: tuple[int, ...] = (6, 12, 24, 48),
    rates: tuple[float, ...] = (1e-3,),
    preset: Path = PRESET,
    vocab_size: int = 2048,
    fresh: bool = False,
    plan_only: bool = False,
) -> None:
    """BERT with pre-LN and with post-LN at growing depth; finished stages are reused.

    Args:
        data: a folder with the articles of RACE, laid out as MEGATRON_TEST_DATA; if left out, the
            English text of this Python installation is used.
        output: the folder for all output.
        depths: transformer layers.
        rates: peak learning rates; each is trained at every depth.
        preset: settings of model and training that all runs share (TOML).
        vocab_size: size of the WordPiece vocabulary that is trained.
        fresh: start over instead of reusing finished stages.
        plan_only: print what would be run, and run nothing.
    """
    if data is not None:
        check_files(data, (RACE_TRAIN,))
    settings = Settings(
        data=data and data.absolute(),
        output=output.absolute(),
        preset=find_preset(str(preset)).absolute(),
        depths=depths,
        rates=rates,
        vocab_size=vocab_size,
    )
    check_settings(settings)
    stages = plan(settings, len(os.sched_getaffinity(0)))
    carry_out(
        stages,
        settings.output,
        OWNER,
        page="figure7.md",
        to_open="figure7.png",
        fresh=fresh,
        plan_only=plan_only,
    )


if __name__ == "__main__":
    run_program(figure7, OWNER)
