"""The plan of a step, as JSON and as text; tables and pictures of what is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from megatron.train.inputs import vocabulary_of
from tools.plan.hardware import Hardware
from tools.plan.search import varied
from tools.plan.software import error_band
from tools.plan.timing import predict
from tools.plan.trace import Step
from tools.report.figures import picture
from tools.report.numbers import aligned

SHOWN = {  # in text and picture: {title: (key, unit)}
    "seconds of a step": ("predicted_step_seconds", 1),
    "GB of a rank": ("memory_per_rank_bytes", 1e9),
    "GB of activations, by recomputation": ("activation_bytes_by_recomputation", 1e9),
}
NOT_SUMS = "totals leave out what is hidden, and the smaller of logits and one layer"
Record = dict[str, Any]
Bars = Mapping[str, Mapping[str, float]]  # by name, and by kind


def record(step: Step, hardware: Hardware) -> Record:
    """JSON. Bytes are those of a step on one rank, the one along the pipeline axis that needs most
    memory; seconds are those of the slowest one. MFU is FLOPs / (seconds x GPUs x peak); its FLOPs
    are those of all matmuls, forward and backward, with attention whole, without padding."""
    config, model = step.config, step.config.model
    seconds, (band, basis) = predict(step, hardware), error_band(hardware, step)
    step = max(step.stages, key=lambda each: each.memory["total"])
    plan, held = step.pipeline, step.memory
    halves = any(each.direction == "backward_weight" for each in chain(*step.lists))
    undone = {"full"} if halves else set[str]()  # by them
    undone |= {"selective"} if config.parallel.is_ring else set()  # a ring keeps no scores
    tried = [each for each in model.granularities if each not in undone]
    others = {each: varied(config, recompute_granularity=each) for each in tried}
    return {
        "model": {
            "kind": model.kind,
            "layers": model.num_layers,
            "hidden": model.hidden_size,
            "heads": model.num_attention_heads,
            "key_value_heads": getattr(model, "query_groups", model.num_attention_heads),
            "recompute": model.recompute_granularity,
            "sequence": config.seq_length,
            "vocabulary": vocabulary_of(config),
            "batch": config.training.micro_batch_size,
            "micro_batches": step.micro_batches,
            "tensor": step.tensor,
            "tensor_mode": config.parallel.tensor_parallel_mode,
            "tensor_depth": config.parallel.tensor_parallel_depth,
            "context": step.context,
            "cp_comm_type": config.parallel.cp_comm_type,
            "data": step.copies,
            "pipeline": plan.ranks,
            "virtual_stages": plan.virtual,
            "schedule": config.parallel.pipeline_schedule or plan.kind,
            "sequence_parallel": config.parallel.cuts_stream,
            "zero_stage": step.stage,
            "precision": step.precision,
            "settings": asdict(model),
        },
        "parameters": step.parameters,
        "parameters_per_rank": step.model.local,
        "memory_per_rank_bytes": held,
        "activation_bytes_by_recomputation": {
            name: replace(step, config=other).activations for name, other in others.items()
        },
        "host_bytes_per_rank": step.on_host,
        "memory_of_device_bytes": int(hardware.limit),
        "fits": held["total"] <= hardware.limit,
        "communication_per_step": _communications(step),
        "stages": [_stage(each) for each in step.stages],
        "idle_share_of_schedule": step.facts.idle_share,
        "pipeline": {
            "ranks": plan.ranks,
            "virtual_stages": plan.virtual,
            "schedule": config.parallel.pipeline_schedule or plan.kind,
            "bubble": step.facts.idle_share,
            "largest_rank": step.rank,
            "memory_per_stage_bytes": [each.memory["total"] for each in step.stages],
        },
        "flops_per_step": step.flops,
        "flops_per_step_with_recomputation": step.executed_flops,
        "predicted_step_seconds": asdict(seconds) | {"total": seconds.total},
        "error_band": band,
        "error_basis": basis,
        "tokens_per_step": step.tokens,
        "tokens_per_second": step.tokens / seconds.total,
        "mfu": step.mfu(seconds.total, hardware),
        "peak_flops_per_second": hardware.peak(step.precision),
        "hardware": asdict(hardware),
    }


def _stage(step: Step) -> Record:
    """Facts of the virtual stages of one rank along the pipeline axis."""
    layers = step.pipeline.numbers(step.rank)
    return {
        "layers": [*range(step.config.model.num_layers)] if layers is None else [*layers],
        "parameters": step.model.own,
        "parameters_per_rank": step.model.local,
        "micro_batches_in_flight": step.facts.in_flight[step.rank],
        "memory_per_rank_bytes": step.memory,
        "communication_per_step": _communications(step),
    }


def _communications(step: Step) -> Record:
    """By axis, calls and bytes of whole tensors, in total and by phase. Axes of which only the
    agreement of all ranks makes use are left out."""
    axes = ["tensor", "data", *(["pipeline", "embedding_group"] if step.pipeline.ranks > 1 else [])]
    if step.config.parallel.tensor_parallel_mode != "1d" or step.context > 1:  # and their unions
        phases = (calls for phase, calls in step.calls.items() if phase != "agreement")
        used = {call.axis for calls in phases for call in calls}
        axes = [name for name in step.model.rings if name in used]
    found: Record = {axis: {"calls": 0, "bytes": 0, "by_phase": {}} for axis in axes}
    for phase, calls in step.calls.items():
        for call, times in calls.items():
            if call.axis in found:
                whole = found[call.axis]
                of_phase = whole["by_phase"].setdefault(phase, {"calls": 0, "bytes": 0})
                for sums in (whole, of_phase):
                    sums["calls"] += times
                    sums["bytes"] += times * call.bytes
    return found


def run(planned: Record, gpus: int, iterations: int, price: float | None) -> Record:
    """A run of so many iterations without an interruption. price: of a device for an hour."""
    seconds = iterations * planned["predicted_step_seconds"]["total"]
    hours = gpus * seconds / 3600
    return {
        "iterations": iterations,
        "tokens": iterations * planned["tokens_per_step"],
        "days": seconds / 86_400,
        "device_hours": hours,
        "cost": None if price is None else price * hours,
    }


def text(planned: Record) -> str:
    """The plan as readable text."""
    tables = [
        [{title: name, "": value / unit} for name, value in planned[key].items()]
        for title, (key, unit) in SHOWN.items()
    ]
    calls = [
        {"axis": axis, "phase": phase, "calls": each["calls"], "bytes": each["bytes"]}
        for axis, sums in planned["communication_per_step"].items()
        for phase, each in {**sums["by_phase"], "all": sums}.items()
    ]
    stages = [
        {
            "stage": rank,
            "layers": len(each["layers"]),
            "M parameters of a rank": each["parameters_per_rank"] / 1e6,
            "micro-batches in flight": each["micro_batches_in_flight"],
            "GB of activations": each["memory_per_rank_bytes"]["activations"] / 1e9,
            "GB": each["memory_per_rank_bytes"]["total"] / 1e9,
        }
        for rank, each in enumerate(planned["stages"])
    ]
    of_stages = [table(stages)] if len(stages) > 1 else []
    run = {name: value for name, value in planned.get("run", {}).items() if value is not None}
    whole = [table([run])] if run else []
    return "\n\n".join(
        [summary(planned), *whole, *of_stages, *map(table, tables), NOT_SUMS, table(calls)]
    )


def summary(planned: Record) -> str:
    model, held = planned["model"], planned["memory_per_rank_bytes"]["total"]
    sequence_parallel = ", sequence-parallel" if model["sequence_parallel"] else ""
    pipeline, virtual = f", pipeline {model['pipeline']}", model["virtual_stages"]
    pipeline += f" x {virtual}" if virtual > 1 else ""
    mode = f" {model['tensor_mode']}" if model["tensor_mode"] != "1d" else ""
    zero = f", ZeRO {model['zero_stage']}" if model["zero_stage"] else ""
    devices = model["tensor"] * model["context"] * model["data"] * model["pipeline"]
    band = planned["error_band"]
    band = "not promised" if band is None else f"+-{100 * band:g} %"
    context = f"context-parallel {model['context']} by {model['cp_comm_type']}, "
    last, largest = model["pipeline"] - 1, planned["pipeline"]["largest_rank"]
    largest = f" (stage {largest} needs most, of stages 0 to {last})"
    return (
        f"{model['kind']}, {planned['parameters']:,} parameters on "
        f"{devices} devices ({planned['hardware']['name']}): "
        f"tensor-parallel {model['tensor']}{mode}{sequence_parallel}, "
        f"{context if model['context'] > 1 else ''}"
        f"data-parallel {model['data']}"
        f"{zero}"
        f"{pipeline + ' ' + model['schedule'] if model['pipeline'] > 1 else ''}\n"
        f"{model['micro_batches']} micro-batches of {model['batch']} x {model['sequence']} tokens "
        f"in {model['precision']}: {planned['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {100 * planned['mfu']:.1f} %\n"
        f"error band {band} ({planned['error_basis']})\n"
        f"{held / 1e9:.2f} of {planned['memory_of_device_bytes'] / 1e9:.2f} GB of a device"
        f"{largest if model['pipeline'] > 1 else ''}: "
        f"{'fits' if planned['fits'] else 'DOES NOT FIT'}"
    )


def draw(ending: str, planned: Record) -> bytes:
    """A picture of SHOWN."""
    panels = {
        title: {name: {"planned": value / unit} for name, value in planned[key].items()}
        for title, (key, unit) in SHOWN.items()
    }
    return bars(ending, summary(planned), panels)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns below their names."""
    return aligned([[*rows[0]], *([*map(_cell, row.values())] for row in rows)], right=True)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def bars(ending: str, title: str, panels: Mapping[str, Bars]) -> bytes:
    """A picture of bars side by side, by the label of their axes."""

    def paint(grid: Any) -> None:
        for axes, (label, rows) in zip(grid, panels.items(), strict=True):
            kinds = [*next(iter(rows.values()))]
            for number, kind in enumerate(kinds):
                places = [place + number / 3 for place in range(len(rows))]
                values = [row[kind] for row in rows.values()]
                axes.bar_label(axes.barh(places, values, 1 / 3, label=kind), fmt="%.3g")
            axes.set_yticks(range(len(rows)), rows)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set_xlabel(label)
        if len(kinds) > 1:
            legend = axes.get_legend_handles_labels()
            axes.figure.legend(*legend, loc="outside lower center", ncols=2)

    return picture(paint, ending, (6 * len(panels), 5), (1, len(panels)), title)
