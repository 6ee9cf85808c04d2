"""The derived figures of a step equal those of the whole model: its collectives and FLOPs exactly,
its memory within 5 %."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.pretrain import PretrainConfig
from megatron.parallel.kernels import use_cpu_kernels
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.train.state import DTYPES, TrainState, build_state
from megatron.train.step import count, forward_backward, train_step
from tests.dist import Pool
from tests.tiny import GRANULARITIES
from tests.tools.plan.counted import (
    META,
    Sums,
    batches,
    fake_ranks,
    mesh_of,
    planned_calls,
    preset,
    run_rank,
    state_on,
)
from tools.layouts.job import of_pretraining
from tools.layouts.meters import Counts, counting, saved_bytes
from tools.layouts.work import Call, Meter, on_meta
from tools.plan.absent import absent_mesh
from tools.plan.trace import Step

CPU = torch.device("cpu")
SHORT = "--num-layers 2 --global-batch-size 128"  # two micro-batches of few layers
FEW = "--num-layers 4"
OWN = "--kind tests.models.own_kind:KIND --num-layers 1 --hidden-size 48 --num-attention-heads 12"
OWN += " --seq-length 64"
GATED = "--activation swiglu --ffn-hidden-size 8192 --embedding-dropout 0"
GATED += " --untie-embeddings-and-output-weights"
SEQUENCE, TENSOR = "--sequence-parallel", "--tensor-model-parallel-size"
XL = "--num-layers 48 --hidden-size 1600 --num-attention-heads 25"
SMALL = "--seq-length 128 --max-position-embeddings 128 --hidden-size 256 --num-attention-heads 4"
SMALL += " --vocab-size 4000"
RECOMPUTED = "--recompute-granularity"
DROPS = [f"--attention-dropout {p} --hidden-dropout {p}" for p in (0, 0.1)]


@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [
        ("gpt2_scaling_1.2b", 512, FEW),
        ("gpt2_scaling_2.5b", 512, FEW),
        ("gpt2_scaling_8.3b", 512, FEW),
        ("gpt2_scaling_8.3b", 512, f"{SEQUENCE} {FEW}"),
        ("gpt2_scaling_8.3b", 8, f"--hidden-dropout 0 {FEW}"),
        ("gpt2_scaling_8.3b", 16, f"{GATED} {FEW}"),
        ("gpt2_8.3b", 64, f"{RECOMPUTED} none {SHORT}"),
        ("gpt2_8.3b", 64, f"{RECOMPUTED} selective {SEQUENCE} {SHORT}"),
        ("bert_1.3b", 256, FEW),
        ("bert_3.9b", 512, f"--residual-order post-ln {FEW}"),
        ("bert_3.9b", 512, f"{SEQUENCE} {FEW}"),
        ("llama3_8b", 64, f"{FEW} --global-batch-size 16"),
        # Keys and values of 2 heads on 4 ranks.
        ("miniature_llama", 4, f"{TENSOR} 4 {FEW}"),
        ("quickstart", 8, f"{TENSOR} 4 --global-batch-size 8 {OWN}"),
    ],
)
def test_collectives_are_those_of_the_model(name: str, ranks: int, flags: str) -> None:
    config = preset(name, flags)
    config.check(ranks)
    step = Step(config, ranks, "fp16")
    counted, *_ = run_rank(step)
    calls, sizes = planned_calls(step)
    # The ranks' agreement after the backward is not counted: terms of the loss, then the norm.
    terms = 2 if "bert" in name else 1
    for axis, size in (("tensor", 3 * 8), ("data", (1 + terms) * 8)):
        calls[axis, "agreement"] -= step.model.rings[axis].ranks > 1
        sizes[axis, "agreement"] -= size * (step.model.rings[axis].ranks > 1)
    assert +calls == counted.calls
    assert +sizes == counted.bytes


PARTS = "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --vocab-size 4000"
PARTS += " --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
GPT2, BERT = f"quickstart {RECOMPUTED} none", f"miniature_bert {RECOMPUTED} none"
AGAIN, LLAMA = f"quickstart {RECOMPUTED} full", f"miniature_llama {RECOMPUTED} selective"
GRID, CONTEXT = "--tensor-parallel-mode", "--context-parallel-size"
RING = f"--cp-comm-type p2p {CONTEXT}"
ZERO = tuple(f"quickstart --zero-stage {stage}" for stage in (1, 2, 3))
# Ranks, precision, flags, and the presets with theirs.
LAYOUTS: dict[str, tuple[int, str, str, tuple[str, ...]]] = {
    "zero, d2": (2, "bf16", "--bf16 --global-batch-size 2", ZERO),
    "zero, d2, two micro-batches": (2, "bf16", "--bf16 --global-batch-size 4", ZERO),
    "zero, d2 t2 sequence": (
        4, "bf16", f"--bf16 --global-batch-size 2 {TENSOR} 2 {SEQUENCE}", ZERO
    ),
    "context, d2 c2": (4, "fp32", f"{CONTEXT} 2 --global-batch-size 4", (GPT2, BERT, LLAMA)),
    "ring, c2 t2": (4, "fp32", f"{RING} 2 {TENSOR} 2 --global-batch-size 2", (AGAIN, BERT)),
    "ring, c4": (4, "bf16", f"--bf16 {RING} 4 --global-batch-size 2", (GPT2,)),
    # The next ones have two micro-batches.
    "2d": (4, "fp32", f"{GRID} 2d {TENSOR} 4 --global-batch-size 4", (GPT2, BERT, LLAMA)),
    "2d, zero 1": (
        8, "fp32", f"{GRID} 2d {TENSOR} 4 --zero-stage 1 --global-batch-size 8", (LLAMA,)
    ),
    "2.5d": (
        8, "fp32", f"{GRID} 2.5d {TENSOR} 8 --tensor-parallel-depth 2 --global-batch-size 8",
        (GPT2,),
    ),
    "3d": (8, "fp32", f"{GRID} 3d {TENSOR} 8 --global-batch-size 8", (AGAIN, BERT)),
}  # fmt: skip


def sent_by_train_step(steps: list[Step]) -> list[Counts]:
    """The counts of a real step of each, on this rank."""
    found = []
    for step in steps:
        mesh = mesh_of(step.config)
        state = built(mesh, step.config, step.precision)
        samples = batches(step.config, step.micro_batches)
        with counting(mesh) as counts:
            train_step(state, samples, 1e-3)
        found.append(counts)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_sends_what_is_planned(gloo: Pool, layout: str) -> None:
    """The optimizer's part, too."""
    ranks, precision, flags, models = LAYOUTS[layout]
    configs = [preset(model, PARTS, flags) for model in models]
    steps, planned = [Step(config, ranks, precision, "cpu") for config in configs], []
    for step in steps:
        calls = Counter[str]()
        for call, times in sum(step.calls.values(), Counter[Call]()).items():
            calls[call.axis] += times
        planned.append((calls, {axis: step.sent(axis) for axis in calls}))
    fresh = [replace(step, config=of_pretraining(step.config)) for step in steps]
    for found in gloo.run(ranks, sent_by_train_step, fresh):
        assert [(counts.calls, counts.sent_bytes) for counts in found] == planned


