"""Corpus, GPT-2, BERT, WikiText103, LAMBADA, RACE, and one report: the paper in miniature."""

import os
from pathlib import Path

from megatron.config.parse import find_preset
from tools.command import ROOT
from tools.paper.data import FILES, check_files
from tools.paper.miniature.plan import BUDGET, Settings, choose_processes, plan
from tools.paper.program import carry_out, check_counts
from tools.processes import count_gpus
from tools.stages import run_program
from tools.train_tokenizer import check_vocab_size

OWNER = "scripts/paper/miniature.sh"
PRESETS = ROOT / "scripts" / "presets"


def miniature(
    data: Path,
    output: Path = ROOT / "runs" / "miniature",
    gpt2_preset: Path = PRESETS / "miniature_gpt2.toml",
    bert_preset: Path = PRESETS / "miniature_bert.toml",
    tensor_parallel: int = 2,
    vocab_size: int = 8192,
    overlapping_eval: int = 32,
    race_train: int = 1200,
    race_dev: int = 400,
    fresh: bool = False,
    plan_only: bool = False,
) -> None:
    """The paper in miniature, from raw text to its tables; finished stages are reused.

    Args:
        data: a folder laid out as MEGATRON_TEST_DATA.
        output: the folder for all output.
        gpt2_preset: settings of GPT-2 and its training (TOML).
        bert_preset: settings of BERT and its training (TOML).
        tensor_parallel: processes that share each model.
        vocab_size: vocabulary size of each of the two tokenizers that are trained.
        overlapping_eval: stride of WikiText103's window, the paper's by default.
        race_train: passages of RACE to fine-tune on.
        race_dev: passages of RACE to evaluate on.
        fresh: start over instead of reusing finished stages.
        plan_only: print what would be run, with the planned minutes, and run nothing.
    """
    check_files(data, FILES)
    check_counts(race_train=race_train, race_dev=race_dev, overlapping_eval=overlapping_eval)
    check_vocab_size(vocab_size)
    settings = Settings(
        data=data.absolute(),
        output=output.absolute(),
        gpt2_preset=find_preset(str(gpt2_preset)).absolute(),
        bert_preset=find_preset(str(bert_preset)).absolute(),
        tensor_parallel=tensor_parallel,
        vocab_size=vocab_size,
        overlapping_eval=overlapping_eval,
        race_train=race_train,
        race_dev=race_dev,
    )
    cores = len(os.sched_getaffinity(0))
    stages = plan(settings, choose_processes(settings, count_gpus(), cores), cores)
    carry_out(
        stages,
        settings.output,
        OWNER,
        page="report.md",
        to_open="report.html",
        fresh=fresh,
        plan_only=plan_only,
        minutes=BUDGET,
    )


if __name__ == "__main__":
    run_program(miniature, OWNER)
