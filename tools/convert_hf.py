"""Converts models in HuggingFace's format to checkpoints of this project, and back.

    python tools/convert_hf.py import --from gpt2 --output checkpoints/gpt2
    python tools/convert_hf.py export --from checkpoints/gpt2 --output exported

Supports GPT-2, Llama, ViT, BERT (post-LN and pre-LN), and BERT with the head of a task. Any model
that was trained with --model huggingface can be exported, and needs no import. Values are copied
bit for bit. At the end both programs compute the logits of some prompts; if these differ, nothing
is written.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import tyro

from megatron.checkpoint.resume import find_start, newest_readable
from megatron.config.checkpoint import CheckpointConfig, TrainedConfig
from megatron.config.model import ViTConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse_call, whole_program
from megatron.data.tokenizer import Tokenizer
from megatron.errors import UsageError
from megatron.models.registry import config_of, is_unmodified
from megatron.train.trained import open_trained
from tools.convert import vocabulary
from tools.convert.folder import FAMILIES, family_of, find_folder, read_description, split_folder
from tools.convert.staging import refuse_existing, staged

Source = Annotated[str, tyro.conf.arg(name="from")]
Vocabulary = Annotated[str | None, tyro.conf.arg(aliases=["--tokenizer-model"])]


def import_model(
    source: Source,
    output: Path,
    vocab_file: Vocabulary = None,
    merge_file: str | None = None,
    tokenizer_type: str | None = None,
    no_tokenizer: bool = False,
) -> None:
    """Make a checkpoint from a model in HuggingFace's format, for --load of programs here.

    Args:
        source: folder with config.json, safetensors and tokenizer, or the name of one on the hub.
        output: directory of the checkpoint; must not exist.
        vocab_file: vocabulary (vocab.json, vocab.txt, or tokenizer.json or its folder), for a
            folder without a tokenizer.
        merge_file: merges (merges.txt) of a GPT-2, for a folder without a tokenizer.
        tokenizer_type: kind of the tokenizer. By default GPT2BPETokenizer for a GPT-2,
            HuggingFaceTokenizer for a Llama (each takes the other, too), and for a BERT the casing
            that the folder's files state.
        no_tokenizer: import only the weights. Programs that read text then need the files of the
            tokenizer, and can check only its size.
    """
    refuse_existing(output)
    folder = find_folder(source)
    model = read_description(folder)
    kinds = model.family.tokenizers
    tokenizer: Tokenizer | vocabulary.NoTokenizer = vocabulary.NoTokenizer(kind="")
    if kinds:
        tokenizer = vocabulary.find_tokenizer(
            folder,
            kinds,
            model.vocab_size,
            vocab_file=vocab_file,
            merge_file=merge_file,
            tokenizer_type=tokenizer_type,
            no_tokenizer=no_tokenizer,
        )
    else:
        refuse_vocabulary(vocab_file, merge_file, tokenizer_type, "a model of images has none")

    from tools.convert.compare import compare_logits
    from tools.convert.weights import read_weights
    from tools.convert.writing import print_import, write_checkpoint

    weights = read_weights(folder, model.family, model.config, model.vocab_size)
    has_tokenizer = not isinstance(tokenizer, vocabulary.NoTokenizer)
    if has_tokenizer:
        vocabulary.compare_ids(tokenizer, folder, kinds)
    kept, others = split_folder(folder, has_tokenizer)
    path = write_checkpoint(
        output,
        model.config,
        weights,
        model.vocab_size,
        tokenizer,
        f"HuggingFace {source}",
        lambda path: print(compare_logits(path, folder, model.family)),
        kept,
    )
    if others:
        print(f"not kept, and missing in an export: {' '.join(others)}")
    print_import(source, path, model.config)


def export_model(
    source: Source,
    output: Path,
    vocab_file: Vocabulary = None,
    merge_file: str | None = None,
    tokenizer_type: str | None = None,
) -> None:
    """Make a folder from a checkpoint that classes of transformers load: AutoTokenizer, and for a
    GPT-2 or a Llama AutoModelForCausalLM, for a BERT AutoModelForPreTraining, for a ViT
    AutoModelForImageClassification. For an unmodified
    model it has the names and files of the folder that the model was trained from.

    Args:
        source: directory of checkpoints (the newest is used), or one of them.
        output: folder to make; must not exist.
        vocab_file: vocabulary (vocab.json, vocab.txt, or tokenizer.json or its folder), for a
            checkpoint without a tokenizer.
        merge_file: merges (merges.txt) of a GPT-2, for a checkpoint without a tokenizer.
        tokenizer_type: kind of the tokenizer, if it differs from the one the checkpoint names.
    """
    refuse_existing(output)
    start = find_start(CheckpointConfig(load=source), "--from")
    folders, tokenizer = start.folders, None
    kind = newest_readable(folders, "--from")[0].manifest["kind"]
    if is_unmodified(kind):
        reason = "the checkpoint has the files beside the model"
        refuse_vocabulary(vocab_file, merge_file, tokenizer_type, reason)
    elif kind == ViTConfig.kind:
        refuse_vocabulary(vocab_file, merge_file, tokenizer_type, "a model of images has none")
    else:
        trained = TrainedConfig(
            load=source, tokenizer_type=tokenizer_type, vocab_file=vocab_file, merge_file=merge_file
        )
        kinds = sorted({family.config.kind for family in FAMILIES})
        folders, tokenizer, _ = open_trained(trained, ParallelConfig(), 1, kinds, "--from")

    from megatron.checkpoint.load import newest_whole
    from megatron.parallel.mesh import serial_mesh
    from tools.convert.compare import compare_logits
    from tools.convert.exporting import write_model, write_unmodified

    checkpoint, passed_over = newest_whole(folders, serial_mesh(), "--from")
    for reason in passed_over:
        warnings.warn(f"passed over: {reason}", stacklevel=2)
    family = None if is_unmodified(kind) else family_of(config_of(checkpoint.manifest))
    with staged(output) as staging:
        if family is None:
            write_unmodified(staging, checkpoint)
        else:
            write_model(staging, checkpoint, family, tokenizer)
            if tokenizer is not None:
                vocabulary.compare_ids(tokenizer, staging, family.tokenizers)
        print(compare_logits(checkpoint.path, staging, family))
    print(f"exported {checkpoint.path} as {output}")


def refuse_vocabulary(
    vocab_file: str | None, merge_file: str | None, tokenizer_type: str | None, reason: str
) -> None:
    flags = {"--vocab-file": vocab_file, "--merge-file": merge_file}
    for name, value in (flags | {"--tokenizer-type": tokenizer_type}).items():
        if value is not None:
            raise UsageError(name, value, f"left out: {reason}")


if __name__ == "__main__":
    with whole_program(os.environ):
        commands = {"import": import_model, "export": export_model}
        parse_call(commands, sys.argv[1:], os.environ)()
