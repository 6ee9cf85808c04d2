"""Settings of a model reach every layer that they are of, in each kind of model."""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.models.build import build_model
from megatron.parallel.dropout import Dropout, layer_key
from megatron.parallel.layers import AttentionCore
from megatron.parallel.layers_llama import RotaryEmbedding
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import sharding_specs
from tests.bert import bert_section
from tests.llama import llama_section
from tests.tiny import VOCABULARY, tiny_section

Section = Callable[..., ModelConfig]
KINDS: dict[str, Section] = {
    "gpt2": tiny_section,
    "llama": llama_section,
    "bert pre-ln": bert_section,
    "bert post-ln": partial(bert_section, "post-ln"),
}
EVERY = pytest.mark.parametrize("section", KINDS.values(), ids=KINDS)


def built(section: Section, **changes: Any) -> Any:
    mesh, config = serial_mesh(), section(**changes)
    return build_model(config, mesh, VOCABULARY, seed=1, dtype=torch.float32)


@EVERY
def test_matrices_have_the_std_that_is_set_and_they_alone_decay(section: Section) -> None:
    model = built(section, init_method_std=0.5, num_layers=8)
    table = sharding_specs(model)
    for name, weight in model.named_parameters():
        real = table[name].real(weight)
        is_vector = name.endswith("bias") or "norm" in name
        assert table[name].decay != is_vector, name
        if not is_vector:
            before_a_residual = name.endswith(("attention.output.weight", "down.weight"))
            std = 0.5 / sqrt(2 * 8) if before_a_residual else 0.5
            assert real.std().item() == pytest.approx(std, rel=5 / sqrt(2 * real.numel())), name


@EVERY
def test_every_norm_has_the_epsilon_that_is_set(section: Section) -> None:
    model = built(section, layernorm_epsilon=0.25)
    norms = {n: each.epsilon for n, each in model.named_modules() if hasattr(each, "epsilon")}
    assert len(norms) >= 5
    assert {*norms.values()} == {0.25}


@EVERY
def test_no_two_places_drop_alike(section: Section) -> None:
    """A mask is a function of its layer's name, on which those of kept runs depend."""
    model = built(section, hidden_dropout=0.1, attention_dropout=0.1, num_layers=2)
    kinds = (Dropout, AttentionCore)
    names = [each.name for each in model.modules() if isinstance(each, kinds)]
    places = ("attention.core", "attention", "mlp")
    wanted = ["embedding", *(f"layers.{n}.{place}" for n in (0, 1) for place in places)]
    assert names == wanted
    keys = [layer_key(seed, name).item() for name in names for seed in (1, 2)]
    assert len({*keys}) == 2 * len(names)


def test_rotary_positions_have_the_base_that_is_set() -> None:
    (rotary,) = (
        each
        for each in built(llama_section, rotary_base=100.0).modules()
        if isinstance(each, RotaryEmbedding)
    )
    cos, sin = rotary(torch.tensor([[3]]), torch.float64)
    angles = torch.tensor([3.0, 3 / 100**0.5], dtype=torch.float64)  # heads of 4 channels
    torch.testing.assert_close(cos.flatten(), angles.cos(), rtol=1e-6, atol=0)
    torch.testing.assert_close(sin.flatten(), angles.sin(), rtol=1e-6, atol=0)
