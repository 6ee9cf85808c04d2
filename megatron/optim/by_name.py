"""Optimizers of torch, or of one's own, on the master weights: --optimizer NAME or module:name.

One that updates each element by that element's gradients alone takes parameters that are cut
anywhere: by tensor parallelism, or by ZeRO in the middle of a row. Whether it does is found by
trying. All others get whole matrices, and are refused where no rank has them.
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
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            # Layers have a number in their names; embeddings and heads have none.
            is_matrix = parameter.ndim == 2 and re.search(r"\.\d+\.", name)
            (of_layers if is_matrix else others).append(
                {**group, "params": [parameter], "param_names": [name]}
            )
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


@cache
def find_optimizer(config: OptimizerConfig) -> tuple[Make, bool]:
    """(the part of --optimizer, whether it is element by element). Raises UsageError if there is
    none, or a checkpoint cannot hold its state."""
    make: Make = PARTS["optimizer"].find(config.optimizer)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    gradients = [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(3)]

    def train(*shape: int, sizes: Sequence[int]) -> tuple[Tensor, list[Mapping[str, Any]]]:
        """(weights after three updates of these pieces, the state of each)."""
        pieces = [nn.Parameter(x.clone()) for x in start.view(*shape).split(list(sizes))]
        names = [f"layers.{number}.weight" for number in range(len(pieces))]
        group = {"params": pieces, "param_names": names, "weight_decay": config.weight_decay}
        optimizers = as_list(make(params=[group], config=config))
        for each in gradients:
            for piece, gradient in zip(pieces, each.view(*shape).split(list(sizes)), strict=True):
                piece.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        state = [state_of(piece, optimizers) for piece in pieces]
        return torch.cat([each.detach().flatten() for each in pieces]), state

    with torch.random.fork_rng(devices=[]):
        whole, (state,) = train(4, 6, sizes=[4])
        for name, value in state.items():
            if name != "step" and not isinstance(value, Tensor):
                allowed = "an optimizer whose state is tensors, which a checkpoint can hold: its "
                allowed += f"{name} is a {type(value).__name__}"
                raise UsageError("--optimizer", config.optimizer, allowed, works=WORKS)
        kept = [value.shape for name, value in state.items() if name != "step"]
        if any(shape != start.shape for shape in kept):
            return make, False
        try:
            pieces, _ = train(24, sizes=[9, 15])
        except Exception:  # it takes no vectors
            return make, False
    return make, torch.allclose(whole, pieces, rtol=1e-12, atol=0)


WORKS = ("--optimizer", "adamw")


def check_whole(config: OptimizerConfig, specs: Iterable[ShardingSpec], *, divides: bool) -> None:
    """Raise UsageError if the optimizer needs whole matrices and parameters with these specs are
    cut. divides: ranks divide the optimizer's state."""
    _, is_elementwise = find_optimizer(config)
    if is_elementwise:
        return
    axes = {axis.name for spec in specs for _, axis in spec.shards if axis.size > 1}
    if axes or divides:
        reason = f"parallelism along {' and '.join(sorted(axes))}" if axes else "ZeRO"
        allowed = f"one that updates element by element with {reason}: this one needs whole "
        allowed += "matrices"
        raise UsageError("--optimizer", config.optimizer, allowed, works=WORKS)


class NamedOptimizer:
    """As TorchAdam, for an optimizer of torch or of one's own."""

    def __init__(
        self,
        shards: Sequence[tuple[TensorSlice, Tensor]],
        decays: Callable[[ShardingSpec], float],
        config: OptimizerConfig,
    ) -> None:
        """shards: (this rank's part of a master, its gradient), of the parameters that it updates.
        decays: the weight decay of a parameter. Raises UsageError for parts where it needs the
        whole."""
        make, is_elementwise = find_optimizer(config)
        specs = [each.spec for each, _ in shards]
        check_whole(config, specs, divides=any(spec.flat is not None for spec in specs))
        self.shards: list[tuple[TensorSlice, nn.Parameter]] = []
        groups = defaultdict[float, list[tuple[str, nn.Parameter]]](list)
        for each, gradient in shards:
            local, spec = each.local, each.spec
            if not is_elementwise:
                # Without padding, which is no row; q, k and v are one matrix [3h, h].
                shape = (-1, spec.shape[-1]) if spec.decay else (-1,)
                local, gradient = (spec.real(x).view(shape) for x in (local, gradient))
                spec = ShardingSpec(shape=tuple(local.shape), partial=spec.partial)
            parameter = nn.Parameter(local)
            parameter.grad = gradient
            self.shards.append((TensorSlice(each.key, spec, local), parameter))
            groups[decays(each.spec)].append((each.key, parameter))
        self.gradients = [gradient for _, gradient in shards]
        self.optimizers = as_list(
            make(
                params=[
                    {
                        "params": [parameter for _, parameter in named],
                        "param_names": [name for name, _ in named],
                        "weight_decay": decay,
                    }
                    for decay, named in groups.items()
                ],
                config=config,
            )
        )

    @torch.no_grad()
    def step(self, lr: float, factor: float) -> None:
        """Update by the gradients x factor; the gradients are undefined afterwards."""
        if factor != 1.0:
            torch._foreach_mul_(self.gradients, factor)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
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
            state = state_of(parameter, self.optimizers)
            if isinstance(step := state.get("step"), Tensor):
                step.fill_(updates)
            elif step is not None:
                for optimizer in self.optimizers:
                    if parameter in optimizer.state:
                        optimizer.state[parameter]["step"] = updates


def as_list(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def state_of(parameter: nn.Parameter, optimizers: Iterable[Optimizer]) -> Mapping[str, Any]:
    """Its state in the optimizer that has some; values that are not set are left out."""
    for optimizer in optimizers:
        if parameter in optimizer.state:
            state = optimizer.state[parameter].items()
            return {name: value for name, value in state if value is not None}
    return {}
