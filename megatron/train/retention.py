"""Which checkpoints are kept: the newest that can be read back, and the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.checkpoints import read_manifest, step_folders
from megatron.parallel.mesh import Mesh
from megatron.train.agree import agree
from megatron.train.checkpoint import verify
from megatron.train.folder import remove


@dataclass(frozen=True)
class Saved:
    """A checkpoint as its manifest tells of it; one that was written again has another checksum.

    fault: why it is not this run's to count; empty if it is.
    """

    name: str
    fault: str
    checksum: str = ""
    loss: float | None = None


class Retention:
    """Keeps the newest `keep` whole checkpoints and the one with the lowest validation loss.

    Each is read back once before it counts. A damaged one neither counts nor is removed, and so
    it is with one whose run is not `run`, the id of this one.
    """

    def __init__(self, keep: int | None, mesh: Mesh, run: str | None) -> None:
        self._keep = keep
        self._mesh = mesh
        self._run = run
        self._faults: dict[Saved, list[str]] = {}  # of those that were read back

    def apply(self, directory: Path) -> tuple[list[str], list[str]]:
        """(names removed, what else is to be told), the same on every rank, which all call this.

        What fails here is told and ends no run: the checkpoint that was just saved is on disk.
        """
        if self._keep is None:
            return [], []
        try:
            return self._apply(directory, self._keep)
        except OSError as error:  # on every rank alike
            return [], [f"no older checkpoint is removed: {error}"]

    def _apply(self, directory: Path, keep: int) -> tuple[list[str], list[str]]:
        # The first rank lists: over a network the others may see a folder later.
        found = agree(self._mesh, lambda: self._list(directory), f"listing {directory}")[0]
        notes = [line for saved in found for line in self._read_back(directory, saved)]
        whole = [(saved.name, saved.loss) for saved in found if not self._faults[saved]]
        surplus = surplus_of(whole, keep)
        failures = agree(self._mesh, lambda: self._remove(directory, surplus), "removing")[0]
        removed = [name for name in surplus if name not in failures]
        return removed, notes + list(failures.values())

    def _list(self, directory: Path) -> list[Saved]:
        folders = step_folders(directory) if self._mesh.is_first else []
        return [self._look(folder) for folder in folders]

    def _look(self, folder: Path) -> Saved:
        try:
            manifest = read_manifest(folder)
        except (ValueError, OSError) as error:
            return Saved(folder.name, str(error))
        fault = "" if manifest.get("run") == self._run else f"{folder} is of another run"
        return Saved(folder.name, fault, manifest["checksum"], manifest.get("validation_loss"))

    def _read_back(self, directory: Path, saved: Saved) -> list[str]:
        """Why it does not count, if that is found now; nothing where it has been read before."""
        if saved in self._faults:
            return []
        faults = [saved.fault] if saved.fault else verify(directory / saved.name, self._mesh)
        self._faults[saved] = faults
        return [f"{line}; it is kept, and does not count as one to keep" for line in faults]

    def _remove(self, directory: Path, names: Sequence[str]) -> dict[str, str]:
        """Of those that cannot be removed, why: no reason for a run to end."""
        failures = {}
        for name in names if self._mesh.is_first else ():
            try:
                remove(directory / name)
            except OSError as error:
                failures[name] = f"{directory / name} is not removed: {error}"
        return failures


def surplus_of(whole: Sequence[tuple[str, float | None]], keep: int) -> list[str]:
    """Of (name, validation loss) of whole checkpoints, the newest first: those to remove."""
    measured = [(loss, name) for name, loss in whole if loss is not None]
    best = min(measured, key=lambda pair: pair[0])[1] if measured else None
    return [name for name, _ in whole[keep:] if name != best]
