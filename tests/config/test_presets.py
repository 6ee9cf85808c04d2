"""The files in scripts/presets: they are read, and are those of the paper."""

import pytest

from megatron.config.parse import PRESETS, parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config

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
}


def load(name: str) -> PretrainConfig:
    program = PretrainBertConfig if name.startswith("bert") else PretrainGPT2Config
    return parse(program, ["--preset", name], {})


@pytest.mark.parametrize("name", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_presets_fit_their_own_parallel_size_and_leave_places_to_the_user(name: str) -> None:
    config = load(name)
    config.check(config.parallel.tensor_model_parallel_size)
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
