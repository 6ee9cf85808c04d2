"""Source C: the tutorial's Llama, a small one here, by its example, by pretrain.py, and in plain
torch; torch's own tensor parallelism is in tests/tools/convert/legacy/test_dcp.py."""

import json
import os
import signal
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from examples import llama_2d
from megatron.api import StepResult, build_state
from tests import plain
from tests.data.samples import short_texts, write_texts, write_tokenizer_json
from tests.dist import Pool
from tests.examples.test_examples import ROOT
from tests.programs import newest, run_ranks, run_script, start_ranks, values_of
from tests.tiny import mesh_of_ranks, set_weights
from tools import generate

HEADS, KV_HEADS, LAYERS, BATCH, WARMUP, STEPS = 12, 3, 2, 8, 5, 11
HIDDEN = 96
SMALL = {
    "--num-layers": LAYERS,
    "--hidden-size": HIDDEN,
    "--seq-length": 64,
    "--global-batch-size": BATCH,
    "--lr-warmup-iters": WARMUP,
}
# 44 documents: one of the 11 batches has the last ones of an epoch and the first of the next.
OF_EXAMPLE = {"--micro-batch-size": 2, "--epochs": 2}
TENSOR = ("--tensor-model-parallel-size", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json, and web.jsonl with documents of which some are cut and most are padded."""
    folder = tmp_path_factory.mktemp("llama")
    write_tokenizer_json(folder)
    write_texts(folder / "web.jsonl", short_texts(44, 90))
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
) -> None:
    """The losses are added to those in `place`."""
    place.mkdir(exist_ok=True)
    words = words_of(folder, "--no-bf16", *more, **OF_EXAMPLE)
    target = partial(example, words, place / "losses", killed_before)
    with start_ranks(target, range(world), world, place) as started:
        assert set(started.wait()) == {code}, started.text()


def losses(place: Path) -> list[float]:
    return [float(line) for line in (place / "losses").read_text().split()]


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[float]:
    run(folder, folder / "serial")
    found = losses(folder / "serial")
    assert len(found) == STEPS
    assert found[-1] < found[0]
    return found


def test_killed_and_resumed_at_another_layout_it_is_one_process(
    folder: Path, serial: list[float], tmp_path: Path
) -> None:
    """Two axes, fully sharded as by default; then one, at another stage of ZeRO. Moments, learning
    rate and place in the data go on."""
    save = ("--save-interval", "3", "--save", tmp_path / "save")
    run(folder, tmp_path, *TENSOR, *save, world=4, code=-signal.SIGKILL, killed_before=6)
    assert newest(tmp_path / "save").name == "step_00000003"
    run(folder, tmp_path, "--zero-stage", "1", *save, world=2)
    found = losses(tmp_path)  # steps 4 and 5 twice
    assert found[:5] + found[7:] == pytest.approx(serial, rel=1e-5)
    assert found[3:5] == pytest.approx(found[5:7], rel=1e-6)
    run(folder, tmp_path, "--epochs", "3", *save, code=2)  # another run is refused


def test_pure_bf16_keeps_bf16_alone(folder: Path, serial: list[float], tmp_path: Path) -> None:
    """Data by a name are the same, too."""
    data = ("--dataset-name", folder / "web.jsonl")
    words = words_of(folder, "--pure-bf16", "--save", tmp_path / "save", *data, **OF_EXAMPLE)
    run_ranks(partial(example, words, tmp_path / "losses"), 1, tmp_path)
    assert losses(tmp_path) == pytest.approx(serial, rel=0.03)
    manifest = json.loads((newest(tmp_path / "save") / "manifest.json").read_text())
    assert {each["dtype"] for each in manifest["tensors"].values()} == {"bfloat16"}
    words = ["--load", str(tmp_path / "save"), "--prompt", "ab", "--max-new-tokens", "3"]
    generate.main([*words, "--output", str(tmp_path / "texts.json")], {})
    (text,) = json.loads((tmp_path / "texts.json").read_text())
    assert text["prompt"] == "ab"


def test_the_preset_is_the_same_run(folder: Path, serial: list[float], tmp_path: Path) -> None:
    words = "--model llama --preset llama_tutorial --ffn-hidden-size 384 --vocab-size 263 --no-bf16"
    words += f" --log-interval 1 --eval-iters 0 --metrics-file {tmp_path}/metrics.jsonl"
    words += " --zero-stage 3"
    arguments = words_of(folder, *words.split(), **OF_EXAMPLE)
    run_script(ROOT / "pretrain.py", *arguments, world=2, folder=tmp_path)
    assert values_of(tmp_path) == pytest.approx(serial, rel=1e-5)
    assert values_of(tmp_path, "lr")[0] == 1e-4


# The tutorial's loop in plain torch, in one process.


def model_of(vocabulary: int) -> plain.Llama:
    torch.manual_seed(1)
    sizes = {"heads": HEADS, "groups": KV_HEADS, "inner": 4 * HIDDEN}
    return plain.Llama(vocabulary, HIDDEN, LAYERS, **sizes)


def train_ours(words: list[str]) -> list[float]:
    """The losses of the example on the ranks of the pool, which share the model."""
    flags = read_flags(words)
    model, optimizer = llama_2d.configs(flags)
    data, tokenizer, _ = llama_2d.open_data(flags)
    size = tokenizer.vocab_size
    state = build_state(model, mesh_of_ranks(2), size, seed=1, optimizer=optimizer)
    weights = model_of(size).named_parameters()
    set_weights(state, plain.by_project_names({name: each.detach() for name, each in weights}))
    steps = llama_2d.train(state, data, optimizer, flags, save=lambda: None)
    return [each.loss for each in steps]


def train_theirs(words: list[str]) -> list[float]:
    data, tokenizer, _ = llama_2d.open_data(read_flags(words))
    model = model_of(tokenizer.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedulers = [
        LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=WARMUP),
        CosineAnnealingLR(optimizer, T_max=STEPS - WARMUP, eta_min=0.0),
    ]
    scheduler, losses = SequentialLR(optimizer, schedulers, milestones=[WARMUP]), []
    for first in range(0, STEPS * BATCH, BATCH):
        batch = data.batch(range(first, first + BATCH))
        logits = model(torch.from_numpy(batch.tokens))
        loss = plain.summed_loss(logits, batch) / float(batch.loss_mask.sum())
        plain.update(optimizer, loss, 1.0)
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_the_steps_are_those_of_plain_torch(folder: Path, gloo: Pool) -> None:
    words = words_of(folder, **OF_EXAMPLE)
    expected = train_theirs(words)
    for found in gloo.run(2, train_ours, words):
        assert found == pytest.approx(expected, abs=1e-5)
