"""The last step of a conversion: both programs compute the logits of the same prompts.

They compute in fp64, where equal models differ only by the order of additions: by 1e-15 of the
largest logit in a small model, by 2e-11 in one of 12 layers with weights so wild that attention
sees one token. The other form of GeLU, an epsilon off by a tenth or Q in place of K changes the
logits of a head by at least 7e-7 in a post-LN BERT and 5e-6 in a GPT-2. The tolerance lies between.
A constant added to all keys changes no logit, so an error in the keys' bias is not detected here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import verify
from megatron.config.model import HALF, ViTConfig
from megatron.data.bert import BertBatch
from megatron.data.images import CHANNELS, ImageBatch
from megatron.models.registry import KINDS, config_of
from megatron.parallel.collectives import gather_from
from megatron.parallel.compare import SEEN, KeepFP64
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.train.evaluate import load_model, whole_logits
from tools.convert.table import Family

TOLERANCE = 1e-9  # of the largest logit of a head
LENGTHS = (1, 2, 17, 1024)  # of the prompts; the last bounds the time
PICTURES = 3


Logits = dict[str, Tensor]  # by the head's name in words


@dataclass(frozen=True)
class Prompt:
    """b sequences of s tokens. tokens, token_types: int64 [b, s]. is_real: bool [b, s], False for
    padding."""

    tokens: Tensor
    token_types: Tensor
    is_real: Tensor

    def batch(self) -> BertBatch:
        return BertBatch(tokens=self.tokens, token_types=self.token_types, is_real=self.is_real)

    def for_transformers(self) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens,
            "token_type_ids": self.token_types,
            "attention_mask": self.is_real.long(),
        }


@dataclass(frozen=True)
class Pictures:
    """Random images. pixels: uint8 [b, size, size, 3]. config: of our model."""

    pixels: Tensor
    config: ViTConfig

    def for_transformers(self) -> Tensor:
        """fp64 [b, 3, size, size]"""
        mean, std = (
            torch.tensor(each, dtype=torch.float64)
            for each in (self.config.image_mean, self.config.image_std)
        )
        return ((self.pixels.double() / 255 - mean) / std).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Outputs:
    """Functions to the logits of a prompt without its padding, from our model and from theirs.
    padded: whether it may have any."""

    ours: Callable[[Any, Mesh, Any], Logits]
    theirs: Callable[[Any, Any], Logits]
    padded: bool = True


def _our_tokens(model: Any, mesh: Mesh, prompt: Prompt) -> Logits:
    """The logits of an unmodified model, whose rotary frequencies become fp64, too."""
    with KeepFP64():
        return {"tokens": model.model.double()(input_ids=prompt.tokens, use_cache=False).logits}


def _our_pretraining(model: Any, mesh: Mesh, prompt: Prompt) -> Logits:
    masked, order = model(prompt.batch())
    masked = gather_from(masked, -1, mesh.tensor)[:, : model.vocab_size]
    return {"masked tokens": masked[prompt.is_real.flatten()], "the order of segments": order}


def _their_pretraining(model: Any, prompt: Prompt) -> Logits:
    found = model(**prompt.for_transformers())
    masked, order = found.prediction_logits, found.seq_relationship_logits
    return {"masked tokens": masked[prompt.is_real], "the order of segments": order}


def _our_scores(model: Any, mesh: Mesh, prompt: Prompt) -> Logits:
    return {"the task": model(prompt.batch()).flatten(1)}


def _their_options(model: Any, prompt: Prompt) -> Logits:
    """Reads each sequence as the only option of a question."""
    arguments = {name: each[:, None] for name, each in prompt.for_transformers().items()}
    return {"the task": model(**arguments).logits}


def _their_spans(model: Any, prompt: Prompt) -> Logits:
    found = model(**prompt.for_transformers())
    both = torch.stack([found.start_logits, found.end_logits], -1)
    return {"the task": both[prompt.is_real]}


def _our_images(model: Any, mesh: Mesh, prompt: Pictures) -> Logits:
    labels = torch.zeros(len(prompt.pixels), dtype=torch.int64)
    return {"the classes": model(ImageBatch(images=prompt.pixels, labels=labels))}


OUTPUTS: Mapping[str, Outputs] = {
    "AutoModelForImageClassification": Outputs(
        _our_images,
        lambda model, prompt: {"the classes": model(prompt.for_transformers()).logits},
    ),
    "AutoModelForCausalLM": Outputs(
        lambda model, mesh, prompt: {"next tokens": whole_logits(model, mesh, prompt.tokens)},
        lambda model, prompt: {"next tokens": model(prompt.tokens).logits},
        padded=False,
    ),
    "AutoModelForPreTraining": Outputs(_our_pretraining, _their_pretraining),
    "AutoModelForSequenceClassification": Outputs(
        _our_scores,
        lambda model, prompt: {"the task": model(**prompt.for_transformers()).logits},
    ),
    "AutoModelForMultipleChoice": Outputs(_our_scores, _their_options),
    "AutoModelForQuestionAnswering": Outputs(
        lambda model, mesh, prompt: {"the task": model(prompt.batch())[prompt.is_real]},
        _their_spans,
    ),
}
"""Keys are classes of transformers (Family.auto_class)."""
UNMODIFIED = Outputs(
    _our_tokens,
    lambda model, prompt: {"tokens": model(input_ids=prompt.tokens, use_cache=False).logits},
    padded=False,
)


@dataclass(frozen=True)
class Head:
    """A head's largest difference of ours and theirs, its largest logit, and the largest spread of
    one logit over tokens. Without spread no weight reaches a logit, and equality proves nothing."""

    name: str
    difference: float
    largest: float
    spread: float

    def __str__(self) -> str:
        return (
            f"the logits of {self.name} differ by {self.difference:.2g} where they reach "
            f"{self.largest:.3g}"
        )


@dataclass(frozen=True)
class Agreement:
    """The comparison of every head, and what the models read, in words."""

    heads: tuple[Head, ...]
    prompts: str

    def __str__(self) -> str:
        return (
            f"{' and '.join(map(str, self.heads))} (fp64; {self.prompts}; {TOLERANCE:.0e} of the "
            "largest is allowed)"
        )


def compare_logits(checkpoint: Path, folder: Path, family: Family | None) -> Agreement:
    """Compares the logits of the model at `checkpoint` with those of transformers from `folder`.

    family: None for an unmodified model of transformers. The models run one after the other: memory
    holds one model, and the logits of both. Raises ValueError with the figures if logits differ by
    more than TOLERANCE of the head's largest, or if a head has the same logits at every token.
    """
    manifest = read_manifest(checkpoint)
    config = config_of(manifest)
    if family is None:
        outputs, auto_class = UNMODIFIED, resolve_name(KINDS[config.kind].model).auto_class
        described = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        vocab_size = described.get_text_config().vocab_size
        positions = config.positions or LENGTHS[-1]
    else:
        outputs, auto_class = OUTPUTS[family.auto_class], family.auto_class
        vocab_size = manifest["vocab_size"]
        positions = getattr(config, "max_position_embeddings", 0)
    prompts: list[Any]
    if isinstance(config, ViTConfig):
        prompts, said = [make_pictures(config)], f"{PICTURES} random images"
    else:
        prompts = make_prompts(vocab_size, positions, padded=outputs.padded)
        lengths = ", ".join(str(each.tokens.shape[1]) for each in prompts)
        said = f"prompts of {lengths} tokens"
    theirs = _their_logits(folder, auto_class, outputs, prompts)
    ours = _our_logits(checkpoint, outputs, prompts)
    heads = tuple(_compare(name, ours[name], theirs[name]) for name in theirs)
    found = Agreement(heads, said)
    # Not `difference > ...`: that is false for NaN, too.
    if not all(head.difference <= TOLERANCE * head.largest for head in heads):
        raise ValueError(f"{checkpoint} and {folder} are not the same model: {found}")
    if constant := [head.name for head in heads if not head.spread > SEEN * head.largest]:
        what = f"the logits of {' and '.join(constant)} are the same at every token"
        raise ValueError(f"{checkpoint} and {folder} cannot be compared: {what}")
    return found


def _compare(name: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Head:
    """One head: its logits for each prompt."""
    highest = torch.stack([each.flatten(0, -2).amax(0) for each in theirs]).amax(0)
    lowest = torch.stack([each.flatten(0, -2).amin(0) for each in theirs]).amin(0)
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    spread = float((highest - lowest).max())
    return Head(name, _largest(differences), _largest(theirs), spread)


def _largest(tensors: Sequence[Tensor]) -> float:
    """The largest magnitude; NaN if any of the tensors contains NaN."""
    return float(torch.stack([each.abs().max() for each in tensors]).max())


def make_pictures(config: ViTConfig) -> Pictures:
    """Random images. A config without mean and deviation gets those that the model then uses."""
    size = (PICTURES, config.image_size, config.image_size, CHANNELS)
    pixels = torch.randint(256, size, generator=torch.Generator().manual_seed(1234))
    colors = {name: getattr(config, name) or HALF for name in ("image_mean", "image_std")}
    return Pictures(pixels.to(torch.uint8), replace(config, **colors))


def make_prompts(vocab_size: int, positions: int, *, padded: bool) -> list[Prompt]:
    """Tokens spread over the whole vocabulary, in a fixed shuffled order.

    Each prompt has one sequence, or two if the model has only one position. With `padded` it has
    two sequences of two segments; the second ends halfway, and its padding is arbitrary tokens.
    """
    rows = 2 if padded or positions == 1 else 1
    lengths = sorted({min(length, positions) for length in LENGTHS})
    count = rows * sum(lengths)
    ids = torch.linspace(0, vocab_size - 1, count, dtype=torch.float64).long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1234))
    prompts = []
    for part in ids[order].split([rows * length for length in lengths]):
        tokens = part.view(rows, -1)
        length = tokens.shape[1]
        index = torch.arange(length).expand_as(tokens)
        ends = torch.tensor([[length], [-(-length // 2)]])[:rows]
        prompts.append(Prompt(tokens, (index >= -(-ends // 2)).long(), index < ends))
    return prompts


@torch.no_grad()
def _their_logits(
    folder: Path, auto_class: str, outputs: Outputs, prompts: Sequence[Any]
) -> dict[str, list[Tensor]]:
    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, auto_class).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", local_files_only=True
    )
    model = model.eval().double()  # the buffers, too, such as rotary frequencies
    with KeepFP64():
        return _by_head([outputs.theirs(model, prompt) for prompt in prompts])


@torch.no_grad()
def _our_logits(
    checkpoint: Path, outputs: Outputs, prompts: Sequence[Any]
) -> dict[str, list[Tensor]]:
    mesh = serial_mesh()
    model = load_model(verify(checkpoint, mesh), mesh, torch.float64)
    return _by_head([outputs.ours(model, mesh, prompt) for prompt in prompts])


def _by_head(found: Sequence[Logits]) -> dict[str, list[Tensor]]:
    return {name: [logits[name] for logits in found] for name in found[0]}
