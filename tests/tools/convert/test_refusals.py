"""What cannot be converted is refused: the message names the file and what is wrong in it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.data.samples import write_tokenizer
from tests.tools.convert.models import change_json, split_tokenizer, write_model
from tools.convert_hf import export_model, import_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hf", n_layer=1, n_embd=8, n_head=2)


def refuse(folder: Path, message: str, **arguments: Any) -> None:
    """The import is refused, and leaves nothing beside the folder."""
    to = folder.parent / "ours"
    with pytest.raises((ValueError, OSError), match=message):
        import_model(str(folder), to, **arguments)
    assert not [path for path in folder.parent.iterdir() if "ours" in path.name]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "model_type",
            ["gpt2"],
            r'model_type is \["gpt2"\]; "gpt2" or "bert" or "megatron-bert" would',
        ),
        (
            "model_type",
            "llama",
            'model_type is "llama"; "gpt2" or "bert" or "megatron-bert" would work',
        ),
        ("activation_function", "gelu", 'activation_function is "gelu"; .* "gelu_new" or'),
        ("scale_attn_weights", False, "scale_attn_weights is false; .* true would work"),
        ("scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx is true; "),
        ("reorder_and_upcast_attn", True, "reorder_and_upcast_attn is true; "),
        ("add_cross_attention", True, "add_cross_attention is true; .* self-attention alone"),
        ("tie_word_embeddings", False, "tie_word_embeddings is false; .* tied"),
        ("n_inner", 16, "n_inner is 16; .* 4 n_embd: null or 32 would work"),
        ("quantization_config", {"bits": 4}, 'quantization_config is {"bits": 4}; .* null'),
        ("architectures", ["GPT2ForSequenceClassification"], "architectures is .*Classification"),
        ("n_embd", "8", 'n_embd is "8", and should be a whole number'),
        (
            "n_head",
            3,
            "no model of this project: n_embd 8 does not divide by n_head 3; n_embd 9 would",
        ),
        ("layer_norm_epsilon", None, "layer_norm_epsilon is null, and should be a number"),
        ("vocab_size", 256, "vocab_size is 256, but the tokenizer .*tokenizer.json.* has 261 ids"),
        ("vocab_size", None, "vocab_size is null"),
        ("n_layer", 2, "has no tensor h.1.attn.c_attn.bias and 11 more"),
        ("n_positions", 17, r"wpe.weight is \[16, 8\], and \[17, 8\] by config.json"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    folder: Path, option: str, value: Any, message: str
) -> None:
    change_json(folder / "config.json", **{option: value})
    refuse(folder, f"{folder}.*{message}")


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_configuration_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    refuse(folder, "config.json (is not JSON|should be a JSON object)")


def test_values_that_mean_the_same_are_accepted(folder: Path) -> None:
    change_json(folder / "config.json", n_inner=32, activation_function="gelu_pytorch_tanh")
    import_model(str(folder), folder.parent / "ours")


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["transformer.h.0.ln_2.bias"]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["score.weight"] = torch.zeros(2, 8)


def repeat(tensors: dict[str, Tensor]) -> None:
    tensors["wpe.weight"] = tensors["transformer.wpe.weight"].clone()


def untie(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1


def mix(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"].half()


def widen(tensors: dict[str, Tensor]) -> None:
    tensors.update({key: tensor.double() for key, tensor in tensors.items()})


def see_all(tensors: dict[str, Tensor]) -> None:
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)


def mask_little(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1.0)


def mask_beyond(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "has no tensor h.0.ln_2.bias"),
        (add, "has a tensor score.weight that no part"),
        (repeat, "has wpe.weight twice: "),
        (untie, "lm_head.weight is not the word embedding wte.weight"),
        (mix, "is torch.float32 and ln_f.weight torch.float16"),
        (widen, "wte.weight is torch.float64; torch.float32, torch.bfloat16, torch.float16 would"),
        (see_all, "h.0.attn.bias is no causal mask"),
        (mask_little, "h.0.attn.masked_bias is no mask value"),
        (mask_beyond, "has a tensor transformer.h.1.attn.masked_bias that no part"),
    ],
)
def test_weights_that_are_not_the_model_are_refused(
    folder: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refuse(folder, message)


def test_damaged_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refuse(folder, "model.safetensors is damaged")


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, "neither model.safetensors .*save_pretrained.NEW. makes")


@pytest.mark.parametrize("place", ["elsewhere.safetensors", "missing.safetensors"])
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, place: str) -> None:
    folder = write_model(tmp_path / "hf", shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_bytes())
    save_file({"a": torch.zeros(1)}, folder / "elsewhere.safetensors")
    content["weight_map"]["transformer.ln_f.bias"] = place
    index.write_text(json.dumps(content))
    refuse(folder, "index.json and .* disagree|missing.safetensors is not there, but .* lists it")


def change_tokenizer(folder: Path, part: str, **changes: Any) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_bytes())
    content[part] = (content[part] or {}) | changes
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("normalizer", {"type": "NFC"}, 'normalizer.type is "NFC"; in GPT-2\'s'),
        ("pre_tokenizer", {"add_prefix_space": True}, "pre_tokenizer.add_prefix_space is true"),
        ("pre_tokenizer", {"type": "Whitespace"}, 'pre_tokenizer.type is "Whitespace"'),
        ("pre_tokenizer", {"use_regex": False}, "pre_tokenizer.use_regex is false"),
        ("model", {"type": "Unigram"}, 'model.type is "Unigram"; .* "BPE"'),
        ("model", {"byte_fallback": True}, "model.byte_fallback is true"),
        ("model", {"vocab": {"a": 0}}, "model.vocab should be one JSON object of tokens with"),
        ("model", {"merges": [["a", "zz"]]}, "model.merges, line 2: 'a zz' does not merge"),
        ("post_processor", {"special_tokens": {"<s>": {}}}, "post_processor.special_tokens is"),
    ],
)
def test_another_kind_of_tokenizer_is_refused(
    folder: Path, part: str, changes: dict[str, Any], message: str
) -> None:
    change_tokenizer(folder, part, **changes)
    refuse(folder, f"{folder / 'tokenizer.json'}.*{message}")


def test_added_tokens_are_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_bytes())
    content["added_tokens"].append({"id": 261, "content": "<pad>"})
    file.write_text(json.dumps(content))
    refuse(folder, "tokenizer.json adds the token '<pad>'")
    content["added_tokens"].pop()
    file.write_text(json.dumps(content))
    (folder / "added_tokens.json").write_text('{"<mask>": 261}')
    refuse(folder, "added_tokens.json adds the token '<mask>'")


def test_a_tokenizer_that_adds_to_texts_is_refused(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", add_bos_token=True)
    refuse(folder, "tokenizer_config.json: add_bos_token is true")


def test_two_files_are_a_tokenizer_as_well(folder: Path) -> None:
    split_tokenizer(folder)
    import_model(str(folder), folder.parent / "ours")


def test_a_folder_without_a_tokenizer_needs_the_flags(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refuse(folder, "has no tokenizer, neither .*; --vocab-file and --merge-file would work")
    vocab_file, merge_file = write_tokenizer(folder.parent)
    import_model(str(folder), folder.parent / "ours", vocab_file, merge_file)


def test_two_tokenizers_that_differ_are_refused(folder: Path) -> None:
    split_tokenizer(folder)
    vocab_file, merge_file = write_tokenizer(folder.parent)
    merges = Path(merge_file)
    merges.write_text(merges.read_text("utf-8").replace("i n\n", ""), encoding="utf-8")
    message = "--vocab-file .* and .*vocab.json .*are not the same tokenizer"
    refuse(folder, message, vocab_file=vocab_file, merge_file=merge_file)


def test_what_is_there_is_never_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for convert in (import_model, export_model):
        with pytest.raises(FileExistsError, match="--to .*there is there already"):
            convert(str(folder), tmp_path / "there")


def test_no_checkpoint_to_export_is_refused(tmp_path: Path) -> None:
    for name in ("nothing", "step_00000007"):
        with pytest.raises(ValueError, match=f"--from .*{name}: no checkpoint there"):
            export_model(str(tmp_path / name), tmp_path / "back")


def test_a_damaged_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    import_model(str(folder), tmp_path / "ours")
    shard = tmp_path / "ours" / "step_00000000" / "shard_00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        ValueError, match="--from: no whole checkpoint(?s:.*)shard_00000.* is damaged"
    ):
        export_model(str(tmp_path / "ours"), tmp_path / "back")


def test_a_name_that_is_no_folder_is_fetched_from_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    import_model("someone/gpt2-tiny", folder.parent / "ours")
    ((name, patterns),) = asked
    assert name == "someone/gpt2-tiny"
    assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(patterns)
    assert not [pattern for pattern in patterns if "bin" in pattern]


def test_whatever_the_hub_raises_is_told_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: str, allow_patterns: list[str]) -> str:
        raise RuntimeError("the proxy is asleep\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    message = (
        r"--from gpt2 is no folder here, .* \(the proxy is asleep\); a folder with config.json"
    )
    with pytest.raises(OSError, match=message):
        import_model("gpt2", tmp_path / "ours")


def test_a_path_is_not_asked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    (tmp_path / "file").touch()
    for name in (tmp_path / "file", tmp_path / "nothing", "./nothing", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=f"--from {name} is no folder; one"):
            import_model(str(name), tmp_path / "ours")


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "convert_hf.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environ},
    )


def test_without_a_network_the_program_says_what_would_work(tmp_path: Path) -> None:
    words = ["import", "--from", "someone/nothing", "--to", str(tmp_path / "ours")]
    done = run(*words, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "error: --from someone/nothing is no folder here" in done.stderr
    assert "config.json and model.safetensors works without a network" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_program_converts_both_ways_and_prints_the_figures(folder: Path) -> None:
    ours, back = folder.parent / "ours", folder.parent / "back"
    for words in (
        ["import", "--from", folder, "--to", ours],
        ["export", "--from", ours, "--to", back],
    ):
        done = run(*map(str, words))
        assert done.returncode == 0, done.stderr
        assert "the logits of next tokens differ by" in done.stdout
        assert done.stderr == ""


def test_a_configuration_is_refused_without_torch_or_transformers(folder: Path) -> None:
    change_json(folder / "config.json", scale_attn_by_inverse_layer_idx=True)
    program = (
        "import sys\nfrom pathlib import Path\nfrom tools.convert_hf import import_model\n"
        "try:\n    import_model(sys.argv[1], Path(sys.argv[1]).parent / 'ours')\n"
        "except ValueError:\n    sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(folder)]
    assert subprocess.run(command, cwd=ROOT, timeout=300).returncode == 0
