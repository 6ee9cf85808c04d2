"""Gradient buckets against torch's DistributedDataParallel and plain autograd."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import product
from math import nan
from typing import Any, Self
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from megatron.parallel import cross_entropy
from megatron.parallel.buckets import BUCKET_BYTES, GradientBuckets, clip_grad_norm
from megatron.parallel.collectives import all_reduce
from megatron.parallel.initialize import materialize
from megatron.parallel.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.sharding import (
    ShardedModule,
    ShardingSpec,
    gather_whole,
    replicated,
    sharding_specs,
)
from tests.dist import Pool, on_ranks
from tests.refusals import refusal
from tests.tiny import (
    SEED,
    Watch,
    assert_exact,
    assert_gradients,
    assert_relative,
    leave_to_autograd,
    mesh_of_ranks,
    micro_batches,
    samples,
    scatter_weights,
    summed_loss,
    tiny_config,
    tiny_model,
    whole_gradients,
)

CPU = torch.device("cpu")


def losses(model: nn.Module, mesh: Mesh, step: int) -> Iterator[tuple[bool, Tensor]]:
    """(whether it is the last micro-batch, its loss) of two micro-batches on each data rank."""
    batch = samples(2 * mesh.data.size, first=100 * step)
    for number, each in enumerate(micro_batches(batch, mesh, 1)):
        yield number == 1, summed_loss(model, each, CPU)[0]


def test_narrow_buckets_round_a_sum_once() -> None:
    """The sum over equal ids, and over chunks of the head, is fp32 until it is in the bucket."""
    found = []
    config = tiny_config(untie_embeddings_and_output_weights=True)
    for wide in (True, False):
        model = tiny_model(serial_mesh(), config, dtype=torch.bfloat16)
        buckets = GradientBuckets(model, in_fp32=wide)
        with patch.object(cross_entropy, "CHUNK_BYTES", 2**12), buckets.accumulate(is_last=True):
            summed_loss(model, samples(4), CPU)[0].backward()
        assert {each.gradients.dtype for each in buckets.buckets} == {
            torch.float32 if wide else torch.bfloat16
        }
        found.append({view.name: view.gradient.bfloat16() for view in buckets.views})
    wide, narrow = found
    assert_exact(narrow, wide)


@on_ranks(2)
def test_buckets_equal_distributed_data_parallel() -> None:
    """In buckets of 4 kB, of which some are reduced while the backward still runs; gradients go
    into them directly, or through autograd."""
    for is_direct in (True, False):
        mesh = mesh_of_ranks(1)
        model, plain = tiny_model(mesh), tiny_model(mesh)
        table = sharding_specs(model)
        replica = DistributedDataParallel(plain)
        buckets = GradientBuckets(model, 4096)
        if not is_direct:
            leave_to_autograd(model)
        assert len(buckets.buckets) > 10
        for step in range(2):
            buckets.start()  # the forward is outside of accumulate()
            for is_last, loss in losses(model, mesh, step):
                with buckets.accumulate(is_last=is_last):
                    loss.backward()
            for view in buckets.views:  # what an optimizer of torch reads
                assert torch.equal(view.parameter.grad, view.gradient)
            plain.zero_grad()
            for is_last, loss in losses(replica, mesh, step):
                with nullcontext() if is_last else replica.no_sync():
                    loss.backward()
            expected = {  # DDP averages over its ranks
                name: gather_whole(each.grad * mesh.data.size, table[name])
                for name, each in plain.named_parameters()
            }
            assert_gradients(whole_gradients(buckets), expected, 1e-12)


class Mixed(nn.Module):
    """Our layers beside torch's."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(mesh, 4, 8, std=1.0)
        self.down = RowParallelLinear(mesh, 8, 4, std=1.0)
        materialize(self, device=CPU, dtype=torch.float64, seed=SEED)
        torch.manual_seed(SEED)
        self.norm, self.probe = nn.LayerNorm(4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.probe(self.norm(self.down(self.up(x)))).square().sum()


@on_ranks(2)
def test_torchs_modules_on_cut_rows() -> None:
    """The user has said that their gradients are partial over the tensor axis, too."""
    mesh, whole = mesh_of_ranks(2, sequence_parallel=True), Mixed(serial_mesh())
    model = Mixed(mesh)
    assert "norm.weight" in str(refusal(lambda: GradientBuckets(model)))
    others = {name: replicated(each, mesh) for name, each in model.named_parameters()}
    buckets = GradientBuckets(model, specs=sharding_specs(model, others))
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with buckets.accumulate(is_last=True):
        model(x.chunk(2)[mesh.tensor.rank]).backward()
    whole(x).backward()
    parameters = dict(whole.named_parameters())
    for view in buckets.views:
        found = gather_whole(view.gradient, view.spec)
        torch.testing.assert_close(found, parameters[view.name].grad, rtol=1e-12, atol=1e-12)


def run(buckets: GradientBuckets, model: nn.Module, *inputs: Any) -> None:
    with buckets.accumulate(is_last=True):
        model(*inputs).sum().backward()


class Misplaced(nn.Module):
    """A layer where each rank holds other columns."""

    def __init__(self, mesh: Mesh, make: Callable[[Mesh, int], nn.Module]) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(mesh, 4, 8)
        self.norm = make(mesh, 8 // mesh.tensor.size)
        self.down = RowParallelLinear(mesh, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x))).square().sum()


