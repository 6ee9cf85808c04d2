"""Seeds that --save holds finished: whether they are of this command, and their results."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.format import one_step
from megatron.config.checks import flag
from megatron.data.files import write_atomically

if TYPE_CHECKING:
    from tasks.finetune import Plan
    from tasks.finetuning import FinetuneSettings

RESULT = "result.json"
DATA = {"--train-data": "train_data", "--valid-data": "valid_data"}
_HASH = re.compile("[0-9a-f]{64}")


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


def names_of(settings: FinetuneSettings) -> dict[str, list[str]]:
    """What the files are called, for messages alone: they may be moved."""
    return {name: [file.name for file in vars(settings)[field]] for name, field in DATA.items()}


def keep_result(
    directory: Path,
    identity: Mapping[str, Any],
    settings: FinetuneSettings,
    result: Mapping[str, Any],
) -> None:
    kept = {"identity": identity, "files": names_of(settings), "result": result}
    write_atomically(directory / RESULT, json.dumps(kept, indent=1).encode() + b"\n")


def read_result(
    directory: Path, identity: Mapping[str, Any], settings: FinetuneSettings
) -> dict[str, Any] | None:
    """The result of a seed, None where it is not finished; ValueError where it is of another
    command, with what differs."""
    file = directory / RESULT
    if not file.is_file():
        return None
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        result: dict[str, Any] = kept["result"]
        then, called = kept["identity"], kept.get("files", {})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged: {error!r}; without that file the seed is run again"
        ) from error
    names = names_of(settings)
    for name, now in json.loads(json.dumps(identity)).items():
        if then.get(name) != now:
            what = f"with {name} {then.get(name)}, and here it is {now}"
            if name in DATA:
                pairs = [_labels(then.get(name, []), called.get(name)), _labels(now, names[name])]
                what = f"with other {name}: {_compare(*pairs)}"
            raise ValueError(
                f"--save {directory.parent} holds seeds of another run, {_HASH.sub(_short, what)}; "
                "another --save would work"
            )
    return result


def _short(found: re.Match[str]) -> str:
    return found[0][:12]


def _labels(hashes: Sequence[str], names: Sequence[str] | None) -> list[tuple[str, str]]:
    """(what to call it, its hash) of each file; results of earlier versions have no names."""
    return list(zip(names or [f"a file ({each})" for each in hashes], hashes, strict=True))


def _compare(then: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]) -> str:
    """What has become of the files."""
    was, is_now = {each for _, each in then}, {each for _, each in now}
    gone = {name: each for name, each in then if each not in is_now}
    new = {name: each for name, each in now if each not in was}
    told = [
        f"{name} has changed (sha256 {gone[name]} then, {new[name]} now)"
        for name in gone
        if name in new
    ]
    told += [f"{name} is missing" for name in gone if name not in new]
    told += [f"{name} is new" for name in new if name not in gone]
    counts = f"{len(then)} file{'s' * (len(then) != 1)} then, {len(now)} now"
    return f"{counts}: {', '.join(told) or 'the same ones, in another order or number'}"


def warn_unfinished(given: str, load: str, path: Path, finetuned: Mapping[str, Any]) -> None:
    """Of the checkpoint of a seed that did not come to its end, where `load` does not name it.

    given: the flag of `load`. finetuned: how the model at `path` was, of its manifest. A folder
    that has been taken elsewhere is as it was meant to be.
    """
    seed, epoch = finetuned.get("seed"), finetuned.get("epoch")
    if path.parent.resolve().name != f"seed_{seed}" or (path.parent / RESULT).exists():
        return
    epochs = finetuned["hyper_parameters"]["epochs"]
    if epoch != epochs and one_step(load) is None:
        warnings.warn(
            f"{given} {load}: seed {seed} is not finished, and this is its epoch {epoch} of "
            f"{epochs}; its command, repeated, finishes it, and {given} {path} takes that epoch as "
            "it is",
            stacklevel=3,
        )
