"""Unpack some of RACE's passages from its archive: `python tools/experiments/passages.py`.

python tools/experiments/passages.py --archive RACE_train.tar.xz --count 1200 --output train
python tools/experiments/passages.py --archive RACE_dev.tar.xz --count 400 --output dev
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import sys
import tarfile
from hashlib import sha256
from pathlib import Path, PurePosixPath

from megatron.config.parse import parse_call, whole_program
from megatron.data.files import atomic_writer
from megatron.errors import UsageError
from tasks.readers.race import LEVELS


def passages(archive: Path, count: int, output: Path) -> None:
    """Unpack the passages whose names have the smallest hashes, into OUTPUT/middle and /high.

    So a smaller count selects a part of a larger one, and levels are about as common as in RACE.

    Args:
        archive: RACE_train.tar.xz or another such archive.
        count: number of passages; all if there are fewer.
        output: the folder to fill.
    """
    if count < 1:
        raise UsageError("--count", count, "1 or more")
    chosen = set(sorted(names_in(archive), key=hashed_name)[:count])
    with tarfile.open(archive, "r|*") as members:
        for member in members:
            name = PurePosixPath(member.name)
            content = members.extractfile(member) if name in chosen else None
            if content is not None:
                file = output / name.parent.name / name.name
                # The archive unpacks them again after a power cut.
                with atomic_writer(file, flush_content=False, flush_name=False) as stream:
                    stream.write(content.read())
    print(f"{len(chosen)} passages in {output}")


def names_in(archive: Path) -> list[PurePosixPath]:
    """The passages' names in the archive. Raises ValueError if it is no archive or has none."""
    try:
        with tarfile.open(archive, "r|*") as members:
            names = [PurePosixPath(member.name) for member in members if member.isfile()]
    except (tarfile.TarError, EOFError) as error:
        raise UsageError("--archive", archive, f"a whole archive ({error})") from error
    found = [name for name in names if name.parent.name in LEVELS and name.suffix == ".txt"]
    if not found:
        raise UsageError(
            "--archive", archive, "RACE as released, with files NUMBER.txt in middle/ and high/"
        )
    return found


def hashed_name(name: PurePosixPath) -> bytes:
    """A sort key that does not depend on the text of the passage."""
    return sha256(f"{name.parent.name}/{name.name}".encode()).digest()


if __name__ == "__main__":
    with whole_program({}):
        parse_call(passages, sys.argv[1:], {})()
