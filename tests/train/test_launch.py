"""From a launcher's environment to a mesh: who is alone, who is missing, which device."""

from pathlib import Path

import pytest
import torch

from megatron.config.training import ParallelConfig
from megatron.train.launch import launch
from megatron.train.watch.rendezvous import Arrival, choose_device, read_place
from tests.train.ranks import run_ranks, write_program

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_one_process_needs_no_launcher_and_several_are_asked_for() -> None:
    with launch(ParallelConfig(), {}) as mesh:
        assert mesh.size == 1
    two = ParallelConfig(tensor_model_parallel_size=2)
    with (
        pytest.raises(ValueError, match="-parallel-size 2.*torchrun --nproc-per-node 2"),
        launch(two, {}),
    ):
        pass


def test_the_processes_fit_before_anything_is_built() -> None:
    three = ParallelConfig(tensor_model_parallel_size=3)
    with pytest.raises(ValueError, match="-size 3 does not divide.*2"), launch(three, LAUNCHED):
        pass


def test_a_launchers_place_is_read() -> None:
    place = read_place(LAUNCHED)
    assert (place.rank, place.size, place.address, place.port) == (1, 2, "node1", 29500)
    assert place.keeper == "rank 0 at node1:29500"
    agent = read_place(LAUNCHED | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent.keeper == "the launcher at node1:29500"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RANK", "2", "RANK is '2', which is none of the 2 ranks"),
        ("MASTER_ADDR", "", "not MASTER_ADDR: set it to the host of rank 0"),
        ("MASTER_PORT", "70000", "MASTER_PORT is '70000'; a free port such as 29500"),
    ],
)
def test_what_a_launcher_left_out_is_not_made_up(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_place(LAUNCHED | {variable: value})


def arrivals(*hosts: tuple[str, int]) -> list[Arrival]:
    return [Arrival(host, 1, len(hosts), gpus, ("address", 1)) for host, gpus in hosts]


def test_the_device_is_the_processes_own_gpu_or_the_cpu_for_all() -> None:
    both = arrivals(("a", 2), ("a", 2), ("b", 2), ("b", 2))
    assert choose_device(3, both, {}) == torch.device("cuda", 1)
    assert choose_device(3, both, {"LOCAL_RANK": "0"}) == torch.device("cuda", 0)
    assert choose_device(1, arrivals(("a", 0), ("b", 0)), {}) == torch.device("cpu")
    assert choose_device(1, arrivals(("a", 1), ("a", 1)), {}) == torch.device("cpu")
    with pytest.raises(ValueError, match="b runs 1 processes but has 0 GPU"):
        choose_device(0, arrivals(("a", 1), ("b", 0)), {})


def test_ranks_that_do_not_arrive_are_named(tmp_path: Path) -> None:
    # The two that come start to wait at the same time.
    come = f"""
Path({str(tmp_path)!r}, str(rank)).touch()
while not all(Path({str(tmp_path)!r}, each).exists() for each in "01"): time.sleep(0.01)
start.PATIENCE, rendezvous.WORD = 3.0, 1.0
"""
    come = "from megatron.train.watch import rendezvous" + come
    program = write_program(tmp_path, "print('built')", first=come)
    first, second = run_ranks(program, 4, absent=(2, 3))
    assert (first.status, second.status) == (1, 1)
    told = [each.errors for each in (first, second) if each.errors]
    assert len(told) == 1
    assert told[0].startswith("waiting for ranks 2, 3 of 4, for 3 s at most")
    assert "ranks 2, 3 of 4 did not arrive at rank 0 at 127.0.0.1:" in told[0]
    assert "within 3 s; there are 2 on " in told[0]
    assert first.output == second.output == ""


def test_a_missing_first_rank_is_named(tmp_path: Path) -> None:
    [other] = run_ranks(
        write_program(tmp_path, "pass", first="start.PATIENCE = 2.0"), 2, absent=(0,)
    )
    assert other.status == 1
    assert "did not reach rank 0 at 127.0.0.1:" in other.errors


# Everybody else is there when rank {rank} leaves, which it does by a signal.
MEET = """
meet = start.meet
def leave(*_): sys.exit(75)
Path({folder!r}, str(rank)).touch()
while not all(Path({folder!r}, each).exists() for each in "01"): time.sleep(0.01)
def meet_and_leave(store, *arguments):
    signal.signal(signal.SIGALRM, leave)
    if rank == {rank}: signal.setitimer(signal.ITIMER_REAL, 0.5)
    return meet(store, *arguments)
start.meet = meet_and_leave
"""


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_while_the_ranks_meet_takes_the_others_along(
    tmp_path: Path, leaver: int
) -> None:
    """Long before the others would give up waiting for the third rank."""
    program = write_program(
        tmp_path, "pass", tensor=1, first=MEET.format(rank=leaver, folder=str(tmp_path))
    )
    ended = run_ranks(program, 3, absent=(2,))
    assert [each.status for each in ended] == [75, 75], ended
    assert ended[leaver].errors == f"rank {leaver} left while the ranks met\n"
    assert ended[1 - leaver].errors == ""


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_before_the_mesh_is_there_takes_the_others_along(
    tmp_path: Path, leaver: int
) -> None:
    leave = f"""
build = start._build
def leave(*arguments):
    if rank == {leaver}: sys.exit(75)
    return build(*arguments)
start._build = leave
"""
    ended = run_ranks(write_program(tmp_path, "pass", first=leave), 2)
    assert [each.status for each in ended] == [75, 75], ended
    assert "left, with exit status 75, before the run began" in ended[leaver].errors
    assert len(ended[0].errors.splitlines()) == 1
