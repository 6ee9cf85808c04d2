"""What a training run takes, before it is started: memory, communication, time. No GPU, no torch.

    python tools/plan.py --preset scripts/presets/gpt2_scaling_8.3b.toml --gpus 512 --hardware dgx2h
    python tools/plan.py figure5 --hardware dgx2h    # section 5.1 of the paper, predicted
    python tools/plan.py --measure here.toml         # describe this machine; under torchrun, its
                                                     # all-reduces too

Every flag of pretrain_gpt2.py and pretrain_bert.py may follow the preset. Formulas and constants
are in tools/planning/ and scripts/hardware/.

Exit status: 0 the plan fits, 1 it does not fit in the memory of a device, 2 a wrong argument.
"""

import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.checks import UsageError
from megatron.config.parse import parse, user_errors
from megatron.config.training import ParallelConfig
from tools.planning import figure5, record, search
from tools.planning.anchor import find_hardware
from tools.planning.hardware import known_hardware
from tools.planning.settings import DEFAULT_HARDWARE, MeasureConfig, StudyConfig, parse_plan
from tools.planning.shape import shape_of


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit status."""
    with user_errors(environ):
        if "figure5" in arguments[:1]:
            study(parse(StudyConfig, arguments[1:], environ))
        elif any(word.partition("=")[0] == "--measure" for word in arguments):
            measure(parse(MeasureConfig, arguments, environ), environ)
        else:
            if {"--help", "-h"} & set(arguments):
                print(__doc__)
            return 0 if plan(arguments, environ) else 1
    return 0


def plan(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Print what the settings take, and with --search which layouts fit; whether these fit."""
    config, question = parse_plan(arguments, environ)
    search.check(config, question.gpus)
    hardware = find_hardware(question.hardware or DEFAULT_HARDWARE)
    if question.hardware is None:
        warnings.warn(
            f"no --hardware: planned for {DEFAULT_HARDWARE}, the paper's machine of 2018; others "
            f"are {', '.join(known_hardware())}, or a file that --measure wrote",
            stacklevel=2,
        )
    precision = config.precision.name or hardware.default_precision
    shape = shape_of(config, question.gpus, precision)
    planned = record.record(shape, hardware, precision)
    print(record.text(planned))
    if question.search or not planned["fits"]:
        planned["layouts"] = search.search(config, question.gpus, hardware, precision)
        print(f"\n{record.found_text(planned['layouts'])}")
    _write(question.json, planned)
    if question.picture is not None:
        from tools.planning.picture import draw_plan

        draw_plan(question.picture, planned)
    return bool(planned["fits"])


def study(settings: StudyConfig) -> None:
    hardware = find_hardware(settings.hardware)
    if hardware.anchor is None:
        raise UsageError(
            "--hardware",
            settings.hardware,
            "hardware with an anchor",
            works=("--hardware", "dgx2h"),
        )
    found = figure5.study(hardware)
    print(figure5.text(found))
    _write(settings.json, found)
    if settings.picture is not None:
        from tools.planning.picture import draw_study

        draw_study(settings.picture, found)


def measure(settings: MeasureConfig, environ: Mapping[str, str]) -> None:
    from megatron.config.launch import world_size
    from megatron.train.launch import launch
    from tools.planning import measuring

    everyone = ParallelConfig(tensor_model_parallel_size=world_size(environ))
    with launch(everyone, environ) as mesh:
        figures = measuring.measure(mesh)
        if figures is not None:
            measuring.write(settings.measure, figures, mesh.device)
            print(measuring.told(figures))


def _write(file: Path | None, found: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
