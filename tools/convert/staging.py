"""A conversion writes to a temporary folder beside its target until all is written and checked."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.config.checks import fillable
from megatron.data.files import flush_path
from megatron.errors import UsageError


def refuse_existing(to: Path) -> None:
    """Raise UsageError if `to`, the --output, exists, as nothing is replaced, or cannot be made."""
    if to.exists() or to.is_symlink():
        raise UsageError("--output", to, "a name that is not taken yet")
    fillable("--output", to)


@contextmanager
def staged(to: Path) -> Iterator[Path]:
    """A folder beside `to`. It is on disk and renamed to `to` when the block ends, and removed if
    that raises.

    The remains of a killed conversion are removed first.
    """
    refuse_existing(to)
    staging = to.absolute().with_name(f".{to.absolute().name}.partial")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in (*staging.rglob("*"), staging):
            flush_path(path)
        refuse_existing(to)
        staging.rename(to)
        flush_path(staging.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
