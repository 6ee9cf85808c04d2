"""Runs on padded documents and on mock data: what they learn, how long, and what they resume."""

import json
import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.tokenizer_base import Tokenizer
from megatron.train import loader
from megatron.train.inputs import open_gpt2_inputs
from tests.data.samples import write_data, write_tokenizer, write_wordpiece
from tests.programs import SHAPE, pretrain

REFERENCE = "--train-iters 6 --eval-iters 2 --lr-decay-iters 6 --log-interval 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files and a.jsonl, of 40 documents of which some are too long; b.jsonl has them
    under another key as well, c.jsonl the short ones alone."""
    folder, random = tmp_path_factory.mktemp("padded"), Random(0)
    write_tokenizer(folder)
    texts = ["".join(random.choices("abcdefg ", k=random.randint(1, 20))) + "x" for _ in range(40)]
    lines = {
        "a": [{"text": text} for text in texts],
        "b": [{"text": text, "body": text[::-1]} for text in texts],
        "c": [{"text": text[:11]} for text in texts],
    }
    for name, records in lines.items():
        content = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(content + "no JSON\n")
    return folder


def run(folder: Path, words: str, *, data: str = "a", world: int = 1, code: int = 0) -> str:
    """What the first rank printed."""
    if "--mock-data" not in words:
        files = f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
        words = f"--pad {files} {words}"
    path = folder / f"{data}.jsonl"
    with pretrain(words, world=world, folder=folder, data=path) as started:
        assert started.wait() == [code] * world, started.text()
        assert "Traceback" not in started.text()
        return started.text(0)


def record(save: Path) -> list[dict[str, float]]:
    """The lines of the steps and evaluations."""
    lines = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [each for each in lines if "loss" in each or "validation_loss" in each]


def losses(save: Path) -> list[float]:
    return [each.get("loss", each.get("validation_loss", 0)) for each in record(save)]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The checkpoints of an undisturbed run on b.jsonl."""
    save = folder / "whole"
    text = run(folder, f"{REFERENCE} --save {save}", data="b")
    assert "1 of 41 lines" in text
    return save


@pytest.mark.parametrize(
    ("layout", "world"),
    [("", 1), ("--micro-batch-size 2 --num-workers 1", 1), ("--micro-batch-size 2", 2),
     ("--tensor-model-parallel-size 2 --num-workers 4 --log-ranks", 2)],
)  # fmt: skip
def test_a_resumed_run_gives_the_same_losses(
    folder: Path, whole: Path, tmp_path: Path, layout: str, world: int
) -> None:
    way = f"{REFERENCE} --save {tmp_path} --load {tmp_path}"
    run(folder, f"{way} --exit-interval 3", data="b")
    text = run(folder, f"{way} {layout}", data="b", world=world)
    assert ("rank 1 of 2: data 0, tensor 1" in text) == ("--log-ranks" in layout)
    ours, theirs = record(tmp_path), record(whole)
    # The evaluation of the exit at step 3 comes in between.
    found = [each.get("loss") for each in ours if "loss" in each]
    expected = [each.get("loss") for each in theirs if "loss" in each]
    assert found == (pytest.approx(expected, rel=1e-6) if layout else expected)
    assert ours[-1]["validation_loss"] == pytest.approx(theirs[-1]["validation_loss"], rel=1e-6)
    cut = [[each["cut_documents"] for each in lines if "loss" in each] for lines in (ours, theirs)]
    assert cut[0] == cut[1]
    assert sum(cut[0]) > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--seed 5", "--seed"),
        ("--seq-length 15", "--seq-length"),
        ("--begin-token a", "--begin-token"),
        ("--end-token a", "--end-token"),
        ("--json-key body", "--data-path"),
        ("--no-shuffle", "--no-shuffle"),
        ("--data-path {folder}/a.jsonl", "--data-path"),
        ("--mock-data --vocab-size 261", "--mock-data"),
    ],
)
def test_a_run_of_other_samples_is_not_resumed(
    folder: Path, whole: Path, words: str, named: str
) -> None:
    text = run(
        folder, f"{REFERENCE} --load {whole} {words.format(folder=folder)}", data="b", code=2
    )
    assert f"error: {named}" in text


def test_padding_changes_no_loss(folder: Path, tmp_path: Path) -> None:
    for length in (12, 16):
        words = f"{REFERENCE} --seq-length {length} --save {tmp_path / str(length)}"
        run(folder, words, data="c")
    assert losses(tmp_path / "12") == pytest.approx(losses(tmp_path / "16"), rel=1e-6)
    assert not any(each.get("cut_documents") for each in record(tmp_path / "12"))


