"""Optimizers of torch, or of one's own, on the master weights: --optimizer NAME or module:name.

One that updates each element by that element's gradients alone takes parameters that are cut
anywhere: by tensor parallelism, or by ZeRO in the middle of a row. A trial finds whether it does.
All others get whole matrices, and are refused where no rank has them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.config.parts import PARTS
from megatron.config.training import OptimizerConfig
from megatron.errors import UsageError
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import ShardingSpec, TensorSlice

Groups = list[dict[str, Any]]
"""Parameters by weight decay, as torch's optimizers take them: params, param_names,
weight_decay."""
Make = Callable[..., Optimizer | Sequence[Optimizer]]


def sgd(params: Groups, config: OptimizerConfig) -> Optimizer:
    """torch.optim.SGD with --sgd-momentum."""
    return torch.optim.SGD(params, config.lr, momentum=config.sgd_momentum)


def adam(params: Groups, config: OptimizerConfig) -> Optimizer:
    """torch.optim.Adam; its decay is that of adamw, see --decoupled-weight-decay."""
    return torch.optim.Adam(
        params,
        config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        decoupled_weight_decay=config.decoupled_weight_decay,
    )


def adagrad(params: Groups, config: OptimizerConfig) -> Optimizer:
    """torch.optim.Adagrad with --adam-eps."""
    return torch.optim.Adagrad(params, config.lr, eps=config.adam_eps)


def rmsprop(params: Groups, config: OptimizerConfig) -> Optimizer:
    """torch.optim.RMSprop with --adam-beta2 and --adam-eps."""
    return torch.optim.RMSprop(params, config.lr, alpha=config.adam_beta2, eps=config.adam_eps)


def muon(params: Groups, config: OptimizerConfig) -> Sequence[Optimizer]:
    """torch.optim.Muon for the matrices of the layers, and torch.optim.AdamW for all else. Both
    have --lr, as Muon's updates are scaled to the size of AdamW's."""
    of_layers, others = Groups(), Groups()
    for group in params:
        named = [*zip(group["param_names"], group["params"], strict=True)]
        # Layers have a number in their names; embeddings and heads have none.
        hidden = [x for x in named if x[1].ndim == 2 and re.search(r"(^|\.)\d+\.", x[0])]
        rest = [x for x in named if all(x[1] is not each for _, each in hidden)]
        for some, groups in ((hidden, of_layers), (rest, others)):
            if some:
                names, parameters = zip(*some, strict=True)
                groups.append({**group, "params": [*parameters], "param_names": [*names]})
    optimizers = list[Optimizer]()
    if of_layers:
        optimizers.append(torch.optim.Muon(of_layers, config.lr, adjust_lr_fn="match_rms_adamw"))
    if others:
        betas = config.adam_beta1, config.adam_beta2
        optimizers.append(torch.optim.AdamW(others, config.lr, betas, config.adam_eps))
    return optimizers


def adafactor(params: Groups, config: OptimizerConfig) -> Optimizer:
    """torch.optim.Adafactor."""
    return torch.optim.Adafactor(params, config.lr)


TRIED = ("layers.0.weight", "word_embedding.weight", "layers.0.bias")
"""Names of the parameters of a trial."""
ADAMW = ("--optimizer", "adamw")


@cache
def find_optimizer(config: OptimizerConfig) -> tuple[Make, str]:
    """(the part of --optimizer, what it needs: "elements", to update any of them by their own
    gradients; "matrices", whole; or "model", all parameters together). Raises UsageError if there
    is none, it cannot be tried, or it does not go on from what a checkpoint holds."""
    make: Make = PARTS["optimizer"].find(config.optimizer)
    start = torch.linspace(0.1, 1, 24, dtype=torch.float64).view(4, 6)

    def refuse(allowed: str) -> UsageError:
        return UsageError("--optimizer", config.optimizer, allowed, works=ADAMW)

    def new(name: str, *starts: Tensor) -> tuple[list[nn.Parameter], list[Optimizer]]:
        weights = [nn.Parameter(each.clone()) for each in starts]
        names = [f"module{number}.{name}" for number in range(len(weights))]
        group = {"params": weights, "param_names": names, "weight_decay": config.weight_decay}
        return weights, as_list(make(params=[group], config=config))

    def update(weights: list[nn.Parameter], optimizers: list[Optimizer], size: float) -> Tensor:
        """The weights after an update by gradients of this size, a function of the weights."""
        for weight in weights:
            weight.grad = size * (7 * weight.detach()).sin()
        for optimizer in optimizers:
            optimizer.step()
        return torch.cat([each.detach().flatten() for each in weights])

    def trained(name: str, *starts: Tensor) -> Tensor:
        ends = []
        for size in (1.0, 1e-4, 1e4):  # some clip what is large
            run = new(name, *starts)
            ends.append([update(*run, size) for _ in range(3)][-1])
        return torch.stack(ends)

    def is_resumed() -> bool:
        """Whether another one goes on as one without a break, as after `make_state`."""
        run, other = new(TRIED[0], start), new(TRIED[0], start)
        for _ in range(7):  # what it makes at every 5th update is there
            update(*run, 1.0)
        update(*other, 0.0)
        ((weight,), optimizers), ((copy,), _) = run, other
        states = [state_of(each, some) for each, some in ((weight, optimizers), (copy, other[1]))]
        if states[0].keys() != states[1].keys():
            return False
        for one, two in zip(*(each.values() for each in states), strict=True):
            if isinstance(one, Tensor):
                two.copy_(one)
        copy.data.copy_(weight.data)
        set_step(copy, other[1], 7)
        return all(torch.equal(update(*run, 1.0), update(*other, 1.0)) for _ in range(2))

    def equal(one: Tensor, *pieces: Tensor) -> bool:
        return torch.allclose(one, torch.cat(pieces, dim=1), rtol=1e-12, atol=0)

    with torch.random.fork_rng(devices=[]):
        try:
            is_kept = is_resumed()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            allowed = f"one that updates fp64 weights on a CPU, where it is tried first ({reason})"
            raise refuse(allowed) from error
        if not is_kept:
            raise refuse("one that a resumed run goes on with from `step` and its state's tensors")
        try:
            pieces = start.flatten().split([9, 15])
            if all(equal(trained(n, start), *(trained(n, x) for x in pieces)) for n in TRIED):
                return make, "elements"
        except Exception:  # it takes no vectors
            pass
        several = start, start[:3].sqrt()
        if all(equal(trained(n, *several), *(trained(n, x) for x in several)) for n in TRIED):
            return make, "matrices"
    return make, "model"


def check_whole(
    config: OptimizerConfig, mesh: Mesh, specs: Iterable[ShardingSpec], *, divides: bool
) -> None:
    """Raise UsageError if the optimizer needs more than a rank has of parameters with these specs.
    divides: ranks divide the optimizer's state."""
    _, needs = find_optimizer(config)
    cuts = {axis.name for spec in specs for _, axis in spec.shards if axis.size > 1}
    cuts |= {"ZeRO"} if divides else set()
    if needs == "model":
        cuts |= {"pipeline"} if mesh.pipeline.size > 1 else set()
        cuts |= {"--optimizer-cpu-offload"} if config.optimizer_cpu_offload else set()
    if needs != "elements" and cuts:
        what = "whole matrices" if needs == "matrices" else "all parameters together"
        allowed = f"one that updates element by element with {' and '.join(sorted(cuts))}: this one"
        raise UsageError("--optimizer", config.optimizer, f"{allowed} needs {what}", works=ADAMW)


