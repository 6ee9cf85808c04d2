"""One training run in fp32, bf16 and fp16: whether the narrow formats follow the fp32 loss.

    python benchmarks/precision_curves.py [--data-path PREFIX] [--out docs/results] [--cores N]

At t = 1 and t = 2 tensor-parallel processes, without dropout and with; every run is the real
program, `pretrain_gpt2.py`. Ends with status 1 where a format leaves fp32 by more than its
tolerance. Renews its part of learning_curves.md, .png and .json. The metrics of finished runs are
kept in --work until all are done, so the same command goes on after an interruption. Needs
requirements-test.txt, and by default the text of a finished scripts/quickstart.sh.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from zlib import crc32

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.curves_page import PRECISION, about, renew
from benchmarks.precision_report import Followed, Run, followed, scaling, table
from benchmarks.program import pretrain, setting_flags, step_lines
from megatron.config.model import GPT2Config
from megatron.config.training import (
    GPT2DataConfig,
    LoggingConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.data.sources import open_corpus

# Small, because CPUs multiply fp16 matrices some fifty times slower than fp32 ones.
MODEL = GPT2Config(num_layers=2, hidden_size=64, num_attention_heads=2, max_position_embeddings=64)
DATA = GPT2DataConfig(split="1,0,0", seq_length=64)
# At higher rates, or the default of 0.999, gradients of this small model spike on some texts, and
# any rounding grows there.
OPTIMIZER = OptimizerConfig(lr=5e-4, min_lr=1e-4, lr_warmup_iters=50, adam_beta2=0.95)
BATCH = 8
TRAINING = TrainingConfig(
    train_iters=500, micro_batch_size=4, global_batch_size=BATCH, eval_iters=0
)
LOGGING = LoggingConfig(log_interval=1)

PRECISIONS = {
    "fp32": PrecisionConfig(bf16=False),
    "bf16": PrecisionConfig(bf16=True),
    "fp16": PrecisionConfig(fp16=True),
}
# (format, t, dropout), in the order of the page.
CASES = [(each, t, dropout) for dropout in (0.0, 0.1) for each in PRECISIONS for t in (1, 2)]
COMMON = list(setting_flags(MODEL, DATA, OPTIMIZER, TRAINING, LOGGING))


def flags(precision: str, tensor_parallel: int, dropout: float) -> list[str]:
    dropouts = ["--attention-dropout", str(dropout), "--hidden-dropout", str(dropout)]
    layout = ["--tensor-model-parallel-size", str(tensor_parallel)]
    return [*COMMON, *setting_flags(PRECISIONS[precision]), *dropouts, *layout]


def run(case: tuple[str, int, float], data_path: Path, work: Path) -> Run:
    """The program, to its end, unless `work` holds its metrics from an earlier start of this."""
    precision, tensor_parallel, dropout = case
    arguments = [*flags(*case), "--data-path", str(data_path)]
    key = crc32(" ".join(arguments).encode())  # so that other settings are another run
    file = work / f"{precision}_t{tensor_parallel}_dropout{dropout:g}_{key:08x}" / "metrics.jsonl"
    steps = list(range(1, TRAINING.train_iters + 1))
    if [line["step"] for line in step_lines(file)] != steps:
        pretrain([*arguments, "--metrics-file", str(file)], processes=tensor_parallel)
    lines = step_lines(file)
    assert [line["step"] for line in lines] == steps
    last = lines[-1]
    done = Run(
        precision=precision,
        tensor_parallel=tensor_parallel,
        dropout=dropout,
        losses=[line["loss"] for line in lines],
        skipped_steps=last.get("skipped_steps"),
        loss_scale=last.get("loss_scale"),
    )
    print(f"{done.name}, dropout {dropout:g}: {done.losses[-1]:.4f} {scaling(done)}", flush=True)
    return done


def run_all(data_path: Path, work: Path, cores: int) -> list[Run]:
    """As many runs at a time as there are cores for their processes."""
    runs = {}
    for size in (1, 2):
        cases = [case for case in CASES if case[1] == size]
        with ThreadPoolExecutor(max(1, cores // size)) as pool:
            done = pool.map(lambda case: run(case, data_path, work), cases)
            runs |= dict(zip(cases, done, strict=True))
    return [runs[case] for case in CASES]


def precision_curves(
    data_path: Path = Path("runs/quickstart/data/train_text_document"),
    out: Path = Path("docs/results"),
    work: Path = Path("runs/precision_curves"),
    cores: int = os.cpu_count() or 1,
) -> None:
    """Train all runs, compare and draw.

    Args:
        data_path: prefix of a data set that tools/preprocess_data.py has written.
        out: folder of the report, the picture and the numbers.
        work: keeps the metrics of finished runs; removed when all are done.
        cores: processes at a time.
    """
    corpus = open_corpus([str(data_path)], tokenizer=None)
    seen = TRAINING.train_iters * BATCH * DATA.seq_length
    record = about(corpus, seen) | {"flags": " ".join(COMMON)}
    runs = run_all(data_path.resolve(), work.resolve(), cores)
    record["runs"] = [asdict(rounded(each)) for each in runs]
    renew(out, PRECISION, record)
    shutil.rmtree(work)
    check(followed(runs))


def check(pairs: Sequence[Followed]) -> None:
    """Show the gaps; SystemExit names the runs outside their tolerance."""
    print(table(pairs))
    outside = [each.run for each in pairs if not each.is_within()]
    if outside:
        names = [f"{run.name}, dropout {run.dropout:g}" for run in outside]
        raise SystemExit(f"outside the tolerance: {'; '.join(names)}")


def rounded(done: Run) -> Run:
    return replace(done, losses=[round(loss, 10) for loss in done.losses])


if __name__ == "__main__":
    tyro.cli(precision_curves)
