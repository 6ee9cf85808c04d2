"""All that is planned of a step: as JSON, as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.train.inputs import vocabulary_of
from tools.planning.hardware import Hardware
from tools.planning.search import GRANULARITIES, varied
from tools.planning.timing import predict
from tools.planning.trace import Step

EPOCH = 68_507 * 512 * 1024  # tokens, table 2 of the paper
DAY = 86_400  # seconds
NAMES = {"gpt2": "GPT-2", "bert": "BERT"}
FORMULA = "forward and backward of all matmuls, attention whole, without padding"
Record = dict[str, Any]


def record(step: Step, hardware: Hardware) -> Record:
    """JSON; bytes and seconds are those of a step on one rank."""
    config, model, peak = step.config, step.config.model, hardware.peak(step.precision)
    seconds, held = predict(step, hardware), step.memory
    per_second = step.tokens / seconds.total
    kept = {each: replace(step, config=varied(config, recompute_granularity=each)).trace.kept
            for each in GRANULARITIES}  # fmt: skip
    return {
        "model": {
            "kind": model.kind,
            "layers": model.num_layers,
            "hidden": model.hidden_size,
            "heads": model.num_attention_heads,
            "sequence": config.data.seq_length,
            "vocabulary": vocabulary_of(config),
            "batch": config.training.micro_batch_size,
            "micro_batches": step.micro_batches,
            "tensor": step.tensor,
            "data": step.copies,
            "sequence_parallel": config.parallel.cuts_stream,
            "recompute": model.recompute_granularity,
            "precision": step.precision,
            "width": step.width,
            "settings": asdict(model),
        },
        "parameters": step.model.parameters,
        "parameters_per_rank": step.model.local,
        "memory_per_rank_bytes": held,
        "activation_bytes_by_recomputation": kept,
        "memory_of_device_bytes": int(hardware.limit),
        "fits": held["total"] <= hardware.limit,
        "communication_per_step": {axis: _communication(step, axis) for axis in ("tensor", "data")},
        "flops_per_step": step.flops,
        "flops_formula": FORMULA,
        "flops_per_step_with_recomputation": step.executed_flops,
        "flops_formula_with_recomputation": "the same with recomputation and padding",
        "predicted_step_seconds": asdict(seconds) | {"total": seconds.total},
        "tokens_per_step": step.tokens,
        "tokens_per_second": per_second,
        "mfu": step.flops / (seconds.total * step.ranks * peak),
        "mfu_formula": "FLOPs of a step / (seconds x GPUs x peak)",
        "peak_flops_per_second": peak,
        "days_per_epoch_of_the_paper": EPOCH / per_second / DAY,
        "hardware": {
            "name": hardware.name,
            "attained_share": hardware.attained_share,
            "sources": dict(hardware.sources),
        },
    }


def _communication(step: Step, axis: str) -> Record:
    """Calls and bytes of whole tensors, in all and by phase."""
    phases = {}
    for phase, calls in step.calls.items():
        own = [(call.bytes, times) for call, times in calls.items() if call.axis == axis]
        if own:
            size = sum(size * times for size, times in own)
            phases[phase] = {"calls": sum(times for _, times in own), "bytes": size}
    sums = {kind: sum(each[kind] for each in phases.values()) for kind in ("calls", "bytes")}
    return {**sums, "by_phase": phases}


def text(planned: Record) -> str:
    """For people."""
    model, seconds = planned["model"], planned["predicted_step_seconds"]
    times = [(_words(name), f"{each:.4f} s", f"{100 * each / seconds['total']:.1f} %")
             for name, each in seconds.items()]  # fmt: skip
    held = {**planned["memory_per_rank_bytes"], **{
        f"activations, recomputation {name}": each
        for name, each in planned["activation_bytes_by_recomputation"].items()
    }}  # fmt: skip
    memory = [(_words(name), f"{each / 1e9:.3f} GB", "") for name, each in held.items()]
    calls = [
        (f"{axis} axis, {phase}", f"{each['calls']:,} calls", f"{each['bytes']:,} bytes")
        for axis, sums in planned["communication_per_step"].items()
        for phase, each in {**sums["by_phase"], "in all": sums}.items()
    ]
    total, limit = planned["memory_per_rank_bytes"]["total"], planned["memory_of_device_bytes"]
    summary = (
        f"{title(planned)}: tensor-parallel {model['tensor']}"
        f"{', sequence-parallel' if model['sequence_parallel'] else ''}, data-parallel "
        f"{model['data']}, {model['precision']}, {model['micro_batches']} micro-batches of "
        f"{model['batch']} x {model['sequence']} tokens\n"
        f"{seconds['total']:.3f} s a step, {speed(planned)} of "
        f"{planned['peak_flops_per_second'] / 1e12:,.4g} TFLOP/s, "
        f"{planned['days_per_epoch_of_the_paper']:.2f} days for an epoch of the paper\n"
        f"FLOPs of a step: {planned['flops_per_step']:.4g}, {planned['flops_formula']}\n"
        f"{total / 1e9:.2f} of {limit / 1e9:.2f} GB of a device: "
        f"{'fits' if planned['fits'] else 'DOES NOT FIT'}"
    )
    return "\n\n".join([summary, *map(_aligned, (times, memory, calls))])


def title(planned: Record) -> str:
    model = planned["model"]
    return (
        f"{NAMES.get(model['kind'], model['kind'])}, {planned['parameters']:,} parameters on "
        f"{model['tensor'] * model['data']} devices ({planned['hardware']['name']})"
    )


def speed(planned: Record) -> str:
    return f"{planned['tokens_per_second']:,.0f} tokens/s, MFU {100 * planned['mfu']:.1f} %"


def _words(name: str) -> str:
    """A key for people. Of logits and one layer's backward, only the larger is there at a time."""
    shown = {"logits": "logits, or", "one_layer": "backward of one layer"}
    hidden = " (not in the total)" if name.endswith("hidden") else ""
    return shown.get(name, name.replace("_", " ")) + hidden


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    one, two, three = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"  {name:<{one}}  {value:>{two}}  {beside:>{three}}".rstrip()
                     for name, value, beside in rows)  # fmt: skip


