"""Source C: the tutorial's Llama, a small one here, by its example, by pretrain.py, and as the
tutorial builds it with torch's own tensor parallelism."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import pretrain
from examples import llama_2d
from megatron.api import StepResult, build_state
from tests.data.samples import write_tokenizer_json
from tests.dist import Pool
from tests.programs import assert_equal_bits, start_ranks
from tests.tiny import mesh_of_ranks, whole_weights
from tools import generate

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, LAYERS, BATCH, WARMUP, STEPS = 12, 3, 2, 8, 5, 21
SMALL = {
    "--num-layers": LAYERS,
    "--hidden-size": 96,
    "--seq-length": 64,
    "--global-batch-size": BATCH,
    "--lr-warmup-iters": WARMUP,
}
# Of 84 documents: one of the 21 batches has the last ones of an epoch and the first of the next.
OF_EXAMPLE = {"--micro-batch-size": 2, "--epochs": 2}
TENSOR = ("--tensor-model-parallel-size", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json, and web.jsonl with documents of which some are cut and most are padded."""
    folder, random = tmp_path_factory.mktemp("llama"), Random(0)
    write_tokenizer_json(folder)
    texts = ["".join(random.choices("abcdefg ", k=random.randint(1, 90))) + "x" for _ in range(84)]
    (folder / "web.jsonl").write_text("".join(f"{json.dumps({'text': t})}\n" for t in texts))
    return folder


def words_of(folder: Path, *more: str | Path, **given: Any) -> list[str]:
    flags = {"--vocab-file": folder, **SMALL, **given}
    if "--dataset-name" not in more and "--data-path" not in more:
        flags["--data-path"] = folder / "web.jsonl"
    return [str(word) for pair in flags.items() for word in pair] + [str(word) for word in more]


def read_flags(words: list[str]) -> Namespace:
    with patch.object(sys, "argv", ["llama_2d.py", *words]):
        return llama_2d.read_flags()


def example(words: list[str], file: Path, killed_before: int | None = None) -> None:
    """The program; the first rank writes the losses to `file`. killed_before: a step."""

    def step(state: Any, *arguments: Any) -> StepResult:
        if state.step + 1 == killed_before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = train_step(state, *arguments)
        if state.mesh.is_first:
            with file.open("a") as stream:
                stream.write(f"{result.loss!r}\n")
        return result

    train_step = llama_2d.train_step
    argv = patch.object(sys, "argv", ["llama_2d.py", *words])
    with argv, patch.object(llama_2d, "train_step", step):
        llama_2d.main()


def run(
    folder: Path,
    place: Path,
    *more: str | Path,
    world: int = 1,
    code: int = 0,
    killed_before: int | None = None,
) -> str:
    """What the first rank printed; the losses are added to those in `place`."""
    place.mkdir(exist_ok=True)
    words = words_of(folder, "--no-bf16", *more, **OF_EXAMPLE)
    target = partial(example, words, place / "losses", killed_before)
    with start_ranks(target, range(world), world, place) as started:
        assert set(started.wait()) == {code}, started.text()
        return started.text(0)


def losses(place: Path) -> list[float]:
    return [float(line) for line in (place / "losses").read_text().split()]


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[float]:
    text = run(folder, folder / "serial")
    found = losses(folder / "serial")
    assert f"loss={found[-1]:.4f}" in text
    assert f"{STEPS}/{STEPS}" in text
    assert len(found) == STEPS
    assert found[-1] < found[0]
    return found


def test_two_axes_are_one_process(folder: Path, serial: list[float], tmp_path: Path) -> None:
    """The second one fully sharded, as by default."""
    run(folder, tmp_path / "2d", *TENSOR, world=4)
    assert losses(tmp_path / "2d") == pytest.approx(serial, rel=1e-5)


def test_killed_and_resumed_it_is_the_same_run(
    folder: Path, serial: list[float], tmp_path: Path
) -> None:
    """Moments, learning rate and place in the data, fully sharded in the same layout to the bit;
    and in another one, at another stage of ZeRO."""
    save = ("--save-interval", "4", "--save")
    run(folder, tmp_path / "whole", *save, tmp_path / "one", world=2)
    killed = {"world": 2, "code": -signal.SIGKILL, "killed_before": 11}
    for name in ("same", "other"):
        run(folder, tmp_path / name, *save, tmp_path / f"{name}_save", **killed)
        assert max((tmp_path / f"{name}_save").glob("step_*")).name == "step_00000008"
    run(folder, tmp_path / "same", *save, tmp_path / "same_save", world=2)
    other = (*TENSOR, "--zero-stage", "1", "--save", tmp_path / "other_save")
    run(folder, tmp_path / "other", *other, world=4)
    for name in ("same", "other"):
        found = losses(tmp_path / name)  # steps 9 and 10 twice
        assert found[:10] + found[12:] == pytest.approx(serial, rel=1e-5)
        assert found[8:10] == pytest.approx(found[10:12], rel=1e-6)
    last = "step_00000021"
    assert_equal_bits(tmp_path / "one" / last, tmp_path / "same_save" / last)


