"""What being watched costs a training loop of two processes.

Two gloo processes of one thread share a model so small (t = 2, fp32, 2 layers of hidden 64, 256
tokens) that a step is little but its collectives: an upper bound. Watched, they run inside
`launch`; unwatched, on a plain process group.
"""

import atexit
import sys
from contextlib import ExitStack
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
from megatron.train.launch import launch
from megatron.train.step import train_step

FLAGS = (
    *("--preset", "quickstart", "--num-layers", "2", "--hidden-size", "64", "--vocab-size", "512"),
    *("--micro-batch-size", "1", "--tensor-model-parallel-size", "2", "--no-bf16"),
)
RATIO, CPU_RATIO = "its time / the unwatched's", "its CPU time / the unwatched's"


def contender(rank: Rank, is_watched: bool, count: int) -> Turn:
    config = steps.read(FLAGS, rank.size)
    if is_watched:
        host, port, _ = rank.store
        environ = {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.size)}
        environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        run = ExitStack()
        mesh = run.enter_context(launch(config.parallel, environ))
        atexit.register(run.close)  # both ranks leave together
    else:
        mesh = steps.mesh_of(rank, config)
    state = steps.build(config, mesh)

    def turn() -> None:
        for _ in range(count):
            train_step(state, [steps.batch_of(config, state.step)], steps.LEARNING_RATE)

    return turn


def main(flags: Flags, steps: int = 100) -> None:
    """Time steps.

    Args:
        steps: of a turn.
    """
    ask(
        Question(
            title="What being watched costs",
            method=__doc__,
            contenders=[
                Contender(
                    name=name,
                    run=contender,
                    arguments={"is_watched": name == "watched", "count": steps},
                    ranks=2,
                )
                for name in ("unwatched", "watched")
            ],
            columns=(
                Column("ms a step", "wall", "{:.2f}", unit=steps / 1e3),
                Column("CPU ms a step", "cpu", "{:.2f}", unit=steps / 1e3),
                Column(RATIO, "wall", "{:.3f}", "its / first"),
                Column(CPU_RATIO, "cpu", "{:.3f}", "its / first"),
            ),
            result=lambda found: (
                f"Watched, a step that is little but collectives takes {found.range(RATIO)} of "
                f"its time and {found.range(CPU_RATIO)} of its processor time."
            ),
            rounds=6,
            turns=3,
            together=False,
            packages=("torch",),
            settings={"steps": steps},
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