def torchs_norm(mesh: Mesh, width: int) -> nn.Module:
    return nn.LayerNorm(width)


@on_ranks(2)
def test_misplaced_modules_are_refused() -> None:
    """The error comes with the first gradient: at once, or after steps without one and of NaN."""
    mesh, x = mesh_of_ranks(2), torch.randn(2, 3, 4)
    for make, scales in product((torchs_norm, LayerNorm), ((1,), (0, 1), (nan, 0, 1))):
        torch.manual_seed(SEED)
        model = Misplaced(mesh, make)
        weight = model.down.weight.detach().clone()
        buckets = GradientBuckets(model)
        for scale in scales:
            with torch.no_grad():
                model.down.weight.copy_(scale * weight)
            if scale != 1:
                run(buckets, model, x)
        refusal(partial(run, buckets, model, x), "norm.", kind=RuntimeError, lines=9)


@on_ranks(2)
def test_a_layer_that_the_user_has_cut() -> None:
    """A norm between column and row, of whose shards the user has said that they are shards."""
    mesh = mesh_of_ranks(2)
    torch.manual_seed(SEED)
    model = Misplaced(mesh, torchs_norm)
    cut = ShardingSpec(shape=(8,), shards=((0, mesh.tensor),), partial=(mesh.replicas,))
    buckets = GradientBuckets(model, specs={"norm.weight": cut, "norm.bias": cut})
    run(buckets, model, torch.randn(2, 3, 4))
    for wrong in ({"norm.bais": cut}, {"norm.bias": replace(cut, shape=(4,))}):
        refusal(lambda wrong=wrong: GradientBuckets(model, specs=wrong), next(iter(wrong)))


@on_ranks(2)
def test_weights_that_differ_by_rank_are_named() -> None:
    """In the first step, or where they become masters."""
    torch.manual_seed(dist.get_rank())
    mesh = mesh_of_ranks(1)
    model = nn.Sequential(RowParallelLinear(mesh, 4, 4), nn.Linear(4, 4))
    plain = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    for each in (model, plain):
        nn.init.zeros_(each[1].bias)
    buckets, masters = GradientBuckets(model), GradientBuckets.for_master_weights
    for make in (
        partial(run, buckets, model, torch.zeros(4)),
        *(partial(masters, model, zero_stage=stage, units=[model]) for stage in (0, 1, 3)),
        partial(masters, plain, mesh=mesh),
    ):
        error = refusal(make, "1.weight", kind=RuntimeError, lines=9)
        assert "1.bias" not in str(error)


@on_ranks(2)
def test_a_step_that_is_given_up() -> None:
    mesh = mesh_of_ranks(1)
    torch.manual_seed(SEED)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    buckets = GradientBuckets(model, 16, mesh=mesh)
    x = torch.randn(8, 8) * (1 + mesh.data.rank)
    found = []
    for gives_up in (False, True, False):
        buckets.start()
        wrong = pytest.raises(ZeroDivisionError) if gives_up else nullcontext()
        with wrong, buckets.accumulate(is_last=True):
            model(x * (5 if gives_up else 1)).square().sum().backward()
            _ = 1 / (not gives_up)
        found.append([view.gradient.clone() for view in buckets.views])
    assert_exact(found[0], found[2])


def test_a_second_backward_in_the_last_accumulate_is_an_error() -> None:
    """Its gradients would not be summed over the ranks."""
    model = Misplaced(serial_mesh(), torchs_norm)
    buckets, x = GradientBuckets(model), torch.randn(2, 3, 4)
    with buckets.accumulate(is_last=True):
        model(x).backward()
        assert isinstance(refusal(lambda: model(x).backward(), lines=9), RuntimeError)


