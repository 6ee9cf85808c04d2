"""The last step of a conversion: both programs compute the logits of the same prompts.

In fp64, where only the order of additions tells equal models apart: by 1e-15 of the largest logit
in a small one, by 2e-11 in one of 12 layers with weights so wild that attention sees one token. A
GeLU in its other form, an epsilon off by a tenth or Q in the place of K move the logits by 5e-6 and
more. The tolerance lies between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.config.checkpoints import read_manifest
from megatron.data.encoders import PROBES
from megatron.data.tokenizer import END_OF_DOCUMENT, Tokenizer
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, whole_logits
from tools.convert.table import Family

TOLERANCE = 1e-9  # of the largest logit
LENGTHS = (1, 2, 17, 1024)  # of the prompts; the last bounds the time


@dataclass(frozen=True)
class Agreement:
    """The largest difference of two logits, the largest logit, and the lengths of the prompts."""

    difference: float
    largest: float
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"the logits differ by {self.difference:.2g} where they reach {self.largest:.3g} "
            f"(fp64; prompts of {lengths} tokens; {TOLERANCE:.0e} of the largest is allowed)"
        )


def compare_logits(checkpoint: Path, folder: Path, family: Family) -> Agreement:
    """The logits of the model at `checkpoint` and of that which transformers loads from `folder`.

    One after the other: the memory holds one model, and twice the logits. Raises ValueError with
    the figures where they differ by more than TOLERANCE of the largest.
    """
    manifest = read_manifest(checkpoint)
    positions = manifest["config"]["model"]["max_position_embeddings"]
    prompts = make_prompts(manifest["vocab_size"], positions)
    theirs = _their_logits(folder, family, prompts)
    ours = _our_logits(checkpoint, prompts)
    pairs = list(zip(ours, theirs, strict=True))
    found = Agreement(
        difference=_largest([one - other for one, other in pairs]),
        largest=_largest(theirs),
        lengths=tuple(len(prompt) for prompt in prompts),
    )
    if not found.difference <= TOLERANCE * found.largest:  # so that NaN is none, either
        raise ValueError(f"{checkpoint} and {folder} are not the same model: {found}")
    return found


def _largest(tensors: Sequence[Tensor]) -> float:
    """The largest magnitude; NaN where any of the tensors has one."""
    return float(torch.stack([each.abs().max() for each in tensors]).max())


def make_prompts(vocab_size: int, positions: int) -> list[Tensor]:
    """Token ids, int64 [s], from the first to the last of the vocabulary in a fixed disorder."""
    lengths = sorted({min(length, positions) for length in LENGTHS})
    ids = torch.linspace(0, vocab_size - 1, sum(lengths), dtype=torch.float64).long()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1234))
    return list(ids[order].split(lengths))


@torch.no_grad()
def _their_logits(folder: Path, family: Family, prompts: Sequence[Tensor]) -> list[Tensor]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, family.auto_class).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", local_files_only=True
    )
    return [model.eval()(prompt[None]).logits[0] for prompt in prompts]


def _our_logits(checkpoint: Path, prompts: Sequence[Tensor]) -> list[Tensor]:
    mesh = serial_mesh()
    model = load_model(checkpoint, mesh, torch.float64)
    return [whole_logits(model, mesh, prompt[None])[0] for prompt in prompts]


def compare_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ValueError where the folder's tokenizer gives other ids than ours for some text.

    Texts that spell the end mark are left out: there they are the mark, and here characters.
    """
    import transformers

    other = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in (each for each in PROBES if END_OF_DOCUMENT not in each):
        if other.encode(text, verbose=False) != tokenizer.encode(text):
            raise ValueError(f"{folder}: its tokenizer gives other ids than ours for {text[:40]!r}")
