"""Images by class: packed once, read at random, cropped and flipped by sample number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from megatron.data import images
from megatron.data.files import DataError
from megatron.data.images import CHANNELS, RandomImages, open_images
from megatron.errors import UsageError
from tests.files import before_calls, cut_off
from tests.refusals import refusal

SIDE = 32  # of CIFAR's images
COUNT = 11  # of each class and split
CLASSES = ("cat", "dog")


def pixels_of(split: str, label: int, number: int, side: int = SIDE) -> NDArray[np.uint8]:
    random = np.random.default_rng([len(split), label, number])
    return random.integers(256, size=(side, side, CHANNELS), dtype=np.uint8)


def write_folder(folder: Path) -> Path:
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(COUNT):
                image = Image.fromarray(pixels_of(split, label, number))
                image.save(folder / split / name / f"{number:02d}.png")
    return folder


def write_cifar(folder: Path) -> Path:
    """The same images in CIFAR-10's format, the training split in two files."""
    folder.mkdir()
    (folder / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n\n")
    for label in range(len(CLASSES)):
        for split, file in (("train", f"data_batch_{label + 1}.bin"), ("test", "test_batch.bin")):
            with (folder / file).open("ab") as stream:
                for number in range(COUNT):
                    planes = pixels_of(split, label, number).transpose(2, 0, 1)
                    stream.write(bytes([label]) + planes.tobytes())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pictures")


@pytest.mark.parametrize("write", [write_folder, write_cifar])
def test_pixels_and_labels(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    packed = open_images(write(tmp_path / "data"), SIDE)
    assert packed.classes == list(CLASSES)
    for name, split in (("training", "train"), ("validation", "test")):
        own = packed.split(name)
        expected = [
            pixels_of(split, label, n) for label in range(len(CLASSES)) for n in range(COUNT)
        ]
        assert own.labels.tolist() == [0] * COUNT + [1] * COUNT
        assert all(np.array_equal(own.image(n), each) for n, each in enumerate(expected))
        if split == "train":
            values = np.stack(expected).reshape(-1, CHANNELS) / 255
            np.testing.assert_allclose(packed.mean, values.mean(0), rtol=1e-12)
            np.testing.assert_allclose(packed.std, values.std(0), rtol=1e-12)


def test_other_sizes_are_scaled_and_cut(tmp_path: Path, folder: Path) -> None:
    wide = Image.fromarray(np.zeros((64, 128, CHANNELS), np.uint8))
    wide.paste((255, 255, 255), (20, 0, 108, 64))  # its middle, and what bicubic reads beside
    wide.save(folder / "train" / "cat" / "00.png")
    pixels = open_images(folder, 16).split("training").image(0)
    assert pixels.shape == (16, 16, CHANNELS)
    assert (pixels == 255).all()


def test_workers_and_chunks_change_no_byte(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_images(folder, SIDE, beside=tmp_path / "one", workers=1)
    monkeypatch.setattr(images, "CHUNK", 3 * SIDE**2 * CHANNELS)
    open_images(folder, SIDE, beside=tmp_path / "two", workers=3)
    one, two = (next((tmp_path / each).rglob("*.pack")) for each in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert not list(tmp_path.rglob("*.parts"))


def test_packing_goes_on_after_an_interruption(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "CHUNK", 3 * SIDE**2 * CHANNELS)
    again, read = list[Any](), "megatron.data.images.read_image"
    with cut_off(10, read) as lost:
        open_images(folder, SIDE, workers=1)
    assert lost
    with before_calls(lambda *call: again.append(call), read):
        packed = open_images(folder, SIDE, workers=1)
    assert len(again) == 2 * len(CLASSES) * COUNT - 9  # three whole chunks stayed
    assert np.array_equal(packed.split("validation").image(0), pixels_of("test", 0, 0))


def test_a_changed_image_is_packed_anew(folder: Path) -> None:
    before = open_images(folder, SIDE).content
    Image.fromarray(pixels_of("train", 0, 99)).save(folder / "train" / "cat" / "00.png")
    assert (second := open_images(folder, SIDE).content) != before
    # The same pixels in the same order, and one of another class.
    (folder / "train" / "dog" / "00.png").rename(folder / "train" / "cat" / "99.png")
    assert open_images(folder, SIDE).content != second


def test_images_of_one_color_are_only_shifted(folder: Path) -> None:
    for file in (folder / "train").rglob("*.png"):
        Image.new("RGB", (SIDE, SIDE), (255, 0, 51)).save(file)
    packed = open_images(folder, SIDE)
    assert (packed.mean, packed.std) == ((1.0, 0.0, 0.2), (1.0, 1.0, 1.0))


def test_a_packed_file_travels_alone(tmp_path: Path, folder: Path) -> None:
    packed = open_images(folder, SIDE)
    file = (folder / f".images_{SIDE}.pack").rename(tmp_path / "images.pack")
    assert open_images(file, SIDE).content == packed.content
    error = refusal(lambda: open_images(file, 16), kind=UsageError)
    assert error.works == ("--image-size", str(SIDE))
    whole = file.read_bytes()
    for byte in (1000, whole.index(np.arange(2).repeat(COUNT).tobytes()), len(whole) - 1):
        content = bytearray(whole)
        content[byte] ^= 1
        file.write_bytes(content)
        refusal(lambda: open_images(file, SIDE), "images.pack", kind=DataError | UsageError)


def test_changes_are_functions_of_seed_and_number(folder: Path) -> None:
    packed, settings = open_images(folder, SIDE), {"crop_padding": 4, "flip": True}
    series = packed.series("training", 1, **settings)
    together = series.batch([3, 25, 40])
    for row, number in enumerate((3, 25, 40)):
        alone = series.batch([number])
        for name in ("images", "labels", "shifts", "flips"):
            assert np.array_equal(getattr(together, name)[row], getattr(alone, name)[0])
    several = series.batch(range(2 * len(packed.split("training"))))
    assert {*several.shifts.ravel().tolist()} == {*range(-4, 5)}
    assert not np.array_equal(*several.shifts.T), "rows move as columns do"
    assert 0.2 < several.flips.mean() < 0.8
    first, second = several.shifts[:22], several.shifts[22:]  # of two epochs
    assert not np.array_equal(first, second)
    other = packed.series("training", 2, **settings).batch(range(22))
    assert not np.array_equal(other.shifts, first)
    plain = packed.series("validation", 1, **settings).batch([0])
    assert plain.shifts is None
    assert plain.flips is None
    assert packed.series("training", 1).batch([0]).shifts is None
    ones = [RandomImages(2, SIDE, seed).batch([3]).images for seed in (1, 2)]
    assert not np.array_equal(*ones)


def test_an_epoch_has_every_image_once(folder: Path) -> None:
    packed = open_images(folder, SIDE)
    series = packed.series("training", 1)
    split = packed.split("training")
    own = sorted(each.tobytes() for each in series.batch(range(series.samples_per_epoch)).images)
    assert own == sorted(split.image(number).tobytes() for number in range(len(split)))


def lose(name: str) -> Callable[[Path], Any]:
    return lambda folder: [each.unlink() for each in folder.glob(name)]


def in_cifar(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    def spoil(folder: Path) -> None:
        file = write_cifar(folder / "binary") / name
        file.write_bytes(change(file.read_bytes()))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "inside", "named"),
    [
        (lose("test/dog/*"), "", "dog"),
        (lose("train/*/*"), "", "train"),
        (lambda folder: (folder / "test").rename(folder / "others"), "", "test"),
        (lambda folder: (folder / "val").mkdir(), "", "val"),
        (in_cifar("data_batch_1.bin", lambda old: old[:-1]), "binary", "data_batch_1.bin"),
        (in_cifar("data_batch_1.bin", lambda old: b"\x02" + old[1:]), "binary", "data_batch_1.bin"),
        (
            lambda folder: (write_cifar(folder / "binary") / "data_batch_2.bin").unlink(),
            "binary",
            "dog",
        ),
        (lambda folder: None, "nothing", "nothing"),
        (lambda folder: None, "train/cat/00.png", "00.png"),
    ],
)
def test_a_folder_is_refused(
    folder: Path, spoil: Callable[[Path], Any], inside: str, named: str
) -> None:
    spoil(folder)
    refusal(lambda: open_images(folder / inside, SIDE), named, field="--data-path")


def test_broken_images_are_counted_and_named(folder: Path) -> None:
    Image.new("I;16", (8, 8), 40_000).save(folder / "train" / "cat" / "00.png")
    for name in ("03.png", "05.png"):
        file = folder / "train" / "cat" / name
        file.write_bytes(file.read_bytes()[:200])
    refusal(lambda: open_images(folder, SIDE), "3 files", "03.png", kind=UsageError)
    lose("train/cat/0[035].png")(folder)
    assert len(open_images(folder, SIDE).split("training")) == 2 * COUNT - 3
