"""Compares a trainer's figures with the exact ones, and finds known faults in their differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from conformance.faults import FAULTS
from conformance.fixture import COMPARED, NOT_RANKS, STEPS, Figures, Fixture

# In bf16 a unit in the last place of the weights moves gradients by 6 to 10 %: no fault would show.
CAPS = {"float64": 1e-9, "float32": 1e-4}
UNITS = 8  # in the last place, where perturbed inputs change nothing: sums differ in order
NEAR_ZERO = 1e-6  # of the model's norm, which replaces the norm of a parameter below it
DEAD = 1e-3  # of the fixture's gradients and moves of the loss; a fault leaves more
# Largest distance from a known fault; 0 is equal, 1 as far as from exact. Two faults that were not
# listed were 0.11 and 0.43 from a wrong one; that of a trainer in fp32 was 0.21 from the right one.
NAMED = 0.25
REPLICATED = {"data", "context", "ring"}  # sizes of a layout that divide work, but no weights
STAGES = {"parameters": 3, "gradients": 2, "optimizer": 1}  # of ZeRO, that divide them by data


@dataclass(frozen=True)
class Difference:
    """The difference of a figure from the exact one; size is relative, inf if it is undefined."""

    figure: str  # loss, grad_norm, gradient or weight
    where: str
    size: float
    limit: float
    note: str = ""

    @property
    def is_fault(self) -> bool:
        return not self.size <= self.limit

    def __str__(self) -> str:
        return f"{self.figure} {self.size:.1e} ({self.where}{self.note and ': '}{self.note})"


@dataclass(frozen=True)
class Tolerance:
    """The relative differences that count as rounding.

    first: for the first step's figures, 4 x spread, the change of its gradients where each weight
    changes by one unit in the last place; at least `floor`, and at most `cap`. Later figures
    have the cap: Adam divides an element by its own size, so a small one's rounding grows.
    """

    spread: float
    floor: float
    cap: float

    @property
    def first(self) -> float:
        return min(self.cap, max(4 * self.spread, self.floor))


def tolerance(facts: Mapping[str, Any], dtype: str) -> Tolerance:
    floor = UNITS * torch.finfo(getattr(torch, dtype)).eps
    return Tolerance(float(facts["spread"][dtype]), floor, CAPS[dtype])


def norm_of(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def _numbers(
    figure: str, found: Sequence[float], exact: Sequence[float], limits: Tolerance
) -> list[Difference]:
    differences = []
    for step, wanted in enumerate(exact, 1):
        limit = limits.first if step == 1 else limits.cap
        size, note = math.inf, "missing"
        if step <= len(found):
            size, note = abs(found[step - 1] - wanted) / max(abs(wanted), 1e-300), ""
            if not math.isfinite(found[step - 1]):
                size, note = math.inf, str(found[step - 1])
        differences.append(Difference(figure, f"step {step}", size, limit, note))
    if len(found) > len(exact):
        note = f"{len(found)} in place of {len(exact)}"
        differences.append(Difference(figure, "steps", math.inf, limits.cap, note))
    return differences


def _tensors(
    figure: str,
    found: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    zeros: Mapping[str, Sequence[int]],
    limits: Tolerance,
    step: int,
) -> list[Difference]:
    """Differences over each parameter's norm; those of elements of `zeros`, and of parameters near
    zero, over the model's norm."""
    limit = limits.first if figure == "gradient" else limits.cap
    differences, whole = [], norm_of(exact.values())
    for name in sorted({*found, *exact}):
        where = name if figure == "gradient" else f"{name}, step {step}"
        note = ""
        if name not in found:
            note = "missing"
        elif name not in exact:
            note = "not in the model"
        elif (shape := list(found[name].shape)) != (wanted := list(exact[name].shape)):
            note = f"{shape} in place of {wanted}"
        elif not found[name].isfinite().all():
            note = f"{int((~found[name].isfinite()).sum())} elements are not finite"
        if note:
            differences.append(Difference(figure, where, math.inf, limit, note))
            continue
        error, reference = found[name].double() - exact[name].double(), exact[name].double()
        if name in zeros:
            first, last = zeros[name]
            size = norm_of([error[first:last]]) / whole
            differences.append(
                Difference(figure, where, size, limit, f"[{first}:{last}], zero in theory")
            )
            keep = torch.ones(len(error), dtype=torch.bool)
            keep[first:last] = False
            error, reference = error[keep], reference[keep]
        if not reference.numel():
            continue
        own = norm_of([reference])
        size = norm_of([error]) / (own if own > NEAR_ZERO * whole else whole)
        differences.append(Difference(figure, where, size, limit))
    return differences


def differences(
    found: Figures, exact: Figures, facts: Mapping[str, Any], dtype: str
) -> list[Difference]:
    """Each figure's difference, the largest first."""
    limits, zeros = tolerance(facts, dtype), facts["zeros"]
    all_ = [
        *_numbers("loss", found.losses, exact.losses, limits),
        *_numbers("grad_norm", found.grad_norms, exact.grad_norms, limits),
        *_tensors("gradient", found.gradients, exact.gradients, zeros, limits, 1),
    ]
    for step in COMPARED:
        weights = found.weights.get(step, {})
        moved = _tensors("weight", weights, exact.weights[step], zeros, limits, step)
        # Adam makes steps of the rounding of a gradient that is zero; no other figure sees them.
        all_ += [each for each in moved if dtype == "float64" or "zero in theory" not in each.note]
    return sorted(all_, key=lambda each: -each.size)


def largest(found: Iterable[Difference]) -> dict[str, Difference]:
    """The difference of each figure that most exceeds its limit."""
    result: dict[str, Difference] = {}
    for each in found:
        known = result.get(each.figure)
        if known is None or each.size / each.limit > known.size / known.limit:
            result[each.figure] = each
    return result


