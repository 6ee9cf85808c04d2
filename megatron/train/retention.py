"""Which checkpoints are kept: the newest that can be read back, and the best."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.checkpoints import read_manifest, step_folders
from megatron.parallel.mesh import Mesh
from megatron.train.checkpoint import agree, verify
from megatron.train.folder import remove


@dataclass(frozen=True)
class Verdict:
    """What reading a checkpoint back has shown: damage (none if it is whole), validation loss."""

    damage: tuple[str, ...]
    loss: float | None


class Retention:
    """Keeps the newest `keep` whole checkpoints and the one with the lowest validation loss.

    Each is read back once before it counts. A damaged one neither counts nor is removed.
    """

    def __init__(self, keep: int | None, mesh: Mesh) -> None:
        self._keep = keep
        self._mesh = mesh
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    def apply(self, directory: Path) -> tuple[list[str], list[str]]:
        """(names removed, what else is to be told), the same on every rank, which all call this."""
        keep = self._keep
        if keep is None:
            return [], []
        # The first rank lists: over a network the others may see a folder later.
        listed = agree(self._mesh, lambda: [_identity(f) for f in step_folders(directory)])[0]
        notes = [note for identity in listed for note in self._read_back(directory, *identity)]
        whole = [
            (name, verdict.loss)
            for name, checksum in listed
            if not (verdict := self._verdicts[name, checksum]).damage
        ]
        surplus = surplus_of(whole, keep)
        failures = agree(self._mesh, lambda: self._remove(directory, surplus))[0]
        removed = [name for name in surplus if name not in failures]
        return removed, notes + list(failures.values())

    def _read_back(self, directory: Path, name: str, checksum: str) -> list[str]:
        """Damage that is found now; nothing where this checkpoint has been read before."""
        if (name, checksum) in self._verdicts:
            return []
        damage = verify(directory / name, self._mesh)
        manifest = {} if damage else read_manifest(directory / name)
        self._verdicts[name, checksum] = Verdict(tuple(damage), manifest.get("validation_loss"))
        return [f"{line}; it is kept, and does not count as one to keep" for line in damage]

    def _remove(self, directory: Path, names: Sequence[str]) -> dict[str, str]:
        """Of those that cannot be removed, why: no reason for a run to end."""
        failures = {}
        for name in names if self._mesh.is_first else ():
            try:
                remove(directory / name)
            except OSError as error:
                failures[name] = f"{directory / name} is not removed: {error}"
        return failures


def _identity(folder: Path) -> tuple[str, str]:
    """(name, checksum of the manifest), by which a folder that was written again is another."""
    manifest = folder / "manifest.json"
    content = manifest.read_bytes() if manifest.is_file() else b""
    return folder.name, hashlib.sha256(content).hexdigest()


def surplus_of(whole: Sequence[tuple[str, float | None]], keep: int) -> list[str]:
    """Of (name, validation loss) of whole checkpoints, the newest first: those to remove."""
    measured = [(loss, name) for name, loss in whole if loss is not None]
    best = min(measured, key=lambda pair: pair[0])[1] if measured else None
    return [name for name, _ in whole[keep:] if name != best]
