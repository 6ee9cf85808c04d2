"""ViT as transformers has it: ViTForImageClassification.

Mean and deviation of the colors are in preprocessor_config.json beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import inf, isqrt
from pathlib import Path
from typing import Any

from megatron.config.model import HALF, ViTConfig
from megatron.data.images import CHANNELS
from megatron.errors import UsageError
from tools.convert.bert import THEIRS, Labels, encoder_keys, layer_rows
from tools.convert.table import Family, Key, Row, Tensor, Transform, both, json_object, only

PREPROCESSOR = "preprocessor_config.json"
OURS = "transformer.layers.{n}"


def _with_bias(theirs: Any, shape: tuple[int, ...]) -> Tensor:
    import torch

    class_token, bias = theirs
    return torch.stack([class_token[0, 0], bias])


def _square(ours: Tensor) -> Tensor:
    """[h, 3 x patch x patch] as the kernel of a convolution."""
    side = isqrt(ours.shape[1] // CHANNELS)
    return ours.unflatten(1, (CHANNELS, side, side))


# Rows of our embedding of token types are the class token and the bias of the patches.
TYPES = Transform(lambda ours: (ours[:1][None].clone(), ours[1].clone()), _with_bias)
KERNEL = Transform(lambda ours: (_square(ours),), lambda theirs, shape: theirs[0].flatten(1))
ONE_MORE = Transform(lambda ours: (ours[None],), lambda theirs, shape: theirs[0][0])
ROWS = (
    Row(
        "token_type_embedding.weight",
        ("embeddings.cls_token", "embeddings.patch_embeddings.projection.bias"),
        TYPES,
    ),
    Row("position_embedding.weight", ("embeddings.position_embeddings",), ONE_MORE),
    Row("patch_embedding.weight", ("embeddings.patch_embeddings.projection.weight",), KERNEL),
    *layer_rows(OURS, f"{THEIRS}.attention.attention"),
    *both(f"{OURS}.attention_norm", f"{THEIRS}.layernorm_before"),
    *both(f"{OURS}.mlp_norm", f"{THEIRS}.layernorm_after"),
    *both("final_norm", "layernorm"),
    *both("head", "classifier"),
)
KEYS = (
    *encoder_keys(12, 768, 12, 0.0),
    Key("image_size", "image_size", default=224),
    Key("patch_size", "patch_size", default=16),
    Key("hidden_act", "activation", {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}),
    Key("pooling", "pooling", {None: "class-token"}),
    Labels("id2label", "class_names"),
    only("num_channels", CHANNELS),
    only("qkv_bias", True),
    only("problem_type", None, "single_label_classification"),
)
VITS = (
    Family(
        model_type="vit",
        architectures=("ViTForImageClassification",),
        auto_class="AutoModelForImageClassification",
        config=ViTConfig,
        rows=ROWS,
        keys=KEYS,
        prefix="vit.",
        bare=("classifier.",),
    ),
)


def with_colors(config: ViTConfig, folder: Path) -> ViTConfig:
    """The config with the mean and deviation of the folder's preprocessor. Raises UsageError for a
    preprocessor that gives the model other values than (pixel / 255 - mean) / deviation."""
    file = folder / PREPROCESSOR
    options = json_object(file) if file.is_file() else {}
    for name, needed in (("do_normalize", True), ("do_rescale", True)):
        if options.get(name, needed) is not needed:
            raise UsageError(f"{file}: {name}", json.dumps(options[name]), json.dumps(needed))
    factor = options.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        allowed = f"{1 / 255}, for values from 0 to 1"
        raise UsageError(f"{file}: rescale_factor", json.dumps(factor), allowed)
    colors: dict[str, Any] = {}
    for name, least in (("image_mean", -inf), ("image_std", 0)):
        values = options.get(name, [*HALF])
        is_list = isinstance(values, list) and len(values) == CHANNELS
        if not is_list or not all(type(v) in (int, float) and least < v < inf for v in values):
            what = "numbers above 0" if name == "image_std" else "numbers"
            raise UsageError(f"{file}: {name}", json.dumps(values), f"{CHANNELS} {what}")
        colors[name] = tuple(map(float, values))
    return replace(config, **colors)


def preprocessor(config: ViTConfig) -> Mapping[str, Any]:
    """Content of preprocessor_config.json for this model."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [*(config.image_mean or HALF)],
        "image_std": [*(config.image_std or HALF)],
    }