def dead(found: Figures, facts: Any) -> list[str]:
    """Why these figures prove nothing, as two dead models agree: gradients are almost zero, or
    losses do not move."""
    moves = [abs(b - a) for a, b in pairwise(found.losses)]
    shown = {
        "the least gradient norm": (min(found.grad_norms, default=0), facts["least_gradient_norm"]),
        "the loss's largest move": (max(moves, default=0), max(facts["loss_moves"])),
    }
    return [
        f"{name} is {own:.1e}, not {wanted:.1e}"
        for name, (own, wanted) in shown.items()
        if own < DEAD * wanted
    ]


def without_gradient(found: Figures, facts: Any) -> list[str]:
    """Names of parameters without a gradient, though theory gives them one."""
    whole = norm_of(found.gradients.values())
    return [
        name
        for name, each in sorted(found.gradients.items())
        if float(each.abs().max() if each.numel() else 0) <= 1e-12 * whole
        and facts["zeros"].get(name) != [0, len(each)]
    ]


def _fits(tensors: Mapping[str, Tensor], first: Mapping[str, Tensor], name: str) -> bool:
    return name in tensors and tensors[name].shape == first[name].shape


@dataclass(frozen=True)
class Named:
    """A known fault near to the figures; distance 0 is equal, 1 as far as the exact figures."""

    fault: str
    distance: float
    next_fault: str | None
    next_distance: float

    def __str__(self) -> str:
        words = " ".join((FAULTS[self.fault].__doc__ or "").split()).rstrip(".")
        following = f", the next, {self.next_fault}, {self.next_distance:.2f}"
        words += f" (distance {self.distance:.2f}"
        return f"{self.fault}: {words}{following if self.next_fault else ''}; 1 is none)"


def _deviation(signed: Sequence[float], exact: Sequence[float], counts: Tensor) -> Tensor:
    """Log ratios to the exact signature, whose four groups weigh the same. counts: the parameters
    that count; one whose gradient is zero in theory moves by rounding."""
    a, b = (torch.tensor(each, dtype=torch.float64).abs() for each in (signed, exact))
    tiny = 1e-9 * b.max()
    logs = ((a + tiny) / (b + tiny)).log().clamp(-5, 5)
    tensors = logs[2 * STEPS :]
    groups = (
        logs[:STEPS],
        logs[STEPS : 2 * STEPS],
        tensors[::2][counts],
        tensors[1::2][counts],
    )
    return torch.cat([each / math.sqrt(len(each)) for each in groups])


def nearest(found: Figures, fixture: Fixture, ranks: int) -> Named | None:
    """The known fault whose figures deviate most as these do, between so many ranks or a divisor
    of them; None where none is within NAMED, or the figures are not whole."""
    first = fixture.weights()
    compared = found.gradients, found.weights.get(STEPS, {})
    if not all(_fits(each, first, name) for name in first for each in compared):
        return None
    own, true = found.signature(first), fixture.expected().signature(first)
    if len(own) != len(true) or not all(map(math.isfinite, own)):
        return None
    zeros = fixture.facts["zeros"]
    counts = torch.tensor([zeros.get(n) != [0, len(first[n])] for n in sorted(first)])
    deviation = _deviation(own, true, counts)
    distances: dict[str, float] = {}
    for (fault, number), known in fixture.faults().items():
        if ranks % number == 0:
            other = _deviation(known.tolist(), true, counts)
            size = max(float(deviation.norm()), float(other.norm()), 1e-300)
            distance = float((deviation - other).norm()) / size
            distances[fault] = min(distance, distances.get(fault, math.inf))
    near = sorted(distances.items(), key=lambda each: each[1])
    if not near or near[0][1] > NAMED:
        return None
    following = near[1] if len(near) > 1 else (None, math.inf)
    return Named(*near[0], *following)


def divisors(layout: Mapping[str, int]) -> dict[str, list[int]]:
    """The sizes of a layout that divide the FLOPs, and the bytes of each kind."""
    sizes = {key: size for key, size in layout.items() if key not in NOT_RANKS and size > 1}
    result = {"flops": list(sizes.values())}
    for kind, stage in STAGES.items():
        whole = REPLICATED - ({"data"} if layout.get("zero", 0) >= stage else set())
        result[kind] = [size for key, size in sizes.items() if key not in whole]
    return result


def least_factor(size: int) -> int:
    return next(n for n in range(2, size + 1) if size % n == 0)


def division(
    ranks: Sequence[Mapping[str, Mapping[str, int]]],
    layout: Mapping[str, int],
    fixture: Fixture,
    flops: int,
) -> dict[str, Any]:
    """For each kind: each rank's count and one process's; `times`, the fullest rank's count over an
    equal share; and `ignored`, whether nothing was counted, or `times` is about as large as if a
    prime factor of the sizes that should divide the count did not.

    flops: those of one process. Elements are compared, so that masters of another dtype, which
    are one more element of the optimizer, are no fault.
    """
    elements = sum(each.numel() for each in fixture.weights().values())
    serial = {"flops": flops, "parameters": elements, "gradients": elements}
    serial["optimizer"] = 2 * elements
    result: dict[str, Any] = {}
    for kind, sizes in divisors(layout).items():
        own = [each[kind] for each in ranks]
        most = max(each["elements"] for each in own)
        times = most * prod(sizes) / serial[kind]
        result[kind] = {
            "serial": serial[kind],
            "share": serial[kind] / prod(sizes),
            "ranks": [each["elements"] for each in own],
            "times": times,
            "ignored": bool(sizes) and (not most or times >= 0.95 * min(map(least_factor, sizes))),
        }
        if kind != "flops":
            result[kind]["bytes"] = [each["bytes"] for each in own]
    return result
