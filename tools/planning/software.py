"""How many bytes a program's kernels move beside the matrix products, counted in its source.

A pass is one reading or one writing of a tensor. Of a layer, forward and backward:

    stream    passes over [n, h], which every tensor-parallel rank does in full
    cut       passes over [n, h/t]
    scores    passes over [b, a/t, s, s], where attention writes them to memory
    dropouts  kernels that read, write and keep or read a mask of one byte a number
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.planning.parameters import local
from tools.planning.shape import WIDE, Shape


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one layer in one direction."""

    stream: float
    cut: float
    scores: float = 0
    stream_dropouts: int = 0
    scores_dropouts: int = 0

    def bytes(self, shape: Shape) -> float:
        stream = shape.tokens * shape.hidden
        scores = shape.batch * shape.heads / shape.tensor * shape.sequence**2
        dropout = 2 * shape.width + 1
        moved = shape.width * (
            self.stream * stream + self.cut * stream / shape.tensor + self.scores * scores
        )
        moved += shape.hidden_dropout * dropout * self.stream_dropouts * stream
        return moved + shape.attention_dropout * dropout * self.scores_dropouts * scores


@dataclass(frozen=True, kw_only=True)
class Software:
    name: str
    forward: Traffic
    backward: Traffic
    outside: float  # passes over [n, h] in embedding and final norm, both directions
    logit_bytes: float  # moved for each logit of a rank, products aside
    wide_passes: float  # over this rank's parameters in fp32, of a step
    narrow_passes: float  # in the weights' own width
    keeps_scores: bool  # else attention is one kernel: causal, it leaves out half of the products
    gradient_bytes: int  # of a number that is reduced over data-parallel ranks
    bucket_bytes: int
    overlaps: bool  # gradients are reduced while the backward goes on, else behind it
    chunk_bytes: int  # of the logits that are there at a time, in fp32
    overlaps_f: bool  # its all-reduce goes on while the same layer's weight gradient is computed

    def forward_bytes(self, shape: Shape) -> float:
        """Of all layers in one micro-batch."""
        return shape.layers * self.forward.bytes(shape)

    def backward_bytes(self, shape: Shape) -> float:
        return shape.layers * self.backward.bytes(shape)

    def outside_bytes(self, shape: Shape) -> float:
        """Of embedding, final norm and loss in one micro-batch."""
        logits = shape.scored * shape.padded / shape.tensor
        stream = shape.tokens * shape.hidden * shape.width
        return self.outside * stream + self.logit_bytes * logits

    def parameter_bytes(self, shape: Shape) -> float:
        """Of gradients and optimizer, in a step."""
        return local(shape) * (self.wide_passes * WIDE + self.narrow_passes * shape.width)


# Without torch.compile, which fuses some of it. Stream forward: two norms 4, two biases behind the
# all-reduces 4, two residual adds 6; backward: gradients of the two branches added 6, biases 2,
# norms 10 (one kernel for x, one for weight and bias). Cut forward: GeLU 8, attention in one kernel
# 4; backward: GeLU 12, biases 7, attention 8, q, k, v put side by side 6. Parameters: gradient to
# its place 1 + 1, norm 1, AdamW 8 with the scaled gradient, rounding 1 + 1. A logit: maximum 2
# bytes, widening 6, shift 8, exponential 8, sum 4, gradient 8, narrowing 6.
THIS_PROJECT = Software(
    name="this project",
    forward=Traffic(stream=14, cut=12, stream_dropouts=2),
    backward=Traffic(stream=18, cut=33, stream_dropouts=2),
    outside=28,
    logit_bytes=42,
    wide_passes=11,
    narrow_passes=2,
    keeps_scores=False,
    gradient_bytes=4,
    bucket_bytes=64 * 2**20,
    overlaps=True,
    chunk_bytes=2**27,
    overlaps_f=True,
)

# The authors' code as of the paper (mpu/transformer.py, fp16/fp16.py, model/distributed.py and
# pretrain_gpt2.py of github.com/NVIDIA/Megatron-LM, 2019), each operation a kernel of its own.
# Stream as above. Cut forward: bias of q, k, v 6, their copies 6, of the heads 2, bias 8 and GeLU 8
# of the MLP; backward: GeLU 12, biases 7, heads 2, q, k, v side by side 6. Scores forward: divided
# 2, times mask 2, minus mask 2, softmax 2; backward: softmax 3, mask 2, division 2. Parameters:
# both gradients zeroed 1 + 1, accumulated 3, searched for overflow 2 + 1, copied 1 + 1, unscaled 2,
# norm 1, clipped 2, Adam 7, rounded 1 + 1, flattened, divided and copied back for reduction 6.
# A logit: widened 6 bytes, copied 8, maximum 4, shift 8, exponential 8, sum 4, division 8, backward
# 14. Gradients are reduced behind the backward in one call: --DDP-impl local.
MEGATRON_2019 = Software(
    name="Megatron-LM, 2019",
    forward=Traffic(stream=14, cut=30, scores=8, stream_dropouts=2, scores_dropouts=1),
    backward=Traffic(stream=18, cut=27, scores=7, stream_dropouts=2, scores_dropouts=1),
    outside=28,
    logit_bytes=60,
    wide_passes=17,
    narrow_passes=13,
    keeps_scores=True,
    gradient_bytes=2,
    bucket_bytes=2**62,
    overlaps=False,
    chunk_bytes=2**62,
    overlaps_f=False,
)

# The same in 2020 ("version 1.0"): bias with GeLU, bias with dropout and residual add (3 passes and
# a mask each), and scale, mask and softmax (2, backward 3) are fused; q, k, v are not copied.
MEGATRON_2020 = Software(
    name="Megatron-LM 1.0, 2020",
    forward=Traffic(stream=11, cut=16, scores=2, scores_dropouts=1),
    backward=Traffic(stream=18, cut=27, scores=3, stream_dropouts=2, scores_dropouts=1),
    outside=28,
    logit_bytes=60,
    wide_passes=17,
    narrow_passes=13,
    keeps_scores=True,
    gradient_bytes=2,
    bucket_bytes=2**62,
    overlaps=False,
    chunk_bytes=2**62,
    overlaps_f=False,
)

SOFTWARE = {
    "this project": THIS_PROJECT,
    "megatron 2019": MEGATRON_2019,
    "megatron 2020": MEGATRON_2020,
}
TORCH_BUCKET = 25 * 2**20  # bytes of a bucket of torch's DistributedDataParallel, --DDP-impl torch
