"""The mesh: which ranks each axis and each union of axes joins; what ranks agree on."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.errors import UsageError
from megatron.parallel.agree import agree, on_all_ranks
from megatron.parallel.mesh import Axis, Mesh, build_mesh
from megatron.parallel.sharding import ShardingSpec
from tests.dist import Pool, on_ranks
from tests.refusals import refusal
from tools.plan.absent import absent_mesh

CPU = torch.device("cpu")


@on_ranks(4)
def test_a_mesh_answers_by_the_names_of_axes() -> None:
    mesh = build_mesh({"tensor": 2}, CPU)
    assert copy.deepcopy(mesh.tensor) is mesh.tensor
    names = ("tensor", "data", "batch", "model_parallel", None)
    found = [number for name in names for number in (mesh.size(name), mesh.rank(name))]
    rank = dist.get_rank()
    assert found == [2, rank % 2, 2, rank // 2, 2, rank // 2, 2, rank % 2, 4, rank]
    assert mesh.group("tensor") is mesh.tensor.group
    for name in ("context", "rows"):  # of one rank, and of none
        assert isinstance(refusal(partial(mesh.group, name)), ValueError)
    lines = mesh.describe_ranks()
    assert len(lines) == 4
    assert "data 1, tensor 0" in lines[2]


def ranks(axis: Axis) -> list[int]:
    """Those that this rank meets along the axis."""
    return dist.get_process_group_ranks(axis.group) if axis.size > 1 else []


@pytest.mark.parametrize(
    "sizes",
    [{"tensr": 2}, {"tensor": 3}, {"tensor": 0}, {"tensor": 8}]
    + [{"data": size, "tensor": 2} for size in (1, 3, 4)],
)
def test_axes_that_do_not_fit_are_refused(sizes: dict[str, int]) -> None:
    refusal(rank_of(4, 0, **sizes).__enter__, "tens", kind=ValueError)


def test_the_data_axis_takes_the_size_that_it_is_given_or_what_is_left() -> None:
    for sizes in ({"data": 2, "tensor": 2}, {"tensor": 2}, {"data": 4}, {}):
        with rank_of(4, 0, **sizes) as mesh:
            assert mesh.sizes == {"data": 4 // sizes.get("tensor", 1), "tensor": mesh.tensor.size}


@contextmanager
def rank_of(world: int, rank: int, **sizes: int) -> Iterator[Mesh]:
    """The mesh of one rank, of others that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield build_mesh(sizes, "cpu")
    finally:
        dist.destroy_process_group()


def test_unions_join_the_ranks_that_the_table_says() -> None:
    """Pipeline 3, data 2, context 2, tensor 2, the slowest first: rank 22 is at 2, 1, 1, 0."""
    with rank_of(24, 22, pipeline=3, context=2, tensor=2) as mesh:
        assert mesh.coordinates == {"pipeline": 2, "data": 1, "context": 1, "tensor": 0}
        assert (mesh.size(), mesh.is_first) == (24, False)
        assert mesh.describe_rank() == "pipeline 2, data 1, context 1, tensor 0"
        assert ranks(mesh.pipeline) == [6, 14, 22]
        assert ranks(mesh.data) == [18, 22]
        assert ranks(mesh.context) == [20, 22]
        assert ranks(mesh.tensor) == [22, 23]
        assert mesh.batch is mesh.data
        assert ranks(mesh.loss) == ranks(mesh.replicas) == [16, 18, 20, 22]
        assert ranks(mesh.model_parallel) == [6, 7, 14, 15, 22, 23]
        assert mesh.model_parallel.parts == (mesh.pipeline, mesh.tensor)
        assert (mesh.embedding_group.rank, ranks(mesh.embedding_group)) == (1, [6, 22])
    with rank_of(24, 14, pipeline=3, context=2, tensor=2) as mesh:
        assert mesh.embedding_group.size == 1, "a stage in the middle holds no embedding"


