"""A folder of transformers becomes a checkpoint and comes back: the same bits, in every form."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.format import read_checkpoint, read_manifest
from megatron.checkpoint.load import verify
from megatron.config.checkpoint import TrainedConfig
from megatron.config.model import BertConfig, FinetunedConfig, LlamaConfig
from megatron.config.parallel import ParallelConfig
from megatron.data.tokenizer import file_names, read_tokenizer
from megatron.models.registry import config_of
from megatron.parallel.compare import KeepFP64
from megatron.train.evaluate import load_model, whole_logits
from megatron.train.trained import open_trained
from tests.data.samples import write_tokenizer, write_tokenizer_json, write_wordpiece
from tests.dist import Pool
from tests.refusals import field_of, refusal
from tests.tiny import mesh_of_ranks
from tests.tools.convert import models
from tools.convert.exporting import write_model as write_model_of
from tools.convert.folder import FAMILIES, family_of, read_description
from tools.convert.table import Family

DROPPED = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.0}
BERTS = {"initializer_range": 0.05, "layer_norm_eps": 1e-12, **DROPPED}
NARROW: list[dict[str, Any]] = [{"dtype": torch.bfloat16}, {"dtype": torch.float16}]
GPT2S = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "initializer_range": 0.05, "attn_pdrop": 0.0}
UNTIED = "untie_embeddings_and_output_weights"


# Changes to what is written, and fields of the model's config.
@pytest.mark.parametrize(
    ("kind", "theirs", "ours"),
    [
        ("gpt2", GPT2S | {"layer_norm_epsilon": 1e-6},
         {"layernorm_epsilon": 1e-6, "attention_dropout": 0.0, "embedding_dropout": None}),
        ("gpt2", {"n_inner": 40, "activation_function": "relu", **NARROW[0]},
         {"ffn_hidden_size": 40}),
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.3, "activation_function": "gelu"},
         {"embedding_dropout": 0.3, "activation": "gelu"}),
        ("gpt2", {"activation_function": "silu", "shard_size": "20KB"}, {"activation": "silu"}),
        ("gpt2", {"tie_word_embeddings": False, **NARROW[1]}, {UNTIED: True}),
        ("gpt2", {"n_positions": 1}, {}),
        ("llama", {"num_key_value_heads": 12, **NARROW[0]}, {"num_query_groups": None}),
        ("llama", {"tie_word_embeddings": True, **NARROW[1]}, {UNTIED: False}),
        ("llama",
         {"rope_parameters": models.SCALED, "attention_dropout": 0.2, "initializer_range": 0.05},
         {"rotary_base": 500.0, "rope_scaling": [8, 1, 4, 8], "attention_dropout": 0.2}),
        ("llama", {"hidden_act": "gelu", "intermediate_size": 192},
         {"activation": "geglu", "ffn_hidden_size": None, "num_query_groups": 3}),
        *(("bert", BERTS | dtype | {"order": order}, {})
          for order, dtype in zip(models.ORDERS, NARROW, strict=True)),
    ],
)  # fmt: skip
def test_the_round_trip_keeps_every_bit(
    tmp_path: Path, kind: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Both ways compare the logits of the two programs."""
    folder = models.WRITERS[kind](tmp_path / "hf", **theirs)
    manifest = read_manifest(models.imported(folder))
    model = manifest["config"]["model"]
    assert {name: model[name] for name in ours} == ours
    if kind == "bert":
        assert config_of(manifest) == BertConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16,
            layernorm_epsilon=1e-12, hidden_dropout=0.2, attention_dropout=0.0,
            init_method_std=0.05, residual_order=theirs["order"],
        )  # fmt: skip
    back = models.exported(tmp_path / "ours", folder)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert models.json_of(folder / name) == models.json_of(back / name), name
    if kind == "llama":
        marks = models.json_of(back / "generation_config.json")
        assert [marks[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [0, 1, 2]


TASKS = {
    "SequenceClassification": ("classifier", ("no", "perhaps", "yes")),
    "MultipleChoice": ("choice", ()),
    "QuestionAnswering": ("span", ()),
}


@pytest.mark.parametrize("order", models.ORDERS)
@pytest.mark.parametrize("task", TASKS)
def test_heads_of_tasks(tmp_path: Path, order: str, task: str) -> None:
    head, labels = TASKS[task]
    names = {"id2label": dict(enumerate(labels)), "label2id": {x: n for n, x in enumerate(labels)}}
    folder = models.write_bert(tmp_path / "hf", order, task, **(names if labels else {}))
    config = config_of(read_manifest(models.imported(folder)))
    assert isinstance(config, FinetunedConfig)
    assert (config.head, config.labels, config.residual_order) == (head, labels, order)
    back = models.exported(tmp_path / "ours", folder)
    for name in ("config.json", "tokenizer.json"):
        assert models.json_of(folder / name) == models.json_of(back / name), name


def logits_of(checkpoint: Path, tokens: torch.Tensor, tensor_size: int) -> torch.Tensor:
    mesh = mesh_of_ranks(tensor_size)
    model = load_model(verify(checkpoint, mesh), mesh, torch.float64)
    return whole_logits(model, mesh, tokens)


@pytest.mark.parametrize(
    ("kind", "changes", "tensor_size"),
    [
        ("gpt2", {}, 4),
        ("bert", {"order": "pre-ln"}, 2),
        ("bert", {"order": "post-ln"}, 2),
        ("llama", {"rope_parameters": models.SCALED}, 4),
    ],
)
@torch.no_grad()
def test_layouts(
    gloo: Pool, tmp_path: Path, kind: str, changes: dict[str, Any], tensor_size: int
) -> None:
    folder = models.WRITERS[kind](tmp_path / "hf", **changes)
    step = models.imported(folder)
    if kind != "bert":
        tokens = torch.randint(261, (3, 16), generator=torch.Generator().manual_seed(0))
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
        with KeepFP64():
            expected = theirs(tokens).logits
        for found in gloo.run(tensor_size, logits_of, step, tokens, tensor_size):
            assert (found - expected).abs().max() < 1e-13 * expected.abs().max()
    gloo.run(tensor_size, models.load_and_save, step, tmp_path / "cut", tensor_size)
    assert len(list(tmp_path.glob("cut/*/shard_*"))) == tensor_size
    models.exported(tmp_path / "cut", folder)


def older_gpt2(folder: Path) -> None:
    """Without the prefix of the names, with the head beside the embedding, and with buffers."""
    tensors = {key.removeprefix("transformer."): t for key, t in models.weights_of(folder).items()}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril().to(torch.uint8)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def older_bert(folder: Path) -> None:
    tensors, old = models.weights_of(folder), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        old[name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")] = tensor
    assert "cls.predictions.transform.LayerNorm.gamma" in old
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    old["bert.embeddings.position_ids"] = torch.arange(16)[None]
    models.change_tensors(folder, {**dict.fromkeys(tensors), **old})
    (kind,) = models.json_of(folder / "config.json")["architectures"]
    masked = kind.replace("PreTraining", "MaskedLM")
    models.change_json(folder / "config.json", architectures=[masked])


def older_llama(folder: Path) -> None:
    """With frequencies in a file of their own, no key/value heads named, and rotary positions as
    transformers wrote them before its version 5."""
    options = models.json_of(folder / "config.json")
    rope = options.pop("rope_parameters")
    options["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    options["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    options |= {"num_key_value_heads": None, "pretraining_tp": 1}
    del options["head_dim"]
    (folder / "config.json").write_text(json.dumps(options))
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
    old = {name: torch.tensor([1.0, 0.01]) for name in names}
    save_file(old, folder / "model-old.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    listed = models.json_of(index)["weight_map"] | dict.fromkeys(old, "model-old.safetensors")
    models.change_json(index, weight_map=listed)


def with_head(folder: Path) -> None:
    embedding = models.weights_of(folder)["model.embed_tokens.weight"]
    models.change_tensors(folder, {"lm_head.weight": embedding.clone()})


SEVERAL = {"shard_size": "20KB", "num_key_value_heads": 12}


@pytest.mark.parametrize(
    ("kind", "changes", "older"),
    [
        ("gpt2", {}, older_gpt2),
        *(("bert", {"order": order}, older_bert) for order in models.ORDERS),
        ("llama", SEVERAL, older_llama),
        ("llama", SEVERAL | {"rope_parameters": models.SCALED}, older_llama),
        ("llama", {"tie_word_embeddings": True}, with_head),
    ],
)
def test_older_files(
    tmp_path: Path, kind: str, changes: dict[str, Any], older: Callable[[Path], None]
) -> None:
    folder = models.WRITERS[kind](tmp_path / "hf", **changes)
    config = read_description(folder).config
    paths = [models.imported(folder)]
    older(folder)
    assert read_description(folder).config == config
    paths.append(models.imported(folder, "again"))
    models.assert_same_weights(*paths)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.architectures[0])
def test_options_that_are_left_out_mean_what_they_do_in_transformers(family: Family) -> None:
    theirs = AutoConfig.for_model(family.model_type)
    defaults = {key.theirs: key.default for key in family.keys if key.default is not None}
    assert {name: getattr(theirs, name) for name in defaults} == defaults


UNSTARTED = {name: models.SCALED[name] for name in models.SCALED if not name.startswith("original")}


@pytest.mark.parametrize(
    ("changes", "base", "scaling"),
    [
        ({"rope_parameters": None}, 10_000.0, None),
        ({"rope_parameters": None, "rope_theta": 7}, 7.0, None),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7}, 7.0, None),
        ({"rope_parameters": {"rope_theta": 7}, "rope_theta": 8}, 7.0, None),
        ({"rope_scaling": models.SCALED}, 500.0, (8.0, 1.0, 4.0, 8.0)),
        ({"rope_parameters": UNSTARTED}, 500.0, (8.0, 1.0, 4.0, 16.0)),
    ],
)
def test_rotary_positions(
    tmp_path: Path, changes: dict[str, Any], base: float, scaling: tuple[float, ...] | None
) -> None:
    folder = models.write_llama(tmp_path / "hf")
    models.change_json(folder / "config.json", **changes)
    config = read_description(folder).config
    assert isinstance(config, LlamaConfig)
    assert (config.rotary_base, config.rope_scaling) == (base, scaling)
    models.imported(folder)


@pytest.mark.parametrize(
    ("kind", "activations"),
    [("gpt2", ("swiglu", "geglu")), ("llama", ("silu", "gelu_tanh")), ("bert", ())],
)
def test_several_files(tmp_path: Path, kind: str, activations: tuple[str, ...]) -> None:
    """Some have only a part of a parameter of this project. Activations that are none of theirs are
    refused."""
    folder, back = models.WRITERS[kind](tmp_path / "hf"), tmp_path / "back"
    checkpoint = read_checkpoint(models.imported(folder))
    config, family = checkpoint.manifest["config"], family_of(config_of(checkpoint.manifest))
    tokenizer = read_tokenizer(config["data"]["tokenizer_type"], checkpoint.path)
    write = partial(write_model_of, back, checkpoint, family, tokenizer, shard_size="6KB")
    back.mkdir()
    write()
    files = list(back.glob("model-*.safetensors"))
    assert len(files) > 3
    assert {file.stat().st_mode for file in files} == {(back / "config.json").stat().st_mode}
    models.assert_same_weights(folder, back)
    models.imported(back, "again")
    for activation in activations:
        config["model"]["activation"] = activation
        assert field_of(refusal(write)) == "--activation"


def test_gpt2_tokenizer_of_a_llama(tmp_path: Path) -> None:
    ids = {"bos_token_id": None, "eos_token_id": 260, "pad_token_id": None}
    folder = models.write_llama(tmp_path / "hf", vocab_size=261, **ids)
    for file in folder.glob("*token*"):
        file.unlink()
    vocabulary, merges = write_tokenizer(tmp_path)
    given = {"tokenizer_type": "GPT2BPETokenizer"}
    paths = [models.imported(folder, vocab_file=vocabulary, merge_file=merges, **given)]
    back = models.exported(paths[0], folder)
    marks = models.json_of(back / "config.json")
    assert [marks[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, 260, None]
    paths.append(models.imported(back, "json"))
    models.split_tokenizer(back)
    paths.append(models.imported(back, "files", **given))
    kinds = [read_manifest(path)["config"]["data"]["tokenizer_type"] for path in paths]
    assert kinds == ["GPT2BPETokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer"]


def test_sentencepiece(tmp_path: Path) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    folder = models.write_llama(tmp_path / "hf", vocab_size=317, **ids)
    models.write_sentencepiece(folder, 317)
    step = models.imported(folder)
    back = models.exported(step, folder)
    assert models.json_of(back / "tokenizer.json") == models.json_of(folder / "tokenizer.json")
    marks = models.json_of(back / "config.json")
    assert [marks[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, None]
    ours = read_tokenizer("HuggingFaceTokenizer", step)
    before, theirs = (AutoTokenizer.from_pretrained(each) for each in (folder, back))
    assert (ours.bos_id, theirs.bos_token_id) == (1, 1)
    assert theirs.encode("the thing \u00fc") == [1, *ours.encode("the thing \u00fc")]
    for text in ("the thing \u00fc", "  in the inn", " "):
        assert theirs.encode(text) == before.encode(text)
    models.change_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    refusal(lambda: models.imported(folder, "again"))  # which gives other ids


@pytest.mark.parametrize("kind", models.WRITERS)
def test_no_tokenizer(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.WRITERS[kind](tmp_path / "hf")
    small = models.WRITERS[kind](tmp_path / "s", vocab_size=90)
    for file in [*folder.iterdir(), *small.iterdir()]:
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    step = models.imported(folder, no_tokenizer=True)
    manifest = read_manifest(step)
    names = file_names(manifest["config"]["data"]["tokenizer_type"])
    assert not {*names} & manifest["files"].keys()
    vocabulary, merges = write_tokenizer(tmp_path)
    words = Path(write_wordpiece(tmp_path))
    words.write_bytes(words.read_bytes().replace(b"\n", b"\r\n"))  # as on Windows
    files = {
        "gpt2": {"vocab_file": vocabulary, "merge_file": merges},
        "bert": {"vocab_file": str(words)},
        "llama": {"vocab_file": write_tokenizer_json(tmp_path / "json")},
    }[kind]
    with monkeypatch.context() as patch:
        patch.setattr("tools.convert.vocabulary.compare_ids", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):  # they are compared
            models.exported(step, folder, **files)
    models.exported(step, folder, **files)

    def opened(step: Path, **given: str) -> int:
        trained = TrainedConfig(load=str(step), **given)
        return open_trained(trained, ParallelConfig(), 1, [*models.WRITERS])[1].vocab_size

    assert "--vocab-file" in str(refusal(lambda: opened(step)))
    assert opened(step, **files) > 90
    less = models.imported(small, "less", no_tokenizer=True)
    assert "90" in str(refusal(lambda: opened(less, **files)))


@pytest.mark.parametrize("lower", [True, False])
def test_casing_of_bert(tmp_path: Path, lower: bool) -> None:
    folder = models.write_bert(tmp_path / "hf", do_lower_case=lower)
    kind = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
    ours = read_tokenizer(kind, models.imported(folder))
    back = models.exported(tmp_path / "ours", folder)
    theirs = AutoTokenizer.from_pretrained(back)
    ids = theirs.encode("The THING, the inn.")
    assert ids == [theirs.cls_token_id, *ours.encode("The THING, the inn."), theirs.sep_token_id]
    assert theirs.model_max_length == AutoTokenizer.from_pretrained(folder).model_max_length
    if not lower:  # which the flag contradicts
        other = {"tokenizer_type": "BertWordPieceLowerCase"}
        refusal(lambda: models.imported(folder, "again", **other))
    (back / "tokenizer.json").unlink()  # as older versions read it
    assert AutoTokenizer.from_pretrained(back).encode("The THING, the inn.") == ids
