"""Layers that torch.compile has compiled compute the same; a step as a CUDA graph, with a replay
that runs the recorded function again on a CPU."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch
from weakref import ref

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import flex_attention

from benchmarks import compiled
from megatron.config.model import KindConfig
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.gpt2 import GPT2Batch
from megatron.errors import UsageError
from megatron.models.build import build_on_meta
from megatron.parallel import cross_entropy, fused_softmax, kernels
from megatron.parallel.context import local_tokens
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.offload import on_host
from megatron.parallel.zero3 import GatheredBucket
from megatron.train import diagnose
from megatron.train.compiled import WARM_UP, StepGraph, choose_graph, compile_layers, keeps
from megatron.train.diagnose import NonFiniteError, find_first
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward, train_step
from tests.bert import bert_config, bert_samples
from tests.dist import Pool, on_ranks
from tests.llama import llama_config
from tests.tiny import (
    SEQUENCE,
    VOCABULARY,
    assert_exact,
    assert_gradients,
    micro_batches,
    samples,
    state_at,
    summed_loss,
    tensors,
    tiny_config,
    tiny_state,
    whole_gradients,
)
from tools.layouts.layout import parse_layout

CPU = torch.device("cpu")
CONFIGS = {"gpt2": tiny_config, "bert": bert_config, "llama": llama_config}
SAMPLES = {"gpt2": samples, "bert": bert_samples, "llama": samples}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
POST_LN = {"residual_order": "post-ln"}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full"}
ONE_GRAPH = Counter(graphs=1, breaks=0)
NESTED = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11 keeps what a Function inside a checkpoint saves"
)


@contextmanager
def compiler() -> Iterator[Counter[str]]:
    """Inside, what is traced again is an error; counts graphs and what broke one."""
    torch._dynamo.reset()
    counters.clear()
    found = Counter[str]()
    # Plain instructions: to find out what the processor can do takes longer than these tests.
    plain = torch._inductor.config.patch({"cpp.simdlen": 1})
    with plain, torch._dynamo.config.patch(error_on_recompile=True):
        yield found
    found.update(graphs=counters["stats"]["unique_graphs"], breaks=len(counters["graph_break"]))


def first_steps(
    kind: str,
    layout: str,
    backend: str | None,
    changes: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    size: int = 2,
) -> tuple[list[float], dict[str, Tensor], Counter[str]]:
    """(losses of three steps, the first by its parts; gradients of the first, graphs) of a rank."""
    state = state_at(layout, CONFIGS[kind](**changes), dtype=dtype)
    if backend is not None:
        compile_layers(state.model, backend)
    batches = micro_batches(SAMPLES[kind](8), state.mesh, size)
    batches = [local_tokens(each, state.mesh) for each in batches]
    state.model.train()
    with compiler() as found:
        losses = forward_backward(state, batches, count(state, batches)).flatten().tolist()
        gradients = whole_gradients(state.gradients)
        losses += [train_step(state, batches, 1e-3).loss for _ in range(2)]
    return losses, gradients, found


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        ("bert", "tensor=2,sequence", POST_LN | DROPOUT | FULL),
        ("llama", "tensor=4:2d", SELECTIVE),
        pytest.param("gpt2", "tensor=8:2.5d:2", DROPOUT, marks=pytest.mark.sweep),
        pytest.param("gpt2", "tensor=8:3d", DROPOUT, marks=pytest.mark.sweep),
        ("gpt2", "pipeline=2,schedule=zb-h1", DROPOUT),
        ("gpt2", "context=2", DROPOUT | SELECTIVE),
    ],
)
@on_ranks("layout")
def test_compiled_layers_are_one_graph_that_computes_the_same(
    kind: str, layout: str, changes: dict[str, Any]
) -> None:
    """In fp64; collectives, dropout and what selective recomputation runs are in the graph."""
    wanted, those, _ = first_steps(kind, layout, None, changes)
    losses, gradients, graphs = first_steps(kind, layout, "aot_eager", changes)
    assert graphs == ONE_GRAPH
    assert losses == pytest.approx(wanted, rel=1e-13)
    assert_gradients(gradients, those, 1e-12)


@pytest.mark.parametrize(
    ("kind", "layout", "sums"),
    # Forms of sums: over the tokens of each sequence, then over sequences. Llama has no biases, and
    # sequence parallelism no whole sequences.
    [
        ("gpt2", "tensor=2", True),
        ("gpt2", "tensor=2,sequence", False),
        ("llama", "context=2", False),
    ],
)
@on_ranks("layout")
def test_layers_of_a_gpu_sum_by_sequence(kind: str, layout: str, sums: bool) -> None:
    """Its kernels, and so the shapes in the graph, but on a CPU."""
    changes = {} if kind == "llama" else DROPOUT
    wanted, those, _ = first_steps(kind, layout, None, changes)
    graphs: dict[str, Counter[str]] = {}
    with patch.object(kernels, "is_on_cpu", lambda x: False):
        losses, gradients, count = first_steps(kind, layout, recorder(graphs), changes)
    assert count == ONE_GRAPH
    assert losses == pytest.approx(wanted, rel=1e-13)
    assert_gradients(gradients, those, 1e-12)
    assert (graphs["backward"]["sum over tokens"] > 0) == sums


def test_compiled_layers_release_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ZeRO stage 3 with activations on the host: after the layers of each forward, the weights
    of the last one alone are in memory."""
    gathered, kept, held, losses = list[StorageWeakRef](), list[int](), list[int](), []
    gather = GatheredBucket.gather_weights

    def watched(bucket: GatheredBucket) -> None:
        gather(bucket)
        if bucket.is_of_layer and bucket.weights is not None:
            gathered.append(StorageWeakRef(bucket.weights.untyped_storage()))

    def note(*_: object) -> None:
        kept.append(len({each.cdata for each in gathered if not each.expired()}))
        held.append(sum(each.nbytes for each in on_host))

    monkeypatch.setattr(GatheredBucket, "gather_weights", watched)
    for stage in (0, 3):
        config = tiny_config(num_layers=3, cpu_offload_activations=stage == 3, **DROPOUT)
        state = tiny_state(serial_mesh(), config, zero_stage=stage)
        if stage == 3:
            compile_layers(state.model, "aot_eager")
            state.model.final_norm.register_forward_pre_hook(note)
        with compiler() as found:
            losses.append([train_step(state, [samples(4)], 1e-3).loss for _ in range(3)])
    assert found == ONE_GRAPH
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)
    assert kept == [1] * 3
    assert min(held) > 3 * 4 * SEQUENCE * 32 * 8  # what enters the layers


