"""Calls and bytes of the plan are those of the real model, on rank 0 of the paper's 512 ranks."""

import pytest

from megatron.config.pretrain import PretrainConfig
from megatron.parallel.kernels import use_cpu_kernels
from megatron.train.step import count, forward_backward
from tests.tools.planning.counted import Traffic, fake_ranks, meta_state, micro_batch
from tests.tools.planning.presets import planned, preset
from tools.planning.communication import data_calls, tensor_calls, totals
from tools.planning.shape import GPT2_VOCABULARY, Shape

KINDS = ("calls", "bytes")
NOTHING = dict.fromkeys(KINDS, 0)
# What is counted apart: as parts of the plan.
PHASES = {
    "agreement": ("agreement",),
    "forward": ("forward",),
    "backward": ("recomputation", "backward"),
}


FILLED_UP = pytest.mark.skipif(
    not use_cpu_kernels, reason="masked tokens are filled up, as is planned, for CPU kernels alone"
)
# Two micro-batches of few layers.
SHORT = ("--num-layers", "2", "--global-batch-size", "128")


def counted(config: PretrainConfig, shape: Shape, patch: pytest.MonkeyPatch) -> Traffic:
    """What a step says up to its backward; on meta tensors."""
    with fake_ranks(shape.ranks, shape.tensor) as mesh:
        traffic = Traffic(mesh, patch)
        state = meta_state(config, mesh, "fp16", config.model.vocab_size or GPT2_VOCABULARY)
        batches = [micro_batch(shape) for _ in range(shape.micro_batches)]
        counts = count(state, batches)
        traffic.follow(state.model)
        forward_backward(state, batches, counts)
    return traffic


def behind(shape: Shape, axis: str) -> tuple[int, int]:
    """(calls, bytes) of what ranks agree on behind the backward, which is not counted."""
    terms = 1 if shape.kind == "gpt2" else 2
    return {"tensor": (1, 3 * 8), "data": (1, (1 + terms) * 8)}[axis]


@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [
        ("gpt2_scaling_1.2b", 512, ()),
        ("gpt2_scaling_2.5b", 512, ()),
        ("gpt2_scaling_4.2b", 512, ()),
        ("gpt2_scaling_8.3b", 512, ()),
        ("gpt2_scaling_8.3b", 8, ("--hidden-dropout", "0", "--num-layers", "4")),
        ("gpt2_8.3b", 64, ("--recompute-granularity", "none", *SHORT)),
        ("gpt2_8.3b", 64, ("--recompute-granularity", "selective", *SHORT)),
        pytest.param("bert_1.3b", 256, ("--num-layers", "4"), marks=FILLED_UP),
        pytest.param(
            *("bert_3.9b", 512, ("--num-layers", "4", "--residual-order", "post-ln")),
            marks=FILLED_UP,
        ),
    ],
)
def test_counts_are_those_of_the_model(
    name: str, ranks: int, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preset(name, *flags)
    shape = planned(config, ranks, "fp16")
    found = counted(config, shape, monkeypatch)
    for axis, calls in (("tensor", tensor_calls(shape)), ("data", data_calls(shape))):
        plan = totals(calls)["by_phase"]
        sums = {
            phase: [sum(plan.get(each, NOTHING)[kind] for each in parts) for kind in KINDS]
            for phase, parts in PHASES.items()
        }
        if plan:
            later = behind(shape, axis)
            sums["agreement"] = [
                each - part for each, part in zip(sums["agreement"], later, strict=True)
            ]
        counts = {phase: [found.calls[axis, phase], found.bytes[axis, phase]] for phase in PHASES}
        assert sums == counts
