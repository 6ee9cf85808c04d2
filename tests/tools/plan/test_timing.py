"""The parts of the predicted time, each beside what can be worked out by hand; and pipelines, whose
plan equals what their stages do, each on one rank of a fake group."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.nn.functional as F

from megatron.parallel.mesh import serial_mesh
from megatron.train.step import forward_backward
from tests.tools.plan.counted import (
    META,
    batches,
    planned_calls,
    preset,
    rank_of,
    run_rank,
    state_on,
)
from tools.layouts.work import Matmul, Meter, on_meta
from tools.plan.hardware import Hardware, Ring, load_hardware
from tools.plan.software import anchor_step, find_hardware
from tools.plan.timing import _data_parallel, call_seconds, filled, matmul_seconds, predict
from tools.plan.trace import Step

V100 = load_hardware("dgx2h")
FEW = "--num-layers 2"


@pytest.mark.parametrize(
    ("ring", "bandwidth", "hops_in_servers", "hops_between"),
    [
        (Ring(8, 1), 150e9, 14, 0),  # inside a server
        (Ring(64, 1), 100e9, 118, 8),  # all of a server's adapters
        (Ring(64, 8), 12.5e9, 62, 64),  # eight rings share them
        (Ring(4, 16), 6.25e9, 0, 6),  # one rank a server, sixteen rings
        (Ring(2, 8), 150e9, 2, 0),  # both in one server
        (Ring(1, 1), 150e9, 0, 0),
    ],
)
def test_a_ring_goes_as_fast_as_its_slowest_hop(
    ring: Ring, bandwidth: float, hops_in_servers: int, hops_between: int
) -> None:
    hardware = replace(V100, link_share=1.0, network_share=1.0, base_latency=0.0)
    assert ring.bandwidth(hardware) == bandwidth
    slow = replace(hardware, link_bandwidth=1.0)  # no hop of one rank a server is a link
    assert ring.bandwidth(slow) == (1.0 if hops_in_servers or not hops_between else bandwidth)
    latency = hops_in_servers * V100.link_latency + hops_between * V100.network_latency
    sent = 2 * (ring.ranks - 1) / ring.ranks * 1e9
    whole = ring.seconds(1e9, hardware)
    assert whole == pytest.approx(sent / bandwidth + latency)
    # Half of it gathers or scatters.
    assert ring.seconds(1e9, hardware, passes=1) == pytest.approx(whole / 2)


def test_an_axis_goes_over_the_links_that_it_crosses() -> None:
    """2D on 16 ranks in servers of 4: the columns of a row are in one server, and its rows are not.
    A broadcast passes all of its bytes on; a gather of as many leaves a rank's own share out."""
    flags = "--tensor-parallel-mode 2d --tensor-model-parallel-size 16 --micro-batch-size 1"
    step = Step(preset("gpt2_355m", flags), 16, "fp16")
    hardware, rings = load_hardware("p100"), step.model.rings
    assert (rings["column"], rings["row"]) == (Ring(4, 1), Ring(4, 4))
    assert rings["column"].bandwidth(hardware) == 4 * rings["row"].bandwidth(hardware)
    calls = [call for work in step.work.values() for call in work.calls]
    for axis in ("column", "row"):
        call = next(each for each in calls if each.axis == axis and each.is_rooted)
        bandwidth = rings[axis].bandwidth(hardware)
        whole = rings[axis].latency(hardware, 1) + call.bytes / bandwidth
        assert call_seconds(step, call, hardware) == pytest.approx(whole)
        gathered = call_seconds(step, call._replace(is_rooted=False), hardware)
        assert whole - gathered == pytest.approx(call.bytes / 4 / bandwidth)


def test_waves_of_tiles() -> None:
    whole = Matmul(batch=1, m=256 * 80, k=64, n=128, width=2)
    assert filled(whole, V100) == 1
    assert filled(whole._replace(m=256 * 81), V100) == pytest.approx(81 / 160)
    assert filled(whole._replace(n=96), V100) == pytest.approx(0.75)
    assert filled(whole._replace(m=128, n=256 * 80), V100) == 1  # the tile turned
    assert filled(whole._replace(m=1), replace(V100, multiprocessors=0)) == 1


