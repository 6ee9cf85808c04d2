"""One training run at several layouts and in transformers: how far their losses drift apart.

    python benchmarks/learning_curves.py [--data-path PREFIX] [--out docs/results]

Every run of ours is the real program, `pretrain_gpt2.py`, under torchrun where it has several
processes. The peer of `transformers_gpt2.py` trains on the same batches from the same initial
weights. Dropout is 0 and all but one run compute in fp32, so that nothing differs but the order in
which sums are rounded. Leaves learning_curves.md, .png and .json. Needs requirements-test.txt, and
by default the text of a finished scripts/quickstart.sh.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import torch
import transformers
import tyro
from torch.nn.utils import clip_grad_norm_

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import transformers_gpt2
from benchmarks.curves import Curves, draw, gap_table, largest
from benchmarks.parallel_layers import cpu_name
from megatron.config.checks import flag
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.training import TrainingConfig
from megatron.data.gpt2 import open_splits
from megatron.data.sources import Corpus, open_corpus
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import build_model

ROOT = Path(__file__).resolve().parents[1]

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    max_position_embeddings=128,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
DATA = DataConfig(split="1,0,0", seq_length=128)
OPTIMIZER = OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_warmup_iters=50)
STEPS, BATCH = 500, 8
TRAINING = TrainingConfig(
    train_iters=STEPS, micro_batch_size=4, global_batch_size=BATCH, log_interval=1, eval_iters=0
)


@dataclass(frozen=True)
class Start:
    """One start of the program."""

    tensor_parallel: int = 1
    data_parallel: int = 1
    flags: tuple[str, ...] = ()


SERIAL, BF16 = "serial", "bf16"
OURS = {
    SERIAL: (Start(),),
    "t = 2": (Start(2),),
    "t = 4": (Start(4),),
    "t = 2, d = 2": (Start(2, 2),),
    "t = 2, resumed as d = 2": (
        Start(2, flags=("--exit-interval", str(STEPS // 2))),
        Start(data_parallel=2),
    ),
    BF16: (Start(flags=("--bf16",)),),
}
PEER, EXACT_PEER = "transformers", "transformers, exact norm"
CLIPS = {PEER: clip_grad_norm_, EXACT_PEER: transformers_gpt2.clip_by_exact_norm}


@dataclass(frozen=True)
class Curve:
    """Of every step: mean training loss before the update, and learning rate."""

    losses: list[float]
    rates: list[float]


def setting_flags() -> Iterator[str]:
    """The settings above that are not the program's defaults, as arguments."""
    for section in (MODEL, DATA, OPTIMIZER, TRAINING):
        for field in fields(section):
            value = getattr(section, field.name)
            if field.default is MISSING or value != field.default:
                yield from (flag(field.name), str(value))


def run(start: Start, data_path: Path, save: str) -> None:
    """The program, to its end; it goes on from what is in `save`, if anything is."""
    processes = start.tensor_parallel * start.data_parallel
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), "pretrain_gpt2.py"]
    command += [*setting_flags(), *start.flags, "--data-path", str(data_path)]
    command += ["--tensor-model-parallel-size", str(start.tensor_parallel)]
    command += ["--save", save, "--load", save]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=True)


