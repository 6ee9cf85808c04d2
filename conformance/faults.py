"""Known faults of trainers, each a small change of the plain one: mostly of one method.

`right` is the method as it should be; the docstring is what a report says. The first argument of
`fault` names the method, `among` the numbers of ranks that the fault is between, here in one
process ((1,): it does not depend on them), `models` where it exists, and `base` is Replicas where
ranks get weights that differ. A resume follows step 3.

The fixtures have no dropout, and a trainer is given their weights. Masks and initial values that
differ by rank are random, so they have no figures; `initial_values_of_first_shard` is not random.
Faults that theory makes equal are one: a rank that reads another's samples is
`gradients_not_reduced`; gradients divided by the number of micro-batches are `gradients_over_ranks`
between two ranks, as a step has two micro-batches. Megatron-LM issue 7452: number 3 is
`local_counts_in_gradients`, 7 `scatter_over_wrong_group`, 8 `norm_of_first_ranks_heads`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from conformance.fixture import COMPARED, IGNORED, NAMES, MicroBatch, is_norm
from conformance.plain import DataRank, Trainer, Weights, scored

Batches = Sequence[MicroBatch]
Right = Callable[..., Any]
Result = tuple[float, Weights]
Step = tuple[float, float, Weights]

FAULTS: dict[str, type[Trainer]] = {}
RANKS = (2, 4)
TIED = BIASED = ("gpt2", "bert")  # models
CAUSAL = ("gpt2", "llama")
RESUMED = COMPARED[0]  # steps before the run is interrupted
# How tensor parallelism cuts weights: by columns (what a layer gives) and by rows (what it is
# given); others are whole on each rank.
QKV = r"c_attn|[qkv]_proj|query|key|value"
COLUMNS = rf"{QKV}|c_fc|gate_proj|up_proj|intermediate|wte|embed_tokens|lm_head|word_embeddings"
COLUMNS += r"|predictions\.bias"
CUT = rf"{COLUMNS}|c_proj\.weight|o_proj|down_proj|\.output\.dense\.weight"
EMBEDDINGS = r"wte|wpe|embed_tokens|_embeddings\."


def fault(
    method: str,
    among: tuple[int, ...] = (1,),
    models: tuple[str, ...] = NAMES,
    base: type[Trainer] = Trainer,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a Trainer from a function that replaces one method."""

    def add(wrong: Callable[..., Any]) -> Callable[..., Any]:
        def changed(trainer: Trainer, *arguments: Any) -> Any:
            right = getattr(super(FAULTS[wrong.__name__], trainer), method)
            return wrong(trainer, right, *arguments)

        body = {method: changed, "__doc__": wrong.__doc__, "among": among, "models": models}
        FAULTS[wrong.__name__] = type(wrong.__name__, (base,), body)
        return wrong

    return add


class Replicas(Trainer):
    """Data-parallel ranks with weights of their own, which a fault lets come apart.

    The loss is that of all ranks, the other figures are the first rank's. A rank's own gradient is
    that of its part of the loss, times the ranks: their mean is the whole gradient, as in DDP.
    """

    rank_class: type[DataRank] = DataRank

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replicas = [
            self.rank_class(self.fixture, self.dtype, self.ranks) for _ in range(self.ranks)
        ]
        for number, each in enumerate(self.replicas):
            each.rank = number
        self.weights = self.replicas[0].weights

    def reduced(self, own: list[Weights]) -> list[Weights]:
        """The gradients with which each rank updates, of each rank's own ones."""
        return [mean_over_ranks(own)] * self.ranks

    def publish(self, before: list[Weights]) -> None:
        """After the update, ranks send each other the shards that they own. before: each rank's
        weights before the update."""

    def step(self, number: int) -> Step:
        parts = [each.loss_and_gradients(each.micro_batches(number)) for each in self.replicas]
        gradients = self.reduced([scaled(own, self.ranks) for _, own in parts])
        before: list[Weights] = [dict(each.weights) for each in self.replicas]
        for each, own in zip(self.replicas, gradients, strict=True):
            each.update(each.clipped(own, each.norm(own)))
        self.publish(before)
        return sum(loss for loss, _ in parts), self.norm(gradients[0]), gradients[0]


def mean_over_ranks(ranks: Sequence[Weights]) -> Weights:
    return {name: sum(each[name] for each in ranks) / len(ranks) for name in ranks[0]}


def scaled(gradients: Weights, scale: float) -> Weights:
    return {name: each * scale for name, each in gradients.items()}


def rounded(tensor: Tensor) -> Tensor:
    """To bf16."""
    return tensor.bfloat16().to(tensor.dtype)