def test_a_kernel_of_attention_skips_what_is_masked() -> None:
    whole = Matmul(batch=8, m=1024, k=64, n=1024, width=2, fused=True)
    half = matmul_seconds(whole._replace(share=0.5), V100, "fp16")
    assert half == pytest.approx(matmul_seconds(whole, V100, "fp16") / 2)
    for name, share in (("gpt2_355m", 0.5), ("bert_336m", 1.0)):
        matmuls = Step(preset(name, "--seq-length", "512"), 1, "fp16").work["forward"].matmuls
        assert {each.share for each in matmuls if each.fused} == {share}


def test_the_anchor_comes_out() -> None:
    hardware = find_hardware("dgx2h")
    assert hardware.anchor is not None
    step = anchor_step(hardware.anchor)
    seconds = predict(step, hardware).total
    assert step.executed_flops / seconds == pytest.approx(39e12)
    assert 0.3 < hardware.attained_share < 1
    assert step.executed_flops == Step(preset("gpt2_scaling_1.2b"), 1, "fp16").executed_flops
    own = replace(hardware, anchor=replace(hardware.anchor, software="this project"))
    assert predict(anchor_step(own.anchor), hardware).total < seconds  # attention in one kernel


@pytest.mark.parametrize("name", ["dgx2h", "dgx-a100", "dgx-h100", "h200", "p100", "cpu"])
def test_every_figure_has_a_source(name: str) -> None:
    hardware = find_hardware(name)
    assert 0 < hardware.attained_share <= 1
    assert all(len(source) > 10 for source in hardware.sources.values())
    assert {f"peak.{each}" for each in hardware.peaks} <= set(hardware.sources)


def test_an_h200_multiplies_and_copies_as_measured() -> None:
    """790 TFLOP/s of matmuls of 8192, and 4.3 TB/s (docs/results/plan.md)."""
    h200 = load_hardware("h200")
    matmul = Matmul(batch=1, m=8192, k=8192, n=8192, width=2)
    assert matmul.flops / matmul_seconds(matmul, h200, "bf16") == pytest.approx(790e12, rel=2e-3)
    assert h200.moved_per_second == pytest.approx(4.3e12, rel=1e-3)


NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 --bf16 --no-fp16"


@pytest.mark.parametrize(
    ("ranks", "flags", "is_replayed"),
    [
        (1, NO_DROPOUT, True),
        (1, f"{NO_DROPOUT} --no-cuda-graph", False),
        (1, f"{NO_DROPOUT} --attention-dropout 0.1", False),  # drawn by a kernel
        (1, NO_DROPOUT.replace("--bf16 --no-fp16", "--fp16 --no-bf16"), False),
        (2, NO_DROPOUT, False),
    ],
)
def test_the_host_is_a_floor_where_no_graph_replays(
    ranks: int, flags: str, is_replayed: bool
) -> None:
    sizes = f"--micro-batch-size 1 --global-batch-size {2 * ranks}"
    config = preset("gpt2_124m", flags, FEW, sizes)
    step = Step(config, ranks, config.precision.name or "fp32")
    assert step.micro_batches == 2
    assert step.is_replayed == is_replayed
    slow = replace(V100, peaks=load_hardware("h200").peaks, layer_floor=1.0)
    found, faster = predict(step, slow), predict(step, replace(slow, layer_floor=0.9))
    assert found.host - faster.host == pytest.approx(0 if is_replayed else 2 * 2 * 0.1)


