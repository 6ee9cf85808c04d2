"""Where a run starts, and what a resumed run may not change."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron.config import CheckpointConfig
from megatron.config.checkpoints import seal
from megatron.config.resume import check_start, find_start, newest_readable
from tests.config.test_checks import settings

IDENTITY = {"vocab_size": 100, "tokenizer": "f", "data": ["1/4 of SHA-256 a", "3/4 of SHA-256 b"]}
PATH = Path("somewhere/step_00000004")


def manifest(**changes: Any) -> dict[str, Any]:
    facts = {"config": asdict(settings(**changes)), "precision": "fp32", **IDENTITY}
    return {"format": 2, **facts, "files": {}, "tensors": {}}


def write(directory: Path, *steps: int) -> None:
    for step in steps:
        folder = directory / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(seal(manifest())))


def names(section: CheckpointConfig) -> list[str]:
    return [str(Path(folder.parent.name) / folder.name) for folder in find_start(section).folders]


def test_a_job_that_restarts_itself_finds_nothing_at_first(tmp_path: Path) -> None:
    section = CheckpointConfig(load=str(tmp_path / "a"), save=str(tmp_path / "a"))
    assert names(section) == []
    write(tmp_path / "a", 2, 10)
    assert names(section) == ["a/step_00000010", "a/step_00000002"]


def test_nothing_to_load_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--load .*: no checkpoint .* --save would work"):
        find_start(CheckpointConfig(load=str(tmp_path / "a"), save=str(tmp_path / "b")))


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
    with pytest.raises(ValueError, match="(?s)no whole checkpoint.*step_00000004.*step_00000001"):
        newest_readable(folders)


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
    for changes in ({"num_layers": 3}, {"bf16": True}):
        with pytest.raises(ValueError, match="trained"):
            check_start(settings(override_data=True, **changes), PATH, manifest(), identity=other)
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
