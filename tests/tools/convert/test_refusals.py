"""What cannot be converted is refused; the message names the file, key, tensor or flag."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.data.samples import write_tokenizer
from tests.tools.convert.berts import change_tensors, write_bert, write_vocabulary
from tests.tools.convert.llamas import FACTORS, write_llama
from tests.tools.convert.models import change_json, split_tokenizer, write_model
from tools.convert_hf import export_model, import_model

ROOT = Path(__file__).parents[3]
CONFIG, SETTINGS, TOKENIZER = "config.json", "tokenizer_config.json", "tokenizer.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "gpt2": write_model(folder / "gpt2", n_layer=1, n_embd=8, n_head=2),
        "bert": write_bert(folder / "bert"),
        "llama": write_llama(folder / "llama"),
        "classifier": write_bert(folder / "classifier", task="SequenceClassification"),
    }


Make = Callable[[str], Path]


@pytest.fixture
def make(written: Mapping[str, Path], tmp_path: Path) -> Make:
    """A folder of transformers with a model of this kind, to be changed."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(written[kind], tmp_path / "hf"))

    return copy


def refuse(folder: Path, *named: str, **arguments: Any) -> None:
    """The import is refused with a message that holds all these, and leaves nothing."""
    with pytest.raises((ValueError, OSError)) as refused:
        import_model(str(folder), folder.parent / "ours", **arguments)
    for name in named:
        assert name in str(refused.value)
    assert not [path for path in folder.parent.iterdir() if "ours" in path.name]


