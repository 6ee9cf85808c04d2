"""Every layout computes what one process computes, and divides the work (promise 1)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.llama import Llama
from megatron.parallel import buckets, dropout, layers, layers_2d, layers_3d, planned
from megatron.parallel.bucket import Bucket
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import copy_to, gather_with_gradient, reduce_from
from megatron.parallel.cross_entropy import HeadAxes, linear_cross_entropy
from megatron.parallel.layers import (
    AttentionCore,
    ColumnParallelLinear,
    LayerNorm,
    PositionEmbedding,
    RowParallelLinear,
    linear,
)
from megatron.parallel.layers_2d import LayerNorm2D, Linear2D, Place
from megatron.parallel.layers_llama import GroupedQueryLinear, RMSNorm
from megatron.parallel.mesh import Axis, Mesh, serial_mesh
from megatron.parallel.pipeline import PipelinePlan
from megatron.parallel.planned import ColumnLinear, Entrance, SummedParameters
from megatron.parallel.sharding import ShardedModule, ShardingSpec
from megatron.train.executor import Executor, Messages
from tests.dist import Pool
from tests.layouts.cover import FACTORS, OF_LLAMA, UNMODIFIED, case_of, cover, every_row
from tests.layouts.matrix import (
    GLOBAL_BATCH,
    Case,
    alone,
    run,
    run_cases,
    shape,
    undivided,
)
from tools.layouts.layout import Layout, parse_layout

AT_ONCE = 8  # cases of a call to the pool
# By the number of ranks: where checkpoints are loaded; each at two of them.
OTHERS = {
    2: (
        *("serial", "pipeline=2", "data=2,zero=3"),
        *("data=2", "tensor=2,sequence", "data=2,zero=1"),
    ),
    3: ("serial", "data=3,zero=3", "data=3", "data=3,zero=2"),
    4: (
        *("tensor=2,data=2", "tensor=2,pipeline=2", "tensor=2,data=2,zero=3"),
        *("serial", "tensor=4,sequence", "data=4,zero=2"),
        *("tensor=4:2d", "data=2,pipeline=2"),
    ),
    8: (
        *("serial", "tensor=4,data=2", "tensor=8:3d", "tensor=4:2d,data=2,zero=3"),
        *("tensor=8:2.5d:2", "tensor=2,data=2,pipeline=2"),
    ),
}
MODELS = FACTORS["model"] + OF_LLAMA["model"]
THEIRS = tuple(dict.fromkeys(case.model for case in UNMODIFIED))
Group = tuple[Case, ...]


def ranks(case: Case) -> int:
    return parse_layout(case.layout).ranks


@cache
def groups(is_full: bool) -> dict[Case, Group]:
    """Of each case those that run in the same call."""
    cases = [*map(case_of, every_row() if is_full else cover()), *UNMODIFIED]
    cases.sort(key=ranks)
    found: dict[Case, Group] = {}
    for _, each in groupby(cases, ranks):
        same = list(each)
        for start in range(0, len(same), AT_ONCE):
            group = tuple(same[start : start + AT_ONCE])
            found |= dict.fromkeys(group, group)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        if metafunc.config.getoption("--device") == "cuda" and not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: there is no GPU here; --device cpu works")
        cases = groups(metafunc.config.getoption("--full-matrix"))
        metafunc.parametrize("case", cases, ids=lambda case: case.name.replace(" ", "-"))


def run_group(
    pool: Pool, group: Group, device: str, fault: str | None = None
) -> dict[Case, set[str]]:
    """What is wrong with each case, on any rank."""
    others = [] if fault else [parse_layout(name) for name in OTHERS[ranks(group[0])]]
    with TemporaryDirectory() as folder:
        arguments = (fault, group, others, Path(folder), device)
        of_ranks = pool.run(ranks(group[0]), with_fault, *arguments)
    return {case: {each for of_rank in of_ranks for each in of_rank[case]} for case in group}


@cache
def outcomes(pool: Pool, group: Group, device: str) -> dict[Case, set[str]] | Exception:
    """A failure, which is every case's of the group, is told at once and not met again."""
    try:
        return run_group(pool, group, device)
    except Exception as error:
        return error


