"""Where a run or another program starts: the same on every rank, whatever each of them sees."""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint import load, retention
from megatron.checkpoint.format import read_checkpoint
from megatron.checkpoint.resume import Start
from megatron.config.checkpoint import TrainedConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import PrecisionConfig
from megatron.data.tokenizer import GPT2BPETokenizer, Tokenizer
from megatron.train import pretrain
from megatron.train.evaluate import load_newest
from megatron.train.inputs import Inputs
from megatron.train.pretrain import Run, build
from megatron.train.step import train_step
from megatron.train.trained import SavedRun, files_beside, open_trained
from tests.checkpoint.files import make_checkpoint
from tests.config.test_checks import settings
from tests.data.samples import write_tokenizer
from tests.dist import Pool
from tests.programs import SHAPE, finished
from tests.refusals import field_of, refusal
from tests.tiny import (
    VOCABULARY,
    assert_exact,
    mesh_of_ranks,
    samples,
    save_state,
    tensors,
    tiny_config,
    tiny_state,
)


def write_checkpoint(directory: Path, tokenizer: Tokenizer, *, attached: bool = True) -> Path:
    """The model has 4 heads."""
    facts = {"config": asdict(settings()), "vocab_size": 261, "data": []}
    files = tokenizer.files if attached else {}
    return make_checkpoint(directory, 2, files, tokenizer=tokenizer.fingerprint, **facts)


@pytest.mark.parametrize(("tokenizer", "is_kept"), [("a", True), ("", True), ("b", False)])
def test_files_of_another_tokenizer_are_left_behind(
    tmp_path: Path, tokenizer: str, is_kept: bool
) -> None:
    files = {"hf_config.json": b"{}"}
    saved = read_checkpoint(make_checkpoint(tmp_path, 2, files, tokenizer="a"))
    found = files_beside(settings().model, saved, {"tokenizer": tokenizer})
    assert found == (files if is_kept else {})
    assert files_beside(settings().model, None, {"tokenizer": tokenizer}) == {}


@pytest.fixture
def tokenizer(tmp_path: Path) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*write_tokenizer(tmp_path))


@pytest.fixture
def trained(tmp_path: Path, tokenizer: GPT2BPETokenizer) -> TrainedConfig:
    """A checkpoint without a tokenizer, and the tokenizer's files."""
    write_checkpoint(tmp_path, tokenizer, attached=False)
    files = (str(tmp_path / name) for name in tokenizer.files)
    return TrainedConfig(load=str(tmp_path), vocab_file=next(files), merge_file=next(files))


def test_a_checkpoint_brings_its_tokenizer(tmp_path: Path, tokenizer: GPT2BPETokenizer) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints", tokenizer)
    for place in (folder, folder.parent):
        _, found, _ = open_trained(TrainedConfig(load=str(place)), ParallelConfig(), 1)
        assert found.fingerprint == tokenizer.fingerprint
        assert found.encode("the thing") == tokenizer.encode("the thing")
    marks = {"generation_config.json": [5, tokenizer.eod, 4], "config.json": 7}
    for name, ends in marks.items():
        (folder / f"hf_{name}").write_text(json.dumps({"eos_token_id": ends}))
    _, found, _ = open_trained(TrainedConfig(load=str(folder)), ParallelConfig(), 1)
    assert found.more_ends == (4, 5)


def test_the_model_of_a_saved_run(tmp_path: Path) -> None:
    for step, layers in ((2, 3), (4, 5)):
        config = {"model": {"num_layers": layers}, "data": {"tokenizer_type": "T"}}
        make_checkpoint(tmp_path / "saved", step, config=config, vocab_size=9, kind="gpt2")
    saved = SavedRun("gpt2", {})
    assert saved.settings(["--save", str(tmp_path / "new")]) == {}
    assert saved.model is None
    words = ["--load", str(tmp_path / "saved")]
    assert saved.settings(words) == {"num_layers": 5, "vocab_size": 9, "tokenizer_type": "T"}
    assert "tokenizer_type" not in saved.settings([*words, "--no-mock-data", "--mock-data"])
    assert "tokenizer_type" in saved.settings([*words, "--mock-data", "--no-mock-data"])
    assert saved.model == {"num_layers": 5}


