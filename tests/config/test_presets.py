"""The files in scripts/presets: they are read, and are those of the paper."""

from math import prod

import pytest
import torch

from megatron.config.parse import PRESETS, parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
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


def load(name: str) -> PretrainConfig:
    program = PretrainBertConfig if name.startswith("bert") else PretrainGPT2Config
    return parse(program, ["--preset", name], {})


@pytest.mark.parametrize("name", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_presets_fit_their_own_parallel_size_and_leave_places_to_the_user(name: str) -> None:
    config = load(name)
    config.check(prod(config.parallel.sizes.values()))
    assert config.data.data_path == ()
    assert (config.checkpoint.save, config.checkpoint.load) == (None, None)


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
