"""What it costs, and what it saves, that the backward pass computes activations again.

    python benchmarks/recomputation.py --preset FILE [--sequence 1024] [--dtype fp32|bf16]
        [--threads N] [--json FILE]

Whole training steps of this project with --recompute-granularity none, selective and full on a CPU,
without dropout and with the paper's; from the same weights, on the same batches, and the same
elements are dropped, so that every loss has to be the same bit for bit. Each has a process of its
own, and they take turns. (train_step.py has the same without dropout beside others, on a GPU too.)
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.planning.memory import GRANULARITIES

from benchmarks import on_paper
from benchmarks.comparison import ROOT, Result, Settings, measure, quantiles
from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from benchmarks.train_step import read_case
from benchmarks.turns import Contender
from megatron.config.model import RecomputeGranularity

COMPARED_STEPS = 2


class Setting(NamedTuple):
    dropout: float
    granularity: RecomputeGranularity

    @property
    def name(self) -> str:
        return f"{self.granularity}, dropout {self.dropout:g}"

    @property
    def base(self) -> str:
        """The name of the one that keeps all."""
        return self._replace(granularity="none").name


@contextmanager
def started(settings: Settings, chosen: list[Setting]) -> Iterator[dict[str, Contender]]:
    """A process for each, by its name; all end with the context."""
    found: dict[str, Contender] = {}
    environ = {"OMP_NUM_THREADS": str(settings.threads)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for each in chosen:
                file = Path(folder, f"{each.name}.json")
                file.write_text(json.dumps(said(settings, each)))
                command = [sys.executable, "-m", "benchmarks.recomputing", str(file)]
                found[each.name] = Contender(each.name, [command], environ, ROOT)
            yield found
        finally:
            for contender in found.values():
                contender.stop()


def said(settings: Settings, setting: Setting) -> dict[str, Any]:
    """What the process of a setting reads."""
    return {
        "case": settings.case.written(),
        "dtype": settings.dtype,
        "threads": settings.threads,
        "model": {
            "recompute_granularity": setting.granularity,
            "attention_dropout": setting.dropout,
            "hidden_dropout": setting.dropout,
        },
    }


def compare_losses(chosen: list[Setting], found: dict[str, Contender]) -> None:
    """The steps warm all up, too."""
    losses = {
        name: contender.ask("losses", steps=COMPARED_STEPS)[0]["losses"]
        for name, contender in found.items()
    }
    if any(losses[each.name] != losses[each.base] for each in chosen):
        raise SystemExit(f"error: recomputation has changed the loss: {losses}")


def figures(
    settings: Settings, chosen: list[Setting], results: dict[str, Result], kept: dict[str, int]
) -> list[dict[str, Any]]:
    written = []
    for setting in chosen:
        result, base = results[setting.name], results[setting.base].wall
        flops = on_paper.flops(on_paper.shape(settings.case, recompute=setting.granularity))
        written.append(
            {
                **setting._asdict(),
                "step_seconds": quantiles(result.wall),
                "cpu_seconds": quantiles(result.cpu),
                "over_none": [own / other for own, other in zip(result.wall, base, strict=True)],
                "flops_over_none": flops / on_paper.flops(on_paper.shape(settings.case)),
                "kept_bytes": kept[setting.name],
                "peak_memory_bytes": result.peak_memory,
            }
        )
    return written


def table(written: list[dict[str, Any]]) -> str:
    """Medians; of the ratio median and quartiles of the rounds."""
    header = [
        "dropout",
        "recomputed",
        "seconds",
        "CPU seconds",
        "time / none's",
        "FLOPs / none's",
    ]
    rows = [
        [
            f"{each['dropout']:g}",
            each["granularity"],
            f"{each['step_seconds']['median']:.3f}",
            f"{each['cpu_seconds']['median']:.3f}",
            "" if each["granularity"] == "none" else spread(each["over_none"], 3),
            f"{each['flops_over_none']:.3f}",
            f"{each['kept_bytes'] / 2**20:,.0f}",
            f"{each['peak_memory_bytes'] / 2**20:,.0f}",
        ]
        for each in written
    ]
    return markdown([*header, "kept for the backward, MiB", "peak, MiB"], rows)


def main(
    preset: Path,
    dtype: Literal["fp32", "bf16"] = "fp32",
    threads: int = 2,
    vocab_size: int = 50304,
    micro_batch_size: int | None = None,
    sequence: int | None = None,
    dropout: tuple[float, ...] = (0.0, 0.1),
    rounds: int = 6,
    json_file: JsonFile = None,
) -> None:
    """Measure and print.

    Args:
        preset: of pretrain_gpt2.py; model and micro-batch are read from it.
        dtype: of weights and activations.
        threads: of each process.
        vocab_size: where the preset has none.
        micro_batch_size: samples of a step, if not the preset's.
        sequence: tokens of a sample, if not the preset's.
        dropout: each of attention's probabilities, embeddings and residuals alike.
        rounds: times that every setting has its turn, one step each.
        json_file: where every figure is written.
    """
    case = read_case(preset, vocab_size, micro_batch_size, False)
    settings = Settings(
        case=replace(case, sequence=sequence or case.sequence),
        dtype=dtype,
        threads=threads,
        tensor_parallel=1,
        device="cpu",
        rounds=rounds,
        steps=1,
    )
    record: dict[str, Any] = {
        **facts("torch"),
        "dtype": dtype,
        "threads": threads,
        "rounds": rounds,
        "case": json.loads(settings.case.written()),
    }
    chosen = [Setting(share, each) for share in dropout for each in GRANULARITIES]
    with started(settings, chosen) as found:
        compare_losses(chosen, found)
        print(told(record))
        results = measure(settings, found)
        kept = {name: found[name].ask("kept")[0]["bytes"] for name in found}
    record["settings"] = figures(settings, chosen, results, kept)
    print(table(record["settings"]))
    write_json(json_file, record)


if __name__ == "__main__":
    tyro.cli(main)
