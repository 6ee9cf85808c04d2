"""docs/results/learning_curves: one page and one picture of two benchmarks.

`learning_curves.json` holds what the last run of each has left, and everything else follows from
it, so that one is renewed without the other.
"""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import precision_report
from benchmarks.curves import Column, Curves, draw, gap, gap_table, largest
from benchmarks.machine import cpu_name
from megatron.data.sources import Corpus

Record = dict[str, Any]
LAYOUTS, PRECISION = "layouts", "precision"
SERIAL, BF16, PEER = "serial", "bf16", "transformers"


def about(corpus: Corpus, seen: int, **versions: str) -> Record:
    """What a part says of where it runs and what it reads, asked before it starts.

    seen: tokens that a run reads.
    """
    versions = {"Python": platform.python_version(), "torch": torch.__version__, **versions}
    idle = "otherwise idle" if os.getloadavg()[0] < 0.5 else "not idle"
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "machine": f"{os.cpu_count()} cores, {cpu_name()}, {idle}",
        "tokens": sum(source.data.num_tokens for source in corpus.sources),
        "vocab_size": corpus.vocab_size,
        "seen": seen,
    }


def renew(out: Path, part: str, record: Record) -> None:
    """Replace one part of what `out` holds, and write page and picture anew."""
    file = out / "learning_curves.json"
    parts = json.loads(file.read_text()) if file.exists() else {}
    parts[part] = record
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(parts) + "\n")
    write_page(out, parts)


def write_page(out: Path, parts: Mapping[str, Record]) -> None:
    columns: list[Column] = []
    sections: list[str] = []
    result = ""
    if LAYOUTS in parts:
        losses = parts[LAYOUTS]["losses"]
        (value, step), layout = furthest(losses)
        result = RESULT.format(layout=layout, gap=value, step=step, steps=len(losses[SERIAL]))
        columns.append(layout_column(parts[LAYOUTS]["losses"]))
        sections.append(layout_section(parts[LAYOUTS]))
    if PRECISION in parts:
        runs = [precision_report.Run(**each) for each in parts[PRECISION]["runs"]]
        columns += precision_report.columns(runs)
        sections.append(precision_report.section(parts[PRECISION], runs))
    draw(columns, out / "learning_curves.png")
    (out / "learning_curves.md").write_text(
        "\n".join([HEAD.format(result=result), *sections, FOOT])
    )


def gaps_to_serial(losses: Curves) -> dict[str, list[float]]:
    """Of the layouts: the gap to the serial run."""
    return {name: gap(each, losses[SERIAL]) for name, each in losses.items() if name != SERIAL}


def furthest(losses: Curves) -> tuple[tuple[float, int], str]:
    """((largest gap, its step), name) of the layout in fp32 that leaves the serial run furthest."""
    gaps = gaps_to_serial(losses)
    ours = [name for name in gaps if name != BF16 and not name.startswith(PEER)]
    return max((largest(gaps[name]), name) for name in ours)


def layout_column(losses: Curves) -> Column:
    return Column("layouts", losses, gaps_to_serial(losses), "gap to the serial run")


def layout_section(record: Record) -> str:
    """Markdown."""
    losses, gaps = record["losses"], gaps_to_serial(record["losses"])
    (value, step), layout = furthest(losses)
    peer_gap, peer_step = largest(gaps[PEER])
    return LAYOUT_SECTION.format(
        **record,
        steps=len(losses[SERIAL]),
        first=losses[SERIAL][0],
        last=losses[SERIAL][-1],
        layout=layout,
        gap=value,
        step=step,
        peer_gap=peer_gap,
        peer_step=peer_step,
        table=gap_table(gaps),
    )


RESULT = """\
**In fp32 no layout's loss leaves the serial run's by more than {gap:.1e} in {steps} steps
("{layout}", step {step}).**

"""

HEAD = """\
# Learning curves

{result}\
Training losses that should agree, at every step: of one model trained by every route, and of one
trained in every number format.

![losses of all runs, and the gap of each to its reference](learning_curves.png)

In the picture the left column is of the first section, the others are of the second; a gap is the
absolute difference of the training losses of one step. Either section is renewed by its own
command; what the other measured stays as it is.
"""

LAYOUT_SECTION = """\
## Layouts

One training run of {steps} steps by every route: serial; cut over t = 2 and t = 4 tensor-parallel
ranks; over 2 x 2 ranks with data parallelism d = 2; stopped in the middle and resumed at another
layout; in bf16; and by an independent loop of `transformers.GPT2LMHeadModel`,
`torch.optim.AdamW`, `clip_grad_norm_` and torch's own schedulers. All runs of ours are the program
itself, `pretrain_gpt2.py`. Same initial weights, same global batches, no dropout; fp32 but for the
one in bf16.

**The serial loss falls from {first:.3f} to {last:.3f}. The layout in fp32 that leaves it furthest
is "{layout}": by {gap:.1e}, at step {step}. The independent loop leaves it by {peer_gap:.1e},
at step {peer_step}.**

{table}

The fp32 layouts differ in nothing but the order in which sums are rounded; near these losses two
neighbouring fp32 numbers are 4.8e-07 apart.

The independent loop differs by more because of one number, the gradient norm that clipping divides
by. On the CPU torch's fp32 norm of a long tensor drops digits (it is too small by 1e-5 over 10^6
elements and by 1e-2 over 10^8), and `clip_grad_norm_` takes it tensor by tensor; this project does
not sum so many squares in fp32. The last row is the same loop with the squares summed in fp64.

The learning rates of all runs, torch's schedulers included, agree to a relative 1e-9. bf16 keeps 8
significant bits of each activation, and its gap is that rounding.

How it was run:

    python benchmarks/learning_curves.py

{versions};
{machine}; one thread a process. On a GPU: not yet run.
Text: that of `bash scripts/quickstart.sh`, {tokens:,} tokens of a vocabulary of {vocab_size:,}, of
which {seen:,} are read. Settings, all else at its default; to these come `--no-bf16` or `--bf16`,
and `--tensor-model-parallel-size`:

    {flags}
"""

FOOT = "`learning_curves.json` has the loss of every run at every step.\n"
