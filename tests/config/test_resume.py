"""Where a run starts, and what a resumed run may not change."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron.config import CheckpointConfig, UsageError
from megatron.config.checkpoints import seal
from megatron.config.resume import changes, check_start, find_start, newest_readable, run_id
from tests.config.test_checks import settings

IDENTITY = {"vocab_size": 100, "tokenizer": "f", "data": ["1/4 of SHA-256 a", "3/4 of SHA-256 b"]}
PATH = Path("somewhere/step_00000004")


def manifest(**changes: Any) -> dict[str, Any]:
    facts = {"config": asdict(settings(**changes)), "precision": "fp32", **IDENTITY}
    environment = {"layout": {"data": 2, "tensor": 1}}
    return {"format": 2, **facts, "environment": environment, "files": {}, "tensors": {}}


def write(directory: Path, *steps: int, **facts: str) -> None:
    for step in steps:
        folder = directory / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(seal(manifest() | facts)))


def names(section: CheckpointConfig) -> list[str]:
    return [str(Path(folder.parent.name) / folder.name) for folder in find_start(section).folders]


def test_a_job_that_restarts_itself_finds_nothing_at_first(tmp_path: Path) -> None:
    section = CheckpointConfig(load=str(tmp_path / "a"), save=str(tmp_path / "a"))
    assert names(section) == []
    write(tmp_path / "a", 2, 10)
    assert names(section) == ["a/step_00000010", "a/step_00000002"]


def test_a_directory_may_be_spelt_in_two_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a")
    for load in ("a/", "./a", "link", str(tmp_path / "a")):
        assert names(CheckpointConfig(load=load, save="a")) == []
    write(tmp_path / "a", 2, 4)
    write(tmp_path / "b", 4, run="another")
    for one in ("link/step_00000002", "a/step_00000002/", "straight"):
        (tmp_path / "straight").unlink(missing_ok=True)
        (tmp_path / "straight").symlink_to("a/step_00000002")
        (found,) = find_start(CheckpointConfig(load=one, save="a")).folders
        assert found.resolve() == tmp_path / "a" / "step_00000002"


def test_fine_tuning_into_the_directory_it_loads_is_refused_in_every_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", 2)
    (tmp_path / "link").symlink_to("a")
    for load in ("a", "a/", "./a", "link", "a/step_00000002", "link/step_00000002"):
        with pytest.raises(UsageError, match="another directory for --save would work"):
            CheckpointConfig(load=load, save="a", finetune=True)
    CheckpointConfig(load="a", save="a/finer", finetune=True)


def test_nothing_to_load_is_an_error(tmp_path: Path) -> None:
    message = "--load .*: no checkpoint .* --save would work"
    with pytest.raises(FileNotFoundError, match=message):
        find_start(CheckpointConfig(load=str(tmp_path / "a"), save=str(tmp_path / "b")))
    write(tmp_path / "a", 2)
    for save in ("a", "b"):
        load = str(tmp_path / "a" / "step_00000003")
        with pytest.raises(FileNotFoundError, match=message):
            find_start(CheckpointConfig(load=load, save=str(tmp_path / save)))


def test_a_run_from_scratch_does_not_mix_with_another(tmp_path: Path) -> None:
    write(tmp_path, 7)
    message = f"--save {tmp_path} holds .*step_00000007.*--load {tmp_path} to go on, or another"
    with pytest.raises(ValueError, match=message):
        find_start(CheckpointConfig(save=str(tmp_path)))


def test_requeued_it_goes_on_from_the_furthest_of_both(tmp_path: Path) -> None:
    write(tmp_path / "a", 4, 8)
    section = CheckpointConfig(load=str(tmp_path / "a"), save=str(tmp_path / "b"))
    assert names(section) == ["a/step_00000008", "a/step_00000004"]
    write(tmp_path / "b", 10)
    assert names(section) == ["b/step_00000010", "a/step_00000008", "a/step_00000004"]


def test_two_runs_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a", 4, run="one")
    write(tmp_path / "b", 10, run="two")
    section = CheckpointConfig(load=str(tmp_path / "a"), save=str(tmp_path / "b"))
    message = (
        f"--save {tmp_path / 'b'} .* step_00000010, .* not of the run of --load {tmp_path / 'a'} "
        f".*; --load {tmp_path / 'b'} .* or another directory for --save, would work"
    )
    with pytest.raises(ValueError, match=message):
        find_start(section)
    write(tmp_path / "b", 12, run="one")  # the newest is what counts
    assert names(section)[0] == "b/step_00000012"
    (tmp_path / "a" / "step_00000004" / "manifest.json").write_text("{")
    assert names(section)[0] == "b/step_00000012"


def test_one_step_may_be_named_to_go_back_to(tmp_path: Path) -> None:
    write(tmp_path / "a", 4, 8)
    one = str(tmp_path / "a" / "step_00000004")
    assert names(CheckpointConfig(load=one, save=str(tmp_path / "a"))) == ["a/step_00000004"]
    assert names(CheckpointConfig(load=one, save=str(tmp_path / "b"))) == ["a/step_00000004"]
    write(tmp_path / "b", 6)
    assert names(CheckpointConfig(load=one, save=str(tmp_path / "b")))[0] == "b/step_00000006"


def test_fine_tuning_begins_with_the_weights_and_goes_on_where_it_was(tmp_path: Path) -> None:
    write(tmp_path / "a", 400)
    section = CheckpointConfig(load=str(tmp_path / "a"), save=str(tmp_path / "b"), finetune=True)
    assert (names(section), find_start(section).finetune) == (["a/step_00000400"], True)
    write(tmp_path / "b", 2)
    assert (names(section), find_start(section).finetune) == (["b/step_00000002"], False)


def test_fine_tuning_goes_on_from_its_own_weights_only(tmp_path: Path) -> None:
    write(tmp_path / "a", 400, run="one")
    write(tmp_path / "b", 2, run="two", weights_of="one")
    write(tmp_path / "c", 2, run="one")
    write(tmp_path / "d", 2, run="two", weights_of="three")

    def section(save: str, *, finetune: bool) -> CheckpointConfig:
        load, place = str(tmp_path / "a"), str(tmp_path / save)
        return CheckpointConfig(load=load, save=place, finetune=finetune)

    assert names(section("b", finetune=True)) == ["b/step_00000002"]
    for save in "cd":
        with pytest.raises(ValueError, match=f"--save .*/{save} .* not fine-tuned from --load"):
            find_start(section(save, finetune=True))
    with pytest.raises(ValueError, match="--save .*/b .* not of the run of --load"):
        find_start(section("b", finetune=False))


def test_a_run_keeps_its_id() -> None:
    assert run_id({"run": "abc"}) == "abc"
    ids = {run_id(None), run_id({}), run_id(None)}
    assert len(ids) == 3
    assert all(len(bytes.fromhex(each)) == 8 for each in ids)


def told(data_size: int = 2, *, before: dict[str, Any], **now: Any) -> list[str]:
    facts = {"config": asdict(settings(**now)), **IDENTITY}
    return changes(facts, manifest(**before), data_size)


def test_what_has_changed_is_told() -> None:
    assert told(before={}) == []
    assert told(before={"lr": 1.5e-4}, lr=3.0) == ["changed: --lr is 3.0 (was 0.00015)"]
    lines = told(before={}, clip_grad=0.5, data_path=("0.3", "a"), save="s", log_interval=3)
    assert lines == [
        "changed: --data-path is 0.3 a (was )",
        "changed: --clip-grad is 0.5 (was 1.0)",
    ]


def test_a_changed_end_is_told_with_what_it_does_to_the_learning_rate() -> None:
    (line,) = told(before={"train_iters": 5}, train_iters=9)
    assert line.startswith("changed: --train-iters is 9 (was 5): ")
    assert "moves the decay of the learning rate" in line
    for fixed in ({"lr_decay_iters": 5}, {"lr_decay_style": "constant"}):
        lines = told(before={"train_iters": 5, **fixed}, train_iters=9, **fixed)
        assert lines == ["changed: --train-iters is 9 (was 5)"]
    lines = told(before={"lr_decay_iters": 5})
    assert lines == ["changed: --lr-decay-iters is not given (was 5)"]


def test_a_batch_that_follows_the_layout_is_told_by_its_size() -> None:
    assert told(4, before={}) == ["changed: --global-batch-size is 4 (was 2)"]
    assert told(4, before={}, global_batch_size=2) == []
    assert told(before={"bf16": None}, bf16=False) == []  # checked by its meaning elsewhere


def test_the_newest_that_can_be_read_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step_00000004" / "manifest.json").unlink()
    file = tmp_path / "step_00000003" / "manifest.json"
    file.write_text(file.read_text().replace('"fp32"', '"fp16"'))
    folders = find_start(CheckpointConfig(load=str(tmp_path))).folders
    path, found, reasons = newest_readable(folders)
    assert path.name == "step_00000002"
    assert found["precision"] == "fp32"
    assert "step_00000004/manifest.json is not there" in reasons[0]
    assert "step_00000003/manifest.json is damaged" in reasons[1]
    for folder in folders:
        (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="no whole checkpoint") as caught:
        newest_readable(folders)
    first, *lines = str(caught.value).splitlines()
    assert f"no whole checkpoint in {tmp_path}; " in first
    assert f"`python tools/checkpoint.py ls {tmp_path}`" in first
    for line, folder in zip(lines, folders, strict=True):
        assert line.startswith(f"  {folder}/manifest.json is damaged")


def test_the_same_run_may_go_on_with_other_steps_and_layouts() -> None:
    now = settings(train_iters=9, tensor_model_parallel_size=2, lr=0.1)
    check_start(now, PATH, manifest(), identity=IDENTITY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "--num-layers is 3, .* trained with 2; --num-layers 2 would work$"),
        ({"seed": 5}, "--seed is 5, .* with 1234; --seed 1234 would work, or --override-data"),
        ({"split": "1,1,1"}, "--split is 1,1,1, .* trained with 29,1,0; --split 29,1,0 would"),
        ({"seq_length": 8}, "--seq-length is 8, .* trained with 1024; --seq-length 1024 would"),
        ({"eod_mask_loss": True}, "--eod-mask-loss is True, .*; --no-eod-mask-loss would work"),
        ({"bf16": True}, "--bf16 is given, .* trained in fp32; --no-bf16 would work"),
    ],
)
def test_another_setting_names_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_start(settings(**changes), PATH, manifest(), identity=IDENTITY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 90}, "vocabulary of 90, .* trained with 100"),
        ({"tokenizer": "g"}, "tokenizer g, .* trained with f.*--override-data"),
        ({"data": ["1/4 of SHA-256 a", "3/4 of SHA-256 c"]}, "data set 2 .* SHA-256 c.*SHA-256 b"),
        ({"data": ["1/4 of SHA-256 a"]}, "data set 2 .* is none, .* with 3/4 .*--override-data"),
    ],
)
def test_other_data_names_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_start(settings(), PATH, manifest(), identity=IDENTITY | changes)


def test_other_data_may_be_asked_for_but_no_other_model() -> None:
    other = IDENTITY | {"tokenizer": "g", "data": []}
    check_start(
        settings(override_data=True, seed=5, seq_length=8), PATH, manifest(), identity=other
    )
    for other_one in ({"num_layers": 3}, {"bf16": True}):
        with pytest.raises(ValueError, match="trained"):
            check_start(settings(override_data=True, **other_one), PATH, manifest(), identity=other)
    with pytest.raises(ValueError, match="vocabulary of 90"):
        check_start(
            settings(override_data=True), PATH, manifest(), identity=other | {"vocab_size": 90}
        )


def test_fine_tuning_takes_other_data_and_precision_but_no_other_tokenizer() -> None:
    def check(identity: dict[str, Any], **changes: Any) -> None:
        check_start(settings(**changes), PATH, manifest(), identity=identity, finetune=True)

    check(IDENTITY | {"data": []}, seed=5, bf16=True)
    with pytest.raises(ValueError, match="tokenizer g"):
        check(IDENTITY | {"tokenizer": "g"})
    with pytest.raises(ValueError, match="--num-layers is 3"):
        check(IDENTITY, num_layers=3)


def test_imported_weights_are_no_run_to_go_on_with() -> None:
    """Such a manifest has the settings of the model and the data alone."""
    config = asdict(settings())
    imported = manifest() | {
        "config": {section: config[section] for section in ("model", "data")},
        "imported_from": "gpt2",
    }
    message = f"{PATH} holds weights alone, imported from gpt2: .* --finetune, .*, would work"
    with pytest.raises(ValueError, match=message):
        check_start(settings(), PATH, imported, identity=IDENTITY)
    check_start(settings(), PATH, imported, identity=IDENTITY, finetune=True)
    with pytest.raises(ValueError, match="--num-layers is 3, .* --num-layers 2 would work"):
        check_start(settings(num_layers=3), PATH, imported, identity=IDENTITY, finetune=True)