def test_what_a_backward_adds_is_there_once() -> None:
    """Two backwards of one accumulate() add once each; one that is given up adds nothing."""
    model, x = Misplaced(serial_mesh(), torchs_norm), torch.randn(2, 3, 4)
    buckets = GradientBuckets(model)
    run(buckets, model, x)
    expected = whole_gradients(buckets)
    for first in (1, 2):
        with buckets.accumulate(is_last=False):
            for _ in range(first):
                model(x).backward()
        with buckets.accumulate(is_last=True):
            model(x).backward()
        for name, gradient in whole_gradients(buckets).items():
            assert_relative(gradient, (first + 1) * expected[name], 1e-6, name)

    x.requires_grad_()
    x.register_hook(lambda _: 1 / 0)  # after all parameters
    with pytest.raises(ZeroDivisionError), buckets.accumulate(is_last=False):
        model(x).backward()
    buckets.start()
    with buckets.accumulate(is_last=True):
        model(x.detach()).backward()
    assert_gradients(whole_gradients(buckets), expected, 1e-6)


def test_a_copy_leaves_its_gradients_to_autograd() -> None:
    model = Misplaced(serial_mesh(), LayerNorm)
    buckets = GradientBuckets(model)
    twin = copy.deepcopy(model)
    twin(torch.randn(2, 3, 4)).backward()
    assert all(each.grad is not None for each in twin.parameters())
    assert not any(view.is_filled for view in buckets.views)


def test_layers_may_share_a_weight() -> None:
    torch.manual_seed(SEED)
    first, second = (RowParallelLinear(serial_mesh(), 4, 4) for _ in range(2))
    second.weight = first.weight
    model = nn.Sequential(first, second)
    x = torch.randn(2, 4)
    model(x).square().sum().backward()
    expected = first.weight.grad.clone()
    with GradientBuckets(model).accumulate(is_last=True):
        model(x).square().sum().backward()
    torch.testing.assert_close(first.weight.grad, expected)


def test_a_backward_that_no_rank_would_reduce_is_an_error() -> None:
    model = Misplaced(serial_mesh(), torchs_norm)
    buckets, x = GradientBuckets(model), torch.randn(2, 3, 4)
    assert isinstance(refusal(lambda: model(x).backward(), lines=9), RuntimeError)
    gradients = []
    for _ in range(2):  # the second step forgets the first
        run(buckets, model, x)
        gradients.append([each.grad.clone() for each in model.parameters()])
    assert_exact(*gradients)


def clipped() -> tuple[float, list[Tensor]]:
    """(norm, gradients of norm 0.5) of two micro-batches; the data ranks share them."""
    mesh = mesh_of_ranks(2)
    torch.manual_seed(SEED)
    model = Mixed(mesh)
    buckets = GradientBuckets(model)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()
    own = x.chunk(mesh.data.size)[mesh.data.rank]
    for number, each in enumerate(own.chunk(2)):
        with buckets.accumulate(is_last=number == 1):
            model(each).backward()
            refusal(lambda: clip_grad_norm(buckets, 0.5), kind=ValueError)
    before = [view.parameter.grad.clone() for view in buckets.views]
    clip_grad_norm(buckets, 1e6)  # far above the norm
    assert_exact([view.parameter.grad for view in buckets.views], before)
    norm = clip_grad_norm(buckets, 0.5)
    return float(norm), [gather_whole(v.parameter.grad, v.spec) for v in buckets.views]


def test_the_norm_of_all_shards_is_clipped(gloo: Pool) -> None:
    """Our layers are beside torch's, over a tensor and a data axis."""
    norm, gradients = clipped()
    assert norm > 0.5
    whole = torch.cat([each.flatten() for each in gradients]).norm().item()
    assert whole == pytest.approx(0.5, rel=1e-5)
    for found in gloo.run(4, clipped):
        torch.testing.assert_close(found, (norm, gradients), rtol=1e-12, atol=1e-12)


def test_a_forward_that_would_add_to_another_step_is_an_error() -> None:
    """The output layer with its loss adds its gradient in the forward."""
    model = tiny_model(serial_mesh())
    buckets, batch = GradientBuckets(model), samples(1)
    with buckets.accumulate(is_last=True):
        summed_loss(model, batch, CPU)[0].backward()
    expected = [view.gradient.clone() for view in buckets.views]
    with torch.no_grad():
        summed_loss(model, samples(1, first=5), CPU)
    with buckets.accumulate(is_last=True):
        summed_loss(model, batch, CPU)[0].backward()
    assert_exact([view.gradient for view in buckets.views], expected)
    summed_loss(model, batch, CPU)
    assert isinstance(refusal(buckets.accumulate(is_last=True).__enter__, lines=9), RuntimeError)


