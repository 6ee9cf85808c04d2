"""The paper's models at their own tensor-parallel sizes, built on meta."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config import PretrainBertConfig, PretrainGPT2Config, parse
from megatron.models.bert import BERT
from megatron.models.gpt2 import GPT2
from megatron.parallel.factory import factory_1d
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.parallel.random import RandomStreams
from megatron.parallel.sharding import sharding_specs

PRESETS = Path(__file__).parents[2] / "scripts" / "presets"
GPT2_VOCABULARY = 50_257
EMBEDDING = "encoder.word_embedding.weight"
# name: (parameters of tables 1 and 2, tensor-parallel size)
PAPER = {
    "gpt2_355m": (355e6, 1),
    "gpt2_2.5b": (2.5e9, 2),
    "gpt2_8.3b": (8.3e9, 8),
    "gpt2_scaling_1.2b": (1.2e9, 1),
    "gpt2_scaling_2.5b": (2.5e9, 2),
    "gpt2_scaling_4.2b": (4.2e9, 4),
    "gpt2_scaling_8.3b": (8.3e9, 8),
}


@contextmanager
def fake_ranks(size: int) -> Iterator[Mesh]:
    """Rank 0 of `size` ranks that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield build_mesh(size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models(name: str) -> None:
    parameters, tensor_size = PAPER[name]
    config = parse(PretrainGPT2Config, ["--preset", str(PRESETS / f"{name}.toml")], {})
    assert config.parallel.tensor_model_parallel_size == tensor_size
    with fake_ranks(tensor_size) as mesh, torch.device("meta"):
        model = GPT2(config.model, factory_1d(mesh, RandomStreams(0, mesh)), GPT2_VOCABULARY)
        table = sharding_specs(model)
        local = {name: tuple(each.shape) for name, each in model.named_parameters()}
        assert local == {name: spec.local_shape for name, spec in table.items()}
    whole = sum(prod(spec.shape) for spec in table.values())
    assert whole == pytest.approx(parameters, rel=0.02)
    assert table["word_embedding.weight"].shape == (GPT2_VOCABULARY, config.model.hidden_size)
    padded = table["word_embedding.weight"].padded_rows
    assert padded is not None
    assert padded % (128 * tensor_size) == 0
    if "scaling" in name:
        assert padded == 51_200


@pytest.mark.parametrize(
    ("name", "parameters", "tensor_size"),
    [("bert_336m", 336e6, 1), ("bert_1.3b", 1.3e9, 2), ("bert_3.9b", 3.9e9, 4)],
)
def test_the_papers_bert_sizes(name: str, parameters: float, tensor_size: int) -> None:
    config = parse(PretrainBertConfig, ["--preset", str(PRESETS / f"{name}.toml")], {})
    assert config.parallel.tensor_model_parallel_size == tensor_size
    assert config.model.vocab_size == 30_522
    assert config.model.residual_order == "pre-ln"
    with fake_ranks(tensor_size) as mesh, torch.device("meta"):
        model = BERT(
            config.model, factory_1d(mesh, RandomStreams(0, mesh)), config.model.vocab_size
        )
        table = sharding_specs(model)
        local = {name: tuple(each.shape) for name, each in model.named_parameters()}
        assert local == {name: spec.local_shape for name, spec in table.items()}
    assert table["mlm.head.bias"].padded_rows == table[EMBEDDING].padded_rows
    whole = sum(prod(spec.shape) for spec in table.values())
    assert whole == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize("name", ["gpt2_8.3b"])
def test_a_rank_holds_its_part(name: str) -> None:
    config = parse(PretrainGPT2Config, ["--preset", str(PRESETS / f"{name}.toml")], {})
    with fake_ranks(8) as mesh, torch.device("meta"):
        model = GPT2(config.model, factory_1d(mesh, RandomStreams(0, mesh)), GPT2_VOCABULARY)
    local = sum(parameter.numel() for parameter in model.parameters())
    assert local == pytest.approx(8.3e9 / 8, rel=0.02)
