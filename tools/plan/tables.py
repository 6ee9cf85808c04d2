"""Published tables, predicted from one row of each: PTD-P (arXiv 2104.04473), table 1, and
Korthikanti et al. (arXiv 2205.05198), table 5.

The share of peak and memory bandwidth that kernels attain is found from the first row of a table;
all else is of the hardware's file. Micro-batches and virtual stages of PTD-P are those of the
authors' scripts for the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from megatron.errors import UsageError
from tools.plan.hardware import Hardware
from tools.plan.record import bars, table
from tools.plan.software import SOFTWARE, TORCH_BUCKET, AuthorsStep, gpt2
from tools.plan.timing import predict
from tools.plan.trace import Step

SEQUENCE, VOCABULARY, MULTIPLE = 2048, 51_200, 128
PRECISION = "fp16"
OVERLAPPED = 18.4  # billions of parameters
Found = dict[str, Any]


class Sizes(NamedTuple):
    """A model and its layout. billions: of parameters; batch: samples of all GPUs."""

    billions: float
    layers: int
    hidden: int
    heads: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    micro_batch: int
    virtual: int


def step_of(sizes: Sizes, software: str, recompute: str) -> Step:
    """Both papers use sequence parallelism and selective recomputation together, or neither. Up to
    OVERLAPPED, PTD-P reduces gradients by torch's DistributedDataParallel, during the backward."""
    config = gpt2(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        sequence=SEQUENCE,
        vocabulary=VOCABULARY,
        multiple=MULTIPLE,
        recompute=recompute,
        micro_batch=sizes.micro_batch,
        global_batch=sizes.batch,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        virtual=sizes.virtual,
        sequence_parallel=recompute == "selective",
    )
    program = SOFTWARE[software]
    if sizes.billions <= OVERLAPPED and sizes.gpus > sizes.tensor:
        program = replace(program, bucket_bytes=TORCH_BUCKET)
    return AuthorsStep(config, sizes.gpus, PRECISION, software=program)


def published_flops(step: Step) -> float:
    """FLOPs of a step by the formula of PTD-P, recomputation counted."""
    model, s = step.config.model, SEQUENCE
    layers, h = model.num_layers, model.hidden_size
    shares = 1 + s / (6 * h) + VOCABULARY / (16 * layers * h)
    return 96 * step.tokens * layers * h**2 * shares


@dataclass(frozen=True)
class Table:
    """rows: (name, step, published figure); the first one calibrates. figure: of a step and its
    seconds."""

    name: str
    unit: str
    rows: Sequence[tuple[str, Step, float]]
    figure: Callable[[Step, float], float]

    def predicted(self, hardware: Hardware) -> Found:
        """JSON: every row, and the errors of those that do not calibrate."""
        hardware, (_, first, goal) = replace(hardware, anchor=None), self.rows[0]

        def figure(step: Step, share: float) -> float:
            seconds = predict(step, replace(hardware, attained_share=share)).total
            return self.figure(step, seconds)

        low, high = 0.05, 1.0
        ends = figure(first, low), figure(first, high)
        if not min(ends) < goal < max(ends):
            allowed = f"one that can reach {goal} {self.unit} in {self.name}, such as dgx-a100"
            raise UsageError("--hardware", hardware.name, allowed, works=("--hardware", "dgx-a100"))
        is_rising = ends[1] > ends[0]
        for _ in range(40):
            share = (low + high) / 2
            is_above = (figure(first, share) > goal) == is_rising
            low, high = (low, share) if is_above else (share, high)
        rows = [
            {"row": name, "predicted": figure(step, share), "published": published}
            | {"calibrated": step is first}
            for name, step, published in self.rows
        ]
        errors = [each["predicted"] / each["published"] - 1 for each in rows[1:]]
        return {
            "table": self.name,
            "unit": self.unit,
            "attained_share": share,
            "rows": rows,
            "mean_error": fmean(map(abs, errors)),
            "worst_error": max(map(abs, errors)),
        }


