"""Putting a data set of one or several shards in place, over an older one if there is one."""

import contextlib
from collections.abc import Sequence

from megatron.data.description import Description
from megatron.data.files import flush_directory, with_suffix


def place(staged: Sequence[str], prefix: str, description: Description) -> None:
    """Move the shards to where `prefix` is, and write its sidecar.

    staged: prefixes of the shards, on the same file system.  At no moment do files of two data sets
    mix: until the last index is in place, the data set is absent.  After a crash the same call goes
    on, as a shard that is no longer where it was staged has been moved.
    """
    targets = [prefix + shard.name for shard in description.shards] or [prefix]
    old = _read_sidecar(prefix)
    if old != description:
        _remove(prefix, old, targets)
    for source, target in zip(staged, targets, strict=True):
        _move(source, target, ".bin")
    description.write(prefix)
    for source, target in zip(staged, targets, strict=True):
        _move(source, target, ".idx")
    flush_directory(with_suffix(prefix, ".json").parent)


def _read_sidecar(prefix: str) -> Description | None:
    with contextlib.suppress(ValueError):  # a damaged one is about to be replaced
        return Description.read(prefix)
    return None


def _remove(prefix: str, old: Description | None, targets: Sequence[str]) -> None:
    """The older data set, but for those of its files that are about to be replaced.

    Its sidecar goes last, for it says which shards there are.
    """
    listed = old.shards if old is not None else ()
    prefixes = [prefix, *(prefix + shard.name for shard in listed)]
    for each in prefixes:
        with_suffix(each, ".idx").unlink(missing_ok=True)
    for each in prefixes:
        if each not in targets:
            with_suffix(each, ".bin").unlink(missing_ok=True)
    with_suffix(prefix, ".json").unlink(missing_ok=True)


def _move(source: str, target: str, suffix: str) -> None:
    file = with_suffix(source, suffix)
    if file.exists():
        file.replace(with_suffix(target, suffix))
