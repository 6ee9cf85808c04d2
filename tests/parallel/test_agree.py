import pytest
import torch

from megatron.errors import UsageError
from megatron.parallel.agree import agree, on_all_ranks
from megatron.parallel.mesh import build_mesh
from tests.dist import Pool


def fail_on(failing: tuple[int, ...]) -> None:
    rank = torch.distributed.get_rank()
    if rank in failing:
        raise UsageError("--seed", rank, "1234", works=("--seed", "1234"))


def outcome(failing: tuple[int, ...]) -> tuple[object, ...]:
    mesh = build_mesh({}, torch.device("cpu"))
    try:
        value = on_all_ranks(mesh, lambda: fail_on(failing) or mesh.data.rank)
        assert value == torch.distributed.get_rank()
    except UsageError as error:
        notes = getattr(error, "__notes__", [])
        refused = (error.flag, error.value, error.allowed, error.works, notes)
    else:
        refused = ()
    try:
        return refused, agree(mesh, lambda: fail_on(failing) or mesh.data.rank)
    except OSError as error:
        return refused, "data 1" in str(error)


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((), ((), [0, 1, 2])),
        ((1, 2), (("--seed", 1, "1234", ("--seed", "1234"), ["on rank 1"]), True)),
    ],
)
def test_every_rank_raises_what_the_first_one_does(
    gloo: Pool, failing: tuple[int, ...], expected: object
) -> None:
    assert gloo.run(3, outcome, failing) == [expected] * 3
