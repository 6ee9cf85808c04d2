"""From a launcher's environment to a mesh: who is alone, who is missing, which device."""

import re
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from megatron.config.launch import read_rank_info
from megatron.config.parallel import ParallelConfig
from megatron.train.launch import Arrival, choose_device, launch
from megatron.train.watch import ROUNDS
from tests.refusals import refusal
from tests.train.ranks import run_ranks, write_program

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_one_process_needs_no_launcher() -> None:
    with launch(ParallelConfig(), {}) as mesh:
        assert mesh.size() == 1


def test_launch_refuses_sizes_that_do_not_fit() -> None:
    for size, environ in ((2, {}), (3, LAUNCHED)):
        wrong = ParallelConfig(tensor_model_parallel_size=size)
        refusal(launch(wrong, environ).__enter__, field="--tensor-model-parallel-size")


def test_a_launchers_variables_are_read() -> None:
    info = read_rank_info(LAUNCHED)
    assert (info.rank, info.size, info.address, info.port) == (1, 2, "node1", 29500)
    assert info.is_host
    assert not read_rank_info(LAUNCHED | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).is_host


def test_what_a_launcher_left_out_is_not_made_up() -> None:
    for variable, value in (
        ("RANK", "2"),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", "70000"),
        ("TORCHELASTIC_RESTART_COUNT", "x"),
    ):
        refusal(partial(read_rank_info, LAUNCHED | {variable: value}), field=variable)
    refusal(launch(environ=LAUNCHED | {"WORLD_SIZE": "1"}).__enter__, field="RANK")


def arrivals(*hosts: tuple[str, int]) -> list[Arrival]:
    return [Arrival(host, len(hosts), gpus) for host, gpus in hosts]


def test_choose_device() -> None:
    both = arrivals(("a", 2), ("a", 2), ("b", 2), ("b", 2))
    assert choose_device(3, both, {}) == torch.device("cuda", 1)
    assert choose_device(3, both, {"LOCAL_RANK": "0"}) == torch.device("cuda", 0)
    assert choose_device(1, arrivals(("a", 0), ("b", 0)), {}) == torch.device("cpu")
    assert choose_device(1, arrivals(("a", 1), ("a", 1)), {}) == torch.device("cpu")
    assert str(refusal(lambda: choose_device(0, arrivals(("a", 1), ("b", 0)), {}))).startswith("b ")


UNREACHED = "start.PATIENCE = 0.5"
# Rank 0's patience begins when rank 1 is there.
SHORT = """
from datetime import timedelta
meet, start.NOTICE = start.meet, 2.0
def meet_soon(store, info, watch, patience):
    if rank == 0:
        store.wait(["here/1"], timedelta(minutes=30))
    return meet(store, info, watch, 1.0)
start.meet = meet_soon
"""
# Rank 1 leaves once all others are waiting for the third rank, or before the groups are built.
MEETING = """
meet = start.meet
def meet_and_leave(store, info, watch, patience):
    if rank == 1:
        store.wait(["here/0"])
        sys.exit(75)
    return meet(store, info, watch, patience)
start.meet = meet_and_leave
"""
BUILDING = """
choose = start.choose_device
def choose_and_leave(*arguments):
    if rank == 1: sys.exit(75)
    return choose(*arguments)
start.choose_device = choose_and_leave
"""


@pytest.mark.parametrize(
    ("world", "ranks", "first", "statuses", "named"),
    [
        (4, (0, 1), SHORT, {1, 2}, "ranks 2, 3 of 4 .* 127.0.0.1:"),
        (2, (1,), UNREACHED, {1}, "rank 0 at 127.0.0.1:"),
        (3, (0, 1), MEETING, {75}, r"rank 1 of 3 on \S+ .* 75"),
        (2, (0, 1), BUILDING, {75}, r"rank 1 of 2 on \S+ .* 75"),
        (3, (0, 1, 1), "", {1, 2}, "RANK 1: "),
    ],
)
def test_a_missing_rank_ends_the_start(
    tmp_path: Path, world: int, ranks: tuple[int, ...], first: str, statuses: set[int], named: str
) -> None:
    program = write_program(tmp_path, "print('built')", tensor=1, first=first)
    ended = run_ranks(program, world, ranks=ranks)
    assert {each.status for each in ended} <= statuses, ended
    text = "\n".join(each.text for each in ended)
    assert len(re.findall(f"(?m)^.*{named}", text)) == 1, text
    assert "built" not in text


def connect(timeout: timedelta, **_: Any) -> None:
    raise ValueError(f"torch ends it after {timeout.total_seconds():.0f} s")


def test_torch_waits_longer_than_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lets a rank work for so long while the others wait, and then says which it was."""
    module = "megatron.train.launch."
    for name in ("Watch", "check_interface", "meet"):
        monkeypatch.setattr(f"{module}{name}", MagicMock())
    monkeypatch.setattr(f"{module}open_store", lambda *_: (dist.HashStore(), True))
    monkeypatch.setattr(f"{module}choose_device", lambda *_: torch.device("cpu"))
    given = {"process_group": f"{__name__}:connect", "distributed_timeout_minutes": 5.0}
    error = refusal(launch(ParallelConfig(**given), LAUNCHED).__enter__)
    assert int(str(error).split()[-2]) > ROUNDS * 60 * 5
