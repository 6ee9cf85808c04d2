"""Published tables beside predictions: PTD-P (arXiv 2104.04473), tables 1 and 2, and Korthikanti et
al. (arXiv 2205.05198), tables 2 and 5.

Times are predicted from one row of a table: the share of peak and memory bandwidth that kernels
attain is found from the first row; all else is of the hardware's file. In table 2 of PTD-P, the
share is that of its table 1, and the first row of ZeRO-3 says which share of the network its
collectives attain; PTD-P is fitted to nothing. Micro-batches are those of the paper, and virtual
stages those of the authors' scripts (examples/sc21 of github.com/NVIDIA/Megatron-LM: for table 1,
and for 175B that of figure 12). Activations are those of this project's own layer, traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from megatron.config.pretrain import PretrainGPT2Config
from megatron.errors import UsageError
from tools.plan.hardware import Hardware
from tools.plan.record import bars, table
from tools.plan.software import SOFTWARE, TORCH_BUCKET, AuthorsStep, gpt2
from tools.plan.timing import predict
from tools.plan.trace import Step

SEQUENCE, VOCABULARY = 2048, 51_200
PRECISION = "fp16"
OVERLAPPED = 18.4  # billions of parameters
Found = dict[str, Any]
Row = tuple[str, Step, float]


class Sizes(NamedTuple):
    """A model and its layout. billions: of parameters; the others are settings."""

    billions: float
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    gpus: int
    global_batch_size: int
    micro_batch_size: int
    num_virtual_stages_per_pipeline_rank: int

    def config(self, recompute: str, **changes: Any) -> PretrainGPT2Config:
        of_all = {"seq_length": SEQUENCE, "vocab_size": VOCABULARY}
        return gpt2(**of_all, recompute_granularity=recompute, **self._asdict() | changes)


def step_of(sizes: Sizes, software: str, recompute: str, **changes: Any) -> Step:
    """Both papers use sequence parallelism and selective recomputation together, or neither. Up to
    OVERLAPPED, PTD-P reduces gradients by torch's DistributedDataParallel, during the backward.
    changes: of the software."""
    config = sizes.config(recompute, sequence_parallel=recompute == "selective")
    if sizes.billions <= OVERLAPPED and sizes.gpus > sizes.tensor_model_parallel_size:
        changes["bucket_bytes"] = TORCH_BUCKET
    program = replace(SOFTWARE[software], **changes)
    return AuthorsStep(config, sizes.gpus, PRECISION, software=program)


def published_flops(step: Step) -> float:
    """FLOPs of a step by the formula of PTD-P, recomputation counted."""
    model, s = step.config.model, SEQUENCE
    layers, h = model.num_layers, model.hidden_size
    shares = 1 + s / (6 * h) + VOCABULARY / (16 * layers * h)
    return 96 * step.tokens * layers * h**2 * shares


def speed(step: Step, seconds: float) -> float:
    """TFLOP/s of a GPU."""
    return published_flops(step) / seconds / step.ranks / 1e12


@dataclass(frozen=True)
class Table:
    """rows: (name, step, published figure). figure: of a step and its seconds. fitted: the share of
    the hardware that the first row gives; "" if all rows are predicted."""

    name: str
    unit: str
    rows: Sequence[Row]
    figure: Callable[[Step, float], float]
    fitted: str = "attained_share"

    def predicted(self, hardware: Hardware) -> Found:
        """JSON: every row, and the errors of those that do not calibrate."""
        (_, first, goal), is_fitted = self.rows[0], bool(self.fitted)

        def figure(step: Step, share: float) -> float:
            fitted = replace(hardware, **{self.fitted: share}) if is_fitted else hardware
            return self.figure(step, predict(step, fitted).total)

        share, low, high = 0.0, 0.05, 1.0
        ends = figure(first, low), figure(first, high)
        if is_fitted and not min(ends) < goal < max(ends):
            allowed = f"one that can reach {goal} {self.unit} in {self.name}, such as dgx-a100"
            raise UsageError("--hardware", hardware.name, allowed, works=("--hardware", "dgx-a100"))
        is_rising = ends[1] > ends[0]
        for _ in range(40 * is_fitted):
            share = (low + high) / 2
            is_above = (figure(first, share) > goal) == is_rising
            low, high = (low, share) if is_above else (share, high)
        rows = [
            {"row": name, "predicted": figure(step, share), "published": published}
            | {"calibrated": is_fitted and step is first}
            for name, step, published in self.rows
        ]
        errors = [
            each["predicted"] / each["published"] - 1 for each in rows if not each["calibrated"]
        ]
        found = {"table": self.name, "unit": self.unit, "rows": rows}
        found |= {self.fitted: share} if is_fitted else {}
        return found | {"mean_error": fmean(map(abs, errors)), "worst_error": max(map(abs, errors))}


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
SHAPES = {  # of table 2, by billions: layers, hidden, heads; stages and virtual stages of PTD-P
    174.6: ((96, 12288, 96), (12, 4)),
    529.6: ((105, 20480, 128), (35, 3)),
}
COMPARED = {  # billions; GPUs, batch, micro-batch of ZeRO-3; GPUs of PTD-P: TFLOP/s of both
    (174.6, 768, 1536, 2, 768): (88, 149),
    (174.6, 384, 1536, 4, 384): (144, 153),
    (174.6, 1536, 1536, 1, 1536): (44, 141),
    (529.6, 640, 2560, 4, 560): (138, 171),
    (529.6, 1120, 2240, 2, 1120): (98, 167),
    (529.6, 2240, 2240, 1, 2240): (48, 159),
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
    whole, cut = list[Row](), list[Row]()
    for (billions, gpus, batch, micro_batch, others), (slow, fast) in COMPARED.items():
        shape, (stages, virtual) = SHAPES[billions]
        by_zero = Sizes(billions, *shape, 1, 1, gpus, batch, micro_batch, 1)
        by_ptd = Sizes(billions, *shape, 8, stages, others, min(batch, 2240), 1, virtual)
        for rows, sizes, published in ((whole, by_zero, slow), (cut, by_ptd, fast)):
            step = step_of(sizes, "megatron 2021", "full", is_zero_3=rows is whole)
            rows.append((f"{billions:g}B on {sizes.gpus} GPUs", step, published))
    return [
        Table("PTD-P, table 1", "TFLOP/s of a GPU", throughput, speed),
        Table("Korthikanti et al., table 5", "seconds of a step", seconds, lambda _, time: time),
        Table("PTD-P, table 2, ZeRO-3", "TFLOP/s of a GPU", whole, speed, "network_share"),
        Table("PTD-P, table 2, PTD-P", "TFLOP/s of a GPU", cut, speed, ""),
    ]


def activations() -> list[Found]:
    """JSON: bytes of a layer of 22B that this project keeps for the backward, in s b h, beside the
    formula of Korthikanti et al., table 2.

    explained: the formula with what this project keeps in place of two of its terms. Dropout keeps
    its key of 8 bytes for each row and no mask (2 s b h); with them 16 bytes of the two norms. The
    kernel of attention keeps a logarithm of 4 bytes for each row and head and no scores (5 a s / h
    s b h). And with full recomputation and sequence parallelism a rank keeps its own rows alone.
    """
    sizes, rows = next(iter(KORTHIKANTI)), []
    h, a = sizes.hidden_size, sizes.num_attention_heads
    for t, cut, recompute in product((1, 8), (False, True), ("none", "selective", "full")):
        if cut and t == 1:
            continue
        configs = (
            sizes._replace(num_layers=n, tensor_model_parallel_size=t).config(
                recompute, sequence_parallel=cut
            )
            for n in (1, 2)
        )
        one, two = (Step(each, t, PRECISION).trace.kept for each in configs)
        of_rows, is_core_kept = t if cut else 1, recompute == "none"
        published = 10 / of_rows + (24 + 5 * a * SEQUENCE / h * is_core_kept) / t
        explained = (8 + 32 / h) / of_rows + (24 + 4 * a / h * is_core_kept) / t
        if recompute == "full":
            published, explained = 2, 2 / of_rows
        name = f"t = {t}{', sequence parallel' if cut else ''}, recomputed: {recompute}"
        kept = (two - one) / (sizes.micro_batch_size * SEQUENCE * h)
        rows.append({"row": name, "kept": kept, "formula": published, "explained": explained})
    return rows


def study(hardware: Hardware) -> Found:
    """JSON: the tables on DGX A100s, or on servers like them. order: in how many of the pairs of
    ZeRO-3 and PTD-P the faster one is predicted to be faster."""
    hardware, found = replace(hardware, anchor=None), list[Found]()
    for each in tables():
        if each.fitted != "attained_share":  # kernels are those of PTD-P's table 1
            hardware = replace(hardware, attained_share=found[0]["attained_share"])
        found.append(each.predicted(hardware))
    pairs = zip(*(each["rows"] for each in found[2:]), strict=True)
    right = [
        (ours["predicted"] > other["predicted"]) == (ours["published"] > other["published"])
        for other, ours in pairs
    ]
    rows = [row | {"table": each["table"]} for each in found for row in each["rows"]]
    order = {"pairs": len(right), "right": sum(right)}
    return {
        "hardware": hardware.name,
        "tables": found,
        "rows": rows,
        "order": order,
        "activations": activations(),
    }


def text(found: Found) -> str:
    parts = []
    for each in found["tables"]:
        rows = [
            {"row": row["row"], "predicted": row["predicted"], "published": row["published"]}
            | {"error": f"{row['predicted'] / row['published'] - 1:+.1%}"}
            for row in each["rows"]
        ]
        is_fitted = each["rows"][0]["calibrated"]
        rows[0] |= {"error": "calibrates"} if is_fitted else {}
        parts.append(
            f"{each['table']}, {each['unit']}{', from its first row' * is_fitted}: mean error "
            f"{each['mean_error']:.1%}, worst {each['worst_error']:.1%}\n{table(rows)}"
        )
    order = found["order"]
    parts.append(f"PTD-P and ZeRO-3 in the right order: {order['right']} of {order['pairs']}")
    title = (
        "bytes that a layer keeps for the backward, in s b h; formula: Korthikanti et al., table 2"
    )
    return "\n\n".join([*parts, f"{title}\n{table(found['activations'])}"])


def draw(ending: str, found: Found) -> bytes:
    panels = {
        f"{each['table']}: {each['unit']}": {
            row["row"]: {kind: row[kind] for kind in ("published", "predicted")}
            for row in each["rows"]
        }
        for each in found["tables"]
    }
    title = "Published tables, and predictions from the first row of each"
    return bars(ending, title, panels)