class Branches(nn.Module):
    """Two layers, of which a micro-batch may use one alone."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.first = RowParallelLinear(mesh, 4, 4, std=1.0)
        self.second = RowParallelLinear(mesh, 4, 4, std=1.0)
        materialize(self, device=CPU, dtype=torch.float32, seed=None)
        weights = {name: torch.ones(spec.shape) for name, spec in sharding_specs(self).items()}
        scatter_weights(self, weights)

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        y = self.first(x)
        return (self.second(y) if uses_second else y).square().sum()


@on_ranks(2)
def test_parameters_that_a_micro_batch_does_not_reach() -> None:
    """The second rank may use what the first does not, and fill buckets in another order."""
    mesh = mesh_of_ranks(1)
    orders = ((True, False), (False, True), (False, False), (True, True))
    cases = [*product((16,), orders, (False, True)), (BUCKET_BYTES, orders[0], True)]
    for bucket_bytes, uses, differ in cases:
        model, plain = Branches(mesh), Branches(mesh)
        buckets = GradientBuckets(model, bucket_bytes)
        for each in buckets.slices():
            each.local.fill_(torch.nan)  # what an earlier step left must not be seen
        buckets.start()
        for number, used in enumerate(uses):
            uses_second = used != (differ and mesh.data.rank == 1)
            x = torch.full((3, 4), 1.0 + number + mesh.data.rank)
            plain(x, uses_second).backward()
            is_last, printed = number == len(uses) - 1, StringIO()
            with redirect_stderr(printed), buckets.accumulate(is_last=is_last):
                model(x, uses_second).backward()
        is_reached = any(uses) or differ
        assert ("second.weight" in printed.getvalue()) == (mesh.is_first and not is_reached)
        found = whole_gradients(buckets)
        for name, parameter in plain.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], all_reduce(expected, mesh.data))


class NoGradient(torch.autograd.Function):
    """Uses a weight, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        return d_y, None


def test_a_parameter_that_is_reached_without_a_gradient_has_none() -> None:
    model = Branches(serial_mesh())
    buckets = GradientBuckets(model, bucket_bytes=16)  # one parameter each
    for each in buckets.slices():
        each.local.fill_(torch.nan)
    buckets.start()
    with buckets.accumulate(is_last=True):
        NoGradient.apply(model.first(torch.ones(3, 4)), model.second.weight).sum().backward()
    assert not whole_gradients(buckets)["second.weight"].any()


@on_ranks(2)
def test_bf16_gradients_accumulate_in_fp32() -> None:
    """Gradients of 4 bf16 micro-batches: the buckets', their fp32 sum, their bf16 sum."""
    mesh = mesh_of_ranks(2)
    model, plain = (tiny_model(mesh, dtype=torch.bfloat16) for _ in range(2))
    buckets = GradientBuckets(model)
    assert {bucket.gradients.dtype for bucket in buckets.buckets} == {torch.float32}
    wide = {name: torch.zeros_like(each).float() for name, each in plain.named_parameters()}
    narrow = {name: torch.zeros_like(each) for name, each in plain.named_parameters()}
    batches = micro_batches(samples(4), mesh, 1)
    for number, batch in enumerate(batches):
        with buckets.accumulate(is_last=number == len(batches) - 1):
            summed_loss(model, batch, CPU)[0].backward()
        plain.zero_grad()
        summed_loss(plain, batch, CPU)[0].backward()
        for name, parameter in plain.named_parameters():
            wide[name] += parameter.grad.float()
            narrow[name] += parameter.grad
    table = sharding_specs(model)
    for name, gradient in whole_gradients(buckets).items():
        in_fp32, in_bf16 = (gather_whole(each[name], table[name]) for each in (wide, narrow))
        if name == "word_embedding.weight":  # of whose two uses autograd's sum is in bf16
            assert_relative(gradient, in_fp32, 2**-7, name)
        else:
            assert torch.equal(gradient, in_fp32), name
        assert not torch.equal(gradient, in_bf16.float()), name
    assert clip_grad_norm(buckets, 0.01) > 0.01
    for view in buckets.views:
        assert torch.equal(view.parameter.grad, view.gradient.bfloat16()), view.name