@pytest.mark.parametrize("recompute", GRANULARITIES)
@pytest.mark.parametrize("dropout", DROPS)
def test_flops_are_those_of_the_model(recompute: str, dropout: str) -> None:
    """By torch's own counter, with the kernels of a CPU, whose attention goes block by block."""
    config = preset("quickstart --num-layers 3", dropout, RECOMPUTED, recompute)
    state = state_on(serial_mesh("meta"), config, "bf16")
    with FlopCounterMode(display=False) as counter:
        forward_backward(state, batches(config), torch.ones(2, dtype=torch.float64, device="meta"))
    work = Step(config, 1, "bf16", "cpu").work.values()
    pairs = (pair for phase in work for pair in phase.matmuls.items())
    assert sum(each.flops * times for each, times in pairs) == counter.get_total_flops()


@pytest.mark.parametrize("tensor", [1, 4])
def test_flops_are_those_of_the_papers_formula(tensor: int) -> None:
    """4 x the layers' forward with recomputation, 3 x the logits."""
    rows = f"--make-vocab-size-divisible-by {51_200 // tensor}"
    config = preset("gpt2_scaling_4.2b", f"{TENSOR} {tensor} {rows}")
    step = Step(config, 4 * tensor, "fp16")
    n, h, s, depth = 8 * 1024, 2304, 1024, 64
    layers, logits = depth * (24 * n * h**2 + 4 * n * s * h), 2 * n * h * 51_200
    assert step.executed_flops == 4 * (4 * layers + 3 * logits)
    assert step.flops == 4 * (6 * n * (12 * depth * h**2 + 50_257 * h) + 12 * n * s * h * depth)