def all_rounded(tensors: Weights) -> dict[str, Tensor]:
    return {name: rounded(each) for name, each in tensors.items()}


def tie(t: Trainer) -> tuple[str, str]:
    """The two names of the tied weight: of the embedding and of the output layer."""
    embedding, output = t.facts["tied"][0]
    return embedding, output


# The loss and its denominators


def weights_of_means(micro_batches: Batches, groups: Sequence[Tensor]) -> list[Tensor]:
    """Token weights of a mean of means. groups: the number of each token's group, [b, s]."""
    marks = [scored(each) for each in micro_batches]
    groups = [each.expand(mark.shape) for each, mark in zip(groups, marks, strict=True)]
    every = torch.cat([each.flatten() for each in groups])
    counts = torch.bincount(every, torch.cat([each.flatten() for each in marks]))
    pairs = zip(marks, groups, strict=True)
    return [mark / counts.clamp(min=1)[group] / len(counts) for mark, group in pairs]


def data_ranks(t: Trainer, batch: MicroBatch) -> Tensor:
    b = len(batch.input_ids)
    return (torch.arange(b) * t.ranks // b)[:, None]


def context_ranks(t: Trainer, batch: MicroBatch) -> Tensor:
    s = batch.input_ids.shape[1]
    return torch.arange(s) * t.ranks // s


@fault("token_weights")
def micro_batch_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of the micro-batches' means."""
    return weights_of_means(
        micro_batches, [torch.tensor(number) for number, _ in enumerate(micro_batches)]
    )


@fault("token_weights")
def sample_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of the samples' means."""
    samples = torch.arange(sum(len(each.labels) for each in micro_batches))[:, None]
    return weights_of_means(
        micro_batches, samples.split([len(each.labels) for each in micro_batches])
    )


@fault("token_weights", RANKS)
def data_rank_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of the data-parallel ranks' means over their samples of the batch."""
    return weights_of_means(micro_batches, [data_ranks(t, each) for each in micro_batches])


# A rank of four has one sample of each micro-batch: that is sample_means.
@fault("token_weights", (2,))
def data_rank_micro_batch_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of each data-parallel rank's mean over each micro-batch."""
    pairs = enumerate(micro_batches)
    return weights_of_means(micro_batches, [data_ranks(t, each) + t.ranks * i for i, each in pairs])


@fault("token_weights", RANKS)
def context_rank_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of the context-parallel ranks' means over their parts of sequences."""
    return weights_of_means(micro_batches, [context_ranks(t, each) for each in micro_batches])


@fault("loss_and_gradients", RANKS)
def local_counts_in_gradients(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients are those of the mean of data-parallel ranks' means; the loss is right."""
    wrong = FAULTS["data_rank_means"](t.fixture, t.dtype, t.ranks)
    wrong.weights = t.weights
    return right(micro_batches)[0], wrong.loss_and_gradients(micro_batches)[1]


@fault("loss_and_gradients", RANKS)
def loss_of_first_rank(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """The loss is that of the first data-parallel rank's samples; gradients are right."""
    shares = [each.share(0, t.ranks) for each in micro_batches]
    return right(shares)[0], right(micro_batches)[1]


@fault("loss_and_gradients", RANKS)
def loss_times_ranks(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """The loss is as many times too large as there are ranks; gradients are right."""
    loss, gradients = right(micro_batches)
    return loss * t.ranks, gradients


@fault("loss_and_gradients", RANKS)
def loss_over_ranks(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """The loss is divided by the ranks once too often; gradients are right."""
    loss, gradients = right(micro_batches)
    return loss / t.ranks, gradients


@fault("loss_and_gradients")
def loss_of_last_micro_batch(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """The loss is that of the last micro-batch; gradients are right."""
    return right(micro_batches[-1:])[0], right(micro_batches)[1]


@fault("token_weights")
def positions_counted(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is divided by the number of all positions, scored or not."""
    total = sum(each.labels.numel() for each in micro_batches)
    return [scored(each) / total for each in micro_batches]


@fault("micro_batches")
def padding_scored(t: Trainer, right: Right, step: int) -> Batches:
    """Padding is scored as a token to predict."""
    return [
        replace(each, labels=torch.where(each.attention_mask > 0, each.labels, each.input_ids))
        for each in right(step)
    ]


@fault("allowed", models=("bert",))
def padding_attended(t: Trainer, right: Right, batch: MicroBatch) -> Tensor:
    """Padding is attended to."""
    return torch.ones_like(right(batch))


@fault("allowed", models=CAUSAL)
def next_token_seen(t: Trainer, right: Right, batch: MicroBatch) -> Tensor:
    """A token sees the one after it: the causal mask is off by one."""
    return batch.attention_mask.bool()[:, None] & torch.ones_like(right(batch)).tril(1)


@fault("allowed", models=CAUSAL)
def causal_mask_lost(t: Trainer, right: Right, batch: MicroBatch) -> Tensor:
    """A token sees all others: there is no causal mask."""
    return batch.attention_mask.bool()[:, None].expand_as(right(batch))


@fault("micro_batches", models=CAUSAL)
def labels_shifted_twice(t: Trainer, right: Right, step: int) -> Batches:
    """A position predicts the token after the next: labels are shifted once too often."""

    def shifted(labels: Tensor) -> Tensor:
        return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)

    return [replace(each, labels=shifted(each.labels)) for each in right(step)]


# Gradients: their scale, what is added, what is left out


@fault("loss_and_gradients")
def gradients_times_count(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients are multiplied by the number of scored tokens: summed where a mean was due."""
    loss, gradients = right(micro_batches)
    return loss, scaled(gradients, float(sum(scored(each).sum() for each in micro_batches)))


@fault("loss_and_gradients", RANKS)
def gradients_times_ranks(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients are as many times too large as there are ranks: summed where a mean was due."""
    loss, gradients = right(micro_batches)
    return loss, scaled(gradients, t.ranks)


@fault("loss_and_gradients", RANKS)
def gradients_over_ranks(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients are divided by the ranks once too often: averaged where a sum was due."""
    loss, gradients = right(micro_batches)
    return loss, scaled(gradients, 1 / t.ranks)


@fault("micro_batches", RANKS)
def gradients_not_reduced(t: Trainer, right: Right, step: int) -> Batches:
    """Loss and gradients are of the first data-parallel rank's samples alone."""
    return [each.share(0, t.ranks) for each in right(step)]


@fault("added")
def gradients_of_last_micro_batch(
    t: Trainer, right: Right, total: Weights, part: Weights
) -> Weights:
    """The last micro-batch's gradient replaces those before it; the loss is right."""
    return part


@fault("added", RANKS)
def micro_batches_reduced_again(t: Trainer, right: Right, total: Weights, part: Weights) -> Weights:
    """Ranks add up the accumulated gradients after each micro-batch, so that those before it are
    added up again."""
    return right(scaled(total, t.ranks), part)


@fault("loss_and_gradients")
def gradients_not_zeroed(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients are added to those of the steps before."""
    loss, gradients = right(micro_batches)
    t.summed = t.added(t.summed, gradients) if t.step_count else gradients
    return loss, t.summed


class LastKept(DataRank):
    """last: the gradients of the last micro-batch."""

    last: Weights

    def added(self, total: Weights, part: Weights) -> Weights:
        self.last = part
        return super().added(total, part)


class ReplicasWithLast(Replicas):
    rank_class = LastKept


@fault("reduced", RANKS, base=ReplicasWithLast)
def earlier_micro_batches_not_reduced(
    t: ReplicasWithLast, right: Right, own: list[Weights]
) -> list[Weights]:
    """The last micro-batch's gradients alone are reduced; those before it are the rank's own."""
    last = [scaled(each.last, t.ranks) for each in t.replicas]
    whole = mean_over_ranks(last)
    pairs = zip(own, last, strict=True)
    return [{n: g[n] - part[n] + whole[n] for n in g} for g, part in pairs]


def unreduced(own: list[Weights], is_own: Callable[[str], object]) -> list[Weights]:
    """The means over ranks, but of the names with is_own(name) each rank's own gradients."""
    whole = mean_over_ranks(own)
    return [{n: g[n] if is_own(n) else whole[n] for n in g} for g in own]


@fault("reduced", RANKS, base=Replicas)
def vectors_not_reduced(t: Replicas, right: Right, own: list[Weights]) -> list[Weights]:
    """Gradients of biases and norms are the rank's own."""
    return unreduced(own, lambda name: own[0][name].dim() < 2)


@fault("reduced", RANKS, base=Replicas)
def embeddings_not_reduced(t: Replicas, right: Right, own: list[Weights]) -> list[Weights]:
    """Gradients of embeddings are the rank's own."""
    return unreduced(own, re.compile(EMBEDDINGS).search)


@fault("reduced", RANKS, base=Replicas)
def parameters_outside_layers_not_reduced(
    t: Replicas, right: Right, own: list[Weights]
) -> list[Weights]:
    """Gradients of all parameters outside of the layers are the rank's own."""
    return unreduced(own, lambda name: not re.search(r"\.\d+\.", name))


@fault("loss_and_gradients", RANKS)
def replicated_gradients_times_ranks(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients of weights that tensor parallelism replicates are added up over its ranks, though
    each rank has them whole."""
    loss, gradients = right(micro_batches)
    return loss, {n: g if re.search(CUT, n) else g * t.ranks for n, g in gradients.items()}


@fault("loss_and_gradients")
def gradients_in_bf16(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients are rounded to bf16."""
    loss, gradients = right(micro_batches)
    return loss, all_rounded(gradients)


@fault("micro_batches")
def last_micro_batch_dropped(t: Trainer, right: Right, step: int) -> Batches:
    """The last micro-batch of each step is left out, or the first one is read again instead."""
    return right(step)[:-1]


@fault("micro_batches")
def partial_micro_batch_dropped(t: Trainer, right: Right, step: int) -> Batches:
    """The last two samples of each step are left out, as if they did not fill a micro-batch."""
    *others, last = right(step)
    return [*others, last.rows(0, len(last.input_ids) - 2)]


@fault("used", RANKS)
def norm_gradients_of_first_rank(t: Trainer, right: Right, weights: Weights) -> Weights:
    """Gradients of norms and row-parallel biases, but for those of BERT's heads, are of the first
    rank's part of each sequence: sequence parallelism does not add them up."""
    first = (context_ranks(t, t.batches[0][0]) == 0)[:, None]
    replicated = {n for n, w in weights.items() if w.dim() == 1}
    replicated = {n for n in replicated if not re.search(rf"{COLUMNS}|cls\.|pooler", n)}
    used = right(weights)
    return {**used, **{n: torch.where(first, used[n], used[n].detach()) for n in replicated}}


@fault("used", RANKS, ("llama",))
def key_value_gradients_of_first_rank(t: Trainer, right: Right, weights: Weights) -> Weights:
    """Gradients of key and value heads are of the first tensor-parallel rank's queries alone."""
    heads, groups = (t.facts["config"][f"num_{n}_heads"] for n in ("attention", "key_value"))
    own = (torch.arange(heads) < heads // t.ranks)[:, None, None]
    used = dict(right(weights))
    for name in (each for each in weights if re.search(r"[kv]_proj", each)):
        by_head = used[name].unflatten(0, (groups, -1)).repeat_interleave(heads // groups, 0)
        used[name] = torch.where(own, by_head, by_head.detach()).flatten(0, 1)
    return used


@fault("decode", RANKS)
def partial_taken_as_whole(t: Trainer, right: Right, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient that the output layer sends back is of the first rank's part of the vocabulary:
    a partial sum of a chunked loss is taken as whole."""
    first, *others = weight.chunk(t.ranks)
    return torch.cat([right(x, first), *(right(x.detach(), each) for each in others)], -1)


# The norm, clipping and AdamW


def first_shard(name: str, tensor: Tensor, ranks: int) -> tuple[int, Tensor]:
    """(dim, places along it): each place's counterpart in the first rank's shard."""
    conv1d = ".h." in name and tensor.dim() > 1
    dim = int(conv1d) if re.search(COLUMNS, name) else int(not conv1d)
    # Query, key and value of GPT-2 are one tensor, of which each is cut.
    parts = 3 if "c_attn" in name else 1
    length = tensor.shape[dim] // parts
    places = torch.arange(length) % -(-length // ranks)
    return dim, (torch.arange(parts)[:, None] * length + places).flatten()


@fault("step", RANKS)
def norm_of_local_shards(t: Trainer, right: Right, number: int) -> tuple[float, float, Weights]:
    """Each rank clips its shards by the norm of its shards; the first one's is reported."""
    loss, gradients = t.loss_and_gradients(t.micro_batches(number))
    shards = {name: each.chunk(t.ranks) for name, each in gradients.items()}
    norms, clipped = [], {}
    for rank in range(t.ranks):
        own = {name: each[rank] for name, each in shards.items() if rank < len(each)}
        norms.append(t.norm(own))
        for name, each in t.clipped(own, norms[-1]).items():
            clipped[name] = torch.cat([clipped[name], each]) if rank else each
    t.update(clipped)
    return loss, norms[0], gradients


@fault("norm", RANKS)
def replicated_weights_counted_again(t: Trainer, right: Right, gradients: Weights) -> float:
    """The norm counts weights that tensor parallelism replicates once for each rank."""
    whole = {n: g * t.ranks**0.5 for n, g in gradients.items() if not re.search(CUT, n)}
    return right({**gradients, **whole})


@fault("norm")
def norm_without_heads(t: Trainer, right: Right, gradients: Weights) -> float:
    """The norm leaves out query, key and value."""
    return right({n: g for n, g in gradients.items() if not re.search(QKV, n)})


@fault("norm", RANKS)
def norm_of_first_ranks_heads(t: Trainer, right: Right, gradients: Weights) -> float:
    """The norm counts the first rank's shards of query, key and value, and no others of them."""
    counted = dict(gradients)
    for name in (each for each in gradients if re.search(QKV, each)):
        dim, places = first_shard(name, counted[name], t.ranks)
        counted[name] = counted[name].index_select(dim, places.unique())
    return right(counted)


@fault("norm", RANKS)
def norm_times_ranks(t: Trainer, right: Right, gradients: Weights) -> float:
    """The norm is as many times too large as there are ranks: it is taken of sums, of which means
    are made later."""
    return right(gradients) * t.ranks


# Between four ranks that is norm_times_ranks between two.
@fault("norm", (2,))
def norm_of_replicas(t: Trainer, right: Right, gradients: Weights) -> float:
    """Squares of the norm are added up over ranks that have the same gradients."""
    return right(gradients) * t.ranks**0.5


@fault("norm", models=TIED)
def norm_counts_tied_weight_twice(t: Trainer, right: Right, gradients: Weights) -> float:
    """The norm counts the tied weight once for each use."""
    return right({**gradients, "again": gradients[tie(t)[0]]})


@fault("norm")
def norm_is_sum_of_norms(t: Trainer, right: Right, gradients: Weights) -> float:
    """The norm is the sum of the parameters' norms."""
    return sum(right({name: each}) for name, each in gradients.items())


def clipped_in_parts(
    t: Trainer, right: Right, gradients: Weights, part_of: Callable[[str], object]
) -> Weights:
    """Gradients of names with the same part_of(name) are clipped together."""
    parts: dict[object, dict[str, Tensor]] = {}
    for name, each in gradients.items():
        parts.setdefault(part_of(name), {})[name] = each
    clipped: dict[str, Tensor] = {}
    for part in parts.values():
        clipped |= right(part, t.norm(part))
    return clipped


@fault("clipped")
def clipped_by_group(t: Trainer, right: Right, gradients: Weights, norm: float) -> Weights:
    """Each parameter group, with weight decay and without, is clipped by its own norm."""
    return clipped_in_parts(t, right, gradients, t.decay)


# No parameter of the other models has a norm above 1: that is not_clipped.
@fault("clipped", models=("bert",))
def clipped_by_parameter(t: Trainer, right: Right, gradients: Weights, norm: float) -> Weights:
    """Each parameter is clipped by its own norm."""
    return clipped_in_parts(t, right, gradients, lambda name: name)


@fault("clipped")
def clipped_twice(t: Trainer, right: Right, gradients: Weights, norm: float) -> Weights:
    """Gradients are scaled by the clipping factor twice."""
    return right(right(gradients, norm), norm)


@fault("added")
def micro_batches_clipped(t: Trainer, right: Right, total: Weights, part: Weights) -> Weights:
    """Each micro-batch's gradient is clipped before it is added."""
    return right(total, t.clipped(part, t.norm(part)))


@fault("reduced", RANKS, base=Replicas)
def clipped_before_reduction(t: Replicas, right: Right, own: list[Weights]) -> list[Weights]:
    """Each data-parallel rank clips its own gradients by their norm, before they are reduced."""
    return right([t.clipped(each, t.norm(each)) for each in own])


@fault("clipped")
def not_clipped(t: Trainer, right: Right, gradients: Weights, norm: float) -> Weights:
    """Gradients are not clipped."""
    return gradients


@fault("corrections")
def bias_not_corrected(t: Trainer, right: Right) -> tuple[float, float]:
    """AdamW's moments are used as they are, without the correction of their start at zero."""
    return 1.0, 1.0


@fault("corrections")
def steps_counted_by_micro_batch(t: Trainer, right: Right) -> tuple[float, float]:
    """AdamW counts micro-batches as steps when it corrects its moments."""
    beta1, beta2 = t.facts["optimizer"]["betas"]
    count = t.step_count * len(t.batches[0])
    return 1 - beta1**count, 1 - beta2**count


@fault("update")
def gradients_of_step_before(t: Trainer, right: Right, gradients: Weights) -> None:
    """An update has the gradients of the step before; the first one has none."""
    before = t.before if t.step_count else scaled(gradients, 0)
    t.before = gradients
    right(before)


@fault("update")
def first_update_lost(t: Trainer, right: Right, gradients: Weights) -> None:
    """The first step moves no weight, as with a learning rate that warms up from zero."""
    first = dict(t.weights)
    right(gradients)
    t.weights = first if t.step_count == 1 else t.weights


@fault("update")
def weights_in_bf16(t: Trainer, right: Right, gradients: Weights) -> None:
    """Weights are rounded to bf16 after each update: there are no master weights."""
    right(gradients)
    t.weights = all_rounded(t.weights)


@fault("update")
def moments_in_bf16(t: Trainer, right: Right, gradients: Weights) -> None:
    """AdamW's moments are rounded to bf16 after each update."""
    right(gradients)
    t.moments = {name: (rounded(m), rounded(v)) for name, (m, v) in t.moments.items()}


class DecayInGradient(Trainer):
    """Weight decay is a part of the gradient, as Adam with an L2 penalty has it."""

    def update(self, gradients: Weights) -> None:
        decays = {name: super(DecayInGradient, self).decay(name) for name in gradients}
        super().update({n: g + decays[n] * self.weights[n] for n, g in gradients.items()})

    def decay(self, name: str) -> float:
        return 0.0


FAULTS["decay_in_gradient"] = DecayInGradient


@fault("decay")
def decay_without_rate(t: Trainer, right: Right, name: str) -> float:
    """Weight decay is not multiplied by the learning rate."""
    return right(name) / t.facts["optimizer"]["lr"]


@fault("decay")
def embeddings_not_decayed(t: Trainer, right: Right, name: str) -> float:
    """Weight decay leaves out embeddings."""
    return 0.0 if re.search(EMBEDDINGS, name) else right(name)


@fault("decay")
def all_decayed(t: Trainer, right: Right, name: str) -> float:
    """Weight decay acts on biases and norms too."""
    return t.facts["optimizer"]["weight_decay"]


@fault("decay", models=BIASED)  # without biases that is all_decayed
def norms_decayed(t: Trainer, right: Right, name: str) -> float:
    """Weight decay acts on the weights of norms too."""
    decays = is_norm(name) and name.endswith("weight")
    return t.facts["optimizer"]["weight_decay"] if decays else right(name)


@fault("decay")
def nothing_decayed(t: Trainer, right: Right, name: str) -> float:
    """Weight decay acts on nothing."""
    return 0.0


# Weights: ties, padding, initial values


class TieLost(Trainer):
    """The output layer's weight is a copy of the embedding, with a gradient of its own."""

    models = TIED

    def first_weights(self) -> dict[str, Tensor]:
        weights, (name, copy) = super().first_weights(), tie(self)
        return {**weights, copy: weights[name]}

    def used(self, weights: Weights) -> Weights:
        return {**super().used(weights), **weights}

    def decay(self, name: str) -> float:
        tied, copy = tie(self)
        return super().decay(tied if name == copy else name)


class TieLostOnResume(TieLost):
    """In a resumed run the output layer's weight is a copy of the embedding, with a gradient and
    moments of its own."""

    def first_weights(self) -> dict[str, Tensor]:
        return Trainer.first_weights(self)

    def step(self, number: int) -> Step:
        if number == RESUMED:
            name, copy = tie(self)
            self.weights[copy], self.moments[copy] = self.weights[name], self.moments[name]
        return super().step(number)


FAULTS |= {"tie_lost": TieLost, "tie_lost_on_resume": TieLostOnResume}


@fault("used", models=TIED)
def tied_gradient_of_output_alone(t: Trainer, right: Right, weights: Weights) -> Weights:
    """The gradient of the tied weight lacks its use as the embedding."""
    name, _ = tie(t)
    return {**right(weights), name: weights[name].detach()}


@fault("used", models=TIED)
def tied_gradient_of_embedding_alone(t: Trainer, right: Right, weights: Weights) -> Weights:
    """The gradient of the tied weight lacks its use as the output layer."""
    name, other = tie(t)
    return {**right(weights), other: weights[name].detach()}


@fault("loss_and_gradients", models=TIED)
def tied_gradient_doubled(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """The gradient of the tied weight is added twice."""
    loss, gradients = right(micro_batches)
    name, _ = tie(t)
    return loss, {**gradients, name: gradients[name] * 2}


@fault("update", models=TIED)
def tied_weight_updated_twice(t: Trainer, right: Right, gradients: Weights) -> None:
    """The optimizer has the tied weight under both names, and updates it twice."""
    name, _ = tie(t)
    right(gradients)
    t.step_count -= 1
    right({name: gradients[name]})


class Untied(DataRank):
    """The tied weight's gradient as the output layer is apart, under that layer's name."""

    def loss_and_gradients(self, micro_batches: Batches) -> Result:
        name, other = tie(self)
        self.weights[other] = self.weights[name]
        result = super().loss_and_gradients(micro_batches)
        del self.weights[other]
        return result

    def used(self, weights: Weights) -> Weights:
        return {**super().used(weights), **weights}


class TiedReplicas(Replicas):
    rank_class = Untied

    def one_use_unreduced(self, own: list[Weights], use: str) -> list[Weights]:
        """Means over ranks, but of one use of the tied weight, by its name, own gradients."""
        name, other = tie(self)
        ranks = unreduced(own, use.__eq__)
        sums = ({**each, name: each[name] + each[other]} for each in ranks)
        return [{n: g for n, g in each.items() if n != other} for each in sums]


@fault("reduced", RANKS, TIED, TiedReplicas)
def output_use_of_tie_not_reduced(
    t: TiedReplicas, right: Right, own: list[Weights]
) -> list[Weights]:
    """The tied weight's gradient as the output layer is the rank's own; that as the embedding is
    reduced."""
    return t.one_use_unreduced(own, tie(t)[1])


@fault("reduced", RANKS, TIED, TiedReplicas)
def embedding_use_of_tie_not_reduced(
    t: TiedReplicas, right: Right, own: list[Weights]
) -> list[Weights]:
    """The tied weight's gradient as the embedding is the rank's own; that as the output layer is
    reduced."""
    return t.one_use_unreduced(own, tie(t)[0])


@fault("used", models=TIED)
def tied_weight_stale(t: Trainer, right: Right, weights: Weights) -> Weights:
    """The output layer keeps the first weight of the embedding; the gradient is whole."""
    name, other = tie(t)
    stale = t.first_weights()[name] - weights[name]
    return {**right(weights), other: weights[name] + stale.detach()}


@fault("used", RANKS, TIED)
def part_of_tied_weight_stale(t: Trainer, right: Right, weights: Weights) -> Weights:
    """The embedding keeps its first values in the shards of all ranks but the first; the output
    layer has the new ones, and the gradient is whole."""
    name, _ = tie(t)
    now = weights[name]
    shard = -(-len(now) // t.ranks)
    stale = now + (t.first_weights()[name] - now).detach()
    return {**right(weights), name: torch.cat([now[:shard], stale[shard:]])}


@fault("used", RANKS, ("gpt2",))
def fused_heads_cut_across(t: Trainer, right: Right, weights: Weights) -> Weights:
    """A tensor-parallel rank takes a contiguous part of the fused columns of query, key and value,
    and reads it as a query, a key and a value of its own."""
    used = dict(right(weights))
    for name in (each for each in weights if "c_attn" in each):
        columns = torch.arange(used[name].shape[-1]).view(t.ranks, 3, -1).transpose(0, 1)
        used[name] = used[name].index_select(-1, columns.flatten())
    return used


@fault("used", RANKS, BIASED)
def row_bias_added_by_each_rank(t: Trainer, right: Right, weights: Weights) -> Weights:
    """Each tensor-parallel rank adds the bias of a row-parallel layer before their sum."""
    names = (n for n in weights if re.search(r"c_proj\.bias|output\.dense\.bias", n))
    return {
        **right(weights),
        **{n: weights[n] + (t.ranks - 1) * weights[n].detach() for n in names},
    }


def padded(weights: Weights, size: int, multiple: int) -> Weights:
    more = -size % multiple
    return {
        n: torch.cat([w, w.new_zeros(more, *w.shape[1:])]) if len(w) == size else w
        for n, w in weights.items()
    }


@fault("first_weights", RANKS)
def vocabulary_padding(t: Trainer, right: Right) -> Weights:
    """The vocabulary is padded to a multiple of the ranks, and the softmax counts the padding."""
    return padded(right(), t.facts["config"]["vocab_size"], t.ranks)


@fault("first_weights")
def vocabulary_padding_to_128(t: Trainer, right: Right) -> Weights:
    """The vocabulary is padded to a multiple of 128, and the softmax counts the padding."""
    return padded(right(), t.facts["config"]["vocab_size"], 128)


@fault("first_weights", RANKS)
def initial_values_of_first_shard(t: Trainer, right: Right) -> Weights:
    """Each tensor-parallel rank starts with the first one's shard."""
    return {
        n: w.index_select(*first_shard(n, w, t.ranks)) if re.search(CUT, n) else w
        for n, w in right().items()
    }


def of_owners(t: Replicas, sent: Callable[[int, int], Weights]) -> None:
    """Each rank keeps its own shards; another owner's are those of sent(rank, owner)."""
    for rank, each in enumerate(t.replicas):
        for name, weight in each.weights.items():
            shards = list(weight.chunk(t.ranks))
            for owner in range(len(shards)):
                if owner != rank:
                    shards[owner] = sent(rank, owner)[name].chunk(t.ranks)[owner]
            each.weights[name] = torch.cat(shards)


@fault("publish", RANKS, base=Replicas)
def weights_sent_before_update(t: Replicas, right: Right, before: list[Weights]) -> None:
    """Owners of ZeRO's shards send them before the update: other ranks are a step behind."""
    of_owners(t, lambda rank, owner: before[owner])


@fault("publish", RANKS, base=Replicas)
def shards_never_sent(t: Replicas, right: Right, before: list[Weights]) -> None:
    """Owners of ZeRO's shards do not send them: each rank has the first values of the others'."""
    of_owners(t, lambda rank, owner: before[rank])


# A cut sequence


@fault("positions", RANKS)
def positions_restart(t: Trainer, right: Right, length: int) -> Tensor:
    """Positions start at zero in each rank's part of a sequence."""
    return right(length) % (length // t.ranks)


@fault("allowed", RANKS)
def attention_within_rank(t: Trainer, right: Right, batch: MicroBatch) -> Tensor:
    """A token sees its rank's part of the sequence alone."""
    part = context_ranks(t, batch)
    return right(batch) & (part[:, None] == part)


@fault("embedded")
def scatter_over_wrong_group(t: Trainer, right: Right, x: Tensor) -> Tensor:
    """Embeddings are scattered over half of the ranks: the second half of each sequence gets those
    of the first, as parts 0 1 2 3 become 0 1 0 1."""
    half, _ = x.chunk(2, 1)
    return torch.cat([half, half], 1)


# Resuming


def on_resume(
    among: tuple[int, ...] = (1,), base: type[Trainer] = Trainer
) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Makes a Trainer from a function that changes its state before the first step of a resumed
    run."""

    def add(wrong: Callable[..., None]) -> Callable[..., Any]:
        @wraps(wrong)
        def step(t: Trainer, right: Right, number: int) -> Any:
            if number == RESUMED:
                wrong(t)
            return right(number)

        return fault("step", among, base=base)(step)

    return add


@on_resume()
def moments_lost(t: Trainer) -> None:
    """A resumed run starts with an optimizer without state."""
    t.moments, t.step_count = t.no_moments(), 0


@on_resume(RANKS, Replicas)
def moments_of_other_ranks_lost(t: Replicas) -> None:
    """A resumed run restores the optimizer on the first data-parallel rank alone."""
    for each in t.replicas[1:]:
        each.moments, each.step_count = each.no_moments(), 0


@on_resume()
def first_moments_lost(t: Trainer) -> None:
    """A resumed run starts with first moments of zero."""
    t.moments = {name: (torch.zeros_like(m), v) for name, (m, v) in t.moments.items()}


@on_resume()
def second_moments_lost(t: Trainer) -> None:
    """A resumed run starts with second moments of zero."""
    t.moments = {name: (m, torch.zeros_like(v)) for name, (m, v) in t.moments.items()}


@on_resume()
def step_count_lost(t: Trainer) -> None:
    """A resumed run counts steps from zero again when it corrects the moments' bias."""
    t.step_count = 0


@on_resume()
def weights_lost(t: Trainer) -> None:
    """A resumed run starts from the first weights, with the optimizer's state."""
    t.weights = t.first_weights()


@on_resume()
def nothing_resumed(t: Trainer) -> None:
    """A resumed run starts from the first weights, without the optimizer's state."""
    t.weights, t.moments, t.step_count = t.first_weights(), t.no_moments(), 0


@on_resume()
def weights_resumed_in_bf16(t: Trainer) -> None:
    """A resumed run starts from weights that are rounded to bf16."""
    t.weights = all_rounded(t.weights)


@fault("micro_batches")
def batches_repeated(t: Trainer, right: Right, step: int) -> Batches:
    """A resumed run reads the batches from the first one on."""
    return right(step - RESUMED if step >= RESUMED else step)


@fault("micro_batches")
def batch_repeated(t: Trainer, right: Right, step: int) -> Batches:
    """A resumed run reads the last batch before the interruption again."""
    return right(step - 1 if step >= RESUMED else step)


@fault("micro_batches")
def batch_skipped(t: Trainer, right: Right, step: int) -> Batches:
    """A resumed run leaves out a batch (the first one follows the last)."""
    return right((step + (step >= RESUMED)) % len(t.batches))
