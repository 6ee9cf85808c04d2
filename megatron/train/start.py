"""How a run starts: from scratch, from a checkpoint, or from the weights of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.load import newest_whole
from megatron.checkpoint.resume import Start, changes
from megatron.parallel.agree import refuse_alike
from megatron.parallel.mesh import Mesh
from megatron.train.launch import default_precision
from megatron.train.state import TrainState, environment


@dataclass(frozen=True)
class Began:
    """How a run began, the same on every rank.

    news: what the user should know: where it starts, what was passed over, what has changed.
    manifest: of the checkpoint that it continues; None from scratch and for fine-tuning.
    weights_of: the id of the run whose weights were fine-tuned, now or before; for the facts of
    this run's own manifests.
    """

    news: list[str]
    manifest: dict[str, Any] | None = None
    weights_of: str | None = None

    @property
    def owes_evaluation(self) -> bool:
        """Whether a signal came when the weights were to be evaluated: they were saved without."""
        return self.manifest is not None and self.manifest["validation_loss"] is None


def begin(
    state: TrainState,
    start: Start,
    check: Callable[[Path, Mapping[str, Any]], None],
    facts: Mapping[str, Any],
) -> Began:
    """Load the newest checkpoint of `start` that every rank finds whole, byte for byte.

    check: raises ValueError where the run of (folder, manifest) is another one than this.
    facts: of this run, as they go into its manifests. The first rank's `start` holds for all: over
    a network the others may see other folders. Raises ValueError or OSError, on every rank alike.
    """
    mesh = state.mesh
    start = mesh.control.gather(start)[0]
    if not start.folders:
        return Began(["starting from scratch"])
    newest, passed_over = newest_whole(start.folders, mesh)
    path, manifest = newest.path, newest.manifest
    news = [f"passed over: {reason}" for reason in passed_over]
    refuse_alike(mesh, lambda: check(path, manifest))
    if start.finetune:
        refuse_alike(mesh, lambda: state.load_weights(newest))
        news += [f"starting at step 0 from the weights of {path}"]
        return Began(news, weights_of=manifest.get("run"))
    refuse_alike(mesh, lambda: state.load(newest))
    news += [f"going on from {path}"]
    news += changes(facts, manifest, mesh.data.size)
    saved, now = manifest["environment"], environment(mesh)
    news += [
        f"warning: {name} is {now[name]}, and was {saved[name]} when the checkpoint was saved: "
        "the last bits may differ from those of an undisturbed run"
        for name in ("torch", "threads", "device", "layout")
        if saved[name] != now[name]
    ]
    if state.step >= (target := facts["config"]["training"]["train_iters"]):
        news += [
            f"nothing is trained: {path} is already at step {state.step} and --train-iters is "
            f"{target}; a larger one continues, such as --train-iters {2 * state.step}"
        ]
    return Began(news, manifest, manifest.get("weights_of"))


def choose_precision(given: str | None, saved: str | None, mesh: Mesh) -> str:
    """The precision of all ranks: `given` by the flags, else `saved` with the checkpoint (as the
    first rank sees it), else what suits the device.

    Every rank calls this. Raises ValueError on all of them where they differ.
    """
    saved = mesh.control.gather(saved)[0]
    chosen = mesh.control.gather(given or saved or default_precision(mesh.device))
    if len(set(chosen)) > 1:
        ranks = {
            name: ", ".join(str(rank) for rank, each in enumerate(chosen) if each == name)
            for name in dict.fromkeys(chosen)
        }
        found = " and ".join(f"{name} (rank {each})" for name, each in ranks.items())
        raise ValueError(
            f"the ranks' devices would compute in {found}; --no-bf16 or --bf16, for all of them, "
            "would work"
        )
    return chosen[0]