PTD_P: dict[Sizes, float] = {  # TFLOP/s of a GPU
    Sizes(1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1): 137,
    Sizes(3.6, 30, 3072, 32, 2, 1, 64, 512, 16, 1): 138,
    Sizes(7.5, 36, 4096, 32, 4, 1, 128, 512, 16, 1): 142,
    Sizes(18.4, 40, 6144, 48, 8, 1, 256, 1024, 8, 1): 135,
    Sizes(39.1, 48, 8192, 64, 8, 2, 512, 1536, 4, 1): 138,
    Sizes(76.1, 60, 10240, 80, 8, 4, 1024, 1792, 2, 3): 140,
    Sizes(145.6, 80, 12288, 96, 8, 8, 1536, 2304, 2, 2): 148,
    Sizes(310.1, 96, 16384, 128, 8, 16, 1920, 2160, 1, 2): 155,
    Sizes(529.6, 105, 20480, 128, 8, 35, 2520, 2520, 1, 3): 163,
    Sizes(1008, 128, 25600, 160, 8, 64, 3072, 3072, 1, 1): 163,
}
RECOMPUTED = {"full recomputation": "full", "sequence and selective": "selective"}
KORTHIKANTI: dict[Sizes, tuple[float, float]] = {  # seconds of a step, in the order of RECOMPUTED
    Sizes(22, 48, 6144, 64, 8, 1, 8, 4, 4, 1): (1.42, 1.10),
    Sizes(175, 96, 12288, 96, 8, 8, 64, 64, 1, 3): (18.13, 13.75),
    Sizes(530, 105, 20480, 128, 8, 35, 280, 280, 1, 3): (49.05, 37.83),
    Sizes(1000, 128, 25600, 160, 8, 64, 512, 512, 1, 1): (94.42, 71.49),
}


def tables() -> list[Table]:
    throughput = [
        (f"{sizes.billions:g}B", step_of(sizes, "megatron 2021", "full"), published)
        for sizes, published in PTD_P.items()
    ]
    seconds = [
        (f"{sizes.billions:g}B, {title}", step_of(sizes, "megatron 2022", recompute), published)
        for sizes, times in KORTHIKANTI.items()
        for (title, recompute), published in zip(RECOMPUTED.items(), times, strict=True)
    ]
    return [
        Table(
            "PTD-P, table 1",
            "TFLOP/s of a GPU",
            throughput,
            lambda step, time: published_flops(step) / time / step.ranks / 1e12,
        ),
        Table("Korthikanti et al., table 5", "seconds of a step", seconds, lambda _, time: time),
    ]


def study(hardware: Hardware) -> Found:
    """JSON: both tables on DGX A100s, or on servers like them."""
    found = [each.predicted(hardware) for each in tables()]
    rows = [row | {"table": each["table"]} for each in found for row in each["rows"]]
    return {"hardware": hardware.name, "tables": found, "rows": rows}


def text(found: Found) -> str:
    parts = []
    for each in found["tables"]:
        rows = [
            {"row": row["row"], "predicted": row["predicted"], "published": row["published"]}
            | {"error": f"{row['predicted'] / row['published'] - 1:+.1%}"}
            for row in each["rows"]
        ]
        rows[0]["error"] = "calibrates"
        parts.append(
            f"{each['table']}, {each['unit']}, from its first row: mean error "
            f"{each['mean_error']:.1%}, worst {each['worst_error']:.1%}\n{table(rows)}"
        )
    return "\n\n".join(parts)


def draw(file: Path, found: Found) -> None:
    panels = {}
    for each in found["tables"]:
        names = [row["row"] for row in each["rows"]]
        series = {kind: [row[kind] for row in each["rows"]] for kind in ("published", "predicted")}
        panels[f"{each['table']}: {each['unit']}"] = (names, series)
    bars(file, "Published tables, each predicted from its first row", panels)
