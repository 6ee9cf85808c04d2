"""Known faults of trainers, each a small change of the plain one: mostly of one method.

`right` is the method as it should be; the docstring is what a report says. The first argument of
`fault` names the method, `among` the numbers of ranks that the fault is between, here in one
process ((1,): it does not depend on them), `models` where it exists. The resumed run is that after
step 3.

The fixtures have no dropout, and a trainer is given their weights; masks and initial values that
differ by rank are random, so no figure would name them (`initial_values_of_first_shard` has one).
Faults that theory makes equal are one: a rank that reads another's samples is
`gradients_not_reduced`; gradients divided by the number of micro-batches are `gradients_over_ranks`
of two. Megatron-LM issue 7452: number 3 is `local_counts_in_gradients`, 7
`scatter_over_wrong_group`, 8 `norm_of_first_ranks_heads`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.fixture import COMPARED, NAMES, MicroBatch
from conformance.plain import Trainer, Weights, scored

Batches = Sequence[MicroBatch]
Right = Callable[..., Any]
Result = tuple[float, Weights]

FAULTS: dict[str, type[Trainer]] = {}
RANKS = (2, 4)
TIED = ("gpt2", "bert")  # models
RESUMED = COMPARED[0]  # steps before the run is interrupted
# How tensor parallelism cuts weights: by columns (what a layer gives) and by rows (what it is
# given); others are whole on each rank.
HEADS = r"c_attn|[qkv]_proj|query|key|value"
COLUMNS = rf"{HEADS}|c_fc|gate_proj|up_proj|intermediate|wte|embed_tokens|lm_head|word_emb|ns\.bias"
CUT = rf"{COLUMNS}|c_proj\.weight|o_proj|down_proj|\.output\.dense\.weight"


def fault(
    method: str, among: tuple[int, ...] = (1,), models: tuple[str, ...] = NAMES
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a Trainer from a function that replaces one method."""

    def add(wrong: Callable[..., Any]) -> Callable[..., Any]:
        def changed(trainer: Trainer, *arguments: Any) -> Any:
            right = getattr(super(FAULTS[wrong.__name__], trainer), method)
            return wrong(trainer, right, *arguments)

        body = {method: changed, "__doc__": wrong.__doc__, "among": among, "models": models}
        FAULTS[wrong.__name__] = type(wrong.__name__, (Trainer,), body)
        return wrong

    return add


# The loss and its denominators


def means(micro_batches: Batches, groups: Sequence[Tensor]) -> list[Tensor]:
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
    return means(micro_batches, [torch.tensor(number) for number, _ in enumerate(micro_batches)])


@fault("token_weights")
def sample_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of the samples' means."""
    samples = torch.arange(sum(len(each.labels) for each in micro_batches))[:, None]
    return means(micro_batches, samples.split([len(each.labels) for each in micro_batches]))


@fault("token_weights", RANKS)
def data_rank_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of the data-parallel ranks' means over their samples of the batch."""
    return means(micro_batches, [data_ranks(t, each) for each in micro_batches])


# A rank of four has one sample of each micro-batch: that is sample_means.
@fault("token_weights", (2,))
def data_rank_micro_batch_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of each data-parallel rank's mean over each micro-batch."""
    pairs = enumerate(micro_batches)
    return means(micro_batches, [data_ranks(t, each) + t.ranks * i for i, each in pairs])


@fault("token_weights", RANKS)
def context_rank_means(t: Trainer, right: Right, micro_batches: Batches) -> list[Tensor]:
    """The loss is the mean of the context-parallel ranks' means over their parts of sequences."""
    return means(micro_batches, [context_ranks(t, each) for each in micro_batches])


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


# Gradients: their scale, what is added, what is left out


def scaled(gradients: Weights, scale: float) -> Weights:
    return {name: each * scale for name, each in gradients.items()}


