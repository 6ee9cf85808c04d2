"""One training run at several layouts and in transformers: how far their losses drift apart.

    python benchmarks/learning_curves.py [--data-path PREFIX] [--out docs/results]

Every run of ours is the real program, `pretrain_gpt2.py`, under torchrun where it has several
processes. The peer of `transformers_gpt2.py` trains on the same batches from the same initial
weights. Dropout is 0 and all but one run compute in fp32, so that nothing differs but the order in
which sums are rounded. Renews its part of learning_curves.md, .png and .json. Needs
requirements-test.txt, and by default the text of a finished scripts/quickstart.sh.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro
from torch.nn.utils import clip_grad_norm_

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import transformers_gpt2
from benchmarks.curves import gap_table
from benchmarks.curves_page import BF16, LAYOUTS, PEER, SERIAL, about, gaps_to_serial, renew
from benchmarks.program import pretrain, setting_flags, step_lines
from megatron.config.model import GPT2Config
from megatron.config.training import (
    GPT2DataConfig,
    LoggingConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.data.gpt2 import open_splits
from megatron.data.sources import Corpus, open_corpus
from megatron.models.build import build_model
from megatron.parallel.mesh import serial_mesh

MODEL = GPT2Config(
    num_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    max_position_embeddings=128,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
DATA = GPT2DataConfig(split="1,0,0", seq_length=128)
OPTIMIZER = OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_warmup_iters=50)
STEPS, BATCH = 500, 8
TRAINING = TrainingConfig(
    train_iters=STEPS, micro_batch_size=4, global_batch_size=BATCH, eval_iters=0
)
LOGGING = LoggingConfig(log_interval=1)
COMMON = list(setting_flags(MODEL, DATA, OPTIMIZER, TRAINING, LOGGING))
FP32, IN_BF16 = PrecisionConfig(bf16=False), PrecisionConfig(bf16=True)


@dataclass(frozen=True)
class Start:
    """One start of the program."""

    tensor_parallel: int = 1
    data_parallel: int = 1
    flags: tuple[str, ...] = ()
    precision: PrecisionConfig = FP32


OURS = {
    SERIAL: (Start(),),
    "t = 2": (Start(2),),
    "t = 4": (Start(4),),
    "t = 2, d = 2": (Start(2, 2),),
    "t = 2, resumed as d = 2": (
        Start(2, flags=("--exit-interval", str(STEPS // 2))),
        Start(data_parallel=2),
    ),
    BF16: (Start(precision=IN_BF16),),
}
EXACT_PEER = f"{PEER}, exact norm"
CLIPS = {PEER: clip_grad_norm_, EXACT_PEER: transformers_gpt2.clip_by_exact_norm}


@dataclass(frozen=True)
class Curve:
    """Of every step: mean training loss before the update, and learning rate."""

    losses: list[float]
    rates: list[float]


def run(start: Start, data_path: Path, save: str) -> None:
    """The program, to its end; it goes on from what is in `save`, if anything is."""
    size = ["--tensor-model-parallel-size", str(start.tensor_parallel)]
    where = ["--data-path", str(data_path), "--save", save, "--load", save]
    processes = start.tensor_parallel * start.data_parallel
    flags = [*COMMON, *setting_flags(start.precision), *start.flags]
    pretrain([*flags, *size, *where], processes)


def our_curve(starts: tuple[Start, ...], data_path: Path) -> Curve:
    with tempfile.TemporaryDirectory() as save:
        for start in starts:
            run(start, data_path, save)
        lines = step_lines(Path(save, "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return Curve([line["loss"] for line in lines], [line["lr"] for line in lines])


def peer_curve(name: str, corpus: Corpus) -> Curve:
    """Our initial weights and batches in the loop of transformers."""
    seed, vocab_size = TRAINING.seed, corpus.vocab_size
    data, _, _ = open_splits(corpus, split=DATA.split, seq_length=DATA.seq_length, seed=seed)
    assert data is not None
    batches = (data.batch(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS))
    model = build_model(MODEL, serial_mesh(), vocab_size, seed=seed, dtype=torch.float32)
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
    record = about(corpus, STEPS * BATCH * DATA.seq_length, transformers=transformers.__version__)
    curves = all_curves(data_path.resolve(), corpus)
    losses = {name: curve.losses for name, curve in curves.items()}
    print(gap_table(gaps_to_serial(losses)))
    rounded = {name: [round(loss, 10) for loss in each] for name, each in losses.items()}
    renew(out, LAYOUTS, record | {"flags": " ".join(COMMON), "losses": rounded})


if __name__ == "__main__":
    tyro.cli(learning_curves)
