"""The files in scripts/presets fit their own settings; sizes of models: models/test_presets.py."""

from math import prod

import pytest
import torch

from megatron.config.parse import PRESETS, parse
from megatron.config.pretrain import (
    PretrainBertConfig,
    PretrainConfig,
    PretrainGPT2Config,
    PretrainLlamaConfig,
)
from megatron.optim.schedule import learning_rate


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


@pytest.mark.parametrize(
    ("name", "warmup"),
    [
        ("quickstart", 100),
        ("miniature_gpt2", 100),
        ("miniature_llama", 100),
        ("miniature_bert", 80),
    ],
)
def test_a_warmup_fits_the_length_of_the_run(name: str, warmup: int) -> None:
    steps = load(name).training.steps
    for words, expected in (((), warmup), (("--train-iters", str(steps // 10)), warmup // 10)):
        assert load(name, *words).with_steps(int, 1).optimizer.lr_warmup_iters == expected
    assert load(name, "--lr-warmup-iters", "7").with_steps(int, 1).optimizer.lr_warmup_iters == 7


@pytest.mark.parametrize("name", ["miniature_llama", "llama_tutorial"])
def test_mock_data_stand_in_for_a_preset_s_files_and_epochs(name: str) -> None:
    config = load(name, *["--mock-data", "--vocab-size", "2048", "--train-iters", "10000"])
    config.check(prod(config.parallel.sizes.values()))
    assert config.data.mock_data


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
