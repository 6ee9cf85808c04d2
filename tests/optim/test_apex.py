"""NVIDIA apex's kernels in place of torch's, with a stand-in that has the names, signatures and
state of apex and the arithmetic of torch: apex itself needs a GPU and is not installed here."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adam import adam

from megatron.config.pretrain import require_apex
from megatron.config.training import OptimizerConfig
from megatron.errors import UsageError
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.refusals import refusal
from tests.tiny import assert_relative, samples, tiny_section, tiny_state

used: list[str] = []


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params: Any, *, adam_w_mode: bool, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.is_decoupled = adam_w_mode

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        used.append("adam")
        for group in self.param_groups:
            updates = torch.tensor(float(group["step"]))
            group["step"] += 1
            for p in group["params"]:
                adam(
                    [p],
                    [p.grad],
                    [self.state[p]["exp_avg"]],
                    [self.state[p]["exp_avg_sq"]],
                    [],
                    [updates.clone()],
                    decoupled_weight_decay=self.is_decoupled,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float) -> Tensor:
    used.append("norm")
    return F.layer_norm(x, shape, weight, bias, eps)


@pytest.fixture
def _apex(monkeypatch: pytest.MonkeyPatch) -> None:
    used.clear()
    norms = SimpleNamespace(fused_layer_norm_affine=fused_layer_norm)
    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=FusedAdam))
    monkeypatch.setitem(sys.modules, "apex.normalization.fused_layer_norm", norms)


def run(adam: str, norm: str, decoupled: bool = True, **settings: Any) -> TrainState:
    optimizer = OptimizerConfig(
        weight_decay=0.1, clip_grad=0.5, optimizer_impl=adam, decoupled_weight_decay=decoupled
    )
    section = tiny_section(layernorm_impl=norm)
    return tiny_state(serial_mesh(), section, optimizer, dtype=torch.float32, **settings)


def train(state: TrainState, steps: int) -> None:
    for _ in range(steps):
        train_step(state, [samples(4, first=state.samples)], 1e-3)


def tensors(state: TrainState) -> dict[str, Tensor]:
    return {piece.key: piece.local.clone() for piece in state.slices()}


def assert_same(actual: TrainState, expected: TrainState) -> None:
    """But for key biases, whose gradient is rounding alone, which Adam makes steps of."""
    wanted = tensors(expected)
    for key, each in tensors(actual).items():
        if not key.endswith("qkv.bias"):
            assert_relative(each, wanted[key], 1e-4, key)


@pytest.mark.usefixtures("_apex")
@pytest.mark.parametrize(
    ("adam", "norm", "decoupled"),
    [("torch", "apex", True), ("apex", "apex", True), ("apex", "torch", False)],
)
def test_apex_trains_as_the_default(adam: str, norm: str, decoupled: bool) -> None:
    default, other = run("torch", "torch", decoupled), run(adam, norm, decoupled)
    train(default, 5)
    assert not used
    train(other, 5)
    assert {*used} == {n for n, of in (("adam", adam), ("norm", norm)) if of == "apex"}
    assert_same(other, default)


@pytest.mark.usefixtures("_apex")
@pytest.mark.parametrize(("saver", "loader"), [("torch", "apex"), ("apex", "torch")])
def test_a_checkpoint_with_apex_goes_on_without_and_the_reverse(saver: str, loader: str) -> None:
    """The updates behind the moments go with them: they are Adam's correction of its bias."""
    straight, first, second = run("torch", "torch"), run(saver, saver), run(loader, loader, seed=1)
    train(straight, 6)
    train(first, 3)
    saved = tensors(first)
    for piece in second.slices():
        piece.local.copy_(saved[piece.key])
    second.step, second.samples = first.step, first.samples
    second.optimizer.loaded(second.updates)
    train(second, 3)
    assert_same(second, straight)


FILES = ("apex/optimizers/fused_adam.py", "apex/normalization/fused_layer_norm.py")
EXTENSIONS = ("amp_C.py", "fused_layer_norm_cuda.py")


@pytest.mark.parametrize("field", ["optimizer_impl", "layernorm_impl"])
@pytest.mark.parametrize("files", [(), ("apex/models.py",), FILES, (*FILES, *EXTENSIONS)], ids=len)
def test_apex_that_is_not_whole_is_refused_and_never_imported(
    field: str, files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none, another package of this name, or NVIDIA's without its extensions."""
    for name in (*files, *(["apex/__init__.py"] if files else [])):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    asked = {"optimizer_impl": "torch", "layernorm_impl": "torch"}
    require_apex(**asked)
    if {*EXTENSIONS} <= {*files}:
        require_apex(**asked | {field: "apex"})
    else:
        error, flag = refusal(lambda: require_apex(**asked | {field: "apex"})), "--" + field
        assert isinstance(error, UsageError)
        assert error.works == (flag.replace("_", "-"), "torch")
