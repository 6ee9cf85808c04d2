"""Putting a data set of one or several shards in place, over an older one if there is one."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.data.description import Description
from megatron.data.files import flush_directory, flush_to_disk, tokenizer_folder, with_suffix


def place(
    staged: Sequence[str], prefix: str, description: Description, tokenizer: Mapping[str, bytes]
) -> None:
    """Move the shards to where `prefix` is, and write its sidecar and the tokenizer's files.

    staged: prefixes of the shards, on the same file system.  tokenizer: {name: content}.  At no
    moment do files of two data sets mix: until the last index is in place, the data set is absent.
    After a crash the same call goes on, as a shard that is no longer where it was staged has been
    moved.
    """
    targets = [prefix + shard.name for shard in description.shards] or [prefix]
    old = _read_sidecar(prefix)
    if old != description:
        _remove(prefix, old, targets)
    for source, target in zip(staged, targets, strict=True):
        _move(source, target, ".bin")
    _place_tokenizer(tokenizer_folder(prefix), tokenizer)
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


def _place_tokenizer(folder: Path, files: Mapping[str, bytes]) -> None:
    """All files or none; a folder that holds just these is left as it is."""
    staging = folder.with_name(f"{folder.name}.partial")
    _remove_folder(staging)  # of a run that was killed
    if folder.is_dir() and files == {file.name: file.read_bytes() for file in folder.iterdir()}:
        return
    staging.mkdir()
    for name, content in files.items():
        with (staging / name).open("wb") as stream:
            stream.write(content)
            flush_to_disk(stream)
    flush_directory(staging)
    _remove_folder(folder)
    staging.replace(folder)


def _remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _move(source: str, target: str, suffix: str) -> None:
    file = with_suffix(source, suffix)
    if file.exists():
        file.replace(with_suffix(target, suffix))
