"""The speed of a run: FLOPs as the planner counts them, the peak, time by phase."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.api import Callback, StepResult
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainConfig
from megatron.huggingface.pretrain import PretrainHuggingFaceConfig
from megatron.parallel.mesh import serial_mesh
from megatron.train.monitors import PeakMemory, Throughput, TimeLeft, duration
from megatron.train.utilization import Flops, flops_of, matmul_weights
from tests.dist import Pool
from tests.huggingface import write_folder
from tests.tiny import mesh_of_ranks
from tests.tools.plan.counted import preset, state_on
from tests.train.test_callbacks import run
from tests.train.test_loop import lines
from tools.plan.absent import absent_mesh
from tools.plan.trace import Step


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("gpt2_scaling_1.2b --num-layers 2", 0),
        ("gpt2_355m --num-layers 2 --untie-embeddings-and-output-weights", 0),
        ("miniature_llama", 0),
        # Small weights of heads, which read one token of a sample or the masked ones, count whole.
        ("bert_336m", 0.01),
        ("vit_b16_224 --num-layers 2", 0.02),
    ],
)
def test_flops_are_those_of_the_planner(name: str, tolerance: float) -> None:
    config = preset(name, "--recompute-granularity none")
    state = state_on(serial_mesh("meta"), config, "bf16")
    found = flops_of(config, state)
    assert found is not None
    step = Step(config, 1, "bf16")
    units = config.global_batch_size(1) * config.seq_length / config.tokens_per_unit
    assert found.full * units == pytest.approx(step.flops, rel=tolerance or 1e-12)
    if config.model.is_causal:
        attention = 12 * config.model.num_layers * config.model.hidden_size * config.seq_length
        assert found.full - found.causal == attention / 2
    else:
        assert found.causal is None
    assert found.peak is None


def test_the_peak_is_that_of_the_device_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = preset("miniature_llama"), torch.device("cuda")
    state = state_on(serial_mesh("meta"), config, "bf16")
    of_gpu: Any = SimpleNamespace(mesh=replace(state.mesh, device=device), model=state.model)
    for name, of_half in (("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989e12), ("P100", None)):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _, each=name: each)
        for of_gpu.precision, peak in (("bf16", of_half), ("fp32", None)):
            found = flops_of(config, of_gpu)
            assert found is not None
            assert found.peak == peak


def unmodified(folder: Path, kind: str, tensor: int = 1, **more: Any) -> PretrainConfig:
    longer = {"n_positions" if kind == "gpt2" else "max_position_embeddings": 64}
    write_folder(folder, kind, vocab_size=16_384, **longer, **more)
    words = f"--hf-model {folder} --seq-length 64 --micro-batch-size 2 --train-iters 10 --no-bf16"
    words += f" --mock-data --tensor-model-parallel-size {tensor}"
    return parse(PretrainHuggingFaceConfig, words.split(), {})


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_flops_of_an_unmodified_model(kind: str, tmp_path: Path) -> None:
    config, meta = unmodified(tmp_path, kind), torch.device("meta")
    state = state_on(serial_mesh("meta"), config, "fp32")
    found, step = flops_of(config, state), Step(config, 1, "fp32")
    assert found is not None
    # The plan counts a matmul of rotary angles in transformers 5.17.
    rel = 1e-12 if kind == "gpt2" else 1e-5
    assert found.full * config.global_batch_size(1) * 64 == pytest.approx(step.flops, rel=rel)
    cut = state_on(absent_mesh({"tensor": 2}, meta), unmodified(tmp_path, kind, 2), "fp32")
    assert matmul_weights(cut.model, 1.0) == matmul_weights(state.model, 1.0)


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
        {"num_experts": 4},
        {"kv_lora_rank": 8},
    ],
    ids=["window", "experts", "latent heads"],
)
def test_flops_that_are_not_known_are_not_guessed(more: dict[str, Any], tmp_path: Path) -> None:
    config = unmodified(tmp_path, "qwen3", **more)
    assert flops_of(config, state_on(serial_mesh("meta"), config, "fp32")) is None


class Reader:
    """The numbers that a callback adds."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.texts: list[str | None] = []

    def add(self, text: str | None = None, **values: Any) -> None:
        self.values |= values
        self.texts.append(text)


