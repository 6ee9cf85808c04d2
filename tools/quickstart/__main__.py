"""Run the pipeline: corpus, clean, tokenizer, preprocess, pretrain, evaluate, sample, report."""

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron.config.parse import find_preset
from megatron.data.json_lines import find_shards, parse_line, read_shard
from megatron.errors import UsageError
from tools.command import ROOT
from tools.processes import count_gpus
from tools.quickstart.plan import Settings, choose_processes, plan
from tools.stages import own_folder, run_program, run_stages
from tools.train_tokenizer import check_vocab_size

LINES_TRIED = 1000


def quickstart(
    corpus: Annotated[Path | None, tyro.conf.Positional] = None,
    json_key: str = "text",
    tensor_parallel: Annotated[int, tyro.conf.arg(aliases=("--tensor-model-parallel-size",))] = 2,
    out: Path = ROOT / "runs" / "quickstart",
    fresh: bool = False,
    preset: Path = ROOT / "scripts" / "presets" / "quickstart.toml",
    train_iters: int | None = None,
    vocab_size: int = 2048,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
) -> None:
    """From raw text to an evaluated GPT-2; finished stages are reused.

    Args:
        corpus: a file of JSON lines, one document per line, or of text, which is one document
            (*.txt), or a folder of such files; without it, the English of this Python installation.
        json_key: the key of the text in a line.
        tensor_parallel: processes over which the model is cut.
        out: the folder for all output.
        fresh: start over instead of reusing finished stages.
        preset: settings of model and training (TOML).
        train_iters: steps to train for, instead of the preset's.
        vocab_size: vocabulary size of the tokenizer that is trained.
        vocab_file: GPT-2's vocab.json or one like it, instead of training a tokenizer.
        merge_file: the merges.txt that goes with --vocab-file.
    """
    if corpus is not None:
        check_corpus(corpus, json_key)
    check_vocab_size(vocab_size)
    check_vocabulary(vocab_file, merge_file)
    settings = Settings(
        corpus=absolute(corpus),
        json_key=json_key,
        out=out.absolute(),
        preset=find_preset(str(preset)).absolute(),
        train_iters=train_iters,
        tensor_parallel=tensor_parallel,
        vocab_size=vocab_size,
        vocab_file=absolute(vocab_file),
        merge_file=absolute(merge_file),
    )
    cores = len(os.sched_getaffinity(0))
    processes = choose_processes(settings, count_gpus(), cores)
    stages = plan(settings, processes, cores)
    own_folder(settings.out, stages, fresh=fresh)
    run_stages(stages, settings.out, ROOT)
    warn_of_weak_model(json.loads((settings.out / "evaluation.json").read_bytes()))
    print(f"done: open {settings.out / 'report.html'} in a browser")


def absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def check_corpus(path: Path, key: str) -> None:
    """Raises ValueError unless the first lines of one of the files contain a document."""
    if not path.exists():
        raise ValueError(f"corpus {path}: no such file or folder")
    reason = "it is empty"
    for file in find_shards([path]):
        for line in islice(read_shard(file, key=key), LINES_TRIED):
            try:
                parse_line(line, key)
            except ValueError as error:
                if reason == "it is empty":
                    reason = f"{file}, byte {line.offset}: {error}"
            else:
                return
    raise ValueError(
        f"corpus {path} has no document in its first lines: {reason}; lines of "
        f'{{"{key}": "..."}}, or a *.txt, work, or another --json-key'
    )


def check_vocabulary(vocab_file: Path | None, merge_file: Path | None) -> None:
    if (vocab_file is None) != (merge_file is None):
        raise UsageError(
            "--vocab-file",
            vocab_file,
            f"given with --merge-file, now {merge_file}, or both left out",
        )
    for flag, file in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if file is not None and not file.is_file():
            raise UsageError(flag, file, "a file that is there")


def warn_of_weak_model(scores: dict[str, Any]) -> None:
    ours, bigram = scores["token_perplexity"], scores["bigram_perplexity"]
    if ours >= bigram:
        print(
            f"warning: the trained model does not beat the bigram model: perplexity {ours:.2f} "
            f"against {bigram:.2f}; more text or a --preset that trains longer would help",
            file=sys.stderr,
        )


if __name__ == "__main__":
    run_program(quickstart, "scripts/quickstart.sh")
