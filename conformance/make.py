"""Writes the fixtures. Run it twice on a machine, and the bytes are the same.

python -m conformance.make
python -m conformance.make --faults
python -m conformance.make --output /tmp/fixtures
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30A0000:
    sys.exit(f"error: Python 3.10 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Generator, Tensor

from conformance.compare import norm_of
from conformance.faults import FAULTS
from conformance.fixture import (
    FOLDER,
    IGNORED,
    NAMES,
    STEPS,
    Fixture,
    MicroBatch,
    is_norm,
    write_figures,
)
from conformance.plain import Trainer, train

HIDDEN, LAYERS, INNER, VOCABULARY, LENGTH = 24, 4, 96, 101, 16
SAMPLES = 4  # of a micro-batch
# The tokens of a sample, [micro-batch][sample]; the first micro-batch has fewer.
LENGTHS = ((6, 16, 5, 8), (16, 12, 9, 14))
UNSCORED = {0: (0, 2), 3: (1, 1)}  # step: (micro-batch, sample) without a scored token
PAD, CLS, SEP, MASK = 0, 1, 2, 3  # other tokens are drawn from the rest
PERTURBED = 10  # runs from which the spread is

COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.02}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": COMMON
    | {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_inner": INNER, "n_positions": LENGTH}
    | {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    | {"bos_token_id": None, "eos_token_id": None},
    "llama": COMMON
    | {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 64}
    | {"num_attention_heads": 12, "num_key_value_heads": 3, "max_position_embeddings": LENGTH}
    | {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    | {"tie_word_embeddings": False, "attention_dropout": 0.0},
    "bert": COMMON
    | {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": INNER}
    | {"num_attention_heads": 4, "max_position_embeddings": LENGTH, "type_vocab_size": 2}
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "tie_word_embeddings": True}
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
H, F, V = HIDDEN, INNER, VOCABULARY
# Modules before the layers, the name of the layers, modules of each layer, modules after the
# layers. Shapes are [out, in], but [in, out] in GPT-2.
SHAPES: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        {"transformer.wte": (V, H), "transformer.wpe": (LENGTH, H)},
        "transformer.h",
        {"ln_1": (H,), "attn.c_attn": (H, 3 * H), "attn.c_proj": (H, H)}
        | {"ln_2": (H,), "mlp.c_fc": (H, F), "mlp.c_proj": (F, H)},
        {"transformer.ln_f": (H,)},
    ),
    "llama": (
        {"model.embed_tokens": (V, H)},
        "model.layers",
        {"input_layernorm": (H,), "self_attn.q_proj": (H, H), "self_attn.k_proj": (H // 4, H)}
        | {"self_attn.v_proj": (H // 4, H), "self_attn.o_proj": (H, H)}
        | {"post_attention_layernorm": (H,), "mlp.gate_proj": (64, H), "mlp.up_proj": (64, H)}
        | {"mlp.down_proj": (H, 64)},
        {"model.norm": (H,), "lm_head": (V, H)},
    ),
    "bert": (
        {"bert.embeddings.word_embeddings": (V, H)}
        | {"bert.embeddings.position_embeddings": (LENGTH, H)}
        | {"bert.embeddings.token_type_embeddings": (2, H), "bert.embeddings.LayerNorm": (H,)},
        "bert.encoder.layer",
        {"attention.self.query": (H, H), "attention.self.key": (H, H)}
        | {"attention.self.value": (H, H), "attention.output.dense": (H, H)}
        | {"attention.output.LayerNorm": (H,), "intermediate.dense": (F, H)}
        | {"output.dense": (H, F), "output.LayerNorm": (H,)},
        {"bert.pooler.dense": (H, H), "cls.predictions.transform.dense": (H, H)}
        | {"cls.predictions.transform.LayerNorm": (H,), "cls.predictions.bias": (V,)}
        | {"cls.seq_relationship": (2, H)},
    ),
}
TIED = {
    "gpt2": [["transformer.wte.weight", "lm_head.weight"]],
    "llama": [],
    "bert": [
        ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"],
        ["cls.predictions.bias", "cls.predictions.decoder.bias"],
    ],
}
RATES = {"gpt2": 0.01, "llama": 0.02, "bert": 0.01}
EMBEDDING = {"gpt2": 0.15, "llama": 0.3, "bert": 0.05}  # scale of the initial values


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by the names of transformers. Biases follow weights."""
    before, layer, each, after = SHAPES[kind]
    layers = {f"{layer}.{i}.{name}": each[name] for i in range(LAYERS) for name in each}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in {**before, **layers, **after}.items():
        if name == "cls.predictions.bias":
            found[name] = shape
            continue
        found[f"{name}.weight"] = shape
        if kind != "llama" and not re.search(r"wte|wpe|_embeddings$", name):
            found[f"{name}.bias"] = shape[-1:] if kind == "gpt2" else shape[:1]
    return found


def initial(kind: str, random: Generator) -> dict[str, Tensor]:
    """Gradient norms are about 1 with them, so that clipping acts in some steps and not in others,
    and no gradient is tiny. bf16 holds them exactly, so that no trainer rounds them."""
    weights = {}
    for name, shape in shapes(kind).items():
        mean, scale = 0.0, 0.1
        if re.search(r"embed.*weight|wte|wpe", name) and not is_norm(name):
            scale = EMBEDDING[kind]
        elif is_norm(name) and name.endswith("weight"):
            mean = 0.4 if "transform.Lay" in name else 1.0
        elif len(shape) > 1:
            large = re.search(r"query|key|c_attn|[qk]_proj", name)
            scale = 0.12 if "lm_head" in name else 0.2 if large else 0.1
        weight = mean + scale * torch.randn(shape, generator=random, dtype=torch.float64)
        weights[name] = weight.to(torch.bfloat16).double()
    return weights