@pytest.mark.parametrize(
    ("kind", "option", "value", "named"),
    [
        ("gpt2", "model_type", ["gpt2"], ""),
        ("gpt2", "model_type", "t5", "llama"),
        ("gpt2", "model_type", "llama", "architectures"),
        ("gpt2", "activation_function", "quick_gelu", "gelu_new"),
        ("gpt2", "scale_attn_weights", False, "true"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, ""),
        ("gpt2", "reorder_and_upcast_attn", True, ""),
        ("gpt2", "add_cross_attention", True, ""),
        ("gpt2", "tie_word_embeddings", False, "lm_head.weight"),
        ("gpt2", "n_inner", 16, "h.0.mlp.c_fc.weight"),
        ("gpt2", "quantization_config", {"bits": 4}, "null"),
        ("gpt2", "architectures", ["GPT2ForSequenceClassification"], ""),
        ("gpt2", "n_embd", "8", ""),
        ("gpt2", "n_head", 3, "n_embd 8"),
        ("gpt2", "layer_norm_epsilon", None, ""),
        ("gpt2", "vocab_size", 256, "261"),
        ("gpt2", "vocab_size", None, ""),
        ("gpt2", "n_layer", 2, "h.1.attn.c_attn.bias"),
        ("gpt2", "n_positions", 17, "wpe.weight"),
        ("bert", "architectures", ["BertModel"], ""),
        ("bert", "architectures", ["BertLMHeadModel"], "BertForPreTraining"),
        ("bert", "hidden_act", "gelu_new", "gelu"),
        ("bert", "intermediate_size", 64, "encoder.layer.0.intermediate.dense.weight"),
        ("bert", "position_embedding_type", "relative_key", ""),
        ("bert", "type_vocab_size", 3, "2"),
        ("bert", "is_decoder", True, "false"),
        ("bert", "add_cross_attention", True, ""),
        ("bert", "tie_word_embeddings", False, ""),
        ("bert", "classifier_dropout", 0.5, "0.1"),
        ("bert", "quantization_config", {"bits": 4}, "null"),
        ("bert", "num_attention_heads", 5, "hidden_size 32"),
        ("bert", "layer_norm_eps", "tiny", ""),
        ("bert", "vocab_size", 90, "93"),
        ("bert", "num_hidden_layers", 3, "encoder.layer.2.attention.output.LayerNorm.bias"),
        ("bert", "max_position_embeddings", 17, "position_embeddings.weight"),
        ("bert", "model_type", "megatron-bert", "architectures"),
        ("llama", "architectures", ["LlamaForSequenceClassification"], "LlamaForCausalLM"),
        ("llama", "architectures", ["LlamaModel"], "LlamaForCausalLM"),
        ("llama", "hidden_act", "gelu_new", "silu"),
        ("llama", "head_dim", 8, "4 or null"),
        ("llama", "attention_bias", True, "false"),
        ("llama", "mlp_bias", True, "false"),
        ("llama", "pretraining_tp", 2, "1"),
        ("llama", "quantization_config", {"bits": 4}, "null"),
        ("llama", "attention_dropout", "none", "number"),
        ("llama", "num_key_value_heads", 5, "num_attention_heads"),
        ("llama", "num_key_value_heads", 4, "k_proj.weight"),
        ("llama", "num_key_value_heads", "3", "whole number"),
        ("llama", "intermediate_size", 41, "gate_proj.weight"),
        ("llama", "tie_word_embeddings", True, "lm_head.weight"),
        ("llama", "tie_word_embeddings", None, "false"),
        ("llama", "rms_norm_eps", None, "number"),
        ("llama", "vocab_size", 262, "263"),
        ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type"),
        ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "llama3"),
        ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ("llama", "rope_parameters", {"rope_type": "llama3", **FACTORS, "factor": 0.5}, ""),
        ("llama", "rope_scaling", {"attention_factor": 2.0}, "attention_factor"),
        ("llama", "rope_scaling", "llama3", "object"),
        ("llama", "rope_parameters", {"rope_type": "dynamic"}, "default"),
        ("llama", "rope_parameters", {"rope_theta": "10000"}, "rope_theta"),
        ("llama", "rope_parameters", {"rope_theta": -1.0}, "rope_theta"),
        ("classifier", "id2label", {"0": "no", "2": "yes"}, ""),
        ("classifier", "id2label", {"0": "a", "1": "b", "2": "c"}, "classifier.weight"),
        ("classifier", "problem_type", "regression", ""),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    make: Make, kind: str, option: str, value: Any, named: str
) -> None:
    folder = make(kind)
    change_json(folder / CONFIG, **{option: value})
    of_shapes = named.endswith((".weight", ".bias", "architectures"))
    refuse(folder, str(folder), named if of_shapes else option, named)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_configuration_that_is_no_object_is_refused(make: Make, content: str) -> None:
    folder = make("gpt2")
    (folder / CONFIG).write_text(content)
    refuse(folder, CONFIG)


def test_values_that_mean_the_same_are_accepted(make: Make) -> None:
    folder = make("gpt2")
    change_json(folder / CONFIG, n_inner=32, activation_function="gelu_pytorch_tanh")
    import_model(str(folder), folder.parent / "ours")


@pytest.mark.parametrize("order", ["post-ln", "pre-ln"])
def test_a_bert_without_pooler_and_order_head_is_refused_with_the_reason(
    tmp_path: Path, order: str
) -> None:
    folder = write_bert(tmp_path / "hf", order, "MaskedLM")
    name = "MegatronBertForPreTraining" if order == "pre-ln" else "BertForPreTraining"
    refuse(folder, "cls.seq_relationship.bias", "BertForMaskedLM", name)


Tensors = dict[str, Tensor]
EMBEDDING, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
NORM = "bert.embeddings.LayerNorm"
ONES = torch.ones(7)


