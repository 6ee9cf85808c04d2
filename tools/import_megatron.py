"""Reads a GPT-2 that Megatron-LM of 2019 or 2020 saved.

    python tools/import_megatron.py --from DIR --output checkpoints --vocab-file vocab.json \\
        --merge-file merges.txt
    python tools/import_megatron.py --from iter_0010000 --output checkpoints \\
        --vocab-file vocab.json --merge-file merges.txt --num-attention-heads 16

The files are pickles, and are read as data: nothing that they name is imported or run. The
checkpoint has the weights, in their stored dtype, and the tokenizer. The other program is not
available to compare logits with. Before the checkpoint gets its name, this program checks that it
reads back bit for bit and computes finite logits.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from megatron.config.checks import positive
from megatron.config.parse import parse, whole_program
from megatron.data.tokenizer import build_tokenizer
from tools.convert.staging import refuse_existing

# Flags of numbers that may be stored with the weights; Settings has None for those not given.
NUMBERS = ("num_attention_heads", "layernorm_epsilon", "make_vocab_size_divisible_by")


@dataclass(frozen=True, kw_only=True)
class Settings:
    source: Annotated[str, tyro.conf.arg(name="from")]
    """Directory of Megatron-LM's checkpoints, folder of one iteration, or a model_optim_rng.pt."""

    output: str
    """Directory that the checkpoint is written to; must not exist."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """Kind of tokenizer that encoded the training data."""

    vocab_file: str | None = field(default=None, metadata={"alias": "tokenizer_model"})
    """The tokenizer's vocabulary (vocab.json, or tokenizer.json or its folder). Also spelt
    --tokenizer-model."""

    merge_file: str | None = None
    """The byte-pair encoding's merges (merges.txt)."""

    num_attention_heads: int | None = None
    """Attention heads per layer; needed if no args are stored with the weights."""

    layernorm_epsilon: float | None = None
    """Added to the variance in LayerNorm; 1e-5 if neither the flag nor stored args give it."""

    make_vocab_size_divisible_by: int | None = None
    """The vocabulary was padded to a multiple of this times the ranks; 128 if neither the flag nor
    stored args give it."""

    def __post_init__(self) -> None:
        positive(self, *NUMBERS)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with whole_program(environ):
        settings = parse(Settings, arguments, environ)
        refuse_existing(Path(settings.output))

        from tools.convert.legacy.megatron_2019 import (
            ORDERS,
            config_of,
            find_files,
            read_rank,
            read_weights,
        )
        from tools.convert.writing import check_weights, print_import, write_checkpoint

        files = find_files(Path(settings.source))
        tokenizer = build_tokenizer(
            settings.tokenizer_type, settings.vocab_file, settings.merge_file
        )
        ranks = [read_rank(file) for file in files]
        config = config_of(ranks, {name: getattr(settings, name) for name in NUMBERS})
        weights = read_weights(ranks, config, tokenizer.vocab_size)
        path = write_checkpoint(
            Path(settings.output),
            config,
            weights,
            tokenizer.vocab_size,
            tokenizer,
            f"Megatron-LM, {files[0]} of {len(files)}",
            lambda folder: check_weights(folder, weights, str(files[0])),
        )
        version = ranks[0].version
        print(
            f"{len(ranks)} model-parallel rank{'s' if len(ranks) > 1 else ''}, checkpoint_version "
            f"{version:g}, rows of Q, K and V in the order {ORDERS[min(int(version), 2)]}"
        )
        print_import(files[0], path, config)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