def test_flags_win_over_the_checkpoint(tmp_path: Path, tokenizer: GPT2BPETokenizer) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints", tokenizer)
    (folder / "vocab.json").write_text("x" * len(tokenizer.files["vocab.json"]))  # damaged
    config = TrainedConfig(load=str(folder))
    assert folder.name in str(refusal(lambda: open_trained(config, ParallelConfig(), 1)))
    vocab, merges = (str(tmp_path / name) for name in ("vocab.json", "merges.txt"))
    config = replace(config, vocab_file=vocab, merge_file=merges)
    assert open_trained(config, ParallelConfig(), 1)[1].fingerprint == tokenizer.fingerprint


def test_settings_that_do_not_fit_are_refused(trained: TrainedConfig) -> None:
    """size: of the tensor axis. world: processes."""
    for changes, size, world, flag in (
        ({"vocab_file": None}, 1, 1, "--vocab-file"),
        ({"merge_file": None}, 1, 1, "--merge-file"),
        ({"tokenizer_type": "T5"}, 1, 1, "--tokenizer-type"),
        ({}, 2, 1, "--tensor-model-parallel-size"),
        ({}, 3, 3, "--tensor-model-parallel-size"),
    ):
        parallel = ParallelConfig(tensor_model_parallel_size=size)
        refusal(partial(open_trained, replace(trained, **changes), parallel, world), field=flag)


@pytest.mark.parametrize("attached", [False, True])
def test_another_tokenizer_is_refused(
    tmp_path: Path, tokenizer: GPT2BPETokenizer, attached: bool
) -> None:
    """That of the flags, or that in the checkpoint."""
    merges = tokenizer.files["merges.txt"].replace(b"i n\n", b"\n\n\n\n")
    (tmp_path / "merges.txt").write_bytes(merges)
    if attached:
        tokenizer.files = {**tokenizer.files, "merges.txt": merges}
    folder = write_checkpoint(tmp_path / "checkpoints", tokenizer, attached=attached)
    flags = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    given = {} if attached else {name: str(file) for name, file in flags.items()}
    config = TrainedConfig(load=str(folder), **given)
    error = refusal(lambda: open_trained(config, ParallelConfig(), 1))
    assert field_of(error) == "--vocab-file"


CONFIG = replace(settings(), model=tiny_config())  # trains to step 3
FACTS = {"vocab_size": VOCABULARY, "tokenizer": "f", "data": []}


def save(directory: Path, *steps: int, **facts: Any) -> tuple[Path, ...]:
    """Checkpoints of CONFIG's run, the last of `steps` first."""
    state = tiny_state(mesh_of_ranks(1), CONFIG.model, dtype=torch.float32)
    every = {**FACTS, **state.facts(), "kind": "gpt2", "config": asdict(CONFIG)}
    every |= {"run": "one", "validation_loss": None}
    for state.step in steps:
        state.samples = 4 * state.step
        save_state(state, directory, **every | facts | {"counters": state.counters()})
    return tuple(directory / f"step_{step:08d}" for step in reversed(steps))


def start(
    folders: tuple[Path, ...],
    *,
    finetune: bool = False,
    facts: dict[str, Any] = FACTS,
    **changes: Any,
) -> Run:
    """A run that starts from one of the folders; facts: of its data; changes: of CONFIG."""
    corpus = SimpleNamespace(vocab_size=VOCABULARY, identity=facts)
    train = SimpleNamespace(samples_per_epoch=8)
    inputs = Inputs(corpus=corpus, tokenizer=None, train=train, validation=None)
    begin = Start(folders=folders, finetune=finetune)
    return build(replace(CONFIG, **changes), inputs, begin, mesh_of_ranks(1))


