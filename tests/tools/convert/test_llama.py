"""Llama to a checkpoint and back: the same bits and logits, in every form of its files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.format import read_checkpoint, read_manifest
from megatron.checkpoint.load import verify
from megatron.config.model import LlamaConfig
from megatron.data.tokenizer import read_tokenizer
from megatron.models.hf_layers import Wide
from megatron.train.evaluate import load_model, whole_logits
from tests.data.samples import write_tokenizer
from tests.dist import Pool
from tests.tiny import mesh_of_ranks
from tests.tools.convert.llamas import (
    SCALED,
    VOCABULARY,
    make_old,
    write_llama,
    write_sentencepiece,
)
from tests.tools.convert.models import (
    assert_same_weights,
    change_json,
    load_and_save,
    split_tokenizer,
    weights_of,
)
from tools.convert.compare import compare_logits
from tools.convert.exporting import write_model
from tools.convert.folder import read_description
from tools.convert.llama import LLAMA
from tools.convert.weights import read_weights, resolve
from tools.convert_hf import export_model, import_model

SECTION = LlamaConfig(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=40,
    num_attention_heads=12,
    num_query_groups=3,
    max_position_embeddings=16,
)


def json_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_bytes())
    return found


@pytest.mark.parametrize(
    ("dtype", "theirs", "ours"),
    [
        (torch.float32, {}, {"num_query_groups": 3, "rope_scaling": None}),
        (torch.bfloat16, {"num_key_value_heads": 12}, {"num_query_groups": None}),
        (
            torch.float16,
            {"tie_word_embeddings": True},
            {"untie_embeddings_and_output_weights": False},
        ),
        (
            torch.float32,
            {"rope_parameters": SCALED, "attention_dropout": 0.2, "initializer_range": 0.05},
            {"rotary_base": 500.0, "rope_scaling": [8, 1, 4, 8], "attention_dropout": 0.2},
        ),
        (torch.float32, {"hidden_act": "gelu"}, {"activation": "geglu"}),
        (torch.float32, {"intermediate_size": 192}, {"ffn_hidden_size": None}),
    ],
)
def test_the_round_trip_keeps_every_bit(
    tmp_path: Path, dtype: torch.dtype, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Both ways compare the logits of the two programs."""
    folder = write_llama(tmp_path / "hf", dtype=dtype, **theirs)
    import_model(str(folder), tmp_path / "ours")
    model = read_manifest(tmp_path / "ours" / "step_00000000")["config"]["model"]
    assert {name: model[name] for name in ours} == ours
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    for name in ("config.json", "tokenizer.json"):
        assert json_of(folder / name) == json_of(tmp_path / "back" / name)
    marks = json_of(tmp_path / "back" / "generation_config.json")
    assert [marks[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [0, 1, 2]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("[BOT]", "[EOT]")


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("changes", [{}, {"rope_parameters": SCALED}])
def test_older_files_are_the_same_checkpoint(
    tmp_path: Path, key: str, changes: dict[str, Any]
) -> None:
    """In several files, with frequencies beside the weights, and no key/value heads named."""
    changes |= {"num_key_value_heads": 12}
    folder = write_llama(tmp_path / "hf", shard_size="20KB", **changes)
    section = read_description(folder).section
    import_model(str(folder), tmp_path / "ours")
    make_old(folder, key)
    change_json(folder / "config.json", num_key_value_heads=None, pretraining_tp=1)
    index = folder / "model.safetensors.index.json"
    listed = json_of(index)
    old = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.tensor([1.0, 0.01])
        for layer in range(2)
    }
    save_file(old, folder / "model-old.safetensors", {"format": "pt"})
    listed["weight_map"] |= dict.fromkeys(old, "model-old.safetensors")
    index.write_text(json.dumps(listed))
    assert read_description(folder).section == section
    import_model(str(folder), tmp_path / "again")
    assert_same_weights(*(tmp_path / name / "step_00000000" for name in ("ours", "again")))


@pytest.mark.parametrize(
    ("changes", "base", "scaling"),
    [
        ({"rope_parameters": None}, 10_000.0, None),
        ({"rope_parameters": None, "rope_theta": 7}, 7.0, None),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7}, 7.0, None),
        ({"rope_parameters": {"rope_theta": 7}, "rope_theta": 8}, 7.0, None),
        ({"rope_scaling": SCALED}, 500.0, (8.0, 1.0, 4.0, 8.0)),
        (
            {"rope_parameters": {k: SCALED[k] for k in SCALED if not k.startswith("original")}},
            500.0,
            (8.0, 1.0, 4.0, 16.0),
        ),
    ],
)
def test_rotary_positions_are_read_as_transformers_reads_them(
    tmp_path: Path, changes: dict[str, Any], base: float, scaling: tuple[float, ...] | None
) -> None:
    folder = write_llama(tmp_path / "hf")
    change_json(folder / "config.json", **changes)
    section = read_description(folder).section
    assert isinstance(section, LlamaConfig)
    assert (section.rotary_base, section.rope_scaling) == (base, scaling)
    import_model(str(folder), tmp_path / "ours")


