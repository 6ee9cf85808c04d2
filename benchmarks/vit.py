"""ViT compared with transformers' ViTForImageClassification, on one rank.

Images of 32 x 32 pixels in patches of 4, 10 classes, without dropout: hidden size 128 and 4 layers,
as in the preset vit_small_cpu, and 512 and 6, as in vit_tiny_cifar10. Both start from the same
weights, read the same random images, normalise their pixels and update by AdamW with clipping; a
turn is one update, and losses are compared.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import llama, peers, steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.report import Results
from megatron.config.pretrain import PretrainViTConfig
from megatron.data.images import ImageBatch
from megatron.train.executor import to_device
from tools.convert.vit import VITS
from tools.convert.weights import resolve, to_theirs
from tools.layouts.job import open_samples

OURS, TRANSFORMERS = "this project", "transformers"
SIZES = {
    "small": "--num-layers 4 --hidden-size 128 --num-attention-heads 4",
    "tiny": "--num-layers 6 --hidden-size 512 --num-attention-heads 8",
}
MODE = (
    "--image-size 32 --patch-size 4 --train-iters 3000 --micro-batch-size 64 --mock-data --no-bf16"
    " --no-compile"
)


class Training(peers.Training):
    def __call__(self) -> Figures:
        batch = steps.batch_of(self.config, self.number)
        assert isinstance(batch, ImageBatch)
        self.number += 1
        images, labels = to_device(self.rank.device, batch.images, batch.labels)
        self.adamw.zero_grad(set_to_none=True)
        loss = self.loss(images, labels)
        loss.backward()
        self.update()
        return {"loss": loss.detach(), "tokens": batch.num_tokens}


def transformers(rank: Rank, flags: Sequence[str]) -> Turn:
    from transformers import ViTConfig, ViTForImageClassification

    config = steps.read(flags, 1, PretrainViTConfig)
    (family,), classes = VITS, open_samples(config)[1]
    options: dict[str, Any] = family.options_of(config.model) | {"id2label": None}
    theirs = ViTConfig(**options, num_labels=classes)
    weights = peers.initial_weights(config.model, classes)
    converted = to_theirs(family, resolve(family, config.model, classes), weights)
    # Names of their modules differ from those of their files, which only from_pretrained knows.
    model = ViTForImageClassification.from_pretrained(None, config=theirs, state_dict=converted)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).to(torch.float32).div(255).sub(0.5).div(0.5)
        return F.cross_entropy(model(pixels).logits, labels)

    return Training(rank, config, model.to(rank.device).train(), loss)


def contenders(
    flags: Flags,
    models: tuple[Literal["small", "tiny"], ...] = ("small", "tiny"),
    program_flags: str = "",
) -> Iterator[Contender]:
    """Compare training steps of ViT.

    Args:
        models: sizes to compare, one group each.
        program_flags: flags of pretrain.py --model vit: --program-flags="--num-layers 2".
    """
    for name in models:
        own = shlex.split(f"{SIZES[name]} {MODE} {program_flags}")
        for contender, run, more in (
            (OURS, steps.ours, {"settings": PretrainViTConfig}),
            (TRANSFORMERS, transformers, {}),
        ):
            yield Contender(
                contender,
                run,
                {"flags": own, **more},
                group=name,
                needs=("transformers",),
                memory_of_turns=True,
                same={"loss": llama.TOLERANCES["fp32"]},
            )


def result(found: Results) -> str:
    return f"Time of a step over this project's: {found.ratios(llama.RATIO, {OURS})}."


COLUMNS = tuple(
    Column("images/s", "tokens", "{:,.0f}", per="wall") if each.title == "tokens/s" else each
    for each in llama.COLUMNS
)
QUESTION = Question(
    contenders,
    COLUMNS,
    result,
    turns=3,
    warm_up=2,
    drawn=[llama.RATIO],
    small="--models small",
    small_flags="--num-layers 1 --micro-batch-size 4",
)

if __name__ == "__main__":
    QUESTION.run()