@pytest.mark.parametrize("facts", [{}, {"config": "mine"}, {"config": {"lr": 1}, "vocab_size": 9}])
def test_a_checkpoint_of_an_own_loop_is_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    mesh, folder = mesh_of_ranks(1), tmp_path / "step_00000000"
    save_state(tiny_state(mesh), tmp_path, **facts)
    words = f"{SHAPE} --seq-length 16 --mock-data --train-iters 1 --load {tmp_path}"
    error = refusal(lambda: pretrain.pretrain(words.split(), {}, "gpt2"), lines=1)
    assert (field_of(error), str(folder) in str(error)) == ("--load", True)
    refusal(lambda: load_newest([folder], mesh))
    found = load.newest_checkpoint(tmp_path, mesh)
    assert found.path == folder


def test_a_setting_of_the_model_that_is_not_known_is_named(tmp_path: Path) -> None:
    model = asdict(CONFIG.model) | {"number_of_wheels": 4}
    folders = save(tmp_path, 2, config={"model": model})
    refusal(lambda: load_newest(folders, mesh_of_ranks(1)), "number_of_wheels")


def test_a_run_starts_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    scratch = start(())
    assert (scratch.state.step, scratch.facts["weights_of"]) == (0, None)
    newest, oldest = folders = save(tmp_path, 2, 4)
    optimizer = replace(CONFIG.optimizer, lr=3.0)
    tuned = start(folders, finetune=True, optimizer=optimizer)
    assert tuned.state.step == 0
    assert tuned.facts["weights_of"] == "one" != tuned.facts["run"]
    assert not any("--lr" in each for each in tuned.messages)
    assert str(newest) in tuned.messages[-1]

    (newest / "manifest.json").unlink()
    resumed = start(folders, optimizer=optimizer)
    assert (resumed.state.step, resumed.state.samples, resumed.facts["run"]) == (2, 8, "one")
    passed_over, where, changed, *_ = resumed.messages
    assert str(newest / "manifest.json") in passed_over
    assert str(oldest) in where
    assert all(each in changed for each in ("--lr", "3.0", "0.00015"))


def test_pure_bf16_is_resumed_without_being_asked_for(tmp_path: Path) -> None:
    pure = start((), precision=PrecisionConfig(pure_bf16=True))
    train_step(pure.state, [samples(2)], 1e-2)
    facts = {**pure.facts, **pure.state.facts(), "validation_loss": None}
    save_state(pure.state, tmp_path, **facts)
    folder = tmp_path / "step_00000001"
    resumed, tuned = start((folder,)), start((folder,), finetune=True)
    assert_exact(tensors(resumed.state), tensors(pure.state))
    assert resumed.facts["config"]["precision"]["pure_bf16"]
    assert not tuned.facts["config"]["precision"]["pure_bf16"]
    refusal(lambda: tuned.state.load(read_checkpoint(folder)), "float32", "bfloat16")
    kept = list(resumed.state.optimizer.tensors())
    kinds = {each.key.partition(".")[0] for each in kept}
    assert kinds == {"exp_avg", "exp_avg_sq"}
    assert {each.local.dtype for each in kept} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("step", "loss", "is_due"),
    [(2, None, True), (2, 1.0, False), (1, None, False), (3, None, True), (3, 1.0, False)],
)
def test_a_missed_evaluation_is_made_up_for(
    tmp_path: Path, step: int, loss: float | None, is_due: bool
) -> None:
    """At multiples of 2, and at the last step, which is 3."""
    folders = save(tmp_path, step, validation_loss=loss)
    training = replace(CONFIG.training, eval_interval=2)
    assert start(folders, training=training).evaluate_first == is_due
    assert not start(folders, training=training, finetune=True).evaluate_first