def test_another_run_is_not_resumed(folder: Path, tmp_path: Path) -> None:
    save = ("--save", tmp_path / "save")
    run(folder, tmp_path / "first", *save)
    for words in ("--global-batch-size 4", "--epochs 3", "--seq-length 32", "--hidden-size 48"):
        text = run(folder, tmp_path / words.replace(" ", ""), *save, *words.split(), code=2)
        assert "error: --save" in text
    words = words_of(folder, "--pure-bf16", *map(str, save), **OF_EXAMPLE)
    with start_ranks(partial(example, words, tmp_path / "pure"), range(1), 1, tmp_path) as started:
        assert started.wait() == [2], started.text()


def program(arguments: list[str]) -> None:
    pretrain.main(arguments, os.environ)


def test_the_preset_is_the_same_run(folder: Path, serial: list[float], tmp_path: Path) -> None:
    words = "--model llama --preset llama_tutorial --ffn-hidden-size 384 --vocab-size 263 --no-bf16"
    words += f" --log-interval 1 --eval-iters 0 --metrics-file {tmp_path}/metrics.jsonl"
    words += " --zero-stage 3"
    arguments = words_of(folder, *words.split(), **OF_EXAMPLE)
    with start_ranks(partial(program, arguments), range(2), 2, tmp_path) as started:
        assert started.wait() == [0, 0], started.text()
    found = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    lines = [each for each in found if "loss" in each]
    assert [each["loss"] for each in lines] == pytest.approx(serial, rel=1e-5)
    assert lines[0]["lr"] == 1e-4


def test_pure_bf16_keeps_bf16_alone(folder: Path, serial: list[float], tmp_path: Path) -> None:
    words = words_of(folder, "--pure-bf16", "--save", tmp_path / "save", **OF_EXAMPLE)
    target = partial(example, words, tmp_path / "losses")
    with start_ranks(target, range(1), 1, tmp_path) as started:
        assert started.wait() == [0], started.text()
    assert losses(tmp_path) == pytest.approx(serial, rel=0.03)
    manifest = json.loads((tmp_path / "save" / "step_00000021" / "manifest.json").read_text())
    assert {each["dtype"] for each in manifest["tensors"].values()} == {"bfloat16"}
    words = ["--load", str(tmp_path / "save"), "--prompt", "ab", "--max-new-tokens", "3"]
    generate.main([*words, "--output", str(tmp_path / "texts.json")], {})
    (text,) = json.loads((tmp_path / "texts.json").read_text())
    assert text["prompt"] == "ab"


def test_every_kind_of_data_is_read_alike(folder: Path, tmp_path: Path) -> None:
    import datasets

    file = str(folder / "web.jsonl")
    datasets.Dataset.from_json(file, cache_dir=str(tmp_path)).save_to_disk(tmp_path / "saved")
    ways = (("--data-path", file), ("--data-path", tmp_path / "saved"), ("--dataset-name", file))
    first, *others = (llama_2d.open_data(read_flags(words_of(folder, *way))) for way in ways)
    batch = first[0].batch(range(BATCH))
    ends = batch.is_real.sum(axis=1) - 1
    assert (batch.tokens[:, 0] == 0).all()  # [BOT]
    assert 0 < batch.is_cut.sum() < BATCH
    for row, (end, is_cut) in enumerate(zip(ends, batch.is_cut, strict=True)):
        if not is_cut:
            assert (batch.tokens[row, end:] == [1] + [2] * (63 - end)).all()  # [EOT] [PAD] ..
            assert batch.loss_mask[row].sum() == end
    for data, tokenizer, identity in others:
        assert identity["data"] != []
        sizes = tokenizer.vocab_size, data.samples_per_epoch
        assert sizes == (263, 84) == (first[1].vocab_size, 84)
        assert (data.batch(range(BATCH)).tokens == batch.tokens).all()


def test_it_says_how_it_is_used(folder: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/llama_2d.py", "--help"]
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert "--pure-bf16" in ended.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (" ".join(TENSOR), TENSOR[0]),
        ("--num-query-groups 5", "--num-query-groups"),
        ("--pure-bf16", "--pure-bf16"),  # beside --no-bf16
        ("--micro-batch-size 3", "--global-batch-size"),
        ("--lr-warmup-iters 40", "--lr-warmup-iters"),
        ("--seq-length 4096", "--seq-length"),
        ("--data-path nowhere.jsonl", "--data-path"),
        ("--vocab-file nowhere.json", "--vocab-file"),
        ("--global-batch-size 400", "--epochs"),
    ],
)
def test_bad_input_is_one_line(folder: Path, tmp_path: Path, words: str, named: str) -> None:
    text = run(folder, tmp_path / "logs", *words.split(), code=2)
    errors = [line for line in text.splitlines() if line.strip()]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {named}")


