"""The authors' programs, counted in their source, for which figure 5 is predicted; and the share of
peak and memory bandwidth that a program's kernels attain, from one run on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.config.model import GPT2Config
from megatron.config.pretrain import PretrainGPT2Config
from megatron.config.training import GPT2DataConfig, TrainingConfig
from megatron.train.inputs import vocabulary_of
from tools.layouts.work import Call, Matmul, Work
from tools.plan.hardware import Anchor, Hardware, load_hardware
from tools.plan.timing import predict
from tools.plan.trace import WIDE, Step

Passes = tuple[float, float, float, int, int]
"""Reads and writes of tensors by one layer in one direction: of [n, h], whole on every rank; of
[n, h/t]; of attention's scores [b, a/t, s, s]; and dropouts of [n, h] and of the scores. A dropout
reads, writes, and keeps or reads a mask of one byte a number."""
OUTSIDE_PASSES = 28  # over [n, h] in embedding and final norm, both directions
LOGIT_BYTES = 60  # moved for each logit of a rank, matmuls aside
WIDE_PASSES, NARROW_PASSES = 17, 13  # over this rank's parameters in fp32, and in their own width


@dataclass(frozen=True)
class Software:
    """A program that writes attention's scores to memory and computes the loss of all logits at
    once. bucket_bytes: of gradients, reduced during the backward; None: in one call after it."""

    forward: Passes
    backward: Passes
    bucket_bytes: int | None = None


# The authors' code of 2019 (mpu/transformer.py, fp16/fp16.py, model/distributed.py and
# pretrain_gpt2.py of github.com/NVIDIA/Megatron-LM); each operation is a kernel of its own.
# [n, h] forward: two norms 4, two biases after the all-reduces 4, two residual adds 6; backward:
# adding the gradients of the two branches 6, biases 2, norms 10 (one kernel for x, one for weight
# and bias). [n, h/t] forward: bias of q, k, v 6, their copies 6, of the heads 2, bias 8 and GeLU 8
# of the MLP; backward: GeLU 12, biases 7, heads 2, q, k, v side by side 6. Scores forward: division
# 2, times mask 2, minus mask 2, softmax 2; backward: softmax 3, mask 2, division 2. Parameters:
# zeroing both gradients 1 + 1, accumulating 3, overflow check 2 + 1, copying 1 + 1, unscaling 2,
# norm 1, clipping 2, Adam 7, rounding 1 + 1, flattening, dividing and copying back to reduce 6.
# A logit: widening 6 bytes, copy 8, maximum 4, shift 8, exponential 8, sum 4, division 8, backward
# 14. Gradients are reduced after the backward in one call: --DDP-impl local.
MEGATRON_2019 = Software(forward=(14, 30, 8, 2, 1), backward=(18, 27, 7, 2, 1))

# The code of 2020 ("version 1.0"): bias with GeLU, bias with dropout and residual add (3 passes and
# a mask each), and scale, mask and softmax (2, backward 3) are fused; q, k, v are not copied.
MEGATRON_2020 = Software(forward=(11, 16, 2, 0, 1), backward=(18, 27, 3, 2, 1))

SOFTWARE = {"megatron 2019": MEGATRON_2019, "megatron 2020": MEGATRON_2020}
TORCH_BUCKET = 25 * 2**20  # bytes of a bucket of torch's DistributedDataParallel, --DDP-impl torch


@dataclass(frozen=True)
class AuthorsStep(Step):
    """A step of a GPT-2 in the authors' program; the rest is as in this project."""

    software: Software = MEGATRON_2019

    @cached_property
    def work(self) -> Mapping[str, Work]:
        config, model, width, program = self.config, self.config.model, self.width, self.software
        s, t = config.seq_length, self.tensor
        n = config.training.micro_batch_size * s
        h, size = model.hidden_size, model.hidden_size // model.num_attention_heads
        heads = n // s * model.num_attention_heads // t  # of all sequences, on a rank
        multiple = model.make_vocab_size_divisible_by * t
        logits = -(-vocabulary_of(config) // multiple) * multiple // t  # of a token on a rank
        head = [Matmul(1, n, h, logits, width)]
        weights = ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h))
        layer = [Matmul(1, n, rows, columns, width) for rows, columns in weights]
        layer += [Matmul(heads, s, size, s, width), Matmul(heads, s, s, size, width)]
        of_stream = Call("tensor", n * h * width, 2)  # f or g
        of_loss = Call("tensor", n * WIDE, 2), Call("tensor", 2 * n * WIDE, 2)

        def of_layer(matmuls: Iterable[Matmul], passes: Passes) -> Work:
            whole, cut, over_scores, dropouts, score_dropouts = passes
            moved = width * ((whole + cut / t) * n * h + over_scores * heads * s**2)
            moved += (2 * width + 1) * (dropouts * n * h + score_dropouts * heads * s**2)
            return Work(Counter(matmuls), Counter({of_stream: 2}), moved)

        there, back = of_layer(layer, program.forward), of_layer(gradients(layer), program.backward)
        outside = (OUTSIDE_PASSES * n * h * width + LOGIT_BYTES * n * logits) / 2
        depth, is_recomputed = model.num_layers, model.recompute_granularity == "full"
        ahead = Work(Counter(head), Counter([of_stream, of_stream, *of_loss]), outside)
        phases = {
            "forward": ahead.plus(there, depth),
            "recomputation": Work().plus(there, depth * is_recomputed),
            "backward": Work(Counter(gradients(head)), Counter(), outside).plus(back, depth),
        }
        return {phase: Work().plus(each, self.micro_batches) for phase, each in phases.items()}

    @property
    def reductions(self) -> list[tuple[float, Call]]:
        if (size := self.software.bucket_bytes) is None:
            return [(1.0, Call("data", self.model.local * self.width, 2))]
        buckets = self.model_of(size // self.width * WIDE).buckets
        numbers = [sum(view.parameter.numel() for view in each.views) for _, each in buckets]
        pairs = zip(buckets, numbers, strict=True)
        return [(ready, Call("data", number * self.width, 2)) for (ready, _), number in pairs]

    @property
    def updated(self) -> int:
        return self.model.local * (WIDE_PASSES * WIDE + NARROW_PASSES * self.width)


def gradients(matmuls: Iterable[Matmul]) -> Iterator[Matmul]:
    """The matmuls for the gradients of both factors of each matmul."""
    for each in matmuls:
        yield each._replace(k=each.n, n=each.k)
        yield each._replace(m=each.k, k=each.m)


def find_hardware(name: str) -> Hardware:
    """load_hardware, with the share of peak and memory bandwidth that kernels attain."""
    return anchored(load_hardware(name))


def anchored(hardware: Hardware) -> Hardware:
    """The hardware with the share, the same for matmuls and other kernels, at which the predicted
    time of its anchor is the measured one; unchanged if it has no anchor."""
    if (anchor := hardware.anchor) is None:
        return hardware
    step = anchor_step(anchor)
    ideal = predict(step, replace(hardware, attained_share=1.0)).total
    return replace(hardware, attained_share=ideal / (step.executed_flops / anchor.flops_per_second))


def anchor_step(anchor: Anchor) -> Step:
    model = GPT2Config(
        num_layers=anchor.num_layers,
        hidden_size=anchor.hidden_size,
        num_attention_heads=anchor.heads,
        max_position_embeddings=anchor.sequence,
        vocab_size=anchor.vocabulary,
        make_vocab_size_divisible_by=1,
        recompute_granularity="full",
    )
    data = GPT2DataConfig(seq_length=anchor.sequence)
    training = TrainingConfig(train_iters=1, micro_batch_size=anchor.batch)
    config = PretrainGPT2Config(model=model, data=data, training=training)
    if anchor.software == "this project":
        return Step(config, 1, anchor.precision)
    return AuthorsStep(config, 1, anchor.precision, software=SOFTWARE[anchor.software])
