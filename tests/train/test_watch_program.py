"""The real training program under the watch: what the user sees of a skipped collective."""

import os
from pathlib import Path

from tests.programs import pretrain


def skip_in_step_3() -> None:
    """Rank 1 leaves out the first all-reduce of its third step."""
    import torch.distributed as dist

    from megatron.train import loop

    train_step, all_reduce = loop.train_step, dist.all_reduce
    to_skip = []

    def step(state, *arguments, **more):  # type: ignore[no-untyped-def]
        if state.step == 2 and os.environ["RANK"] == "1":
            to_skip.append("one")
        return train_step(state, *arguments, **more)

    def reduce(*arguments, **more):  # type: ignore[no-untyped-def]
        return to_skip.pop() and None if to_skip else all_reduce(*arguments, **more)

    loop.train_step, dist.all_reduce = step, reduce


def test_a_skipped_collective_ends_the_run_and_shows_where_it_was(tmp_path: Path) -> None:
    """Gloo aborts a process that gets more than it waits for, as soon as it comes; where all are
    of one size the ranks stand still."""
    words = "--train-iters 9 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
    words += " --tensor-model-parallel-size 2 --distributed-timeout-minutes 0.15"
    with pretrain(words, world=4, folder=tmp_path, before=skip_in_step_3) as run:
        assert all(run.wait(timeout=120)), run.text()
        assert "in train_step" in run.text(), run.text()
