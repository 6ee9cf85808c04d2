"""Models that the tests of the tasks share."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.main import main
from tests.tasks.made import write_files, write_model
from tests.tasks.peer import Peer, lessons, make_peer
from tests.tasks.program import FEW, TASK


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory, test_data: Path) -> Peer:
    return make_peer(tmp_path_factory.mktemp("peer"), test_data / "gpt2", lessons(test_data))


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    return ["--load", str(pretrained), *write_files(tmp_path, 64), *FEW]
