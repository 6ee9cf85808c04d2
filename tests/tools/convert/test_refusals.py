"""Refusals of a conversion name the flag, file, key or tensor, and leave nothing."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.format import read_manifest, seal
from megatron.config.parse import parse_call
from tests.data.samples import write_tokenizer
from tests.data.test_tokenizer import added
from tests.refusals import by_last_flag, field_of, leaving_nothing, refusal, refused
from tests.tools.convert import models
from tools.convert_hf import export_model, import_model

CONFIG, SETTINGS, TOKENIZER = "config.json", "tokenizer_config.json", "tokenizer.json"
COMMANDS: Any = {"import": import_model, "export": export_model}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "gpt2": models.write_model(folder / "gpt2", n_layer=1, n_embd=8, n_head=2),
        "bert": models.write_bert(folder / "bert"),
        "llama": models.write_llama(folder / "llama"),
        "classifier": models.write_bert(folder / "classifier", task="SequenceClassification"),
        "post-ln": models.write_bert(folder / "post", "post-ln", "MaskedLM"),
        "pre-ln": models.write_bert(folder / "pre", "pre-ln", "MaskedLM"),
        "parts": models.write_model(folder / "parts", shard_size="20KB"),
    }


Make = Callable[[str], Path]


@pytest.fixture
def make(written: dict[str, Path], tmp_path: Path) -> Make:
    """A folder of transformers with a model of this kind, to be changed."""
    return lambda kind: Path(shutil.copytree(written[kind], tmp_path / "hf"))


convert = leaving_nothing(lambda words: parse_call(COMMANDS, words, {})())


def said(folder: Path) -> str:
    """The message with which the import of the folder ends, which begins with one of its files."""
    words = ["import", "--from", str(folder), "--output", str(folder.with_name("ours"))]
    error = refusal(lambda: convert(words))
    assert field_of(error).startswith(str(folder))
    return str(error)


# An option of config.json, its value, and the key or tensor that is named where it is another one.
OPTIONS: dict[str, list[tuple[Any, ...]]] = {
    "gpt2": [
        ("model_type", "t5"), ("model_type", "llama", "architectures"),
        ("activation_function", "quick_gelu"), ("scale_attn_by_inverse_layer_idx", True),
        ("n_inner", 16, "h.0.mlp.c_fc.weight"), ("quantization_config", {"bits": 4}),
        ("architectures", ["GPT2ForSequenceClassification"]), ("n_embd", "8"),
        ("n_head", 3), ("vocab_size", 256, "261"), ("n_layer", 2, "h.1.attn.c_attn.bias"),
    ],
    "bert": [
        ("architectures", ["BertModel"]), ("type_vocab_size", 3), ("is_decoder", True),
        ("position_embedding_type", "relative_key"), ("classifier_dropout", 0.5, "0.1"),
        ("vocab_size", 90, "93"), ("model_type", "megatron-bert", "architectures"),
    ],
    "llama": [
        ("head_dim", 8), ("mlp_bias", True), ("pretraining_tp", 2),
        ("num_key_value_heads", 5), ("num_key_value_heads", 4, "k_proj.weight"),
        ("tie_word_embeddings", True, "lm_head.weight"), ("rope_scaling", "llama3"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling.rope_type"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ("rope_scaling", {"attention_factor": 2.0}, "attention_factor"),
        ("rope_parameters", {"rope_type": "llama3", **models.FACTORS, "factor": 0.5}),
        ("rope_parameters", {"rope_theta": -1.0}, "rope_theta"),
    ],
    "classifier": [
        ("id2label", {"0": "no", "2": "yes"}), ("problem_type", "regression"),
    ],
    # Without pooler and head of the order of segments.
    "post-ln": [("model_type", "bert", "cls.seq_relationship.bias")],
    "pre-ln": [("model_type", "megatron-bert", "cls.seq_relationship.bias")],
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIONS)
def test_configs(make: Make, kind: str) -> None:
    folder = make(kind)
    content = (folder / CONFIG).read_bytes()
    for option, value, *named in OPTIONS[kind]:
        models.change_json(folder / CONFIG, **{option: value})
        assert (named or [option])[0] in said(folder), (option, value)
        (folder / CONFIG).write_bytes(content)


def test_damaged_files(make: Make) -> None:
    folder = make("gpt2")
    config, weights = folder / CONFIG, folder / "model.safetensors"
    damaged = [(config, b""), (config, b"[]"), (config, b"{"), (weights, weights.read_bytes()[:-1])]
    for file, content in damaged:
        before = file.read_bytes()
        file.write_bytes(content)
        assert said(folder).startswith(str(file))
        file.write_bytes(before)
    weights.rename(folder / "pytorch_model.bin")
    assert "save_pretrained" in said(folder)
    config.unlink()
    assert said(folder).startswith(str(config))


def test_index(make: Make) -> None:
    folder = make("parts")
    index = folder / "model.safetensors.index.json"
    save_file({"a": torch.zeros(1)}, folder / "elsewhere.safetensors")
    complete = models.json_of(index)["weight_map"]
    for place in ("elsewhere.safetensors", "missing.safetensors"):
        listed = complete | {"transformer.ln_f.bias": place}
        models.change_json(index, weight_map=listed)
        said(folder)
    models.change_json(index, weight_map=complete)
    first, *_, last = sorted(folder.glob("model-*.safetensors"))
    stale = {key: tensor + 1 for key, tensor in load_file(first).items()}
    save_file(stale | load_file(last), last)
    assert said(folder).startswith(str(last))
    for content in (b"{", b"{}"):
        index.write_bytes(content)
        assert said(folder).startswith(str(index))


Tensors = dict[str, Tensor]
EMBEDDING = "bert.embeddings.word_embeddings.weight"
NORM, LAYER = "bert.embeddings.LayerNorm", "model.layers.0.self_attn"
POOLER = "bert.pooler.dense.bias"
ONES = torch.ones(7)


# The name in the error, and the tensors that are replaced, added, or removed (None).
WEIGHTS: list[tuple[str, str, Callable[[Tensors], dict[str, Tensor | None]]]] = [
    ("gpt2", "h.0.ln_2.bias", lambda t: {"transformer.h.0.ln_2.bias": None}),
    ("gpt2", "lm_head.weight", lambda t: {"lm_head.weight": t["transformer.wte.weight"] + 1}),
    ("gpt2", "ln_f.weight torch.float16", lambda t: {"transformer.ln_f.weight": ONES.half()}),
    ("gpt2", "torch.float64", lambda t: {key: tensor.double() for key, tensor in t.items()}),
    ("gpt2", "h.0.attn.masked_bias", lambda t: {"h.0.attn.masked_bias": torch.tensor(-1.0)}),
    ("llama", "layers.1.mlp.up_proj", lambda t: {"model.layers.1.mlp.up_proj.weight": None}),
    ("llama", "inv_freq", lambda t: {f"{LAYER}.rotary_emb.inv_freq": ONES}),
    ("bert", "LayerNorm.bias", lambda t: dict.fromkeys([POOLER, f"{NORM}.bias"])),
    ("bert", "LayerNorm.weight", lambda t: {f"{NORM}.gamma": t[f"{NORM}.weight"] + 0}),
    ("bert", "decoder.weight", lambda t: {"cls.predictions.decoder.weight": t[EMBEDDING] + 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "named", "change"), WEIGHTS)
def test_weights(make: Make, kind: str, named: str, change: Any) -> None:
    folder = make(kind)
    models.change_tensors(folder, change(models.weights_of(folder)))
    assert named in said(folder)


SPECIAL = {"id": "<s>", "ids": [0], "tokens": ["<s>"]}
BEGINS = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
TEMPLATE = {"type": "TemplateProcessing", "single": BEGINS, "special_tokens": {"<s>": SPECIAL}}
# A file, and changes to it or, where it has such a part, to the part: each gives other ids.
TOKENIZERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "gpt2": [
        (TOKENIZER, {"normalizer": {"type": "NFC"}}), (TOKENIZER, {"model": {"vocab": {"a": 0}}}),
        (TOKENIZER, {"pre_tokenizer": {"add_prefix_space": True}}),
        (TOKENIZER, {"model": {"merges": [["a", "zz"]]}}), (TOKENIZER, {"model": {"dropout": 0.5}}),
        (TOKENIZER, {"post_processor": TEMPLATE | {"pair": BEGINS}}),
        (TOKENIZER, added(("<new>", 261), special=False)),
        ("added_tokens.json", {"<new>": 261}),
    ],
    "bert": [
        (TOKENIZER, {"normalizer": {"strip_accents": False}}),
        (TOKENIZER, {"normalizer": {"handle_chinese_chars": False}}),
        (TOKENIZER, {"normalizer": {"lowercase": False}}), (SETTINGS, {"do_lower_case": False}),
        (TOKENIZER, {"model": {"max_input_chars_per_word": 101}}),
        (TOKENIZER, {"model": {"vocab": {"a": 0, "b": 2}}}),
        (SETTINGS, {"cls_token": "<s>"}), (SETTINGS, {"cls_token": {"content": "<s>"}}),
        (SETTINGS, {"added_tokens_decoder": {"93": {"content": "<new>"}}}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers(make: Make, kind: str) -> None:
    folder = make(kind)
    for name, changes in TOKENIZERS[kind]:
        file = folder / name
        before = file.read_bytes() if file.exists() else b"{}"
        file.write_bytes(before)
        parts = json.loads(before)
        for part, change in changes.items():
            is_merged = isinstance(change, dict) and isinstance(parts.get(part), dict)
            parts[part] = {**parts[part], **change} if is_merged else change
        models.change_json(file, **parts)
        assert said(folder), (name, changes)
        file.write_bytes(before)


def added_in(parts: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary's token "in" is added, too, and so it is read within every word."""
    (new,) = added(("in", parts["model"]["vocab"]["in"]))["added_tokens"]
    return {"added_tokens": [*parts["added_tokens"], new]}


