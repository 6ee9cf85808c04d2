"""Models that the tests of the tasks share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.tasks.passages import lessons
from tests.tasks.peer import Peer, make_peer


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