@pytest.mark.parametrize(
    ("kind", "named", "change"),
    [
        ("gpt2", "h.0.ln_2.bias", lambda t: {"transformer.h.0.ln_2.bias": None}),
        ("gpt2", "score.weight", lambda t: {"score.weight": torch.zeros(2, 8)}),
        ("gpt2", "wpe.weight", lambda t: {"wpe.weight": t["transformer.wpe.weight"].clone()}),
        ("gpt2", "lm_head.weight", lambda t: {"lm_head.weight": t["transformer.wte.weight"] + 1}),
        (
            "gpt2",
            "ln_f.weight torch.float16",
            lambda t: {"transformer.ln_f.weight": t["transformer.ln_f.weight"].half()},
        ),
        ("gpt2", "torch.float64", lambda t: {key: tensor.double() for key, tensor in t.items()}),
        ("gpt2", "h.0.attn.bias", lambda t: {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}),
        (
            "gpt2",
            "h.0.attn.masked_bias",
            lambda t: {"transformer.h.0.attn.masked_bias": torch.tensor(-1.0)},
        ),
        (
            "gpt2",
            "h.1.attn.masked_bias",
            lambda t: {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)},
        ),
        (
            "bert",
            "LayerNorm.bias",
            lambda t: {"bert.pooler.dense.bias": None, NORM + ".bias": None},
        ),
        ("llama", "layers.1.mlp.up_proj", lambda t: {"model.layers.1.mlp.up_proj.weight": None}),
        ("llama", "q_proj.bias", lambda t: {"model.layers.0.self_attn.q_proj.bias": ONES}),
        ("llama", "inv_freq", lambda t: {"model.layers.0.self_attn.rotary_emb.inv_freq": ONES}),
        ("llama", "norm.weight", lambda t: {"model.norm.weight": ONES}),
        ("bert", "classifier.weight", lambda t: {"classifier.weight": torch.zeros(2, 32)}),
        ("bert", "LayerNorm.weight", lambda t: {NORM + ".gamma": t[NORM + ".weight"] + 0}),
        ("bert", "decoder.weight", lambda t: {"cls.predictions.decoder.weight": t[EMBEDDING] + 1}),
        ("bert", "decoder.bias", lambda t: {"cls.predictions.decoder.bias": t[BIAS] + 1}),
        (
            "bert",
            "position_ids",
            lambda t: {"bert.embeddings.position_ids": torch.arange(1, 17)[None]},
        ),
        ("bert", f"{BIAS} torch.float16", lambda t: {BIAS: t[BIAS].half()}),
        (
            "bert",
            "self.key.bias",
            lambda t: {"bert.encoder.layer.0.attention.self.key.bias": torch.zeros(16)},
        ),
    ],
)
def test_weights_that_are_not_the_model_are_refused(
    make: Make, kind: str, named: str, change: Callable[[Tensors], dict[str, Tensor | None]]
) -> None:
    folder = make(kind)
    change_tensors(folder, change(load_file(folder / "model.safetensors")))
    refuse(folder, named)


def test_damaged_and_pickled_weights_are_refused(make: Make) -> None:
    folder = make("gpt2")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refuse(folder, "model.safetensors")
    file.rename(folder / "pytorch_model.bin")
    refuse(folder, "model.safetensors", "save_pretrained")


@pytest.mark.parametrize("place", ["elsewhere.safetensors", "missing.safetensors"])
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, place: str) -> None:
    folder = write_model(tmp_path / "hf", shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_bytes())
    save_file({"a": torch.zeros(1)}, folder / "elsewhere.safetensors")
    content["weight_map"]["transformer.ln_f.bias"] = place
    index.write_text(json.dumps(content))
    refuse(folder, "index.json", place if place.startswith("missing") else "")


MARK = {"id": 261, "content": "<pad>"}


