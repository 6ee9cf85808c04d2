"""Checkpoint folders as files: which are there, and every way in which one is not whole."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.format import check_tiling, read_manifest, seal, step_folders
from tests.checkpoint.files import make_checkpoint
from tests.refusals import refusal


def test_step_folders_are_those_of_steps_the_highest_first(tmp_path: Path) -> None:
    for name in (
        "step_00000009",
        "step_00000100",
        "step_00000010",
        "step_00000011.abandoned",
        ".step_00000012.partial",
        "step_13",
        "step_0000001x",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000200").write_text("a file")
    found = [path.name for path in step_folders(tmp_path)]
    assert found == ["step_00000100", "step_00000010", "step_00000009"]
    assert step_folders(tmp_path / "nowhere") == []


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(tmp_path: Path) -> None:
    """Or it changes nothing that is read: a space that became another kind of space."""
    path = make_checkpoint(tmp_path, 5)
    file = path / "manifest.json"
    good, manifest = file.read_bytes(), read_manifest(path)
    errors = []
    for bit in range(0, 8 * len(good), 31):
        content = bytearray(good)
        content[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(content)
        try:
            assert read_manifest(path) == manifest, content
        except ValueError as error:
            errors.append(str(error))
    assert all(str(file) in error for error in errors)
    assert len(errors) > 0.9 * len(good) * 8 / 31


@pytest.mark.parametrize(
    "change",
    [
        {"counters": {"step": 6}},
        {"format": 1},
        {"checksum": None},
        *("", "[]", "{}", '{"format": 2', "null", '"text"'),
    ],
)
def test_what_is_no_manifest_is_named(tmp_path: Path, change: dict[str, Any] | str) -> None:
    file = make_checkpoint(tmp_path, 5) / "manifest.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change)
    file.write_text(change)
    assert str(file) in str(refusal(lambda: read_manifest(file.parent)))


def test_slices_that_do_not_tile_are_refused() -> None:
    for boxes in (
        [],
        [([0, 0], [2, 3]), ([0, 0], [2, 3])],
        [([0, 0], [2, 2])],
        [([0, 0], [2, 2]), ([0, 1], [2, 2])],
        [([0, 0], [3, 2])],  # as many elements, outside
        [([0, 0], [1, 3]), ([2, 0], [1, 3])],
        [([0, 0], [2, 4]), ([0, 4], [2, -1])],
        [([0, 0], [2, 1]), ([0, 2], [2, 1]), ([0, 0], [1, 2]), ([1, 1], [1, 2])],
        [([0], [6])],
    ):
        slices = [{"file": "a", "offset": offset, "shape": shape} for offset, shape in boxes]
        tensors = {"weight": {"shape": [2, 3], "slices": slices}}
        assert "weight" in str(refusal(partial(check_tiling, tensors, {"a": {}})))


def test_a_slice_in_a_file_that_is_not_listed_is_refused() -> None:
    tensors = {"w": {"shape": [1], "slices": [{"file": "b", "offset": [0], "shape": [1]}]}}
    check_tiling(tensors, {"b": {}})
    assert "w is in b" in str(refusal(lambda: check_tiling(tensors, {"a": {}})))


def test_a_seal_does_not_depend_on_how_the_file_is_spaced() -> None:
    manifest = seal({"b": 1.5, "a": [1, None, "ü"], "n": {1: 2}})
    assert seal(manifest) == manifest
    assert seal({"n": {"1": 2}, "a": [1, None, "ü"], "b": 1.5})["checksum"] == manifest["checksum"]
    assert seal({"b": 1.25})["checksum"] != seal({"b": 1.5})["checksum"]
