"""Optimizers by name: the same numbers as torch's own on the plain model at each layout, and the
same bytes after a resume."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.checkpoint.format import read_checkpoint
from megatron.config.training import OptimizerConfig
from megatron.errors import UsageError
from megatron.optim.adam import MasterWeights
from megatron.optim.by_name import find_optimizer
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.dist import on_ranks
from tests.optim.test_adam import RATES, plain_run
from tests.refusals import field_of, refusal
from tests.tiny import (
    assert_relative,
    mesh_of_ranks,
    micro_batches,
    samples,
    save_state,
    state_at,
    whole_slices,
)

DECAY, BETAS, EPSILON = 0.1, (0.8, 0.9), 1e-6
HERE = "tests.optim.test_by_name:"
OWN = f"{HERE}normed"


def pairs_of(name: str, model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(a parameter, the one of the same memory that the optimizer gets): as it is, or where the
    optimizer needs matrices [m, n], a weight as one, and a bias or norm as a vector."""
    pairs = []
    for key, parameter in model.named_parameters():
        shape = (-1,) if key.endswith("bias") or "norm" in key else (-1, parameter.shape[-1])
        shape = shape if name in WHOLE else parameter.shape
        pairs.append((parameter, nn.Parameter(parameter.data.view(shape))))
    return pairs


