"""What a transformer layer keeps for its backward and sends, counted, beside Korthikanti et al.

    python benchmarks/activations.py --preset FILE [--dropout 0.1] [--json FILE]

The first rank of t tensor-parallel ranks, the others of which are not there, runs the forward and
backward of one micro-batch in bf16: bytes that autograd holds, each memory once, and bytes that
collectives send in a ring. A layer is the difference of two layers and one. The formulas are those
of table 2 of arXiv:2205.05198; like these counts they are of 2 bytes a number.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.planning.memory import GRANULARITIES

from benchmarks.cases import Case
from benchmarks.contenders import alone
from benchmarks.machine import JsonFile, facts, markdown, told, write_json
from benchmarks.own import build, make_batch
from benchmarks.train_step import read_case
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.train.step import count, forward_backward
from tools.layouts.meters import counting, saved_bytes


def of_model(case: Case, mesh: Mesh, settings: dict[str, Any]) -> tuple[int, int]:
    """(bytes kept, bytes sent over the tensor axis)."""
    state = build(case, mesh, "bf16", settings=settings)
    batch = make_batch(case, 0)
    kept = saved_bytes(state.model, state.objective, batch, mesh.device)
    counts = count(state, [batch])
    with counting(mesh) as counted:
        forward_backward(state, [batch], counts)
    return kept, counted.sent_bytes["tensor"]


def of_layer(case: Case, mesh: Mesh, settings: dict[str, Any]) -> tuple[int, int]:
    one, two = (of_model(replace(case, num_layers=n), mesh, settings) for n in (1, 2))
    return two[0] - one[0], two[1] - one[1]


def formula(case: Case, t: int, cut: bool, recompute: str) -> float:
    """Bytes that a layer keeps, with dropout, whose masks are a byte each."""
    size, scores = case.tokens * case.hidden_size, 5 * case.heads * case.sequence / case.hidden_size
    if recompute == "full":
        return 2 * size
    scores = scores if recompute == "none" else 0
    return size * (34 + scores) / t if cut else size * (10 + (24 + scores) / t)


def rows(case: Case, dropout: float) -> Iterator[dict[str, Any]]:
    for t, recompute in product((1, 2, 4), GRANULARITIES):
        settings = {
            "recompute_granularity": recompute,
            "attention_dropout": dropout,
            "hidden_dropout": dropout,
        }
        mesh = serial_mesh() if t == 1 else alone(t, torch.device("cpu"))
        for cut in (False, True)[: min(t, 2)]:
            its_mesh = replace(mesh, stream=mesh.tensor) if cut else mesh
            kept, sent = of_layer(case, its_mesh, settings)
            yield {
                "tensor_parallel": t,
                "sequence_parallel": cut,
                "recompute": recompute,
                "kept_bytes": kept,
                "formula_bytes": formula(case, t, cut, recompute),
                "sent_bytes": sent,
            }
        if t > 1:
            dist.destroy_process_group()


def table(found: list[dict[str, Any]], case: Case) -> str:
    """In s b h, the numbers of the stream."""
    size = case.tokens * case.hidden_size
    return markdown(
        ["t", "sequence parallel", "recomputed", "kept, s b h", "formula, s b h", "sent, s b h"],
        [
            [
                each["tensor_parallel"],
                "yes" if each["sequence_parallel"] else "no",
                each["recompute"],
                *(f"{each[f'{n}_bytes'] / size:.1f}" for n in ("kept", "formula", "sent")),
            ]
            for each in found
        ],
    )


def main(
    preset: Path, vocab_size: int = 8192, dropout: float = 0.1, json_file: JsonFile = None
) -> None:
    """Count and print.

    Args:
        preset: of pretrain_gpt2.py; model and micro-batch are read from it.
        vocab_size: where the preset has none.
        dropout: of attention's probabilities and before the residuals.
        json_file: where every figure is written.
    """
    case = read_case(preset, vocab_size, None, False)
    shape = {"s": case.sequence, "b": case.batch, "h": case.hidden_size, "a": case.heads}
    record: dict[str, Any] = {**facts("torch"), "preset": preset.stem, **shape, "dropout": dropout}
    print(told(record))
    record["layers"] = list(rows(case, dropout))
    print(table(record["layers"], case))
    write_json(json_file, record)


if __name__ == "__main__":
    tyro.cli(main)
