"""From a launcher's environment to a mesh: who is alone, who is missing, which device."""

from pathlib import Path

import pytest
import torch

from megatron.config.parallel import ParallelConfig
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
    program = write_program(tmp_path, "print('built')", limit=3)
    first, second = run_ranks(program, 4, absent=(2, 3))
    assert (first.status, second.status) == (1, 1)
    told = [each.errors for each in (first, second) if each.errors]
    assert len(told) == 1
    assert "ranks 2, 3 of 4 did not arrive at rank 0 at 127.0.0.1:" in told[0]
    assert "within 3 s; there are 2 on " in told[0]
    assert first.output == second.output == ""


def test_a_missing_first_rank_is_named(tmp_path: Path) -> None:
    [other] = run_ranks(write_program(tmp_path, "", limit=2), 2, absent=(0,))
    assert other.status == 1
    assert "did not reach rank 0 at 127.0.0.1:" in other.errors
