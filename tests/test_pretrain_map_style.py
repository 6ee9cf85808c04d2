"""A run may be resumed on another form of its texts, `datasets`, parquet or JSON lines: it has the
losses of an undisturbed run."""

import json
import os
from functools import partial
from pathlib import Path
from random import Random

import pytest

from pretrain_gpt2 import main
from tests.data.samples import write_tokenizer
from tests.programs import arguments_of, finished
from tests.refusals import field_of, refusal

STEPS = "--pad --train-iters 4 --eval-iters 2 --lr-decay-iters 4 --log-interval 1"
RANDOM = Random(0)
TEXTS = ["".join(RANDOM.choices("abcdefg ", k=RANDOM.randint(1, 20))) + "x" for _ in range(40)]
# Parquet, and the folder that load_dataset reads, have rows without text as well.
ROWS = [*TEXTS[:7], None, *TEXTS[7:], " "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files, and the texts in every form."""
    import datasets  # not above: a run's process imports this module before `use_cache`

    folder = tmp_path_factory.mktemp("map_style")
    write_tokenizer(folder)
    splits = {"train": datasets.Dataset.from_dict({"text": TEXTS})}
    splits["test"] = splits["train"].select(range(20))
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    rows = datasets.Dataset.from_dict({"text": ROWS})
    rows.to_parquet(folder / "rows.parquet", batch_size=6)
    (folder / "named").mkdir()
    reverse = [row and row[::-1] for row in ROWS]
    both = datasets.Dataset.from_dict({"text": reverse, "body": ROWS})
    both.to_csv(folder / "named" / "data.csv", index=False)
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "lines.jsonl").write_text("".join(lines))
    return folder


def use_cache(place: Path) -> None:
    """In a process of a run, which comes from a server that is older than a test's environment."""
    os.environ |= {"HF_DATASETS_CACHE": str(place), "HF_HUB_OFFLINE": "1"}


def files(folder: Path) -> str:
    return f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"


def run(folder: Path, words: str, *, world: int = 1) -> str:
    before = partial(use_cache, folder / "cache")
    *flags, last = f"{STEPS} {files(folder)} {words}".format(folder=folder).split()
    data = None if "--dataset-name" in flags else Path(last)
    arguments = " ".join(flags if data else [*flags, last])
    return finished(arguments, world=world, folder=folder, before=before, data=data)


def losses(save: Path) -> list[float]:
    lines = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [value for each in lines for key, value in each.items() if key.endswith("loss")]


SAVED = "{folder}/saved"
PARQUET = "{folder}/rows.parquet"
NAMED = "--text-column body --dataset-name {folder}/named"


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[float]:
    """The losses of an undisturbed run on JSON lines."""
    run(folder, "--save {folder}/whole {folder}/lines.jsonl")
    return losses(folder / "whole")


@pytest.mark.parametrize(
    ("after", "world"), [("--dataset-name {folder}/rows.parquet", 1), (NAMED, 1), (SAVED, 2)]
)
def test_a_run_resumes_also_from_another_form_of_the_same_texts(
    folder: Path, tmp_path: Path, whole: list[float], after: str, world: int
) -> None:
    way = f"--save {tmp_path} --load {tmp_path}"
    assert "2 of 42 " in run(folder, f"{way} --exit-interval 2 {PARQUET}")
    said = run(folder, f"{way} {after}", world=world)
    assert ("2 of 42 " in said) == (after != SAVED)
    found = [loss for number, loss in enumerate(losses(tmp_path)) if number != 2]  # of the exit
    assert found == (whole if world == 1 else pytest.approx(whole))
    assert len(set(whole)) == 5


def test_a_run_on_other_texts_is_not_resumed(
    folder: Path, whole: list[float], datasets_cache: Path
) -> None:
    words = f"{STEPS} {files(folder)} --load {folder}/whole"
    for more, flag in (
        (f"--dataset-name {folder}/named", "--dataset-name"),
        ("--dataset-split test", "--data-path"),
    ):
        arguments = arguments_of(f"{words} {more}", folder / "saved")
        error = refusal(lambda given=arguments: main(given, {}))
        assert field_of(error) == flag
