"""The commit that records name."""

import subprocess
from pathlib import Path

import pytest

from megatron.train.source import commit


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository of one commit, with a tag that is not to be named."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("first")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "v1")
    return tmp_path


def test_the_commit_of_the_code(folder: Path) -> None:
    assert commit(folder) == git(folder, "rev-parse", "HEAD")


def test_a_changed_file_is_told(folder: Path) -> None:
    (folder / "file").write_text("second")
    assert commit(folder) == git(folder, "rev-parse", "HEAD") + "-dirty"


def test_code_without_a_repository_has_no_commit(folder: Path) -> None:
    installed = folder / "packages"  # inside somebody else's
    installed.mkdir()
    assert commit(installed) is None


def test_without_git_there_is_no_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit(folder) is None