def micro_batch(kind: str, step: int, number: int, random: Generator) -> MicroBatch:
    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    order = torch.randperm(SAMPLES, generator=random)
    lengths = torch.tensor(LENGTHS[number])[order][:, None]
    place = torch.arange(LENGTH)
    real = place < lengths
    tokens = draw(MASK + 1, VOCABULARY, SAMPLES, LENGTH)
    sentences: dict[str, Tensor] = {}
    if kind == "bert":
        tokens[:, 0] = CLS
        middle = lengths // 2
        tokens[(place == middle) | (place == lengths - 1)] = SEP
        masked = real & (tokens > MASK) & ((place + number) % 3 == 1)
        labels = torch.where(masked, tokens, IGNORED)
        tokens = torch.where(masked & (draw(0, 5, SAMPLES, LENGTH) > 0), MASK, tokens)
        sentences["token_type_ids"] = ((place > middle) & real).long()
        sentences["next_sentence_label"] = draw(0, 2, SAMPLES)
    else:
        # The first tokens are a prompt, which is not scored.
        predicted = (place >= draw(0, 3, SAMPLES, 1)) & (place < lengths - 1)
        labels = torch.where(predicted, tokens.roll(-1, 1), IGNORED)
    if step in UNSCORED and UNSCORED[step][0] == number:
        labels[UNSCORED[step][1]] = IGNORED
    tokens = torch.where(real, tokens, PAD)
    return MicroBatch(tokens, real.long(), labels, **sentences)


def spread(fixture: Fixture, exact: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    """The largest difference of a parameter's gradient, over its norm, in PERTURBED runs in which
    each weight is one unit in the last place larger or smaller, by chance."""
    random = Generator().manual_seed(56)
    model_norm = norm_of(exact.values())
    found = []
    for _ in range(PERTURBED):
        trainer = Trainer(fixture, dtype)
        for name, weight in trainer.weights.items():
            up = torch.randint(0, 2, weight.shape, generator=random) * 2 - 1
            trainer.weights[name] = torch.nextafter(weight, (up * torch.inf).to(dtype))
        _, gradients = trainer.loss_and_gradients(trainer.micro_batches(0))
        for name, right in exact.items():
            difference = gradients[name].double() - right
            first, last = fixture.facts["zeros"].get(name, (0, 0))
            found.append(difference[first:last].norm() / model_norm)
            difference[first:last] = 0
            # A parameter all of whose elements are zeros has no norm to divide by.
            found.append(difference.norm() / right.norm().clamp(min=1e-12))
    return float(max(found))


def zeros(kind: str) -> dict[str, list[int]]:
    """Elements whose exact gradient is zero: a softmax does not change if all its scores do alike,
    so a key's bias has none; and Llama's first token is never read."""
    found: dict[str, list[int]] = {}
    for name in shapes(kind):
        if name.endswith("attn.c_attn.bias"):
            found[name] = [HIDDEN, 2 * HIDDEN]
        elif name.endswith("self.key.bias"):
            found[name] = [0, HIDDEN]
    if kind == "llama":
        found["model.embed_tokens.weight"] = [PAD, PAD + 1]
    return found


def write_json(file: Path, facts: Mapping[str, Any]) -> None:
    """A list of numbers or names is one line."""
    text = json.dumps(facts, indent=1)
    file.write_text(re.sub(r"\[[^][{}]*\]", lambda m: " ".join(m[0].split()), text) + "\n")


def make(kind: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = Generator().manual_seed(NAMES.index(kind))
    weights = initial(kind, random)
    save_file(weights, folder / "weights.safetensors")
    batches = {}
    for step in range(STEPS):
        for number in range(len(LENGTHS)):
            for key, tensor in asdict(micro_batch(kind, step, number, random)).items():
                if tensor is not None:
                    batches[f"{step}.{number}.{key}"] = tensor
    save_file(batches, folder / "batches.safetensors")
    decayed = [name for name, each in weights.items() if each.dim() > 1]
    optimizer = {"lr": RATES[kind], "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    facts: dict[str, Any] = {
        "model_type": kind,
        "config": CONFIGS[kind],
        "tied": TIED[kind],
        "optimizer": optimizer | {"clip": 1.0, "decayed": decayed},
        "zeros": zeros(kind),
    }
    write_json(folder / "facts.json", facts)
    fixture = Fixture(folder)
    figures = train(fixture)
    write_figures(figures, folder / "expected.safetensors")
    losses = figures.losses
    facts["least_gradient_norm"] = min(figures.grad_norms)
    facts["loss_moves"] = [abs(b - a) for a, b in pairwise(losses)]
    facts["spread"] = {
        str(dtype).removeprefix("torch."): spread(fixture, figures.gradients, dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    }
    write_json(folder / "facts.json", facts)
    make_faults(fixture)


def make_faults(fixture: Fixture) -> None:
    """Writes the figures of each known fault that the model can have."""
    weights = fixture.weights()
    signatures = {
        f"{name}.{ranks}": train(fixture, fault=fault, ranks=ranks).signature(weights)
        for name, fault in FAULTS.items()
        if fixture.name in fault.models
        for ranks in fault.among
    }
    tensors = {key: torch.tensor(each, dtype=torch.float64) for key, each in signatures.items()}
    save_file(tensors, fixture.folder / "faults.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="gets a folder for each model")
    parser.add_argument("--faults", action="store_true", help="the figures of known faults alone")
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums are in one order
    for kind in NAMES:
        folder = options.output / kind
        if options.faults:
            make_faults(Fixture(folder))
        else:
            make(kind, folder)
        print(folder)


if __name__ == "__main__":
    main()
