import copy

import pytest
import torch

from megatron.parallel.mesh import build_mesh, serial_mesh
from tests.dist import Pool


def grid(tensor_size: int) -> tuple[dict[str, int], bool, int, list[int]]:
    mesh = build_mesh(tensor_size, torch.device("cpu"))
    assert copy.deepcopy(mesh.tensor) is mesh.tensor
    peers: list[int] = []
    if mesh.tensor.size > 1:
        peers = torch.distributed.get_process_group_ranks(mesh.tensor.group)
    return mesh.coordinates, mesh.is_first, mesh.size, peers


def test_the_tensor_axis_is_the_fastest(gloo: Pool) -> None:
    assert gloo.run(4, grid, 2) == [
        ({"data": 0, "tensor": 0}, True, 4, [0, 1]),
        ({"data": 0, "tensor": 1}, False, 4, [0, 1]),
        ({"data": 1, "tensor": 0}, False, 4, [2, 3]),
        ({"data": 1, "tensor": 1}, False, 4, [2, 3]),
    ]
    assert [each[0] for each in gloo.run(2, grid, 1)] == [
        {"data": 0, "tensor": 0},
        {"data": 1, "tensor": 0},
    ]


def test_a_size_that_does_not_divide_is_an_error(gloo: Pool) -> None:
    with pytest.raises(RuntimeError, match="tensor axis of 2 in a world of 3"):
        gloo.run(3, grid, 2)


def test_the_serial_mesh_needs_no_process_group() -> None:
    mesh = serial_mesh()
    assert not torch.distributed.is_initialized()
    assert (mesh.size, mesh.is_first) == (1, True)
    assert mesh.coordinates == {"data": 0, "tensor": 0}
    assert mesh.describe_rank() == "data 0, tensor 0"