@pytest.mark.parametrize(("stage", "lasting"), [(0, 6), (2, 2 + 4 / 2), (3, 4 / 2)])
def test_an_optimizer_on_the_host(stage: int, lasting: float) -> None:
    """Its masters, moments, a copy of the gradients and rounded weights are there, 18 bytes a
    parameter of the rank's part. Each byte goes over the link; of the two micro-batches of stage 3
    the weights do twice, but those of the last layer in the backward, and those outside layers,
    once a step."""
    flags = f"--bf16 --no-fp16 --micro-batch-size 2 --global-batch-size 8 --zero-stage {stage}"
    config = preset("gpt2_124m", flags, "--num-layers 4 --optimizer-cpu-offload")
    step, parts = Step(config, 2, "bf16"), 2 if stage else 1
    size = sum(bucket.size for _, bucket in step.model.buckets)
    assert sum(step.lasting.values()) == pytest.approx(lasting * size, rel=1e-3)
    assert step.on_host == 18 * size // parts
    layers = [sum(each.size for each in buckets) for buckets in step.model.layers]
    returned = size
    if stage == 3:
        returned += 2 * (2 * sum(layers) - layers[-1]) - sum(layers)
    there, moved, back = (each / parts for each in (4 * size, (9 * 4 + 2) * size, 2 * returned))
    assert step.offloaded == pytest.approx((there, moved, back))
    rates = {"host_bandwidth": 1e9, "host_memory_bandwidth": 1e12}
    link = replace(V100, peaks={"bf16": 1e14, "fp32": 1e13}, **rates)
    expected = (there + back) / 1e9 if stage == 3 else max(there, back) / 1e9
    assert predict(step, link).offload == pytest.approx(expected)
    memory = replace(link, host_bandwidth=1e15, host_memory_bandwidth=1e9)
    assert predict(step, memory).offload == pytest.approx(moved / 1e9, rel=1e-3)
    stays = Step(preset("gpt2_124m", flags, "--num-layers 4"), 2, "bf16")
    assert predict(stays, link).offload == stays.on_host == 0
    assert predict(step, link).other_kernels < predict(stays, link).other_kernels


def times(hardware: Hardware, *flags: str) -> dict[str, float]:
    return vars(predict(Step(preset("gpt2_scaling_8.3b", *flags), 512, "fp16"), hardware))


def test_collectives_hide_behind_the_matmuls_beside_them() -> None:
    found, step = times(V100), Step(preset("gpt2_scaling_8.3b"), 512, "fp16")
    sums = step.calls["backward"]
    beside = [call for call in sums if call.beside and call.axis == "tensor"]
    # f of attention and of the MLP in every layer, each beside one weight gradient.
    assert sum(sums[call] for call in beside) == 2 * 72
    assert {len(call.beside) for call in beside} == {1}
    ring = step.model.rings["tensor"].seconds(8 * 1024 * 3072 * 2, V100)
    assert 0 < found["tensor_parallel_hidden"] < 2.1 * 72 * ring
    waiting = replace(V100, memory_bandwidth=1e30, peaks={"fp16": 1e30, "fp32": 1e30})
    assert times(waiting)["tensor_parallel_hidden"] < 0.01 * found["tensor_parallel_hidden"]


@pytest.mark.parametrize("kind", ["a2a", "p2p"])
def test_a_rings_messages_hide_and_all_to_alls_do_not(kind: str) -> None:
    """On two devices of one server; a message is one hop."""
    flags = f"--context-parallel-size 2 --cp-comm-type {kind} --micro-batch-size 1 --fp16 --no-bf16"
    step = Step(preset("gpt2_355m", flags, FEW), 2, "fp16")
    found, ring, taken = predict(step, V100), step.model.rings["context"], 0.0
    for work in step.work.values():
        for call, times in work.calls.items():
            if call.axis == "context":
                assert (call.passes == 0) == (kind == "p2p")
                taken += times * call_seconds(step, call, V100)
                hop = V100.base_latency + V100.link_latency
                hop += call.bytes / ring.bandwidth(V100)
                assert kind == "a2a" or call_seconds(step, call, V100) == pytest.approx(hop)
    hidden, exposed = found.context_parallel_hidden, found.context_parallel_exposed
    assert hidden + exposed >= taken > 0
    assert (hidden > 0) == (kind == "p2p")
    alone = predict(Step(preset("gpt2_355m", FEW), 1, "fp16"), V100)
    assert (alone.context_parallel_hidden, alone.context_parallel_exposed) == (0, 0)