def muon(params: list[nn.Parameter]) -> list[Optimizer]:
    """The embeddings come first."""
    embeddings, layers = params[:2], params[2:]
    vectors = [x for x in layers if x.ndim == 1]
    return [
        torch.optim.Muon(
            [x for x in layers if x.ndim == 2], weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([*embeddings, *vectors], betas=BETAS, eps=EPSILON, weight_decay=DECAY),
    ]


def one_of(make: Callable[..., Optimizer], **settings: Any) -> Callable[..., list[Optimizer]]:
    return lambda params: [make(params, weight_decay=DECAY, **settings)]


TORCH: Mapping[str, Callable[[list[nn.Parameter]], list[Optimizer]]] = {
    "sgd": one_of(torch.optim.SGD, momentum=0.7),
    "adam": one_of(torch.optim.AdamW, betas=BETAS, eps=EPSILON),
    "adagrad": one_of(torch.optim.Adagrad, eps=EPSILON),
    "rmsprop": one_of(torch.optim.RMSprop, alpha=BETAS[1], eps=EPSILON),
    "muon": muon,
    "adafactor": one_of(torch.optim.Adafactor),
}
WHOLE = {"muon", "adafactor", OWN}
LAYOUTS = ["tensor=2", "data=2,zero=1", "data=2,zero=3", "pipeline=2"]


class Plain(Optimizer):
    """torch's optimizers of the plain model as one, for `plain_run`."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.pairs = pairs_of(name, model)
        self.optimizers = TORCH[name]([mine for _, mine in self.pairs])
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        for parameter, mine in self.pairs:
            assert parameter.grad is not None
            mine.grad = parameter.grad.view_as(mine)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            optimizer.step()


def config_of(name: str) -> OptimizerConfig:
    given = {"sgd_momentum": 0.7} if name == "sgd" else {}
    given |= {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPSILON}
    decay = {"weight_decay": DECAY, "decay_biases_and_norms": True}
    return OptimizerConfig(optimizer=name, clip_grad=0.5, **decay, **given)


def start(words: str, config: OptimizerConfig, mesh: Mesh | None = None) -> TrainState:
    """mesh: of the ranks of the pool; None for one process."""
    return state_at(words, optimizer=config, mesh=mesh)


def train(state: TrainState, *numbers: int) -> None:
    for step in numbers:
        train_step(state, micro_batches(samples(4, first=10 * step), state.mesh, 2), RATES[step])


def masters(state: TrainState) -> dict[str, Tensor]:
    return whole_slices(state.optimizer.masters())


def trained(
    words: str, config: OptimizerConfig, mesh: Mesh | None = None
) -> dict[str, Tensor] | str:
    """The weights after three steps, or the field that is refused."""
    try:
        state = start(words, config, mesh)
    except UsageError as error:
        return field_of(error)
    train(state, 0, 1, 2)
    return masters(state)


@cache
def plain(name: str) -> dict[str, Tensor]:
    """The weights of the plain model after three steps by torch's optimizer."""
    dense, _ = plain_run(config_of(name), RATES[:3], lambda model, _: Plain(model, name))
    return {key: weight.detach() for key, weight in dense.named_parameters()}


def equal_torch(name: str, found: Mapping[str, Tensor]) -> None:
    # Adafactor divides the gradient of a key's bias, which is rounding, by its size.
    tolerance = 1e-5 if name == "adafactor" else 1e-12
    assert found
    for key, weight in found.items():
        assert_relative(weight, plain(name)[key], tolerance, f"{name} {key}")


@pytest.mark.parametrize("name", TORCH)
def test_three_steps_equal_torch(name: str) -> None:
    found = trained("serial", config_of(name))
    assert isinstance(found, dict)
    equal_torch(name, found)


@pytest.mark.parametrize("words", LAYOUTS)
@on_ranks("words")
def test_a_layout_gives_the_same_or_is_refused(words: str, tmp_path: Path) -> None:
    mesh = mesh_of_ranks(words)
    for name in ("adam", "muon", "adafactor", f"{HERE}coupled"):
        weights = trained(words, config_of(name), mesh)
        if name.endswith("coupled") or (name in WHOLE and words != "pipeline=2"):
            assert weights == "--optimizer"
        else:
            equal_torch(name, weights)
    assert resumed(words, config_of("examples.own_parts:lion"), tmp_path, mesh)


class Normed(Optimizer):
    """Moves by the gradient of each tensor over the norm of its first one: whole tensors, a state
    of one number, and a count of steps that is no tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                norm = state.setdefault("norm", p.grad.norm() + 1)
                p.sub_(p.grad / norm, alpha=group["lr"] / state["step"])


class Coupled(Normed):
    """Moves by the gradient over the norm of all gradients, where that is above 100."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = sum(p.grad.square().sum() for p in group["params"]) ** 0.5
            for p in group["params"]:
                self.state[p].setdefault("seen", torch.zeros_like(p)).add_(1)
                p.sub_(p.grad / max(1.0, float(norm) / 100), alpha=group["lr"])


class Remembering(Normed):
    """has: where it keeps what no checkpoint holds."""

    def __init__(self, params: Any, lr: float, has: str) -> None:
        super().__init__(params, lr)
        self.has, self.updates = has, 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.updates += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["number"] = state.get("number", 0.0) + 1
                if self.has == "later" and self.updates % 5 == 0:
                    state["slow"] = p.detach().clone()
                factors = {"state": state["number"], "groups": group["k"], "self": self.updates}
                p.data.mul_(1 + 1 / factors.get(self.has, 1))


class Failing(Normed):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("it needs a GPU")


def of(kind: Callable[..., Optimizer], *has: str) -> Callable[..., Optimizer]:
    return lambda params, config: kind(params, config.lr, *has)


normed, coupled, failing = map(of, (Normed, Coupled, Failing))
remembering, grouping, late, counting = (
    of(Remembering, has) for has in ("state", "groups", "later", "self")
)


def one_rate(params: Any, config: OptimizerConfig) -> Optimizer:
    return torch.optim.SGD(params, config.lr)


def two_rates(params: Any, config: OptimizerConfig) -> Optimizer:
    """SGD, at a tenth of the rate for embeddings."""
    groups = []
    for group in params:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            rate = config.lr / 10 if "embedding" in name else config.lr
            groups.append({"params": [parameter], "lr": rate, "weight_decay": DECAY})
    return torch.optim.SGD(groups, config.lr)


def state_bytes(state: TrainState) -> dict[str, bytes]:
    return {each.key: each.local.numpy().tobytes() for each in state.optimizer.tensors()}


def resumed(words: str, config: OptimizerConfig, folder: Path, mesh: Mesh | None = None) -> bool:
    """Whether a run that is saved and loaded has the same state, and goes on as one that is not."""
    state = start(words, config, mesh)
    train(state, 0, 1)
    path = save_state(state, folder)
    other = start(words, config, mesh)
    other.load(read_checkpoint(path.path))
    before = state_bytes(state)
    is_same = before.keys() == state_bytes(other).keys() and before == state_bytes(other)
    for each in (state, other):
        train(each, 2, 3)
    ends = masters(state), masters(other)
    return bool(before) and is_same and all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


@pytest.mark.parametrize("name", ["adamw", *TORCH, OWN, "examples.own_parts:lion"])
def test_a_resumed_state_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    assert resumed("serial", config_of(name), tmp_path)


def test_a_trial_finds_what_an_optimizer_needs() -> None:
    names = [*TORCH, OWN, "examples.own_parts:lion"]
    needs = {name: find_optimizer(config_of(name))[1] for name in names}
    assert needs == {name: "matrices" if name in WHOLE else "elements" for name in names}
    assert find_optimizer(config_of(f"{HERE}coupled"))[1] == "model"


def test_one_that_couples_parameters_is_refused_on_the_host() -> None:
    config = config_of(f"{HERE}coupled")
    assert trained("serial", replace(config, optimizer_cpu_offload=True)) == "--optimizer"
    assert isinstance(trained("serial", config), dict)


@pytest.mark.parametrize("name", ["remembering", "grouping", "late", "counting", "failing"])
def test_one_that_no_checkpoint_holds_or_no_cpu_runs_is_refused(name: str) -> None:
    config = config_of(HERE + name)
    assert field_of(refusal(lambda: start("serial", config))) == "--optimizer"


def test_a_group_keeps_its_ratio_to_the_rate() -> None:
    ends = []
    for name in ("two_rates", "one_rate"):
        state = start("serial", config_of(HERE + name))
        before = {key: weight.clone() for key, weight in masters(state).items()}
        train(state, 0)
        ends.append({key: weight - before[key] for key, weight in masters(state).items()})
    for key, moved in ends[0].items():
        share = 0.1 if "embedding" in key else 1.0
        assert_relative(moved, share * ends[1][key], 1e-9, key)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_model_without_trained_parameters_has_no_state(name: str) -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    mesh = serial_mesh()
    gradients = GradientBuckets.for_master_weights(model, specs={}, mesh=mesh)
    assert not [*MasterWeights(gradients, config_of(name)).tensors()]
