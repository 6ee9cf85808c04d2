"""CIFAR-10, or another data set of images by class: the accuracy of a ViT on its validation split.

The folder is that of pretrain.py --model vit, or its packed file. --picture draws some images that
the model gets right, and some that it does not.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import writable
from megatron.config.model import ViTConfig
from megatron.data.files import write_atomically
from megatron.data.images import Images, open_images
from megatron.errors import UsageError
from megatron.libraries import load
from megatron.models.registry import config_of
from tasks.protocol import ImageSettings, ImageTask

CONVENTIONS = {
    "top1": "share of the images whose label has the highest score; of equal scores the first",
    "top5": "share of the images whose label is among the five highest scores",
    "by_class": "the same share as top1 of the images of each class",
    "confusions": "the ten most frequent mistakes: [label, the model's class, images]",
}
DRAWN = 8  # pictures in a row, of which there are two of each kind


@dataclass(frozen=True, kw_only=True)
class Settings(ImageSettings):
    valid_data: Path
    """Folder of the images, as --data-path of the training; or its packed file."""

    cache_dir: Path | None = None
    """Folder of the packed images, made where they are first used; that of the images if not
    given."""

    picture: Path | None = None
    """PNG file for pictures of right and wrong predictions."""

    def __post_init__(self) -> None:
        writable(self, "picture")


@dataclass(frozen=True)
class Classification(ImageTask):
    settings: Settings
    images: Images
    """The validation split, in the order of its file."""
    classes: tuple[str, ...]
    data: Mapping[str, str]
    """Folder and identity of the data, for the record."""

    def score(self, best: NDArray[np.int64]) -> Mapping[str, Any]:
        labels = self.images.splits[0].labels
        right = best[:, 0] == labels
        if self.settings.picture is not None:
            draw(self.settings.picture, self.images, best[:, 0], self.classes)
        mistakes = Counter(zip(labels[~right].tolist(), best[~right, 0].tolist(), strict=True))
        return {
            "images": len(best),
            "confusions": [
                [self.classes[label], self.classes[other], number]
                for (label, other), number in mistakes.most_common(10)
            ],
            "by_class": {
                name: float(right[labels == label].mean())
                for label, name in enumerate(self.classes)
            },
            "top5": float((best == labels[:, None]).any(1).mean()),
            "top1": float(right.mean()),
            "conventions": CONVENTIONS,
        }


def prepare(settings: Settings, manifest: Mapping[str, Any], tokenizer: None) -> Classification:
    """Raises ValueError or OSError, naming the flag, for images of other classes."""
    config = config_of(manifest)
    assert isinstance(config, ViTConfig)
    settings.parallel.check_images(config.positions)
    try:
        packed = open_images(settings.valid_data, config.image_size, beside=settings.cache_dir)
    except UsageError as error:  # which names the flag of the pretraining program
        if error.flag == "--cache-dir":
            raise
        if error.flag == "--image-size":
            allowed = f"of the model's size, {config.image_size} pixels"
            raise UsageError("--valid-data", settings.valid_data, allowed) from error
        raise error.about("--valid-data", error.value) from error
    classes = tuple(packed.classes)
    if config.class_names and config.class_names != classes:
        ours, theirs = (", ".join(names) for names in (classes, config.class_names))
        allowed = f"images of the classes that the model knows, {theirs}; its own are {ours}"
        raise UsageError("--valid-data", settings.valid_data, allowed)
    if len(classes) > manifest["vocab_size"]:
        allowed = f"images of at most {manifest['vocab_size']} classes, not {len(classes)}"
        raise UsageError("--valid-data", settings.valid_data, allowed)
    images = packed.series("validation", 0, shuffle=False)
    data = {"folder": str(settings.valid_data), "content": packed.content}
    return Classification(settings, images, classes, data)


def draw(file: Path, images: Images, best: NDArray[np.int64], classes: tuple[str, ...]) -> None:
    """Two rows of images that are right, two of others: each spread over the split."""
    labels = images.splits[0].labels
    figure = load("matplotlib.figure").Figure(figsize=(1.2 * DRAWN, 6), layout="constrained")
    axes = figure.subplots(4, DRAWN)
    for first, kind in ((0, best == labels), (2, best != labels)):
        numbers = np.flatnonzero(kind)
        chosen = numbers[np.linspace(0, len(numbers) - 1, min(2 * DRAWN, len(numbers)), dtype=int)]
        for place, number in zip(axes[first : first + 2].flat, chosen.tolist(), strict=False):
            place.imshow(images.batch([number]).images[0])
            name, other = classes[labels[number]], classes[best[number]]
            place.set_title(name if first == 0 else f"{other}, not\n{name}", fontsize=8)
    for place in axes.flat:
        place.axis("off")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_atomically(file, content.getvalue())