def test_compiled_steps_go_on_after_an_evaluation_of_other_shapes() -> None:
    found = []
    for backend in (None, "eager"):
        torch._dynamo.reset()
        state = tiny_state(serial_mesh(), tiny_config(num_layers=1, **DROPOUT))
        if backend is not None:
            compile_layers(state.model, backend)
        losses = []
        for size in (4, 3):
            losses.append(train_step(state, [samples(4)], 1e-3).loss)
            state.model.eval()
            with torch.no_grad():
                losses.append(float(summed_loss(state.model, samples(size), CPU)[0]))
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-13)


# Settings in which models with tensors of the same shapes differ.
APART: tuple[dict[str, Any], ...] = (
    {},
    DROPOUT,
    {"activation": "gelu"},
    {"num_attention_heads": 2},
)


def half(batch: GPT2Batch) -> GPT2Batch:
    """The first half of each sample."""
    size, names = SEQUENCE // 2, ("tokens", "labels", "loss_mask", "positions")
    return replace(batch, **{name: getattr(batch, name)[:, :size] for name in names})


def take_turns(
    settings: Sequence[tuple[str, dict[str, Any]]], backend: str | None
) -> list[list[float]]:
    """Losses of models in one process: of a training step, and with dropout of an evaluation. A
    sequence-parallel model reads twice the tokens, so that each rank's rows are as many as
    another's."""
    torch._dynamo.reset()
    losses = []
    with torch._dynamo.config.patch(recompile_limit=100):
        for layout, changes in settings:
            mesh = parse_layout(layout).mesh(CPU)
            state = tiny_state(mesh, tiny_config(num_layers=1, **changes))
            if backend is not None:
                compile_layers(state.model, backend)
            batch = samples(4) if "sequence" in layout else half(samples(4))
            losses.append([train_step(state, [batch], 1e-3).loss])
            state.model.eval()
            if changes == DROPOUT:
                losses[-1].append(summed_loss(state.model, batch, CPU)[0].item())
    return losses


