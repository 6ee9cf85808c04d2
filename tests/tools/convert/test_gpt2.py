"""GPT-2 to a checkpoint and back: the same bits, whatever layout the checkpoint was saved at."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.format import read_checkpoint, read_manifest
from megatron.checkpoint.load import verify
from megatron.config.model import GPT2Config
from megatron.config.parallel import ParallelConfig
from megatron.data.tokenizer import GPT2BPETokenizer, read_tokenizer
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, whole_logits
from megatron.train.trained import TrainedConfig, open_trained
from tests.dist import Pool
from tests.tools.convert.models import (
    VOCABULARY,
    assert_same_weights,
    change_json,
    load_and_save,
    weights_of,
    write_model,
)
from tools.convert.compare import compare_logits
from tools.convert.exporting import write_model as write_model_of
from tools.convert.gpt2 import GPT2
from tools.convert.weights import read_weights, resolve
from tools.convert_hf import export_model, import_model

SECTION = GPT2Config(
    num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_round_trip_keeps_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    settings = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "initializer_range": 0.05}
    folder = write_model(tmp_path / "hf", dtype=dtype, layer_norm_epsilon=1e-6, **settings)
    import_model(str(folder), tmp_path / "ours")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((folder / name).read_bytes()) == json.loads(
            (tmp_path / "back" / name).read_bytes()
        )


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_a_checkpoint_of_any_layout_is_exported(
    gloo: Pool, tmp_path: Path, tensor_size: int
) -> None:
    folder = write_model(tmp_path / "hf")
    import_model(str(folder), tmp_path / "ours")
    step = tmp_path / "ours" / "step_00000000"
    gloo.run(tensor_size, load_and_save, step, tmp_path / "cut", tensor_size)
    assert len(list((tmp_path / "cut" / "step_00000001").glob("shard_*"))) == tensor_size
    export_model(str(tmp_path / "cut"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")


def test_an_export_is_imported_as_the_same_checkpoint(tmp_path: Path) -> None:
    import_model(str(write_model(tmp_path / "hf")), tmp_path / "ours")
    export_model(str(tmp_path / "ours" / "step_00000000"), tmp_path / "back")
    import_model(str(tmp_path / "back"), tmp_path / "again")
    one, other = (tmp_path / name / "step_00000000" for name in ("ours", "again"))
    assert_same_weights(one, other)
    manifests = read_manifest(one), read_manifest(other)
    for key in ("config", "precision", "vocab_size", "tokenizer", "counters"):
        assert manifests[0][key] == manifests[1][key]


def test_an_import_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", layer_norm_epsilon=1e-6, attn_pdrop=0.0)
    import_model(str(folder), tmp_path / "ours")
    trained = TrainedConfig(load=str(tmp_path / "ours"))
    folders, tokenizer, manifest = open_trained(trained, ParallelConfig(), 1)
    assert (tmp_path / "ours" / "latest").read_text() == "step_00000000\n"
    assert manifest["imported_from"] == f"HuggingFace {folder}"
    assert manifest["vocab_size"] == tokenizer.vocab_size == VOCABULARY
    model = GPT2Config(**manifest["config"]["model"])
    assert model == replace(SECTION, layernorm_epsilon=1e-6, attention_dropout=0.0)
    tokens = torch.arange(16)[None]
    mesh = serial_mesh()
    ours = whole_logits(load_model(verify(folders[0], mesh), mesh), mesh, tokens)
    theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_real_vocabulary_is_kept_and_gives_the_same_ids(
    tmp_path: Path, test_data: Path
) -> None:
    files = test_data / "gpt2" / "vocab.json", test_data / "gpt2" / "merges.txt"
    folder = write_model(tmp_path / "hf", files=files, dtype=torch.bfloat16, n_embd=8)
    import_model(str(folder), tmp_path / "ours")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    assert weights_of(tmp_path / "back")["transformer.wte.weight"].shape == (50257, 8)
    assert (tmp_path / "back" / "merges.txt").read_bytes() == files[1].read_bytes()
    ours = GPT2BPETokenizer(*map(str, files))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert theirs.eos_token_id == ours.eod
    lines = (test_data / "wikitext103" / "wiki.valid.tokens").read_text("utf-8").split("\n")[:500]
    rows = (test_data / "lambada" / "lambada_test_first500.jsonl").read_text("utf-8").splitlines()
    for text in [*lines, *(json.loads(row)["text"] for row in rows)]:
        assert theirs.encode(text, verbose=False) == ours.encode(text)


def test_a_model_in_several_files_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    import_model(str(folder), tmp_path / "ours")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")


def test_names_without_the_prefix_and_old_buffers_are_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf")
    import_model(str(folder), tmp_path / "ours")
    tensors = {key.removeprefix("transformer."): t for key, t in weights_of(folder).items()}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril().to(torch.uint8)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    import_model(str(folder), tmp_path / "again")
    assert_same_weights(*(tmp_path / name / "step_00000000" for name in ("ours", "again")))


def test_the_table_makes_every_tensor_of_theirs_in_its_shape(tmp_path: Path) -> None:
    theirs = {key: t.shape for key, t in weights_of(write_model(tmp_path / "hf")).items()}
    entries = resolve(GPT2, SECTION, VOCABULARY)
    made = {
        f"transformer.{name}": shape
        for entry in entries
        for name, shape in zip(entry.theirs, entry.their_shapes(), strict=True)
    }
    assert made == theirs
    fused = next(entry for entry in entries if entry.ours.endswith("0.attention.qkv.weight"))
    assert fused.spec.shape == (3, 32, 32)
    assert [(dim, axis.name) for dim, axis in fused.spec.shards] == [(1, "tensor")]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"resid_pdrop": 0.2, "embd_pdrop": 0.3}, {"embedding_dropout": 0.3}),
        ({"resid_pdrop": 0.2, "embd_pdrop": 0.2}, {"embedding_dropout": None}),
        ({"n_inner": 40, "activation_function": "relu"}, {"ffn_hidden_size": 40}),
        ({"activation_function": "gelu"}, {"activation": "gelu"}),
        ({"activation_function": "silu"}, {"activation": "silu"}),
        ({"tie_word_embeddings": False}, {"untie_embeddings_and_output_weights": True}),
    ],
)
def test_other_forms_of_a_gpt2_come_and_go(
    tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Both ways compare the logits of the two programs."""
    folder = write_model(tmp_path / "hf", **theirs)
    import_model(str(folder), tmp_path / "ours")
    model = read_manifest(tmp_path / "ours" / "step_00000000")["config"]["model"]
    assert {name: model[name] for name in ours} == ours
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_bytes())
    assert {name: config[name] for name in theirs} == theirs