QUICK = replace(V100, memory_bandwidth=1e30)  # so that hidden calls keep nothing from kernels


def zero_step(stage: int) -> Step:
    """A step of 12 layers on 8 ranks, in two micro-batches."""
    flags = f"--micro-batch-size 2 --global-batch-size 32 --fp16 --no-bf16 --zero-stage {stage}"
    return Step(preset("gpt2_124m", flags), 8, "fp16")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_zero_sends_hides_where_something_computes(stage: int) -> None:
    step = zero_step(stage)
    calls = [each for phase, each in step.calls.items() if phase != "agreement"]
    of_data = [pair for each in calls for pair in each.items() if pair[0].axis == "data"]
    busy = sum(times * call_seconds(step, call, QUICK) for call, times in of_data)
    found = predict(step, replace(QUICK, peaks={"fp16": 1e30, "fp32": 1e30}))
    assert (found.data_parallel_exposed, found.data_parallel_hidden) == pytest.approx((busy, 0))
    slow = predict(step, replace(QUICK, peaks={"fp16": 1e9, "fp32": 1e9}))
    assert slow.data_parallel_exposed + slow.data_parallel_hidden == pytest.approx(busy)

    # Behind the backward the sums of the first layer and of the embedding; and gathers that come
    # when nothing computes.
    sums = [(bucket.size, ready) for ready, bucket in step.model.buckets]

    def seconds(sizes: list[int], width: int, passes: int) -> float:
        ring = step.model.rings["data"]
        return sum(ring.seconds(size * width, QUICK, passes) for size in sizes)

    after = [size for size, ready in sums if ready == 1]
    assert 0 < len(after) < len(sums)
    exposed = seconds(after, 4, 1 if stage else 2) * (2 if stage >= 2 else 1)
    if stage in (1, 2):
        exposed += seconds([size for size, _ in sums], 2, 1)
    if stage == 3:
        first, *_ = layers = step.model.layers
        of_layers = {id(bucket) for each in layers for bucket in each}
        rest = [each.size for _, each in step.model.buckets if id(each) not in of_layers]
        exposed += seconds(rest, 2, 1) + 2 * seconds([each.size for each in first], 2, 1)
    assert slow.data_parallel_exposed == pytest.approx(exposed)


def test_the_last_of_12_layers_has_no_gather_beside_it() -> None:
    step = zero_step(3)
    _, *others = step.layer_gathers["forward"]
    taken = sum(call_seconds(step, call, QUICK) for calls in others for call in calls)
    waits, hidden = (_data_parallel(step, QUICK, each, 1e9)[0] for each in (taken / 2, 1e9))
    assert waits - hidden == pytest.approx(2 * (taken - 11 / 12 * taken / 2))


def test_sequence_parallelism_saves_what_all_ranks_do_alike() -> None:
    whole, cut = times(V100), times(V100, "--sequence-parallel")
    assert cut["other_kernels"] < 0.6 * whole["other_kernels"]
    assert cut["matrix_products"] == pytest.approx(whole["matrix_products"], rel=0.02)


def test_bytes_that_kernels_move() -> None:
    """Each by itself; a view moves none, and a look-up the rows alone."""
    x, table = torch.ones(8, 4, device="meta"), torch.ones(100, 4, device="meta")
    rows = torch.zeros(8, dtype=torch.int64, device="meta")
    for passes, kernel in (
        (3, lambda: x + x),
        (2, lambda: x.clone()),
        (1, lambda: torch.zeros(8, 4, device="meta")),
        (0, lambda: torch.ops.aten._unsafe_view(x.view(4, 8).t(), (8, 4))),
        (3, lambda: x.add_(x)),
        (2, lambda: x.copy_(x)),
        (1, lambda: x.zero_()),
        (2, lambda: F.embedding(rows, table)),
    ):
        with Meter(serial_mesh("meta")) as meter:
            kernel()
            kernel()
        assert meter.work[""].moved == 2 * passes * x.nbytes


