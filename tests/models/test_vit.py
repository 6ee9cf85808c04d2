"""ViT against transformers and plain torch; its crops, flips and accuracy."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig as TheirConfig
from transformers import ViTForImageClassification

from megatron.config.model import ViTConfig
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainViTConfig
from megatron.config.training import OptimizerConfig
from megatron.data.images import ImageBatch
from megatron.models.build import build_model, build_on_meta
from megatron.models.vit import ViT, crop_and_flip
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import sharding_specs
from megatron.train.evaluate import mean_losses
from megatron.train.executor import on_device
from megatron.train.state import TrainState, build_state
from megatron.train.step import train_step
from tests.dist import Pool
from tests.tiny import (
    mesh_of_ranks,
    scatter_weights,
    set_weights,
    tiny_weights,
    whole_gradients,
    whole_weights,
)
from tests.vit import PATCH, SIDE, vit_config, vit_samples

CLASSES, HIDDEN, LAYERS = 7, 32, 2


def images(count: int, *, first: int = 0, changes: bool = False) -> ImageBatch:
    batch = vit_samples(count, first=first, changes=changes)
    return batch.with_arrays(labels=batch.labels % CLASSES)


def normalised(batch: ImageBatch) -> Tensor:
    """fp64 [b, 3, size, size]"""
    pixels = torch.from_numpy(batch.images).double() / 255
    facts = vit_config().image_mean, vit_config().image_std
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in facts)
    return ((pixels - mean) / std).permute(0, 3, 1, 2)


def theirs() -> nn.Module:
    torch.manual_seed(0)
    config = TheirConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * HIDDEN,
        image_size=SIDE,
        patch_size=PATCH,
        num_labels=CLASSES,
        layer_norm_eps=1e-5,
    )
    model = ViTForImageClassification(config).double()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.2)
    return model


def in_our_names(of: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of transformers, such as weights or gradients."""
    embeddings = "vit.embeddings."
    bias = of[f"{embeddings}patch_embeddings.projection.bias"]
    own = {
        "token_type_embedding.weight": torch.stack([of[f"{embeddings}cls_token"][0, 0], bias]),
        "position_embedding.weight": of[f"{embeddings}position_embeddings"][0],
        "patch_embedding.weight": of[f"{embeddings}patch_embeddings.projection.weight"].flatten(1),
    }
    names = {"attention.output": "attention.o_proj", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    names |= {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
    for kind in ("weight", "bias"):
        own[f"final_norm.{kind}"] = of[f"vit.layernorm.{kind}"]
        own[f"head.{kind}"] = of[f"classifier.{kind}"]
        for number in range(LAYERS):
            ours, their = f"transformer.layers.{number}", f"vit.layers.{number}"
            qkv = [of[f"{their}.attention.{each}_proj.{kind}"] for each in "qkv"]
            own[f"{ours}.attention.qkv.{kind}"] = torch.stack(qkv)
            for name, other in names.items():
                own[f"{ours}.{name}.{kind}"] = of[f"{their}.{other}.{kind}"]
    return own


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm())


def whole_state(config: ViTConfig, weights: dict[str, Tensor], **settings: Any) -> TrainState:
    state = build_state(config, serial_mesh(), CLASSES, seed=1, dtype=torch.float64, **settings)
    set_weights(state, weights)
    return state


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_three_steps_equal_those_of_transformers(smoothing: float) -> None:
    other, rate = theirs(), 1e-2
    named = dict(other.named_parameters())
    weights = in_our_names({name: each.detach() for name, each in named.items()})
    optimizer = OptimizerConfig(weight_decay=0.1, decay_biases_and_norms=True, clip_grad=0)
    state = whole_state(vit_config(label_smoothing=smoothing), weights, optimizer=optimizer)
    adam = torch.optim.AdamW(other.parameters(), lr=rate, weight_decay=0.1)
    for step in range(3):
        batch = images(6, first=10 * step)
        scores = other(pixel_values=normalised(batch)).logits
        assert error(state.model(on_device(batch, torch.device("cpu"))), scores) < 1e-12
        labels = torch.from_numpy(batch.labels)
        loss = F.cross_entropy(scores, labels, label_smoothing=smoothing)
        adam.zero_grad()
        loss.backward()
        result = train_step(state, [batch], rate)
        assert result.loss == pytest.approx(loss.item(), rel=1e-12)
        wanted = in_our_names({name: each.grad for name, each in named.items()})
        for name, each in whole_gradients(state.gradients).items():
            assert_close(name, each, wanted[name])
        adam.step()
    wanted = in_our_names({name: each.detach() for name, each in named.items()})
    for name, each in whole_weights(state.model).items():
        assert_close(name, each, wanted[name])


def assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    if name.endswith("qkv.bias"):  # the gradient of the keys' is zero in theory
        actual, expected = actual[[0, 2]], expected[[0, 2]]
    assert error(actual, expected) < 1e-10, name


def test_mean_pooling_is_that_of_their_patches() -> None:
    """There is no class token, and the patches' bias is their own."""
    other, batch = theirs(), images(5)
    vit: Any = other.vit
    weights = in_our_names({name: each.detach() for name, each in other.named_parameters()})
    _, bias = weights.pop("token_type_embedding.weight")
    positions = weights["position_embedding.weight"][1:]
    weights |= {"patch_embedding.bias": bias, "position_embedding.weight": positions}
    config = vit_config(pooling="mean")
    model: ViT = build_model(config, serial_mesh(), CLASSES, seed=1, dtype=torch.float64)
    scatter_weights(model, weights)
    x = vit.embeddings.patch_embeddings(normalised(batch)) + positions
    for layer in vit.layers:
        x = layer(x)
    scores = other.get_submodule("classifier")(vit.layernorm(x).mean(1))
    assert error(model(on_device(batch, torch.device("cpu"))), scores) < 1e-12


@pytest.mark.parametrize("left_out", ["", "shifts", "flips"])
def test_crops_and_flips(left_out: str) -> None:
    batch = images(8, changes=True)
    batch = batch.with_arrays(**{left_out: None} if left_out else {})
    changed = crop_and_flip(on_device(batch, torch.device("cpu"))).numpy()
    for number, image in enumerate(batch.images):
        down, right = (0, 0) if batch.shifts is None else batch.shifts[number]
        black = np.pad(image, ((SIDE, SIDE), (SIDE, SIDE), (0, 0)))
        expected = black[SIDE + down : 2 * SIDE + down, SIDE + right : 2 * SIDE + right]
        if batch.flips is not None and batch.flips[number]:
            expected = expected[:, ::-1]
        assert np.array_equal(changed[number], expected)


class Validation:
    samples_per_epoch = 16

    def batch(self, numbers: Sequence[int]) -> ImageBatch:
        whole = images(self.samples_per_epoch).with_arrays(numbers=None)
        return whole.with_arrays(images=whole.images[numbers], labels=whole.labels[numbers])


def measure(tensor: str, samples: int, sequence: bool = False) -> dict[str, float]:
    """Loss and accuracy on this rank of the pool, or in the process of the test."""
    mesh = mesh_of_ranks(int(tensor), sequence_parallel=sequence)
    model: ViT = build_model(vit_config(), mesh, CLASSES, seed=1, dtype=torch.float64)
    scatter_weights(model, tiny_weights(model))
    return mean_losses(model, model.measured, Validation(), samples, 2, mesh)


def test_accuracy() -> None:
    model: ViT = build_model(vit_config(), serial_mesh(), CLASSES, seed=1, dtype=torch.float64)
    scatter_weights(model, tiny_weights(model))
    batch = Validation().batch(range(11))
    with torch.no_grad():
        scores = model(on_device(batch, torch.device("cpu")))
    labels = torch.from_numpy(batch.labels)
    order = scores.argsort(1, descending=True)
    found = measure("1", 11)
    assert found["loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-12)
    assert found["top1"] == (order[:, 0] == labels).double().mean()
    assert found["top5"] == pytest.approx((order[:, :5] == labels[:, None]).double().sum(1).mean())
    assert 0 < found["top1"] < found["top5"] < 1


@pytest.mark.parametrize("samples", [5, 6])
def test_evaluation_under_sequence_parallelism(gloo: Pool, samples: int) -> None:
    """The last batch has 5 rows of one image, which 2 ranks cannot share."""
    assert vit_config().positions % 2
    alone = measure("1", samples)
    for found in gloo.run(2, measure, "2", samples, True):
        assert found == pytest.approx(alone, rel=1e-12)


def test_the_preset_of_vit_b16_has_the_parameters_of_its_weights() -> None:
    """As google/vit-base-patch16-224 has them; the paper rounds to 86 million."""
    config = parse(PretrainViTConfig, ["--preset", "vit_b16_224"], {}).model
    specs = sharding_specs(build_on_meta(config, serial_mesh(), 1000))
    assert sum(prod(each.shape) for each in specs.values()) == 86_567_656
