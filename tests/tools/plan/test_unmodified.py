"""The plan of an unmodified GPT-2 or Llama says what that of our own layers says: matmuls,
parameters and what crosses the ranks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import (
    PretrainConfig,
    PretrainGPT2Config,
    PretrainLlamaConfig,
)
from megatron.huggingface.pretrain import PretrainHuggingFaceConfig
from tools.layouts.work import Call, Matmul
from tools.plan.__main__ import main
from tools.plan.hardware import load_hardware
from tools.plan.record import record
from tools.plan.trace import Step

LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE = 5, 96, 4, 16_384, 64
COMMON = f"--seq-length {SEQUENCE} --micro-batch-size 2 --train-iters 10 --no-bf16"
NATIVE = f"--num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads {HEADS} "
NATIVE += f"--vocab-size {VOCABULARY} --hidden-dropout 0 --attention-dropout 0"
KINDS: dict[str, tuple[type[PretrainConfig], str, dict[str, Any]]] = {
    "gpt2": (
        PretrainGPT2Config,
        f"--max-position-embeddings {SEQUENCE}",
        {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": SEQUENCE}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "llama": (
        PretrainLlamaConfig,
        "--ffn-hidden-size 192 --num-query-groups 2",
        {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS}
        | {"intermediate_size": 192, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unmodified_model_takes_what_our_own_takes(
    kind: str, tensor: int, tmp_path: Path
) -> None:
    settings, own, described = KINDS[kind]
    text = json.dumps({"model_type": kind, "vocab_size": VOCABULARY, **described})
    (tmp_path / "config.json").write_text(text)
    common = f"{COMMON} --tensor-model-parallel-size {tensor}".split()
    unmodified = ["--hf-model", str(tmp_path)]
    configs: list[Any] = [
        parse(settings, [*f"{NATIVE} {own}".split(), *common], {}),
        parse(PretrainHuggingFaceConfig, [*unmodified, *common], {}),
    ]
    for config in configs:
        config.check(2)
    native, found = (Step(config, 2, "fp32") for config in configs)
    assert found.model.local == native.model.local
    assert found.parameters == native.parameters
    assert matmul_flops(found) == matmul_flops(native)
    assert sent(found, "tensor") == sent(native, "tensor")
    assert found.flops == native.flops
    shown = record(found, load_hardware("dgx2h"))["model"]
    assert (shown["layers"], shown["hidden"], shown["heads"]) == (LAYERS, WIDTH, HEADS)


def test_a_folder_of_transformers_says_what_to_plan(tmp_path: Path) -> None:
    described = {"model_type": "llama", "vocab_size": VOCABULARY, **KINDS["llama"][2]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    found = tmp_path / "found.json"
    words = f"--kind huggingface --hf-model {tmp_path} {COMMON} --tensor-model-parallel-size 2"
    assert (
        main([*words.split(), "--gpus", "2", "--hardware", "dgx2h", "--json", str(found)], {}) == 0
    )
    assert json.loads(found.read_text())["model"]["layers"] == LAYERS


def matmul_flops(step: Step) -> int:
    matmuls = sum((work.matmuls for work in step.work.values()), Counter[Matmul]())
    return sum(times * each.flops for each, times in matmuls.items())


def sent(step: Step, axis: str) -> Counter[tuple[int, int, bool]]:
    """Of each (bytes, passes, whether a matmul runs beside it) how many calls."""
    found = Counter[tuple[int, int, bool]]()
    for call, times in sum(step.calls.values(), Counter[Call]()).items():
        if call.axis == axis:
            found[call.bytes, call.passes, bool(call.beside)] += times
    return found
