"""The papers' models at their own layouts, built on meta."""

from math import prod

import pytest
import torch

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config, PretrainLlamaConfig
from megatron.models.build import build_on_meta
from megatron.parallel.sharding import sharding_specs
from tools.plan.absent import absent_mesh

GPT2_VOCABULARY, BERT_VOCABULARY = 50_257, 30_522
# Tables 1, 2 and 4 of the paper: layers, hidden size, heads; GPUs, batch on that many; parameters,
# tensor-parallel size, rows of the padded vocabulary.
PAPER = {
    "gpt2_355m": (24, 1024, 16, 64, 512, 355e6, 1, 50_304),
    "gpt2_2.5b": (54, 1920, 20, 128, 512, 2.5e9, 2, 50_432),
    "gpt2_8.3b": (72, 3072, 24, 512, 512, 8.3e9, 8, 51_200),
    "gpt2_scaling_1.2b": (40, 1536, 16, 64, 512, 1.2e9, 1, 51_200),
    "gpt2_scaling_2.5b": (54, 1920, 20, 128, 512, 2.5e9, 2, 51_200),
    "gpt2_scaling_4.2b": (64, 2304, 24, 256, 512, 4.2e9, 4, 51_200),
    "gpt2_scaling_8.3b": (72, 3072, 32, 512, 512, 8.3e9, 8, 51_200),
    "bert_336m": (24, 1024, 16, 128, 1024, 336e6, 1, 30_592),
    "bert_1.3b": (24, 2048, 32, 256, 1024, 1.3e9, 2, 30_720),
    "bert_3.9b": (48, 2560, 40, 512, 1024, 3.9e9, 4, 30_720),
}
# The models of Colossal-AI's tutorial and of GPT-3 (3.2 million tokens; on as many GPUs as in table
# 2 of arXiv 2104.04473), with the exact number of parameters.
OTHERS = {
    "gpt2_xl_colossalai": (48, 1600, 32, 4, 192, 1_557_611_200, 2, 50_304),
    "gpt3_175b": (96, 12288, 96, 768, 1536, 174_604_259_328, 8, 51_200),
}


# The tutorial's Llama, the miniature's, and table 3 of arXiv 2407.21783: vocabulary, layers, hidden
# size, heads, those of keys and values, width of the MLP, peak learning rate; parameters as the
# source gives them, or by the formula; tensor-parallel size.
LLAMAS = {
    "llama_tutorial": (50_000, 12, 768, 12, 3, 4 * 768, 1e-3, 179_448_576, 1),
    "miniature_llama": (2048, 4, 256, 4, 2, 688, 2e-3, 3_950_848, 1),  # of a data set's vocabulary
    "llama3_8b": (128_256, 32, 4096, 32, 8, 14336, 3e-4, 8_030_261_248, 8),
    "llama3_70b": (128_256, 80, 8192, 64, 8, 28672, 1.5e-4, 70_553_706_496, 8),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llamas(name: str) -> None:
    vocab, layers, h, heads, groups, f, rate, parameters, tensor_size = LLAMAS[name]
    layer = 2 * h * h + 2 * h * groups * (h // heads) + 3 * h * f + 2 * h
    assert 2 * vocab * h + layers * layer + h == parameters
    config = parse(PretrainLlamaConfig, ["--preset", name], {})
    model = config.model
    assert (model.num_layers, model.hidden_size, model.ffn_size) == (layers, h, f)
    assert (model.num_attention_heads, model.query_groups) == (heads, groups)
    assert config.optimizer.lr == rate
    if name.startswith("llama3"):
        assert (model.rotary_base, model.rope_scaling) == (500_000, (8, 1, 4, 8192))
        assert config.global_batch_size(512) * config.data.seq_length == 2**22
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
    layers, hidden, heads, gpus, batch, parameters, tensor_size, padded = (PAPER | OTHERS)[name]
    is_bert = name.startswith("bert")
    kind = PretrainBertConfig if is_bert else PretrainGPT2Config
    config = parse(kind, ["--preset", name], {})
    config.check(gpus)
    assert (config.model.num_layers, config.model.hidden_size) == (layers, hidden)
    assert config.model.num_attention_heads == heads
    assert config.global_batch_size(gpus) == batch
    assert config.model.recompute_granularity == "full"  # section 4.2: after every layer
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