def test_the_head_of_a_tied_model_may_be_there_too(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "hf", tie_word_embeddings=True)
    import_model(str(folder), tmp_path / "ours")
    tensors = weights_of(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    import_model(str(folder), tmp_path / "again")
    assert_same_weights(*(tmp_path / name / "step_00000000" for name in ("ours", "again")))


def test_the_table_makes_every_tensor_of_theirs_in_its_shape(tmp_path: Path) -> None:
    theirs = {key: t.shape for key, t in weights_of(write_llama(tmp_path / "hf")).items()}
    made = {
        LLAMA.key_of(name): shape
        for entry in resolve(LLAMA, SECTION, VOCABULARY)
        for name, shape in zip(entry.theirs, entry.their_shapes(), strict=True)
    }
    assert made == theirs


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1.1e-5},
        {"num_attention_heads": 6, "head_dim": 8},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_001.0}},
        {"rope_parameters": SCALED | {"rope_theta": 10_000.0}},
        {"hidden_act": "gelu"},
    ],
)
def test_another_form_of_the_model_is_above_the_tolerance(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = write_llama(tmp_path / "hf", num_key_value_heads=6, num_attention_heads=12)
    import_model(str(folder), tmp_path / "ours")
    step = tmp_path / "ours" / "step_00000000"
    (exact,) = compare_logits(step, folder, LLAMA).heads
    assert exact.difference <= 1e-13 * exact.largest
    change_json(folder / "config.json", **change)
    if "num_attention_heads" in change:  # as many rows of keys and values, in wider heads
        change_json(folder / "config.json", num_key_value_heads=3)
    with pytest.raises(ValueError, match="are not the same model"):
        compare_logits(step, folder, LLAMA)


@pytest.mark.parametrize("part", ["key_value", "up.weight"])
def test_keys_for_values_or_the_gate_for_what_it_gates_are_above_the_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    folder = write_llama(tmp_path / "hf")
    weights = read_weights(folder, LLAMA, SECTION, VOCABULARY)
    for name in weights:
        if name.endswith(part):
            weights[name] = weights[name].flip(0)
    monkeypatch.setattr("tools.convert.weights.read_weights", lambda *arguments: weights)
    with pytest.raises(ValueError, match="are not the same model"):
        import_model(str(folder), tmp_path / "ours")


@pytest.mark.parametrize(("field", "value"), [("activation", "silu"), ("activation", "gelu_tanh")])
def test_what_transformers_cannot_say_is_not_exported(
    tmp_path: Path, field: str, value: object
) -> None:
    import_model(str(write_llama(tmp_path / "hf")), tmp_path / "ours")
    checkpoint = read_checkpoint(tmp_path / "ours" / "step_00000000")
    checkpoint.manifest["config"]["model"][field] = value
    tokenizer = read_tokenizer("HuggingFaceTokenizer", checkpoint.path)
    with pytest.raises(ValueError, match=f"--{field}"):
        write_model(tmp_path / "back", checkpoint, LLAMA, tokenizer)


def test_gpt2s_tokenizer_is_a_llamas_if_the_flag_says_so(tmp_path: Path) -> None:
    ids = {"bos_token_id": None, "eos_token_id": 260, "pad_token_id": None}
    folder = write_llama(tmp_path / "hf", vocab_size=261, **ids)
    for file in folder.glob("*token*"):
        file.unlink()
    files = write_tokenizer(tmp_path)
    import_model(str(folder), tmp_path / "ours", *files, tokenizer_type="GPT2BPETokenizer")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    marks = json_of(tmp_path / "back" / "config.json")
    assert [marks[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, 260, None]
    import_model(str(tmp_path / "back"), tmp_path / "json")
    split_tokenizer(tmp_path / "back")
    given = {"tokenizer_type": "GPT2BPETokenizer"}
    import_model(str(tmp_path / "back"), tmp_path / "files", **given)
    kinds = [
        read_manifest(tmp_path / name / "step_00000000")["config"]["data"]["tokenizer_type"]
        for name in ("ours", "json", "files")
    ]
    assert kinds == ["GPT2BPETokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer"]


def test_a_tokenizer_of_sentencepiece_comes_and_goes(tmp_path: Path) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    folder = write_llama(tmp_path / "hf", vocab_size=317, **ids)
    write_sentencepiece(folder, 317)
    import_model(str(folder), tmp_path / "ours")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert json_of(tmp_path / "back" / "tokenizer.json") == json_of(folder / "tokenizer.json")
    marks = json_of(tmp_path / "back" / "config.json")
    assert [marks[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, None]
    ours = read_tokenizer("HuggingFaceTokenizer", tmp_path / "ours" / "step_00000000")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (ours.bos_id, theirs.bos_token_id) == (1, 1)
    before = AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("the thing \u00fc") == [1, *ours.encode("the thing \u00fc")]
    for text in ("the thing \u00fc", "  in the inn", " "):
        assert theirs.encode(text) == before.encode(text)
    change_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    with pytest.raises(ValueError, match="other ids"):
        import_model(str(folder), tmp_path / "again")


def logits_of(checkpoint: Path, tokens: torch.Tensor, tensor_size: int) -> torch.Tensor:
    mesh = mesh_of_ranks(tensor_size)
    model = load_model(verify(checkpoint, mesh), mesh, torch.float64)
    return whole_logits(model, mesh, tokens)


@pytest.mark.parametrize("tensor_size", [2, 4])
@torch.no_grad()
def test_a_checkpoint_of_any_layout_has_the_logits_and_is_exported(
    gloo: Pool, tmp_path: Path, tensor_size: int
) -> None:
    folder = write_llama(tmp_path / "hf", rope_parameters=SCALED)
    import_model(str(folder), tmp_path / "ours")
    step = tmp_path / "ours" / "step_00000000"
    tokens = torch.randint(VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    with Wide():
        expected = theirs(tokens).logits
    for found in gloo.run(tensor_size, logits_of, step, tokens, tensor_size):
        assert (found - expected).abs().max() < 1e-13 * expected.abs().max()
    gloo.run(tensor_size, load_and_save, step, tmp_path / "cut", tensor_size)
    export_model(str(tmp_path / "cut"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