@fault("loss_and_gradients")
def gradients_times_count(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients are of the sum over tokens, not of their mean."""
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


@fault("loss_and_gradients")
def gradients_not_zeroed(t: Trainer, right: Right, micro_batches: Batches) -> Result:
    """Gradients are added to those of the steps before."""
    loss, gradients = right(micro_batches)
    t.kept = t.added(t.kept, gradients) if t.step_count else gradients
    return loss, t.kept


@fault("micro_batches")
def last_micro_batch_dropped(t: Trainer, right: Right, step: int) -> Batches:
    """The last micro-batch of each step is left out."""
    return right(step)[:-1]


@fault("micro_batches")
def partial_micro_batch_dropped(t: Trainer, right: Right, step: int) -> Batches:
    """The last two samples of each step are left out, as if they did not fill a micro-batch."""
    *others, last = right(step)
    return [*others, last.rows(0, len(last.input_ids) - 2)]


@fault("used", RANKS)
def norm_gradients_of_first_rank(t: Trainer, right: Right, weights: Weights) -> Weights:
    """Gradients of norms and of biases after row-parallel layers are of the first rank's part of
    each sequence: sequence parallelism without their sum."""
    first = (context_ranks(t, t.batches[0][0]) == 0)[:, None]
    whole = {n for n, w in weights.items() if w.dim() == 1}
    whole = {n for n in whole if not re.search(rf"{COLUMNS}|cls\.|pooler", n)}
    used = right(weights)
    return {**used, **{n: torch.where(first, used[n], used[n].detach()) for n in whole}}


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
    """The norm leaves out weights that are cut by attention heads."""
    return right({n: g for n, g in gradients.items() if not re.search(HEADS, n)})


@fault("norm", RANKS)
def norm_of_first_ranks_heads(t: Trainer, right: Right, gradients: Weights) -> float:
    """The norm counts of weights that are cut by attention heads the first rank's shards alone."""
    counted = dict(gradients)
    for name in (each for each in gradients if re.search(HEADS, each)):
        dim, places = first_shard(name, counted[name], t.ranks)
        counted[name] = counted[name].index_select(dim, places.unique())
    return right(counted)


@fault("clipped")
def not_clipped(t: Trainer, right: Right, gradients: Weights, norm: float) -> Weights:
    """Gradients are not clipped."""
    return gradients


@fault("corrections")
def bias_not_corrected(t: Trainer, right: Right) -> tuple[float, float]:
    """AdamW's moments are used as they are, without the correction of their start at zero."""
    return 1.0, 1.0


@fault("decay")
def all_decayed(t: Trainer, right: Right, name: str) -> float:
    """Weight decay acts on biases and norms too."""
    return t.facts["optimizer"]["weight_decay"]


@fault("decay")
def nothing_decayed(t: Trainer, right: Right, name: str) -> float:
    """Weight decay acts on nothing."""
    return 0.0


# Weights: ties, padding, initial values


class TieLost(Trainer):
    """The output layer's weight is a copy of the embedding, with a gradient of its own."""

    models = TIED

    def first_weights(self) -> dict[str, Tensor]:
        weights = super().first_weights()
        name, self.copy = self.facts["tied"][0]
        return {**weights, self.copy: weights[name]}

    def used(self, weights: Weights) -> Weights:
        return {**super().used(weights), self.copy: weights[self.copy]}

    def decay(self, name: str) -> float:
        return super().decay(self.facts["tied"][0][0] if name == self.copy else name)


FAULTS["tie_lost"] = TieLost


@fault("used", models=TIED)
def tied_weight_stale(t: Trainer, right: Right, weights: Weights) -> Weights:
    """The output layer keeps the first weight of the embedding; the gradient is whole."""
    name, other = t.facts["tied"][0]
    stale = t.first_weights()[name] - weights[name]
    return {**right(weights), other: weights[name] + stale.detach()}


@fault("used", RANKS, TIED)
def part_of_tied_weight_stale(t: Trainer, right: Right, weights: Weights) -> Weights:
    """The embedding keeps its first values in the shards of all ranks but the first; the output
    layer has the new ones, and the gradient is whole."""
    name, _ = t.facts["tied"][0]
    now = weights[name]
    shard = -(-len(now) // t.ranks)
    stale = now + (t.first_weights()[name] - now).detach()
    return {**right(weights), name: torch.cat([now[:shard], stale[shard:]])}


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


@fault("step")
def moments_lost(t: Trainer, right: Right, number: int) -> tuple[float, float, Weights]:
    """A resumed run starts with an optimizer without state."""
    if number == RESUMED:
        t.moments, t.step_count = t.no_moments(), 0
    return right(number)


@fault("step")
def step_count_lost(t: Trainer, right: Right, number: int) -> tuple[float, float, Weights]:
    """A resumed run corrects the moments' bias as in its first step."""
    t.step_count = 0 if number == RESUMED else t.step_count
    return right(number)


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
    """A resumed run leaves out a batch (after the last one follows the first)."""
    return right((step + (step >= RESUMED)) % len(t.batches))
