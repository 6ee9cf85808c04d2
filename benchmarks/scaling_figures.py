"""What `scaling.py` says of what it has timed, as JSON: figures of each configuration, and of each
point of section 5.1 the share of linear scaling or the speed-up beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.comparison import quantiles
from benchmarks.figures import gpu_peak
from benchmarks.scaling_configurations import STRONG_SCALING, Configuration, Point
from tools.planning.hardware import Hardware
from tools.planning.parameters import whole
from tools.planning.products import FORMULA, executed_flops, model_flops
from tools.planning.software import THIS_PROJECT
from tools.planning.timing import predict

FORMULAS = {
    "efficiency": "100 P_t / (t P_1) x T_1 / T_t, P parameters, T seconds of an iteration, round "
    "by round; t counts tensor-parallel ranks only, as the batch grows with the copies",
    "speed_up": "T_1 / T_t",
    "tflops": "(4 x the layers' forward + 3 x the logits, with the padded vocabulary) / (ranks x "
    "seconds): the paper's, which counts recomputation",
    "mfu": f"({FORMULA}) / (ranks x seconds x peak)",
    "communication": "of a step under the profiler on rank 0: the share of time in which the axis "
    "communicates or waits for its ranks, and in brackets in which nothing is computed beside it",
}
Record = dict[str, Any]


@dataclass(kw_only=True)
class Result:
    """Of one configuration; it has figures, or a reason why it has none."""

    rounds: list[list[float]] = field(default_factory=list)  # seconds of every step
    communication: dict[str, Any] | None = None
    reason: str | None = None

    @property
    def seconds(self) -> list[float]:
        return [step for each in self.rounds for step in each]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """FLOP/s of a device."""

    value: float
    source: str


def find_peak(kind: str, hardware: Hardware | None, precision: str) -> Peak | None:
    """That of the hardware, or of a GPU that is known by its name. kind: of the device."""
    if hardware is not None:
        if precision not in hardware.peaks:
            works = " or ".join(f"--dtype {each}" for each in hardware.peaks)
            raise ValueError(f"{hardware.name} has no peak in {precision}; {works} would work")
        return Peak(value=hardware.peak(precision), source=hardware.sources[f"peak.{precision}"])
    gpu, peak = gpu_peak(kind)
    if peak is None or precision == "fp32":
        return None
    return Peak(value=peak, source=f"NVIDIA's datasheet of {gpu}, dense, half precision")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Turns seconds into figures."""

    precision: str
    hardware: Hardware | None
    peak: Peak | None

    def configuration(self, configuration: Configuration, result: Result) -> Record:
        shape = configuration.shape(self.precision)
        return {
            "preset": configuration.preset,
            "model": configuration.model,
            "parameters": whole(shape),
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "sequence": shape.sequence,
            "samples": shape.batch * shape.micro_batches * shape.data,
            "tensor_parallel": shape.tensor,
            "data_parallel": shape.data,
            "ranks": shape.ranks,
            "reason": result.reason,
            "predicted_seconds": self.predicted(configuration),
            **self._measured(configuration, result),
        }

    def _measured(self, configuration: Configuration, result: Result) -> Record:
        if result.reason is not None or not result.rounds:
            return {}
        shape, seconds = configuration.shape(self.precision), median(result.seconds)
        return {
            "seconds": quantiles(result.seconds),
            "seconds_of_rounds": result.rounds,
            "tokens_per_second": shape.step_tokens / seconds,
            "tflops": executed_flops(shape) / (shape.ranks * seconds) / 1e12,
            "mfu": self.peak and model_flops(shape) / (shape.ranks * seconds * self.peak.value),
            "communication": shares(result.communication),
        }

    def predicted(self, configuration: Configuration) -> float | None:
        """Seconds of a step, by tools/plan.py."""
        if self.hardware is None:
            return None
        shape = configuration.shape(self.precision)
        return predict(shape, THIS_PROJECT, self.hardware, self.precision).total

    def point(self, point: Point, base: Configuration, results: Mapping[str, Result]) -> Record:
        """base: the model on one rank, against which all are measured."""
        own, one = results[point.configuration.name], results[base.name]
        reason = own.reason or (one.reason and f"no baseline: {one.reason}")
        pairs = [] if reason else zip(own.rounds, one.rounds, strict=False)
        factor = self._factor(point, base)
        values = [factor * median(alone) / median(together) for together, alone in pairs]
        predicted = [self.predicted(each) for each in (base, point.configuration)]
        return {
            "study": point.study,
            "configuration": point.configuration.name,
            "measured": quantiles(values) if values else None,
            "predicted": factor * predicted[0] / predicted[1] if all(predicted) else None,
            "paper": point.paper,
            "reason": reason,
        }

    def _factor(self, point: Point, base: Configuration) -> float:
        if point.study == STRONG_SCALING:
            return 1.0
        own, one = (each.shape(self.precision) for each in (point.configuration, base))
        return 100 * whole(own) / (own.tensor * whole(one))


def shares(found: Mapping[str, Any] | None) -> Record | None:
    """With the shares of the profiled step. found: as profile_steps, None before there is one."""
    if found is None:
        return None
    step = found["step_seconds"]
    axes = {axis: each for axis, each in found.items() if axis != "step_seconds"}
    return {
        "step_seconds": step,
        **{
            axis: each
            | {"share": each["seconds"] / step, "exposed_share": each["exposed_seconds"] / step}
            for axis, each in axes.items()
        },
    }


def record(account: Account, points: Sequence[Point], results: Mapping[str, Result]) -> Record:
    base = points[0].configuration
    distinct = {each.configuration.name: each.configuration for each in points}
    return {
        "precision": account.precision,
        "formulas": FORMULAS,
        "peak": account.peak and vars(account.peak),
        "hardware": account.hardware and account.hardware.name,
        "configurations": {
            name: account.configuration(each, results[name]) for name, each in distinct.items()
        },
        "points": [account.point(each, base, results) for each in points],
    }
