"""How a run starts: the same on every rank, whatever each of them sees."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import load
from megatron.checkpoint.resume import Start
from megatron.train import start
from megatron.train.start import Began, begin, choose_precision
from megatron.train.state import TrainState, environment
from tests.config.test_checks import settings
from tests.dist import Pool
from tests.tiny import VOCABULARY, mesh_of_ranks, tiny_section, tiny_state

CONFIG = asdict(settings())
FACTS = {"config": CONFIG, "vocab_size": VOCABULARY, "tokenizer": "f", "data": []}


def fresh(**changes: Any) -> TrainState:
    return tiny_state(mesh_of_ranks(1), tiny_section(**changes), dtype=torch.float32)


def accept(path: Path, manifest: Mapping[str, Any]) -> None:
    pass


def save(directory: Path, *steps: int, **facts: Any) -> tuple[Path, ...]:
    """Checkpoints of `fresh`, the last of `steps` first."""
    state = fresh()
    for state.step in steps:
        state.samples = 4 * state.step
        facts = {**FACTS, "environment": environment(state.mesh), "run": "one"} | facts
        state.save(str(directory), facts)
    return tuple(directory / f"step_{step:08d}" for step in reversed(steps))


def test_from_scratch_there_is_nothing_to_tell() -> None:
    assert begin(fresh(), Start(), accept, FACTS) == Began(["starting from scratch"])


def test_a_resumed_run_is_told_where_it_is_and_what_has_changed(tmp_path: Path) -> None:
    folders, state = save(tmp_path, 2, 4, weights_of="before"), fresh()
    (folders[0] / "manifest.json").unlink()
    began = begin(
        state, Start(folders=folders), accept, FACTS | {"config": asdict(settings(lr=3.0))}
    )
    assert (state.step, state.samples) == (2, 8)
    assert began.manifest is not None
    assert (began.manifest["run"], began.weights_of) == ("one", "before")
    passed, where, changed, *_ = began.news
    assert passed.startswith(f"passed over: {folders[0]}/manifest.json is not there")
    assert where == f"going on from {folders[1]}"
    assert changed == "changed: --lr is 3.0 (was 0.00015)"


def test_a_checkpoint_at_the_target_leaves_nothing_to_train(tmp_path: Path) -> None:
    """CONFIG trains to step 3."""
    for step, is_done in ((2, False), (3, True), (40, True)):
        folders = save(tmp_path / str(step), step)
        news = begin(fresh(), Start(folders=folders), accept, FACTS).news
        told = [line for line in news if "--train-iters is 3" in line]
        assert [f"at step {step}" in line for line in told] == [True] * is_done


def test_fine_tuning_knows_whose_weights_it_has_and_tells_no_changes(tmp_path: Path) -> None:
    folders, state = save(tmp_path, 4), fresh()
    facts = FACTS | {"config": asdict(settings(lr=3.0))}
    began = begin(state, Start(folders=folders, finetune=True), accept, facts)
    news = [f"starting at step 0 from the weights of {folders[0]}"]
    assert (state.step, began) == (0, Began(news, None, "one"))


def begin_from(lists: list[tuple[Path, ...]]) -> tuple[str, int]:
    """lists: the folders that each rank finds."""
    state = fresh()
    began = begin(state, Start(folders=lists[state.mesh.control.rank]), accept, FACTS)
    return began.news[0], state.step


def test_the_folders_that_the_first_rank_finds_hold_for_all(gloo: Pool, tmp_path: Path) -> None:
    newest, oldest = folders = save(tmp_path, 2, 4)
    for first, second, expected in (
        (folders, (oldest,), (f"going on from {newest}", 4)),
        ((oldest,), folders, (f"going on from {oldest}", 2)),
        (folders, (), (f"going on from {newest}", 4)),
        ((), folders, ("starting from scratch", 0)),
    ):
        assert gloo.run(2, begin_from, [first, second]) == [expected] * 2


def begin_where_folders_differ(other: Path, folders: tuple[Path, ...]) -> tuple[list[str], int]:
    """The second rank finds in `other` what the first finds beside the folders."""
    state = fresh()
    with pytest.MonkeyPatch.context() as patch:
        if state.mesh.control.rank == 1:
            read = load.read_checkpoint
            elsewhere = lambda path: replace(read(other / path.name), path=path)  # noqa: E731
            patch.setattr(load, "read_checkpoint", elsewhere)
        return begin(state, Start(folders=folders), accept, FACTS).news[:2], state.step


@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_not_the_same_to_all_ranks_is_passed_over_by_all(
    gloo: Pool, tmp_path: Path, is_there: bool
) -> None:
    newest, oldest = folders = save(tmp_path / "one", 2, 4)
    shutil.copytree(oldest, tmp_path / "other" / oldest.name)
    if is_there:
        save(tmp_path / "other", 4, run="two")
    ours, theirs = gloo.run(2, begin_where_folders_differ, tmp_path / "other", folders)
    assert ours == theirs
    (passed, where), step = ours
    reason = f"{newest} is not the same on all ranks" if is_there else "json is not there"
    assert reason in passed
    assert (where, step) == (f"going on from {oldest}", 2)


def with_one_rank_broken(folders: tuple[Path, ...], broken: str, finetune: bool) -> str:
    state = fresh()
    is_broken = state.mesh.control.rank == 1

    def refuse(*_: Any) -> None:
        raise ValueError("it does not fit")

    check = refuse if broken == "check" and is_broken else accept
    with pytest.MonkeyPatch.context() as patch:
        if broken == "safe_open" and is_broken:
            patch.setattr(load, "safe_open", refuse)
        with pytest.raises(ValueError, match="fit") as error:
            begin(state, Start(folders=folders, finetune=finetune), check, FACTS)
    return str(error.value)


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("broken", ["check", "safe_open"])
def test_what_one_rank_refuses_is_refused_by_all(
    gloo: Pool, tmp_path: Path, broken: str, finetune: bool
) -> None:
    folders = save(tmp_path, 2)
    told = gloo.run(2, with_one_rank_broken, folders, broken, finetune)
    assert told == ["it does not fit"] * 2


def into_a_larger_model(folders: tuple[Path, ...]) -> str:
    with pytest.raises(ValueError, match=r"has no tensor model\.transformer\.layers\.2") as error:
        begin(fresh(num_layers=3), Start(folders=folders), accept, FACTS)
    return str(error.value)


def test_a_missing_tensor_is_the_same_error_on_all_ranks(gloo: Pool, tmp_path: Path) -> None:
    first, second = gloo.run(2, into_a_larger_model, save(tmp_path, 2))
    assert first == second


def chosen(given: str | None, saved: list[str | None], devices: list[str]) -> str:
    mesh = mesh_of_ranks(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "default_precision", lambda _: devices[mesh.control.rank])
        try:
            return choose_precision(given, saved[mesh.control.rank], mesh)
        except ValueError as error:
            return str(error)


def test_ranks_compute_in_one_precision_or_not_at_all(gloo: Pool) -> None:
    mixed = ["bf16", "fp32", "bf16"]
    assert gloo.run(3, chosen, "fp16", ["bf16"] * 3, mixed) == ["fp16"] * 3
    assert gloo.run(3, chosen, None, ["bf16"] * 3, mixed) == ["bf16"] * 3
    assert gloo.run(3, chosen, None, ["bf16", None, "fp32"], mixed) == ["bf16"] * 3
    assert gloo.run(3, chosen, None, [None] * 3, ["fp32"] * 3) == ["fp32"] * 3
    (message,) = set(gloo.run(3, chosen, None, [None] * 3, mixed))
    assert "bf16 (rank 0, 2) and fp32 (rank 1)" in message
    assert "--no-bf16 or --bf16" in message
