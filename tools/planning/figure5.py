"""Section 5.1 of the paper predicted: figure 5, strong scaling, the number of heads, table 2.

Efficiency of t GPUs = P_t / (t P_1) x T_1 / T_t, with P parameters and T seconds of an iteration:
the paper's own definition. Only the single GPU of the hardware's anchor is known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import fmean
from typing import Any

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from tools.command import ROOT
from tools.planning.anchor import anchored
from tools.planning.hardware import Hardware
from tools.planning.parameters import whole
from tools.planning.shape import Shape, shape_of
from tools.planning.software import MEGATRON_2019, MEGATRON_2020, TORCH_BUCKET, Software
from tools.planning.timing import predict

PRECISION = "fp16"
PRESETS = ROOT / "scripts" / "presets"
ITERATIONS = 68_507  # of an epoch, table 2
DAY = 86_400  # seconds

# The README of the authors' repository, "Distributed Pretraining": gradients are reduced either
# behind the backward by one call, or by torch's DistributedDataParallel while it goes on. The
# second takes 8.3B on 512 GPUs from 60 % to 76 %, but needs more memory, so that 2.5B on 2-way
# and 1.2B without model parallelism are slower with it. So these two have the first, as they did.
BEHIND = MEGATRON_2019
OVERLAPPED = replace(MEGATRON_2019, overlaps=True, bucket_bytes=TORCH_BUCKET)
README_BEHIND = 60.0  # % of 8.3B


@dataclass(frozen=True)
class Point:
    """A model of table 1 and what figure 5 says of it, in %."""

    preset: str
    tensor: int
    model_parallel: float
    model_and_data_parallel: float
    software: Software


MODELS = (
    Point("gpt2_scaling_1.2b", 1, 100, 96, BEHIND),
    Point("gpt2_scaling_2.5b", 2, 95, 83, BEHIND),
    Point("gpt2_scaling_4.2b", 4, 82, 79, OVERLAPPED),
    Point("gpt2_scaling_8.3b", 8, 77, 74, OVERLAPPED),
)
COPIES = 64  # data-parallel
STRONG = {1: 1.0, 2: 1.64, 4: 2.34, 8: 2.98}  # speed-up of 1.2B by GPUs
HEADS = {16: 82.0, 24: 80.0, 32: 77.0}  # % of 8.3B on 8 GPUs by heads
# (layers, hidden, heads, GPUs): (milliseconds, %) of version 1.0, batch 8.
VERSION_1 = {
    (24, 1920, 15, 1): (1288, 100.0),
    (30, 2304, 18, 2): (1242, 90.7),
    (36, 3072, 24, 4): (1357, 86.5),
    (42, 4096, 32, 8): (1508, 79.6),
}
# Preset of table 2: (GPUs, days per epoch, how gradients are reduced: 355M has memory to spare).
TABLE_2 = {
    "gpt2_355m": (64, 0.86, OVERLAPPED),
    "gpt2_2.5b": (128, 2.27, BEHIND),
    "gpt2_8.3b": (512, 2.10, OVERLAPPED),
}
ALWAYS = 82.0  # %, the prediction that knows nothing

Row = dict[str, Any]


@cache
def preset_shape(name: str, ranks: int) -> Shape:
    config = parse(PretrainGPT2Config, ["--preset", str(PRESETS / f"{name}.toml")], {})
    config.check(ranks)
    return shape_of(config, ranks, PRECISION)


@dataclass(frozen=True)
class Study:
    """All of it on one kind of hardware, which has an anchor."""

    hardware: Hardware

    def seconds(self, shape: Shape, software: Software) -> float:
        return predict(shape, software, self.hardware, PRECISION).total

    def efficiency(self, shape: Shape, software: Software, one: Shape) -> float:
        """%, against the model `one` on one GPU."""
        ratio = self.seconds(one, software) / self.seconds(shape, software)
        return 100 * whole(shape) / (shape.tensor * whole(one)) * ratio

    def figure(self) -> Iterator[Row]:
        one = preset_shape(MODELS[0].preset, 1)
        for copies in (1, COPIES):
            for each in MODELS:
                shape = preset_shape(each.preset, each.tensor * copies)
                paper = each.model_parallel if copies == 1 else each.model_and_data_parallel
                yield {
                    "model": each.preset,
                    "gpus": shape.ranks,
                    "tensor_parallel": shape.tensor,
                    "data_parallel": shape.data,
                    "predicted": self.efficiency(shape, each.software, one),
                    "paper": paper,
                    "seconds": self.seconds(shape, each.software),
                    "is_base": shape.ranks == 1,
                }

    def strong_scaling(self) -> Iterator[Row]:
        one = preset_shape(MODELS[0].preset, 1)
        alone = self.seconds(one, BEHIND)
        for gpus, paper in STRONG.items():
            shape = replace(one, tensor=gpus, divisible_by=one.padded // gpus)
            speed_up = alone / self.seconds(shape, BEHIND)
            yield {"gpus": gpus, "predicted": speed_up, "paper": paper}

    def heads(self) -> Iterator[Row]:
        one, large = preset_shape(MODELS[0].preset, 1), preset_shape(MODELS[-1].preset, 8)
        for heads, paper in HEADS.items():
            efficiency = self.efficiency(replace(large, heads=heads), BEHIND, one)
            yield {"heads": heads, "predicted": efficiency, "paper": paper}

    def version_1(self) -> Iterator[Row]:
        base = preset_shape(MODELS[0].preset, 1)
        one = None
        for (layers, hidden, heads, gpus), (milliseconds, paper) in VERSION_1.items():
            shape = replace(base, layers=layers, hidden=hidden, heads=heads, tensor=gpus,
                            divisible_by=base.padded // gpus)  # fmt: skip
            one = one or shape
            yield {
                "parameters": whole(shape),
                "gpus": gpus,
                "predicted": self.efficiency(shape, MEGATRON_2020, one),
                "paper": paper,
                "predicted_milliseconds": 1000 * self.seconds(shape, MEGATRON_2020),
                "paper_milliseconds": milliseconds,
            }

    def table_2(self) -> Iterator[Row]:
        for preset, (gpus, paper, software) in TABLE_2.items():
            seconds = self.seconds(preset_shape(preset, gpus), software)
            yield {"model": preset, "gpus": gpus, "predicted": ITERATIONS * seconds / DAY,
                   "paper": paper}  # fmt: skip

    def behind(self) -> Row:
        """8.3B with all gradients reduced behind the backward, of which the README tells too."""
        one, last = preset_shape(MODELS[0].preset, 1), MODELS[-1]
        shape = preset_shape(last.preset, last.tensor * COPIES)
        return {"predicted": self.efficiency(shape, BEHIND, one), "paper": README_BEHIND}

    def mean_error(self) -> float:
        """Points, of the seven efficiencies that are not the base."""
        return mean_error(list(self.figure()))


def mean_error(rows: list[Row]) -> float:
    return fmean(abs(each["predicted"] - each["paper"]) for each in rows if not each.get("is_base"))


def study(hardware: Hardware) -> dict[str, Any]:
    """JSON: everything predicted beside the paper's. hardware: with an anchor."""
    found = Study(hardware)
    rows, version_1 = list(found.figure()), list(found.version_1())
    seven = [{**each, "predicted": ALWAYS} for each in rows]
    return {
        "hardware": hardware.name,
        "attained_share": hardware.attained_share,
        "figure_5": rows,
        "mean_error": mean_error(rows),
        "mean_error_of_always_82": mean_error(seven),
        "strong_scaling": list(found.strong_scaling()),
        "heads": list(found.heads()),
        "version_1.0": version_1,
        "mean_error_of_version_1.0": mean_error(version_1[1:]),
        "table_2": list(found.table_2()),
        "reduced_behind_the_backward": found.behind(),
        "mean_error_by_constant": sensitivity(hardware),
        "found_afterwards": afterwards(hardware),
    }


