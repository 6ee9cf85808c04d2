"""The report's input: the manifests of the steps, and how each source went through them."""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.json_lines import MANIFEST, WORK
from megatron.errors import UsageError
from tools.corpus.files import Count, Counts, Funnel, documents
from tools.corpus.settings import say

Facts = dict[str, Any]
ORDER = ("urls", "extract", "clean", "decontaminate", "dedup", "split", "tokenise")
NEEDED = {"step", "settings", "input", "output", "dropped", "pieces"}


@dataclass(frozen=True)
class Folder:
    """The output folder of a step."""

    path: Path
    manifest: Facts
    run: Facts | None
    """run.json: what the run took; None if it is missing."""

    @property
    def step(self) -> str:
        return str(self.manifest["step"])

    @property
    def shards(self) -> list[Facts]:
        return list(self.manifest.get("shards", []))


@dataclass(frozen=True)
class Step:
    """One step of the pipeline; several folders if it was run on parts of the corpus."""

    name: str
    folders: tuple[Folder, ...]

    @functools.cached_property
    def funnel(self) -> Funnel:
        """The funnel of all folders together."""
        total = Funnel()
        for folder in self.folders:
            total.add(Funnel.from_json(folder.manifest))
        return total

    def find(self, key: str) -> Any | None:
        """Value of a key of the step, from the first folder that has it."""
        return next((f.manifest[key] for f in self.folders if key in f.manifest), None)


class Steps(tuple[Step, ...]):
    """The pipeline, in order."""

    @property
    def folders(self) -> list[Folder]:
        return [folder for step in self for folder in step.folders]

    def find(self, key: str) -> Any | None:
        """Value of a key that only one step writes into its manifest."""
        return next((found for step in self if (found := step.find(key)) is not None), None)


def read_steps(paths: Sequence[Path]) -> Steps:
    """Raises ValueError, naming --input, if a path neither is nor contains a step's output."""
    folders = [folder for path in paths for folder in find_folders(path)]
    if not folders:
        raise UsageError("--input", None, "followed by the output folders of the steps")
    seen: set[Path] = set()
    for folder in folders:
        if folder.path.resolve() in seen:
            raise UsageError("--input", folder.path, "given once")
        seen.add(folder.path.resolve())
    return Steps(join_parts(folders))


def find_folders(path: Path) -> list[Folder]:
    """The path itself, or the steps in it, in the order of the pipeline."""
    if not path.is_dir():
        raise UsageError("--input", path, "a folder that is there, the output of a step")
    if (path / MANIFEST).exists():
        return [read_folder(path)]
    if (path / WORK).exists():
        raise UsageError(
            "--input", path, "the output of a step that has finished; its command again finishes it"
        )
    inside = sorted(_steps_in(path, 2), key=_place)
    if not inside:
        raise UsageError(
            "--input",
            path,
            f"the output folder of a step, with a {MANIFEST}, or a folder of several",
        )
    return inside


def _steps_in(path: Path, depth: int) -> Iterator[Folder]:
    """A run has a folder for each step, with subfolders if it ran the step on parts."""
    for folder in sorted(each for each in path.iterdir() if each.is_dir()):
        manifest = folder / MANIFEST
        if manifest.exists() and _read_json(manifest).keys() >= NEEDED:
            yield read_folder(folder)
        elif (folder / WORK).exists() and not manifest.exists():
            say(f"warning: {folder} is left out, its step has not finished")
        elif depth > 1:
            yield from _steps_in(folder, depth - 1)


def _place(folder: Folder) -> tuple[int, str]:
    known = folder.step in ORDER
    return (ORDER.index(folder.step) if known else len(ORDER), str(folder.path))


def read_folder(path: Path) -> Folder:
    manifest = _read_json(path / MANIFEST)
    missing = sorted(NEEDED - manifest.keys())
    if missing:
        raise UsageError(
            "--input",
            path,
            f"the output of a step of tools/corpus, whose {MANIFEST} has {missing[0]!r}",
        )
    run = path / "run.json"
    return Folder(path, manifest, _read_json(run) if run.exists() else None)


def _read_json(file: Path) -> Facts:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{file} is no JSON ({error}); the step run again would write it"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object; the step run again would write it")
    return content


def join_parts(folders: Sequence[Folder]) -> Iterator[Step]:
    """Join neighbours that ran the same step on parts, unless one read the output of the other."""
    parts: list[Folder] = []
    for folder in folders:
        if parts and (folder.step != parts[0].step or _reads(folder, parts)):
            yield Step(parts[0].step, tuple(parts))
            parts = []
        parts.append(folder)
    if parts:
        yield Step(parts[0].step, tuple(parts))


def _reads(folder: Folder, others: Sequence[Folder]) -> bool:
    """Whether the folder was made from a shard of the others."""
    written = {shard["sha256"] for other in others for shard in other.shards}
    return any(file["sha256"] in written for file in folder.manifest.get("inputs", []))


class Loss(NamedTuple):
    """Text that a step removed from the corpus."""

    reason: str
    documents: int | None
    """None if text was lost within documents."""
    bytes: int


class Passage(NamedTuple):
    """The whole corpus before and after a step; sources that it did not read are unchanged."""

    step: Step
    funnel: Funnel
    before: Counts
    after: Counts
    losses: list[Loss]


def follow(steps: Steps) -> list[Passage]:
    """The corpus through all steps; a source counts from the start, wherever it first appears."""
    corpus: Counts = {}
    written: set[str] = set()
    for step in steps:
        for source in step.funnel.input.keys() - written:
            corpus.setdefault(source, step.funnel.input[source])
        written |= step.funnel.output.keys()
    passages = []
    for step in steps:
        before, funnel = dict(corpus), step.funnel
        for source in {**funnel.input, **funnel.output}:
            corpus[source] = funnel.output.get(source, Count())
        passages.append(Passage(step, funnel, before, dict(corpus), find_losses(funnel, before)))
    return passages


def find_losses(funnel: Funnel, before: Counts) -> list[Loss]:
    """Losses by reason, the largest first; then text that was lost without being dropped."""
    losses = [
        Loss(reason, documents(counts), text_bytes(counts))
        for reason, counts in funnel.dropped.items()
    ]
    losses.sort(key=lambda loss: (-loss.bytes, loss.reason))
    changed = text_bytes(funnel.input) - sum(loss.bytes for loss in losses)
    changed -= text_bytes(funnel.output)
    if changed > 0:
        losses.append(Loss("cut or repaired within documents", None, changed))
    offered = {source: before.get(source, Count()) for source in funnel.input}
    unread = documents(offered) - documents(funnel.input)
    if unread > 0:
        left = text_bytes(offered) - text_bytes(funnel.input)
        losses.append(Loss("not given to this step", unread, left))
    return losses


def text_bytes(counts: Counts) -> int:
    return sum(count.bytes for count in counts.values())
