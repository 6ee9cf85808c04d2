"""The files in scripts/presets: they are read, and are those of the paper."""

from math import prod

import pytest
import torch

from megatron.config.model import LlamaConfig
from megatron.config.parse import PRESETS, parse
from megatron.config.pretrain import (
    PretrainBertConfig,
    PretrainConfig,
    PretrainGPT2Config,
    PretrainLlamaConfig,
)
from megatron.optim.schedule import learning_rate

# Tables 1, 2 and 4 of the paper: layers, hidden size, heads, GPUs, batch on that many.
TABLES = {
    "gpt2_355m": (24, 1024, 16, 64, 512),
    "gpt2_2.5b": (54, 1920, 20, 128, 512),
    "gpt2_8.3b": (72, 3072, 24, 512, 512),
    "gpt2_scaling_1.2b": (40, 1536, 16, 64, 512),
    "gpt2_scaling_2.5b": (54, 1920, 20, 128, 512),
    "gpt2_scaling_4.2b": (64, 2304, 24, 256, 512),
    "gpt2_scaling_8.3b": (72, 3072, 32, 512, 512),
    "bert_336m": (24, 1024, 16, 128, 1024),
    "bert_1.3b": (24, 2048, 32, 256, 1024),
    "bert_3.9b": (48, 2560, 40, 512, 1024),
    # Of Colossal-AI's tutorial, and of GPT-3 (3.2 million tokens; on as many GPUs as in table 2 of
    # arXiv 2104.04473).
    "gpt2_xl_colossalai": (48, 1600, 32, 4, 192),
    "gpt3_175b": (96, 12288, 96, 768, 1536),
}


def load(name: str, *words: str) -> PretrainConfig:
    program: type[PretrainConfig] = PretrainGPT2Config
    for kind, other in (("bert", PretrainBertConfig), ("llama", PretrainLlamaConfig)):
        program = other if kind in name else program
    return parse(program, ["--preset", name, *words], {})


@pytest.mark.parametrize("name", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_presets_fit_their_own_parallel_size_and_leave_places_to_the_user(name: str) -> None:
    config = load(name)
    config.check(prod(config.parallel.sizes.values()))
    assert config.data.data_path == ()
    assert (config.checkpoint.save, config.checkpoint.load) == (None, None)


@pytest.mark.parametrize("name", ["miniature_llama", "llama_tutorial"])
def test_mock_data_stand_in_for_a_preset_s_files_and_epochs(name: str) -> None:
    config = load(name, *["--mock-data", "--vocab-size", "2048", "--train-iters", "10000"])
    config.check(prod(config.parallel.sizes.values()))
    assert config.data.mock_data


@pytest.mark.parametrize("name", TABLES)
def test_presets_are_the_paper_s(name: str) -> None:
    layers, hidden, heads, gpus, batch = TABLES[name]
    config = load(name)
    config.check(gpus)
    model = config.model
    assert (model.num_layers, model.hidden_size) == (layers, hidden)
    assert model.num_attention_heads == heads
    assert config.global_batch_size(gpus) == batch
    assert model.recompute_granularity == "full"  # section 4.2: after every transformer layer


# The tutorial's Llama, and table 3 of arXiv 2407.21783: layers, hidden size, heads, those of keys
# and values, width of the MLP, peak learning rate.
LLAMAS = {
    "llama_tutorial": (12, 768, 12, 3, 4 * 768, 1e-3),
    "llama3_8b": (32, 4096, 32, 8, 14336, 3e-4),
    "llama3_70b": (80, 8192, 64, 8, 28672, 1.5e-4),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llamas_are_those_of_their_sources(name: str) -> None:
    layers, hidden, heads, groups, width, rate = LLAMAS[name]
    config = load(name)
    model = config.model
    assert isinstance(model, LlamaConfig)
    assert (model.num_layers, model.hidden_size, model.ffn_size) == (layers, hidden, width)
    assert (model.num_attention_heads, model.query_groups) == (heads, groups)
    assert (config.optimizer.lr, model.layernorm_epsilon) == (rate, 1e-5)
    assert not model.has_tied_head
    if name == "llama_tutorial":
        assert (model.rotary_base, model.rope_scaling) == (10_000, None)
        assert (config.data.seq_length, model.max_position_embeddings) == (512, 2048)
    else:
        assert (model.rotary_base, model.rope_scaling) == (500_000, (8, 1, 4, 8192))
        assert (config.data.seq_length, model.max_position_embeddings) == (8192, 131_072)
        assert config.global_batch_size(512) * config.data.seq_length == 2**22


def test_the_tutorial_s_optimizer_and_batches() -> None:
    config = load("llama_tutorial")
    optimizer = config.optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.9, 0.99)
    adamw = torch.optim.AdamW([torch.zeros(1)]).defaults
    assert (optimizer.adam_eps, optimizer.decoupled_weight_decay) == (adamw["eps"], True)
    assert (optimizer.weight_decay, optimizer.decay_biases_and_norms) == (0.1, True)
    assert optimizer.clip_grad == 1.0
    rates = [learning_rate(optimizer, update, 3000) for update in (1, 1001, 3001)]
    assert rates == pytest.approx([1e-4, 1e-3, 0.0], abs=1e-15)
    assert (config.training.epochs, config.global_batch_size(2)) == (3, 32)
    assert config.precision.name == "bf16"
    assert not config.data.shuffle


def test_colossal_ai_s_optimizer_is_torch_s_adam_as_it_comes() -> None:
    config = load("gpt2_xl_colossalai").optimizer
    adam = torch.optim.Adam([torch.zeros(1)], lr=1.5e-4, weight_decay=1e-2).defaults
    assert (config.lr, config.weight_decay) == (adam["lr"], adam["weight_decay"])
    assert (config.adam_beta1, config.adam_beta2) == adam["betas"]
    assert config.adam_eps == adam["eps"]
    assert config.decoupled_weight_decay == adam["decoupled_weight_decay"]
    assert config.decay_biases_and_norms
    assert learning_rate(config, 1, 1000) == learning_rate(config, 1000, 1000) == adam["lr"]
    assert config.clip_grad == 0