def test_it_equals_one_process_and_takes_what_the_formulas_say(
    gloo: Pool, request: pytest.FixtureRequest, case: Case
) -> None:
    group = groups(request.config.getoption("--full-matrix"))[case]
    wrong = outcomes(gloo, group, request.config.getoption("--device"))
    if isinstance(wrong, Exception):
        raise wrong
    assert not wrong[case]


@pytest.mark.parametrize(
    ("model", "option"),
    [
        *product(MODELS, FACTORS["recomputation"]),
        *product(THEIRS, ("", "full")),
    ],
)
def test_one_process_takes_what_the_formulas_say(model: str, option: str) -> None:
    case = Case("serial", model, frozenset(filter(None, [option])))
    found = run(case, Layout(), serial_mesh(), torch.float64)
    cpu = torch.device("cpu")
    assert not list(undivided(found.counts, shape(case, cpu), on_cpu=True))


def test_the_cases_are_as_uneven_as_they_are_meant_to_be() -> None:
    plain, dropped = (Case("serial", "gpt2", frozenset(each)) for each in ([], ["dropout"]))
    for model in MODELS:
        counted = Case("serial", model).draw(GLOBAL_BATCH).loss_mask.sum(axis=1)
        assert len({*counted}) > 1, "a mean of means would pass"
    one, other = (alone(case, torch.device("cpu")) for case in (plain, dropped))
    assert abs(one.terms[0]["loss"] - other.terms[0]["loss"]) > 1e-3
    norm = torch.nn.utils.get_total_norm(one.gradients.values()).item()
    assert one.norms[0] == pytest.approx(norm, rel=1e-12)


def mean_instead_of_sum(y: Tensor, axis: Axis, *stream: Axis) -> Tensor:
    return reduce_from(y, axis, *stream) / axis.size


def exchanged(layout: Layout, device: torch.device) -> Mesh:
    mesh = make_mesh(layout, device)
    return replace(mesh, loss=mesh.tensor)


def without_copies(layout: Layout, device: torch.device) -> Mesh:
    return replace(make_mesh(layout, device), replicas=Axis("replicas"))


make_mesh = Layout.mesh
add_parameter = ShardedModule.add_parameter


def without_stream(kind: type[ShardedModule]) -> Any:
    def add(module: ShardedModule, *arguments: Any, **fields: Any) -> None:
        if isinstance(module, kind):
            fields.pop("partial", None)
        add_parameter(module, *arguments, **fields)

    return add


def first_rows(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size)[0]


def with_whole_weight(layer: ColumnParallelLinear, x: Tensor) -> Tensor:
    """The same value by as much work as one process has."""
    axis = layer.mesh.tensor
    dim = layer.weight.dim() - 2
    weight, bias = (gather_with_gradient(each, dim, axis) for each in (layer.weight, layer.bias))
    y = F.linear(copy_to(x, axis), weight.flatten(0, -2), bias.flatten())
    own = y.view(len(x), *bias.shape).chunk(axis.size, -1)[axis.rank]
    return own.flatten(1)


def swapped(mesh: Mesh) -> Place:
    """Weights cut along in by what cuts out, and along out by what cuts in."""
    place = outside(mesh)
    return replace(place, inputs=(place.outputs,), outputs=place.inputs[0])


def first_of_columns(spec: ShardingSpec, *axes: Axis) -> bool:
    return all(axis.rank == 0 for axis in spec.copied_over(*axes) if axis.name != "row")


def with_whole_matrices(layer: Linear2D, x: Tensor) -> Tensor:
    """As with_whole_weight, of a grid."""
    rows, columns = layer.mesh.tokens, layer.mesh.hidden
    dim, bias = layer.weight.dim() - 2, layer.bias
    weight = copy_to(gather_with_gradient(layer.weight, dim + 1, rows), rows)
    weight = gather_with_gradient(weight, dim, columns)
    x = copy_to(gather_with_gradient(x, 1, columns), columns)
    y = F.linear(x, weight.flatten(0, -2))
    own = y.view(len(x), *weight.shape[:-1]).chunk(columns.size, -1)[columns.rank]
    return (own if bias is None else own + bias).flatten(1)


