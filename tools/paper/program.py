"""Common to the programs in this folder: checks, and stages that are printed, or run to a page."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megatron.errors import UsageError, flag
from tools.command import ROOT
from tools.stages import Stage, own_folder, run_stages, tell_plan


def carry_out(
    stages: Sequence[Stage],
    output: Path,
    owner: str,
    *,
    page: str,
    to_open: str,
    fresh: bool,
    plan_only: bool,
    minutes: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Run the stages and print the page that they write; with plan_only, only print the stages.

    owner: the program, as its user types it. page, to_open: files of `output`. minutes: see
    tell_plan.
    """
    if plan_only:
        tell_plan(stages, minutes)
        return
    start = time.monotonic()
    own_folder(output, stages, fresh=fresh, flag="--output", owner=owner)
    run_stages(stages, output, ROOT)
    print((output / page).read_text())
    print(f"done in {(time.monotonic() - start) / 60:.1f} min: open {output / to_open}")


def check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UsageError(flag(name), count, "1 or more", works=(flag(name), "1"))
