"""The papers' models at their own tensor-parallel sizes, built on meta."""

from math import prod
from pathlib import Path

import pytest
import torch

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
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