@pytest.mark.parametrize(
    ("kind", "part", "changes"),
    [
        ("gpt2", "normalizer", {"type": "NFC"}),
        ("gpt2", "pre_tokenizer", {"add_prefix_space": True}),
        ("gpt2", "pre_tokenizer", {"type": "Whitespace"}),
        ("gpt2", "pre_tokenizer", {"use_regex": False}),
        ("gpt2", "model", {"type": "Unigram"}),
        ("gpt2", "model", {"byte_fallback": True}),
        ("gpt2", "model", {"vocab": {"a": 0}}),
        ("gpt2", "model", {"merges": [["a", "zz"]]}),
        ("gpt2", "post_processor", {"special_tokens": {"<s>": {}}}),
        ("bert", "normalizer", {"type": "NFC"}),
        ("bert", "normalizer", {"strip_accents": False}),
        ("bert", "normalizer", {"handle_chinese_chars": False}),
        ("bert", "normalizer", {"lowercase": False}),
        ("bert", "pre_tokenizer", {"type": "Whitespace"}),
        ("bert", "model", {"type": "BPE"}),
        ("bert", "model", {"max_input_chars_per_word": 50}),
        ("bert", "model", {"vocab": {"a": 0, "b": 2}}),
    ],
)
def test_another_kind_of_tokenizer_is_refused(
    make: Make, kind: str, part: str, changes: dict[str, Any]
) -> None:
    folder = make(kind)
    content = json.loads((folder / TOKENIZER).read_bytes())
    content[part] = (content[part] or {}) | changes
    (folder / TOKENIZER).write_text(json.dumps(content))
    refuse(folder, str(folder / TOKENIZER), f"{part}.{next(iter(changes))}")


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("gpt2", "add_bos_token", True),
        ("bert", "strip_accents", False),
        ("bert", "cls_token", "<s>"),
        ("bert", "cls_token", {"content": "<s>"}),
        ("bert", "never_split", ["a"]),
    ],
)
def test_a_tokenizer_of_another_configuration_is_refused(
    make: Make, kind: str, option: str, value: Any
) -> None:
    folder = make(kind)
    change_json(folder / SETTINGS, **{option: value})
    refuse(folder, SETTINGS, option)


def test_added_tokens_are_refused(make: Make, tmp_path: Path) -> None:
    folder = make("gpt2")
    content = json.loads((folder / TOKENIZER).read_bytes())
    changed = {**content, "added_tokens": [*content["added_tokens"], MARK]}
    (folder / TOKENIZER).write_text(json.dumps(changed))
    refuse(folder, TOKENIZER, "<pad>")
    (folder / TOKENIZER).write_text(json.dumps(content))
    (folder / "added_tokens.json").write_text('{"<mask>": 261}')
    refuse(folder, "added_tokens.json", "<mask>")
    folder = write_bert(tmp_path / "bert")
    change_json(folder / SETTINGS, added_tokens_decoder={"93": {"content": "<new>"}})
    refuse(folder, SETTINGS, "<new>")