def of_all_heads(layer: GroupedQueryLinear, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the keys and values of every query head on every rank."""
    if (rows := layer.rows) is None:
        return run_grouped_query(layer, x)
    layer.rows = slice(None)
    q, *of_keys = run_grouped_query(layer, x)
    layer.rows = rows
    k, v = (each[:, rows] for each in of_keys)
    return q, k, v


def of_own_rows(model: Llama, batch: Any) -> tuple[Tensor, Tensor]:
    """Under sequence parallelism, positions that begin with those of this rank's rows."""
    stream = model.final_norm.mesh.stream
    first = stream.rank * batch.positions.shape[1] // stream.size
    return turns(model, replace(batch, positions=batch.positions.roll(first, 1)))


def of_next_query(core: AttentionCore, *arguments: Any) -> Tensor:
    *arguments, of_query = arguments
    return run_core(core, *arguments, None if of_query is None else of_query.roll(1))


def within_stages(bucket: Bucket, *, is_of_stages: bool) -> None:
    if not is_of_stages:
        add_up(bucket, is_of_stages=False)


def of_next_part(bucket: Bucket, *arguments: Any, **settings: Any) -> None:
    make_bucket(bucket, *arguments, **settings)
    share = bucket.size // bucket.shared.size
    start = (bucket.shared.rank + 1) % bucket.shared.size * share
    bucket.part = slice(start, start + share)


def reduce_twice(bucket: Bucket) -> None:
    reduce(bucket)
    reduce(bucket)


def forget(bucket: Bucket) -> None:
    """The sum of the micro-batches before."""
    bucket.wait()
    bucket.has_sum = False
    reduce(bucket)


def of_first_step(bucket: Bucket) -> None:
    """Whatever the masters are now."""
    gather(bucket)
    if bucket.weights is not None:
        bucket.weights.copy_(vars(bucket).setdefault("first", bucket.weights.clone()))


def mean_of_micro_batches(executor: Executor, x: Tensor, batch: Any) -> Tensor:
    return run_loss(executor, x, batch) / len(executor.batches)


def twice(executor: Executor, *arguments: Any) -> Any:
    with torch.no_grad():
        run_layers(executor, *arguments)
    return run_layers(executor, *arguments)


def one_late(direction: str) -> Any:
    """Messages of this direction have the values of the micro-batch before."""

    def put_last(messages: Messages, *key: Any) -> None:
        *key, tensors = key
        if key[0] == direction:
            last, tensors = vars(messages).get("last"), tuple(tensors)
            messages.last, tensors = tensors, last or tensors
        put(messages, *key, tensors)

    return put_last


def without_weights(gradients: GradientBuckets, deferred: Any, **which: Any) -> None:
    add_deferred(gradients, [], **which)


def whole_and_unsummed(module: SummedParameters, style: Any, taken: Any) -> None:
    for name, _ in [*module.named_parameters(recurse=False)]:
        taken.take(module, name)


def unsummed(entrance: Entrance, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return linear(x.flatten(0, -2), weight, others[0])


def for_each_layer(entrance: Entrance, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """f once for each of the layers that read one tensor."""
    return linear(x.flatten(0, -2), weight, others[0], axis=entrance.axis)


def summed_twice(entrance: Entrance, x: Tensor, *others: Any) -> Tensor:
    return read(entrance, copy_to(x, entrance.axis), *others)


def with_whole_head(head: ColumnLinear, x: Tensor, labels: Tensor, scales: Tensor) -> Tensor:
    """The same loss, of all columns on every rank."""
    spec = head.specs["weight"]
    weight = gather_with_gradient(head.shard_of("weight"), 0, head.mesh.tensor)[: spec.shape[0]]
    whole: Tensor = linear_cross_entropy(x, weight, None, labels, scales, HeadAxes(), spec.shape[0])
    return whole


def of_first_heads(heads: int, queries: int, tensor: Axis) -> list[int]:
    """Key/value heads as if every rank had the first queries."""
    return heads_of_queries(heads, queries, replace(tensor, rank=0))


outside = layers_2d.outside
read, heads_of_queries = Entrance.read, planned.heads_of_queries
run_grouped_query, run_core = GroupedQueryLinear.forward, AttentionCore.forward
turns = Llama.turns
add_up, add_deferred = Bucket.add_up, GradientBuckets.add_deferred
make_bucket, reduce, gather = Bucket.__init__, Bucket.reduce, Bucket.gather
run_loss, run_layers, put = Executor.run_loss, Executor.run_layers, Messages.put
STAGES = Case("pipeline=2", "gpt2", frozenset(["accumulate"]), layers=3)

# What is put in the place of what, and which check of which case sees it.
FAULTS: dict[str, tuple[Any, str, Any, Case, str]] = {
    "a mean instead of a sum": (
        layers, "reduce_from", mean_instead_of_sum, Case("tensor=2", "gpt2"), "loss",
    ),
    **{
        f"no sum over the stream of the gradients of {kind.__name__}": (
            ShardedModule, "add_parameter", without_stream(kind),
            Case("tensor=2,sequence", "gpt2"), "gradients",
        )
        for kind in (RowParallelLinear, PositionEmbedding, LayerNorm)
    },
    "no sum over the stream of the gradients of RMSNorm": (
        ShardedModule, "add_parameter", without_stream(RMSNorm),
        Case("tensor=2,sequence", "llama"), "gradients",
    ),
    "no sum of the gradients of whole key/value weights": (
        ShardedModule, "add_parameter", without_stream(GroupedQueryLinear),
        Case("tensor=2", "llama"), "gradients",
    ),
    "all key/value heads on every rank": (
        GroupedQueryLinear, "forward", of_all_heads, Case("tensor=4", "llama"), "FLOPs",
    ),
    "the key/value head of the next query": (
        AttentionCore, "forward", of_next_query, Case("tensor=2", "llama"), "loss",
    ),
    "rotary positions of local rows": (
        Llama, "turns", of_own_rows, Case("tensor=2,sequence", "llama"), "loss",
    ),
    "axes exchanged": (
        Layout, "mesh", exchanged, Case("tensor=2,data=2", "bert"), "loss",
    ),
    "the norm counted on every rank": (
        ShardingSpec, "is_owner", lambda spec, *axes: True, Case("tensor=2", "gpt2"), "norm",
    ),
    "dropout of local rows": (
        dropout, "own_rows", first_rows,
        Case("tensor=2,sequence", "gpt2", frozenset(["dropout"])), "loss",
    ),
    "whole weights": (
        ColumnParallelLinear, "forward", with_whole_weight, Case("tensor=2", "gpt2"), "FLOPs",
    ),
    "no sum of the gradients of norms of heads": (
        SummedParameters, "prepare", whole_and_unsummed, Case("tensor=2", "hf-qwen3"), "gradients",
    ),
    "no sum where column layers begin": (
        Entrance, "read", unsummed, Case("tensor=2", "hf-llama"), "gradients",
    ),
    "a sum for each column layer": (
        Entrance, "read", for_each_layer, Case("tensor=2", "hf-llama"), "calls over tensor",
    ),
    "two sums where column layers begin": (
        Entrance, "read", summed_twice, Case("tensor=2", "hf-gpt2"), "gradients",
    ),
    "all columns of the output layer on every rank": (
        ColumnLinear, "loss", with_whole_head, Case("tensor=2", "hf-gpt2"), "FLOPs",
    ),
    "the key/value heads of other queries": (
        planned, "heads_of_queries", of_first_heads, Case("tensor=4", "hf-llama"), "loss",
    ),
    "the gradient of a tied weight left unsummed": (
        Bucket, "add_up", within_stages, STAGES, "gradients",
    ),
    "a tied weight counted on both stages": (
        ShardingSpec, "is_owner", lambda spec, *axes: True, STAGES, "norm",
    ),
    "a mean over micro-batches": (
        Executor, "run_loss", mean_of_micro_batches, STAGES, "loss",
    ),
    "a stage computed twice": (Executor, "run_layers", twice, STAGES, "FLOPs"),
    "all layers on every stage": (
        PipelinePlan, "numbers", lambda plan, rank: None, STAGES, "parameter bytes",
    ),
    "the input of another micro-batch": (
        Messages, "put", one_late("forward"), STAGES, "loss",
    ),
    "the gradient of another micro-batch": (
        Messages, "put", one_late("backward"), STAGES, "gradients",
    ),
    "half of a backward left out": (
        GradientBuckets, "add_deferred", without_weights,
        replace(STAGES, layout="pipeline=2,schedule=zb-h1"), "gradients",
    ),
    "the owner off by one": (
        Bucket, "__init__", of_next_part, Case("data=2,zero=2", "hf-gpt2"), "gradients",
    ),
    "a part reduced twice": (
        Bucket, "reduce", reduce_twice, Case("data=2,zero=1", "gpt2"), "gradients",
    ),
    "the norm without the parts of others": (
        buckets, "all_reduce", lambda x, *_: x, Case("data=2,zero=1", "gpt2"), "norm",
    ),
    "the gradient of the last micro-batch alone": (
        Bucket, "reduce", forget,
        Case("data=2,zero=2", "gpt2", frozenset(["accumulate"])), "gradients",
    ),
    "all weights kept": (
        Bucket, "release", lambda bucket: None, Case("data=2,zero=3", "gpt2"), "parameter bytes",
    ),
    "weights of the first step gathered": (
        Bucket, "gather", of_first_step, Case("data=2,zero=3", "gpt2"), "loss",
    ),
    "a cut of weights with the two axes exchanged": (
        layers_2d, "outside", swapped, Case("tensor=4:2d", "gpt2"), "loss",
    ),
    "the norm counted along the row": (
        ShardingSpec, "is_owner", first_of_columns, Case("tensor=4:2d", "gpt2"), "norm",
    ),
    **{
        f"no sum over rows of ranks of the gradients of {kind.__name__}": (
            ShardedModule, "add_parameter", without_stream(kind),
            Case("tensor=4:2d", "gpt2"), "gradients",
        )
        for kind in (Linear2D, LayerNorm2D)
    },
    "matrices gathered whole": (
        Linear2D, "forward", with_whole_matrices, Case("tensor=4:2d", "gpt2"), "FLOPs",
    ),
    "no sum over depth": (
        Layout, "mesh", without_copies,
        Case("tensor=8:2.5d:2", "gpt2", samples=8), "gradients",
    ),
    "no exchange of j and k between the two layers of a pair": (
        layers_3d, "leaving", layers_3d.entering, Case("tensor=8:3d", "gpt2", samples=8), "loss",
    ),
    **{
        f"the {what} of the samples that are read, not of those that attention holds": (
            layers_3d, "exchange", lambda mesh, x: x,
            Case("tensor=8:3d", model, frozenset(options), samples=8), "loss",
        )
        for what, model, options in (
            ("mask", "bert", []),
            ("documents", "gpt2", ["documents"]),
            ("dropout", "llama", ["dropout"]),
        )
    },
}  # fmt: skip


def with_fault(name: str | None, *arguments: Any) -> Any:
    if name is None:
        return run_cases(*arguments)
    owner, attribute, fault, *_ = FAULTS[name]
    with patch.object(owner, attribute, fault):
        return run_cases(*arguments)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(gloo: Pool, fault: str) -> None:
    *_, case, check = FAULTS[fault]
    wrong = run_group(gloo, (case,), "cpu", fault)[case]
    assert any(check in each for each in wrong), wrong
