"""The authors' programs, counted in their source, which figure 5 is predicted of; and the share of
peak and memory bandwidth that a program's kernels attain, from one run on one device.

A pass is one reading or one writing of a tensor. Of a layer, forward and backward:

    stream    passes over [n, h], which every tensor-parallel rank does in full
    cut       passes over [n, h/t]
    scores    passes over [b, a/t, s, s], which attention writes to memory
    dropouts  kernels that read, write and keep or read a mask of one byte a number
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megatron.config.model import GPT2Config
from megatron.config.pretrain import PretrainGPT2Config
from megatron.config.training import GPT2DataConfig, TrainingConfig
from megatron.train.inputs import vocabulary_of
from tools.layouts.work import Call, Matmul, Work
from tools.planning.hardware import Anchor, Hardware, load_hardware
from tools.planning.timing import predict
from tools.planning.trace import WIDE, Step


class Passes(NamedTuple):
    """Of one layer in one direction."""

    stream: float
    cut: float
    scores: float
    stream_dropouts: int
    scores_dropouts: int


@dataclass(frozen=True, kw_only=True)
class Software:
    """Attention's scores are written to memory, and the loss is computed at once, of all logits."""

    name: str
    forward: Passes
    backward: Passes
    outside: float = 28  # passes over [n, h] in embedding and final norm, both directions
    logit_bytes: float = 60  # moved for each logit of a rank, matmuls aside
    wide_passes: float = 17  # over this rank's parameters in fp32, of a step
    narrow_passes: float = 13  # in the weights' own width
    gradient_bytes: int = 2  # of a number that is reduced over data-parallel ranks
    bucket_bytes: int | None = None  # reduced beside the backward; None: in one call behind it


# The authors' code as of the paper (mpu/transformer.py, fp16/fp16.py, model/distributed.py and
# pretrain_gpt2.py of github.com/NVIDIA/Megatron-LM, 2019), each operation a kernel of its own.
# Stream forward: two norms 4, two biases behind the all-reduces 4, two residual adds 6; backward:
# gradients of the two branches added 6, biases 2, norms 10 (one kernel for x, one for weight and
# bias). Cut forward: bias of q, k, v 6, their copies 6, of the heads 2, bias 8 and GeLU 8 of the
# MLP; backward: GeLU 12, biases 7, heads 2, q, k, v side by side 6. Scores forward: divided
# 2, times mask 2, minus mask 2, softmax 2; backward: softmax 3, mask 2, division 2. Parameters:
# both gradients zeroed 1 + 1, accumulated 3, searched for overflow 2 + 1, copied 1 + 1, unscaled 2,
# norm 1, clipped 2, Adam 7, rounded 1 + 1, flattened, divided and copied back for reduction 6.
# A logit: widened 6 bytes, copied 8, maximum 4, shift 8, exponential 8, sum 4, division 8, backward
# 14. Gradients are reduced behind the backward in one call: --DDP-impl local.
MEGATRON_2019 = Software(
    name="Megatron-LM, 2019",
    forward=Passes(14, 30, 8, 2, 1),
    backward=Passes(18, 27, 7, 2, 1),
)

# The same in 2020 ("version 1.0"): bias with GeLU, bias with dropout and residual add (3 passes and
# a mask each), and scale, mask and softmax (2, backward 3) are fused; q, k, v are not copied.
MEGATRON_2020 = Software(
    name="Megatron-LM 1.0, 2020",
    forward=Passes(11, 16, 2, 0, 1),
    backward=Passes(18, 27, 3, 2, 1),
)

SOFTWARE = {"megatron 2019": MEGATRON_2019, "megatron 2020": MEGATRON_2020}
TORCH_BUCKET = 25 * 2**20  # bytes of a bucket of torch's DistributedDataParallel, --DDP-impl torch