def test_a_tokenizer_that_leaves_out_the_marks_is_refused(make: Make) -> None:
    folder = make("bert")
    content = json.loads((folder / TOKENIZER).read_bytes())
    content["post_processor"]["single"] = [{"Sequence": {"id": "A", "type_id": 0}}]
    (folder / TOKENIZER).write_text(json.dumps(content))
    change_json(folder / SETTINGS, tokenizer_class="PreTrainedTokenizerFast")
    refuse(folder, "tokenizer")


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def test_the_files_of_a_gpt2s_tokenizer_work_in_the_folder_or_as_flags(make: Make) -> None:
    folder = make("gpt2")
    vocab_file, merge_file = write_tokenizer(folder.parent)
    split_tokenizer(folder)
    import_model(str(folder), folder.parent / "two")
    remove_tokenizer(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    refuse(folder, "--vocab-file", "--merge-file")
    import_model(str(folder), folder.parent / "flags", vocab_file, merge_file)


def test_the_files_of_a_berts_tokenizer_work_in_the_folder_or_as_flags(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "hf", do_lower_case=False)
    remove_tokenizer(folder)
    file = str(write_vocabulary(tmp_path, do_lower_case=False))
    refuse(folder, "--vocab-file")
    refuse(folder, "--tokenizer-type BertWordPieceCase", vocab_file=file)
    refuse(folder, "--merge-file", vocab_file=file, merge_file="m")
    refuse(folder, "--tokenizer-type", vocab_file=file, tokenizer_type="GPT2BPETokenizer")
    import_model(str(folder), tmp_path / "ours", file, tokenizer_type="BertWordPieceCase")
    lower = write_bert(tmp_path / "lower")
    remove_tokenizer(lower)
    write_vocabulary(lower)
    import_model(str(lower), tmp_path / "vocabulary")
    (lower / SETTINGS).write_text('{"do_lower_case": false}')
    with pytest.raises(ValueError, match="do_lower_case"):
        import_model(str(lower), tmp_path / "again")


def test_tokenizers_that_differ_are_refused(make: Make) -> None:
    folder = make("gpt2")
    split_tokenizer(folder)
    vocab_file, merge_file = write_tokenizer(folder.parent)
    merges = Path(merge_file)
    merges.write_text(merges.read_text("utf-8").replace("i n\n", ""), encoding="utf-8")
    refuse(folder, "--vocab-file", "vocab.json", vocab_file=vocab_file, merge_file=merge_file)


def test_a_berts_tokenizers_that_differ_are_refused(make: Make) -> None:
    folder = make("bert")
    refuse(folder, "--tokenizer-type", SETTINGS, tokenizer_type="BertWordPieceCase")
    file = write_vocabulary(folder.parent)
    file.write_text(file.read_text("utf-8").replace("\nthe\n", "\nthey\n"), encoding="utf-8")
    refuse(folder, "--vocab-file", TOKENIZER, vocab_file=str(file))


def test_what_is_there_is_never_replaced(make: Make, tmp_path: Path) -> None:
    folder = make("gpt2")
    (tmp_path / "there").mkdir()
    for convert in (import_model, export_model):
        with pytest.raises(FileExistsError, match="--to"):
            convert(str(folder), tmp_path / "there")


def test_a_checkpoint_that_is_missing_or_damaged_is_refused(make: Make, tmp_path: Path) -> None:
    for name in ("nothing", "step_00000007"):
        with pytest.raises(ValueError, match=f"--from .*{name}"):
            export_model(str(tmp_path / name), tmp_path / "back")
    import_model(str(make("gpt2")), tmp_path / "ours")
    (shard,) = tmp_path.glob("ours/step_00000000/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s)--from.*{shard.name}"):
        export_model(str(tmp_path / "ours"), tmp_path / "back")


def test_an_export_above_the_tolerance_leaves_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("bert")
    import_model(str(folder), folder.parent / "ours")
    monkeypatch.setattr("tools.convert.compare.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="differ"):
        export_model(str(folder.parent / "ours"), folder.parent / "back")
    assert not [path for path in folder.parent.iterdir() if "back" in path.name]


def test_a_name_that_is_no_folder_is_fetched_from_the_hub(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = make("gpt2"), []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    import_model("someone/gpt2-tiny", folder.parent / "ours")
    ((name, patterns),) = asked
    assert name == "someone/gpt2-tiny"
    assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(patterns)
    assert not [pattern for pattern in patterns if "bin" in pattern]


def test_a_path_is_not_asked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    (tmp_path / "file").touch()
    for name in (tmp_path / "file", tmp_path / "nothing", "./nothing", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=f"--from {name}"):
            import_model(str(name), tmp_path / "ours")


def test_the_program_without_a_network_ends_with_one_error(tmp_path: Path) -> None:
    command = [sys.executable, "tools/convert_hf.py", "import", "--from", "someone/nothing"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([*command, "--to", str(tmp_path / "ours")], cwd=ROOT, env=environ,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2
    assert "error: --from someone/nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_configuration_is_refused_without_torch_or_transformers(make: Make) -> None:
    folder = make("gpt2")
    change_json(folder / CONFIG, scale_attn_by_inverse_layer_idx=True)
    program = (
        "import sys\nfrom pathlib import Path\nfrom tools.convert_hf import import_model\n"
        "try:\n    import_model(sys.argv[1], Path(sys.argv[1]).parent / 'ours')\n"
        "except ValueError:\n    sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(folder)]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
