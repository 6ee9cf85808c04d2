"""A user's own model in pipeline stages, some of whose parameters are tied.

    rank 0: stage 0 -> stage 1 ---.          tie("word", "0.embedding", "3.head")
    rank 1:                       '-> stage 2 -> stage 3

The executor (train/executor.py) runs these stages as it runs the layers of megatron/models. Each
rank builds only its own stages, and a copy of all stages on meta (without memory), from which it
gets the shapes of the tensors that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.parallel.agree import on_all_ranks
from megatron.parallel.collectives import all_reduce
from megatron.parallel.initialize import derive_seed
from megatron.parallel.mesh import Mesh
from megatron.parallel.partition import partition_uniform
from megatron.parallel.schedules import KINDS, PipelinePlan
from megatron.parallel.sharding import ShardedModule, Tied

META = torch.device("meta")
CACHED = 64  # number of kinds of batches whose shapes are kept


class PipelineStage(nn.Module):
    """One stage of a user's own model: a module with this `forward`."""

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        """batch: has tensors on the device, and is the same in each stage. inputs: the tensors that
        the previous stage returns; none for the first.

        Returns a tensor or a tuple of tensors, of any shapes; the last stage returns the input of
        the loss. Tensors of a floating dtype have a gradient, others do not. Shapes and dtypes must
        depend only on those of batch and inputs, because each rank also runs all stages on meta.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward")


@dataclass(frozen=True)
class Tie:
    """See `tie`."""

    name: str
    members: tuple[str, ...]  # those of the first stage first


def tie(name: str, *members: str) -> Tie:
    """A module or a parameter that several stages share.

        tie("word", "0.embedding", "3.head")       # modules whose parameters have the same shapes
        tie("scale", "1.block.scale", "2.scale")   # parameters

    name: parameters are called `tied.NAME` in checkpoints, at every layout. members: the number of
    a stage, and the path of the module or parameter in it. All copies start with the values of the
    tie's first stage, and get the sum of all their gradients. Raises ValueError for fewer than two
    members, and for one that begins with no number.
    """
    if not name.isidentifier() or hasattr(Tied({}), name):
        raise ValueError(f"tie {name}: must be named by a word of letters, digits and _")
    wrong = [each for each in members if not each.partition(".")[0].isdecimal()]
    if len(members) < 2 or wrong:
        which = wrong[0] if wrong else f"{len(members)} members"
        raise ValueError(f'tie {name}: {which}; must be two or more such as "2.block.weight"')
    return Tie(name, tuple(sorted(members, key=lambda each: int(each.partition(".")[0]))))


class PipelineModel(ShardedModule):
    """A user's own model in pipeline stages, with its loss and its schedule.

    pipeline: the plan that `mean_losses` takes. Parameters are called `stages.NUMBER.NAME`.
    """

    terms: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(
        self,
        mesh: Mesh,
        stages: Sequence[Callable[[], nn.Module]],
        loss: Callable[[Any, Any], Tensor],
        denominator: Callable[[Any], float],
        *,
        seed: int,
        ties: Sequence[Tie] = (),
        virtual: int = 1,
        schedule: str | None = None,
    ) -> None:
        """stages: functions that build the stages, see PipelineStage. A rank builds its own stages
        on the mesh's device, each under its own seed, so that all layouts start alike; and all of
        them on meta. loss: maps the last stage's result and the batch to the sum of the loss over
        the batch, a scalar. denominator: maps a batch of arrays to the divisor of the mean.

        virtual: virtual stages per rank. Rank r of p ranks has the virtual stages r, r + p, ..
        Each has as many consecutive stages as the others, or one more. schedule: gpipe, 1f1b,
        interleaved or zb-h1; by default interleaved if `virtual` > 1, otherwise 1f1b.

        Raises ValueError, on every rank, for stages that cannot be divided over the ranks, and for
        ties between members that do not exist or are not alike. torch's dropout draws different
        numbers at each layout; `Dropout` draws the same.
        """
        super().__init__(mesh)
        self.function, self.denominator, self.count = loss, denominator, len(stages)
        self.pipeline = plan_stages(self.count, mesh.pipeline.size, virtual, schedule)
        with META:
            # Copies, because a maker may return an existing module. A list does not register them.
            self.on_meta = [deepcopy(make()).to(META) for make in stages]
        self.inputs: dict[object, list[tuple[Tensor, ...]]] = {}  # on meta, by kind of batch
        axis_of = cache(mesh.tie)  # so that ties of the same ranks share an axis
        # Before the stages, so that tied parameters have the tie's name on every rank.
        self.tied = Tied({each.name: axis_of(frozenset(self._ranks(each))) for each in ties})
        self.stages = nn.ModuleDict()
        has_gpu = mesh.device.type == "cuda"
        with torch.random.fork_rng([mesh.device] if has_gpu else []):
            for number in self.pipeline.numbers(mesh.pipeline.rank) or range(self.count):
                torch.manual_seed(derive_seed(seed, "pipeline stage", number))
                with mesh.device:
                    self.stages[str(number)] = stages[number]()
        self._share(ties)
        self.built_dtype = self._dtype()

    def denominators(self, batch: Any) -> list[float]:
        """The denominator of the mean in this batch of arrays, as a list of one number."""
        return [float(self.denominator(batch))]

    def loss(self, x: Any, batch: Any, loss_scales: Tensor) -> Tensor:
        """The loss summed over this batch x its scale, [1]. x: result of the last stage.
        loss_scales: fp64 [1]."""
        total = self.function(x, batch)
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        return (total * loss_scales.to(total.dtype)).view(1)

    def embed(self, batch: Any) -> tuple[Tensor, ...]:
        return ()

    def layers(self, x: Any, batch: Any, *, numbers: Iterable[int] | None = None) -> Any:
        """The result of the last of these stages, or of all. Raises ValueError if its shapes and
        dtypes are not those that the stage returns on meta."""
        numbers = [*(range(self.count) if numbers is None else numbers)]
        for number in numbers:
            x = self.stages[str(number)](batch, *as_tuple(x))
        following = numbers[-1] + 1
        if self.mesh.pipeline.size > 1 and following < self.count:
            shapes, expected = _shapes(as_tuple(x)), _shapes(self.stream(batch, following))
            if shapes != expected:
                raise ValueError(f"stage {numbers[-1]} returns {shapes}, and on meta {expected}")
        return x

    def stream(self, batch: Any, number: int) -> tuple[Tensor, ...]:
        """The inputs of stage `number`, on meta. Raises ValueError, naming the stage, if a stage
        does not run there."""
        dtype = self._dtype()
        arrays = {}
        for field in fields(batch):
            if (array := getattr(batch, field.name)) is not None:
                arrays[field.name] = torch.as_tensor(array)
        kind = dtype, *((name, each.shape, each.dtype) for name, each in arrays.items())
        if kind in self.inputs:
            return self.inputs[kind][number]
        if len(self.inputs) >= CACHED:
            self.inputs.clear()
        if dtype is not None and dtype != self.built_dtype:  # after model.to(dtype)
            self.on_meta = [each.to(dtype) for each in self.on_meta]
        batch = batch.with_arrays(**{name: each.to(META) for name, each in arrays.items()})
        inputs: list[tuple[Tensor, ...]] = [()]
        for index, stage in enumerate(self.on_meta[:-1]):
            try:
                with torch.no_grad():
                    inputs.append(as_tuple(stage(batch, *inputs[-1])))
            except Exception as error:
                why = str(error).partition("\n")[0]
                raise ValueError(
                    f"stage {index}, {type(stage).__name__}, has to run on meta, for the "
                    f"shapes of what it returns: {type(error).__name__}: {why}"
                ) from error
        self.inputs[kind] = inputs
        return inputs[number]

    def _dtype(self) -> torch.dtype | None:
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), None)

    def _ranks(self, tied: Tie) -> tuple[int, ...]:
        """The rank of each member along the pipeline axis."""
        stages = [int(member.partition(".")[0]) for member in tied.members]
        if stages[-1] >= self.count:
            raise ValueError(f"tie {tied.name}: no stage {stages[-1]} of {self.count} stages")
        virtual = {number: i for i, each in enumerate(self.pipeline.layers) for number in each}
        return tuple(virtual[number] % self.pipeline.ranks for number in stages)

    def _local_members(self, ties: Sequence[Tie]) -> dict[str, dict[str, Any]]:
        """{tie: {path: module or parameter of this rank}}. Raises ValueError if one is neither."""
        members: dict[str, dict[str, Any]] = {each.name: {} for each in ties}
        if len(members) < len(ties):
            raise ValueError("ties: two have the same name")
        tie_of = dict[int, str]()
        for tied in ties:
            for path in tied.members:
                if path.partition(".")[0] not in self.stages:
                    continue
                try:
                    member = attrgetter(path)(self.stages)
                except AttributeError:
                    member = None
                if not isinstance(member, nn.Module | nn.Parameter):
                    raise ValueError(f"tie {tied.name}: {path} is no module or parameter")
                for _, parameter in _parameters(member):
                    if tie_of.setdefault(id(parameter), tied.name) != tied.name:
                        raise ValueError(f"tie {tied.name}: {path} has a parameter of another tie")
                members[tied.name][path] = member
        return members

    @torch.no_grad()
    def _share(self, ties: Sequence[Tie]) -> None:
        """Merge this rank's copies of each tie into one, with the values of the first stage. Every
        rank raises the same ValueError if a tie is not possible."""
        members = on_all_ranks(self.mesh, lambda: self._local_members(ties))
        for tied in ties:
            local = members[tied.name]
            path_of = dict[str, str]()  # a path for each of the shapes, which must be one
            for paths in self.mesh.control.gather(
                {_describe(each): n for n, each in local.items()}
            ):
                path_of |= paths
            if len(path_of) > 1:
                (one, here), (other, there), *_ = path_of.items()
                raise ValueError(f"tie {tied.name}: {here} has {one}, but {there} {other}")
            if not local:
                continue
            first, *others = local.values()
            setattr(self.tied, tied.name, first)
            shared, replacements = dict(_parameters(first)), dict[int, nn.Parameter]()
            for each in others:
                for name, parameter in _parameters(each):
                    replacements[id(parameter)] = shared[name]
            for module in self.stages.modules():
                for name, parameter in list(module.named_parameters("", False, False)):
                    if id(parameter) in replacements:
                        setattr(module, name, replacements[id(parameter)])
            axis = self.tied.axes[tied.name]
            if axis.size > 1:
                for parameter in shared.values():
                    if self.mesh.pipeline.rank != self._ranks(tied)[0]:
                        parameter.zero_()
                    all_reduce(parameter.data, axis)


def plan_stages(count: int, ranks: int, virtual: int, kind: str | None) -> PipelinePlan:
    """Raises ValueError for stages that cannot be divided over ranks, or an invalid schedule."""
    if virtual < 1 or count < ranks * virtual:
        most = f"at most {count // ranks} works" if count >= ranks else "fewer ranks work"
        raise ValueError(
            f"stages: {count} for {ranks} ranks of the pipeline axis x virtual={virtual}; {most}"
        )
    if count % virtual:
        raise ValueError(f"virtual={virtual}: must divide the {count} stages; 1 works")
    if kind is None:
        kind = "interleaved" if virtual > 1 else "1f1b"
    if kind not in KINDS or (ranks > 1 and (kind == "interleaved") != (virtual > 1)):
        allowed = "interleaved" if virtual > 1 else "gpipe, 1f1b or zb-h1"
        raise ValueError(f"schedule={kind!r}: must be {allowed} with virtual={virtual}")
    if ranks == 1:  # each micro-batch through all stages at once
        kind = "1f1b"
    layers = partition_uniform(count, ranks * virtual, virtual)
    return PipelinePlan(ranks=ranks, virtual=virtual, kind=kind, layers=layers)


def as_tuple(x: Any) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _parameters(member: nn.Module | nn.Parameter) -> list[tuple[str, nn.Parameter]]:
    return [("", member)] if isinstance(member, nn.Parameter) else [*member.named_parameters()]


def _describe(member: nn.Module | nn.Parameter) -> str:
    """Names and shapes of its parameters."""
    shapes = [f"{name or 'a parameter'} {_shapes([each])}" for name, each in _parameters(member)]
    return ", ".join(shapes) or "no parameter"


def _shapes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors)
