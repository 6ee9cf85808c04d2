"""Known faults of trainers, each a small change of the plain one.

A class is a fault, its docstring what a report says of it. `among`: the numbers of ranks that it is
between, here in one process; (1,): it does not depend on them. `models`: where it exists. The
resumed run is that after step 3.

The fixtures have no dropout, and a trainer is given their weights; masks and initial values that
differ by rank are random, so no figure would name them. `InitialValuesOfFirstShard` has a figure.
Faults that theory makes equal are one: a rank that reads another's samples is
`GradientsNotReduced`; gradients divided by the number of micro-batches are `GradientsOverRanks` of
two. Megatron-LM issue 7452: number 3 is `LocalCountsInGradients`, 7 `ScatterOverWrongGroup`, 8
`NormOfFirstRanksHeads`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conformance.fixture import COMPARED, MicroBatch
from conformance.plain import Trainer, Weights, scored

RESUMED = COMPARED[0]  # steps before the run is interrupted
# How tensor parallelism cuts weights: by columns (what a layer gives), by rows (what it is given),
# and those whole on each rank.
HEADS = r"c_attn|[qkv]_proj|query|key|value"
COLUMNS = rf"{HEADS}|c_fc|gate_proj|up_proj|intermediate|wte|embed_tokens|lm_head|word_emb|ns\.bias"
ROWS = r"c_proj\.weight|o_proj|down_proj|\.output\.dense\.weight"


def first_shard(name: str, tensor: Tensor, ranks: int) -> tuple[int, Tensor]:
    """(dim, places along it): each place's counterpart in the first rank's shard."""
    conv1d = ".h." in name and tensor.dim() > 1
    dim = int(conv1d) if re.search(COLUMNS, name) else int(not conv1d)
    # Query, key and value of GPT-2 are one tensor, of which each is cut.
    parts = 3 if "c_attn" in name else 1
    length = tensor.shape[dim] // parts
    places = torch.arange(length) % -(-length // ranks)
    return dim, (torch.arange(parts)[:, None] * length + places).flatten()


def scaled(gradients: Weights, scale: float) -> Weights:
    return {name: each * scale for name, each in gradients.items()}


def means(micro_batches: Sequence[MicroBatch], groups: Sequence[Tensor]) -> list[Tensor]:
    """Token weights of a mean of means. groups: the number of each token's group, [b, s]."""
    marks = [scored(each) for each in micro_batches]
    groups = [each.expand(mark.shape) for each, mark in zip(groups, marks, strict=True)]
    every = torch.cat([each.flatten() for each in groups])
    counts = torch.bincount(every, torch.cat([each.flatten() for each in marks]))
    pairs = zip(marks, groups, strict=True)
    return [mark / counts.clamp(min=1)[group] / len(counts) for mark, group in pairs]