def test_equal_numbers_of_other_types_make_tensors_of_other_dtypes() -> None:
    with Meter(serial_mesh("meta")):
        made = [torch.full((2,), each, device="meta").dtype for each in (1, 1.0, True, 1)]
    assert made == [torch.int64, torch.float32, torch.bool, torch.int64]


def test_dropout_is_one_kernel_each_way() -> None:
    """Its mask is hashed on the way: two passes over the stream, and the keys of the rows."""
    flags = "--recompute-granularity none --embedding-dropout 0 --hidden-dropout"
    dropped, whole = (Step(preset("gpt2_355m", flags, p), 1, "fp16").work for p in ("0.1", "0"))
    stream = 8 * 1024 * 1024 * 2
    for phase in ("forward", "backward"):
        extra = dropped[phase].moved - whole[phase].moved
        # 24 layers with two of them, in each of 64 micro-batches
        assert extra == pytest.approx(64 * 24 * 2 * 2 * stream, rel=0.1)


def test_the_precision_is_one_that_the_device_has() -> None:
    assert load_hardware("h200").default_precision == "bf16"
    slow = replace(V100, peaks={"fp32": 2e9, "bf16": 1e9})
    assert V100.default_precision == slow.default_precision == "fp32"


WORLD = 512
GPT3 = "gpt3_175b --global-batch-size 16"  # two micro-batches of one sample on 8 copies
MILLIONS = [2822.7, *[2718.9] * 6, 2797.6]  # of each stage, on each tensor-parallel rank


def by_axis(*counts: Counter[tuple[str, str]]) -> list[Counter[str]]:
    """Counts without the phases."""
    found = [Counter[str]() for _ in counts]
    for own, each in zip(found, counts, strict=True):
        for (axis, _), number in each.items():
            own[axis] += number
    return found


def planned_by_axis(step: Step) -> list[Counter[str]]:
    """Calls and bytes, without what ranks agree on after the backward."""
    found = planned_calls(step)
    for each in found:
        for axis, phase in [*each]:
            if phase == "agreement" and axis != "data":
                del each[axis, phase]
    return by_axis(*found)


def test_gpt_3_on_512_gpus() -> None:
    """12 layers on each of 8 stages, and 2 micro-batches of the whole sequence."""
    step = Step(preset(GPT3), WORLD, "fp16")
    assert [[*each] for each in step.pipeline.layers] == [
        [*range(first, first + 12)] for first in range(0, 96, 12)
    ]
    assert [round(each.model.local / 1e6, 1) for each in step.stages] == MILLIONS
    assert step.parameters == 174_604_259_328
    for stage in (0, 3, 7):
        own = step.stages[stage]
        traffic, kept, parameters = run_rank(own)
        assert own.model.local == parameters
        calls, sizes = planned_by_axis(own)
        assert [calls, sizes] == by_axis(traffic.calls, traffic.bytes)
        assert calls["pipeline"] == 2 * (1 if stage in (0, 7) else 2)
        assert calls["embedding_group"] == (stage in (0, 7))
        assert own.memory["activations"] == pytest.approx(kept.most, rel=0.01)
        assert own.facts.in_flight[stage] == min(2, 8 - stage)


