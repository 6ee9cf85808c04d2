"""The papers' models at their own layouts, built on meta."""

from math import prod
from pathlib import Path

import pytest
import torch

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config, PretrainLlamaConfig
from megatron.models.build import build_on_meta
from megatron.parallel.mesh import absent_mesh
from megatron.parallel.sharding import sharding_specs

PRESETS = Path(__file__).parents[2] / "scripts" / "presets"
GPT2_VOCABULARY, BERT_VOCABULARY = 50_257, 30_522
# name: (parameters as the paper gives them, tensor-parallel size, rows of the padded vocabulary)
PAPER = {
    "gpt2_355m": (355e6, 1, 50_304),
    "gpt2_2.5b": (2.5e9, 2, 50_432),
    "gpt2_8.3b": (8.3e9, 8, 51_200),
    "gpt2_scaling_1.2b": (1.2e9, 1, 51_200),
    "gpt2_scaling_2.5b": (2.5e9, 2, 51_200),
    "gpt2_scaling_4.2b": (4.2e9, 4, 51_200),
    "gpt2_scaling_8.3b": (8.3e9, 8, 51_200),
    "bert_336m": (336e6, 1, 30_592),
    "bert_1.3b": (1.3e9, 2, 30_720),
    "bert_3.9b": (3.9e9, 4, 30_720),
}
# Of other sources, with the exact number of parameters.
OTHERS = {
    "gpt2_xl_colossalai": (1_557_611_200, 2, 50_304),
    "gpt3_175b": (174_604_259_328, 8, 51_200),
}


# Vocabulary, hidden size, layers, size of all key/value heads, width of the MLP; parameters as the
# source gives them, or by the formula; tensor-parallel size.
LLAMAS = {
    "llama_tutorial": (50_000, 768, 12, 3 * 64, 4 * 768, 179_448_576, 1),
    "miniature_llama": (2048, 256, 4, 2 * 64, 688, 3_950_848, 1),  # of a data set's vocabulary
    "llama3_8b": (128_256, 4096, 32, 8 * 128, 14336, 8_030_261_248, 8),
    "llama3_70b": (128_256, 8192, 80, 8 * 128, 28672, 70_553_706_496, 8),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llamas(name: str) -> None:
    vocab, h, layers, kv, f, parameters, tensor_size = LLAMAS[name]
    layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    assert 2 * vocab * h + layers * layer + h == parameters
    config = parse(PretrainLlamaConfig, ["--preset", name], {})
    assert config.parallel.tensor_model_parallel_size == tensor_size
    assert config.model.vocab_size in (vocab, None)
    mesh = absent_mesh({"tensor": tensor_size}, torch.device("meta"))
    model = build_on_meta(config.model, mesh, vocab)
    table = sharding_specs(model)
    assert sum(prod(spec.shape) for spec in table.values()) == parameters
    local = sum(each.numel() for each in model.parameters())
    assert local == pytest.approx(parameters / tensor_size, rel=0.01)


@pytest.mark.parametrize("name", [*PAPER, *OTHERS])
def test_the_papers_models(name: str) -> None:
    parameters, tensor_size, padded = (PAPER | OTHERS)[name]
    is_bert = name.startswith("bert")
    kind = PretrainBertConfig if is_bert else PretrainGPT2Config
    config = parse(kind, ["--preset", str(PRESETS / f"{name}.toml")], {})
    assert config.parallel.tensor_model_parallel_size == tensor_size
    vocab_size = BERT_VOCABULARY if is_bert else GPT2_VOCABULARY
    mesh = absent_mesh({"tensor": tensor_size}, torch.device("meta"))
    model = build_on_meta(config.model, mesh, vocab_size)
    table = sharding_specs(model)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert shapes == {name: spec.local_shape for name, spec in table.items()}
    found = sum(prod(spec.shape) for spec in table.values())
    assert found == pytest.approx(parameters, rel=0 if name in OTHERS else 0.02)
    local = sum(map(prod, shapes.values()))
    assert local == pytest.approx(parameters / tensor_size, rel=0.02)
    embedding = table["encoder.word_embedding.weight" if is_bert else "word_embedding.weight"]
    assert embedding.shape == (vocab_size, config.model.hidden_size)
    assert embedding.padded_rows == padded
    if is_bert:
        assert config.model.vocab_size == vocab_size
        assert config.model.residual_order == "pre-ln"
        assert table["mlm.head.bias"].padded_rows == padded
