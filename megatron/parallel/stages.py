"""A user's own model in pipeline stages, some of whose parameters are tied.

    rank 0: stage 0 -> stage 1 ---.          tie("word", "0.embedding", "3.head")
    rank 1:                       '-> stage 2 -> stage 3

The executor (train/executor.py) runs these stages as it runs the layers of megatron/models. Each
rank builds only its own stages, and a copy of all stages on meta (without memory), from which it
gets the shapes of the tensors that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Mesh
from megatron.parallel.partition import partition_uniform
from megatron.parallel.random import derive_seed
from megatron.parallel.schedules import KINDS, PipelinePlan
from megatron.parallel.sharding import ShardedModule, Tied

META = torch.device("meta")
KEPT = 64  # number of kinds of batches whose shapes are kept


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
    places: tuple[str, ...]


def tie(name: str, *places: str) -> Tie:
    """A module or a parameter that several stages share.

        tie("word", "0.embedding", "3.head")       # modules whose parameters have the same shapes
        tie("scale", "1.block.scale", "2.scale")   # parameters

    name: parameters are called `tied.NAME` in checkpoints, at every layout. places: the number of a
    stage, and the path of the module or parameter in it. All copies start with the values of the
    tie's first stage, and get the sum of all their gradients. Raises ValueError for invalid places.
    """
    if not name.isidentifier() or hasattr(Tied({}), name):
        raise ValueError(f"tie {name}: must be named by a word of letters, digits and _")
    wrong = [each for each in places if not each.partition(".")[0].isdecimal()]
    if wrong or len(places) < 2:
        found = f"the place {wrong[0]}" if wrong else f"{len(places)} places"
        raise ValueError(f'tie {name}: {found}; must be two or more, such as "2.block.weight"')
    return Tie(name, places)


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
        self.known: dict[object, list[tuple[Tensor, ...]]] = {}
        groups = {each.name: tuple(sorted(set(self._ranks(each)))) for each in ties}
        axes = {ranks: mesh.tie(ranks) for ranks in dict.fromkeys(groups.values())}
        # Before the stages, so that tied parameters have the tie's name on every rank.
        self.tied = Tied({name: axes[ranks] for name, ranks in groups.items()})
        self.stages = nn.ModuleDict()
        has_gpu = mesh.device.type == "cuda"
        with torch.random.fork_rng([mesh.device] if has_gpu else []):
            for number in self.pipeline.numbers(mesh.pipeline.rank) or range(self.count):
                torch.manual_seed(derive_seed(seed, "pipeline stage", number))
                with mesh.device:
                    self.stages[str(number)] = stages[number]()
        self._check_ties(ties)
        for each in ties:
            self._share(each)
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
        number = -1
        for number in range(self.count) if numbers is None else numbers:
            x = self.stages[str(number)](batch, *as_tuple(x))
        if self.mesh.pipeline.size > 1 and number + 1 < self.count:
            found, expected = map(_shapes, (as_tuple(x), self.stream(batch, number + 1)))
            if found != expected:
                raise ValueError(f"stage {number} returns {found}, and on meta {expected}")
        return x

    def stream(self, batch: Any, number: int) -> tuple[Tensor, ...]:
        """The inputs of stage `number`, on meta. Raises ValueError, naming the stage, if a stage
        does not run there."""
        dtype = self._dtype()
        given = {each.name: getattr(batch, each.name) for each in fields(batch)}
        arrays = {name: torch.as_tensor(each) for name, each in given.items() if each is not None}
        key = dtype, *((name, each.shape, each.dtype) for name, each in arrays.items())
        if key not in self.known:
            if len(self.known) >= KEPT:
                self.known.clear()
            if dtype is not None and dtype != self.built_dtype:  # after model.to(dtype)
                self.on_meta = [each.to(dtype) for each in self.on_meta]
            like = copy(batch)  # dataclasses.replace would derive fields again
            for name, each in arrays.items():
                object.__setattr__(like, name, each.to(META))
            self.known[key] = list(self._run_on_meta(like))
        return self.known[key][number]

    @torch.no_grad()
    def _run_on_meta(self, batch: Any) -> Iterator[tuple[Tensor, ...]]:
        """Yields the inputs of each stage."""
        x: tuple[Tensor, ...] = ()
        for number, stage in enumerate(self.on_meta):
            yield x
            if number + 1 < self.count:
                try:
                    x = as_tuple(stage(batch, *x))
                except Exception as error:
                    why = str(error).partition("\n")[0]
                    raise ValueError(
                        f"stage {number}, {type(stage).__name__}, has to run on meta, for the "
                        f"shapes of what it returns: {type(error).__name__}: {why}"
                    ) from error

    def _dtype(self) -> torch.dtype | None:
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), None)

    def _ranks(self, tied: Tie) -> list[int]:
        """Ranks of the tie's stages along the pipeline axis, that of the first stage first."""
        stages = sorted({int(place.partition(".")[0]) for place in tied.places})
        if stages[-1] >= self.count:
            raise ValueError(f"tie {tied.name}: no stage {stages[-1]} of {self.count} stages")
        virtual = {number: i for i, each in enumerate(self.pipeline.layers) for number in each}
        return [virtual[number] % self.pipeline.ranks for number in stages]

    def _own(self, tied: Tie) -> dict[str, Any]:
        """This rank's members of a tie by place, first stage first; None if one does not exist."""
        found: dict[str, Any] = {}
        for place in sorted(tied.places, key=lambda each: int(each.partition(".")[0])):
            if place.partition(".")[0] in self.stages:
                parent, _, name = place.rpartition(".")
                try:
                    found[place] = getattr(self.stages.get_submodule(parent), name, None)
                except AttributeError:
                    found[place] = None
        return found

    def _check_ties(self, ties: Sequence[Tie]) -> None:
        """Every rank raises the same ValueError if a tie is not possible."""
        wrong, tied, own = list[str](), dict[int, str](), dict[str, dict[str, str]]()
        if len({each.name for each in ties}) < len(ties):
            wrong.append("ties: two have the same name")
        for each in ties:
            found = self._own(each)
            own[each.name] = dict[str, str]()
            for place, it in found.items():
                if not isinstance(it, nn.Module | nn.Parameter):
                    wrong.append(f"tie {each.name}: {place} is no module or parameter")
                    continue
                own[each.name][place] = _describe(it)
                for _, parameter in _parameters(it):
                    if tied.setdefault(id(parameter), each.name) != each.name:
                        wrong.append(f"tie {each.name}: {place} has a parameter of another tie")
        ranks = self.mesh.control.gather((wrong, own))
        for reason in (reason for reasons, _ in ranks for reason in reasons):
            raise ValueError(reason)
        for each in ties:
            kinds = {kind: place for _, own in ranks for place, kind in own[each.name].items()}
            if len(kinds) > 1:
                (one, here), (other, there) = list(kinds.items())[:2]
                raise ValueError(f"tie {each.name}: {here} has {one}, but {there} {other}")

    @torch.no_grad()
    def _share(self, tied: Tie) -> None:
        """Merge this rank's copies into one, with the values of the first stage."""
        axis, (source, *_) = self.tied.axes[tied.name], self._ranks(tied)
        if not (own := list(self._own(tied).values())):
            return
        first, *others = own
        setattr(self.tied, tied.name, first)
        shared = dict(_parameters(first))
        one = {id(p): shared[name] for each in others for name, p in _parameters(each)}
        for module in self.stages.modules():
            for name, parameter in list(module.named_parameters("", False, False)):
                if id(parameter) in one:
                    setattr(module, name, one[id(parameter)])
        for parameter in shared.values() if axis.size > 1 else ():
            if self.mesh.pipeline.rank != source:
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
    if ranks == 1 and kind == "interleaved":  # each micro-batch through all stages at once
        kind = "1f1b"
    layers = partition_uniform(count, ranks * virtual, virtual)
    return PipelinePlan(ranks=ranks, virtual=virtual, kind=kind, layers=layers)


def as_tuple(x: Any) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _parameters(it: nn.Module | nn.Parameter) -> Iterable[tuple[str, nn.Parameter]]:
    return [("", it)] if isinstance(it, nn.Parameter) else list(it.named_parameters())


def _describe(it: nn.Module | nn.Parameter) -> str:
    each = (f"{name or 'a parameter'} {_shape(one)}" for name, one in _parameters(it))
    return ", ".join(each) or "no parameter"


def _shapes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(map(_shape, tensors))


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