def data_ranks(batch: MicroBatch, ranks: int) -> Tensor:
    b = len(batch.input_ids)
    return (torch.arange(b) * ranks // b)[:, None]


class MicroBatchMeans(Trainer):
    """The loss is the mean of the micro-batches' means."""

    def token_weights(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return means(micro_batches, [torch.tensor([[i]]) for i in range(len(micro_batches))])


class DataRankMeans(Trainer):
    """The loss is the mean of the data-parallel ranks' means over their samples of the batch."""

    among = (2, 4)

    def token_weights(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return means(micro_batches, [data_ranks(each, self.ranks) for each in micro_batches])


class DataRankMicroBatchMeans(Trainer):
    """The loss is the mean of each data-parallel rank's mean over each micro-batch."""

    among = (2,)  # a rank of four has one sample of each micro-batch: see SampleMeans

    def token_weights(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        groups = [
            data_ranks(each, self.ranks) + self.ranks * number
            for number, each in enumerate(micro_batches)
        ]
        return means(micro_batches, groups)


class ContextRankMeans(Trainer):
    """The loss is the mean of the context-parallel ranks' means over their parts of sequences."""

    among = (2, 4)

    def token_weights(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        length = micro_batches[0].input_ids.shape[1]
        ranks = torch.arange(length)[None] * self.ranks // length
        return means(micro_batches, [ranks] * len(micro_batches))


class SampleMeans(Trainer):
    """The loss is the mean of the samples' means."""

    def token_weights(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        samples = torch.arange(sum(len(each.labels) for each in micro_batches))[:, None]
        return means(micro_batches, samples.split([len(each.labels) for each in micro_batches]))


class LocalCountsInGradients(DataRankMeans):
    """Gradients are those of the mean of data-parallel ranks' means; the loss is right."""

    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        right = Trainer(self.fixture, self.dtype)
        right.weights = self.weights
        loss, _ = right.loss_and_gradients(micro_batches)
        return loss, super().loss_and_gradients(micro_batches)[1]


class LossOfFirstRank(Trainer):
    """The loss is that of the first data-parallel rank's samples; gradients are right."""

    among = (2, 4)

    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        shares = [each.share(0, self.ranks) for each in micro_batches]
        loss, _ = super().loss_and_gradients(shares)
        return loss, super().loss_and_gradients(micro_batches)[1]


class PaddingScored(Trainer):
    """Padding is scored as a token to predict."""

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return [
            replace(each, labels=torch.where(each.attention_mask > 0, each.labels, each.input_ids))
            for each in super().micro_batches(step)
        ]


class PositionsCounted(Trainer):
    """The loss is divided by the number of all positions, scored or not."""

    def token_weights(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        total = sum(each.labels.numel() for each in micro_batches)
        return [scored(each) / total for each in micro_batches]


class PaddingAttended(Trainer):
    """Padding is attended to."""

    models = ("bert",)

    def allowed(self, batch: MicroBatch) -> Tensor:
        return torch.ones_like(super().allowed(batch))


class GradientsTimesCount(Trainer):
    """Gradients are of the sum over tokens, not of their mean."""

    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        loss, gradients = super().loss_and_gradients(micro_batches)
        return loss, scaled(gradients, float(sum(scored(each).sum() for each in micro_batches)))


class GradientsTimesRanks(Trainer):
    """Gradients are as many times too large as there are ranks: summed where a mean was due."""

    among = (2, 4)

    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        loss, gradients = super().loss_and_gradients(micro_batches)
        return loss, scaled(gradients, self.ranks)


class GradientsOverRanks(Trainer):
    """Gradients are divided by the ranks once too often: averaged where a sum was due."""

    among = (2, 4)

    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        loss, gradients = super().loss_and_gradients(micro_batches)
        return loss, scaled(gradients, 1 / self.ranks)


class GradientsNotReduced(Trainer):
    """Loss and gradients are of the first data-parallel rank's samples alone."""

    among = (2, 4)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return [each.share(0, self.ranks) for each in super().micro_batches(step)]


class GradientsOfLastMicroBatch(Trainer):
    """The last micro-batch's gradient replaces those before it; the loss is right."""

    def added(self, total: Weights, part: Weights) -> Weights:
        return part


class GradientsNotZeroed(Trainer):
    """Gradients are added to those of the steps before."""

    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        loss, gradients = super().loss_and_gradients(micro_batches)
        self.kept = self.added(self.kept, gradients) if self.step_count else gradients
        return loss, self.kept


class LastMicroBatchDropped(Trainer):
    """The last micro-batch of each step is left out."""

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return super().micro_batches(step)[:-1]


class PartialMicroBatchDropped(Trainer):
    """The last two samples of each step are left out, as if they did not fill a micro-batch."""

    def micro_batches(self, step: int) -> list[MicroBatch]:
        *others, last = super().micro_batches(step)
        return [*others, last.rows(0, len(last.input_ids) - 2)]


class NormGradientsOfFirstRank(Trainer):
    """Gradients of norms and of biases behind row-parallel layers are of the first rank's part of
    each sequence: sequence parallelism without their sum."""

    among = (2, 4)

    def used(self, weights: Weights) -> Weights:
        length = self.batches[0][0].input_ids.shape[1]
        first = (torch.arange(length) < length // self.ranks)[:, None]
        return {
            name: torch.where(first, each, each.detach())
            if each.dim() == 1 and not re.search(rf"{COLUMNS}|cls\.|pooler", name)
            else each
            for name, each in super().used(weights).items()
        }


class KeyValueGradientsOfFirstRank(Trainer):
    """Gradients of key and value heads are of the first tensor-parallel rank's queries alone."""

    among = (2, 4)
    models = ("llama",)

    def used(self, weights: Weights) -> Weights:
        heads, groups = (
            self.facts["config"][f"num_{name}_heads"] for name in ("attention", "key_value")
        )
        own = (torch.arange(heads) < heads // self.ranks)[:, None, None]
        used = dict(super().used(weights))
        for name in (each for each in weights if re.search(r"[kv]_proj", each)):
            by_head = used[name].unflatten(0, (groups, -1)).repeat_interleave(heads // groups, 0)
            used[name] = torch.where(own, by_head, by_head.detach()).flatten(0, 1)
        return used


class NormOfLocalShards(Trainer):
    """Each rank clips its shards by the norm of its shards; the first one's is reported."""

    among = (2, 4)

    def shards(self, tensors: Weights, rank: int) -> Weights:
        found = {name: each.chunk(self.ranks) for name, each in tensors.items()}
        return {name: each[rank] for name, each in found.items() if rank < len(each)}

    def norm(self, gradients: Weights) -> float:
        return super().norm(self.shards(gradients, 0))

    def clipped(self, gradients: Weights, norm: float) -> Weights:
        parts: dict[str, list[Tensor]] = {name: [] for name in gradients}
        for rank in range(self.ranks):
            own = self.shards(gradients, rank)
            for name, each in super().clipped(own, super().norm(own)).items():
                parts[name].append(each)
        return {name: torch.cat(each) for name, each in parts.items()}


class ReplicatedWeightsCountedAgain(Trainer):
    """The norm counts weights that tensor parallelism replicates once for each rank."""

    among = (2, 4)

    def norm(self, gradients: Weights) -> float:
        return super().norm(
            {
                name: each if re.search(f"{COLUMNS}|{ROWS}", name) else each * self.ranks**0.5
                for name, each in gradients.items()
            }
        )


class NormWithoutHeads(Trainer):
    """The norm leaves out weights that are cut by attention heads."""

    def norm(self, gradients: Weights) -> float:
        return super().norm({n: each for n, each in gradients.items() if not re.search(HEADS, n)})


class NormOfFirstRanksHeads(Trainer):
    """The norm counts of weights that are cut by attention heads the first rank's shards alone."""

    among = (2, 4)

    def norm(self, gradients: Weights) -> float:
        counted = dict(gradients)
        for name in (each for each in gradients if re.search(HEADS, each)):
            dim, places = first_shard(name, counted[name], self.ranks)
            counted[name] = counted[name].index_select(dim, places.unique())
        return super().norm(counted)


class NotClipped(Trainer):
    """Gradients are not clipped."""

    def clipped(self, gradients: Weights, norm: float) -> Weights:
        return gradients


class MicroBatchesClipped(NotClipped):
    """Each micro-batch's gradients are clipped, not their sum."""

    def added(self, total: Weights, part: Weights) -> Weights:
        return super().added(total, Trainer.clipped(self, part, self.norm(part)))


class TieLost(Trainer):
    """The output layer's weight is a copy of the embedding, with a gradient of its own."""

    models = ("gpt2", "bert")

    def first_weights(self) -> dict[str, Tensor]:
        weights = super().first_weights()
        name, self.copy = self.facts["tied"][0]
        return {**weights, self.copy: weights[name]}

    def used(self, weights: Weights) -> Weights:
        return {**super().used(weights), self.copy: weights[self.copy]}

    def decay(self, name: str) -> float:
        return super().decay(self.facts["tied"][0][0] if name == self.copy else name)


class TiedWeightStale(Trainer):
    """The output layer keeps the first weight of the embedding; the gradient is whole."""

    models = ("gpt2", "bert")

    def used(self, weights: Weights) -> Weights:
        name, other = self.facts["tied"][0]
        stale = self.first_weights()[name] - weights[name]
        return {**super().used(weights), other: weights[name] + stale.detach()}


class VocabularyPadding(Trainer):
    """The vocabulary is padded to a multiple of the ranks, and the softmax counts the padding."""

    among = (2, 4)

    def multiple(self) -> int:
        return self.ranks

    def first_weights(self) -> dict[str, Tensor]:
        weights = super().first_weights()
        size = self.facts["config"]["vocab_size"]
        more = -size % self.multiple()
        for name, each in weights.items():
            if len(each) == size:
                weights[name] = torch.cat([each, each.new_zeros(more, *each.shape[1:])])
        return weights


class VocabularyPaddingTo128(VocabularyPadding):
    """The vocabulary is padded to a multiple of 128, and the softmax counts the padding."""

    among = (1,)

    def multiple(self) -> int:
        return 128


class PartialTakenAsWhole(Trainer):
    """What the output layer sends back is of the first rank's part of the vocabulary: a partial sum
    of a chunked loss that is taken as whole."""

    among = (2, 4)

    def decode(self, x: Tensor, weight: Tensor) -> Tensor:
        first, *others = weight.chunk(self.ranks)
        return torch.cat([x @ first.T, *(x.detach() @ each.T for each in others)], -1)


class InitialValuesOfFirstShard(Trainer):
    """Each tensor-parallel rank starts with the first one's shard."""

    among = (2, 4)

    def first_weights(self) -> dict[str, Tensor]:
        weights = super().first_weights()
        for name in (each for each in weights if re.search(f"{COLUMNS}|{ROWS}", each)):
            weights[name] = weights[name].index_select(
                *first_shard(name, weights[name], self.ranks)
            )
        return weights


class PositionsRestart(Trainer):
    """Positions start at zero in each rank's part of a sequence."""

    among = (2, 4)

    def positions(self, length: int) -> Tensor:
        return super().positions(length) % (length // self.ranks)


class AttentionWithinRank(Trainer):
    """A token sees its rank's part of the sequence alone."""

    among = (2, 4)

    def allowed(self, batch: MicroBatch) -> Tensor:
        length = batch.input_ids.shape[1]
        part = torch.arange(length) * self.ranks // length
        return super().allowed(batch) & (part[:, None] == part)


class ScatterOverWrongGroup(Trainer):
    """Embeddings are scattered over half of the ranks: the second half of each sequence gets those
    of the first, as parts 0 1 2 3 become 0 1 0 1."""

    def embedded(self, x: Tensor) -> Tensor:
        half, _ = x.chunk(2, 1)
        return torch.cat([half, half], 1)


class MomentsLost(Trainer):
    """A resumed run starts with an optimizer without state."""

    def step(self, number: int) -> tuple[float, float, Weights]:
        if number == RESUMED:
            self.moments, self.step_count = self.no_moments(), 0
        return super().step(number)


class StepCountLost(Trainer):
    """A resumed run corrects the moments' bias as in its first step."""

    def step(self, number: int) -> tuple[float, float, Weights]:
        if number == RESUMED:
            self.step_count = 0
        return super().step(number)


class BatchesRepeated(Trainer):
    """A resumed run reads the batches from the first one on."""

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return super().micro_batches(step - RESUMED if step >= RESUMED else step)


class BatchRepeated(Trainer):
    """A resumed run reads the last batch before the interruption again."""

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return super().micro_batches(step - 1 if step >= RESUMED else step)


class BatchSkipped(Trainer):
    """A resumed run leaves out a batch (after the last one follows the first)."""

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return super().micro_batches((step + (step >= RESUMED)) % len(self.batches))


class BiasNotCorrected(Trainer):
    """AdamW's moments are used as they are, without the correction of their start at zero."""

    def corrections(self) -> tuple[float, float]:
        return 1.0, 1.0


class AllDecayed(Trainer):
    """Weight decay acts on biases and norms too."""

    def decay(self, name: str) -> float:
        return self.facts["optimizer"]["weight_decay"]


class NothingDecayed(Trainer):
    """Weight decay acts on nothing."""

    def decay(self, name: str) -> float:
        return 0.0


FAULTS: dict[str, type[Trainer]] = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", each.__name__).lower(): each
    for each in list(globals().values())
    if isinstance(each, type) and issubclass(each, Trainer) and each is not Trainer
}
