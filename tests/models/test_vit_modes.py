"""A hundred steps of ViT on real images in each tensor-parallel mode: figure 2 of the Colossal-AI
paper in fp64, where equal models make equal predictions."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.config.model import ViTConfig
from megatron.config.training import OptimizerConfig
from megatron.data.images import Images, open_images
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.train.inputs import prefetch
from megatron.train.state import build_state
from megatron.train.step import train_step
from tasks.score import best_classes
from tests.dist import Pool
from tests.models.test_vit import error
from tests.tiny import whole_slices
from tools.layouts.layout import parse_layout

pytestmark = pytest.mark.sweep
CLASSES, STEPS, BATCH = 10, 100, 16
WARM_UP = 50  # Adam moves an element with next to no gradient by the sign of its noise
TRAIN, TEST = 200, 100  # images of each class


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, test_data: Path) -> Path:
    """The first images of each class."""
    place = tmp_path_factory.mktemp("cifar10")
    with tarfile.open(test_data / "cifar10" / "cifar10_jpeg.tar.xz") as files:
        for each in files:
            most = {"train": TRAIN, "test": TEST}[Path(each.name).parts[0]]
            if each.isfile() and int(Path(each.name).stem) < most:
                files.extract(each, place, filter="data")
    return place


def train(
    mesh: Mesh, train_images: Images, test_images: Images
) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
    """(whole weights after the steps, the model's class of each test image)."""
    colors = {"image_mean": (0.49, 0.48, 0.45), "image_std": (0.25, 0.24, 0.26)}
    config = ViTConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **colors)
    optimizer = OptimizerConfig(weight_decay=0.0)
    state = build_state(config, mesh, CLASSES, seed=1, dtype=torch.float64, optimizer=optimizer)
    batches = prefetch(
        train_images,
        range(0, STEPS * BATCH, BATCH),
        micro_batch_size=BATCH // mesh.batch.size,
        data_rank=mesh.batch.rank,
        data_size=mesh.batch.size,
    )
    for step, micro_batches in enumerate(batches):
        train_step(state, micro_batches, 1e-3 * min(1, (step + 1) / WARM_UP))
    weights = whole_slices(state.optimizer.masters())
    return weights, best_classes(state.model.eval(), mesh, test_images, 20)[:, 0]


def on_ranks(layout: str, folder: Path) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
    mesh = parse_layout(layout).mesh(torch.device("cpu"))
    return train(mesh, *series(folder))


def series(folder: Path) -> tuple[Images, Images]:
    packed = open_images(folder, 32)
    train_images = packed.series("training", 1, crop_padding=4, flip=True)
    return train_images, packed.series("validation", 1, shuffle=False)


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
    return train(serial_mesh(), *series(folder))


@pytest.mark.parametrize("layout", ["tensor=2", "tensor=4:2d", "tensor=8:2.5d:2", "tensor=8:3d"])
def test_weights_and_predictions_are_those_of_one_process(
    gloo: Pool, folder: Path, alone: tuple[dict[str, Tensor], NDArray[np.int64]], layout: str
) -> None:
    wanted, expected = alone
    weights, predicted = gloo.run(parse_layout(layout).ranks, on_ranks, layout, folder)[0]
    norm = torch.stack([each.norm() for each in wanted.values()]).norm()
    for name, each in wanted.items():
        # The gradient of the keys' bias is zero in theory, and Adam moves it by noise.
        own, other = (t[[0, 2]] if name.endswith("qkv.bias") else t for t in (weights[name], each))
        assert (own - other).norm() <= 1e-10 * norm, name
        assert error(own, other) < 1e-8, name
    assert len(expected) == CLASSES * TEST
    assert len({*expected.tolist()}) > 3, "it has learned nothing"
    assert np.array_equal(predicted, expected)