REPLACE = {"type": "Replace", "pattern": {"String": "zebra"}, "content": "horse"}


@pytest.mark.parametrize(
    ("kind", "named", "change"),
    [
        ("bert", "adds the token 'in'", added_in),
        ("gpt2", "normalizer.type", lambda _: {"normalizer": REPLACE}),
        ("gpt2", "ignore_merges", lambda parts: {
            "model": parts["model"] | {"ignore_merges": True}}),
    ],
)  # fmt: skip
def test_rare_tokenizers(
    make: Make, kind: str, named: str, change: Callable[[Any], dict[str, Any]]
) -> None:
    folder = make(kind)
    models.change_json(folder / TOKENIZER, **change(models.json_of(folder / TOKENIZER)))
    message = said(folder)
    assert named in message
    assert ("HuggingFaceTokenizer" in message) == (kind == "gpt2")


def test_marks_of_bert(make: Make) -> None:
    folder = make("bert")
    models.change_json(folder / TOKENIZER, post_processor=None)
    models.imported(folder)
    models.change_json(folder / SETTINGS, tokenizer_class="PreTrainedTokenizerFast")
    assert "''" in str(refusal(lambda: models.imported(folder, "again")))


def without_tokenizer(folder: Path) -> Path:
    for file in [*folder.glob("*token*"), *folder.glob("vocab*"), *folder.glob("merges*")]:
        file.unlink()
    return folder


