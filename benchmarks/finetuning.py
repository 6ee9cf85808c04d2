"""What pretraining is worth: a task fine-tuned from a pretrained BERT and from random weights.

Both models have the same shape, vocabulary and settings; the second one's weights are those that a
pretraining begins with. tasks/main.py fine-tunes each over several seeds. Figures are those of the
last epoch: the median over the seeds, the lowest and the highest, beside the share of the most
frequent class.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from benchmarks.processes import ROOT
from benchmarks.program import DATA, found
from megatron.config.checkpoint import TrainedConfig
from megatron.config.model import BertConfig
from megatron.config.training import ParallelConfig
from megatron.models.registry import config_of
from megatron.train.trained import open_trained

MNLI = DATA / "glue" / "MNLI"
SETTINGS = """\
--task MNLI --seeds 3 --epochs 5 --lr 3e-4 --seq-length 64 --micro-batch-size 32 \
--global-batch-size 32 --hidden-dropout 0.1 --attention-dropout 0"""


def fine_tuned(rank: Rank, words: Sequence[str], load: str, output: str, *, anew: bool) -> Turn:
    """anew: not the checkpoint, but the same model with initial weights."""
    record = Path(output, "random.json" if anew else "pretrained.json")
    if anew and not record.with_name("twin").exists():
        from benchmarks.peers import initial_weights
        from tools.convert.writing import write_checkpoint

        trained = TrainedConfig(load=load)
        _, tokenizer, manifest = open_trained(trained, ParallelConfig(), 1, (BertConfig.kind,))
        config, size = config_of(manifest), manifest["vocab_size"]
        weights, twin = initial_weights(config, size), record.with_name("twin")
        write_checkpoint(twin, config, weights, size, tokenizer, "initial weights", lambda _: None)
    command = [sys.executable, "tasks/main.py", *words, "--output", str(record)]
    command += ["--load", str(record.with_name("twin")) if anew else load]
    command += ["--save", str(record.with_suffix(""))]

    def turn() -> Figures:
        subprocess.run(command, cwd=ROOT, env=rank.environ, check=True)
        last = json.loads(record.read_text())["last_epoch"].items()
        return {f"{name} {key}": x for name, spread in last for key, x in spread.items()}

    return turn


def main(
    flags: Flags,
    pretrained: Path = Path("runs/miniature/bert/checkpoints"),
    train_data: tuple[Path, ...] = (MNLI / "train.json",),
    valid_data: tuple[Path, ...] = (MNLI / "dev.json",),
    settings: str = SETTINGS,
    figure: str = "accuracy",
    output: Path = Path("runs/finetuning"),
) -> None:
    """Compare the two.

    Args:
        pretrained: checkpoints of pretrain_bert.py; by default of scripts/paper/miniature.sh.
        train_data: of the task; by default in the folder MEGATRON_TEST_DATA.
        valid_data: what is asked after the last epoch.
        settings: other flags of tasks/main.py, as one word.
        figure: of its record; of several files to ask one is called after its file.
        output: folder of the fine-tuned models; seeds that are finished there are not run again.
    """
    trained = TrainedConfig(load=str(pretrained))
    open_trained(trained, ParallelConfig(), 1, (BertConfig.kind,), "--pretrained")
    words = shlex.split(settings)
    for flag, files in {"--train-data": train_data, "--valid-data": valid_data}.items():
        words += [flag, *(found(flag, file) for file in files)]
    output.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {"words": words, "load": str(pretrained.resolve())}
    common["output"] = str(output.resolve())
    chance = figure.replace("accuracy", "majority_accuracy")
    keys = {figure: "median", "lowest": "min", "highest": "max"}
    ask(
        Question(
            title="What pretraining is worth, on a small machine",
            method=__doc__,
            contenders=[
                Contender(name=name, run=fine_tuned, arguments=common | {"anew": anew}, threads=2)
                for name, anew in {"pretrained": False, "random weights": True}.items()
            ],
            columns=[
                *(Column(title, f"{figure} {key}", "{:.4f}") for title, key in keys.items()),
                Column("most frequent class", f"{chance} median", "{:.4f}"),
            ],
            result=lambda results: "; ".join(
                f"{name}: {figure} {results.median('', name, figure):.4f}"
                for _, name in results.rows
            ),
            rounds=1,
            warm_up=0,
            together=False,
            packages=("torch", "tokenizers"),
            settings={"settings": settings},
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
