"""Errors that are found before the first step of a run starts: files that are missing or unsound.

A step may have a function check(settings) that raises its own early errors; it must be quick.
"""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from tools.corpus.pipeline import STEPS, Description, Job, as_keys

WRITTEN = {"output"}


def check_early(description: Description, jobs: Sequence[Job]) -> None:
    """Raises ValueError, naming the table and the key, for errors that would stop a job later."""
    for path in map(Path, description.head.get("input", [])):
        if not path.exists():
            raise ValueError(f"{description.origin}: input {path}: no such file or folder")
    made = {job.output.absolute() for job in jobs}
    for job in jobs:
        for key, path in named_paths(job):
            place = path.absolute()
            if key == "input" and (place in made or place.parent in made):  # OUTPUT/split/train
                continue
            # A vocabulary may be a folder with a tokenizer.json.
            if not (path.exists() if key in ("input", "vocab_file") else path.is_file()):
                raise ValueError(f"{job.where} {key} {path}: no such file")
    for job in jobs:
        check = getattr(importlib.import_module(STEPS[job.step]), "check", None)
        try:
            if check is not None:
                check(job.settings)
        except (ValueError, OSError) as error:
            raise ValueError(f"{job.where} {as_keys(error, job.settings)}") from error


def named_paths(job: Job) -> Iterator[tuple[str, Path]]:
    """(key, path) of every path in the job's settings that has to exist."""
    for field in fields(job.settings):
        value = getattr(job.settings, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Path) and field.name not in WRITTEN:
                yield field.name, each
