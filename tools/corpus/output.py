"""The folder that a step fills: which files it may contain, and which of them may be removed.

Only files that steps write are ever removed; any other file is refused by its name.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.data.json_lines import MANIFEST, WORK
from megatron.errors import UsageError
from tools.corpus.shards import Unit

RUN = "run.json"
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.part$")  # names of unfinished files, see `atomic_writer`
SHARD = r"part-\d+(-\d+)?\.(jsonl|txt)(\.gz|\.zst)?"
DATA_SET = r".*_(document|sentence).*\.(bin|idx|json)(\.tmp\d+)?"
WRITTEN = re.compile(rf"(manifest|run)\.json|(rejected|duplicates)\.jsonl|{SHARD}|{DATA_SET}")
SIDES = ("train", "valid")
TOKENIZER = re.compile(r".*_(document|sentence)\.tokenizer(\.partial)?")  # a folder of these files:
TOKENIZER_FILES = re.compile(r"(vocab|merges)\.(json|txt)")


def locked(folder: Path, *, shared: bool) -> contextlib.AbstractContextManager[None]:
    """Lock the folder.  Raises ValueError if another run has locked it."""
    return _locked(folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(
            "--output", folder, "another folder than one that a run is filling"
        ) from None
    finally:
        os.close(descriptor)


def check_apart(inputs: Sequence[Path], units: Sequence[Unit], output: Path) -> None:
    """Raises ValueError, naming it, for input given twice, or input and output in one another.

    A folder may hold both if only files directly in it are input.
    """
    if output.exists() and not output.is_dir():
        raise UsageError("--output", output, "a folder, there already or not")
    place = output.resolve()
    seen: set[tuple[Path, int]] = set()
    resolved = {file: Path(file).resolve() for file in {unit.file for unit in units}}
    for unit in units:
        file = resolved[unit.file]
        if file.is_relative_to(place):
            raise UsageError("--input", unit.file, f"outside of --output {output}")
        if (file, unit.start) in seen:
            raise UsageError("--input", unit.file, "given once")
        seen.add((file, unit.start))
    deep = found_deep(inputs, resolved.values())
    around = next((path for path in inputs if _holds(path, [place]) and _holds(path, deep)), None)
    if around is not None:
        raise UsageError(
            "--output", output, f"outside of --input {around}, which is searched at any depth"
        )


def _holds(folder: Path, files: Iterable[Path]) -> bool:
    place = folder.resolve()
    return any(file.is_relative_to(place) for file in files)


def found_deep(inputs: Sequence[Path], files: Iterable[Path]) -> list[Path]:
    """The resolved files that are not directly in a folder of --input, and whole folders."""
    roots = {path.resolve() for path in inputs}
    return [
        file for file in files if (file not in roots and file.parent not in roots) or file.is_dir()
    ]


def foreign(output: Path, written: re.Pattern[str] = WRITTEN) -> Path | None:
    """A file or folder that no step writes, None if there is none.

    written: pattern of the names that files may have.
    """
    for path in sorted(output.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name == WORK:
                continue
            is_tokenizer = TOKENIZER.fullmatch(path.name)
            if path.name not in SIDES and not is_tokenizer:
                return path
            if below := foreign(path, TOKENIZER_FILES if is_tokenizer else WRITTEN):
                return below
        elif not written.fullmatch(PARTIAL.sub("", path.name)):
            return path
    return None


def clear(output: Path) -> None:
    """Remove everything in the folder; all of it must be written by steps."""
    # The manifest first: without it the rest does not count as complete.
    for path in sorted(output.iterdir(), key=lambda path: path.name != MANIFEST):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def clear_partial(output: Path) -> None:
    """Remove unfinished files of dead workers; nobody else may be writing here."""
    for path in output.rglob("*.part"):
        if PARTIAL.search(path.name):
            path.unlink(missing_ok=True)


def lost_shard(output: Path, shards: Sequence[dict[str, Any]]) -> Path | None:
    """A shard that is missing or whose size has changed, None if there is none."""
    for shard in shards:
        path = output / shard["name"]
        if not path.is_file() or path.stat().st_size != shard.get("bytes", path.stat().st_size):
            return path
    return None


def read_json(file: Path) -> Any:
    """Content of the file, None if there is no file.  Raises ValueError, naming it, if damaged."""
    try:
        return json.loads(file.read_bytes()) if file.exists() else None
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); another --output would work") from None
