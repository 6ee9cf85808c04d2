"""BERT to a checkpoint and back, in both orders of norm and residual, and with heads of tasks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForPreTraining, AutoTokenizer

from megatron.checkpoint.format import read_manifest
from megatron.config.model import BertConfig, FinetunedConfig
from megatron.data.tokenizer import read_tokenizer
from megatron.models.bert import RESIDUAL_ORDERS
from megatron.models.registry import config_of
from tests.dist import Pool
from tests.tools.convert.berts import NAMES, change_tensors, make_tokenizer, write_bert
from tests.tools.convert.models import (
    assert_same_weights,
    change_json,
    load_and_save,
    weights_of,
)
from tools.convert.bert import PRETRAINED
from tools.convert.compare import compare_logits
from tools.convert.weights import read_weights, resolve
from tools.convert_hf import export_model, import_model

FAMILIES = {family.fields["residual_order"]: family for family in PRETRAINED}
both_orders = pytest.mark.parametrize("order", NAMES)


def same_json(one: Path, other: Path, *names: str) -> None:
    for name in names:
        contents = [json.loads((folder / name).read_bytes()) for folder in (one, other)]
        assert contents[0] == contents[1]


@both_orders
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_round_trip_keeps_every_bit(tmp_path: Path, order: str, dtype: torch.dtype) -> None:
    settings = {"hidden_dropout_prob": 0.2, "initializer_range": 0.05, "layer_norm_eps": 1e-12}
    folder = write_bert(tmp_path / "hf", order, dtype=dtype, **settings)
    import_model(str(folder), tmp_path / "ours")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    same_json(folder, tmp_path / "back", "config.json", "tokenizer.json", "tokenizer_config.json")


TASKS = {
    "SequenceClassification": ("classifier", ("no", "perhaps", "yes")),
    "MultipleChoice": ("choice", ()),
    "QuestionAnswering": ("span", ()),
}


@both_orders
@pytest.mark.parametrize("task", TASKS)
def test_heads_of_tasks_make_the_round_trip(tmp_path: Path, order: str, task: str) -> None:
    head, labels = TASKS[task]
    changes: dict[str, Any] = {}
    if labels:
        changes["id2label"] = dict(enumerate(labels))
        changes["label2id"] = {label: number for number, label in enumerate(labels)}
    folder = write_bert(tmp_path / "hf", order, task, **changes)
    import_model(str(folder), tmp_path / "ours")
    section = config_of(read_manifest(tmp_path / "ours" / "step_00000000"))
    assert isinstance(section, FinetunedConfig)
    assert (section.head, section.labels, section.residual_order) == (head, labels, order)
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    same_json(folder, tmp_path / "back", "config.json", "tokenizer.json")


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_a_checkpoint_of_any_layout_is_exported(
    gloo: Pool, tmp_path: Path, tensor_size: int
) -> None:
    folder = write_bert(tmp_path / "hf", "pre-ln")
    import_model(str(folder), tmp_path / "ours")
    step = tmp_path / "ours" / "step_00000000"
    gloo.run(tensor_size, load_and_save, step, tmp_path / "cut", tensor_size)
    assert len(list((tmp_path / "cut" / "step_00000001").glob("shard_*"))) == tensor_size
    export_model(str(tmp_path / "cut"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")


@both_orders
def test_the_configuration_becomes_the_section_and_says_the_epsilon(
    tmp_path: Path, order: str
) -> None:
    changes = {"attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-12}
    folder = write_bert(tmp_path / "hf", order, **changes)
    import_model(str(folder), tmp_path / "ours")
    manifest = read_manifest(tmp_path / "ours" / "step_00000000")
    assert manifest["kind"] == "bert"
    assert manifest["config"]["data"]["tokenizer_type"] == "BertWordPieceLowerCase"
    assert config_of(manifest) == BertConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=16,
        layernorm_epsilon=1e-12,
        attention_dropout=0.0,
        residual_order=order,  # type: ignore[arg-type]
    )
    change_json(folder / "config.json", layer_norm_eps=1e-5)
    import_model(str(folder), tmp_path / "again")
    export_model(str(tmp_path / "again"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_bytes())["layer_norm_eps"] == 1e-5


@both_orders
def test_the_import_says_which_program_goes_on_from_it(
    tmp_path: Path, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_bert(tmp_path / "hf", order, do_lower_case=False, layer_norm_eps=1e-12)
    import_model(str(folder), tmp_path / "ours")
    said = capsys.readouterr().out
    assert f"python pretrain.py --model bert --finetune --load {tmp_path / 'ours'} " in said
    assert f"--task MNLI, QQP, RACE or SQUAD --load {tmp_path / 'ours'}" in said


@both_orders
def test_names_and_buffers_of_old_files_are_read(tmp_path: Path, order: str) -> None:
    folder = write_bert(tmp_path / "hf", order)
    import_model(str(folder), tmp_path / "ours")
    tensors = weights_of(folder)
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert "cls.predictions.transform.LayerNorm.gamma" in old
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    old["bert.embeddings.position_ids"] = torch.arange(16)[None]
    change_tensors(folder, {**dict.fromkeys(tensors), **old})
    change_json(folder / "config.json", architectures=[f"{NAMES[order]}ForMaskedLM"])
    import_model(str(folder), tmp_path / "again")
    assert_same_weights(*(tmp_path / name / "step_00000000" for name in ("ours", "again")))


@both_orders
def test_the_table_makes_every_tensor_of_theirs_in_its_shape(tmp_path: Path, order: str) -> None:
    folder = write_bert(tmp_path / "hf", order)
    theirs = {key: tensor.shape for key, tensor in weights_of(folder).items()}
    section = BertConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=16,
        residual_order=order,  # type: ignore[arg-type]
    )
    family = FAMILIES[order]
    made = {
        family.key_of(name): shape
        for entry in resolve(family, section, len(weights_of(folder)["cls.predictions.bias"]))
        for name, shape in zip(entry.theirs, entry.their_shapes(), strict=True)
    }
    assert made == theirs


def swap(*order: int) -> Any:
    return lambda tensor: tensor[list(order)]


@both_orders
@pytest.mark.parametrize(
    ("name", "change", "head"),
    [
        ("layers.1.attention.qkv.weight", swap(1, 0, 2), "masked tokens"),
        ("layers.1.attention.qkv.bias", swap(0, 2, 1), "masked tokens"),
        (
            "layers.0.attention.qkv.bias",
            lambda bias: bias * torch.tensor([[0.0], [1.0], [1.0]]),
            "masked tokens",
        ),
        ("layers.0.mlp.up.bias", torch.zeros_like, "masked tokens"),
        ("layers.1.mlp_norm.bias", torch.zeros_like, "masked tokens"),
        ("encoder.token_type_embedding.weight", swap(1, 0), "masked tokens"),
        ("mlm.head.bias", torch.zeros_like, "masked tokens"),
        ("mlm.norm.bias", torch.zeros_like, "masked tokens"),
        ("pooler.dense.bias", torch.zeros_like, "the order of segments"),
        ("sop.weight", swap(1, 0), "the order of segments"),
    ],
)
def test_weights_in_another_place_are_above_the_tolerance(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    name: str,
    change: Any,
    head: str,
) -> None:
    folder = write_bert(tmp_path / "hf", order)

    def read(*arguments: Any) -> dict[str, Tensor]:
        weights = read_weights(*arguments)
        (key,) = (key for key in weights if key.endswith(name))
        return weights | {key: change(weights[key])}

    monkeypatch.setattr("tools.convert.weights.read_weights", read)
    with pytest.raises(ValueError, match=f"are not the same model: .*{head} differ by"):
        import_model(str(folder), tmp_path / "ours")
    assert not [path for path in tmp_path.iterdir() if "ours" in path.name]


@both_orders
@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "gelu_new"}, {"layer_norm_eps": 1.1e-5}, {"num_attention_heads": 2}],
)
def test_another_form_of_the_model_is_above_the_tolerance(
    tmp_path: Path, order: str, change: dict[str, Any]
) -> None:
    folder = write_bert(tmp_path / "hf", order)
    import_model(str(folder), tmp_path / "ours")
    step = tmp_path / "ours" / "step_00000000"
    exact = compare_logits(step, folder, FAMILIES[order]).heads
    assert [head.name for head in exact] == ["masked tokens", "the order of segments"]
    assert all(head.difference <= 1e-13 * head.largest for head in exact)
    change_json(folder / "config.json", **change)
    with pytest.raises(ValueError, match="are not the same model: the logits of masked tokens"):
        compare_logits(step, folder, FAMILIES[order])


@both_orders
def test_the_other_order_of_norm_and_residual_is_above_the_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    (other,) = NAMES.keys() - {order}
    monkeypatch.setitem(RESIDUAL_ORDERS, order, RESIDUAL_ORDERS[other])
    folder = write_bert(tmp_path / "hf", order)
    with pytest.raises(ValueError, match="are not the same model"):
        import_model(str(folder), tmp_path / "ours")


def test_attention_to_padding_is_above_the_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.models.bert import BertEncoder

    layers = BertEncoder.layers
    monkeypatch.setattr(
        BertEncoder,
        "layers",
        lambda self, x, batch, *numbers: layers(
            self, x, replace(batch, is_real=torch.ones_like(batch.is_real)), *numbers
        ),
    )
    with pytest.raises(ValueError, match="are not the same model"):
        import_model(str(write_bert(tmp_path / "hf")), tmp_path / "ours")


@pytest.mark.parametrize("lower", [True, False])
def test_both_casings_are_kept_and_the_marks_stand_around_the_ids(
    tmp_path: Path, lower: bool
) -> None:
    folder = write_bert(tmp_path / "hf", do_lower_case=lower)
    import_model(str(folder), tmp_path / "ours")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    kind = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
    ours = read_tokenizer(kind, tmp_path / "ours" / "step_00000000")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = theirs.encode("The THING, the inn.")
    assert ids == [theirs.cls_token_id, *ours.encode("The THING, the inn."), theirs.sep_token_id]
    assert theirs.model_max_length == AutoTokenizer.from_pretrained(folder).model_max_length
    (tmp_path / "back" / "tokenizer.json").unlink()  # as older versions read it
    assert AutoTokenizer.from_pretrained(tmp_path / "back").encode("The THING, the inn.") == ids


def test_the_real_vocabulary_is_kept_and_gives_the_same_ids(
    tmp_path: Path, test_data: Path
) -> None:
    file = test_data / "bert" / "vocab.txt"
    folder = write_bert(
        tmp_path / "hf", vocab_file=file, dtype=torch.bfloat16, hidden_size=8, intermediate_size=32
    )
    import_model(str(folder), tmp_path / "ours")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    assert weights_of(tmp_path / "back")["cls.predictions.bias"].shape == (30522,)
    assert (tmp_path / "back" / "vocab.txt").read_bytes() == file.read_bytes()
    ours = read_tokenizer("BertWordPieceLowerCase", tmp_path / "ours" / "step_00000000")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    lines = (test_data / "wikitext103" / "wiki.valid.tokens").read_text("utf-8").split("\n")[:500]
    for line in lines:
        ids = theirs.encode(line, verbose=False)
        assert ids == [ours.cls, *ours.encode(line), ours.sep]


@torch.no_grad()
def test_an_export_is_loaded_by_transformers_whole(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "hf", "pre-ln")
    import_model(str(folder), tmp_path / "ours")
    export_model(str(tmp_path / "ours"), tmp_path / "back")
    found, told = AutoModelForPreTraining.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert type(found).__name__ == "MegatronBertForPreTraining"
    assert not any(told.values())
    text = make_tokenizer(tmp_path / "back" / "vocab.txt", True)("the thing", return_tensors="pt")
    expected = AutoModelForPreTraining.from_pretrained(folder).eval()(**text)
    assert found.eval()(**text).prediction_logits.equal(expected.prediction_logits)