class Order(Watch):
    """Names of the matmuls, of the collectives and the waits for these, and of what adds up
    lists of tensors, in order."""

    def __init__(self) -> None:
        super().__init__(self.note)
        self.seen: list[str] = []

    def __enter__(self) -> Self:
        wait = dist.Work.wait

        def noted(*given: Any) -> Any:
            self.seen.append("wait")
            return wait(*given)

        self.waits = patch.object(dist.Work, "wait", noted)
        self.waits.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.waits.stop()
        super().__exit__(*error)

    def note(self, function: Any, *_: object) -> None:
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" or "mm" in name or "foreach" in name:
            self.seen.append(name.strip("_"))


def test_small_gradients_of_all_layers_are_added_in_one_call() -> None:
    model = tiny_model(serial_mesh(), tiny_config(num_layers=3), dtype=torch.bfloat16)
    buckets = GradientBuckets(model)
    for is_last, calls in (
        (False, ["foreach_copy"]),
        (True, ["foreach_copy", "foreach_add"]),  # the first makes them fp32
    ):
        with Order() as order, buckets.accumulate(is_last=is_last):
            summed_loss(model, samples(1), CPU)[0].backward()
        assert [each for each in order.seen if "foreach" in each] == calls


@on_ranks(2)
def test_reduction_overlaps_the_backward() -> None:
    model = tiny_model(mesh_of_ranks(1))
    buckets = GradientBuckets(model, 4096)
    buckets.start()
    loss = summed_loss(model, samples(1), CPU)[0]
    with buckets.accumulate(is_last=True), Order() as order:
        loss.backward()
    calls = [number for number, each in enumerate(order.seen) if each == "allreduce"]
    matmuls = [number for number, each in enumerate(order.seen) if "mm" in each]
    assert calls[0] < matmuls[len(matmuls) // 4]
    assert len(calls) > 10
    assert "wait" not in order.seen, "the end of the step waits"


@pytest.mark.parametrize(
    ("sequence_parallel", "wanted", "compiled"),
    [
        (False, "mm allreduce mm wait", "mm all_reduce add_matmul wait"),
        (
            True,
            "allgather_base mm reduce_scatter_base wait mm wait",
            "all_gather_into_tensor mm reduce_scatter_tensor wait add_matmul wait",
        ),
    ],
)
@on_ranks(2)
def test_the_sum_of_f_begins_before_the_gradient_of_the_weight_is_computed(
    sequence_parallel: bool, wanted: str, compiled: str
) -> None:
    """In the backward of a layer that is cut by columns, and in the graph that a compiler gets; the
    gather, where the rows of x are cut, before that of x is."""
    mesh = mesh_of_ranks(dist.get_world_size(), sequence_parallel=sequence_parallel)
    layer, graph = ColumnParallelLinear(mesh, 4, 8, std=1.0), list[str]()
    materialize(layer, device=CPU, dtype=torch.float32, seed=0)
    buckets, x = GradientBuckets(layer), torch.randn(4, 4, requires_grad=True)
    y = layer(x).sum()
    with buckets.accumulate(is_last=True), Order() as order:
        y.backward()

    def keep(backward: GraphModule, _: object) -> GraphModule:
        graph.extend(str(node.target) for node in backward.graph.nodes)
        return backward

    layer.compile(backend=aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=keep))
    with buckets.accumulate(is_last=True):
        layer(x).sum().backward()
    known = ("aten.mm", "_c10d", "megatron")
    calls = [each.split(".")[-2] for each in graph if each.startswith(known)]
    assert " ".join(order.seen).startswith(wanted)
    assert " ".join(calls).replace("wait_tensor", "wait") == compiled


class Long(ShardedModule):
    """One parameter of ten million elements."""

    def __init__(self) -> None:
        super().__init__(serial_mesh())
        self.add_parameter("weight", (10**7,))


def test_the_norm_of_a_long_bucket_keeps_its_digits() -> None:
    buckets = GradientBuckets(materialize(Long(), device=CPU, dtype=torch.float32, seed=None))
    (only,) = buckets.slices()
    only.local.normal_(generator=torch.Generator().manual_seed(0))
    expected = only.local.double().square().sum().sqrt().item()
    norm = buckets.squares().sqrt().item()
    # The norms of the pieces are rounded to fp32; torch's own of the whole is 4e-4 too small.
    assert norm == pytest.approx(expected, rel=1e-8)
