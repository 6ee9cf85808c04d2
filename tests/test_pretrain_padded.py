"""Runs on padded documents and on mock data: what they learn, how long, and what they resume."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from megatron.data.batch import TextBatch
from pretrain_gpt2 import main
from tests.data.samples import (
    short_texts,
    write_data,
    write_texts,
    write_tokenizer,
    write_wordpiece,
)
from tests.dist import PATIENCE
from tests.programs import arguments_of, finished, lines_of, pretrain, values_of
from tests.refusals import field_of, refusal
from tests.test_faults import at_call

REFERENCE = "--train-iters 6 --eval-iters 2 --lr-decay-iters 6 --log-interval 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files and a.jsonl, of 40 documents of which some are too long; b.jsonl has them
    under another key as well, c.jsonl the short ones alone. saved, rows.parquet and named hold
    them in the forms of `datasets`, the last two with rows without text, too."""
    import datasets  # not above: a run's process imports this module before `use_cache`

    folder, texts = tmp_path_factory.mktemp("padded"), short_texts(40, 20)
    write_tokenizer(folder)
    lines = {
        "a": [{"text": text} for text in texts],
        "b": [{"text": text, "body": text[::-1]} for text in texts],
        "c": [{"text": text[:11]} for text in texts],
    }
    for name, records in lines.items():
        content = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(content + "no JSON\n")
    splits = {"train": datasets.Dataset.from_dict({"text": texts})}
    splits["test"] = splits["train"].select(range(20))
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    rows = [*texts[:7], None, *texts[7:], " "]
    datasets.Dataset.from_dict({"text": rows}).to_parquet(folder / "rows.parquet", batch_size=6)
    (folder / "named").mkdir()
    reverse = [row and row[::-1] for row in rows]
    both = datasets.Dataset.from_dict({"text": reverse, "body": rows})
    both.to_csv(folder / "named" / "data.csv", index=False)
    return folder


def use_cache(place: Path, then: Any) -> None:
    """In a process of a run, which comes from a server that is older than a test's environment."""
    os.environ |= {"HF_DATASETS_CACHE": str(place), "HF_HUB_OFFLINE": "1"}
    if then is not None:
        then()


def files(folder: Path, given: str = "") -> str:
    if "--mock-data" in given:
        return ""
    return f"--pad --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"


