"""All that is planned of a step: as JSON, as text and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
# Of logits and one layer's backward, only the larger is there at a time.
SHOWN = {"matrix_products": "matmuls", "logits": "logits, or", "one_layer": "backward of one layer"}
FORMULA = "forward and backward of all matmuls, attention whole, without padding"
Record = dict[str, Any]


def record(step: Step, hardware: Hardware) -> Record:
    """JSON; bytes and seconds are those of a step on one rank."""
    config, model, peak = step.config, step.config.model, hardware.peak(step.precision)
    seconds, held = predict(step, hardware), step.memory
    per_second = step.tokens / seconds.total
    parts = asdict(seconds)
    others = {each: varied(config, recompute_granularity=each) for each in GRANULARITIES}
    kept = {each: replace(step, config=other).trace.kept for each, other in others.items()}
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
        "predicted_step_seconds": {
            "matrix_products": parts.pop("matmuls"),
            **parts,
            "total": seconds.total,
        },
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
    phases: dict[str, Counter[str]] = {}
    for phase, calls in step.calls.items():
        for call, times in calls.items():
            if call.axis == axis:
                sums = phases.setdefault(phase, Counter())
                sums.update(calls=times, bytes=times * call.bytes)
    whole = Counter(calls=0, bytes=0)
    for sums in phases.values():
        whole.update(sums)
    return {**whole, "by_phase": phases}


def text(planned: Record) -> str:
    """For people."""
    model, seconds = planned["model"], planned["predicted_step_seconds"]
    held, kept = planned["memory_per_rank_bytes"], planned["activation_bytes_by_recomputation"]
    held = held | {f"activations, recomputation {name}": each for name, each in kept.items()}
    limit = planned["memory_of_device_bytes"]
    total = seconds["total"]
    times = [(_words(n), f"{s:.4f} s", f"{100 * s / total:.1f} %") for n, s in seconds.items()]
    memory = [(_words(name), f"{each / 1e9:.3f} GB") for name, each in held.items()]
    calls = [
        (f"{axis} axis, {phase}", f"{each['calls']:,} calls", f"{each['bytes']:,} bytes")
        for axis, sums in planned["communication_per_step"].items()
        for phase, each in {**sums["by_phase"], "in all": sums}.items()
    ]
    summary = (
        f"{title(planned)}: tensor-parallel {model['tensor']}"
        f"{', sequence-parallel' if model['sequence_parallel'] else ''}, data-parallel "
        f"{model['data']}, {model['precision']}, {model['micro_batches']} micro-batches of "
        f"{model['batch']} x {model['sequence']} tokens\n"
        f"{total:.3f} s a step, {speed(planned)} of "
        f"{planned['peak_flops_per_second'] / 1e12:,.4g} TFLOP/s, "
        f"{planned['days_per_epoch_of_the_paper']:.2f} days for an epoch of the paper\n"
        f"FLOPs of a step: {planned['flops_per_step']:.4g}, {planned['flops_formula']}\n"
        f"{held['total'] / 1e9:.2f} of {limit / 1e9:.2f} GB of a device: "
        f"{'fits' if planned['fits'] else 'DOES NOT FIT'}"
    )
    return "\n\n".join([summary, *map(aligned, (times, memory, calls))])


def title(planned: Record) -> str:
    model = planned["model"]
    return (
        f"{NAMES.get(model['kind'], model['kind'])}, {planned['parameters']:,} parameters on "
        f"{model['tensor'] * model['data']} devices ({planned['hardware']['name']})"
    )


def speed(planned: Record) -> str:
    return f"{planned['tokens_per_second']:,.0f} tokens/s, MFU {100 * planned['mfu']:.1f} %"


def _words(name: str) -> str:
    """A key for people."""
    hidden = " (not in the total)" if name.endswith("hidden") else ""
    return SHOWN.get(name, name.replace("_", " ")) + hidden


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Text of a table whose first column is aligned to the left, the others to the right."""
    rows = list(rows)
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *cells in rows:
        right = (f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True))
        lines.append("  ".join([f"  {name:<{first}}", *right]).rstrip())
    return "\n".join(lines)


def draw(file: Path, planned: Record) -> None:
    """Where the time of a step and the memory of a device go."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.suptitle(f"{title(planned)}\n{speed(planned)}", fontsize=10)
    upper, lower = figure.subplots(2)
    for axes, key, unit, label in (
        (upper, "predicted_step_seconds", 1, "seconds of a step"),
        (lower, "memory_per_rank_bytes", 1e9, "GB of a rank; dashed: what a device has"),
    ):
        parts = {_words(name): each / unit for name, each in planned[key].items()}
        bars = axes.barh(list(parts), list(parts.values()), color="#0072B2")
        axes.bar_label(bars, fmt="%.3g", padding=2)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    lower.axvline(planned["memory_of_device_bytes"] / 1e9, color="#333333", linestyle="--")
    figure.savefig(file, dpi=150)
