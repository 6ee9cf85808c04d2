"""A BERT that cannot be converted is refused: the message names the file and what is wrong."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools.convert.berts import change_tensors, write_bert, write_vocabulary
from tests.tools.convert.models import change_json
from tests.tools.convert.test_refusals import ROOT, change_tokenizer, refuse
from tools.convert_hf import export_model, import_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bert(tmp_path / "hf")


CLASSIFIER = "SequenceClassification"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("architectures", ["BertModel"], r"architectures is .* a BERT with both heads of its pret"),
        ("architectures", ["BertLMHeadModel"], r'\["BertForPreTraining"\] or .* or null would wo'),
        ("hidden_act", "gelu_new", 'hidden_act is "gelu_new"; .* the exact GeLU: "gelu" would'),
        ("intermediate_size", 64, "intermediate_size is 64; .* 4 hidden_size: 128 would work"),
        ("position_embedding_type", "relative_key", 'position_embedding_type is "relative_key"'),
        ("type_vocab_size", 3, "type_vocab_size is 3; .* two segments: 2 would work"),
        ("is_decoder", True, "is_decoder is true; .* sees both ways: false would work"),
        ("add_cross_attention", True, "add_cross_attention is true; .* self-attention alone"),
        ("tie_word_embeddings", False, "tie_word_embeddings is false; .* tied"),
        ("classifier_dropout", 0.5, "classifier_dropout is 0.5; .* null or 0.1 would work"),
        ("quantization_config", {"bits": 4}, 'quantization_config is {"bits": 4}; .* null'),
        ("num_attention_heads", 5, "hidden_size 32 does not divide by num_attention_heads 5"),
        ("layer_norm_eps", "tiny", 'layer_norm_eps is "tiny", and should be a number'),
        ("vocab_size", 90, "vocab_size is 90, but the tokenizer .*tokenizer.json.* has 93 ids"),
        ("num_hidden_layers", 3, "has no tensor encoder.layer.2.attention.output.LayerNorm.bias"),
        ("max_position_embeddings", 17, r"position_embeddings.weight is \[16, 32\], and \[17, 32"),
        ("model_type", "megatron-bert", r'architectures is \["BertForPreTraining"\]; .*"MegatronB'),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    folder: Path, option: str, value: Any, message: str
) -> None:
    change_json(folder / "config.json", **{option: value})
    refuse(folder, f"{folder}.*{message}")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("id2label", {"0": "no", "2": "yes"}, "id2label is .* and should be"),
        (
            "id2label",
            {"0": "a", "1": "b", "2": "c"},
            r"classifier.weight is \[2, 32\], and \[3, 32",
        ),
        ("problem_type", "regression", 'problem_type is "regression"; .* one class'),
    ],
)
def test_a_classifier_of_another_kind_is_refused(
    tmp_path: Path, option: str, value: Any, message: str
) -> None:
    folder = write_bert(tmp_path / "hf", task=CLASSIFIER)
    change_json(folder / "config.json", **{option: value})
    refuse(folder, message)


@pytest.mark.parametrize("order", ["post-ln", "pre-ln"])
def test_a_model_without_pooler_and_order_head_is_refused_with_the_reason(
    tmp_path: Path, order: str
) -> None:
    folder = write_bert(tmp_path / "hf", order, "MaskedLM")
    reason = "for .*BertForMaskedLM saves neither the pooler nor the head of sentence order"
    name = "MegatronBertForPreTraining" if order == "pre-ln" else "BertForPreTraining"
    refuse(
        folder,
        f"has no tensor cls.seq_relationship.bias and 3 more, {reason}; a folder of transformers' "
        f"{name}.save_pretrained would work",
    )


Change = Callable[[dict[str, Tensor]], dict[str, Tensor | None]]
EMBEDDING, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
NORM = "bert.embeddings.LayerNorm"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"bert.pooler.dense.bias": None, NORM + ".bias": None}, "LayerNorm.bias and 1"),
        (
            lambda t: {"classifier.weight": torch.zeros(2, 32)},
            "has a tensor classifier.weight that",
        ),
        (
            lambda t: {NORM + ".gamma": t[NORM + ".weight"] + 0},
            "has embeddings.LayerNorm.weight tw",
        ),
        (
            lambda t: {"cls.predictions.decoder.weight": t[EMBEDDING] + 1},
            "decoder.weight is not embeddings.word_embeddings.weight; the head of a BERT here is t",
        ),
        (
            lambda t: {"cls.predictions.decoder.bias": t[BIAS] + 1},
            "decoder.bias is not cls.predictions.bias",
        ),
        (
            lambda t: {"bert.embeddings.position_ids": torch.arange(1, 17)[None]},
            "embeddings.position_ids does not count up from 0",
        ),
        (
            lambda t: {BIAS: t[BIAS].half()},
            "is torch.float32 and cls.predictions.bias torch.float16",
        ),
        (
            lambda t: {"bert.encoder.layer.0.attention.self.key.bias": torch.zeros(16)},
            r"self.key.bias is \[16\], and \[32\] by config.json",
        ),
    ],
)
def test_weights_that_are_not_the_model_are_refused(
    folder: Path, change: Change, message: str
) -> None:
    change_tensors(folder, change(load_file(folder / "model.safetensors")))
    refuse(folder, message)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("normalizer", {"type": "NFC"}, 'normalizer.type is "NFC"; .* "BertNormalizer"'),
        ("normalizer", {"strip_accents": False}, "normalizer.strip_accents is false"),
        ("normalizer", {"handle_chinese_chars": False}, "normalizer.handle_chinese_chars is false"),
        (
            "normalizer",
            {"lowercase": False},
            "upper-case ones, .*; normalizer.lowercase true would",
        ),
        ("pre_tokenizer", {"type": "Whitespace"}, 'pre_tokenizer.type is "Whitespace"'),
        ("model", {"type": "BPE"}, 'model.type is "BPE"; in BERT\'s tokenizer it is "WordPiece"'),
        ("model", {"max_input_chars_per_word": 50}, "model.max_input_chars_per_word is 50"),
        ("model", {"vocab": {"a": 0, "b": 2}}, "ids of model.vocab are not 0, 1, 2, "),
    ],
)
def test_another_kind_of_tokenizer_is_refused(
    folder: Path, part: str, changes: dict[str, Any], message: str
) -> None:
    change_tokenizer(folder, part, **changes)
    refuse(folder, f"{folder / 'tokenizer.json'}.*{message}")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("strip_accents", False, "strip_accents is false; in BERT's tokenizer it is null"),
        ("cls_token", "<s>", r'cls_token is "<s>"; in BERT\'s tokenizer it is "\[CLS\]"'),
        ("cls_token", {"content": "<s>"}, 'cls_token is "<s>"'),
        ("never_split", ["a"], r'never_split is \["a"\]'),
        (
            "added_tokens_decoder",
            {"93": {"content": "<new>"}},
            r"adds the token '<new>'; BERT's tokenizer has \[PAD\] \[UNK\]",
        ),
    ],
)
def test_a_tokenizer_of_another_configuration_is_refused(
    folder: Path, option: str, value: Any, message: str
) -> None:
    change_json(folder / "tokenizer_config.json", **{option: value})
    refuse(folder, f"tokenizer_config.json.* {message}")


def test_a_tokenizer_that_leaves_out_the_marks_is_refused(folder: Path) -> None:
    change_tokenizer(folder, "post_processor", single=[{"Sequence": {"id": "A", "type_id": 0}}])
    change_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    refuse(folder, "its tokenizer gives other ids than ours for ''")


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def test_a_vocab_txt_is_a_tokenizer_as_well_and_its_casing_is_told_beside_it(folder: Path) -> None:
    remove_tokenizer(folder)
    write_vocabulary(folder)
    import_model(str(folder), folder.parent / "ours")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    with pytest.raises(ValueError, match="upper-case .* do_lower_case true in tokenizer_config.js"):
        import_model(str(folder), folder.parent / "again")


def test_a_folder_without_a_tokenizer_needs_the_flags(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "hf", do_lower_case=False)
    remove_tokenizer(folder)
    file = str(write_vocabulary(tmp_path, do_lower_case=False))
    refuse(
        folder, "has no tokenizer, neither vocab.txt nor tokenizer.json; --vocab-file would work"
    )
    refuse(folder, "--tokenizer-type BertWordPieceCase would work", vocab_file=file)
    refuse(folder, "--merge-file m is no part of", vocab_file=file, merge_file="m")
    refuse(
        folder,
        "--tokenizer-type GPT2BPETokenizer is not .* BertWordPieceLowerCase or BertWordPieceCase w",
        vocab_file=file,
        tokenizer_type="GPT2BPETokenizer",
    )
    import_model(str(folder), tmp_path / "ours", file, tokenizer_type="BertWordPieceCase")


def test_a_flag_that_contradicts_the_folder_is_refused(folder: Path) -> None:
    refuse(
        folder,
        "--tokenizer-type BertWordPieceCase: must be that of .*tokenizer_config.json",
        tokenizer_type="BertWordPieceCase",
    )


def test_two_tokenizers_that_differ_are_refused(folder: Path) -> None:
    file = write_vocabulary(folder.parent)
    file.write_text(file.read_text("utf-8").replace("\nthe\n", "\nthey\n"), encoding="utf-8")
    message = "--vocab-file .*vocab.txt and .*tokenizer.json are not the same tokenizer"
    refuse(folder, message, vocab_file=str(file))


def test_an_export_above_the_tolerance_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_model(str(folder), folder.parent / "ours")
    monkeypatch.setattr("tools.convert.compare.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="masked tokens differ .* the order of segments differ"):
        export_model(str(folder.parent / "ours"), folder.parent / "back")
    assert not [path for path in folder.parent.iterdir() if "back" in path.name]


def test_a_configuration_is_refused_without_torch_or_transformers(folder: Path) -> None:
    change_json(folder / "config.json", is_decoder=True)
    program = (
        "import sys\nfrom pathlib import Path\nfrom tools.convert_hf import import_model\n"
        "try:\n    import_model(sys.argv[1], Path(sys.argv[1]).parent / 'ours')\n"
        "except ValueError:\n    sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(folder)]
    assert subprocess.run(command, cwd=ROOT, timeout=300).returncode == 0
