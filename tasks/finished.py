"""Seeds that --save holds finished: whether they are of this command, and their results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.config.checks import flag
from megatron.data.files import write_whole
from tasks.finetune import Plan

RESULT = "result.json"


def identity_of(plan: Plan, checksum: str) -> dict[str, Any]:
    """What a finished seed has to have in common with this command, to be taken up.

    checksum: of the checkpoint that is fine-tuned. Names and values as messages show them.
    """
    hashes = {each.get("file", each.get("folder")): each["sha256"] for each in plan.facts["data"]}

    def of(files: Iterable[Path]) -> list[str]:
        return [hashes[str(file)] for file in files]

    return {
        "--task": plan.name,
        "--load": checksum,
        "--train-data": of(plan.settings.train_data),
        "--valid-data": of(plan.settings.valid_data),
        "the evaluations": list(plan.task.evaluations),
        **{flag(name): value for name, value in plan.facts["hyper_parameters"].items()},
    }


def keep_result(directory: Path, identity: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    kept = {"identity": identity, "result": result}
    write_whole(directory / RESULT, json.dumps(kept, indent=1).encode() + b"\n")


def read_result(directory: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of a seed, None where it is not finished; ValueError where it is of another
    command, with what differs."""
    file = directory / RESULT
    if not file.is_file():
        return None
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        result: dict[str, Any] = kept["result"]
        then = kept["identity"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged: {error!r}; without that file the seed is run again"
        ) from error
    for name, now in json.loads(json.dumps(identity)).items():
        if then.get(name) != now:
            raise ValueError(
                f"--save {directory.parent} holds seeds of another run, with {name} "
                f"{then.get(name)}, and here it is {now}; another --save would work"
            )
    return result
