"""The authors' programs, counted in their source, which figure 5 is predicted of; and the share of
peak and memory bandwidth that a program's kernels attain, from one run on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.config.model import GPT2Config
from megatron.config.pretrain import PretrainGPT2Config
from megatron.config.training import GPT2DataConfig, TrainingConfig
from megatron.train.inputs import vocabulary_of
from tools.layouts.work import Call, Matmul, Work
from tools.planning.hardware import Anchor, Hardware, load_hardware
from tools.planning.timing import predict
from tools.planning.trace import WIDE, Step

Passes = tuple[float, float, float, int, int]
"""A pass is one reading or one writing of a tensor. Of one layer in one direction: passes over
[n, h], which every tensor-parallel rank does in full; over [n, h/t]; over attention's scores
[b, a/t, s, s]; and dropouts of [n, h] and of the scores, which read, write and keep or read a mask
of one byte a number."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """Attention's scores are written to memory, and the loss is computed at once, of all logits."""

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
MEGATRON_2019 = Software(forward=(14, 30, 8, 2, 1), backward=(18, 27, 7, 2, 1))

# The same in 2020 ("version 1.0"): bias with GeLU, bias with dropout and residual add (3 passes and
# a mask each), and scale, mask and softmax (2, backward 3) are fused; q, k, v are not copied.
MEGATRON_2020 = Software(forward=(11, 16, 2, 0, 1), backward=(18, 27, 3, 2, 1))

SOFTWARE = {"megatron 2019": MEGATRON_2019, "megatron 2020": MEGATRON_2020}
TORCH_BUCKET = 25 * 2**20  # bytes of a bucket of torch's DistributedDataParallel, --DDP-impl torch


@dataclass(frozen=True)
class AuthorsStep(Step):
    """A step of a GPT-2 as the software does it; what is not said here is as in this project."""

    software: Software = MEGATRON_2019

    @cached_property
    def work(self) -> Mapping[str, Work]:
        config, model, width, program = self.config, self.config.model, self.width, self.software
        b, s, t = config.training.micro_batch_size, config.data.seq_length, self.tensor
        h, a, layers, n = model.hidden_size, model.num_attention_heads, model.num_layers, b * s
        multiple = model.make_vocab_size_divisible_by * t
        logits = -(-vocabulary_of(config) // multiple) * multiple // t  # of a token on a rank
        stream, scores = n * h, b * a / t * s**2
        # (batch, m, k, n) of the head; of a layer's attention; and of its weights.
        head, layer = [(1, n, h, logits)], [(b * a // t, s, h // a, s), (b * a // t, s, s, h // a)]
        for inner, columns in ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h)):
            layer.append((1, n, inner, columns))

        def work(sizes: Iterable[tuple[int, ...]], sums: list[int], moved: float) -> Work:
            calls = Counter(Call("tensor", size, 2) for size in sums)
            return Work(Counter(Matmul(*each, width) for each in sizes), calls, moved)

        def of_layer(sizes: Iterable[tuple[int, ...]], passes: Passes) -> Work:
            whole, cut, of_scores, dropouts, score_dropouts = passes
            moved = width * (whole * stream + cut * stream / t + of_scores * scores)
            dropped = (model.hidden_dropout > 0) * dropouts * stream
            dropped += (model.attention_dropout > 0) * score_dropouts * scores
            return work(sizes, [stream * width] * 2, moved + (2 * width + 1) * dropped)

        def gradients(sizes: list[tuple[int, ...]]) -> Iterable[tuple[int, ...]]:
            for batch, rows, inner, columns in sizes:
                yield batch, rows, columns, inner
                yield batch, inner, rows, columns

        there, back = of_layer(layer, program.forward), of_layer(gradients(layer), program.backward)
        outside = (program.outside * stream * width + program.logit_bytes * n * logits) / 2
        # g of the embedding, f of the head, and what the loss adds up of each token.
        once = work(head, [stream * width] * 2 + [n * WIDE, 2 * n * WIDE], outside)
        phases = {
            "forward": once.plus(there, layers),
            "recomputation": Work().plus(there, layers * (model.recompute_granularity == "full")),
            "backward": work(gradients(head), [], outside).plus(back, layers),
        }
        return {phase: Work().plus(each, self.micro_batches) for phase, each in phases.items()}

    @property
    def reductions(self) -> list[tuple[float, str, int]]:
        size, most = self.software.gradient_bytes, self.software.bucket_bytes
        if most is None:
            return [(1.0, "data", self.model.local * size)]
        buckets = self.model_of(most // size * WIDE).buckets
        return [(each.ready, "data", each.numbers * size) for each in buckets]

    @property
    def updated(self) -> float:
        wide, narrow = self.software.wide_passes * WIDE, self.software.narrow_passes * self.width
        return self.model.local * (wide + narrow)


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
