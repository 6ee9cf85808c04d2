"""The signature of a run: a list of numbers, by which a fault is known."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from conformance.fixture import STEPS, Figures


def signature(figures: Figures, weights0: Mapping[str, Tensor]) -> list[float]:
    """losses, grad_norms, then by parameter in the order of names: the norm of the first step's
    gradient, the norm of what all steps together added to the weights (weights0: the fixture's)."""
    numbers = [*figures.losses, *figures.grad_norms]
    for name in sorted(weights0):
        moved = figures.weights[STEPS][name].double() - weights0[name]
        numbers += [float(figures.gradients[name].double().norm()), float(moved.norm())]
    return numbers
