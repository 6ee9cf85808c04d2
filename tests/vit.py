"""A ViT small enough for tests, its batches, and folders of images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.model import ViTConfig
from megatron.data.images import CHANNELS, ImageBatch
from tests.tiny import VOCABULARY

SIDE, PATCH = 12, 3  # 16 patches


def vit_config(**changes: Any) -> ViTConfig:
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
        "image_mean": (0.4, 0.5, 0.6),
        "image_std": (0.2, 0.25, 0.3),
    }
    return ViTConfig(**(settings | changes))


def vit_samples(count: int, *, first: int = 0, changes: bool = True) -> ImageBatch:
    """Samples first to first + count, of VOCABULARY classes. changes: with crops and flips."""
    numbers = np.arange(first, first + count)
    randoms = [np.random.default_rng([7, number]) for number in numbers]
    size = (SIDE, SIDE, CHANNELS)
    pixels = [each.integers(256, size=size, dtype=np.uint8) for each in randoms]
    labels = [each.integers(VOCABULARY) for each in randoms]
    shifts = [each.integers(-3, 4, size=2) for each in randoms]
    flips = [each.integers(2) for each in randoms]
    return ImageBatch(
        images=np.stack(pixels),
        labels=np.array(labels),
        shifts=np.stack(shifts) if changes else None,
        flips=np.array(flips, bool) if changes else None,
        numbers=numbers,
    )


def write_images(
    folder: Path, colors: Mapping[str, tuple[int, int, int]], counts: Mapping[str, int]
) -> Path:
    """Images of 8 x 8 pixels, noise around the color of each class.

    counts: of a class, by split.
    """
    from PIL import Image  # which the matrix does without

    random = np.random.default_rng(0)
    for split, count in counts.items():
        for name, color in colors.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = (random.integers(-30, 31, size=(8, 8, CHANNELS)) + color).clip(0, 255)
                image = Image.fromarray(pixels.astype(np.uint8))
                image.save(folder / split / name / f"{number}.png")
    return folder