def test_the_first_rank_of_any_stage_needs_no_ranks() -> None:
    """It is where a rank of so many would be, on the pipeline axis and on its ties."""
    sizes = {"pipeline": 4, "data": 2, "tensor": 2}
    for stage in range(4):
        mesh = absent_mesh(sizes, CPU, stage=stage)
        assert not dist.is_initialized()
        with rank_of(16, 4 * stage, pipeline=4, tensor=2) as there:
            assert mesh.coordinates == there.coordinates
            for name in ("embedding_group", "model_parallel", "loss_sums", "replicas"):
                assert (mesh.size(name), mesh.rank(name)) == (there.size(name), there.rank(name))
            ties = mesh.tie([1, 2]), there.tie([1, 2])
            assert ties[0].size == ties[1].size == (2 if stage in (1, 2) else 1)
            assert ties[0].rank == ties[1].rank
    assert "stage 4" in str(refusal(lambda: absent_mesh(sizes, CPU, stage=4)))


def test_one_rank_counts_for_all_that_hold_a_shard() -> None:
    """Pipeline 3, data 2, tensor 2: who owns what, along the model and along all axes."""
    for rank in range(12):
        with rank_of(12, rank, pipeline=3, tensor=2) as mesh:
            place = tuple(mesh.coordinates.values())
            whole = ShardingSpec(shape=(4,), partial=(mesh.replicas,))
            cut = ShardingSpec(shape=(4,), shards=((0, mesh.tensor),), partial=(mesh.replicas,))
            zero = ShardingSpec(shape=(4,), shards=((0, mesh.data), (0, mesh.tensor)))
            tied = replace(cut, partial=(mesh.replicas, mesh.embedding_group))
            stage, copy_of_data, shard = place
            for spec, owns in (
                (whole, (shard == 0, shard == copy_of_data == 0)),
                (cut, (True, copy_of_data == 0)),
                (zero, (True, True)),
                (tied, (stage < 2, stage < 2 and copy_of_data == 0)),
            ):
                found = spec.is_owner(mesh.model_parallel), spec.is_owner(*mesh.axes)
                assert found == owns, (place, spec)


def test_unions_of_each_mode_have_the_axes_of_their_paper() -> None:
    """Copies of 2.5D read other samples and hold the same weights; the rest is one model."""
    names = ("replicas", "batch", "loss", "model_parallel", "tokens", "hidden", "vocabulary")
    for mode, axes, wanted in (
        ("1d", {"data": 3, "tensor": 2}, (3, 3, 3, 2, 1, 1, 2)),
        ("2d", {"data": 3, "row": 2, "column": 2}, (3, 6, 6, 4, 2, 2, 2)),
        ("2.5d", {"data": 3, "depth": 2, "row": 2, "column": 2}, (6, 12, 12, 4, 2, 2, 2)),
        ("3d", {"data": 3, "weight": 2, "input": 2, "output": 2}, (3, 12, 12, 8, 4, 2, 2)),
    ):
        mesh = absent_mesh(axes, torch.device("meta"), tensor_parallel_mode=mode)
        assert tuple(mesh.size(name) for name in names) == wanted, mode


# Messages of one rank, and of all


def outcome(failing: tuple[int, ...]) -> tuple[object, ...]:
    mesh, rank = build_mesh({}, CPU), dist.get_rank()

    def fail() -> int:
        if rank in failing:
            raise UsageError("--seed", rank, "1234", works=("--seed", "1234"))
        return rank

    refused: tuple[object, ...] = ()
    try:
        assert on_all_ranks(mesh, fail) == rank
    except UsageError as error:
        notes = getattr(error, "__notes__", [])
        refused = (error.flag, error.value, error.allowed, error.works, notes)
    try:
        return refused, agree(mesh, fail)
    except OSError as error:
        return refused, "data 1" in str(error)


def test_every_rank_raises_what_the_first_one_does(gloo: Pool) -> None:
    assert gloo.run(3, outcome, ()) == [((), [0, 1, 2])] * 3
    refused = ("--seed", 1, "1234", ("--seed", "1234"), ["on rank 1"])
    assert gloo.run(3, outcome, (1, 2)) == [(refused, True)] * 3
