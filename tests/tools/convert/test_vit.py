"""ViT from a folder of transformers and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from megatron.data.images import ImageBatch
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_newest
from tests.refusals import leaving_nothing, refused
from tools.convert_hf import export_model, import_model

NAMES = {0: "cat", 1: "dog", 2: "horse"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "model"
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
        id2label=NAMES,
        label2id={name: number for number, name in NAMES.items()},
    )
    model = ViTForImageClassification(config)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.2)
    model.save_pretrained(folder)
    size = {"height": 8, "width": 8}
    ViTImageProcessor(
        size=size, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    ).save_pretrained(folder)
    return folder


def test_import_and_export(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_model(str(theirs), tmp_path / "ours")
    assert "not kept" not in capsys.readouterr().out
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).exists()
    before, after = (load_file(each / "model.safetensors") for each in (theirs, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    # The same picture, each program by itself.
    _, model = load_newest([next((tmp_path / "ours").glob("step_*"))], serial_mesh())
    pixels = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
    ours = model(ImageBatch(images=torch.tensor(pixels[None]), labels=torch.zeros(1)))
    processor = ViTImageProcessor.from_pretrained(tmp_path / "back")
    other = ViTForImageClassification.from_pretrained(tmp_path / "back").eval()
    scores = other(**processor(Image.fromarray(pixels), return_tensors="pt")).logits
    torch.testing.assert_close(ours, scores, rtol=1e-4, atol=1e-4)
    assert other.config.id2label == NAMES
    assert model.config.class_names == tuple(NAMES.values())


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("file", "values", "field"),
    [
        ("config.json", {"num_channels": 1}, "num_channels"),
        ("config.json", {"qkv_bias": False}, "qkv_bias"),
        ("config.json", {"hidden_act": "relu"}, "hidden_act"),
        ("config.json", {"patch_size": 3}, "patch_size"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize"),
        ("preprocessor_config.json", {"rescale_factor": 1 / 127.5}, "rescale_factor"),
        ("preprocessor_config.json", {"rescale_factor": "x"}, "rescale_factor"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, "image_mean"),
        ("preprocessor_config.json", {"image_mean": ["a", 0, 0]}, "image_mean"),
        ("preprocessor_config.json", {"image_std": [0, 1, 1]}, "image_std"),
    ],
)
def test_other_models_are_refused(
    theirs: Path, tmp_path: Path, file: str, values: dict[str, Any], field: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for each in theirs.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    change(folder / file, **values)
    program = leaving_nothing(lambda words: import_model(words[0], Path(words[2])))
    found = refused(program, [str(folder), "--output", str(tmp_path / "ours")])
    assert found.endswith(field)