def test_no_model_is_served_by_the_graph_of_another(gloo: Pool) -> None:
    alike = [("tensor=1", changes) for changes in APART]
    layouts = [("tensor=2", {}), ("tensor=2,sequence", {})]
    for ranks, settings in ((1, alike), (2, layouts)):
        plain = gloo.run(ranks, take_turns, settings, None)[0]
        assert len({each[0] for each in plain}) == len(settings)
        found = gloo.run(ranks, take_turns, settings, "eager")[0]
        for own, wanted in zip(found, plain, strict=True):
            assert own == pytest.approx(wanted, rel=1e-13)


@dataclass(frozen=True)
class Division:
    scale: float = 2.0

    def divide(self, x: Tensor) -> Tensor:
        return x * self.scale


class Negated(Division):
    def divide(self, x: Tensor) -> Tensor:
        return -x * self.scale


class Divided(nn.Module):
    offset = 0.0  # which an instance may hide

    def __init__(self, division: Division, offset: float = 0.0) -> None:
        super().__init__()
        self.division = division
        if offset:
            self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.division.divide(x) + self.offset


def test_settings_of_a_module_are_guarded() -> None:
    """By a setting, the class of settings, a hidden default."""
    torch._dynamo.reset()
    x, found = torch.ones(3), []
    settings = [(Division(), 0.0), (Division(3.0), 0.0), (Negated(), 0.0), (Division(), 1.0)]
    for each in settings:
        module = Divided(*each)
        module.compile(backend="eager", options={"guard_filter_fn": keeps})
        found.append(float(module(x)[0]))
    assert found == [2.0, 3.0, -2.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "matmuls", "copied", "guards"),
    # See docs/results/compiled.md; guards differ by a few with what ran before in the process.
    [("gpt2", (12, 12), 1.1, 100), ("llama", (15, 21), 1.65, 110)],
)
def test_compiled_graph_has_no_more_than_its_peer(
    monkeypatch: pytest.MonkeyPatch, kind: str, matmuls: tuple[int, int], copied: float, guards: int
) -> None:
    monkeypatch.setattr(kernels, "use_cpu_kernels", False)
    config, found = compiled.config_of(kind, 1, 64, 4, 64), []
    for name in (compiled.OURS, compiled.PEERS[kind]):
        compile_by, run, layer = compiled.MAKERS[name](config, 2, torch.bfloat16)
        figures = compiled.counts(compiled.graphs_of(compile_by, run))
        found.append(figures | {"guards": compiled.guards_of(layer)})
    own, its = found
    assert (own["matmuls"], its["matmuls"]) == matmuls
    assert own["attention"] == its["attention"] == 2
    assert own["forward"] + own["backward"] <= its["forward"] + its["backward"]
    assert own["copied"] <= copied * its["copied"]
    assert own["saved"] <= 1.1 * its["saved"]
    assert own["guards"] <= guards


def test_guards_of_dropout_and_selective_recomputation() -> None:
    state = tiny_state(serial_mesh(), tiny_config(**DROPOUT, **SELECTIVE))
    compile_layers(state.model, "aot_eager")
    with compiler():
        train_step(state, [samples(4)], 1e-3)
    assert compiled.guards_of(state.model.transformer.layers["0"]) <= 125


def test_the_softmax_of_the_loss_is_fused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda"):
        mesh = replace(serial_mesh(), device=torch.device(device))
        model = build_on_meta(tiny_config(), mesh, VOCABULARY)
        compile_layers(model, "eager")
        assert model.head.is_fused == (device == "cuda")

    fused = Mock(wraps=cross_entropy.fused_softmax)
    monkeypatch.setattr(fused_softmax, "_compiled", lambda function: function)
    monkeypatch.setattr(cross_entropy, "fused_softmax", fused)
    losses = []
    for is_fused in (False, True):
        state = tiny_state(serial_mesh())
        state.model.head.is_fused = is_fused
        losses.append([train_step(state, [samples(4)], 1e-3).loss for _ in range(2)])
        assert fused.called == is_fused
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)


