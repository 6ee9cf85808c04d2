"""The optimizer against torch's AdamW and clip_grad_norm_ on the plain model; apex's kernels in
place of torch's."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.adam import adam

from megatron.checkpoint.format import read_checkpoint
from megatron.config.pretrain import require_apex
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.errors import UsageError
from megatron.optim import compiled
from megatron.optim.adam import FlatWeights, LossScaler, TorchAdam
from megatron.optim.compiled import CompiledAdam
from megatron.parallel.mesh import serial_mesh
from megatron.train.executor import on_device
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests import plain
from tests.dist import on_ranks
from tests.refusals import refusal
from tests.tiny import (
    SEED,
    assert_relative,
    mesh_of_ranks,
    micro_batches,
    samples,
    save_state,
    tiny_config,
    tiny_model,
    tiny_state,
    tiny_weights,
    whole_slices,
    whole_weights,
)

CPU = torch.device("cpu")
RATES = [1e-3, 2e-3, 1e-3, 5e-4, 1e-4]


def plain_run(
    config: OptimizerConfig,
    rates: Sequence[float],
    optimizer_of: Callable[..., torch.optim.Optimizer] = plain.adamw,
) -> tuple[nn.Module, list[float]]:
    """(the model, losses) after a loop that anyone would write: no buffers, one batch a step."""
    model, losses = plain.GPT2(tiny_weights(tiny_model(serial_mesh())), 4), list[float]()
    optimizer = optimizer_of(model, config)
    for step, rate in enumerate(rates):
        batch = samples(4, first=10 * step)
        loss = plain.summed_loss(model(batch), batch) / float(batch.loss_mask.sum())
        plain.update(optimizer, loss, config.clip_grad, rate)
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    "settings",
    [
        *({"weight_decay": 0.3, "adam_beta2": 0.95, "clip_grad": clip} for clip in (0.0, 0.5, 1e9)),
        {"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_eps": 0.1, "clip_grad": 0.0},
    ],
)
def test_five_steps_equal_a_plain_loop(settings: dict[str, float]) -> None:
    config = OptimizerConfig(**settings)
    dense, losses = plain_run(config, RATES)
    state = tiny_state(serial_mesh(), optimizer=config)
    for step, rate in enumerate(RATES):
        result = train_step(state, [samples(4, first=10 * step)], rate)
        assert result.loss == pytest.approx(losses[step], rel=1e-12)
        assert result.grad_norm > 0.5, "the clip would not be seen"
    expected = dict(dense.named_parameters())
    torch.testing.assert_close(whole_weights(state.model), expected, rtol=0, atol=1e-10)


@on_ranks(2)
def test_three_steps_equal_torch_s_adam_by_default() -> None:
    """It decays every parameter, biases and norms too, by a part of the gradient."""
    decay = {"decoupled_weight_decay": False, "decay_biases_and_norms": True}
    config = OptimizerConfig(weight_decay=1e-2, clip_grad=0.5, **decay)
    expected, _ = plain_run(
        config, RATES[:3], lambda model, _: torch.optim.Adam(model.parameters(), weight_decay=1e-2)
    )
    wanted = dict(expected.named_parameters())
    state = tiny_state(mesh_of_ranks(2), optimizer=config)
    for step, rate in enumerate(RATES[:3]):
        train_step(state, micro_batches(samples(4, first=10 * step), state.mesh, 2), rate)
    torch.testing.assert_close(whole_weights(state.model), wanted, rtol=0, atol=1e-12)


def test_biases_and_norms_do_not_decay() -> None:
    """With gradients of zero, decay is all that moves a weight: by lr x weight decay."""
    state = tiny_state(serial_mesh(), optimizer=OptimizerConfig(weight_decay=0.1))
    before = whole_weights(state.model)
    state.optimizer.step(lr=0.5, unscale=1.0, norm=0.0)
    for name, weight in whole_weights(state.model).items():
        is_vector = name.endswith("bias") or "norm" in name
        factor = 1.0 if is_vector else 1.0 - 0.5 * 0.1
        torch.testing.assert_close(weight, before[name] * factor, rtol=1e-15, atol=0)


def test_bf16_weights_are_the_rounded_masters() -> None:
    state = tiny_state(serial_mesh(), dtype=torch.bfloat16)
    masters = {each.key: each.local for each in state.optimizer.masters()}
    parameters = dict(state.model.named_parameters())
    assert masters.keys() == parameters.keys()
    start = {name: master.clone() for name, master in masters.items()}
    # Steps too small to be seen in bf16 are not lost: the masters add them up.
    for step in range(3):
        train_step(state, [samples(2, first=step)], 1e-6)
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert parameters[name].dtype == torch.bfloat16
        assert torch.equal(parameters[name], master.bfloat16())
        assert not torch.equal(master, start[name])
    still = sum(torch.equal(parameters[name], start[name].bfloat16()) for name in start)
    assert still > 0


def pure_state(clip_grad: float = 0.0) -> TrainState:
    config = OptimizerConfig(weight_decay=0.1, decay_biases_and_norms=True, clip_grad=clip_grad)
    pure = PrecisionConfig(pure_bf16=True)
    return tiny_state(serial_mesh(), optimizer=config, precision=pure, dtype=torch.bfloat16)


@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_pure_bf16_is_torch_s_adamw_on_a_bf16_model(clip_grad: float) -> None:
    """The same model without buckets, whose gradients are autograd's: the same bits without
    clipping. torch's clipping has a norm and a factor of 8 bits, ours of 53, and rounds once less.
    """
    state, twin = pure_state(clip_grad), tiny_model(serial_mesh(), dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.1, fused=True)
    for step, rate in enumerate(RATES[:3]):
        batch = samples(4, first=10 * step)
        result = train_step(state, [batch], rate)
        optimizer.zero_grad()
        scales = 1 / torch.tensor(twin.denominators(batch), dtype=torch.float64)
        twin(on_device(batch, CPU), scales).sum().backward()
        gradients = [each.grad for each in twin.parameters() if each.grad is not None]
        norm = sum(each.double().square().sum() for each in gradients) ** 0.5
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-6 if not clip_grad else 1e-2)
        if clip_grad:
            assert result.grad_norm > clip_grad
            nn.utils.clip_grad_norm_(twin.parameters(), clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    found = whole_weights(state.model)
    for name, weight in whole_weights(twin).items():
        if not clip_grad:
            assert torch.equal(found[name], weight), name
        else:
            torch.testing.assert_close(found[name], weight, rtol=2**-6, atol=2e-3)


def test_pure_bf16_holds_eight_bytes_a_weight() -> None:
    state = pure_state()
    train_step(state, [samples(2)], 1e-3)
    kept = list(state.optimizer.tensors())
    assert {each.key.partition(".")[0] for each in kept} == {"exp_avg", "exp_avg_sq"}
    gradients = [bucket.gradients for bucket in state.gradients.buckets]
    tensors = [*state.model.parameters(), *gradients, *(each.local for each in kept)]
    assert {each.dtype for each in tensors} == {torch.bfloat16}
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    assert sum(held.values()) == 8 * sum(map(len, gradients))


class FusedAdam(torch.optim.Optimizer):
    """By the names, signature and state of apex, which needs a GPU."""

    def __init__(self, params: Any, *, adam_w_mode: bool, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.is_decoupled = adam_w_mode

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            for p in group["params"]:
                tensors = p, p.grad, self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                adam(
                    *([each] for each in tensors),
                    [],
                    [torch.tensor(float(group["step"]))],
                    **dict(zip(("beta1", "beta2"), group["betas"], strict=True)),
                    **settings,
                    decoupled_weight_decay=self.is_decoupled,
                    amsgrad=False,
                    maximize=False,
                )
            group["step"] += 1


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


@pytest.mark.parametrize(
    ("kinds", "decoupled"), [(("torch", "apex"), True), (("apex", "torch"), False)]
)
def test_apex_trains_and_resumes_as_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kinds: tuple[str, str], decoupled: bool
) -> None:
    """The number of updates goes with the moments: it is Adam's correction of its bias."""
    parts: dict[str, Any] = {"FusedAdam": FusedAdam, "fused_layer_norm_affine": fused_layer_norm}
    kernels = Mock(**{name: Mock(wraps=each) for name, each in parts.items()})
    for name in ("apex.optimizers", "apex.normalization.fused_layer_norm"):
        monkeypatch.setitem(sys.modules, name, kernels)

    def trained(kind: str, steps: range, seed: int = SEED) -> TrainState:
        """From the checkpoint of the first step, if there is one."""
        settings = {"weight_decay": 0.1, "clip_grad": 0.5, "decoupled_weight_decay": decoupled}
        optimizer = OptimizerConfig(optimizer_impl=kind, **settings)
        config = tiny_config(layernorm_impl=kind)
        state = tiny_state(serial_mesh(), config, optimizer, dtype=torch.float32, seed=seed)
        if steps.start:
            state.load(read_checkpoint(saved.path))
        for step in steps:
            train_step(state, [samples(4, first=4 * step)], 1e-3)
        return state

    straight = trained("torch", range(4))
    assert not kernels.mock_calls
    saved = save_state(trained(kinds[0], range(2)), tmp_path)
    resumed = trained(kinds[1], range(2, 4), seed=1)
    assert {name for name, *_ in kernels.mock_calls} == parts.keys()
    wanted = {each.key: each.local for each in straight.slices()}
    for each in resumed.slices():
        # The gradient of a key's bias is rounding alone, which Adam makes steps of.
        if not each.key.endswith("qkv.bias"):
            assert_relative(each.local, wanted[each.key], 1e-4, each.key)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_compiled_update_is_torch_s(
    dtype: torch.dtype, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding; a factor of 0 changes nothing and is not counted, and one function is for all
    lengths. Traced alone: tests/gpu has Inductor, which takes long."""
    graphs = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(compiled.update, backend=graphs, fullgraph=True)
    monkeypatch.setattr(compiled, "compiled_update", lambda: traced)
    config, sizes = OptimizerConfig(decoupled_weight_decay=decoupled), (640, 6400, 128, 1280)
    both = []
    for make in (TorchAdam, CompiledAdam):
        generator = torch.Generator().manual_seed(1)
        segments = [
            FlatWeights(
                decay,
                torch.randn(size, generator=generator).to(dtype),
                *(torch.zeros(size, dtype=dtype) for _ in range(3)),
                torch.full((size,), torch.nan, dtype=torch.bfloat16),
            )
            for size, decay in zip(sizes, (0.1, 0.1, 0.0, 0.0), strict=True)
        ]
        adam, found = make(segments, config), []
        for factor in (0.5, 1.0, 0.0, 0.25):
            before = [each.weight.clone() for each in segments]
            for each in segments:
                each.gradient.copy_(torch.randn(each.weight.shape, generator=generator))
                if not factor:
                    each.gradient.fill_(torch.inf)
            adam.step(1e-2, torch.tensor(factor, dtype=torch.float64))
            weights = [each.weight.clone() for each in segments]
            assert factor or all(map(torch.equal, weights, before))
            found += weights
        both.append(found)
    assert graphs.frame_count == 1
    assert all(torch.equal(each.half, each.weight.bfloat16()) for each in segments)
    for ours, theirs in zip(*both, strict=True):
        # Torch's kernel for bf16 on a CPU rounds more often than ours.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=eps)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_the_compiled_update_rounds_the_weights(stage: int) -> None:
    """In ZeRO stage 3 they are gathered later; a step that is skipped changes nothing."""
    masters = []
    for kind in ("torch", "compiled"):
        config = OptimizerConfig(optimizer_impl=kind, clip_grad=0.5)
        mesh = mesh_of_ranks("data=2")
        state = tiny_state(mesh, optimizer=config, dtype=torch.float16, zero_stage=stage)
        state.scaler = LossScaler(2.0**20, most_skips=2)
        results = []
        for number in range(3):
            batch = micro_batches(samples(4, first=4 * number), mesh, 2)
            with pytest.MonkeyPatch.context() as patch:  # no compiler is needed
                patch.setattr(compiled, "compiled_update", lambda: compiled.update)
                results.append(train_step(state, batch, 1e-3))
            state.scaler.scale = 2.0**10
        assert [each.skipped for each in results] == [True, False, False]
        masters.append({each.key: each.local for each in state.optimizer.masters()})
        if stage < 3:
            weights = whole_weights(state.model)
            for name, each in whole_slices(state.optimizer.masters()).items():
                assert torch.equal(weights[name], each.half()), name
    for name, each in masters[0].items():
        # The gradient of a key's bias is rounding alone, which Adam makes steps of.
        if not name.endswith("qkv.bias"):
            torch.testing.assert_close(masters[1][name], each, rtol=1e-4, atol=1e-4)


FILES = ("apex/optimizers/fused_adam.py", "apex/normalization/fused_layer_norm.py")
EXTENSIONS = ("amp_C.py", "fused_layer_norm_cuda.py")


@pytest.mark.parametrize("field", ["optimizer_impl", "layernorm_impl"])
@pytest.mark.parametrize("files", [(), ("apex/models.py",), FILES, (*FILES, *EXTENSIONS)], ids=len)
def test_apex_that_is_not_whole_is_refused(
    field: str, files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none, another package of this name, or NVIDIA's without its extensions; none is
    imported."""
    for name in (*files, *(["apex/__init__.py"] if files else [])):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    asked = {"optimizer_impl": "torch", "layernorm_impl": "torch"}
    require_apex(**asked)
    if {*EXTENSIONS} <= {*files}:
        require_apex(**asked | {field: "apex"})
    else:
        error = refusal(lambda: require_apex(**asked | {field: "apex"}), kind=UsageError)
        assert error.works == (f"--{field}".replace("_", "-"), "torch")
