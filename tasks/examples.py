"""A pretrained BERT with the head of a task (paper, section 5.2): its data, weights and logits.

The order of an epoch's examples is a function of (seed, epoch). A step takes the next
global_batch_size examples, and the last step of an epoch the remaining ones: every example is used
once per epoch, with the same weight as the others of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron.checkpoint.format import Checkpoint
from megatron.config.model import FinetunedConfig, Head, ModelConfig
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.data.batch import ExampleBatch
from megatron.data.order import permute
from megatron.inference.generate import DivergedError
from megatron.parallel.bucket import gathered
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Mesh
from megatron.train.executor import on_device
from megatron.train.inputs import shard
from megatron.train.state import DTYPES, TrainState, build_state
from tasks.protocol import Example, FinetuneSettings


def make_batch(
    examples: Sequence[Example], counted: int | None = None, parts: int = 1, longest: int = 0
) -> ExampleBatch:
    """The batch of these examples, which all have equally many options and equally long labels.

    counted: how many examples, from the first on, are part of the loss; all if not given. parts:
    number of shards along the tokens; sequences are padded to a multiple of it. longest: number of
    tokens that sequences are at least padded to.
    """
    sequences = [each for example in examples for each in example.options]
    lengths = np.array([len(each.tokens) for each in sequences])[:, None]
    positions = np.arange(-(-max(longest, lengths.max()) // parts) * parts)
    is_real = positions < lengths
    tokens = np.zeros(is_real.shape, np.int64)
    tokens[is_real] = np.concatenate([np.asarray(each.tokens) for each in sequences])
    is_second = positions >= np.array([each.second for each in sequences])[:, None]
    options = len(examples[0].options)
    assert len(sequences) == options * len(examples), "unequal numbers of options"
    shape = (len(examples), options, -1) if options > 1 else is_real.shape
    count = len(examples) if counted is None else counted
    return ExampleBatch(
        tokens=tokens.reshape(shape),
        token_types=(is_real & is_second).astype(np.int64).reshape(shape),
        is_real=is_real.reshape(shape),
        labels=np.array([each.label for each in examples], np.int64).reshape(len(examples), -1),
        counted=(np.arange(len(examples)) < count).astype(np.float32),
    )


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The examples of each optimizer step of a training run, as a function of the step number."""

    examples: Sequence[Example]
    seed: int
    epochs: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def per_epoch(self) -> int:
        return -(-len(self.examples) // self.global_batch_size)

    def __len__(self) -> int:
        return self.epochs * self.per_epoch

    def numbers(self, step: int) -> NDArray[np.int64]:
        """Indices of the examples of a step; both are counted from 0."""
        epoch, place = divmod(step, self.per_epoch)
        start, size = place * self.global_batch_size, len(self.examples)
        places = np.arange(start, min(start + self.global_batch_size, size))
        return permute(places, size, seed=self.seed, epochs=np.full_like(places, epoch))

    def micro_batches(self, step: int, mesh: Mesh) -> list[ExampleBatch]:
        """This rank's share of a step: equally many batches of equal size on every rank.

        Examples of similar length are batched together, to save padding. Where the examples do not
        divide evenly, batches are filled with an example that is not part of the loss.
        """
        rows = [(number, self.examples[number]) for number in self.numbers(step)]
        rows.sort(key=lambda row: -row[1].longest)
        rounds = -(-len(rows) // (self.micro_batch_size * mesh.batch.size))
        shares = rounds * mesh.batch.size
        size = -(-len(rows) // shares)
        cuts = [len(rows) * number // shares for number in range(shares + 1)]
        # Numbers of samples go on over the epochs, so that dropout differs in each.
        epochs_before = step // self.per_epoch * len(self.examples)
        batches = []
        for share in range(mesh.batch.rank, shares, mesh.batch.size):
            own = rows[cuts[share] : cuts[share + 1]]
            numbers, examples = zip(*own, *[rows[-1]] * (size - len(own)), strict=True)
            # Ranks of one model replica compute together, and need the same number of tokens.
            longest = rows[cuts[share - mesh.tokens.rank]][1].longest
            batch = make_batch(examples, len(own), mesh.stream.size, longest)
            batches.append(batch.numbered(np.array(numbers) + epochs_before))
        return batches


def finetuned_config(
    pretrained: ModelConfig, head: Head, labels: Sequence[str], **changes: Any
) -> FinetunedConfig:
    """The config of a pretrained BERT with this head in place of its own. changes: settings such as
    dropout, which belong to the run and not to the weights."""
    # torch's LayerNorm computes the same model; other kernels may not be installed here. Dropout is
    # by coordinates, even where that is slower; the embeddings' is --hidden-dropout.
    other: dict[str, Any] = {"layernorm_impl": "torch", "attention_dropout_rng": "coordinates"}
    other["cpu_offload_activations"] = False  # a memory setting of the pretraining run
    settings = {**asdict(pretrained), "embedding_dropout": None, **other, **changes}
    return FinetunedConfig(head=head, labels=tuple(labels), **settings)


def optimizer_config(settings: FinetuneSettings, steps: int) -> OptimizerConfig:
    return OptimizerConfig(
        lr=settings.lr,
        min_lr=0.0,
        lr_decay_style="linear",
        lr_decay_iters=steps + 1,  # the rate reaches 0 after the last step
        lr_warmup_iters=round(settings.lr_warmup_fraction * steps),
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
    )


def start(
    pretrained: Checkpoint,
    config: FinetunedConfig,
    optimizer: OptimizerConfig,
    dtype: str,
    seed: int,
    mesh: Mesh,
    zero_stage: int = 0,
) -> TrainState:
    """A run at step 0 with the weights of the pretrained BERT, and a head initialised from the
    seed. zero_stage: ZeRO stage.

    Raises ValueError, naming the first one, where the checkpoint lacks a weight other than the
    head's, or has one that is not used here (except the pretraining heads' and a span's pooler).
    """
    state = build_state(
        config,
        mesh,
        pretrained.manifest["vocab_size"],
        seed=seed,
        dtype=DTYPES[dtype],
        optimizer=optimizer,
        precision=PrecisionConfig(fp16=dtype == "fp16"),
        zero_stage=zero_stage,
    )
    modules = {name.partition(".")[0] for name, _ in state.model.named_parameters()}
    surplus = {"mlm", "sop", "pooler"} - modules
    state.load_weights(pretrained, missing={"head"}, surplus=surplus)
    return state


@torch.no_grad()
def logits_of(
    model: nn.Module,
    config: FinetunedConfig,
    mesh: Mesh,
    examples: Sequence[Example],
    micro_batch_size: int,
    name: str,
) -> list[NDArray[np.float32]]:
    """The model's logits for each example: [classes], [options], or [n, 2] for the n tokens of its
    sequence; the same on every rank. `name` is the label of the progress bar.

    Batch size, padding and layout change them only by rounding. Raises DivergedError where logits
    are not finite.
    """
    was_training = model.training
    model.eval()
    shapes = [_shape_of(each, config) for each in examples]
    ends = np.cumsum([prod(shape) for shape in shapes])
    flat = torch.zeros(int(ends[-1]) if len(ends) else 0)

    def answer(numbers: Sequence[int]) -> Tensor:
        unlabelled = [replace(examples[number], label=()) for number in numbers]
        batch = make_batch(unlabelled, parts=mesh.stream.size)
        logits: Tensor = model(on_device(batch, mesh.device))
        return logits.float().cpu()

    calls = 0
    with gathered(model):
        for numbers in shard([each.longest for each in examples], micro_batch_size, mesh, name):
            for number, row in zip(numbers, answer(numbers), strict=True):
                count = prod(shapes[number])
                flat[ends[number] - count : ends[number]] = row.flatten()[:count]
            calls += 1
        if calls * micro_batch_size * mesh.copies.size < len(examples):
            answer([0])  # logits unused: other ranks make one call more, and it may gather weights
    model.train(was_training)
    whole = all_reduce(flat.to(mesh.device), mesh.copies).cpu().numpy()
    if not np.isfinite(whole).all():
        raise DivergedError(f"{name}: logits are not numbers")
    parts = np.split(whole, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _shape_of(example: Example, config: FinetunedConfig) -> tuple[int, ...]:
    """Shape of the logits of this example."""
    if config.head == "span":
        return (len(example.options[0].tokens), 2)
    return (len(config.labels) if config.head == "classifier" else len(example.options),)