def test_a_checkpoint_at_the_target_leaves_nothing_to_train(tmp_path: Path) -> None:
    for step, is_done in ((2, False), (3, True), (40, True)):
        messages = start(save(tmp_path / str(step), step)).messages
        assert any(f"--train-iters {2 * step}" in each for each in messages) == is_done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the data set and the logs of `train`."""
    return tmp_path_factory.mktemp("resume")


def train(words: str, folder: Path, **more: Any) -> str:
    return finished(f"--eval-iters 0 --lr-decay-iters 9 {words}", folder=folder, **more)


def rename_before_the_claim(one: Path, other: Path) -> None:
    """In this process one becomes the other just before --save is claimed."""
    claim, was = retention.claim, one

    def late(*arguments: Any) -> Any:
        with suppress(FileNotFoundError):  # another rank was faster
            was.rename(other)
        return claim(*arguments)

    retention.claim = late


def test_a_save_between_start_and_lock_is_resumed(folder: Path, tmp_path: Path) -> None:
    way = f"--save {tmp_path} --load {tmp_path} --save-interval 1"
    train(f"{way} --train-iters 2", folder)
    newest = tmp_path / "step_00000002"
    aside = newest.rename(tmp_path / "aside")
    before = partial(rename_before_the_claim, aside, newest)
    assert str(newest) in train(f"{way} --train-iters 3", folder, before=before)
    assert len(list(tmp_path.glob("step_*"))) == 3, "nothing is abandoned"


def test_what_appears_before_the_lock_is_refused_by_all(folder: Path, tmp_path: Path) -> None:
    save, other = tmp_path / "save", tmp_path / "other"
    make_checkpoint(other, 1)
    before = partial(rename_before_the_claim, other, save)
    text = train(f"--save {save} --train-iters 1", folder, world=2, code=2, before=before)
    assert "error: --save" in text


def test_a_record_that_cannot_be_written_is_refused_by_all(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "metrics.jsonl"
    text = train(f"--metrics-file {place} --train-iters 1", folder, world=2, code=2)
    assert f"error: {place} " in text


def start_from(lists: list[tuple[Path, ...]]) -> int:
    """The step at which the run starts; lists: the folders that each rank finds."""
    return start(lists[torch.distributed.get_rank()]).state.step


def test_folders_of_the_first_rank_hold(gloo: Pool, tmp_path: Path) -> None:
    _, oldest = folders = save(tmp_path, 2, 4)
    for first, second, expected in (
        (folders, (oldest,), 4),
        ((oldest,), folders, 2),
        (folders, (), 4),
        ((), folders, 0),
    ):
        assert gloo.run(2, start_from, [first, second]) == [expected] * 2


def start_where_folders_differ(places: list[Path], names: tuple[str, ...]) -> tuple[str, int]:
    """The start of each rank in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(places[torch.distributed.get_rank()])
        run = start(tuple(map(Path, names)))
    return run.messages[0], run.state.step


@pytest.mark.parametrize("is_there", [False, True])
def test_checkpoint_that_ranks_see_differently(gloo: Pool, tmp_path: Path, is_there: bool) -> None:
    newest, oldest = folders = save(tmp_path / "one", 2, 4)
    shutil.copytree(oldest, tmp_path / "other" / oldest.name)
    if is_there:
        save(tmp_path / "other", 4, run="two")
    places = [tmp_path / "one", tmp_path / "other"]
    names = tuple(each.name for each in folders)
    ours, theirs = gloo.run(2, start_where_folders_differ, places, names)
    assert ours == theirs
    reason, step = ours
    assert step == 2
    assert newest.name in reason


def refused_start(folders: tuple[Path, ...], fault: str, finetune: bool) -> str:
    """The error of each rank; another tokenizer is the second one's alone."""
    is_bad = torch.distributed.get_rank() == 1
    facts = FACTS | {"tokenizer": "g"} if fault == "another tokenizer" and is_bad else FACTS
    changes = {"model": tiny_config(num_layers=3)} if fault == "larger model" else {}
    return str(refusal(lambda: start(folders, finetune=finetune, facts=facts, **changes)))


@pytest.mark.parametrize("finetune", [False, True])
def test_a_refused_start_is_refused_by_all(gloo: Pool, tmp_path: Path, finetune: bool) -> None:
    folders = save(tmp_path, 2)
    for fault in ("another tokenizer", "larger model"):
        first, second = gloo.run(2, refused_start, folders, fault, finetune)
        assert first == second