@pytest.mark.parametrize(("name", "value"), [("activation", "swiglu"), ("activation", "geglu")])
def test_what_transformers_cannot_say_is_not_exported(
    tmp_path: Path, name: str, value: str
) -> None:
    import_model(str(write_model(tmp_path / "hf")), tmp_path / "ours")
    checkpoint = read_checkpoint(tmp_path / "ours" / "step_00000000")
    checkpoint.manifest["config"]["model"][name] = value
    tokenizer = read_tokenizer("GPT2BPETokenizer", checkpoint.path)
    with pytest.raises(ValueError, match=f"--{name}"):
        write_model_of(tmp_path / "back", checkpoint, GPT2, tokenizer)


@pytest.mark.parametrize(
    "change",
    [
        {"activation_function": "gelu"},
        {"layer_norm_epsilon": 1.1e-5},
        {"n_head": 2},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
)
def test_another_form_of_the_model_is_above_the_tolerance(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = write_model(tmp_path / "hf")
    import_model(str(folder), tmp_path / "ours")
    step = tmp_path / "ours" / "step_00000000"
    (exact,) = compare_logits(step, folder, GPT2).heads
    assert exact.difference <= 1e-13 * exact.largest
    change_json(folder / "config.json", **change)
    with pytest.raises(
        ValueError, match="are not the same model: the logits of next tokens differ by .* reach"
    ):
        compare_logits(step, folder, GPT2)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 2, 1]])
def test_q_k_and_v_in_another_order_are_above_the_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[int]
) -> None:
    folder = write_model(tmp_path / "hf")
    weights = read_weights(folder, GPT2, SECTION, VOCABULARY)
    for name in weights:
        if ".qkv." in name:
            weights[name] = weights[name][order]
    monkeypatch.setattr("tools.convert.weights.read_weights", lambda *arguments: weights)
    with pytest.raises(ValueError, match="are not the same model"):
        import_model(str(folder), tmp_path / "ours")
    assert not [path for path in tmp_path.iterdir() if "ours" in path.name]


@pytest.mark.parametrize("is_zero", [False, True])
def test_logits_that_say_nothing_are_no_agreement(tmp_path: Path, is_zero: bool) -> None:
    """Of no number, which only the longest prompt sees, and of a model of zeros."""
    folder = write_model(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wpe.weight"][15] = float("nan")
    if is_zero:
        tensors = {name: torch.zeros_like(each) for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="cannot be compared" if is_zero else "differ by nan"):
        import_model(str(folder), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_model(str(write_model(tmp_path / "hf")), tmp_path / "ours")
    monkeypatch.setattr("tools.convert.compare.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="are not the same model"):
        export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert not [path for path in tmp_path.iterdir() if "back" in path.name]


def test_a_model_of_one_position_is_converted_without_a_warning(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", n_positions=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_model(str(folder), tmp_path / "ours")
        export_model(str(tmp_path / "ours"), tmp_path / "back")
