"""The output layer and its loss, forward and backward: logits of a chunk of the tokens at a time,
as training computes it, beside all logits at once.

    python benchmarks/output_layer.py [--vocab-size 50304] [--hidden-size 768] [--tokens 4096]
        [--dtype fp32|bf16] [--threads N] [--tensor-parallel N] [--device cuda] [--json FILE]

Both are this project's, with the gradient of the weight in its buffer, and take turns on processes
of their own. Memory is the most that a step takes beside the weight, its gradient and the stream.
"""

import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import AT_ONCE, IN_CHUNKS, Case
from benchmarks.comparison import Settings, measure, quantiles, started
from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json

COMPARED_STEPS = 2
ASKED = ("dtype", "threads", "tensor_parallel", "device", "rounds")  # of Settings, for the record
# Of the losses, about log v each.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}


def held(settings: Settings) -> int:
    """Bytes of the weight, its gradient, the stream and its gradient, on all ranks."""
    case, width = settings.case, {"fp32": 4, "bf16": 2}[settings.dtype]
    multiple = case.divisible_by * settings.tensor_parallel
    rows = -(-case.vocab_size // multiple) * multiple
    stream = 2 * case.tokens * case.hidden_size * width * settings.tensor_parallel
    return rows * case.hidden_size * (width + 4) + stream


def compare(settings: Settings) -> dict[str, Any]:
    """What the JSON file holds; SystemExit where the two have other losses."""
    case = settings.case
    record: dict[str, Any] = {
        **facts("torch"),
        **{name: getattr(case, name) for name in ("vocab_size", "hidden_size", "tokens")},
        **{name: getattr(settings, name) for name in ASKED},
    }
    with started(settings, [IN_CHUNKS, AT_ONCE]) as found:
        losses = [each.ask("losses", steps=COMPARED_STEPS)[0]["losses"] for each in found.values()]
        if not np.allclose(*losses, rtol=TOLERANCES[settings.dtype], atol=0):
            raise SystemExit(f"error: these are not the same loss: {losses}")
        results = measure(settings, found)
    print(told(record))
    pairs = zip(results[IN_CHUNKS].wall, results[AT_ONCE].wall, strict=True)
    record["over_at_once"] = [own / whole for own, whole in pairs]
    record["contenders"] = {
        name: {
            "step_seconds": quantiles(each.wall),
            "extra_bytes": each.peak_memory - held(settings),
        }
        for name, each in results.items()
    }
    record["contenders"][IN_CHUNKS]["over_at_once"] = quantiles(record["over_at_once"])
    return record


def table(record: dict[str, Any]) -> str:
    """record: of `compare`."""
    rows = [
        [
            name,
            f"{each['step_seconds']['median']:.3f}",
            spread(record["over_at_once"], 3) if name == IN_CHUNKS else "",
            f"{each['extra_bytes'] / 2**20:,.0f}",
        ]
        for name, each in record["contenders"].items()
    ]
    return markdown(["", "seconds", "over at once", "extra MiB"], rows)


def told_of(record: dict[str, Any]) -> str:
    """What was asked, and the table. record: of `compare`."""
    asked = f"{record['dtype']}, {record['tokens']:,} tokens, hidden {record['hidden_size']:,}"
    return f"{asked}, vocabulary {record['vocab_size']:,}.\n\n{table(record)}"


def main(
    vocab_size: int = 50304,
    hidden_size: int = 768,
    tokens: int = 4096,
    dtype: Literal["fp32", "bf16"] = "fp32",
    threads: int = 2,
    tensor_parallel: int = 1,
    rounds: int = 8,
    device: Literal["cpu", "cuda"] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Measure and print.

    Args:
        vocab_size: rows of the weight, cut over the ranks.
        hidden_size: width of the stream.
        tokens: of a step.
        dtype: of weight, stream and logits.
        threads: of all ranks together.
        tensor_parallel: ranks that the vocabulary is cut over.
        rounds: times that each has its turn, of one step.
        device: cpu or cuda.
        json_file: where every figure is written.
    """
    shape: dict[str, Any] = {"num_layers": 0, "heads": 1, "batch": 1, "sequence": tokens}
    case = Case(name="output layer", hidden_size=hidden_size, vocab_size=vocab_size, **shape)
    settings = Settings(
        case=case,
        dtype=dtype,
        threads=threads,
        tensor_parallel=tensor_parallel,
        device=device,
        rounds=rounds,
        steps=1,
    )
    record = compare(settings)
    print(told_of(record))
    write_json(json_file, record)


if __name__ == "__main__":
    tyro.cli(main)
