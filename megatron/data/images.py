"""Data sets of images by class: packed once into one file, read at random, cropped and flipped by
sample number.

A folder holds train/CLASS/FILE and test/CLASS/FILE (or val, valid, validation), or the binary files
of CIFAR-10 (Krizhevsky, 2009): records of a label and 3 x 32 x 32 pixels, channel by channel.
Importing this needs neither torch nor Pillow.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.data import cache
from megatron.data.batch import Array, Batch
from megatron.data.files import DataError
from megatron.data.order import Blend, Series, mix
from megatron.errors import UsageError
from megatron.libraries import load

CHANNELS = 3
SPLITS = {"training": ("train",), "validation": ("test", "val", "valid", "validation")}
SUFFIX = ".pack"
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
CIFAR_SIDE = 32
CIFAR_RECORD = 1 + CHANNELS * CIFAR_SIDE**2  # bytes: a label, then pixels
CIFAR_FILES = {"training": "data_batch_*.bin", "validation": "test_batch.bin"}
CIFAR_NAMES = "batches.meta.txt"
CHUNK = 32 << 20  # bytes of images that a worker packs at a time: 213 of 224 x 224
CHECKED = 2**30  # a packed file of up to so many bytes is read once and checked: in a second


@dataclass(frozen=True, kw_only=True)
class ImageBatch(Batch):
    unit: ClassVar[str] = "images"

    images: Array
    """uint8 [b, size, size, 3]"""
    labels: Array
    """int64 [b]"""
    shifts: Array = None
    """int64 [b, 2]: rows and columns by which the window of the crop moves down and right; where it
    leaves the image there is black. None without crops."""
    flips: Array = None
    """bool [b]: mirrored left to right, after the crop; None without flips."""


@dataclass(frozen=True)
class Split:
    """The images of a split in the packed file, in the order of their classes and names."""

    file: cache.Cache
    name: str
    size: int
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, number: int) -> NDArray[np.uint8]:
        """uint8 [size, size, 3]"""
        each = self.size**2 * CHANNELS
        pixels = self.file.read(self.name, number * each, (number + 1) * each)
        return pixels.reshape(self.size, self.size, CHANNELS)


@dataclass(kw_only=True, eq=False)
class Images(Series[Split]):
    """Samples of a split. Crops and flips of the training split are functions of (seed, sample
    number): the same at every layout, and others in every epoch."""

    crop_padding: int = 0
    flip: bool = False

    def batch(self, numbers: Sequence[int]) -> ImageBatch:
        size, count = self.splits[0].size, len(numbers)
        images = np.empty((count, size, size, CHANNELS), np.uint8)
        labels = np.empty(count, np.int64)
        for split, rows, samples in self.locate(numbers):
            for row, sample in zip(rows.tolist(), samples.tolist(), strict=True):
                images[row] = split.image(sample)
            labels[rows] = split.labels[samples]
        shifts = flips = None
        if self.name == "training":
            bits = mix(mix(np.array([self.seed], np.uint64)) ^ np.asarray(numbers, np.uint64))
            if padding := self.crop_padding:
                own = np.stack([mix(bits + 1), mix(bits + 2)], axis=1)
                shifts = (own % (2 * padding + 1)).astype(np.int64) - padding
            if self.flip:
                flips = mix(bits + 3) % 2 == 1
        return ImageBatch(images=images, labels=labels, shifts=shifts, flips=flips)


@dataclass(frozen=True)
class Packed:
    """A packed data set."""

    file: cache.Cache
    size: int
    classes: list[str]
    mean: tuple[float, float, float]
    """Mean of red, green and blue over the training split, of values from 0 to 1."""
    std: tuple[float, float, float]
    """Standard deviation of red, green and blue over the training split."""
    content: str
    """Identity of classes, labels and pixels."""

    def split(self, name: str) -> Split:
        return Split(self.file, name, self.size, self.file.read(f"{name} labels"))

    def series(self, name: str, seed: int, **settings: Any) -> Images:
        """The samples of a split: "training" or "validation"; settings: see Images."""
        blend = Blend([Fraction(1)])
        return Images(name=name, splits=[self.split(name)], blend=blend, seed=seed, **settings)


def open_images(path: Path, size: int, *, beside: Path | None = None, workers: int = 2) -> Packed:
    """The images of a folder at this size, packed at the first call; or of a packed file.

    beside: the folder of the packed file, which keeps the name of the images' folder; by default
    that of the images. workers: threads that decode. A call after an interrupted one keeps the
    chunks that are packed. Raises DataError or UsageError, naming the file, if there is no data
    set of images.
    """
    if path.is_file():
        if path.suffix != SUFFIX:
            allowed = f"a folder with train/CLASS/ and test/CLASS/, or a packed file ({SUFFIX})"
            raise UsageError("--data-path", path, allowed)
        return _open_packed(path, size, None)
    folder = path if beside is None else beside / path.resolve().name
    file = folder / f".images_{size}{SUFFIX}"
    listing = list_images(path)
    key = hashlib.sha256(json.dumps([size, listing.key]).encode()).hexdigest()

    with suppress(OSError):  # for the lock, before a rank packs
        folder.mkdir(parents=True, exist_ok=True)

    def make() -> Packed:
        try:
            pack(listing, size, file, key, workers)
        except FileNotFoundError:  # without locks: another process was faster, and has the parts
            return _open_packed(file, size, key)
        except OSError as error:
            allowed = f"a folder that can be written, for the packed images: {error}"
            raise UsageError("--cache-dir", folder, allowed) from error
        return _open_packed(file, size, key)

    return cache.find_or_make(file, partial(_open_packed, file, size, key), make)


def _open_packed(file: Path, size: int, key: str | None) -> Packed:
    """key: of the images it was made from; None for any."""
    try:
        found = cache.Cache(file, key, f"--data-path {file}")
    except DataError as error:
        if key is not None:
            raise
        allowed = "undamaged, as a new copy of the packed file is"
        raise UsageError("--data-path", file, allowed) from error
    values = found.values
    if values["size"] != size:
        allowed = f"that of the images in {file}"
        raise UsageError("--image-size", size, allowed, works=values["size"])
    for name in SPLITS:
        found.read(f"{name} labels")
        if file.stat().st_size <= CHECKED:
            found.read(name)
    colors: dict[str, Any] = {name: tuple(values[name]) for name in ("mean", "std")}
    return Packed(found, size, values["classes"], content=f"images {values['content']}", **colors)


@dataclass(frozen=True)
class Origin:
    """Where an image is: a file, or a record of a binary file; and its class."""

    path: Path
    label: int
    record: int | None = None


@dataclass(frozen=True)
class Listing:
    folder: Path
    classes: list[str]
    splits: dict[str, list[Origin]]
    key: list[Any]
    """Names, sizes and times of the files."""


def list_images(folder: Path) -> Listing:
    """The images of a folder, by class and name. Raises UsageError if it is no data set, or a class
    is in one split only."""
    if not folder.is_dir():
        raise UsageError("--data-path", folder, "a folder with train/CLASS/ and test/CLASS/")
    is_cifar = any(folder.glob(CIFAR_FILES["training"]))
    classes, splits = (_list_cifar if is_cifar else _list_by_class)(folder)
    training, validation = ({each.label for each in its} for its in splits.values())
    if lonely := sorted(training ^ validation):
        which = "training" if lonely[0] in training else "validation"
        allowed = f"of the same classes in both splits: {classes[lonely[0]]} is only in {which}"
        raise UsageError("--data-path", folder, allowed)
    files = dict.fromkeys(each.path for its in splits.values() for each in its)
    stats = [(file, file.stat()) for file in (*files, *folder.glob(CIFAR_NAMES))]
    key = [[str(file.relative_to(folder)), s.st_size, s.st_mtime_ns] for file, s in stats]
    return Listing(folder, classes, splits, key)


def _list_by_class(folder: Path) -> tuple[list[str], dict[str, list[Origin]]]:
    """(names of the classes, the images of each split)."""
    files = dict[str, list[Path]]()
    for split, its_names in SPLITS.items():
        found = [folder / each for each in its_names if (folder / each).is_dir()]
        if len(found) != 1:
            several = " and ".join(f"{each.name}/" for each in found) or "none"
            allowed = f"a folder with {' or '.join(f'{each}/' for each in its_names)} (it has "
            allowed += f"{several}), or with CIFAR-10's data_batch_*.bin and test_batch.bin"
            raise UsageError("--data-path", folder, allowed)
        images = (each for each in found[0].glob("*/*") if each.suffix.lower() in SUFFIXES)
        files[split] = sorted(filter(Path.is_file, images))
        if not files[split]:
            raise UsageError("--data-path", found[0], "a folder with images in a folder per class")
    classes = sorted({each.parent.name for its in files.values() for each in its})
    labels = {name: label for label, name in enumerate(classes)}
    return classes, {
        split: [Origin(each, labels[each.parent.name]) for each in its]
        for split, its in files.items()
    }


def _list_cifar(folder: Path) -> tuple[list[str], dict[str, list[Origin]]]:
    splits = dict[str, list[Origin]]()
    for split, pattern in CIFAR_FILES.items():
        splits[split] = []
        for file in sorted(folder.glob(pattern)):
            count, rest = divmod(size := file.stat().st_size, CIFAR_RECORD)
            if rest or not count:
                allowed = f"of whole records of {CIFAR_RECORD:,} bytes; it has {size:,}"
                raise UsageError("--data-path", file, allowed)
            labels = np.fromfile(file, np.uint8).reshape(count, -1)[:, 0].tolist()
            splits[split] += [Origin(file, label, n) for n, label in enumerate(labels)]
        if not splits[split]:
            raise UsageError("--data-path", folder, f"a folder with {pattern}, too")
    names, classes = folder / CIFAR_NAMES, [str(number) for number in range(10)]
    if names.is_file():
        classes = names.read_text(encoding="utf-8", errors="replace").split()
    for each in chain.from_iterable(splits.values()):
        if each.label >= len(classes):
            allowed = f"of labels below {len(classes)}; record {each.record} has {each.label}"
            raise UsageError("--data-path", each.path, allowed)
    return classes, splits


def pack(listing: Listing, size: int, file: Path, key: str, workers: int) -> None:
    """Writes the packed file. Chunks of images are files of their own until it is whole, so that
    memory is bounded and an interrupted call is not in vain."""
    load("PIL.Image")  # before every image would be called broken
    parts = file.with_name(f"{file.name}.parts")
    parts.mkdir(exist_ok=True)
    count = max(1, CHUNK // (size**2 * CHANNELS))
    chunks = {
        parts / f"{split}_{start:09d}": origins[start : start + count]
        for split, origins in listing.splits.items()
        for start in range(0, len(origins), count)
    }
    work = partial(_pack_chunk, size=size, key=key)
    with ThreadPoolExecutor(workers) as pool:
        broken = [*chain.from_iterable(pool.map(work, chunks.keys(), chunks.values()))]
    if broken:
        some = ", ".join(broken[:3]) + (", ..." if len(broken) > 3 else "")
        allowed = f"without {len(broken)} files that cannot be read as images ({some})"
        raise UsageError("--data-path", listing.folder, allowed)
    cache.write(file, key, _entries(listing, chunks, size, key))
    shutil.rmtree(parts, ignore_errors=True)


def _pack_chunk(file: Path, origins: Sequence[Origin], *, size: int, key: str) -> list[str]:
    """Writes a chunk, unless it is there. Returns what cannot be read."""
    try:
        cache.Cache(file, key).read("pixels")
    except (OSError, DataError):
        pixels = np.empty((len(origins), size, size, CHANNELS), np.uint8)
        broken = []
        for row, origin in enumerate(origins):
            try:
                pixels[row] = read_image(origin, size)
            except Exception as error:  # Pillow raises SyntaxError, struct.error and others, too
                broken.append(f"{origin.path}: {error}")
        if broken:
            return broken
        cache.write(file, key, [("pixels", pixels.reshape(-1))])
    return []


def read_image(origin: Origin, size: int) -> NDArray[np.uint8]:
    """The image in RGB: its shorter side scaled to `size`, its middle cut out. uint8 [size, size,
    3]."""
    pillow = load("PIL.Image")
    if origin.record is None:
        with pillow.open(origin.path) as stored:
            if stored.mode.startswith(("I", "F")):
                raise ValueError(f"its colors have more than 8 bits (mode {stored.mode})")
            image = stored.convert("RGB")
    else:
        offset = origin.record * CIFAR_RECORD + 1
        planes = np.fromfile(origin.path, np.uint8, CIFAR_RECORD - 1, offset=offset)
        pixels = planes.reshape(CHANNELS, CIFAR_SIDE, CIFAR_SIDE).transpose(1, 2, 0)
        image = pillow.fromarray(np.ascontiguousarray(pixels))
    if image.size != (size, size):
        scale = size / min(image.size)
        width, height = (max(size, round(each * scale)) for each in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), pillow.Resampling.BICUBIC)
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image, np.uint8)


def _entries(listing: Listing, chunks: Iterable[Path], size: int, key: str) -> cache.Entries:
    """Yields the contents of the packed file, a chunk at a time. Sums of pixels are exact, so that
    mean and deviation do not depend on the chunks."""
    sums, squares, count = [0] * CHANNELS, [0] * CHANNELS, 0
    digest = hashlib.sha256(json.dumps(listing.classes).encode())
    for file in chunks:
        split, pixels = file.name.partition("_")[0], cache.Cache(file, key).read("pixels")
        digest.update(pixels.tobytes())
        yield split, pixels
        if split == "training":
            count += len(pixels) // CHANNELS
            for channel in range(CHANNELS):
                numbers = np.bincount(pixels[channel::CHANNELS], minlength=256).tolist()
                sums[channel] += sum(value * n for value, n in enumerate(numbers))
                squares[channel] += sum(value**2 * n for value, n in enumerate(numbers))
    for split, origins in listing.splits.items():
        labels = np.array([each.label for each in origins], np.int64)
        digest.update(labels.tobytes())
        yield f"{split} labels", labels
    variances = [b / count - (a / count) ** 2 for a, b in zip(sums, squares, strict=True)]
    yield "mean", [each / count / 255 for each in sums]
    # Images of one color have no deviation: they are only shifted.
    yield "std", [sqrt(max(each, 0)) / 255 or 1.0 for each in variances]
    yield "size", size
    yield "classes", listing.classes
    yield "content", digest.hexdigest()


@dataclass
class RandomImages:
    """Random images, to try a layout; sample n is a function of (seed, n)."""

    classes: int
    size: int
    seed: int
    samples_per_epoch: int = 1024

    def batch(self, numbers: Sequence[int]) -> ImageBatch:
        images, labels = [], []
        for number in numbers:
            random = np.random.default_rng((self.seed, number))
            shape = (self.size, self.size, CHANNELS)
            images.append(random.integers(256, size=shape, dtype=np.uint8))
            labels.append(random.integers(self.classes))
        return ImageBatch(images=np.stack(images), labels=np.array(labels, np.int64))