def recorder(into: dict[str, Counter[str]]) -> Any:
    """As aot_eager; counts the operators of the graphs by their names."""

    def keep(name: str, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        into[name] = Counter(str(node.target) for node in graph.graph.nodes)
        into[name]["sum over tokens"] = sum(
            str(node.target).startswith("aten.sum") and node.args[1] == [1]
            for node in graph.graph.nodes
        )
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=partial(keep, "forward"),
        bw_compiler=partial(keep, "backward"),
        partition_fn=min_cut_rematerialization_partition,
    )


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({}, {"run_and_save_rng_state": 1, "run_with_rng_state": 1}),  # of torch's kernel
        pytest.param({"attention_dropout": 0.2}, {"aten._softmax.default": 2}, marks=NESTED),
        (
            {"attention_dropout": 0.2, "attention_dropout_rng": "kernel"},
            {"aten._safe_softmax.default": 2, "run_and_save_rng_state": 1, "run_with_rng_state": 1},
        ),
    ],
)
def test_selective_recomputation_is_in_the_graph(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], again: dict[str, int]
) -> None:
    """The backward runs attention again, and finds no more than where layers are not compiled."""
    monkeypatch.setattr(kernels, "use_cpu_kernels", False)
    graphs: dict[str, Counter[str]] = {}
    losses, kept = [], []
    for backend in (None, recorder(graphs)):
        state = tiny_state(serial_mesh(), tiny_config(**SELECTIVE, **changes))
        if backend is not None:
            compile_layers(state.model, backend)
        storages: dict[int, int] = {}

        def note(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        torch.manual_seed(1)
        with compiler(), saved_tensors_hooks(note, lambda x: x):
            losses.append(train_step(state, [samples(4)], 1e-3).loss)
        kept.append(sum(storages.values()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)
    assert (graphs["forward"] + graphs["backward"]) & Counter(again) == Counter(again)
    # Two layers, each with a state of the generator and fp64 handles of four weights.
    assert kept[1] <= kept[0] + 2 * (torch.get_rng_state().nbytes + 4 * 8)


def test_dropout_in_flex_attention_is_in_the_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where sums are fp32; on a CPU they are so where a gradient is asked for."""
    changes = {**DROPOUT, "attention_dropout_rng": "coordinates-flex"}
    losses, gradients, _ = first_steps("gpt2", "tensor=1", None, changes)
    monkeypatch.setattr(KindConfig, "attends_by_flex", lambda *_: True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    graphs: dict[str, Counter[str]] = {}
    found, own, count = first_steps("gpt2", "tensor=1", recorder(graphs), changes)
    assert count == ONE_GRAPH
    assert graphs["forward"]["flex_attention"] == graphs["backward"]["flex_attention_backward"] == 2
    assert found[:-2] == pytest.approx(losses[:-2], rel=1e-13)
    assert_gradients(own, gradients, 1e-6)


def test_a_compiled_backward_may_leave_products_of_weights_to_later() -> None:
    """The graph may overwrite its tensors after it has handed them over."""
    weights = {
        f"transformer.layers.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    }
    found = []
    for backend in (None, "aot_eager"):
        state = tiny_state(serial_mesh())
        if backend is not None:
            compile_layers(state.model, backend)
        buckets = state.gradients
        buckets.start()
        loss, _ = summed_loss(state.model, samples(4), state.mesh.device)
        with buckets.backward(is_last=True, is_deferred=True) as deferred:
            loss.backward()
        assert {view.name for view, _ in deferred} == weights
        assert {view.name for view in buckets.views if not view.is_filled} == weights
        buckets.add_deferred(deferred, is_last=True)
        buckets.finish()
        found.append(whole_gradients(buckets))
    assert_gradients(found[1], found[0], 1e-12)

    (view, *_) = [each for each in buckets.views if each.name.endswith("mlp.up.weight")]
    dy, x = (torch.ones(3, size, dtype=torch.float64) for size in view.parameter.shape)
    with buckets.backward(is_last=False, is_deferred=True) as deferred:
        torch.ops.megatron.add_matmul(view.handle, dy, x)
    dy.zero_()
    buckets.add_deferred(deferred, is_last=False)
    assert (view.gradient == 3).all()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_is_as_near_in_bf16(gloo: Pool) -> None:
    """As near to fp64 as layers in bf16 that are not compiled."""
    changes = {"hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2}
    changes |= SELECTIVE

    def steps(backend: str | None, dtype: torch.dtype) -> tuple[list[float], Tensor]:
        losses, gradients, found = gloo.run(
            2, first_steps, "llama", "tensor=2,sequence", backend, changes, dtype
        )[0]
        assert found == (Counter() if backend is None else ONE_GRAPH)
        return losses, torch.cat([each.double().flatten() for each in gradients.values()])

    losses, gradient = steps(None, torch.float64)
    errors = []
    for backend in (None, "inductor"):
        found, its = steps(backend, torch.bfloat16)
        assert found == pytest.approx(losses, rel=0.05)
        errors.append(float((its - gradient).norm() / gradient.norm()))
    plain, compiled = errors
    assert 0 < compiled < 1.2 * plain < 0.1


def test_a_diagnosis_still_sees_every_module() -> None:
    state = tiny_state(serial_mesh(), tiny_config(num_layers=1), dtype=torch.float32)
    layer = state.model.transformer.layers["0"]
    layer.compile(backend="eager")  # traced, which is what hooks are lost by
    batches = [samples(2)]
    state.model.train()
    counts = count(state, batches)
    replay = partial(forward_backward, state, batches, counts)
    replay()
    with torch.no_grad():
        layer.mlp.up.weight.fill_(1e38)
    found = find_first(state, replay)
    assert found.what == "the output of transformer.layers.0.mlp.up"


STEPS = WARM_UP + 3


def again(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """As compiled.record, except that it computes."""
    result = function()
    return result, lambda: result.copy_(function())


def steps(state: TrainState, draw: Any, sizes: list[int]) -> list[tuple[float, float]]:
    """(loss, norm) of each step, of two micro-batches of this size."""
    found, first = [], 0
    for size in sizes:
        batch = [draw(size, first=first), draw(size, first=first + size)]
        result = train_step(state, batch, 1e-3)
        found.append((result.loss, result.grad_norm))
        first += 2 * size
    return found


def two_states(kind: str) -> tuple[TrainState, TrainState]:
    config = CONFIGS[kind](**DROPOUT if kind == "gpt2" else {})
    plain, graphed = (tiny_state(serial_mesh(), config) for _ in range(2))
    return plain, replace(graphed, graph=StepGraph(record=again))


@pytest.mark.parametrize("kind", CONFIGS)
def test_graph_reads_new_batches(kind: str) -> None:
    plain, graphed = two_states(kind)
    draw, sizes = SAMPLES[kind], [2] * STEPS
    assert steps(graphed, draw, sizes) == steps(plain, draw, sizes)
    assert graphed.graph is not None
    assert graphed.graph.replay is not None
    assert_exact(tensors(graphed), tensors(plain))


def test_graph_of_another_shape() -> None:
    plain, graphed = two_states("gpt2")
    assert graphed.graph is not None
    sizes = [*[4] * STEPS, *[2] * STEPS, 4, *[2] * WARM_UP]
    assert steps(graphed, samples, sizes) == steps(plain, samples, sizes)
    assert graphed.graph.replay is None  # it was given up for the 4, and no other is recorded yet
    assert steps(graphed, samples, [2]) == steps(plain, samples, [2])
    assert graphed.graph.replay is not None


def test_a_diagnosis_has_the_memory_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private pool's, which no other tensor gets."""
    _, graphed = two_states("gpt2")
    steps(graphed, samples, [2] * STEPS)
    assert graphed.graph is not None
    graph, alive = ref(graphed.graph), list[bool]()
    monkeypatch.setattr(diagnose, "find_first", lambda *_: alive.append(graph() is not None))
    graphed.model.final_norm.weight.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        steps(graphed, samples, [2])
    assert alive == [False]


@pytest.mark.parametrize(
    ("device", "words", "dtype", "reason"),
    [
        ("cpu", "", torch.bfloat16, "without a GPU"),
        ("cuda", "", torch.float16, "loss scale"),
        ("cuda", "--cpu-offload-activations", torch.bfloat16, "offload"),
        (
            "cuda",
            "--attention-dropout 0.1 --attention-dropout-rng kernel",
            torch.bfloat16,
            "kernel draws",
        ),
        ("cuda", "--attention-dropout 0", torch.bfloat16, ""),
    ],
)
def test_graph_refused(device: str, words: str, dtype: torch.dtype, reason: str) -> None:
    config = parse(PretrainGPT2Config, ["--preset", "quickstart", *words.split()], {})
    mesh = replace(serial_mesh(), device=torch.device(device))
    refused = pytest.raises(UsageError, match=f"^--cuda-graph: must be left out .*{reason}")
    assert choose_graph(None, config.model, mesh, dtype) is not bool(reason)
    assert not choose_graph(False, config.model, mesh, dtype)
    with refused if reason else nullcontext():
        assert choose_graph(True, config.model, mesh, dtype)