@dataclass(frozen=True)
class AuthorsStep(Step):
    """A step of a GPT-2 as the software does it; what is not said here is as in this project."""

    software: Software = MEGATRON_2019

    @cached_property
    def work(self) -> Mapping[str, Work]:
        config, model, width, m = self.config, self.config.model, self.width, self.micro_batches
        b, s, t = config.training.micro_batch_size, config.data.seq_length, self.tensor
        h, a, layers, n = model.hidden_size, model.num_attention_heads, model.num_layers, b * s
        multiple, size = model.make_vocab_size_divisible_by * t, h // a
        logits = -(-vocabulary_of(config) // multiple) * multiple // t  # of a token on a rank
        # ((batch, m, k, n), times) of the forward: a layer's weights, the head, attention.
        sizes = ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h))
        core = [(b * a // t, s, size, s), (b * a // t, s, s, size)]
        layer = [(each, layers * m) for each in (*((1, n, *pair) for pair in sizes), *core)]
        forward = [*layer[:4], ((1, n, h, logits), m), *layer[4:]]
        backward = []
        for (batch, rows, inner, columns), times in forward:
            backward += [((batch, rows, columns, inner), times)]
            backward += [((batch, inner, rows, columns), times)]
        again = model.recompute_granularity == "full"
        stream, sums, scores, dropout = n * h * width, n * WIDE, b * a / t * s**2, 2 * width + 1
        loss = [(sums, m), (2 * sums, m), (stream, m)]  # and f of the head

        def moved(passes: Passes) -> float:
            found = width * (
                passes.stream * n * h + passes.cut * n * h / t + passes.scores * scores
            )
            found += (model.hidden_dropout > 0) * dropout * passes.stream_dropouts * n * h
            found += (model.attention_dropout > 0) * dropout * passes.scores_dropouts * scores
            return layers * found

        def work(matmuls: Any, sizes: Sequence[tuple[int, int]], moved: float) -> Work:
            calls = _Listed((Call("tensor", size, 2), times) for size, times in sizes if t > 1)
            found = _Listed((Matmul(*each, width), times) for each, times in matmuls)
            return Work(found, calls, m * moved)

        there, back = moved(self.software.forward), moved(self.software.backward)
        outside = (self.software.outside * stream + self.software.logit_bytes * n * logits) / 2
        calls, repeated = [(stream, m * (1 + 2 * layers)), *loss], [(stream, m * 2 * layers)]
        return {
            "forward": work(forward, calls, there + outside),
            "recomputation": work(layer * again, repeated * again, there * again),
            "backward": work(backward, repeated, back + outside),
        }

    @property
    def reductions(self) -> list[tuple[float, str, int]]:
        size, most = self.software.gradient_bytes, self.software.bucket_bytes
        if most is None:
            return [(1.0, "data", self.model.local * size)]
        buckets = self.model_of(most // size * WIDE).buckets
        return [(each.ready, "data", each.numbers * size) for each in buckets]

    @property
    def overlaps(self) -> bool:
        return self.software.bucket_bytes is not None

    @property
    def updated(self) -> float:
        wide, narrow = self.software.wide_passes * WIDE, self.software.narrow_passes * self.width
        return self.model.local * (wide + narrow)


class _Listed(list[tuple[Any, int]]):
    """A Counter whose equal keys stay apart: the last bits of a sum depend on its order, and
    predictions that were made are kept."""

    def items(self) -> list[tuple[Any, int]]:
        return self


def find_hardware(name: str) -> Hardware:
    """As load_hardware, with the share of peak and memory bandwidth that kernels attain."""
    return anchored(load_hardware(name))


def anchored(hardware: Hardware) -> Hardware:
    """The hardware with the share that its anchor tells; as it is where it has none.

    The share is one number for matmuls and other kernels alike: that with which the time of the
    known run comes out. So it carries whatever is not in the datasheet, and is known before
    anything is scaled.
    """
    anchor = hardware.anchor
    if anchor is None:
        return hardware
    step = anchor_step(anchor)
    ideal = predict(step, replace(hardware, attained_share=1.0)).total
    return replace(hardware, attained_share=ideal / (step.executed_flops / anchor.flops_per_second))


def anchor_step(anchor: Anchor) -> Step:
    config = PretrainGPT2Config(
        model=GPT2Config(
            num_layers=anchor.num_layers,
            hidden_size=anchor.hidden_size,
            num_attention_heads=anchor.heads,
            max_position_embeddings=anchor.sequence,
            vocab_size=anchor.vocabulary,
            make_vocab_size_divisible_by=1,
            recompute_granularity="full",
        ),
        data=GPT2DataConfig(seq_length=anchor.sequence),
        training=TrainingConfig(train_iters=1, micro_batch_size=anchor.batch),
    )
    if anchor.software == "this project":
        return Step(config, 1, anchor.precision)
    return AuthorsStep(config, 1, anchor.precision, software=SOFTWARE[anchor.software])