def test_flops_of_a_bert_leave_out_what_fills_up_its_masked_tokens() -> None:
    config = preset("bert_336m", RECOMPUTED, "none")
    step = Step(config, 128, "fp16")
    n, b, h, s, k, depth = 8 * 512, 8, 1024, 512, round(0.15 * 8 * 512), 24

    def of(masked: int, vocabulary: int) -> int:
        heads = masked * (h**2 + vocabulary * h) + b * (h**2 + 2 * h)
        return 128 * (6 * (n * 12 * depth * h**2 + heads) + 12 * n * s * h * depth)

    assert step.flops == of(k, 30_522)
    filled = -(-k // 16) * 16 if use_cpu_kernels else k
    assert step.executed_flops == of(filled, 30_592)


def test_39_tflops_are_23_percent_mfu() -> None:
    step = Step(preset("gpt2_scaling_1.2b"), 1, "fp16")
    seconds = step.executed_flops / 39e12
    assert step.flops / (seconds * 130e12) == pytest.approx(0.23, abs=0.003)


def test_a_kind_of_ones_own_is_counted_as_it_is() -> None:
    """One layer, whatever --num-layers says, RMSNorm and shared keys: nothing knows of them."""
    config = preset("quickstart", OWN)
    two = preset("quickstart", OWN, "--num-layers 2")
    one, other = (Step(each, 1, "fp32") for each in (config, two))
    model = state_on(serial_mesh("meta"), config, "fp32").model
    assert one.model.local == sum(each.numel() for each in model.parameters())
    assert (other.flops, other.memory, other.calls) == (one.flops, one.memory, one.calls)
    n, h, size, f = config.training.micro_batch_size * 64, 48, 4, 4 * 48
    weights = 2 * h * h + 2 * 3 * size * h + 3 * f * h + 50_257 * h
    assert one.flops == config.global_batch_size(1) // config.training.micro_batch_size * (
        6 * n * weights + 12 * n * 64 * h
    )


def test_lasting_memory_has_its_bytes_a_parameter() -> None:
    """Pure bf16 has four numbers of two bytes; on four ranks ZeRO 3 has 16 / 4."""
    small = [Step(preset("gpt2_30m"), 1, precision) for precision in ("fp32", "bf16")]
    zero = Step(preset("gpt2_124m", XL, "--zero-stage 3"), 4, "bf16")
    pure = Step(preset("llama_tutorial", "--pure-bf16"), 1, "bf16")
    for step, each in zip([*small, pure, zero], (16, 18, 8, 4), strict=True):
        assert sum(step.lasting.values()) == pytest.approx(each * step.model.local, rel=1e-3)
    # In so small a model the logits take most, and are gone when the backward begins.
    assert all(0 < each.memory["one_layer"] < each.memory["logits"] / 2 for each in small)