def test_mfu_is_of_the_peak_and_appears_with_it() -> None:
    """A fake clock: 2 steps of 500 tokens in 4 seconds, 1 of them waiting, on two devices."""
    for peak, causal in ((1000.0, 6.0), (1000.0, None), (None, 6.0)):
        callback, training = Throughput(Flops(8.0, causal, peak, "")), Reader()
        training.clock = SimpleNamespace(training=1.0, waited=0.0)
        training.state = SimpleNamespace(mesh=SimpleNamespace(size=lambda: 2))
        callback.training = training
        callback.pre_train()
        for _ in range(2):
            callback.pre_step([SimpleNamespace(unit="tokens")])
            callback.post_step(SimpleNamespace(tokens=500))
        training.clock = SimpleNamespace(training=5.0, waited=1.0)
        callback.pre_log()
        found = training.values
        assert (found["tokens_per_second"], found["tokens_per_second_per_device"]) == (250, 125)
        assert (found["step_seconds"], found["data_wait_share"]) == (2, 0.25)
        assert found["tflops_per_device"] == 125 * 8 / 1e12
        assert found.get("mfu") == (None if peak is None else 1.0)
        assert found.get("mfu_causal") == (0.75 if peak and causal else None)
        shown = ["2,000 ms | 250 tokens/s", "25 % waiting for data", *["MFU 100 %"] * bool(peak)]
        assert [text for text in training.texts if text] == shown


def test_the_time_left_is_at_the_pace_since_the_first_step() -> None:
    """The first of 10 steps, which compiles, takes 90 s, and the next three 6 s."""
    callback, training = TimeLeft(), Reader()
    callback.training, training.steps = training, 10
    callback.pre_train()
    for step, elapsed in ((1, 90.0), (4, 96.0)):
        training.state, training.clock = (
            SimpleNamespace(step=step),
            SimpleNamespace(elapsed=elapsed),
        )
        callback.post_step(None)
    callback.pre_log()
    assert (training.values, training.texts) == ({"seconds_left": 12.0}, ["12 s left"])


def test_a_duration_has_its_two_largest_units() -> None:
    for seconds, text in (
        (0.4, "0 s"),
        (59.7, "1 min 0 s"),
        (340, "5 min 40 s"),
        (7500, "2 h 5 min"),
        (7199.9, "2 h 0 min"),
        (273_600, "3 d 4 h"),
    ):
        assert duration(seconds) == text


def timed(folder: Path, layout: str) -> list[dict[str, Any]]:
    own = folder / str(mesh_of_ranks(layout).control.rank)
    run(own, [], layout)
    return [line for line in lines(own) if "loss" in line] if (own / "m.jsonl").exists() else []


@pytest.mark.parametrize("layout", ["serial", "data=2"])
def test_phases_of_a_step_add_up_to_it(gloo: Pool, tmp_path: Path, layout: str) -> None:
    """They are those of the step before each line."""
    if layout == "serial":
        found = timed(tmp_path, layout)
    else:
        found, _ = gloo.run(2, timed, tmp_path, layout)
    assert "median_phases" not in found[0]
    for before, line in pairwise(found):
        for name in ("median", "slowest"):
            phases = line[f"{name}_phases"]
            assert phases.keys() == {"forward", "backward", "p2p", "reduction", "optimizer"}
            assert all(seconds > 0 for seconds in phases.values())
            assert line[f"{name}_seconds"] == phases["forward"] + phases["backward"]
            assert sum(phases.values()) < before["step_seconds"]
        assert line["slowest_seconds"] >= line["median_seconds"]
        assert {line["slowest_rank"], line["median_rank"]} == {0} if layout == "serial" else {0, 1}


def test_only_the_steps_before_lines_are_timed(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(Callback):
        def post_step(self, result: StepResult) -> None:
            seen.append(self.training.state.mark is not str)

    run(tmp_path, [Looks()], train_iters=6, log_interval=3)
    assert seen == [False, True, False, False, True, False]


def test_memory_of_each_rank_is_recorded_when_one_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callback, training = PeakMemory(), Reader()
    callback.training = training
    training.state = SimpleNamespace(mesh=serial_mesh("cpu"))
    callback.pre_train()
    recorded = []
    for by_rank in ([100, 200], [100, 201], [102, 201], [102, 201]):
        monkeypatch.setattr("megatron.train.monitors.peak_memory", lambda _, each=by_rank: each)
        training.values = {}
        callback.pre_log()
        assert training.values["peak_memory_bytes"] == max(by_rank)
        recorded.append(training.values.get("peak_memory_bytes_by_rank"))
    assert recorded == [[100, 200], None, [102, 201], None]
