"""Source D's ViT by its example: two modes train as one process does."""

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


def test_1d_and_2d_are_one_process(data: Path, tmp_path: Path) -> None:
    alone = epochs(data, tmp_path, "", 1)
    assert len(alone) == 2
    assert epochs(data, tmp_path, "--mode 1d", 2) == alone
    assert epochs(data, tmp_path, "--mode 2d", 4) == alone
