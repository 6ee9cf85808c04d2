"""The usual stage: every unit of the input becomes a shard, and has its own counts."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from megatron.data.files import atomic_writer
from megatron.data.json_lines import WORK
from tools.corpus.program import say
from tools.corpus.records import Funnel
from tools.corpus.settings import StepSettings
from tools.corpus.shards import ShardWriter, Unit, write_shard
from tools.corpus.step import StepRun
from tools.corpus.tasks import Task

REJECTED_SHOWN = 3

UnitFunction = Callable[[Unit, Any, Funnel, ShardWriter], dict[str, int] | None]


def map_units(run: StepRun, function: UnitFunction) -> tuple[Funnel, list[Any], Counter[str]]:
    """A stage in which every unit becomes a shard: (funnel, facts of the shards, counters).

    function(unit, settings, funnel, shard) writes the shard, counts in the funnel and may
    return counters, which are summed.
    """
    tasks = [
        Task(unit.name, (function, unit, run.settings), unit.stop - unit.start)
        for unit in run.units
    ]
    results = run.stage("shards", map_unit, tasks)
    counters = Counter[str]()
    for result in results:
        counters.update(result["counters"])
    return sum_funnels(results), [result["shard"] for result in results], counters


def map_unit(function: UnitFunction, unit: Unit, settings: StepSettings) -> dict[str, Any]:
    """One task of map_units."""
    funnel = Funnel()
    with write_shard(settings.output, f"part-{unit.name}", settings.compress) as shard:
        counters = function(unit, settings, funnel, shard)
    keep_rejected(settings, unit, funnel)
    return {"funnel": funnel.to_json(), "shard": shard.facts, "counters": counters or {}}


def sum_funnels(results: Sequence[dict[str, Any]]) -> Funnel:
    """Sum of the funnels that tasks return under "funnel"."""
    funnel = Funnel()
    for result in results:
        funnel.add(Funnel.from_json(result["funnel"]))
    return funnel


def keep_rejected(
    settings: StepSettings, unit: Unit, funnel: Funnel, shown: int = REJECTED_SHOWN
) -> None:
    """Write the rejected lines to a file that finish() collects, and print a few."""
    target = settings.output / WORK / "rejected" / f"{unit.name}.jsonl"
    if not funnel.rejected:
        target.unlink(missing_ok=True)  # of an earlier run, on the input of that time
        return
    for bad in itertools.islice(funnel.rejected, shown):
        say("warning: {file}, byte {offset}: {reason}: line set aside".format(**bad))
    with atomic_writer(target) as file:
        for bad in funnel.rejected:
            file.write(json.dumps(bad).encode() + b"\n")