SOME, LESS = "--micro-batch-size 4", "--micro-batch-size 1"
NONE, FULL = f"{RECOMPUTED} none", f"{RECOMPUTED} full"
# With a GPU's kernels; a plan for a GPU takes them by default, a model on meta does not.
OF_GPU = "--attention-dropout-rng kernel"
# Ranks, ZeRO stages, the preset with flags, micro-batches.
AT_PEAK = [
    # The peak is in the forward of the head, beside the last sums of the micro-batch before.
    (4, (1, 2, 3), f"gpt2_124m {SOME} {FEW} {NONE}", 2),
    (16, (2, 3), f"gpt2_124m {SOME} {FEW} {NONE}", 1),
    (4, (2, 3), f"bert_336m {SOME} {FEW} {FULL}", 2),
    (4, (1, 2, 3), f"bert_336m {SOME} {FEW} {FULL} {OF_GPU}", 2),
    (4, (2, 3), f"quickstart {SMALL} {SOME}", 2),
    # It is in a backward, where a bucket begins at the start of a layer, or in it.
    (4, (2, 3), f"bert_336m {SOME} {FEW} {FULL} {OF_GPU}", 1),
    (2, (2, 3), f"gpt2_124m {SOME} {FEW} {FULL}", 1),
    (16, (2, 3), f"gpt2_124m {SOME} {FULL}", 1),
    (4, (2, 3), f"gpt2_124m {XL} {LESS} {FULL} --seq-length 16", 1),
    (4, (2, 3), f"llama3_8b {LESS} {FEW} {NONE} {TENSOR} 1 --seq-length 512", 2),
    (4, (2, 3), f"gpt2_124m {LESS} {GATED} {FULL}", 1),
    # Norms' gradients are in one bucket, which the first layer completes; no other waits for it.
    (8, (2,), f"gpt2_355m {LESS} {TENSOR} 2 {SEQUENCE} {FULL} --seq-length 128", 1),
    (4, (1, 2, 3), f"gpt2_124m {SOME} {FULL} --optimizer-cpu-offload", 1),
]