@pytest.fixture(scope="module")
def paths(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Those of the folders without a tokenizer and of files of tokenizers."""
    place = tmp_path_factory.mktemp("paths")
    vocabulary, merges = write_tokenizer(place)
    capitals = models.write_vocabulary(place, do_lower_case=False).rename(place / "capitals.txt")
    words, others = models.write_vocabulary(place).read_text("utf-8"), place / "others.txt"
    others.write_text(words.replace("\nthe\n", "\nthey\n"), "utf-8")
    split = Path(shutil.copytree(written["gpt2"], place / "split"))
    models.split_tokenizer(split)
    found = {
        "bare": without_tokenizer(Path(shutil.copytree(written["gpt2"], place / "bare"))),
        "cased": without_tokenizer(models.write_bert(place / "cased", do_lower_case=False)),
        "small": without_tokenizer(models.write_model(place / "small", vocab_size=90)),
    }
    listed = without_tokenizer(Path(shutil.copytree(written["bert"], place / "listed")))
    models.write_vocabulary(listed)
    (place / "file").touch()
    found |= {"split": split, "listed": listed, "here": place}
    found |= {"capitals": capitals, "others": others}
    files = {"vocabulary": vocabulary, "merges": merges}
    return {name: str(path) for name, path in (written | found).items()} | files


# The last flag of each is refused. Names that are none of the hub's are not asked for there, and
# nothing that is there is replaced.
LAST = """
import --from {cased} --vocab-file {capitals} | import --from {bert} --vocab-file {others}
import --from {cased} --vocab-file {capitals} --merge-file m
import --from {bert} --tokenizer-type GPT2BPETokenizer
import --from {gpt2} --vocab-file {vocabulary} --merge-file {merges} --no-tokenizer
import --from {gpt2} --no-tokenizer --tokenizer-type BertWordPieceCase
import --from {here}/file | import --from {here}/nothing | import --from ./nothing
import --from a/b/c | export --from {here}/nothing | export --from {here}/step_00000007
import --from {gpt2} --output {here} | export --from {gpt2} --output {here}
import --from {here}/nothing --output {here}/file/below
"""
FLAGS: list[tuple[str, str | None]] = [
    *by_last_flag(LAST),
    *((f"import --from {each}", each) for each in ("{bare}", "{cased}")),
    ("import --from {bert} --tokenizer-type BertWordPieceCase", "{bert}/tokenizer.json"),
    ("import --from {small} --vocab-file {vocabulary} --merge-file {merges}",
     "{small}/config.json: vocab_size"),
    # These files of a tokenizer are taken.
    *((f"import --from {each}", None) for each in (
        "{split}", "{bare} --vocab-file {vocabulary} --merge-file {merges}", "{listed}",
        "{cased} --vocab-file {capitals} --tokenizer-type BertWordPieceCase",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("words", "field"), FLAGS)
def test_flags(
    paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str,
    field: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    given = shlex.split(words.format(**paths))
    given += [] if "--output" in given else ["--output", str(tmp_path / "new")]
    if field is None:
        convert(given)
    else:
        assert refused(convert, given) == field.format(**paths)


def test_damaged_and_other_checkpoints(make: Make) -> None:
    """A model of NaN is refused, too: its logits equal nothing."""
    folder = make("gpt2")
    options = {"n_inner": 32, "activation_function": "gelu_pytorch_tanh"}  # the same model
    models.change_json(folder / CONFIG, **options)
    step, diverged = models.imported(folder), folder.with_name("diverged")

    def exported(source: Path, lines: int = 2) -> tuple[str, str]:
        words = ["export", "--from", str(source), "--output", str(folder.with_name("back"))]
        error = refusal(lambda: convert(words), lines=lines)
        return field_of(error), str(error)

    models.load_and_save(step, diverged, 1, factor=float("nan"))
    assert exported(diverged)[0] == str(diverged / "step_00000001")
    manifest, sealed = read_manifest(step), (step / "manifest.json").read_bytes()
    norm = manifest["tensors"]["model.final_norm.weight"]
    for named, change in {
        "model.extra": {"model.extra": norm},
        "several dtypes": {"model.final_norm.weight": norm | {"dtype": "bfloat16"}},
    }.items():
        changed = manifest | {"tensors": manifest["tensors"] | change}
        (step / "manifest.json").write_text(json.dumps(seal(changed)))
        field, message = exported(step)
        assert (field, named in message) == (str(step), True)
    (step / "manifest.json").write_bytes(sealed)
    (shard,) = step.glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    field, message = exported(step.parent, lines=9)
    assert (field, shard.name in message) == ("--from", True)


def test_hub(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("gpt2")
    fetch = Mock(return_value=str(folder))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    import_model("someone/gpt2-tiny", folder.parent / "ours")
    patterns = fetch.call_args.kwargs["allow_patterns"]
    fetch.assert_called_once_with("someone/gpt2-tiny", allow_patterns=patterns)
    assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(patterns)
    assert not [pattern for pattern in patterns if "bin" in pattern]


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refusal(lambda: import_model("someone/nothing", tmp_path / "ours"))
    assert field_of(error) == "--from"