def run(folder: Path, words: str, *, data: str = "a.jsonl", before: Any = None, **more: Any) -> str:
    more["before"] = partial(use_cache, folder / "cache", before)
    return finished(f"{files(folder)} {words}", folder=folder, data=folder / data, **more)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The checkpoints of an undisturbed run on b.jsonl."""
    save = folder / "whole"
    assert "1 of 41 " in run(folder, f"{REFERENCE} --save {save}", data="b.jsonl")
    assert len({*values_of(save)}) == 6
    return save


@pytest.fixture(scope="module")
def halves(folder: Path) -> dict[str, tuple[Path, str]]:
    """The checkpoints of runs that end after three steps, and what these print, by their data."""
    found = {name: folder / f"half_{name}" for name in ("b.jsonl", "rows.parquet")}
    words = f"{REFERENCE} --exit-interval 3 --save"
    return {name: (at, run(folder, f"{words} {at}", data=name)) for name, at in found.items()}


def read_by_three() -> None:
    """No batch of a run is made before three are being made at once."""
    together, numbered = Barrier(3), TextBatch.numbered

    def wait_first(*given: Any) -> TextBatch:
        together.wait(PATIENCE)
        return numbered(*given)

    TextBatch.numbered = wait_first


@pytest.mark.parametrize(
    ("before", "after", "layout", "world"),
    [
        ("b.jsonl", "b.jsonl", "", 1),
        ("b.jsonl", "b.jsonl", "--micro-batch-size 2 --num-workers 1", 1),
        ("b.jsonl", "b.jsonl", "--micro-batch-size 2", 2),
        ("b.jsonl", "b.jsonl", "--tensor-model-parallel-size 2 --num-workers 3 --log-ranks", 2),
        ("rows.parquet", "rows.parquet", "--dataset-name {folder}/rows.parquet", 1),
        ("rows.parquet", "named", "--dataset-name {folder}/named --text-column body", 1),
        ("rows.parquet", "saved", "--micro-batch-size 2", 2),
    ],
)
def test_resuming_padded_data_is_exact(
    folder: Path,
    whole: Path,
    halves: dict[str, tuple[Path, str]],
    tmp_path: Path,
    before: str,
    after: str,
    layout: str,
    world: int,
) -> None:
    """Also on another form of the same texts."""
    half, first = halves[before]
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    action = read_by_three if "--num-workers 3" in layout else None
    words = f"{REFERENCE} --save {tmp_path} --load {tmp_path} {layout.format(folder=folder)}"
    text = run(folder, words, data=after, world=world, before=action)
    assert ("1 of 41 " if before == "b.jsonl" else "2 of 42 ") in first
    assert ("2 of 42 " in text) == (after in ("rows.parquet", "named"))
    assert ("data 0, tensor 1" in text) == ("--log-ranks" in layout)
    found, expected = values_of(tmp_path), values_of(whole)
    is_alike = not layout or "--dataset-name" in layout
    assert found == (expected if is_alike else pytest.approx(expected, rel=1e-6))
    last, its_last = (values_of(each, "validation_loss")[-1] for each in (tmp_path, whole))
    assert last == pytest.approx(its_last, rel=1e-6)
    cut = values_of(tmp_path, "cut_documents")
    assert cut == values_of(whole, "cut_documents")
    assert sum(cut) > 0


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--seed 5", "--seed"),
        ("--seq-length 15", "--seq-length"),
        ("--begin-token a", "--begin-token"),
        ("--end-token a", "--end-token"),
        ("--json-key body", "--data-path"),
        ("--no-shuffle", "--no-shuffle"),
        ("--data-path {folder}/a.jsonl", "--data-path"),
        ("--mock-data --vocab-size 261", "--mock-data"),
        ("--dataset-name {folder}/named", "--dataset-name"),
        ("--data-path {folder}/saved --dataset-split test", "--data-path"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no JSON")
@pytest.mark.usefixtures("datasets_cache")
def test_a_run_of_other_samples_is_not_resumed(
    folder: Path, whole: Path, words: str, field: str
) -> None:
    given = words.format(folder=folder)
    given = f"{files(folder, given)} {REFERENCE} --load {whole} {given}"
    arguments = arguments_of(given, folder / "b.jsonl")
    assert field_of(refusal(lambda: main(arguments, {}))) == field


def test_padding_changes_no_loss(folder: Path, tmp_path: Path) -> None:
    for length in (12, 16):
        words = f"{REFERENCE} --seq-length {length} --save {tmp_path / str(length)}"
        run(folder, words, data="c.jsonl")
    for key in ("loss", "validation_loss"):
        one, other = (values_of(tmp_path / length, key) for length in ("12", "16"))
        assert one == pytest.approx(other, rel=1e-6)
    assert not any(values_of(tmp_path / "12", "cut_documents"))


def test_epochs_end_with_the_last_whole_batch_and_go_on(folder: Path, tmp_path: Path) -> None:
    way = f"--global-batch-size 3 --eval-iters 0 --log-interval 1 --save {tmp_path}"
    run(folder, f"{way} --epochs 1 --lr-decay-iters 9")
    assert values_of(tmp_path, "samples") == [3, 6, 9, 12, 15, 18]
    run(folder, f"{way} --load {tmp_path} --epochs 2 --lr-decay-iters 9")
    assert values_of(tmp_path, "samples")[-1] == 39
    refused = run(folder, f"{way}_2 --epochs 1 --lr-warmup-iters 7", code=2)
    assert "error: --lr-warmup-iters" in refused
    assert "--epochs 3" in run(folder, f"{way} --load {tmp_path} --epochs 2 --lr-decay-iters 9")
    assert values_of(tmp_path, "samples")[-1] == 39


def test_epochs_hold_all_samples_at_any_batch_size(folder: Path, tmp_path: Path) -> None:
    way = f"--epochs 3 --eval-iters 0 --log-interval 1 --lr-decay-iters 9 --save {tmp_path}"
    for words in ("4 --exit-interval 2", "10 --exit-interval 4", "4"):
        run(folder, f"{way} --load {tmp_path} --global-batch-size {words}")
    assert values_of(tmp_path, "samples") == [4, 8, 18, 28, *range(32, 61, 4)]


def enter(folder: Path) -> None:
    """Each rank of a run its own folder."""
    os.chdir(folder / f"of_rank_{os.environ['RANK']}")


@pytest.mark.parametrize(
    ("kind", "length"),
    [("more documents", "--epochs 1"), ("other text", "--train-iters 2"), ("none", "--epochs 1")],
)
def test_ranks_with_other_data_are_refused(
    folder: Path, tmp_path: Path, kind: str, length: str
) -> None:
    lines = [f'{{"text": "{word} one"}}\n' for word in "abcdefgh"]
    others = {"more documents": lines * 2, "other text": [*lines[:-1], '{"text": "i one"}\n']}
    for rank, content in enumerate([lines, others.get(kind, lines)]):
        (tmp_path / f"of_rank_{rank}").mkdir()
        (tmp_path / f"of_rank_{rank}" / "a.jsonl").write_text("".join(content))
    words, before = f"{files(folder)} {length} --eval-iters 0", partial(enter, tmp_path)
    place = Path("a.jsonl")
    with pretrain(words, world=2, folder=tmp_path, data=place, before=before) as started:
        assert started.wait() == [0 if kind == "none" else 2] * 2, started.text()
    errors = [line for line in started.text().splitlines() if line.startswith("error: ")]
    assert [line.split()[1] for line in errors] == ["--data-path"] * (kind != "none")
    assert all("rank 0" in line and "rank 1" in line for line in errors)
    assert "Traceback" not in started.text()


def spoil(path: Path, length: int | None) -> None:
    path.write_bytes(b" " * (path.stat().st_size if length is None else length))


@pytest.mark.parametrize(("world", "is_packed"), [(1, True), (2, False)])
def test_a_file_that_changes_ends_the_run(
    folder: Path, tmp_path: Path, world: int, is_packed: bool
) -> None:
    """The file changes on one rank, when the run is ready to train."""
    path, words = tmp_path / "a.jsonl", f"{files(folder)} {REFERENCE}"
    shutil.copy(folder / "a.jsonl", path)
    action, named = partial(spoil, path, None), f"--data-path {path}"
    if is_packed:
        path, words, named = tmp_path / "p", REFERENCE, f"{tmp_path}/p.bin"
        write_data(path, [[*range(1, 99), 0]] * 4)
        action = partial(spoil, tmp_path / "p.bin", 3)
    target, rank = "megatron.train.pretrain:open_loop", world - 1
    before = partial(at_call, target, 1, [rank], action, instead=False)
    with pretrain(words, world=world, folder=tmp_path, data=path, before=before) as started:
        assert started.wait() == [2] * world, started.text()
    errors = [line for line in started.text().splitlines() if "error" in line]
    assert [line.startswith(f"error: {named}") for line in errors] == [True]
    assert "Traceback" not in started.text()


def unseen(folder: Path, texts: list[str]) -> str:
    """The flags of a WordPiece, which makes no token of what cannot be seen, and of such texts."""
    write_texts(folder / "unseen.jsonl", texts)
    words = f"--pad --tokenizer-type BertWordPieceLowerCase --vocab-file {write_wordpiece(folder)}"
    return f"{words} --no-shuffle --eval-iters 0 --log-interval 1 --train-iters 2"


def test_documents_without_a_token_are_counted_and_alone_are_one_error(tmp_path: Path) -> None:
    data, some = tmp_path / "unseen.jsonl", ["a", "\x7f", "ab", "\x7f"]
    words = unseen(tmp_path, [*some, "a", "a", "a", "\x7f"] * 2)
    run_words = f"{words} --save {tmp_path}"
    finished(run_words, world=2, folder=tmp_path, data=data)
    lines = lines_of(tmp_path)
    assert [(each["cut_documents"], each["empty_documents"]) for each in lines] == [(0, 2), (0, 1)]
    words = unseen(tmp_path, ["a"] * 4 + ["\x7f"] * 12)
    with pretrain(words, world=2, folder=tmp_path, data=data) as started:
        assert started.wait() == [2, 2], started.text()
    errors = [line for line in started.text().splitlines() if "error" in line]
    assert ["step 2" in line for line in errors] == [True]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_mock_data_train_and_resume_without_files(tmp_path: Path, kind: str) -> None:
    way = f"--mock-data --vocab-size 64 --eval-iters 1 --log-interval 1 --save {tmp_path}/save"
    way += f" --load {tmp_path}/save --lr-decay-iters 4 --preset {tmp_path}/files.toml"
    (tmp_path / "files.toml").write_text(
        'data_path = ["none"]\ntokenizer_type = "none"\nepochs = 2\n'
    )

    start = partial(finished, folder=tmp_path, program=f"pretrain_{kind}")
    start(f"{way} --train-iters 4 --exit-interval 2")
    start(f"{way} --train-iters 4 --tensor-model-parallel-size 2", world=2)
    (tmp_path / "save").rename(tmp_path / "resumed")
    start(f"{way} --train-iters 4")
    for key, last in (("loss", 4), ("validation_loss", 1)):  # the exit has one of its own
        resumed, straight = (values_of(tmp_path / name, key) for name in ("resumed", "save"))
        assert len(straight) == last
        assert resumed[-last:] == pytest.approx(straight, rel=1e-5)
    manifest = json.loads(next((tmp_path / "save").glob("step_*/manifest.json")).read_text())
    assert manifest["data"] == ["1 of mock data"]
