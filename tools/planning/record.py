"""All that is planned of a step, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tools.planning.communication import data_calls, tensor_calls, totals
from tools.planning.hardware import Hardware
from tools.planning.memory import by_granularity, fits, memory
from tools.planning.parameters import local, whole
from tools.planning.products import (
    FORMULA,
    FORMULA_BERT,
    RECOMPUTED,
    executed_flops,
    model_flops,
)
from tools.planning.shape import Shape
from tools.planning.software import THIS_PROJECT
from tools.planning.timing import predict

EPOCH = 68_507 * 512 * 1024  # tokens, table 2 of the paper
DAY = 86_400  # seconds
NAMES = {"gpt2": "GPT-2", "bert": "BERT"}
Record = dict[str, Any]


def record(shape: Shape, hardware: Hardware, precision: str) -> Record:
    """JSON; bytes and seconds are those of a step on one rank."""
    seconds = predict(shape, THIS_PROJECT, hardware, precision)
    held, peak = memory(shape, hardware), hardware.peak(precision)
    per_second = shape.step_tokens / seconds.total
    return {
        "model": asdict(shape) | {"precision": precision},
        "parameters": whole(shape),
        "parameters_per_rank": local(shape),
        "memory_per_rank_bytes": held,
        "activation_bytes_by_recomputation": by_granularity(shape, hardware),
        "memory_of_device_bytes": int(hardware.memory - hardware.reserved_memory),
        "fits": fits(held["total"], hardware),
        "communication_per_step": {
            "tensor": totals(tensor_calls(shape)),
            "data": totals(data_calls(shape)),
        },
        "flops_per_step": model_flops(shape),
        "flops_formula": FORMULA if shape.kind == "gpt2" else FORMULA_BERT,
        "flops_per_step_with_recomputation": executed_flops(shape),
        "flops_formula_with_recomputation": RECOMPUTED,
        "predicted_step_seconds": asdict(seconds) | {"total": seconds.total},
        "tokens_per_step": shape.step_tokens,
        "tokens_per_second": per_second,
        "mfu": model_flops(shape) / (seconds.total * shape.ranks * peak),
        "mfu_formula": "FLOPs of a step / (seconds x GPUs x peak)",
        "peak_flops_per_second": peak,
        "days_per_epoch_of_the_paper": EPOCH / per_second / DAY,
        "hardware": {
            "name": hardware.name,
            "attained_share": hardware.attained_share,
            "sources": dict(hardware.sources),
        },
    }


TIMES = {
    "matrix_products": "matrix products",
    "other_kernels": "other kernels",
    "tensor_parallel_exposed": "tensor parallelism, exposed",
    "data_parallel_exposed": "data parallelism, exposed",
    "tensor_parallel_hidden": "tensor parallelism, hidden (not in the total)",
    "data_parallel_hidden": "data parallelism, hidden (not in the total)",
    "total": "total",
}
HELD = {
    "weights": "weights",
    "gradients": "gradients",
    "masters": "masters",
    "moments": "moments of Adam",
    "activations": "activations",
    "logits": "logits, or",
    "one_layer": "backward of one layer",
    "total": "total at most",
}


def text(planned: Record) -> str:
    """For people."""
    return "\n\n".join(
        ["\n".join(_summary(planned)), _aligned(_times(planned)), _aligned(_memory(planned)),
         _aligned(_communication(planned))]
    )  # fmt: skip


def _summary(planned: Record) -> Iterable[str]:
    model = planned["model"]
    ranks = model["tensor"] * model["data"]
    yield (
        f"{NAMES[model['kind']]}, {planned['parameters']:,} parameters on {ranks} devices "
        f"({planned['hardware']['name']}): "
        f"tensor-parallel {model['tensor']}, data-parallel {model['data']}, {model['precision']}, "
        f"{model['micro_batches']} micro-batches of {model['batch']} x {model['sequence']} tokens"
    )
    yield (
        f"{planned['predicted_step_seconds']['total']:.3f} s a step, "
        f"{planned['tokens_per_second']:,.0f} tokens/s, MFU {100 * planned['mfu']:.1f} % of "
        f"{planned['peak_flops_per_second'] / 1e12:,.4g} TFLOP/s, "
        f"{planned['days_per_epoch_of_the_paper']:.2f} days for an epoch of the paper"
    )
    yield f"FLOPs of a step: {planned['flops_per_step']:.4g} = {planned['flops_formula']}"
    fit = "fits" if planned["fits"] else "DOES NOT FIT"
    held, limit = planned["memory_per_rank_bytes"]["total"], planned["memory_of_device_bytes"]
    yield f"{held / 1e9:.2f} of {limit / 1e9:.2f} GB of a device: {fit}"


def _times(planned: Record) -> Iterable[Sequence[str]]:
    seconds = planned["predicted_step_seconds"]
    for name, told in TIMES.items():
        share = f"{100 * seconds[name] / seconds['total']:.1f} %"
        yield told, f"{seconds[name]:.4f} s", share


def _memory(planned: Record) -> Iterable[Sequence[str]]:
    for name, told in HELD.items():
        yield told, f"{planned['memory_per_rank_bytes'][name] / 1e9:.3f} GB", ""
    for name, held in planned["activation_bytes_by_recomputation"].items():
        yield f"activations, recomputation {name}", f"{held / 1e9:.3f} GB", ""


def _communication(planned: Record) -> Iterable[Sequence[str]]:
    for axis, sums in planned["communication_per_step"].items():
        for phase, each in {**sums["by_phase"], "in all": sums}.items():
            yield f"{axis} axis, {phase}", f"{each['calls']:,} calls", f"{each['bytes']:,} bytes"


def _aligned(rows: Iterable[Sequence[str]]) -> str:
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {beside:>{widths[2]}}".rstrip()
        for name, value, beside in table
    )


def found_text(layouts: Sequence[Mapping[str, Any]], most: int = 12) -> str:
    """Of a search: the best layouts, one a line."""
    if not layouts:
        return "  no layout on so many devices fits; --hardware with more memory or more --gpus may"
    lines = [
        f"  t {each['tensor']:>3}  d {each['data']:>4}  micro-batch {each['batch']:>3}  "
        f"recompute {each['recompute']:<9}  {each['tokens_per_second']:>12,.0f} tokens/s  "
        f"MFU {100 * each['mfu']:4.1f} %  {each['memory_bytes'] / 1e9:6.2f} GB"
        for each in layouts[:most]
    ]
    rest = len(layouts) - most
    return "\n".join([*lines, *([f"  and {rest} more that fit"] if rest > 0 else [])])
