"""Train GPT-2 at each size, draw validation perplexities, print table 3: figure 6 in miniature."""

import os
from pathlib import Path

from megatron.config.parse import find_preset
from tools.command import ROOT
from tools.paper.data import FILES, check_files
from tools.paper.figure6.plan import Settings, check_settings, plan
from tools.paper.program import carry_out, check_counts
from tools.processes import count_gpus
from tools.stages import run_program
from tools.train_tokenizer import check_vocab_size

PRESET = ROOT / "scripts" / "presets" / "figure6.toml"
OWNER = "scripts/paper/figure6.sh"


def figure6(
    data: Path,
    output: Path = ROOT / "runs" / "figure6",
    sizes: tuple[str, ...] = ("2x64", "4x128", "6x256"),
    preset: Path = PRESET,
    vocab_size: int = 8192,
    overlapping_eval: int = 64,
    fresh: bool = False,
    plan_only: bool = False,
) -> None:
    """GPT-2 at growing size on the same tokens in the same order; finished stages are reused.

    Args:
        data: a folder laid out as MEGATRON_TEST_DATA.
        output: the folder for all output.
        sizes: transformer layers and hidden size of each model, the smaller before the larger.
        preset: settings of model and training that all sizes share (TOML).
        vocab_size: vocabulary size of the tokenizer that is trained.
        overlapping_eval: stride of WikiText103's window; the paper's is 32.
        fresh: start over instead of reusing finished stages.
        plan_only: print what would be run, and run nothing.
    """
    check_files(data, FILES)
    check_counts(overlapping_eval=overlapping_eval)
    check_vocab_size(vocab_size)
    settings = Settings(
        data=data.absolute(),
        output=output.absolute(),
        preset=find_preset(str(preset)).absolute(),
        sizes=sizes,
        vocab_size=vocab_size,
        overlapping_eval=overlapping_eval,
    )
    check_settings(settings)
    stages = plan(settings, count_gpus(), len(os.sched_getaffinity(0)))
    carry_out(
        stages,
        settings.output,
        OWNER,
        page="figure6.md",
        to_open="figure6.png",
        fresh=fresh,
        plan_only=plan_only,
    )


if __name__ == "__main__":
    run_program(figure6, OWNER)