def test_epochs_end_with_the_last_whole_batch_and_go_on(folder: Path, tmp_path: Path) -> None:
    way = f"--global-batch-size 3 --eval-iters 0 --log-interval 1 --save {tmp_path}"
    run(folder, f"{way} --epochs 1 --lr-decay-iters 9")
    assert [line["samples"] for line in record(tmp_path)] == [3, 6, 9, 12, 15, 18]
    run(folder, f"{way} --load {tmp_path} --epochs 2 --lr-decay-iters 9")
    assert [line["samples"] for line in record(tmp_path)][-1] == 39
    refused = run(folder, f"{way}_2 --epochs 1 --lr-warmup-iters 7", code=2)
    assert "error: --lr-warmup-iters" in refused
    ended = run(folder, f"{way} --load {tmp_path} --epochs 2 --lr-decay-iters 9")
    assert "--epochs 3 continues" in ended
    assert [line["samples"] for line in record(tmp_path)][-1] == 39


def test_epochs_hold_all_samples_once_whatever_the_global_batches(
    folder: Path, tmp_path: Path
) -> None:
    way = f"--epochs 3 --eval-iters 0 --log-interval 1 --lr-decay-iters 9 --save {tmp_path}"
    for words in ("4 --exit-interval 2", "10 --exit-interval 4", "4"):
        run(folder, f"{way} --load {tmp_path} --global-batch-size {words}")
    samples = [line["samples"] for line in record(tmp_path)]
    assert samples == [4, 8, 18, 28, *range(32, 61, 4)]


def enter(folder: Path) -> None:
    """Each rank of a run its own folder."""
    os.chdir(folder / f"of_rank_{os.environ['RANK']}")


@pytest.mark.parametrize(
    ("kind", "length"),
    [("more documents", "--epochs 1"), ("other text", "--train-iters 2"), ("none", "--epochs 1")],
)
def test_ranks_that_see_other_data_are_refused(
    folder: Path, tmp_path: Path, kind: str, length: str
) -> None:
    lines = [f'{{"text": "{word} one"}}\n' for word in "abcdefgh"]
    others = {"more documents": lines * 2, "other text": [*lines[:-1], '{"text": "i one"}\n']}
    for rank, content in enumerate([lines, others.get(kind, lines)]):
        (tmp_path / f"of_rank_{rank}").mkdir()
        (tmp_path / f"of_rank_{rank}" / "a.jsonl").write_text("".join(content))
    files = f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
    words, before = f"--pad {files} {length} --eval-iters 0", partial(enter, tmp_path)
    place = Path("a.jsonl")
    with pretrain(words, world=2, folder=tmp_path, data=place, before=before) as started:
        assert started.wait() == [0 if kind == "none" else 2] * 2, started.text()
    errors = [line for line in started.text().splitlines() if line.startswith("error: ")]
    assert [line.split()[1] for line in errors] == ["--data-path"] * (kind != "none")
    assert all("rank 0" in line and "rank 1" in line for line in errors)
    assert "Traceback" not in started.text()


def test_epochs_of_a_blend_are_those_of_its_first_data_set(folder: Path) -> None:
    words = [*SHAPE.split(), "--pad", "--epochs=10", "--seq-length=16", "--split=1,0,0"]
    words += ["--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt"]
    words += ["--data-path", "1", f"{folder}/a.jsonl", "15", f"{folder}/c.jsonl"]
    with pytest.warns(UserWarning, match="1 of 41 lines"):
        inputs = open_gpt2_inputs(parse(PretrainGPT2Config, words, {}))
    assert inputs.samples_in(1) == 42
    assert inputs.samples_in(10) == 400 * 16 // 15 > 420


def spoil(path: Path, rank: str, length: int | None = None) -> None:
    """Let the file change on this rank when the run is ready to train, to so many bytes."""
    from megatron.train import pretrain as program

    open_loop = program.open_loop

    def spoiled(*given: Any) -> Any:
        if os.environ.get("RANK", "0") == rank:
            path.write_bytes(b" " * (path.stat().st_size if length is None else length))
        return open_loop(*given)

    program.open_loop = spoiled


@pytest.mark.parametrize(("world", "rank"), [(1, "0"), (2, "1")])
def test_a_file_that_changes_under_a_run_ends_it_in_one_line(
    folder: Path, tmp_path: Path, world: int, rank: str
) -> None:
    """One process reads packed tokens, two read JSON lines."""
    path, expected = tmp_path / "a.jsonl", f"error: --data-path {tmp_path}/a.jsonl"
    path.write_bytes((folder / "a.jsonl").read_bytes())
    files = f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
    words, changes = f"--pad {files} {REFERENCE}", partial(spoil, path, rank)
    if world == 1:
        write_data(tmp_path / "p", [[*range(1, 99), 0]] * 4)
        path, expected, words = tmp_path / "p", f"error: {tmp_path}/p.bin", REFERENCE
        changes = partial(spoil, tmp_path / "p.bin", rank, length=3)
    with pretrain(words, world=world, folder=tmp_path, data=path, before=changes) as started:
        assert started.wait() == [2] * world, started.text()
    errors = [line for line in started.text().splitlines() if "error" in line]
    assert [line[: len(expected)] for line in errors] == [expected]
    assert "Traceback" not in started.text()


