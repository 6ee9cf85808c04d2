"""Models that the tests of the tasks share."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tasks.main import main
from tests.tasks.made import write_files, write_model
from tests.tasks.peer import Peer, lessons, make_peer
from tests.tasks.program import FEW, TASK


@pytest.fixture(scope="session")
def made_peer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Peer]:
    """The one peer of the session, made when the first test needs it."""

    @cache
    def make(data: Path) -> Peer:
        return make_peer(tmp_path_factory.mktemp("peer"), data / "gpt2", lessons(data))

    return make


@pytest.fixture
def peer(made_peer: Callable[[Path], Peer], test_data: Path) -> Peer:
    return made_peer(test_data)


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a BERT of random weights."""
    return write_model(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> tuple[Path, Any]:
    """(--save of a classifier trained with two seeds, its record)."""
    folder = tmp_path_factory.mktemp("tuned")
    words = ["--load", str(pretrained), *write_files(folder, 60), *FEW]
    words += ["--epochs", "3", "--lr", "1e-2"]  # so that seeds and epochs differ
    output = folder / "result.json"
    more = ["--seeds", "2", "--save", str(folder / "save"), "--output", str(output)]
    main(["--task", TASK, *words, *more], {})
    return folder / "save", json.loads(output.read_text(encoding="utf-8"))


@pytest.fixture
def words(pretrained: Path, tmp_path: Path) -> list[str]:
    """The flags of a short training."""
    return ["--load", str(pretrained), *write_files(tmp_path, 64), *FEW]
