"""pretrain.py --model vit as its users run it: epochs, accuracy, layouts, resuming, refusals."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

import pretrain
import tasks.main
from tests.programs import assert_equal_bits, lines_of, newest, run_ranks, values_of
from tests.refusals import refusal, refused
from tests.vit import write_images

SHAPE = "--model vit --num-layers 2 --hidden-size 32 --num-attention-heads 4 --image-size 8"
SHAPE += " --patch-size 4 --crop-padding 1 --no-bf16 --lr 1e-3 --log-interval 1"
EPOCHS = "--micro-batch-size 2 --global-batch-size 8 --epochs 2"
TRAIN, TEST = 12, 7  # images of each class
COLORS = {"bright": (220, 220, 220), "dark": (30, 30, 30), "red": (220, 30, 30)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"), COLORS, {"train": TRAIN, "val": TEST})


def main(words: list[str]) -> None:
    pretrain.main(words, os.environ)


def run(data: Path, words: str, folder: Path, *, world: int = 1) -> str:
    arguments = [*SHAPE.split(), "--data-path", str(data), *words.split()]
    return run_ranks(partial(main, arguments), world, folder)


@pytest.fixture(scope="module")
def alone(data: Path) -> Path:
    """The checkpoints and the record of a run of one process."""
    save = data.parent / "alone"
    run(data, f"{EPOCHS} --save {save}", data.parent)
    return save


def test_epochs_accuracy_and_resuming(data: Path, tmp_path: Path) -> None:
    """4 steps of 8 images are an epoch of 36; dropout included."""
    words = f"{EPOCHS} --hidden-dropout 0.1 --attention-dropout 0.1"
    said = run(data, f"{words} --save {tmp_path}/whole", tmp_path)
    evaluations = lines_of(tmp_path / "whole", "validation_top1")
    assert [each["step"] for each in evaluations] == [4, 8, 9]
    assert {each["validation_samples"] for each in evaluations} == {3 * TEST}
    assert evaluations[-1]["validation_top1"] * 3 * TEST == pytest.approx(
        round(evaluations[-1]["validation_top1"] * 3 * TEST)
    )
    assert evaluations[-1]["validation_top5"] == 1.0  # of three classes
    assert "images/s" in said
    manifest = json.loads((newest(tmp_path / "whole") / "manifest.json").read_text())
    model = manifest["config"]["model"]
    assert model["class_names"] == list(COLORS)
    assert 0.3 < model["image_mean"][2] < model["image_mean"][0] < 0.8

    run(data, f"{words} --exit-interval 5 --save {tmp_path}/half", tmp_path)
    run(data, f"{words} --load {tmp_path}/half --save {tmp_path}/half", tmp_path)
    assert_equal_bits(newest(tmp_path / "whole"), newest(tmp_path / "half"))


def evaluate(words: list[str]) -> None:
    tasks.main.main(words, os.environ)


def test_the_task_gives_the_accuracy_of_training(data: Path, alone: Path, tmp_path: Path) -> None:
    expected = values_of(alone, "validation_top1")[-1]
    words = f"--task CIFAR10 --load {alone} --valid-data {data} --output {tmp_path}/out.json"
    evaluate([*words.split(), "--picture", f"{tmp_path}/some.png"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["top1"], found["images"]) == (expected, 3 * TEST)
    shares = [found["by_class"][name] for name in COLORS]
    assert sum(shares) / 3 == pytest.approx(expected)
    assert sum(number for *_, number in found["confusions"]) == round((1 - expected) * 3 * TEST)
    assert Image.open(tmp_path / "some.png").size[0] > 500

    layout = "--tensor-model-parallel-size 4 --tensor-parallel-mode 2d --micro-batch-size 5"
    run_ranks(partial(evaluate, [*words.split(), *layout.split()]), 4, tmp_path)
    of_ranks = json.loads((tmp_path / "out.json").read_text())
    for name in ("top1", "top5", "by_class", "confusions"):
        assert of_ranks[name] == found[name]

    others = tmp_path / "others"
    for split in ("train", "val"):
        (others / split).mkdir(parents=True)
        for name in COLORS:
            (others / split / f"a {name}").symlink_to(data / split / name)
    assert refused(evaluate, words.replace(str(data), str(others))) == "--valid-data"
    assert refused(evaluate, words.replace(str(data), "/nowhere")) == "--valid-data"


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ("--pipeline-model-parallel-size 2", 2),
        ("--tensor-model-parallel-size 4 --tensor-parallel-mode 2d --micro-batch-size 1", 4),
    ],
    ids=["pipeline", "2d"],
)
def test_layouts_agree(data: Path, alone: Path, tmp_path: Path, layout: str, world: int) -> None:
    run(data, f"{EPOCHS} {layout} --save {tmp_path}", tmp_path, world=world)
    for name in ("loss", "validation_loss", "validation_top1"):
        expected = pytest.approx(values_of(alone, name), rel=1e-4)
        assert values_of(tmp_path, name) == expected


def test_context_ranks_train_and_evaluate_as_one(data: Path, tmp_path: Path) -> None:
    """The task refuses an image of 5 tokens, with a class token."""
    words, layout = f"{EPOCHS} --pooling mean", "--context-parallel-size 2"
    run(data, f"{words} --save {tmp_path}/alone", tmp_path)
    ring = f"{words} {layout} --cp-comm-type p2p --save {tmp_path}/other"
    run(data, ring, tmp_path, world=2)
    for name in ("loss", "validation_loss", "validation_top1"):
        one, other = (values_of(tmp_path / save, name) for save in ("alone", "other"))
        assert other == pytest.approx(one, rel=1e-4)

    expected = values_of(tmp_path / "other", "validation_top1")[-1]
    task = f"--task CIFAR10 --valid-data {data} --output {tmp_path}/out.json {layout}"
    arguments = f"{task} --load {tmp_path}/other --micro-batch-size 5".split()
    run_ranks(partial(evaluate, arguments), 2, tmp_path)
    assert json.loads((tmp_path / "out.json").read_text())["top1"] == expected

    run(data, f"{EPOCHS} --exit-interval 1 --save {tmp_path}/class", tmp_path)
    two = {"RANK": "0", "WORLD_SIZE": "2"}
    arguments = f"{task} --load {tmp_path}/class".split()
    refusal(lambda: tasks.main.main(arguments, two), field="--context-parallel-size")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--patch-size 3", "--patch-size"),
        ("--num-classes 2", "--num-classes"),
        ("--image-std 1 0 1", "--image-std"),
        ("--class-names dark bright red", "--class-names"),
        ("--crop-padding -1", "--crop-padding"),
        ("--data-path /nowhere", "--data-path"),
        ("--data-path one two", "--data-path"),
        ("--seq-length 16", "--seq-length"),
        ("--pooling max", "--pooling"),
        ("--mock-data", "--mock-data"),
    ],
)
def test_settings_are_refused(data: Path, words: str, field: str) -> None:
    given = [*SHAPE.split(), "--train-iters", "1", "--data-path", str(data), *words.split()]
    assert refused(lambda each: pretrain.main(each, {}), given) == field


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "--micro-batch-size"),
        ("--context-parallel-size 2", "--context-parallel-size"),  # 4 patches and a class token
        ("--context-parallel-size 2 --patch-size 8 --pooling mean", "--context-parallel-size"),
    ],
)
def test_tokens_that_ranks_cannot_divide_are_refused(data: Path, words: str, field: str) -> None:
    given = [*SHAPE.split(), "--train-iters", "1", *words.split(), "--data-path", str(data)]
    environ = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert refused(lambda each: pretrain.main(each, environ), given, whole=False) == field