def afterwards(hardware: Hardware) -> dict[str, Any]:
    """What explains the errors, found when they were known: no prediction.

    All-reduces in NVLink and over the network at half of the links' speed.
    """
    slower = Study(replace(hardware, link_share=hardware.link_share / 2,
                           network_share=hardware.network_share / 2))  # fmt: skip
    return {
        "all_reduces_twice_as_slow": {
            "mean_error": slower.mean_error(),
            "figure_5": [each["predicted"] for each in slower.figure()],
            "strong_scaling": [each["predicted"] for each in slower.strong_scaling()],
            "heads": [each["predicted"] for each in slower.heads()],
            "mean_error_of_version_1.0": mean_error(list(slower.version_1())[1:]),
            "reduced_behind_the_backward": slower.behind()["predicted"],
        }
    }


STEPS = (0.75, 1.25)


def sensitivity(hardware: Hardware) -> dict[str, list[float]]:
    """Mean error with each constant 25 % smaller and larger, the share found anew each time; and
    with the links at all that their datasheet says."""
    found = {}
    for name in VARIED:
        varied = [anchored(scaled(hardware, name, factor)) for factor in STEPS]
        found[name] = [Study(each).mean_error() for each in varied]
    of_datasheet = anchored(replace(hardware, link_share=1.0, network_share=1.0))
    found["links as in the datasheet"] = [Study(of_datasheet).mean_error()]
    share = hardware.attained_share
    as_kernels = replace(hardware, link_share=share, network_share=share)
    found["links with the share of kernels"] = [Study(as_kernels).mean_error()]
    return found