@pytest.mark.parametrize(
    ("ranks", "stage", "words", "number"),
    [(ranks, stage, *case) for ranks, stages, *case in AT_PEAK for stage in stages],
)
def test_a_step_with_zero_takes_what_is_planned(
    ranks: int, stage: int, words: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live tensors of forwards and backwards. A processor without bf16 would widen the head."""
    monkeypatch.setattr("megatron.parallel.cpu.onednn.EMULATED", set())
    monkeypatch.setattr("megatron.parallel.offload.HOST", META)
    config = preset(words, f"--zero-stage {stage}")
    tensor, training = config.parallel.tensor_model_parallel_size, config.training
    batch = ranks // tensor * training.micro_batch_size * number
    config = replace(config, training=replace(training, global_batch_size=batch))
    device = "cuda" if OF_GPU in words else "cpu"
    step, cuts = Step(config, ranks, "bf16", device), config.parallel.cuts_stream
    sizes = {"data": ranks // tensor, "tensor": tensor}
    mesh, sums = absent_mesh(sizes, META, sequence_parallel=cuts), Sums()
    state = state_on(mesh, config, step.precision)
    buckets, weights = state.gradients.buckets, [*state.model.parameters()]
    gradients = [each.own_gradients if stage > 1 else each.gradients for each in buckets]
    masters = [each.local.masters for each in buckets if each.local is not None]
    moments = [each for pair in state.optimizer.moments for each in pair]
    parts = [*masters, *moments] * (not step.is_offloaded)
    lasting = [each for each in (*gradients, *parts, *weights * (stage < 3)) if each is not None]
    meter, samples = Meter(mesh, [*weights, *lasting]), batches(config) * number
    terms = len(state.model.terms)
    with patch("megatron.parallel.bucket.start_sum", sums.start), on_meta(meter, device):
        forward_backward(state, samples, torch.ones(1 + terms, dtype=torch.float64, device=META))
    lasts = sum(step.lasting.values())
    assert sum(each.nbytes for each in lasting) == lasts
    assert meter.peak == pytest.approx(step.memory["total"] - lasts, rel=0.001)
    phases = step.calls.keys() - {"agreement", "update"}
    planned = sum((step.calls[phase] for phase in phases), Counter[Call]())
    found = sum((each.calls for each in meter.work.values()), Counter[Call]())
    assert sum(found.values()) == sum(planned.values())
    ranks = mesh.data.size
    sent = [sum(n * each.sent(ranks) for each, n in calls.items()) for calls in (found, planned)]
    assert sent[0] == sent[1]


@pytest.mark.skipif(not use_cpu_kernels, reason="torch's attention keeps other tensors")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "flags",
    [
        *(f"quickstart {drop} {RECOMPUTED} {each}" for drop in DROPS for each in GRANULARITIES),
        f"miniature_llama {RECOMPUTED} none",
        f"miniature_llama {RECOMPUTED} selective",
    ],
)
def test_what_is_kept_is_what_autograd_saves(precision: str, flags: str) -> None:
    config = preset(flags, SMALL, "--num-layers 4")
    state = state_on(serial_mesh(), config, precision)
    saved = saved_bytes(state, batches(config)[0])
    assert Step(config, 1, precision, "cpu").trace.kept == pytest.approx(saved, rel=0.01)


def test_dropout_by_two_calls_of_flex_attention_is_planned() -> None:
    """It keeps the tensors of one call and its result scaled, and 16 columns and the sums of the
    second; those columns are computed, too, though nothing uses them."""
    config = preset("quickstart", DROPS[1])
    models = (
        replace(config.model, attention_dropout_rng=rng) for rng in ("kernel", "coordinates-flex")
    )
    of_call, by_flex = (Step(replace(config, model=m), 1, "bf16", "cuda") for m in models)
    model, length = config.model, config.data.seq_length
    micro_batch, heads = config.training.micro_batch_size, model.num_attention_heads
    queries = micro_batch * heads * length * model.num_layers
    size = model.hidden_size // heads
    more = by_flex.trace.kept - of_call.trace.kept - queries * 2 * (size + 16)
    assert 0 < more <= queries * 16
    assert by_flex.flops == of_call.flops
    batches = config.global_batch_size(1) // micro_batch
    more = 2 * queries * length * (3 * size + 3 * 16) * batches
    assert by_flex.executed_flops - of_call.executed_flops == more


def most_allocated(step: Callable[[], object]) -> int:
    """Bytes of all tensors that a step makes, at the time when they are most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


@pytest.mark.skipif(not use_cpu_kernels, reason="torch's attention keeps other tensors")
@pytest.mark.parametrize(
    ("precision", "granularity", "batch", "tensor", "cut"),
    [
        ("fp32", "full", 8, 1, ""),
        ("bf16", "none", 8, 1, ""),
        ("fp32", "none", 8, 4, ""),
        ("bf16", "full", 8, 2, SEQUENCE),
        ("bf16", "selective", 8, 4, SEQUENCE),
        ("bf16", "full", 4, 4, f"{GRID} 2d"),
        ("fp32", "none", 4, 8, f"{GRID} 3d"),
    ],
)
def test_a_step_allocates_what_is_planned(
    precision: str,
    granularity: str,
    batch: int,
    tensor: int,
    cut: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank whose neighbours are fake: the tensors that it gathers take memory all the same."""
    # Copies that oneDNN makes in fp32, on some processors and 6 MB at most, are not planned.
    monkeypatch.setattr("megatron.parallel.cpu.onednn.is_faster_by_onednn", lambda: False)
    flags = f"{RECOMPUTED} {granularity} --micro-batch-size {batch} --global-batch-size 16 {cut}"
    flags += f" {TENSOR} {tensor} {DROPS[1]} --num-layers 3"
    config = preset("quickstart", SMALL, flags)
    ranks = fake_ranks(config, tensor, CPU) if tensor > 1 else nullcontext(serial_mesh())
    with ranks as mesh:
        state, samples = built(mesh, config, precision), batches(config)
        forward_backward(state, samples, count(state, samples))
        most = most_allocated(lambda: forward_backward(state, samples, count(state, samples)))
    step = Step(config, tensor, precision, "cpu")
    lasting = sum(step.lasting.values())
    assert lasting + most == pytest.approx(step.memory["total"], rel=0.05)
    assert most == pytest.approx(step.memory["total"] - lasting, rel=0.1)


def built(mesh: Mesh, config: PretrainConfig, precision: str) -> TrainState:
    stage, dtype = config.parallel.stage_of_zero, DTYPES[precision]
    return build_state(config.model, mesh, 4000, seed=0, dtype=dtype, zero_stage=stage)