# Of the palette of Okabe and Ito, which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#999999", "#CC79A7", "#009E73")


def draw(file: Path, planned: Record) -> None:
    """Where the time of a step and the memory of a device go."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    upper, lower = figure.subplots(2)
    seconds, held = planned["predicted_step_seconds"], planned["memory_per_rank_bytes"]
    _stack(upper, {_words(n): each for n, each in seconds.items() if n != "total"}, "s")
    absent = {"total", min(("logits", "one_layer"), key=lambda name: held[name])}
    kinds = {_words(n): each / 1e9 for n, each in held.items() if n not in absent}
    _stack(lower, kinds, "GB")
    limit = planned["memory_of_device_bytes"] / 1e9
    lower.axvline(limit, color="#333333", linestyle="--", linewidth=1.2)
    lower.text(limit, 1.02, "what a device has", ha="center", fontsize=9,
               transform=lower.get_xaxis_transform())  # fmt: skip
    lower.set(xlim=(0, 1.08 * max(limit, sum(kinds.values()))), xlabel="GB of a rank")
    upper.set(xlabel="seconds of a step")
    figure.suptitle(f"{title(planned)}\n{speed(planned)}", fontsize=10)
    figure.savefig(file, dpi=150)


def _stack(axes: Any, parts: Mapping[str, float], unit: str) -> None:
    """One bar of parts side by side."""
    start = 0.0
    for (name, value), colour in zip(parts.items(), COLOURS, strict=False):
        looks: dict[str, Any] = {"color": colour, "label": f"{name}, {value:.3g} {unit}"}
        if "hidden" in name:
            looks |= {"color": "none", "edgecolor": colour, "hatch": "///"}
        axes.barh(0, value, left=start, **looks)
        start += value
    axes.set(yticks=[], xlim=(0, 1.02 * start))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