CONTINUOUS = {"memory_bandwidth", "link_bandwidth", "link_share", "network_bandwidth",
              "network_share", "base_latency", "link_latency", "network_latency",
              "multiprocessors"}  # fmt: skip
PEAK, ANCHOR = f"peak.{PRECISION}", "anchor"
VARIED = (*(each.name for each in fields(Hardware) if each.name in CONTINUOUS), PEAK, ANCHOR)


def scaled(hardware: Hardware, name: str, factor: float) -> Hardware:
    if name == PEAK:
        return replace(
            hardware, peaks={**hardware.peaks, PRECISION: factor * hardware.peak(PRECISION)}
        )
    if name == ANCHOR:
        assert hardware.anchor is not None
        anchor = replace(
            hardware.anchor, flops_per_second=factor * hardware.anchor.flops_per_second
        )
        return replace(hardware, anchor=anchor)
    value = factor * getattr(hardware, name)
    return replace(hardware, **{name: round(value) if name == "multiprocessors" else value})


def text(found: dict[str, Any]) -> str:
    """For people."""
    return "\n".join(
        [
            f"{found['hardware']}, {100 * found['attained_share']:.1f} % of peak and memory "
            "bandwidth by its anchor",
            "\nfigure 5, efficiency in %             predicted  paper",
            *(
                f"  {each['model']:<20} {each['gpus']:>4} GPUs   {each['predicted']:9.1f}  "
                f"{each['paper']:5}"
                for each in found["figure_5"]
            ),
            f"  mean error {found['mean_error']:.1f} points; of always {ALWAYS:.0f} %: "
            f"{found['mean_error_of_always_82']:.1f}",
            "\nstrong scaling of 1.2B, speed-up      predicted  paper",
            *_lines(found["strong_scaling"], "gpus", "GPUs", 2),
            "\nheads of 8.3B on 8 GPUs, %            predicted  paper",
            *_lines(found["heads"], "heads", "heads", 1),
            "\nversion 1.0, %                        predicted  paper",
            *_lines(found["version_1.0"], "gpus", "GPUs", 1),
            f"  mean error {found['mean_error_of_version_1.0']:.1f} points",
            "\ntable 2, days for an epoch            predicted  paper",
            *_lines(found["table_2"], "model", "", 2),
            "\nmean error with each constant 25 % smaller, and larger",
            *(
                f"  {name:<32} {'   '.join(f'{each:4.1f}' for each in errors)}"
                for name, errors in found["mean_error_by_constant"].items()
            ),
        ]
    )


def _lines(rows: list[Row], key: str, unit: str, digits: int) -> Iterator[str]:
    for each in rows:
        label = f"{each[key]} {unit}"
        yield f"  {label:<35} {each['predicted']:9.{digits}f}  {each['paper']:5}"
