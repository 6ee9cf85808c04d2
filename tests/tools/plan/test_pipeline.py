"""What is planned of a pipeline equals what its stages do, each on one rank of a fake group."""

from collections import Counter
from math import prod

import pytest
import torch

from megatron.train.step import count, forward_backward
from tests.tools.plan.counted import META, Kept, Traffic, batches, fake_ranks, preset, state_on
from tools.layouts.work import Meter, on_meta
from tools.plan.hardware import Ring, load_hardware
from tools.plan.timing import matmul_seconds, predict
from tools.plan.trace import Step

WORLD = 512
GPT3 = "gpt3_175b", "--global-batch-size", "16"  # two micro-batches of one sample on 8 copies
MILLIONS = [2822.7, *[2718.9] * 6, 2797.6]  # of each stage, on each tensor-parallel rank


def rank_of(stage: int, step: Step) -> int:
    """The first one of the stage."""
    return stage * step.ranks // step.pipeline.ranks


def found_on(stage: int, step: Step) -> tuple[Traffic, Kept, int]:
    """(communication of forwards and backwards, activations, parameters of the rank)."""
    config, rank = step.config, rank_of(stage, step)
    with fake_ranks(config, step.ranks, META, rank) as mesh:
        state = state_on(mesh, config, step.precision, step.pipeline)
        traffic, kept = Traffic(mesh), Kept(state.model)
        samples = batches(config, step.micro_batches)
        with traffic, kept.counting():
            forward_backward(state, samples, count(state, samples))
        return traffic, kept, sum(each.numel() for each in state.model.parameters())


def by_axis(calls: Counter[tuple[str, str]]) -> Counter[str]:
    found = Counter[str]()
    for (axis, _), number in calls.items():
        found[axis] += number
    return found


def planned_by_axis(step: Step) -> tuple[Counter[str], Counter[str]]:
    """(calls, bytes), without what ranks agree on behind the backward."""
    calls, sizes = Counter[str](), Counter[str]()
    for phase, found in step.calls.items():
        for call, times in found.items():
            if phase == "agreement" and call.axis != "data":
                continue
            calls[call.axis] += times
            sizes[call.axis] += times * call.bytes
    return calls, sizes


def test_gpt_3_on_512_gpus() -> None:
    """12 layers on each of 8 stages, and 2 micro-batches of the whole sequence."""
    step = Step(preset(*GPT3), WORLD, "fp16")
    assert [[*each] for each in step.pipeline.layers] == [
        [*range(first, first + 12)] for first in range(0, 96, 12)
    ]
    assert [round(each.model.local / 1e6, 1) for each in step.stages] == MILLIONS
    assert step.parameters == 174_604_259_328
    for stage in (0, 3, 7):
        own = step.stages[stage]
        traffic, kept, parameters = found_on(stage, step)
        assert own.model.local == parameters
        calls, sizes = planned_by_axis(own)
        assert calls == by_axis(traffic.calls)
        assert sizes == by_axis(traffic.bytes)
        assert calls["pipeline"] == 2 * (1 if stage in (0, 7) else 2)
        assert calls["embedding_group"] == (stage in (0, 7))
        assert own.memory["activations"] == pytest.approx(kept.most, rel=0.01)
        assert own.facts.in_flight[stage] == min(2, 8 - stage)


SMALL = ("quickstart", "--num-layers", "8", "--global-batch-size", "24")
P2, P4 = (("--pipeline-model-parallel-size", each) for each in "24")
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")


@pytest.mark.parametrize("flags", [
    P2,
    (*P4, "--pipeline-schedule", "gpipe"),
    (*P4, *VIRTUAL),
    (*P2, *VIRTUAL, "--recompute-granularity", "full"),
    (*P4, "--pipeline-schedule", "zb-h1"),
    (*P4, "--decoder-first-pipeline-num-layers", "4", "--recompute-granularity", "selective"),
    (*P2, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--kind", "bert",
     "--tokenizer-type", "none"),
])  # fmt: skip
def test_every_schedule(flags: tuple[str, ...]) -> None:
    step = small(*flags)
    for own in step.stages:
        traffic, kept, _ = found_on(own.rank, step)
        assert planned_by_axis(own) == (by_axis(traffic.calls), by_axis(traffic.bytes))
        memory = own.memory
        if "zb-h1" not in flags:  # which keeps more than autograd does
            assert memory["activations"] == pytest.approx(kept.most, rel=0.01)
        passing = memory["total"] - sum(own.lasting.values())
        most = most_at_a_time(own)
        assert passing == pytest.approx(most, rel=0, abs=0.01 * most + own.trace.message)


def small(*flags: str) -> Step:
    config = preset(*SMALL, *flags)
    step = Step(config, 2 * prod(config.parallel.sizes.values()), "fp16", "cpu")
    config.check(step.ranks)
    return step


def most_at_a_time(step: Step) -> int:
    """Bytes of all that forwards and backwards make, messages too."""
    with fake_ranks(step.config, step.ranks, META, rank_of(step.rank, step)) as mesh:
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


UNIFORM = (*P4, "--pipeline-partition", "uniform", "--global-batch-size")
KINDS = {  # idle moments, beside those of 1f1b
    "gpipe": (("--pipeline-schedule", "gpipe"), 1),
    "zero bubble": (("--pipeline-schedule", "zb-h1"), 1 / 3),
    "interleaved": (VIRTUAL, 1 / 2),
}


def test_the_slowest_stage_sets_the_pace() -> None:
    """Of 2 layers on each rank it is the last one, which has the head; the first and the last
    micro-batch go alone through the other three."""
    twelve, more = small(*UNIFORM, "96"), small(*UNIFORM, "192")
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


@pytest.mark.parametrize(("flags", "share"), KINDS.values(), ids=KINDS)
def test_schedules_have_their_bubbles(flags: tuple[str, ...], share: float) -> None:
    plain, found = (predict(small(*UNIFORM, "96", *more), A100) for more in ((), flags))
    assert found.pipeline_bubble == pytest.approx(share * plain.pipeline_bubble, rel=0.1)
    assert found.matrix_products == pytest.approx(plain.matrix_products, rel=0.01)
