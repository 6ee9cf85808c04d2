"""Memory of a rank by sequence length, with 1, 2 and 4 context-parallel ranks.

    python tools/experiments/context_memory.py
    python tools/experiments/context_memory.py --preset gpt2_355m --lengths 1024 2048 4096

Peak bytes of a GPU in a training step of one sample, as tools/plan.py counts them: in bf16 with
fp32 masters, without dropout and recomputation.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.config.checks import positive
from megatron.config.parse import parse
from megatron.data.files import write_atomically
from tools.experiments import results, runner
from tools.experiments.runner import ROOT
from tools.report.figures import SERIES, Axes, picture
from tools.report.sections import Page, Section, Table

PROGRAM = "tools/experiments/context_memory.py"
LAYOUTS = ((1, "a2a"), (2, "a2a"), (2, "p2p"), (4, "a2a"), (4, "p2p"))
FLAGS = """--bf16 --micro-batch-size 1 --train-iters 1 --attention-dropout 0 --hidden-dropout 0
--recompute-granularity none"""
Memory = Mapping[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    preset: str = "gpt2_355m"
    """Preset of a GPT-2."""
    vocab_size: int = 50257
    """Tokens of the vocabulary."""
    lengths: tuple[int, ...] = tuple(2**n for n in range(10, 18))
    """Tokens of a sample, each a multiple of 8."""
    output: Path = ROOT / "runs" / "context_memory"
    """Folder for the result and the picture."""

    def __post_init__(self) -> None:
        positive(self, "vocab_size")


def memory(settings: Settings) -> Memory:
    """{layout: peak GiB of a rank at each length}."""
    from megatron.config.pretrain import PretrainGPT2Config
    from tools.plan.trace import Step

    found: dict[str, list[float]] = {}
    for ranks, kind in LAYOUTS:
        name, parallel = "one rank", ""
        if ranks > 1:
            name = f"{ranks} ranks, {kind}"
            parallel = f" --context-parallel-size {ranks} --cp-comm-type {kind}"
        found[name] = []
        for length in settings.lengths:
            words = f"--preset {settings.preset} --vocab-size {settings.vocab_size} {FLAGS}"
            words += f" --seq-length {length} --max-position-embeddings {length}{parallel}"
            config = parse(PretrainGPT2Config, words.split(), {})
            config.check(ranks)
            found[name].append(Step(config, ranks, "bf16").memory["total"] / 2**30)
    return found


def draw(axes: Axes, lengths: tuple[int, ...], found: Memory) -> None:
    for colour, (name, values) in zip(SERIES, found.items(), strict=False):
        axes.plot(lengths, values, "o--" if "p2p" in name else "o-", color=colour, label=name)
    axes.set(xlabel="tokens of a sample", ylabel="GiB of a rank, at most")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{each:,}" for each in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid()
    axes.legend()


def report(settings: Settings) -> str:
    """Write context_memory.json, .md, .html and .png; returns the text."""
    found, lengths = memory(settings), settings.lengths
    rows = [(name, *(f"{value:.1f}" for value in values)) for name, values in found.items()]
    one, four = found["one rank"][-1], found["4 ranks, a2a"][-1]
    page = Page(
        "Memory of a rank by sequence length",
        f"At {lengths[-1]:,} tokens one rank takes {one:.1f} GiB, each of 4 ranks {four:.1f} GiB.",
        [Section("GiB of a rank", [Table(("", *(f"{each:,}" for each in lengths)), rows)])],
    )
    content = picture(lambda axes: draw(axes, lengths, found), "png", size=(8, 4.5))
    write_atomically(settings.output / "context_memory.png", content)
    return results.write_measured(settings.output, "context_memory", page, found, PROGRAM)


def run(settings: Settings) -> None:
    print(report(settings))


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
