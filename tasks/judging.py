"""What fine-tuned models say of a task's examples, and the figures of that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.config.parse import user_errors
from tasks.finetuning import Finetuning, figure_name

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh

Logits: TypeAlias = Mapping[str, Sequence[NDArray[np.float32]]]
"""By evaluation, of each of its examples."""


def judge(task: Finetuning, logits: Logits) -> dict[str, Any]:
    """The figures of all evaluations by their names in the record, as JSON has them."""
    each = {name: task.figures(name, logits[name]) for name in task.evaluations}
    named = {
        figure_name(evaluation, figure): value
        for evaluation, figures in each.items()
        for figure, value in figures.items()
    }
    further = task.combined(each)
    assert not named.keys() & further.keys(), "two figures of one name"
    figures: dict[str, Any] = json.loads(json.dumps(named | dict(further), default=_plain))
    return figures


def _plain(value: Any) -> Any:
    """A numpy scalar as a number."""
    return value.item()


def ask(task: Finetuning, model: Any, section: Any, mesh: Mesh, size: int, label: str) -> Logits:
    """The model's logits of every example of all evaluations, the same on every rank."""
    from megatron.train.finetune import logits_of

    return {
        name: logits_of(model, section, mesh, examples, size, f"{label} {name}".strip())
        for name, examples in task.evaluations.items()
    }


@contextmanager
def divergence_told(environ: Mapping[str, str]) -> Iterator[None]:
    """End the program with one message where a model's numbers are none; other errors are faults of
    the program, which their tracebacks find."""
    from megatron.train.finetune import DivergedError

    try:
        yield
    except DivergedError:
        with user_errors(environ, agreed=True):
            raise


def mean_logits(every: Sequence[Logits]) -> Logits:
    """The mean of the models' logits of each example (paper, table 5: ensemble)."""
    return {
        name: [np.mean(each, axis=0) for each in zip(*(own[name] for own in every), strict=True)]
        for name in every[0]
    }
