"""Whole training steps of one GPT-2 by this project and by what people would use instead.

    python benchmarks/train_step.py --preset FILE --dtype fp32|bf16 --threads N
        [--tensor-parallel N] [--contenders NAME ...] [--megatron-core PYTHON]
        [--starts N] [--json FILE] [--picture FILE] [--profile FOLDER]

A step is forward, backward, reduction, clipping by the global norm and fused AdamW, without
dropout, from the same weights on the same batches; losses of the first steps are compared before
anything is timed. Contenders run on processes of their own and take turns, and so does the floor:
the step's matrix products alone, each in the layout that is fastest on this machine. Processes
that run the same code differ in speed: --starts makes new ones of all and pools their rounds. On a
GPU this project compiles its layers, as its users' runs do; one that does not fit in memory beside
the others drops out.
"""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import FLOOR, NAMES, Case
from benchmarks.comparison import (
    ROOT,
    Result,
    Settings,
    ask_all,
    compare_losses,
    measure,
    pool,
    quantiles,
    started,
    usual_contenders,
)
from benchmarks.figures import HFU, MFU, draw, figures, gpu_peak, table, write_profiles
from benchmarks.machine import JsonFile, facts, told, write_json
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config

__all__ = ["ROOT", "Result", "Settings", "measure", "quantiles", "read_case", "started"]


def read_case(
    preset: Path, vocab_size: int, batch: int | None, checkpoint_activations: bool
) -> Case:
    """The model of a preset for pretrain_gpt2.py, and its micro-batch unless one is given."""
    config = parse(PretrainGPT2Config, ["--preset", str(preset)], {})
    model, optimizer = config.model, config.optimizer
    return Case(
        name=preset.stem,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        vocab_size=model.vocab_size or vocab_size,
        batch=batch or config.training.micro_batch_size,
        sequence=config.data.seq_length,
        divisible_by=model.make_vocab_size_divisible_by,
        checkpoint_activations=checkpoint_activations,
        epsilon=model.layernorm_epsilon,
        weight_decay=optimizer.weight_decay,
        betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
    )


def compare(
    settings: Settings, names: list[str], starts: int, profile: Path | None, picture: Path | None
) -> dict[str, Any]:
    """Run all of them, print, and return what the JSON file holds."""
    case = settings.case
    gpu, peak = gpu_peak(settings.device)
    record: dict[str, Any] = {
        **facts("torch", "transformers"),
        **({"gpu": gpu, "peak": peak, "mfu": MFU, "hfu": HFU} if gpu else {}),
        **{name: getattr(settings, name) for name in ("dtype", "threads", "tensor_parallel")},
        **{name: getattr(settings, name) for name in ("stub_communication", "rounds", "steps")},
        "starts": starts,
        "case": json.loads(case.written()),
    }
    results: list[dict[str, Result]] = []
    for start in range(starts):
        with started(settings, [*names, FLOOR]) as found:
            chosen = ask_all(found, [FLOOR], "choose").get(FLOOR)
            products = chosen and chosen[0]["products"]
            record["loss_difference"] = compare_losses(settings, found)
            results.append(measure(settings, found))
            if profile is not None and start == starts - 1:
                communication = write_profiles(profile, found, settings.steps)
    print(told(record), flush=True)
    pooled = pool(results)
    record["products"] = products
    record["contenders"] = figures(settings, pooled, peak)
    record["seconds"] = {name: result.wall for name, result in pooled.items()}
    record["notes"] = {name: each.notes for name, each in pooled.items() if each.notes}
    record["out_of_memory"] = [name for name in names if name not in pooled]
    if profile is not None:
        record["communication"] = communication
    print(table(record), flush=True)
    for name, notes in record["notes"].items():
        print(f"\n{name}: {' '.join(notes)}", flush=True)
    if picture is not None and record["contenders"]:
        about = f"{case.name}, {settings.dtype}, t = {settings.tensor_parallel}"
        draw(picture, case, about, record["contenders"])
    return record


def train_step(
    preset: Path,
    dtype: Literal["fp32", "bf16"] = "fp32",
    threads: int = 2,
    tensor_parallel: int = 1,
    vocab_size: int = 50304,
    micro_batch_size: int | None = None,
    checkpoint_activations: bool = False,
    contenders: tuple[str, ...] = (),
    megatron_core: Path | None = None,
    stub_communication: bool = False,
    starts: int = 1,
    rounds: int = 8,
    steps: int = 3,
    device: Literal["cpu", "cuda"] = "cpu",
    json_file: JsonFile = None,
    picture: Path | None = None,
    profile: Path | None = None,
) -> None:
    """Compare and print.

    Args:
        preset: of pretrain_gpt2.py; model and micro-batch are read from it.
        dtype: of weights and activations; the peers compute under autocast.
        threads: of all ranks of a contender together.
        tensor_parallel: ranks that the model is cut over.
        vocab_size: where the preset has none; for the peers it is best a multiple of 128.
        micro_batch_size: samples of a step, if not the preset's.
        checkpoint_activations: recompute each layer in the backward pass, all contenders that can.
        contenders: their names; all that there are but variants of this project's if not given.
        megatron_core: a Python in whose environment megatron-core is installed.
        stub_communication: run one rank of --tensor-parallel, whose collectives move nothing.
        starts: times that new processes are made of every contender.
        rounds: times that every contender has its turn, of each start.
        steps: of a turn.
        device: cpu or cuda.
        json_file: where every figure is written.
        picture: PNG of the comparison.
        profile: folder for traces, and tables of where the time goes.
    """
    settings = Settings(
        case=read_case(preset, vocab_size, micro_batch_size, checkpoint_activations),
        dtype=dtype,
        threads=threads,
        tensor_parallel=tensor_parallel,
        device=device,
        rounds=rounds,
        steps=steps,
        stub_communication=stub_communication,
        megatron_core=megatron_core,
    )
    if unknown := set(contenders) - set(NAMES):
        raise SystemExit(f"error: no such contender: {sorted(unknown)[0]}; there are {NAMES}")
    chosen = list(contenders) or usual_contenders(settings)
    write_json(json_file, compare(settings, chosen, starts, profile, picture))


if __name__ == "__main__":
    tyro.cli(train_step)