def unseen(folder: Path, texts: list[str]) -> str:
    """The flags of a WordPiece, which makes no token of what cannot be seen, and of such texts."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "unseen.jsonl").write_text(lines)
    words = f"--pad --tokenizer-type BertWordPieceLowerCase --vocab-file {write_wordpiece(folder)}"
    return f"{words} --no-shuffle --eval-iters 0 --log-interval 1 --train-iters 2"


def test_documents_without_a_token_are_counted_and_alone_are_one_error(tmp_path: Path) -> None:
    data, some = tmp_path / "unseen.jsonl", ["a", "\x7f", "ab", "\x7f"]
    words = unseen(tmp_path, [*some, "a", "a", "a", "\x7f"] * 2)
    run_words = f"{words} --save {tmp_path}"
    with pretrain(run_words, world=2, folder=tmp_path, data=data) as started:
        assert started.wait() == [0, 0], started.text()
    lines = record(tmp_path)
    assert [(each["cut_documents"], each["empty_documents"]) for each in lines] == [(0, 2), (0, 1)]
    words = unseen(tmp_path, ["a"] * 4 + ["\x7f"] * 12)
    with pretrain(words, world=2, folder=tmp_path, data=data) as started:
        assert started.wait() == [2, 2], started.text()
    errors = [line for line in started.text().splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: nothing in step 2")


def report_workers() -> None:
    """Print how many threads a run reads ahead with."""
    prefetch = loader.prefetch

    def reported(*given: Any, num_workers: int = 1, **more: Any) -> Any:
        print("workers:", num_workers)
        return prefetch(*given, num_workers=num_workers, **more)

    loader.prefetch = reported


def test_as_many_threads_read_ahead_as_are_asked_for(tmp_path: Path) -> None:
    words = "--mock-data --vocab-size 64 --train-iters 1 --eval-iters 0 --num-workers 3"
    with pretrain(words, folder=tmp_path, before=report_workers) as started:
        assert started.wait() == [0], started.text()
    assert "workers: 3" in started.text()


def report_parallelism() -> None:
    """Print what the tokenizers' library is told whenever it tokenises."""
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    encode = Tokenizer.encode_batch

    def reported(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        print(len(texts), "texts, parallel:", os.environ.get("TOKENIZERS_PARALLELISM"))
        return encode(self, texts)

    Tokenizer.encode_batch = reported


def test_only_before_training_the_library_of_tokenizers_uses_all_cores(folder: Path) -> None:
    words = f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt --pad"
    words += " --train-iters 1 --eval-iters 0 --too-long refuse"
    data = folder / "c.jsonl"
    with pretrain(words, folder=folder, data=data, before=report_parallelism) as started:
        assert started.wait() == [0], started.text()
    found = [line for line in started.text().splitlines() if "parallel:" in line]
    assert found == ["40 texts, parallel: None", *["1 texts, parallel: false"] * 4]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--begin-token [BOT]", "--begin-token"),
        ("--too-long refuse", "--too-long"),
        ("--vocab-size 5", "--vocab-size"),
        ("--no-pad", "--data-path"),
    ],
)
def test_what_does_not_fit_ends_in_one_line(folder: Path, words: str, named: str) -> None:
    text = run(folder, f"--train-iters 1 {words}", code=2)
    assert [line[: len(named) + 7] for line in text.splitlines() if "error" in line] == [
        f"error: {named}"
    ]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_mock_data_train_and_resume_without_files(tmp_path: Path, kind: str) -> None:
    way = f"--mock-data --vocab-size 64 --eval-iters 1 --log-interval 1 --save {tmp_path}/save"
    way += f" --load {tmp_path}/save --lr-decay-iters 4 --preset {tmp_path}/files.toml"
    logs = tmp_path
    (logs / "files.toml").write_text('data_path = ["none"]\ntokenizer_type = "none"\nepochs = 2\n')

    def start(words: str, world: int = 1) -> None:
        program = f"pretrain_{kind}"
        with pretrain(f"{way} {words}", world=world, folder=logs, program=program) as started:
            assert started.wait() == [0] * world, started.text()

    start("--train-iters 4 --exit-interval 2")
    start("--train-iters 4 --tensor-model-parallel-size 2", world=2)
    resumed = losses(tmp_path / "save")
    (tmp_path / "save").rename(tmp_path / "resumed")
    start("--train-iters 4")
    steps = [each["loss"] for each in record(tmp_path / "resumed") if "loss" in each]
    assert steps == pytest.approx(
        [each["loss"] for each in record(tmp_path / "save") if "loss" in each], rel=1e-5
    )
    assert resumed[-1] == pytest.approx(losses(tmp_path / "save")[-1], rel=1e-5)
    manifest = json.loads(next((tmp_path / "save").glob("step_*/manifest.json")).read_text())
    assert manifest["data"] == ["1 of mock data"]
