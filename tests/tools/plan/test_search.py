"""The search for the best layouts. Its quick plans equal those of trace.py, its bounds leave out no
layout that is among the best, and the flags that it prints lead to the layouts that it means."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.pretrain import PretrainConfig
from megatron.errors import UsageError
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.mesh import Axis
from megatron.parallel.schedules import check, schedule
from megatron.parallel.sharding import sharding_specs
from tests.tools.plan.counted import preset
from tools.plan.buckets import THREE
from tools.plan.fastest import LayoutPlan, Search
from tools.plan.hardware import Hardware, load_hardware
from tools.plan.layers import in_one_stage
from tools.plan.micro_batch import MIDDLE, MicroBatch, rank_on_meta, trace_at
from tools.plan.quick import QuickStep, layer_trace
from tools.plan.search import flags, near, settings, varied
from tools.plan.software import error_band
from tools.plan.timing import predict
from tools.plan.trace import Step, idle_share

A100 = load_hardware("dgx-a100")
SMALL = "quickstart --hidden-size 1024 --num-attention-heads 8 --vocab-size 1024"
SMALL += " --micro-batch-size 1 --global-batch-size 2"
BEST = 4  # how many of the best are wanted
EIGHT = "quickstart --num-layers 8"
STAGES, VIRTUAL = "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"
TENSOR, MODE = "--tensor-model-parallel-size", "--tensor-parallel-mode"
SEQUENCE = "--sequence-parallel"


def test_one_tensor_parallel_rank_cuts_no_sequence() -> None:
    config = preset(EIGHT, f"{TENSOR} 2 {SEQUENCE} --global-batch-size 64")
    found = [each.parallel for each in near(config, 2)]
    sizes = {(each.tensor_model_parallel_size, each.sequence_parallel) for each in found}
    assert sizes == {(1, False), (2, True)}


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("--zero-stage 3", 4),
        (f"{TENSOR} 2 {SEQUENCE} --zero-stage 1 --recompute-granularity selective", 8),
        ("--context-parallel-size 2 --cp-comm-type p2p --zero-stage 2 --pure-bf16", 4),
        (f"{TENSOR} 4 {MODE} 2d --zero-stage 2 --recompute-granularity full", 8),
        (f"{TENSOR} 8 {MODE} 2.5d --tensor-parallel-depth 2 --zero-stage 3", 16),
        (f"{STAGES} 4 {TENSOR} 2 --zero-stage 1 --micro-batch-size 1", 16),
        (f"{STAGES} 2 {VIRTUAL} 2 --recompute-granularity selective", 4),
        (f"{STAGES} 4 --pipeline-schedule zb-h1 --micro-batch-size 1", 8),
        (f"{STAGES} 2 {TENSOR} 2 --kind bert --tokenizer-type none", 4),
    ],
)
def test_a_quick_step_is_a_step(words: str, ranks: int) -> None:
    """Its time, its memory, and the buckets that torch's model has on each rank."""
    config = preset(EIGHT, "--global-batch-size 64", words)
    config.check(ranks)
    whole, quick = Step(config, ranks, "bf16"), QuickStep(config, ranks, "bf16")
    for part, seconds in vars(predict(whole, A100)).items():
        assert vars(predict(quick, A100))[part] == pytest.approx(seconds), part
    for own in quick.unlike:
        other = whole.stages[own.rank]
        assert own.memory == other.memory
        assert own.activations == other.activations
        assert vars(own.model) == vars(other.model)
        check_model(other)
    most = max(each.memory["total"] for each in whole.stages)
    assert (quick.lacks(most - 1), quick.lacks(most)) == (1, 0)


def check_model(step: Step) -> None:
    """Compare with the whole model of the rank and its buckets."""
    config, planned = step.config, step.model
    sizes = {**config.parallel.sizes, "data": step.copies}
    mesh, model = rank_on_meta(config, step.precision, sizes, "meta", step.pipeline, step.rank)
    specs = sharding_specs(model)
    assert planned.local == sum(each.numel() for each in model.parameters())
    assert planned.own == sum(prod(each.shape) for each in specs.values() if each.is_owner())
    assert planned.replicas == mesh.replicas.name
    every = [each for each in vars(mesh).values() if isinstance(each, Axis) and each.size > 1]
    assert {each.name: planned.rings[each.name].ranks for each in every} == {
        each.name: each.size for each in every
    }
    wide, stage = not config.precision.pure_bf16, step.stage
    gradients = GradientBuckets.for_master_weights(model, in_fp32=wide, zero_stage=stage)
    found = [
        (each.size, each.shared.size, sorted(axis.name for axis in each.axes), each.is_of_layer)
        for each in gradients.buckets
    ]
    assert found == [
        (each.size, each.shared.size, sorted(axis.name for axis in each.axes), each.is_of_layer)
        for _, each in planned.buckets
    ]
    numbers = [sum(each.parameter.numel() for each in b.views) for b in gradients.buckets]
    assert [each.numbers for _, each in planned.buckets] == numbers
    units = gradients.units.all if gradients.units is not None else []
    assert [len(each) for each in planned.layers] == [len(each.buckets) for each in units]


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "interleaved"])
def test_the_idle_share_has_a_formula(kind: str) -> None:
    for ranks, number in product((2, 3, 4), (1, 2, 3, 4, 6, 7, 9)):
        virtual = 3 if kind == "interleaved" else 1
        facts = check(schedule(kind, ranks, number, virtual), virtual)
        assert idle_share(kind, ranks, number, virtual) == pytest.approx(facts.idle_share)


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_a_large_ring_is_traced_by_smaller_ones(flags: str) -> None:
    words = f"quickstart --seq-length 512 --max-position-embeddings 512 {flags}"
    config = preset(f"{words} --context-parallel-size 16 --cp-comm-type p2p")
    parallel = in_one_stage(config.parallel)
    whole = MicroBatch(replace(config, parallel=parallel), "bf16", "cuda", pipeline=THREE)
    assert layer_trace(config, "bf16", "cuda") == trace_at(whole, MIDDLE, 1)