# The tutorial's model and loop, with no line of this project.


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def turned(x: Tensor) -> Tensor:
    """x [b, s, a, d] by its positions."""
    size = x.shape[-1]
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    cos, sin = (each(angles).repeat(1, 2)[:, None] for each in (torch.cos, torch.sin))
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-two, one], dim=-1) * sin


class SelfAttention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        kv = hidden // HEADS * KV_HEADS
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, kv, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, x.shape[-1] // HEADS)) for each in self.qkv)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=2) for each in (turned(k), v))
        heads = (each.transpose(1, 2) for each in (turned(q), k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out

    @property
    def qkv(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(hidden), Norm(hidden)
        self.attention, self.mlp = SelfAttention(hidden), FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TutorialLlama(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(LAYERS))
        self.norm, self.head = Norm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def plan() -> dict[str, Any]:
    whole, cut = Replicate(), Shard(1)
    gathered = {"input_layouts": cut, "desired_input_layouts": whole}
    layer = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(**gathered),
        **{f"attention.{name}": ColwiseParallel(output_layouts=whole) for name in "qkv"},
        "attention.o": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(**gathered),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=cut),
    }
    return {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        **{f"layers.{n}.{name}": style for n in range(LAYERS) for name, style in layer.items()},
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=cut, output_layouts=Shard(-1), use_local_output=False
        ),
    }


def named_as_theirs(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {
        "embedding.weight": weights["word_embedding.weight"],
        "norm.weight": weights["final_norm.weight"],
        "head.weight": weights["head.weight"],
    }
    for number in range(LAYERS):
        ours, theirs = f"transformer.layers.{number}", f"layers.{number}"
        qkv, up = f"{ours}.attention.qkv", weights[f"{ours}.mlp.up.weight"]
        k, v = weights[f"{qkv}.key_value"]
        found |= {
            f"{theirs}.norm1.weight": weights[f"{ours}.attention_norm.weight"],
            f"{theirs}.norm2.weight": weights[f"{ours}.mlp_norm.weight"],
            f"{theirs}.attention.q.weight": weights[f"{qkv}.query"],
            f"{theirs}.attention.k.weight": k,
            f"{theirs}.attention.v.weight": v,
            f"{theirs}.attention.o.weight": weights[f"{ours}.attention.output.weight"],
            f"{theirs}.mlp.gate.weight": up[0],
            f"{theirs}.mlp.up.weight": up[1],
            f"{theirs}.mlp.down.weight": weights[f"{ours}.mlp.down.weight"],
        }
    return found


def train_ours(words: list[str]) -> tuple[dict[str, Tensor], list[float]]:
    """(initial weights, losses) of the example on the ranks of the pool, which share the model."""
    flags = read_flags(words)
    model, optimizer = llama_2d.configs(flags)
    data, tokenizer, _ = llama_2d.open_data(flags)
    size = tokenizer.vocab_size
    state = build_state(model, mesh_of_ranks(2), size, seed=1, optimizer=optimizer)
    weights = {name: each.clone() for name, each in whole_weights(state.model).items()}
    steps = llama_2d.train(state, data, optimizer, flags, save=lambda: None)
    return weights, [each.loss for each in steps]


def train_theirs(words: list[str], weights: Mapping[str, Tensor]) -> list[float]:
    data, tokenizer, _ = llama_2d.open_data(read_flags(words))
    vocabulary = tokenizer.vocab_size
    model = TutorialLlama(vocabulary, weights["final_norm.weight"].numel())
    model.load_state_dict(named_as_theirs(weights))
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, plan())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedulers = [
        LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=WARMUP),
        CosineAnnealingLR(optimizer, T_max=STEPS - WARMUP, eta_min=0.0),
    ]
    scheduler, losses = SequentialLR(optimizer, schedulers, milestones=[WARMUP]), []
    for first in range(0, STEPS * BATCH, BATCH):
        batch = data.batch(range(first, first + BATCH))
        labels = torch.from_numpy(batch.labels).masked_fill(
            torch.from_numpy(batch.loss_mask) == 0, -100
        )
        optimizer.zero_grad()
        with loss_parallel():
            logits = model(torch.from_numpy(batch.tokens))
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss.backward()
        gradients = [each.grad for each in model.parameters()]
        assert all(isinstance(each, DTensor) for each in gradients)
        norm = sum(each.full_tensor().double().square().sum() for each in gradients) ** 0.5
        for each in gradients:
            each.mul_(min(1.0, 1.0 / (float(norm) + 1e-6)))
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    return losses


def test_twenty_steps_are_those_of_torch_s_tensor_parallelism(folder: Path, gloo: Pool) -> None:
    words = words_of(folder, **OF_EXAMPLE)
    (weights, ours), _ = gloo.run(2, train_ours, words)
    theirs, again = gloo.run(2, train_theirs, words, weights)
    assert theirs == again
    assert ours == pytest.approx(theirs, abs=1e-5)
