"""NVIDIA apex's kernels in place of torch's, tried with a stand-in package.

The stand-in has the names, signatures and state of apex and computes with plain torch on the CPU;
apex itself needs a GPU and is not installed here.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.checks import UsageError
from megatron.config.pretrain import require_apex
from megatron.config.training import OptimizerConfig
from megatron.parallel.layers import ApexLayerNorm
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.tiny import assert_relative, samples, tiny_section, tiny_state

FUSED_ADAM = """
import torch

class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
                 adam_w_mode=True, weight_decay=0.0, amsgrad=False, set_grad_none=True,
                 capturable=False, master_weights=False):
        assert not amsgrad and not capturable and not master_weights
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                        weight_decay=weight_decay)
        self.adam_w_mode = adam_w_mode
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None,
             grad_scaler=None):
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            beta1, beta2 = group["betas"]
            first, second = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p).float()
                    state["exp_avg_sq"] = torch.zeros_like(p).float()
                if not self.adam_w_mode:
                    p.grad.add_(p, alpha=group["weight_decay"])
                m = state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = (m / first) / ((v / second).sqrt() + group["eps"])
                if self.adam_w_mode:
                    update = update + group["weight_decay"] * p
                p.sub_(group["lr"] * update)
"""

FUSED_LAYER_NORM = """
def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6,
                            memory_efficient=False):
    wide = input.float()
    centred = wide - wide.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    normalised = centred * (variance + eps).rsqrt()
    return (normalised * weight.float() + bias.float()).to(input.dtype)
"""

NVIDIA = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "from .fused_adam import FusedAdam",
    "apex/optimizers/fused_adam.py": FUSED_ADAM,
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": FUSED_LAYER_NORM,
    "amp_C.py": "",
    "fused_layer_norm_cuda.py": "",
}


def install(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)


def forget_apex() -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.fixture
def apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path / "site", NVIDIA, monkeypatch)
    yield
    forget_apex()


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
    """Weights and moments within 1e-4 of the largest of their tensor; key biases aside, whose
    gradient is rounding alone, which Adam makes steps of."""
    wanted = tensors(expected)
    for key, each in tensors(actual).items():
        if not key.endswith("qkv.bias"):
            assert_relative(each, wanted[key], 1e-4, key)


@pytest.mark.usefixtures("apex")
@pytest.mark.parametrize(
    ("adam", "norm", "decoupled"),
    [
        *(("apex", "torch", True), ("torch", "apex", True), ("apex", "apex", True)),
        ("apex", "torch", False),
    ],
)
def test_training_equals_the_default(adam: str, norm: str, decoupled: bool) -> None:
    default, other = run("torch", "torch", decoupled), run(adam, norm, decoupled)
    norms = [each for each in other.model.modules() if isinstance(each, ApexLayerNorm)]
    assert len(norms) == (5 if norm == "apex" else 0)
    kernel = getattr(other.optimizer.adams[0], "optimizer", None)
    assert (type(kernel).__module__ == "apex.optimizers.fused_adam") == (adam == "apex")
    train(default, 5)
    train(other, 5)
    assert_same(other, default)


@pytest.mark.usefixtures("apex")
@pytest.mark.parametrize(("saver", "loader"), [("torch", "apex"), ("apex", "torch")])
def test_a_checkpoint_of_one_goes_on_in_the_other(saver: str, loader: str) -> None:
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


def test_nothing_is_imported_where_apex_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, {"apex/__init__.py": "raise RuntimeError('imported')"}, monkeypatch)
    require_apex(optimizer_impl="torch", layernorm_impl="torch")
    train(run("torch", "torch"), 1)
    with pytest.raises(UsageError):
        require_apex(optimizer_impl="apex", layernorm_impl="torch")


@pytest.mark.parametrize("field", ["optimizer_impl", "layernorm_impl"])
def test_what_is_lacking_is_refused(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "--" + field.replace("_", "-")
    asked = {"optimizer_impl": "torch", "layernorm_impl": "torch", field: "apex"}
    unrelated = {"apex/__init__.py": "raise RuntimeError('imported')", "apex/models.py": ""}
    python_only = {name: text for name, text in NVIDIA.items() if "/" in name}
    for folder, files in (("none", {}), ("pypi", unrelated), ("python_only", python_only)):
        install(tmp_path / folder, files, monkeypatch)
        with pytest.raises(UsageError) as refused:
            require_apex(**asked)
        assert (refused.value.flag, refused.value.works) == (flag, (flag, "torch"))

    install(tmp_path / "whole", NVIDIA, monkeypatch)
    require_apex(**asked)
    assert "apex" not in sys.modules
