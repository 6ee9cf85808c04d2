"""Source D's ViT by its example: each mode trains as one process does."""

import sys
from functools import partial
from pathlib import Path

import pytest

from examples import vit_cifar10
from tests.programs import run_ranks
from tests.vit import write_images

SMALL = "--image-size 8 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --epochs 2"
SMALL += " --micro-batch-size 1 --global-batch-size 8"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    colors = {"dark": (90, 90, 90), "bright": (130, 130, 130)}
    return write_images(tmp_path_factory.mktemp("data"), colors, {"train": 12, "test": 5})


def main(words: list[str]) -> None:
    sys.argv = ["vit_cifar10.py", *words]
    vit_cifar10.main()


def epochs(data: Path, folder: Path, words: str, world: int) -> list[str]:
    """The lines of both epochs."""
    arguments = ["--data-path", str(data), *SMALL.split(), *words.split()]
    text = run_ranks(partial(main, arguments), world, folder)
    return [line for line in text.splitlines() if line.startswith("epoch")]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return epochs(data, tmp_path_factory.mktemp("alone"), "", 1)


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("--tensor-model-parallel-size 1", 2),
        ("--mode 1d", 2),
        ("--mode 2d", 4),
        ("--mode 2.5d --tensor-parallel-depth 2", 8),
        ("--mode 3d", 8),
    ],
    ids=["data", "1d", "2d", "2.5d", "3d"],
)
def test_every_mode_gives_what_one_process_gives(
    data: Path, alone: list[str], tmp_path: Path, words: str, world: int
) -> None:
    assert len(alone) == 2
    assert epochs(data, tmp_path, words, world) == alone
