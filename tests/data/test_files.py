"""Files appear whole or not at all, and a full disk is named."""

import errno
from pathlib import Path

import pytest

from megatron.data.files import atomic_writer, write_atomically


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_with_the_file_and_leaves_what_was_there(
    tmp_path: Path, code: int
) -> None:
    file = tmp_path / "file"
    write_atomically(file, b"before")

    def fill() -> None:
        with atomic_writer(file) as stream:
            stream.write(b"twelve bytes")
            stream.flush()
            raise OSError(code, "as a write raises it")

    with pytest.raises(OSError, match="12") as stop:
        fill()
    assert (stop.value.errno, stop.value.filename) == (code, str(file))
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_of_another_file_is_not_renamed(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "full", "another")
    with pytest.raises(OSError, match="another") as stop, atomic_writer(tmp_path / "file"):
        raise error
    assert stop.value is error
