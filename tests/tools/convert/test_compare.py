"""Models that differ a little are told apart by their logits: each weight and option counts."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.format import read_manifest
from megatron.models.bert import BertEncoder
from megatron.models.registry import config_of
from tests.refusals import field_of, refusal
from tests.tools.convert import models
from tools.convert import compare as comparison
from tools.convert.compare import compare_logits
from tools.convert.folder import family_of
from tools.convert_hf import import_model

KINDS: dict[str, Callable[[Path], Path]] = {
    "gpt2": models.write_model,
    "llama": partial(models.write_llama, num_key_value_heads=6),
    "post-ln": models.write_bert,
    "pre-ln": partial(models.write_bert, order="pre-ln"),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind, beside its checkpoint; made when it is first asked for."""

    @cache
    def find(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "hf"
        models.imported(KINDS[kind](folder))
        return folder

    return find


def compare(folder: Path, other: Path) -> Any:
    step = folder.with_name("ours") / models.STEP
    return compare_logits(step, other, family_of(config_of(read_manifest(step))))


def assert_differ(folder: Path, other: Path) -> None:
    """The first message of compare_logits, not an error of transformers."""
    error = refusal(lambda: compare(folder, other))
    assert field_of(error) == str(folder.with_name("ours") / models.STEP), error


@pytest.mark.parametrize("kind", KINDS)
def test_equal_models(compared: Callable[[str], Path], kind: str) -> None:
    heads = compare(compared(kind), compared(kind)).heads
    assert len(heads) == (1 if kind in ("gpt2", "llama") else 2)
    assert all(head.difference <= 1e-13 * head.largest for head in heads)


def test_logits_that_are_no_numbers(
    compared: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, right = compared("gpt2"), comparison._our_logits

    def wrong(*given: Any) -> dict[str, list[Tensor]]:
        found = right(*given)
        return {name: [each * torch.nan for each in logits] for name, logits in found.items()}

    monkeypatch.setattr(comparison, "_our_logits", wrong)
    assert_differ(folder, folder)


Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]


def exchange(one: str, other: str) -> Change:
    """Each of two tensors whose names differ in these parts takes the place of the other."""
    pairs = ((one, other), (other, one))
    return lambda tensors: {
        name: tensors[name.replace(part, another)]
        for name in tensors
        for part, another in pairs
        if part in name
    }


def each(pattern: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: {
        name: change(tensor) for name, tensor in tensors.items() if re.search(pattern, name)
    }


def reordered(*order: int) -> Callable[[Tensor], Tensor]:
    """The columns are those of Q, K and V."""
    return lambda tensor: tensor.unflatten(-1, (3, -1))[..., list(order), :].flatten(-2)


BERT: list[Change] = [
    exchange("layer.1.attention.self.query.weight", "layer.1.attention.self.key.weight"),
    each(r"layer\.1\.(output\.LayerNorm|ln)\.bias", torch.zeros_like),
    each("token_type_embeddings", lambda tensor: torch.stack([tensor[0], -tensor[1]])),
    each("token_type_embeddings", lambda tensor: torch.stack([-tensor[0], tensor[1]])),
    each(r"cls\.predictions\.bias", torch.zeros_like),
    each(r"transform\.LayerNorm\.bias", torch.zeros_like),
    each(r"pooler\.dense\.bias", torch.zeros_like),
    each(r"seq_relationship\.weight", lambda tensor: tensor.flip(0)),
]


EPSILON, ROPE = {"layer_norm_eps": 1.1e-5}, {"rope_type": "default", "rope_theta": 10_001.0}
# As many rows of keys and values, in wider heads.
WIDE = {"num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 3}
# Options of config.json, or changes to weights.
CHANGES: dict[str, list[dict[str, Any] | Change]] = {
    "gpt2": [
        {"activation_function": "gelu"}, {"layer_norm_epsilon": 1.1e-5}, {"n_head": 2},
        {"scale_attn_by_inverse_layer_idx": True},
        each("c_attn", reordered(1, 0, 2)), each("c_attn", reordered(0, 2, 1)),
    ],
    "llama": [
        {"rms_norm_eps": 1.1e-5}, WIDE, {"rope_parameters": ROPE}, {"hidden_act": "gelu"},
        {"rope_parameters": models.SCALED | {"rope_theta": 10_000.0}},
        exchange("k_proj", "v_proj"), exchange("gate_proj", "up_proj"),
    ],
    "post-ln": [{"hidden_act": "gelu_new"}, EPSILON, *BERT[::2]],
    "pre-ln": [EPSILON, {"num_attention_heads": 2}, *BERT[1::2]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, change) for kind in CHANGES for change in CHANGES[kind]]
)
def test_other_options_and_misplaced_weights(
    compared: Callable[[str], Path], tmp_path: Path, kind: str, change: dict[str, Any] | Change
) -> None:
    other = Path(shutil.copytree(compared(kind), tmp_path / "other"))
    if isinstance(change, dict):
        models.change_json(other / "config.json", **change)
    else:
        changed = change(models.weights_of(other))
        assert changed
        models.change_tensors(other, {name: tensor.clone() for name, tensor in changed.items()})
    assert_differ(compared(kind), other)


def test_attention_to_padding(
    compared: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = BertEncoder.layers

    def of_all(self: BertEncoder, x: Tensor, batch: Any, *numbers: int) -> Tensor:
        batch = replace(batch, is_real=torch.ones_like(batch.is_real))
        return layers(self, x, batch, *numbers)

    monkeypatch.setattr(BertEncoder, "layers", of_all)
    assert_differ(compared("post-ln"), compared("post-ln"))


@pytest.mark.parametrize("is_zero", [False, True])
def test_constant_logits(tmp_path: Path, is_zero: bool) -> None:
    """They are no numbers, which only the longest prompt sees, or those of a model of zeros."""
    tensors = models.weights_of(models.write_model(tmp_path / "hf"))
    tensors["transformer.wpe.weight"][15] = float("nan")
    if is_zero:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    models.change_tensors(tmp_path / "hf", dict(tensors))
    refusal(lambda: import_model(str(tmp_path / "hf"), tmp_path / "ours"))
    assert not [*tmp_path.glob("*ours*")]
