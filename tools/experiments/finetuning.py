"""The benefit of pretraining, on a small machine.

    python tools/experiments/finetuning.py --pretrained runs/miniature/bert/checkpoints
    python tools/experiments/finetuning.py --settings "--task QQP --epochs 3" \\
        --train-data train.tsv --valid-data dev.tsv

A BERT is fine-tuned from its pretrained weights and, with the same commands, from the random
weights at the start of pretraining. Figures are those of the last epoch: median, lowest and highest
over the seeds, and the share of the most frequent class. Finished runs are reused.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import shlex
from dataclasses import dataclass
from pathlib import Path

from tools.experiments import results, runner, stages
from tools.experiments.runner import ROOT, Machine, Stage, Word
from tools.report.corpus import read_json
from tools.report.sections import Page, Section, Table

PROGRAM = "tools/experiments/finetuning.py"
SETTINGS = """--task MNLI --seeds 3 --epochs 5 --lr 3e-4 --seq-length 64 --micro-batch-size 32
--global-batch-size 32 --hidden-dropout 0.1 --attention-dropout 0"""
SEED = 1234  # the default of pretraining
KINDS = ("bert",)


@dataclass(frozen=True, kw_only=True)
class Settings(runner.Settings):
    pretrained: Path = ROOT / "runs" / "miniature" / "bert" / "checkpoints"
    """Folder of a BERT's checkpoints; by default, those of scripts/paper/miniature.sh."""
    train_data: Path = runner.DATA / "glue" / "MNLI" / "train.json"
    """File of tasks/main.py to train on."""
    valid_data: Path = runner.DATA / "glue" / "MNLI" / "dev.json"
    """File of tasks/main.py to evaluate on."""
    settings: str = " ".join(SETTINGS.split())
    """Further flags of tasks/main.py, as one word."""
    output: Path = ROOT / "runs" / "finetuning"


def run(settings: Settings) -> None:
    runner.check_inputs(train_data=settings.train_data, valid_data=settings.valid_data)
    stages.check_checkpoint("pretrained", settings.pretrained, KINDS)
    runner.run_experiment(settings, PROGRAM, list_stages, report, "finetuning")


def list_stages(settings: Settings, machine: Machine) -> list[Stage]:
    """The random weights, and a fine-tuning from each."""
    folder = settings.output / "initial"
    module = "tools.experiments.finetuning"
    make = runner.call(module, "write_initial_weights", settings.pretrained, folder)
    model = stages.checkpoint_files(settings.pretrained)
    found = [Stage(name="initial weights", commands=[make], inputs=model, outputs=[folder])]
    data: list[Word] = ["--train-data", settings.train_data, "--valid-data", settings.valid_data]
    inputs = [settings.train_data, settings.valid_data, *model]
    for name, weights in {"pretrained": settings.pretrained, "random": folder}.items():
        record = settings.output / f"{name}.json"
        words = [*shlex.split(settings.settings), *data, "--load", weights, "--output", record]
        command = runner.python("tasks/main.py", *words, threads=machine.cores, is_quiet=True)
        found.append(Stage(name=name, commands=[command], inputs=inputs, outputs=[record]))
    return found


def write_initial_weights(pretrained: str, output: str) -> None:
    """Write a checkpoint of the model and tokenizer of another one, with random weights."""
    from megatron.config.checkpoint import TrainedConfig
    from megatron.config.parallel import ParallelConfig
    from megatron.models.registry import config_of
    from megatron.train.trained import open_trained
    from tools.convert.writing import write_checkpoint

    trained = TrainedConfig(load=pretrained)
    _, tokenizer, facts = open_trained(trained, ParallelConfig(), 1, KINDS, "--pretrained")
    config, size = config_of(facts), facts["vocab_size"]
    weights = stages.initial_weights(config, size, SEED)
    source = "initial weights"
    write_checkpoint(Path(output), config, weights, size, tokenizer, source, lambda _: None)


def report(settings: Settings, _: object = None) -> str:
    """Write finetuning.json, .md and .html; returns the text."""
    facts, rows, accuracies = {}, [], []
    for name in ("pretrained", "random"):
        facts[name] = read_json(settings.output / f"{name}.json")
        last = facts[name]["last_epoch"]
        found = [last["accuracy"][each] for each in ("median", "min", "max")]
        found.append(last["majority_accuracy"]["median"])
        rows.append([f"{name} weights", *(f"{each:.4f}" for each in found)])
        accuracies.append(f"{found[0]:.4f} ({name} weights)")
    head = ("", "accuracy", "lowest", "highest", "most frequent class")
    title = "What pretraining is worth, on a small machine"
    section = Section("Last epoch", [Table(head, rows)])
    page = Page(title, f"Accuracy {', '.join(accuracies)}.", [section])
    return results.write_measured(settings.output, "finetuning", page, facts, PROGRAM)


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