def begun(words: str = SMALL, ranks: int = 2, hardware: Hardware = A100) -> Search:
    return Search(preset(words), ranks, hardware, "bf16", BEST)


LITTLE = replace(A100, memory=0.75e9, reserved_memory=0.0)  # for half of the layouts


@pytest.fixture(scope="module")
def search() -> Search:
    found = begun(hardware=LITTLE)
    found.run()
    return found


def test_no_layout_that_is_among_the_best_is_left_out(search: Search) -> None:
    """All that a run accepts are planned, and the best are those that the search found."""
    found, other = list[LayoutPlan | float](), begun(hardware=LITTLE)
    for each in other.candidates():
        for stage in each.zero_stages:
            with suppress(UsageError):
                found.append(other.plan(other.config_of(each, stage)))
    seconds = sorted(each.seconds.total for each in found if isinstance(each, LayoutPlan))
    best = [each.seconds.total for each in search.found]
    assert best == sorted(best)
    assert best[:BEST] == pytest.approx(seconds[:BEST])
    counts = dict(search.counts)
    assert counts.pop("tried") == sum(counts.values())
    assert min(counts.values()) > 0
    assert counts["planned"] == len(best) < len(seconds) < len(found)


def test_a_layout_that_fits_to_the_byte_is_planned() -> None:
    found = begun()
    candidate = next(iter(found.candidates()))
    config = found.config_of(candidate, candidate.zero_stages[0])
    planned = found.plan(config)
    assert isinstance(planned, LayoutPlan)
    exact = begun(hardware=replace(LITTLE, memory=float(planned.memory)))
    (same, *_) = exact.candidates()
    assert exact._bound(exact.config_of(same, same.zero_stages[0]), same) is not None
    less = begun(hardware=replace(LITTLE, memory=0.9 * planned.memory))
    (same, *_) = less.candidates()
    assert less._bound(less.config_of(same, same.zero_stages[0]), same) is None


CHOICES: dict[str, Sequence[Any]] = {
    "tensor_model_parallel_size": (1, 2),
    "pipeline_model_parallel_size": (1, 2),
    "context_parallel_size": (1, 2),
    "cp_comm_type": ("a2a", "p2p"),
    "sequence_parallel": (False, True),
    "num_virtual_stages_per_pipeline_rank": (None, 2),
    "pipeline_schedule": (None, "zb-h1"),
    "zero_stage": range(4),
    "micro_batch_size": (1, 2),
    "recompute_granularity": ("none", "selective", "full"),
}


def test_all_that_a_run_accepts_is_tried() -> None:
    """On two devices, of all settings together those that a run accepts and that do something."""
    other = begun()
    tried, accepted = set[tuple[Any, ...]](), set[tuple[Any, ...]]()

    def keep(config: PretrainConfig, kept: set[tuple[Any, ...]]) -> None:
        config.check(2)
        kept.add(tuple(settings(config).values()))

    for each in other.candidates():
        for stage in each.zero_stages:
            with suppress(UsageError):
                keep(other.config_of(each, stage), tried)
    for values in product(*CHOICES.values()):
        chosen = dict(zip(CHOICES, values, strict=True))
        tensor, stages = values[:2]
        if chosen["zero_stage"] and tensor * stages == 2:
            continue  # each rank has weights of its own
        if not chosen["sequence_parallel"] or tensor == 2:
            with suppress(UsageError):
                keep(varied(other.config, **chosen), accepted)
    assert tried == accepted


def test_a_layer_for_each_virtual_stage_is_tried() -> None:
    other = begun(f"{SMALL} --num-layers 6")
    virtual = {each.virtual for each in other.candidates() if each.pipeline == 2}
    assert virtual == {None, 2, 3}


