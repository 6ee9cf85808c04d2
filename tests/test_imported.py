"""A checkpoint of imported weights: looked at, fine-tuned from, and no run to go on with."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import model_slices
from megatron.checkpoint.save import save_checkpoint
from megatron.config.model import GPT2Config
from megatron.config.training import GPT2DataConfig, PrecisionConfig
from megatron.models.build import build_model
from megatron.optim.adam import LossScaler
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import environment
from tests.data.samples import write_data_of_tokenizer
from tests.programs import newest, pretrain, some_data
from tools import checkpoint

RUN = "0123456789abcdef"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("imported")


@pytest.fixture(scope="module")
def imported(folder: Path) -> Path:
    """A directory with the weights of the shape and the vocabulary that tests/programs.py trains,
    and a tokenizer."""
    some_data(folder)
    section = GPT2Config(
        num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16
    )
    mesh = serial_mesh()
    model = build_model(section, mesh, 100, seed=5, dtype=torch.float32)
    scaler = LossScaler.of(PrecisionConfig(), torch.float32)
    facts = {
        "config": {"model": asdict(section), "data": asdict(GPT2DataConfig(seq_length=16))},
        "precision": "fp32",
        "vocab_size": 100,
        "tokenizer": "f",
        "data": [],
        "run": RUN,
        "weights_of": None,
        "counters": {"step": 0, "samples": 0, "skipped": 0, "loss_scaler": scaler.counters()},
        "environment": environment(mesh),
        "validation_loss": None,
        "imported_from": "a folder of theirs",
    }
    files = write_data_of_tokenizer(folder / "other", [[1, 260]]).files
    return save_checkpoint(
        folder / "imported", 0, model_slices(model), facts, mesh, files
    ).path.parent


def train(words: str, folder: Path, code: int = 0) -> str:
    with pretrain(f"{words} --eval-iters 0", folder=folder) as run:
        assert run.wait() == [code], run.text()
        return run.text()


def test_imported_weights_are_no_run_to_go_on_with(
    imported: Path, folder: Path, tmp_path: Path
) -> None:
    for save_to in (imported, tmp_path / "new"):
        words = f"--load {imported} --save {save_to} --train-iters 2"
        assert f"error: --load {imported}/step_00000000" in train(words, folder, code=2)
    assert [path.name for path in imported.glob("step_*")] == ["step_00000000"]
    assert not (tmp_path / "new").exists()


def test_fine_tuning_starts_from_it_and_goes_on(
    imported: Path, folder: Path, tmp_path: Path
) -> None:
    words = f"--load {imported} --save {tmp_path} --finetune --lr-decay-iters 4"
    text = train(f"{words} --train-iters 2", folder)
    assert f"{imported}/step_00000000" in text
    first = read_manifest(newest(tmp_path))
    assert first["weights_of"] == RUN != first["run"]
    text = train(f"{words} --train-iters 3", folder)
    assert f"{tmp_path}/step_00000002" in text
    assert read_manifest(newest(tmp_path))["run"] == first["run"]
    message = train(f"--load {imported} --save {tmp_path} --train-iters 4", folder, code=2)
    assert f"--load {tmp_path}" in message


def test_imported_weights_can_be_looked_at(
    imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for look in (checkpoint.ls, checkpoint.verify, checkpoint.show):
        look(imported, json=True)
        found.append(json.loads(capsys.readouterr().out))
    ((row,), damage, shown) = found
    assert (row["latest"], damage) == (True, {"step_00000000": []})
    assert shown["imported_from"] == "a folder of theirs"