P2, P4 = (f"--pipeline-model-parallel-size {each}" for each in "24")
SCHEDULE, VIRTUAL = "--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    "flags",
    [
        P2,
        f"{P4} {SCHEDULE} gpipe",
        f"{P4} {VIRTUAL}",
        f"{P2} {VIRTUAL} --recompute-granularity full",
        f"{P4} {SCHEDULE} zb-h1",
        f"{P4} --decoder-first-pipeline-num-layers 4 --recompute-granularity selective",
        f"{P2} {TENSOR} --kind bert --tokenizer-type none",
    ],
)
def test_every_schedule(flags: str) -> None:
    step = small(flags)
    for own in step.stages:
        traffic, kept, _ = run_rank(own)
        assert planned_by_axis(own) == by_axis(traffic.calls, traffic.bytes)
        memory = own.memory
        if "zb-h1" not in flags:  # which keeps more than autograd does
            assert memory["activations"] == pytest.approx(kept.most, rel=0.01)
        passing = memory["total"] - sum(own.lasting.values())
        most = most_at_a_time(own)
        assert passing == pytest.approx(most, rel=0, abs=0.01 * most + own.trace.message)


def small(*flags: str) -> Step:
    config = preset("quickstart --num-layers 8 --global-batch-size 24", *flags)
    step = Step(config, 2 * prod(config.parallel.sizes.values()), "fp16", "cpu")
    config.check(step.ranks)
    return step


def most_at_a_time(step: Step) -> int:
    """Bytes of all that forwards and backwards make, messages too."""
    with rank_of(step) as mesh:
        state = state_on(mesh, step.config, step.precision, step.pipeline)
        there = [bucket.gradients for bucket in state.gradients.buckets]
        meter = Meter(mesh, [*state.model.parameters(), *there])
        counts = torch.ones(1 + len(state.objective.terms), dtype=torch.float64, device=META)
        with on_meta(meter, "cpu"):
            meter.phase = "forward"
            forward_backward(state, batches(step.config, step.micro_batches), counts)
    return meter.peak


A100 = load_hardware("dgx-a100")


def test_a_message_is_one_hop() -> None:
    link, network = A100.link_bandwidth * A100.link_share, A100.network_bandwidth
    network *= A100.network_share / A100.devices_per_server  # all devices of a server send
    latency = A100.base_latency
    for ring, seconds in (
        (Ring(2, 4), 1e9 / link + A100.link_latency),
        (Ring(4, 1), 1e9 / link + A100.link_latency),
        (Ring(2, 8), 1e9 / network + A100.network_latency),
        (Ring(8, 64), 1e9 / network + A100.network_latency),
    ):
        assert ring.message(1e9, A100) == pytest.approx(latency + seconds)


UNIFORM = f"{P4} --pipeline-partition uniform --global-batch-size"
KINDS = {"gpipe": 1, "zb-h1": 1 / 3, "interleaved": 1 / 2}  # idle moments, beside those of 1f1b


def test_the_slowest_stage_sets_the_pace() -> None:
    """The last of ranks with 2 layers each is the slowest, as it has the head; the first and the
    last micro-batch go alone through the other three."""
    twelve, more = small(UNIFORM, "96"), small(UNIFORM, "192")
    found, longer = predict(twelve, A100), predict(more, A100)
    last = twelve.stages[-1]
    matmuls = (pair for work in last.work.values() for pair in work.matmuls.items())
    assert found.matrix_products == pytest.approx(
        sum(times * matmul_seconds(each, A100, "fp16") for each, times in matmuls)
    )
    assert found.pipeline_bubble == pytest.approx(longer.pipeline_bubble)
    each = (longer.total - found.total) / 12
    assert 0 < found.pipeline_bubble < 3 * each
    message = last.model.rings["pipeline"].message(last.trace.message, A100)
    exposed = longer.pipeline_parallel_exposed - found.pipeline_parallel_exposed
    assert exposed == pytest.approx(2 * 12 * message)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_have_their_bubbles(kind: str) -> None:
    flags = VIRTUAL if kind == "interleaved" else f"{SCHEDULE} {kind}"
    plain, found = (predict(small(UNIFORM, "96", more), A100) for more in ("", flags))
    assert found.pipeline_bubble == pytest.approx(KINDS[kind] * plain.pipeline_bubble, rel=0.1)
    assert found.matrix_products == pytest.approx(plain.matrix_products, rel=0.01)