def our_curve(starts: tuple[Start, ...], data_path: Path) -> Curve:
    with tempfile.TemporaryDirectory() as save:
        for start in starts:
            run(start, data_path, save)
        text = Path(save, "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return Curve([line["loss"] for line in lines], [line["lr"] for line in lines])


def peer_curve(name: str, corpus: Corpus) -> Curve:
    """Our initial weights and batches in the loop of transformers."""
    seed, vocab_size = TRAINING.seed, corpus.vocab_size
    data, _, _ = open_splits(corpus, split=DATA.split, seq_length=DATA.seq_length, seed=seed)
    assert data is not None
    batches = (data.batch(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS))
    model, _ = build_model(MODEL, serial_mesh(), vocab_size, seed=seed, dtype=torch.float32)
    weights = {key: each.detach() for key, each in model.named_parameters()}
    weights["word_embedding.weight"] = weights["word_embedding.weight"][:vocab_size]  # no padding
    peer = transformers_gpt2.build(MODEL, vocab_size, weights)
    steps = transformers_gpt2.train(peer, OPTIMIZER, STEPS, batches, CLIPS[name])
    losses, rates = zip(*steps, strict=True)
    return Curve(list(losses), list(rates))


def all_curves(data_path: Path, corpus: Corpus) -> dict[str, Curve]:
    curves = {}
    for name, starts in OURS.items():
        print(name, flush=True)
        curves[name] = our_curve(starts, data_path)
    torch.set_num_threads(1)
    for name in CLIPS:
        print(name, flush=True)
        curves[name] = peer_curve(name, corpus)
    for step, rates in enumerate(zip(*(each.rates for each in curves.values()), strict=True), 1):
        assert max(rates) / min(rates) - 1 < 1e-9, f"learning rates of step {step}: {rates}"
    return curves


def gaps_to_serial(losses: Curves) -> dict[str, list[float]]:
    """Absolute difference to the loss of the serial run at the same step."""
    return {
        name: [abs(a - b) for a, b in zip(loss, losses[SERIAL], strict=True)]
        for name, loss in losses.items()
        if name != SERIAL
    }


REPORT = """\
# Learning curves

One training run of {steps} steps by every route: serial; cut over t = 2 and t = 4 tensor-parallel
ranks; over 2 x 2 ranks with data parallelism d = 2; stopped in the middle and resumed at another
layout; in bf16; and by an independent loop of `transformers.GPT2LMHeadModel`,
`torch.optim.AdamW`, `clip_grad_norm_` and torch's own schedulers. All runs of ours are the program
itself, `pretrain_gpt2.py`. Same initial weights, same global batches, no dropout; fp32 but for the
one in bf16.

**The serial loss falls from {first:.3f} to {last:.3f}. The layout in fp32 that leaves it furthest
is "{layout}": by {gap:.1e}, at step {step}. The independent loop leaves it by {peer_gap:.1e},
at step {peer_step}.**

![loss of all runs, and the gap of each to the serial one](learning_curves.png)

Gap: absolute difference to the serial run's training loss at the same step.

{table}

## What this shows

The fp32 layouts differ in nothing but the order in which sums are rounded; near these losses two
neighbouring fp32 numbers are 4.8e-07 apart.

The independent loop differs by more because of one number, the gradient norm that clipping divides
by. On the CPU torch's fp32 norm of a long tensor drops digits (it is too small by 1e-5 over 10^6
elements and by 1e-2 over 10^8), and `clip_grad_norm_` takes it tensor by tensor; this project does
not sum so many squares in fp32. The last row is the same loop with the squares summed in fp64.

The learning rates of all runs, torch's schedulers included, agree to a relative 1e-9. bf16 keeps 8
significant bits of each activation, and its gap is that rounding.

## How it was run

    python benchmarks/learning_curves.py

{versions};
{machine}; one thread a process. On a GPU: not yet run.
Text: that of `bash scripts/quickstart.sh`, {tokens:,} tokens of a vocabulary of {vocab_size:,}, of
which {seen:,} are read. Settings, all else at its default:

    {flags}

`learning_curves.json` has the loss of every run at every step.
"""


def report(losses: Curves, corpus: Corpus) -> str:
    """Markdown."""
    gaps = gaps_to_serial(losses)
    (gap, step), layout = max((largest(gaps[name]), name) for name in {*OURS} - {SERIAL, BF16})
    peer_gap, peer_step = largest(gaps[PEER])
    return REPORT.format(
        steps=STEPS,
        first=losses[SERIAL][0],
        last=losses[SERIAL][-1],
        layout=layout,
        gap=gap,
        step=step,
        peer_gap=peer_gap,
        peer_step=peer_step,
        table=gap_table(gaps),
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
        machine=f"{os.cpu_count()} cores, {cpu_name()}",
        tokens=sum(len(source.data.tokens) for source in corpus.sources),
        vocab_size=corpus.vocab_size,
        seen=STEPS * BATCH * DATA.seq_length,
        flags=" ".join(setting_flags()),
    )


def versions() -> dict[str, str]:
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def learning_curves(
    data_path: Path = Path("runs/quickstart/data/train_text_document"),
    out: Path = Path("docs/results"),
) -> None:
    """Train all runs, compare and draw.

    Args:
        data_path: prefix of a data set that tools/preprocess_data.py has written.
        out: folder of the report, the picture and the numbers.
    """
    corpus = open_corpus([str(data_path)], tokenizer=None)
    curves = all_curves(data_path.resolve(), corpus)
    losses = {name: curve.losses for name, curve in curves.items()}
    gaps = gaps_to_serial(losses)
    print(gap_table(gaps))
    out.mkdir(parents=True, exist_ok=True)
    draw(losses, gaps, out / "learning_curves.png")
    (out / "learning_curves.md").write_text(report(losses, corpus))
    rounded = {name: [round(loss, 7) for loss in each] for name, each in losses.items()}
    record = {"versions": versions(), "flags": list(setting_flags()), "losses": rounded}
    (out / "learning_curves.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    tyro.cli(learning_curves)
