"""What a transformer layer keeps for its backward and sends, counted, beside Korthikanti et al.

The first rank of t tensor-parallel ranks, the others of which are not there, runs the forward and
backward of one micro-batch in bf16: bytes that autograd holds, each memory once and without
parameters, and bytes that collectives send in a ring. A layer is the difference of two layers and
one, in units of s b h, the numbers of the stream. The formulas are those of table 2 of
[arXiv:2205.05198](https://arxiv.org/abs/2205.05198); like these counts they are of 2 bytes a
number, and with masks of dropout, a byte each.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from benchmarks.report import Results
from megatron.config.pretrain import PretrainGPT2Config
from megatron.train.step import count, forward_backward
from tools.layouts.meters import counting, saved_bytes

GRANULARITIES = ("none", "selective", "full")
KEPT = "kept, s b h"


def layer(rank: Rank, flags: list[str], t: int) -> Turn:
    config = steps.read(flags, t)
    mesh = steps.mesh_of(rank, config, t)

    def of_model(layers: int) -> tuple[int, int]:
        """(bytes kept, bytes sent over the tensor axis)."""
        model = replace(config.model, num_layers=layers)
        state = steps.build(replace(config, model=model), mesh)
        batch = steps.batch_of(config, 0)
        kept = saved_bytes(state.model, state.objective, batch, mesh.device)
        counts = count(state, [batch])
        with counting(mesh) as counted:
            forward_backward(state, [batch], counts)
        return kept, counted.sent_bytes["tensor"]

    def turn() -> Figures:
        one, two = of_model(1), of_model(2)
        numbers = config.training.micro_batch_size * config.data.seq_length
        numbers *= config.model.hidden_size
        return {
            "kept": (two[0] - one[0]) / numbers,
            "sent": (two[1] - one[1]) / numbers,
            "formula": formula(config, t),
        }

    return turn


def formula(config: PretrainGPT2Config, t: int) -> float:
    """Bytes that a layer keeps for each number of the stream."""
    model = config.model
    scores = 5 * model.num_attention_heads * config.data.seq_length / model.hidden_size
    if model.recompute_granularity == "full":
        return 2.0
    scores = scores if model.recompute_granularity == "none" else 0
    return (34 + scores) / t if config.parallel.cuts_stream else 10 + (24 + scores) / t


def result(found: Results) -> str:
    pairs = [
        f"{found.median(group, name, KEPT):.1f} instead of {found.median(group, whole, KEPT):.1f} "
        f"({whole} recomputed, {group})"
        for group, name in found.rows
        if "parallel" in name and (whole := name.partition(",")[0]) != "full"
    ]
    return f"With sequence parallelism a layer keeps {', '.join(pairs)} s b h bytes."


def main(
    flags: Flags,
    preset: str = "gpt2_30m",
    vocab_size: int = 8192,
    dropout: tuple[float, ...] = (0.0, 0.1),
    tensor_parallel: tuple[int, ...] = (1, 2, 4),
) -> None:
    """Count.

    Args:
        preset: of pretrain_gpt2.py, a name or a file; layer and micro-batch are read from it.
        vocab_size: of the embedding around the layer.
        dropout: of attention's probabilities and before the residuals.
        tensor_parallel: ranks that a layer is cut over.
    """
    contenders = []
    for p, t in product(dropout, tensor_parallel):
        words = ["--preset", preset, "--vocab-size", str(vocab_size), "--bf16"]
        words += ["--attention-dropout", str(p), "--hidden-dropout", str(p)]
        words += ["--tensor-model-parallel-size", str(t)]
        for cut, recompute in product(([], ["--sequence-parallel"])[: min(t, 2)], GRANULARITIES):
            own = [*words, *cut, "--recompute-granularity", recompute]
            name = f"{recompute}, sequence parallel" if cut else recompute
            common: dict[str, Any] = {"name": name, "group": f"t = {t}, dropout {p:g}"}
            contenders.append(Contender(run=layer, arguments={"flags": own, "t": t}, **common))
    ask(
        Question(
            title="Sequence parallelism and recomputation: what a layer keeps and sends",
            method=__doc__,
            contenders=contenders,
            columns=(
                Column(KEPT, "kept", "{:.1f}"),
                Column("formula, s b h", "formula", "{:.1f}"),
                Column("sent, s b h", "sent", "{:.1f}"),
            ),
            result=result,
            rounds=1,
            warm_up=0,
            together=False,
            packages=("torch",),
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
