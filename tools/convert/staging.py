"""A conversion writes to a temporary folder beside its target until all is written and checked."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_existing(to: Path) -> None:
    """Raise FileExistsError if `to` exists: a conversion replaces nothing."""
    if to.exists() or to.is_symlink():
        raise FileExistsError(f"--to {to} is there already; a name that is not would work")


@contextmanager
def staged(to: Path) -> Iterator[Path]:
    """A folder beside `to`. It is renamed to `to` when the block ends, and removed if that raises.

    The remains of a killed conversion are removed first.
    """
    refuse_existing(to)
    staging = to.absolute().with_name(f".{to.absolute().name}.partial")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        refuse_existing(to)
        staging.rename(to)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
