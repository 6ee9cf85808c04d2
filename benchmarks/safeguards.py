"""The cost of checking replicas, and of the watch for failures.

Two gloo processes with one thread each share the quickstart's model in bf16 (t = 2) or hold one
each (d = 2), with 4 samples of 256 tokens per step on both together. A check hashes everything that
both hold, and its time includes the wait for the slower one. Watched processes run inside `launch`,
others on a plain process group, with a model so small (t = 2, fp32, 2 layers of hidden size 64, 256
tokens) that a step is mostly collectives: an upper bound. There a turn is 100 steps.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import atexit
from collections.abc import Iterator
from contextlib import ExitStack
from threading import active_count

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.report import Results
from megatron.train.launch import launch
from megatron.train.replicas import check_replicas

FLAGS = "--preset quickstart --vocab-size 4096 --tensor-model-parallel-size {} --micro-batch-size"
TINY = FLAGS.format(2) + " 1 --num-layers 2 --hidden-size 64 --no-bf16"
RATIO = "its time / the first's"


def check(rank: Rank, flags: list[str]) -> Turn:
    step = steps.ours(rank, flags)
    state, data = step.state, step.state.mesh.batch
    batch = steps.batch_of(step.config, 0, data.rank, data.size)
    common = sum(x.local.nbytes for x in state.slices() if data.size > 1 or not x.spec.shards)

    def turn() -> Figures:
        check_replicas(state, [batch])
        return {"hashed": common}

    return turn


def hundred_steps(rank: Rank, is_watched: bool) -> Turn:
    config, run = steps.read(TINY.split(), rank.size), ExitStack()
    if is_watched:
        host, port, _ = rank.store
        environ = {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.size), "MASTER_ADDR": host}
        environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        mesh = run.enter_context(launch(config.parallel, environ))
        atexit.register(run.close)  # both ranks exit together
    else:
        mesh = steps.mesh_of(rank, config)
    step = steps.Run(config, steps.build(config, mesh))
    return lambda: [step() for _ in range(100)][-1] | {"threads": active_count()}


def contenders(flags: Flags) -> Iterator[Contender]:
    """Time steps and checks, and steps with and without the watch."""
    for t in (1, 2):
        own = {"flags": [*FLAGS.format(t).split(), str(2 * t), "--bf16"]}
        for name, run in (("step", steps.ours), ("check", check)):
            yield Contender(name, run, own, group=f"t = {t}, d = {2 // t}", ranks=2)
    for name, watched in (("unwatched", False), ("watched", True)):
        yield Contender(name, hundred_steps, {"is_watched": watched}, group="100 steps", ranks=2)


def result(found: Results) -> str:
    rows = ("t = 1, d = 2", "check"), ("100 steps", "watched")
    check, watched = (found.median(*row, RATIO) for row in rows)
    return (
        f"Where two ranks hold whole models a check, by default once in 100 steps, takes "
        f"{check:.2f} of a step's time; watched steps take {watched:.3f} times as long as others."
    )


COLUMNS = (
    Column("ms", "wall", "{:.1f}", unit=1e-3),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("its CPU time / the first's", "cpu", "{:.3f}", "its / first"),
    Column("hashed, MB", "hashed", "{:.1f}", unit=1e6),
)
QUESTION = Question(
    contenders, COLUMNS, result, rounds=6, turns=3, warm_up=2, together=False, drawn=(RATIO,)
)

if __name__ == "__main__":
    QUESTION.run()
