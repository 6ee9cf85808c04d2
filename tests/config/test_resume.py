"""What a resumed run may not change, and checkpoints that are damaged or cut short."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron.config.resume import check_resume, read_settings
from tests.config.test_checks import settings

IDENTITY = {"vocab_size": 100, "tokenizer": "f", "data": ["1/4 of SHA-256 a", "3/4 of SHA-256 b"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    manifest = {"config": asdict(settings()), **IDENTITY}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_the_same_run_may_go_on_with_other_steps_and_layouts(path: Path) -> None:
    check_resume(settings(train_iters=9, tensor_model_parallel_size=2, lr=0.1), path, IDENTITY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "--seed is 5, .* trained with 1234; --seed 1234 would work"),
        ({"bf16": True}, "--bf16 is True, .* trained with False; --no-bf16 would work"),
        ({"split": "1,1,1"}, "--split is 1,1,1, .* trained with 29,1,0; --split 29,1,0 would work"),
    ],
)
def test_another_setting_names_both_values(
    path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_resume(settings(**changes), path, IDENTITY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 90}, "vocabulary of 90, .* trained with 100"),
        ({"tokenizer": "g"}, "tokenizer g, .* trained with f"),
        ({"data": ["1/4 of SHA-256 a", "3/4 of SHA-256 c"]}, "data set 2 .* SHA-256 c.*SHA-256 b"),
        ({"data": ["1/4 of SHA-256 a"]}, "data set 2 .* is none, .* with 3/4 of SHA-256 b"),
    ],
)
def test_other_data_names_both_values(path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_resume(settings(), path, IDENTITY | changes)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"config": {}}', "\udcff"])
def test_a_damaged_manifest_is_named(path: Path, content: str) -> None:
    (path / "manifest.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match="--load .*manifest.json is damaged"):
        read_settings(path)


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--load .*manifest.json is not there"):
        read_settings(tmp_path / "step_00000002")
