"""A conversion is on disk, whole, before it has its name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.files import before_calls
from tools.convert.staging import staged


def test_everything_is_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    calls: list[str] = []

    def note(call: str, given: Sequence[Any]) -> None:
        flushed = call == "os.fsync"
        calls.append(Path(f"/proc/self/fd/{given[0]}").readlink().name if flushed else call)

    rename = "pathlib.Path.rename"
    with before_calls(note, "os.fsync", rename), staged(tmp_path / "to") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("1")
    assert {*calls[: calls.index(rename)]} == {"inner", "weights", ".to.partial"}
    assert calls[calls.index(rename) + 1 :] == [tmp_path.name]
