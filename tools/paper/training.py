"""Stages that make a data set of text and train a model on it, and table 3's evaluations."""

from collections.abc import Sequence
from pathlib import Path

from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from tools.command import Command, on_all, python
from tools.paper.corpus import evaluation_files
from tools.processes import Processes
from tools.stages import Stage

TASKS = {"gpt2": ("pretrain_gpt2.py", PretrainGPT2Config, "train_text_document"),
         "bert": ("pretrain_bert.py", PretrainBertConfig, "train_text_sentence")}  # fmt: skip
ZERO_SHOT = ("wikitext103", "lambada")
Flags = list[str | Path]
TOKENIZERS = {"gpt2": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"}


def data_prefix(output: Path, model: str) -> Path:
    return output / model / "data" / TASKS[model][2]


def data_stage(output: Path, text: Path, model: str, vocab_size: int, cores: int) -> Stage:
    """Trains a vocabulary on the text, and encodes the text with it."""
    folder = output / model
    vocabulary = folder / "vocabulary"
    kind = ["--tokenizer-type", TOKENIZERS[model]]
    train = python("tools/train_tokenizer.py", "--input", text, *kind,
                   "--vocab-size", str(vocab_size), "--output-dir", vocabulary)  # fmt: skip
    own: dict[str, list[str | Path]] = {
        "gpt2": ["--vocab-file", vocabulary / "vocab.json",
                 "--merge-file", vocabulary / "merges.txt"],
        "bert": ["--vocab-file", vocabulary / "vocab.txt", "--split-sentences"],
    }  # fmt: skip
    encode = python("tools/preprocess_data.py", "--input", text,
                    "--output-prefix", folder / "data" / "train", *kind, *own[model])  # fmt: skip
    return Stage(
        name=f"{model}-data",
        commands=(train, on_all(encode, cores)),
        outputs=(vocabulary, folder / "data"),
    )


def under_torchrun(processes: Processes, *arguments: str | Path) -> Command:
    return python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes.world),
        *arguments, OMP_NUM_THREADS=str(processes.threads),
    )  # fmt: skip


def pretrain_stage(
    name: str,
    model: str,
    flags: Sequence[str | Path],
    preset: Path,
    data: Path,
    folder: Path,
    processes: Processes,
) -> Stage:
    """One training.

    flags: those of this training, the preset's included. data: prefix of the data set. folder: for
    checkpoints, metrics.jsonl and run.json.
    """
    outputs = folder / "checkpoints", folder / "metrics.jsonl", folder / "run.json"
    pretrain = under_torchrun(
        processes,
        TASKS[model][0], *flags, "--micro-batch-size", str(processes.micro_batch_size),
        "--data-path", data, "--save", outputs[0], "--metrics-file", outputs[1],
    )  # fmt: skip
    return Stage(name=name, commands=(pretrain,), inputs=(preset,), outputs=outputs)


def zero_shot_flags(data: Path, overlapping_eval: int) -> dict[str, Flags]:
    """Flags of both evaluations, by name. overlapping_eval: the stride of WikiText103's window."""
    files = evaluation_files(data)
    stride = ["--overlapping-eval", str(overlapping_eval)]
    return {
        "wikitext103": ["--valid-data", files["wikitext103"], *stride, "--compare-paper"],
        "lambada": ["--valid-data", files["lambada"], "--compare-paper"],
    }


def evaluate(task: str, checkpoints: Path, flags: Flags, result: Path, cores: int) -> Command:
    """result: the record that it writes (JSON)."""
    return python(
        "tasks/main.py", "--task", task.upper(), "--load", checkpoints, *flags,
        "--output", result, OMP_NUM_THREADS=str(cores),
    )  # fmt: skip