class NamedOptimizer:
    """As TorchAdam, for an optimizer of torch or of one's own."""

    def __init__(
        self,
        shards: Sequence[tuple[TensorSlice, Tensor]],
        decays: Callable[[ShardingSpec], float],
        mesh: Mesh,
        config: OptimizerConfig,
    ) -> None:
        """shards: (this rank's part of a master, its gradient), of the parameters that it updates.
        decays: the weight decay of a parameter. Raises UsageError for parts where it needs the
        whole."""
        make, needs = find_optimizer(config)
        specs = [each.spec for each, _ in shards]
        check_whole(config, mesh, specs, divides=any(spec.flat is not None for spec in specs))
        self.shards: list[tuple[TensorSlice, nn.Parameter]] = []
        groups = defaultdict[float, list[tuple[str, nn.Parameter]]](list)
        for each, gradient in shards:
            local, spec = each.local, each.spec
            if needs != "elements":
                # Without padding, which is no row; q, k and v are one matrix [3h, h].
                shape = (-1, spec.shape[-1]) if spec.decay else (-1,)
                local, gradient = (spec.real(x).view(shape) for x in (local, gradient))
                spec = ShardingSpec(shape=tuple(local.shape), partial=spec.partial)
            parameter = nn.Parameter(local)
            parameter.grad = gradient
            self.shards.append((TensorSlice(each.key, spec, local), parameter))
            groups[decays(each.spec)].append((each.key, parameter))
        self.gradients = [gradient for _, gradient in shards]
        params = [
            {
                "params": [parameter for _, parameter in named],
                "param_names": [name for name, _ in named],
                "weight_decay": decay,
            }
            for decay, named in groups.items()
        ]
        # torch's optimizers take no empty list, such as that of a frozen model.
        self.optimizers = as_list(make(params=params, config=config)) if params else []
        # A part may give some of its parameters another rate than --lr.
        self.lr_shares = [
            [group["lr"] / config.lr for group in each.param_groups] for each in self.optimizers
        ]

    @torch.no_grad()
    def step(self, lr: float, factor: float | Tensor) -> None:
        """See TorchAdam; here the host waits for the factor."""
        factor = float(factor)
        if not factor:
            return
        if factor != 1.0:
            torch._foreach_mul_(self.gradients, factor)
        for optimizer, shares in zip(self.optimizers, self.lr_shares, strict=True):
            for group, share in zip(optimizer.param_groups, shares, strict=True):
                group["lr"] = lr * share
            optimizer.step()

    def slices(self) -> Iterator[TensorSlice]:
        """This rank's part of every tensor of its state but `step`: key KIND.NAME. None before the
        first update, as the optimizer makes them then."""
        for shard, parameter in self.shards:
            for name, value in state_of(parameter, self.optimizers).items():
                if name == "step":
                    continue
                spec = shard.spec
                if value.shape != parameter.shape:
                    spec = ShardingSpec(shape=tuple(value.shape), partial=spec.partial)
                yield TensorSlice(f"{name}.{shard.key}", spec, value)

    def make_state(self) -> None:
        """Make the tensors of its state, by an update that changes masters and state: a checkpoint
        replaces them all."""
        for each in self.gradients:
            each.zero_()
        self.step(0.0, 1.0)

    def set_updates(self, updates: int) -> None:
        for _, parameter in self.shards:
            set_step(parameter, self.optimizers, updates)


def set_step(parameter: nn.Parameter, optimizers: Iterable[Optimizer], updates: int) -> None:
    """Set the number of updates that its state counts, if it counts them."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        if isinstance(step := state.get("step"), Tensor):
            step.fill_(updates)
        elif step is not None:
            state["step"] = updates


def as_list(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def state_of(parameter: nn.Parameter, optimizers: Iterable[Optimizer]) -> Mapping[str, Any]:
    """Its state in the optimizer that has some; values that are not set are left out."""
    for optimizer in optimizers:
        if parameter in optimizer.state:
            state = optimizer.state[parameter].items()
            return {name: value for name, value in state if value is not None}
    return {}
