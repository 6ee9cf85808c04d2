"""What being watched costs.

Two gloo processes of one thread share a model so small (t = 2, fp32, 2 layers of hidden 64, 256
tokens) that a step is little but its collectives: an upper bound. Watched, they run inside
`launch`; unwatched, on a plain process group.
"""

import atexit
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from megatron.train.launch import launch

FLAGS = """--preset quickstart --num-layers 2 --hidden-size 64 --vocab-size 512
--micro-batch-size 1 --tensor-model-parallel-size 2 --no-bf16"""
RATIO = "its time / the unwatched's"


def contender(rank: Rank, is_watched: bool, count: int) -> Turn:
    config, run = steps.read(FLAGS.split(), rank.size), ExitStack()
    if is_watched:
        host, port, _ = rank.store
        environ = {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.size), "MASTER_ADDR": host}
        environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        mesh = run.enter_context(launch(config.parallel, environ))
        atexit.register(run.close)  # both ranks leave together
    else:
        mesh = steps.mesh_of(rank, config)
    step = steps.Step(config, steps.build(config, mesh))

    def turn() -> Figures:
        for _ in range(count):
            step()
        return {"steps": count}

    return turn


def contenders(flags: Flags, count: int = 100) -> Iterator[Contender]:
    """Time steps, so many a turn."""
    for name in ("unwatched", "watched"):
        yield Contender(name, contender, {"is_watched": name == "watched", "count": count}, ranks=2)


COLUMNS = (
    Column("ms a step", "wall", "{:.2f}", per="steps", unit=1e-3),
    Column("CPU ms a step", "cpu", "{:.2f}", per="steps", unit=1e-3),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("its CPU time / the unwatched's", "cpu", "{:.3f}", "its / first"),
)
RESULT = "Watched, a step that is little but collectives takes {} times as long."
QUESTION = Question(
    contenders, COLUMNS, lambda found: RESULT.format(found.range(RATIO)),
    rounds=6, turns=3, together=False,
)  # fmt: skip

if __name__ == "__main__":
    QUESTION.run()
