"""Measured layers, edges, collectives and updates: what --measure writes, and plans made of it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.errors import UsageError
from megatron.parallel.mesh import serial_mesh
from tests.dist import Pool
from tests.programs import start_ranks
from tests.refusals import field_of, refusal
from tests.tiny import mesh_of_ranks
from tests.tools.plan.counted import preset
from tools.doctor import description, layers, links
from tools.doctor.layers import Timed, Times
from tools.plan import __main__ as plan
from tools.plan.hardware import Hardware, Ring, load_hardware, read_hardware
from tools.plan.layers import Layer, Shape, variants
from tools.plan.timing import host_seconds, idle_on_shared_cores, predict
from tools.plan.trace import Step

CPU = load_hardware("cpu")
MODEL = "--num-layers 4 --hidden-size 64 --vocab-size 512 --micro-batch-size 2 --no-bf16"
BATCH = "--global-batch-size 16"
FREE = {2: [(1.0, 1e-15)]}  # seconds of a byte


def step_of(flags: str = "", ranks: int = 1) -> Step:
    config = preset("quickstart", MODEL, BATCH, flags)
    config.check(ranks)
    return Step(config, ranks, "fp32", "cpu")


def measured(step: Step, **figures: Any) -> Hardware:
    """A server of as many processes, on which a layer takes 1 + 2 s and the edge 0.25 + 0.5."""
    layer = Layer(
        shape=Shape.of(step), forward=1.0, backward=2.0, edge_forward=0.25, edge_backward=0.5
    )
    free: dict[str, Any] = {"optimizer_bandwidth": 1e30, "all_reduce": FREE, "message": FREE}
    free |= {"devices_per_server": step.ranks, "layers": (layer,)}
    return replace(CPU, **(free | figures))


@pytest.mark.parametrize(
    ("flags", "ranks", "layers", "micro_batches"),
    [
        ("", 1, 4, 8),
        ("--num-layers 9", 1, 9, 8),
        ("--micro-batch-size 4 --recompute-granularity full", 1, 4, 4),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2, 4, 8),
        ("--tensor-model-parallel-size 2", 2, 4, 8),
    ],
)
def test_a_step_is_made_of_measured_parts(
    flags: str, ranks: int, layers: int, micro_batches: int
) -> None:
    step = step_of(flags, ranks)
    hardware = measured(step)
    whole = micro_batches * (layers * 3.0 + 0.75)
    assert hardware.measures(step)
    assert predict(step, hardware).total == pytest.approx(whole)
    slower = replace(hardware, step_overhead=7.0, optimizer_bandwidth=step.updated / 11.0)
    assert predict(step, slower).total == pytest.approx(whole + 7 + 11)


@pytest.mark.parametrize(
    "flags",
    [
        "--micro-batch-size 4",
        "--hidden-size 128",
        "--seq-length 128",
        "--num-attention-heads 2",
        "--vocab-size 1024",
        "--recompute-granularity full",
        "--ffn-hidden-size 96",
        "--hidden-dropout 0.1",
        "--tensor-model-parallel-size 2",
    ],
)
def test_a_layer_is_of_its_shape_alone(flags: str) -> None:
    """Another depth is the same shape."""
    other, ranks = step_of(flags, 2), 2
    hardware = measured(step_of("--num-layers 7", ranks))
    assert not hardware.measures(other)
    assert predict(other, hardware) == predict(other, replace(hardware, layers=()))
    assert hardware.measures(step_of("", ranks))


def test_processes_that_share_cores_are_measured_together() -> None:
    """On a CPU a layer takes as long only where as many processes run; a GPU is alone."""
    one, two, four = (step_of("", ranks) for ranks in (1, 2, 4))
    here = measured(two)
    assert [here.measures(each) for each in (one, two, four)] == [False, True, True]
    gpus = replace(here, is_cpu=False)
    assert all(gpus.measures(each) for each in (one, two, four))


def test_copies_add_their_sums() -> None:
    """Two copies, each with half of the micro-batches."""
    sums = [(64, 1.0), (2**30, 5.0)]
    step = step_of("", 2)
    (ring,) = {step.model.rings[call.axis] for _, call in step.reductions}
    hardware = measured(step, all_reduce={2: sums})
    taken = sum(ring.seconds(call.bytes, hardware) for _, call in step.reductions)
    found = predict(step, hardware)
    assert found.total == pytest.approx(4 * (4 * 3.0 + 0.75) + taken)
    assert (found.data_parallel_exposed, found.data_parallel_hidden) == pytest.approx((taken, 0))
    # From ZeRO stage 1 on a reduce-scatter and a gather, each by its own table.
    parts = step_of("--zero-stage 1", 2)
    own = replace(hardware, reduce_scatter={2: [(64, 2.0)]}, all_gather={2: [(64, 3.0)]})
    sizes = [call.bytes / 64 for _, call in parts.reductions]
    gathered = [call.bytes / 64 for call in parts.gathers[1]]
    taken = 2.0 * sum(sizes) + 3.0 * sum(gathered)
    assert predict(parts, own).data_parallel_exposed == pytest.approx(taken)
    # On a GPU the gathers of a layer hide behind the one before; on a CPU they take its cores.
    whole = step_of("--zero-stage 3", 2)
    here, gpu = (predict(whole, replace(hardware, is_cpu=each)) for each in (True, False))
    assert here.data_parallel_hidden == 0 < gpu.data_parallel_hidden
    assert here.data_parallel_exposed > gpu.data_parallel_exposed


def test_stages_of_measured_layers() -> None:
    """The last of two stages has the edge, but what is derived for the embedding of the first."""
    step = step_of("--pipeline-model-parallel-size 2 --pipeline-partition uniform", 2)
    hardware = measured(step)
    first, last = step.stages
    found = predict(step, hardware)
    busy = 8 * (2 * 3.0 + 0.75)
    assert found.pipeline_bubble == pytest.approx(1 / 8 * 8 * 2 * 3.0, rel=1e-3)
    assert found.total == pytest.approx(busy + 1 / 8 * 8 * 2 * 3.0, rel=1e-3)
    assert (first.layers, last.layers) == (2, 2)


@pytest.mark.parametrize(
    ("pipeline", "micro_batches", "cores", "idle"),
    [
        (2, 1, 1, 0.0),  # one core never waits
        (4, 3, 1, 0.0),
        (2, 1, 2, 1.0),  # as many as processes: the schedule's own idle share, (p - 1) / m
        (4, 3, 4, 1.0),
    ],
)
def test_idle_ranks_leave_their_cores_to_others(
    pipeline: int, micro_batches: int, cores: int, idle: float
) -> None:
    flags = f"--pipeline-model-parallel-size {pipeline} --global-batch-size {2 * micro_batches}"
    step = step_of(flags, pipeline)
    shared = measured(step, concurrent_devices=cores)
    assert idle_on_shared_cores(step, shared) == pytest.approx(idle)
    assert shared.shares_cores(pipeline) == (cores < pipeline)


def test_two_cores_of_four_processes() -> None:
    """Two stages of two copies each: where one waits, the other has both cores, and none idles."""
    flags = "--pipeline-model-parallel-size 2 --pipeline-partition uniform"
    step = step_of(flags, 4)
    alone, shared = (measured(step, concurrent_devices=cores) for cores in (4, 2))
    assert idle_on_shared_cores(step, shared) == pytest.approx(0)
    work = step.micro_batches * (4 * 3.0 + 0.75)  # of both stages together
    assert predict(step, shared).total == pytest.approx(work / 2, rel=1e-3)
    assert predict(step, alone).total > 1.2 * work / 2
    three = measured(step, concurrent_devices=3)
    assert 0 < idle_on_shared_cores(step, three) < step.idle_share


def test_an_unmeasured_layer_is_derived() -> None:
    """The host is no part of it where no figure says so."""
    step = step_of()
    assert host_seconds(step, CPU) == 0
    assert predict(step, CPU).host == 0


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file, step = tmp_path / "here.toml", step_of("--hidden-dropout 0.1", 2)
    hardware = measured(step, step_overhead=0.25, concurrent_devices=1, all_gather={})
    tables = {
        "all_reduce": {"2": [(64, 0.5), (128, 0.75)], "4/2": [(64, 2.0)]},
        "reduce_scatter": {"2": [(64, 0.25)]},
        "message": {"2": [(64, 0.125)]},
    }
    known = load_hardware("cpu")
    names = [each for each in known.sources if "peak" not in each]
    peaks = {f"peak.{name}": (value, "a source") for name, value in known.peaks.items()}
    figures = {name: (getattr(hardware, name), "a source") for name in names} | peaks
    more = ("optimizer_bandwidth", "step_overhead", "concurrent_devices")
    figures |= {name: (getattr(hardware, name), "a source") for name in more}
    figures |= {kind: (each, "a source") for kind, each in tables.items()}
    figures["layers"] = [each.table() for each in hardware.layers], 'a "source"'
    description.write(file, figures, torch.device("cpu"))
    found = load_hardware(str(file))
    assert found.layers == hardware.layers
    assert found.all_reduce == {2: [(64, 0.5), (128, 0.75)], "4/2": [(64, 2.0)]}
    assert found.reduce_scatter == {2: [(64, 0.25)]}
    assert found.all_gather == {}
    assert Ring(4, 1).seconds(64, replace(found, devices_per_server=2)) == 2
    assert [getattr(found, name) for name in more] == [1e30, 0.25, 1]
    assert found.devices_per_server == 2
    assert found.measures(step)
    assert "tensor 1, micro-batch 2" in description.shown(figures)


LAYER = Layer(
    shape=Shape.of(step_of()), forward=1.0, backward=2.0, edge_forward=0.0, edge_backward=0.5
).table() | {"source": "a test"}


def described(**changes: Any) -> dict[str, Any]:
    """The content of a hardware file."""
    figures = {
        name: {"value": getattr(CPU, name), "source": "a test"}
        for name in CPU.sources
        if "peak" not in name
    }
    peaks = {name: {"value": value, "source": "a test"} for name, value in CPU.peaks.items()}
    return {"name": "a machine", "is_cpu": True, "peak": peaks, **figures, **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": [LAYER, LAYER | {"forward": 0.0}]}, r"\[\[layers\]\] 2: forward"),
        ({"layers": [LAYER | {"edge_backward": -1.0}]}, "edge_backward"),
        ({"layers": [LAYER | {"backward": "2 s"}]}, "backward"),
        ({"layers": [LAYER | {"tensor": True}]}, "tensor"),
        ({"layers": [LAYER | {"sequence_parallel": 1}]}, "sequence_parallel"),
        ({"layers": [LAYER | {"seconds": 1.0}]}, "seconds"),
        ({"layers": [{k: v for k, v in LAYER.items() if k != "hidden"}]}, "hidden"),
        ({"layers": [{k: v for k, v in LAYER.items() if k != "source"}]}, "source"),
        ({"all_gather": {"value": {"two": [[1, 1]]}, "source": "a test"}}, "all_gather.two"),
        ({"message": {"value": {"2": [[2, 1], [1, 2]]}, "source": "a test"}}, "message.2"),
        ({"message": {"value": {"2": [[2, -1]]}, "source": "a test"}}, "message.2"),
        ({"optimizer_bandwidth": {"value": 0, "source": "a test"}}, "optimizer_bandwidth"),
        ({"step_overhead": {"value": -1, "source": "a test"}}, "step_overhead"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], named: str) -> None:
    assert read_hardware(described(layers=[LAYER])).layers[0].edge == 0.5
    with pytest.raises(ValueError, match=named):
        read_hardware(described(**changes))


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--tensor-sizes 2", "--tensor-sizes"),  # without a model
        ("--preset quickstart --tensor-sizes 1 2", "--tensor-sizes"),  # of one process
        ("--preset quickstart --tensor-sizes 0", "--tensor-sizes"),
        ("--preset quickstart --context-sizes 1 2", "--context-sizes"),
        ("--preset quickstart --recomputations some", "--recomputations"),
        ("--preset quickstart --num-attention-heads 3", "--num-attention-heads"),
        ("--preset quickstart --micro-batches 0", "--micro-batch-size"),
    ],
)
def test_what_cannot_be_timed_is_refused(words: str, flag: str, tmp_path: Path) -> None:
    error = refusal(lambda: plan.main([f"--measure={tmp_path}/here.toml", *words.split()], {}))
    assert field_of(error) == flag
    assert not [*tmp_path.iterdir()]


def test_pairs_of_sizes_that_the_ranks_cannot_form_are_left_out() -> None:
    config = preset("quickstart")
    with pytest.warns(UserWarning, match="tensor x context 4 x 2 does not divide the 4"):
        found = variants(config, 4, (1, 4), (1, 2))
    sizes = [each.parallel.sizes for each in found if not each.parallel.sequence_parallel]
    assert [(each["tensor"], each["context"]) for each in sizes] == [(1, 1), (1, 2), (4, 1)]
    with pytest.raises(UsageError, match="--context-sizes"):
        variants(config, 4, (4,), (2,))
    given = replace(config, parallel=replace(config.parallel, context_parallel_size=2))
    with pytest.raises(UsageError, match="--context-parallel-size 2: .* divides the 4 processes"):
        variants(given, 4, (4,))


def test_noise_of_an_update() -> None:
    """By the difference of the depths; if the deeper one is faster, by both."""
    clear = Timed([], [(100, 3.0), (300, 7.0), (100, 3.0), (300, 7.0)])
    assert (clear.optimizer_bandwidth, clear.step_overhead) == pytest.approx((50, 1))
    lost = Timed([], [(100, 3.0), (300, 1.0)])
    assert (lost.optimizer_bandwidth, lost.step_overhead) == pytest.approx((100, 0))


def test_a_busy_machine_has_no_description() -> None:
    same = {"all_reduce": {"2": [(2**6, 1.0), (2**25, 1.0)]}}
    with patch.object(links, "tables", lambda *_: same), pytest.raises(RuntimeError, match="busy"):
        description.measure(serial_mesh(), 2)


def test_layers_that_are_lost_in_noise_are_timed_again() -> None:
    one, three = Times(1.0, 2.0, 0.1), Times(3.0, 6.0, 0.1)
    for tries, is_timed in (([(three, one)] * 2 + [(one, three)], True), ([(one, one)] * 3, False)):
        with patch.object(layers, "_times", side_effect=tries):
            if is_timed:
                (layer,) = layers.measure([preset("quickstart")], serial_mesh()).layers
                assert (layer.forward, layer.backward) == (1.0, 2.0)
            else:
                with pytest.raises(RuntimeError):
                    layers.measure([preset("quickstart")], serial_mesh())


SIZES = (2**6, 2**10, 2**12)


def tables_of_servers(ranks: int, in_server: int) -> links.Tables:
    with patch.object(links, "TABLED", {"cpu": SIZES}):
        return links.tables(mesh_of_ranks(ranks), in_server)


@pytest.mark.parametrize(
    ("ranks", "in_server", "pairs", "others"),
    [(4, 2, {"2", "2/2"}, {"4/2"}), (3, 1, {"2/2"}, {"3/3"})],
)
def test_collectives_inside_servers_and_between_them(
    gloo: Pool, ranks: int, in_server: int, pairs: set[str], others: set[str]
) -> None:
    found = gloo.run(ranks, tables_of_servers, ranks, in_server)
    assert found == [found[0]] * ranks  # the slowest rank's, on each of them
    for kind, tables in found[0].items():
        assert {*tables} == pairs | (others if kind != "message" else set())
        for rows in tables.values():
            assert tuple(size for size, _ in rows) == SIZES
            assert min(seconds for _, seconds in rows) > 0
    assert {*found[0]} == {"all_reduce", "all_gather", "reduce_scatter", "message"}


def run(words: Sequence[str]) -> None:
    sys.exit(plan.main(words, os.environ))


TINY = "--preset quickstart --hidden-size 128 --seq-length 64 --vocab-size 512 --no-bf16"


def test_two_processes_time_their_layers(tmp_path: Path) -> None:
    """Layers on one rank, and on two by context and by tensor parallelism, the latter with and
    without sequence parallelism, each at two sizes."""
    file = tmp_path / "here.toml"
    words = f"--measure {file} {TINY} --zero-stage 2 --micro-batches 1 2"
    words += " --tensor-sizes 1 2 --context-sizes 1 2"
    with start_ranks(partial(run, words.split()), range(2), 2, tmp_path) as ranks:
        assert ranks.wait() == [0, 0], ranks.text()
    found = load_hardware(str(file))
    assert (found.is_cpu, found.devices_per_server) == (True, 2)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "message"):
        (table,) = getattr(found, kind).values()
        assert len(table) >= 3
    assert found.optimizer_bandwidth is not None
    shapes = [each.shape for each in found.layers]
    contexts = ["context_parallel_size=2" in each.settings for each in shapes]
    assert contexts == [False] * 2 + [True] * 2 + [False] * 4
    assert [(each.tensor, each.sequence_parallel, each.micro_batch) for each in shapes] == [
        *2 * [(1, False, 1), (1, False, 2)],
        (2, False, 1),
        (2, True, 1),
        (2, False, 2),
        (2, True, 2),
    ]
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel"
    for flags in ("--num-layers 6", "--context-parallel-size 2", tensor):
        config = preset("quickstart", TINY.removeprefix("--preset quickstart"), flags)
        config = replace(config, training=replace(config.training, micro_batch_size=2))
        step = Step(config, 2, "fp32", "cpu")
        layer = found.measured(step)
        assert layer is not None
        assert found.measures(step)
        total = predict(step, found).total
        layers = step.micro_batches * step.layers * layer.seconds
        assert layers < total < 100 * layers