def test_grids_are_tried() -> None:
    other = begun(f"{SMALL}8", 8)
    kinds = {other.config_of(each, 0).parallel for each in other.candidates()}
    found = {
        (each.tensor_parallel_mode, each.tensor_model_parallel_size, each.tensor_parallel_depth)
        for each in kinds
    }
    grids = {("2d", 4, 1), ("2.5d", 8, 2), ("3d", 8, 1)}
    assert found == {*(("1d", size, 1) for size in (1, 2, 4, 8)), *grids}


def test_ties_and_flags(search: Search) -> None:
    rows = [search.row(each) for each in search.found]
    least = rows[0]["seconds"]
    assert [each["tie"] for each in rows] == [each["seconds"] <= 1.1 * least for each in rows]
    for row, planned in zip(rows, search.found, strict=True):
        again = preset(SMALL, row["flags"])
        check_same(again, planned.config)
        assert again.global_batch_size(2) == 2
        assert row["memory_bytes"] <= search.hardware.limit
        assert row["data"] * row["batch"] * row["micro_batches"] == 2


OTHERS = [
    "",
    f"{STAGES} 4 {VIRTUAL} 2 --use-distributed-optimizer",
    f"{STAGES} 4 --pipeline-schedule zb-h1",
    f"{TENSOR} 2 {SEQUENCE} --context-parallel-size 2 --cp-comm-type p2p --zero-stage 2",
    f"{TENSOR} 8 {MODE} 2.5d --tensor-parallel-depth 2 --recompute-granularity full",
]


@pytest.mark.parametrize(("given", "other"), [*product(OTHERS, repeat=2)])
def test_flags_turn_one_layout_into_another(given: str, other: str) -> None:
    own, found = (preset(EIGHT, each) for each in (given, other))
    found = replace(found, training=replace(found.training, global_batch_size=64))
    again = preset(EIGHT, given, flags(own, found, 16))
    again.check(16)
    check_same(again, found)
    assert again.global_batch_size(16) == 64


def check_same(config: PretrainConfig, wanted: PretrainConfig) -> None:
    """Compare two layouts, where flags say a default by what means the same."""
    for name, value in settings(config).items():
        others = {None, 1} if "virtual_stages" in name else {None, "1f1b", "interleaved"}
        other = settings(wanted)[name]
        assert value == other or {value, other} <= others, name


def test_neighbours_say_why(search: Search) -> None:
    """Each is planned as what its flags lead to."""
    best = search.found[0]
    own, found = search.row(best)["flags"], search.record()["neighbours"]
    for each in found:
        assert each["reason"]
        try:
            config = preset(SMALL, own, each["flags"])
            config.check(2)
        except (SystemExit, UsageError):
            assert each["part"] is None
            assert "lacking_bytes" not in each
            continue
        step = Step(config, 2, "bf16")
        lack = max(one.memory["total"] for one in step.stages) - LITTLE.limit
        if lack > 0:
            assert each["lacking_bytes"] <= lack
            continue
        seconds = predict(step, LITTLE)
        assert each["seconds"] == pytest.approx(seconds.total)
        old, new = vars(best.seconds), vars(seconds)
        parts = [part for part in new if "hidden" not in part]
        assert new[each["part"]] - old[each["part"]] == max(new[x] - old[x] for x in parts)
    assert len({each["flags"] for each in found}) == len(found) > 5


@dataclass(frozen=True, kw_only=True)
class Measured(Hardware):
    def measures(self, step: Step) -> bool:
        return True


FITTED = replace(A100, software={"this project": {"source": "a test"}})
MEASURED = Measured(**vars(A100))


@pytest.mark.parametrize(
    ("hardware", "sizes", "band", "word"),
    [
        (A100, {}, None, "datasheets"),
        (load_hardware("cpu"), {}, None, "CPU"),
        (load_hardware("h200"), {}, None, "H200"),
        (FITTED, {}, 0.05, "fitted"),
        (FITTED, {"ranks": 64}, 0.1, "several servers"),
        (FITTED, {"tensor": 16, "ranks": 16}, None, "tensor"),
        (FITTED, {"stage": 3, "ranks": 512}, None, "ZeRO"),
        (FITTED, {"context": 4}, None, "context"),
        (MEASURED, {}, 0.01, "measured"),
        (MEASURED, {"context": 4}, 0.01, "measured"),
        (MEASURED, {"ranks": 16}, 0.1, "several servers"),
    ],
)
def test_how_right_a_plan_is(
    hardware: Hardware, sizes: dict[str, int], band: float | None, word: str
) -> None:
    step: Any = SimpleNamespace(**{"ranks": 8, "tensor": 1, "context": 1, "stage": 0} | sizes)
    found, why = error_band(hardware, step)
    assert found == band
    assert word in why
