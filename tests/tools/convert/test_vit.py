"""ViT from a folder of transformers and back."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from megatron.data.images import ImageBatch
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_newest
from tests.refusals import leaving_nothing, refused
from tests.tools.convert.models import assert_same_weights, change_json
from tools.convert_hf import export_model, import_model

NAMES = {0: "cat", 1: "dog", 2: "horse"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "model"
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=8, patch_size=4, id2label=NAMES, label2id={name: n for n, name in NAMES.items()},
    )  # fmt: skip
    model = ViTForImageClassification(config)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.2)
    model.save_pretrained(folder)
    numbers = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    ViTImageProcessor(size={"height": 8, "width": 8}, **numbers).save_pretrained(folder)
    return folder


def test_import_and_export(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_model(str(theirs), tmp_path / "ours")
    assert "not kept" not in capsys.readouterr().out
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(theirs, tmp_path / "back")

    # The same picture, each program by itself.
    _, model = load_newest([next((tmp_path / "ours").glob("step_*"))], serial_mesh())
    pixels = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
    ours = model(ImageBatch(images=torch.tensor(pixels[None]), labels=torch.zeros(1)))
    processor = ViTImageProcessor.from_pretrained(tmp_path / "back")
    assert processor.resample == Image.Resampling.BICUBIC  # as in training here
    other = ViTForImageClassification.from_pretrained(tmp_path / "back").eval()
    scores = other(**processor(Image.fromarray(pixels), return_tensors="pt")).logits
    torch.testing.assert_close(ours, scores, rtol=1e-4, atol=1e-4)
    assert other.config.id2label == NAMES
    assert model.config.class_names == tuple(NAMES.values())


CONFIG, IMAGES = "config.json", "preprocessor_config.json"
REFUSED: list[tuple[str, str, Any]] = [
    (CONFIG, "num_channels", 1), (CONFIG, "qkv_bias", False), (CONFIG, "hidden_act", "relu"),
    (CONFIG, "patch_size", 3), (IMAGES, "do_normalize", False), (IMAGES, "image_std", [0, 1, 1]),
    (IMAGES, "rescale_factor", 1 / 127.5), (IMAGES, "image_mean", [0.5]),
]  # fmt: skip


@pytest.mark.parametrize(("file", "field", "value"), REFUSED)
def test_other_models_are_refused(
    theirs: Path, tmp_path: Path, file: str, field: str, value: Any
) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "other"))
    change_json(folder / file, **{field: value})
    program = leaving_nothing(lambda words: import_model(words[0], Path(words[2])))
    found = refused(program, [str(folder), "--output", str(tmp_path / "ours")])
    assert found.endswith(field)
