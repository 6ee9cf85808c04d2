"""Models and tokenizers as transformers itself writes them, and their way here and back."""

import contextlib
import io
import json
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import model_slices, verify
from megatron.checkpoint.save import save_checkpoint
from megatron.data.tokenizer import file_names
from megatron.train.evaluate import load_model
from megatron.train.state import DTYPES
from tests.data.samples import write_tokenizer, write_tokenizer_json, write_wordpiece
from tests.tiny import mesh_of_ranks
from tools.convert_hf import export_model, import_model

GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16}
SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 16}
BERT: dict[str, Any] = {
    **SIZES, "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 4,
    "layer_norm_eps": 1e-5,
}  # fmt: skip
ORDERS = {"post-ln": "Bert", "pre-ln": "MegatronBert"}
LLAMA: dict[str, Any] = {
    **SIZES, "hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 12,
    "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "vocab_size": 263,  # of write_tokenizer_json
}  # fmt: skip
MARKS = {"bos_token": "[BOT]", "eos_token": "[EOT]", "pad_token": "[PAD]"}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TRAINED = {"original_max_position_embeddings": 8}
SCALED = {"rope_type": "llama3", "rope_theta": 500.0, **FACTORS, **TRAINED}
STEP = "step_00000000"  # of an import


def write_model(folder: Path, **changes: Any) -> Path:
    """A GPT-2 whose every parameter, biases and norms too, is random; returns its folder. changes:
    to its configuration; its dtype and shard_size, too."""
    vocabulary, merges = write_tokenizer(folder.parent)
    tokenizer = transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)
    end = tokenizer.eos_token_id
    numbers = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end}
    return _write(folder, "GPT2", "LMHeadModel", tokenizer, **(GPT2 | numbers | changes))


def write_bert(
    folder: Path, order: str = "post-ln", task: str = "PreTraining", *, do_lower_case: bool = True,
    **changes: Any,
) -> Path:  # fmt: skip
    """A BERT of this order of norm and residual and with the head of this task."""
    tokenizer = make_tokenizer(write_vocabulary(folder.parent, do_lower_case), do_lower_case)
    changes = {"vocab_size": len(tokenizer)} | BERT | changes
    return _write(folder, ORDERS[order], f"For{task}", tokenizer, **changes)


def write_llama(folder: Path, **changes: Any) -> Path:
    config = MARKS | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        write_tokenizer_json(folder.with_name(f"{folder.name}_tokenizer"), config=config)
    )
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    return _write(folder, "Llama", "ForCausalLM", tokenizer, **(LLAMA | ids | changes))


WRITERS: dict[str, Callable[..., Path]] = {
    "gpt2": write_model,
    "bert": write_bert,
    "llama": write_llama,
}


def _write(
    folder: Path, family: str, head: str, tokenizer: Any, *, dtype: torch.dtype = torch.float32,
    shard_size: str = "50GB", **settings: Any,
) -> Path:  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}{head}")(config)
    randomise(model)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.3 + (parameter.mean() > 0.5))  # gains are about one


def write_vocabulary(folder: Path, do_lower_case: bool = True) -> Path:
    """A vocab.txt; of the other casing it has the capitals too."""
    return Path(write_wordpiece(folder, *("" if do_lower_case else string.ascii_uppercase)))


def make_tokenizer(vocab_file: Path, do_lower_case: bool) -> Any:
    tokens = vocab_file.read_bytes().decode().removesuffix("\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.BertTokenizer(vocab=vocabulary, do_lower_case=do_lower_case)


def write_sentencepiece(folder: Path, vocab_size: int) -> None:
    """Replace the folder's tokenizer by one of the form of Llama 1 and 2: blanks that belong to
    words, bytes for what it lacks, a mark before each text, and the class of transformers."""
    marks = ["<unk>", "<s>", "</s>"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("i", "n"), ("\u2581", "\u2581")]
    tokens = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *string.ascii_letters]
    vocabulary = {token: number for number, token in enumerate([*tokens, *map("".join, merges)])}
    assert len(vocabulary) == vocab_size
    library = Tokenizer(BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))
    library.normalizer = Sequence([Prepend("\u2581"), Replace(" ", "\u2581")])
    library.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens(marks)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))


def split_tokenizer(folder: Path) -> None:
    """Replace tokenizer.json by vocab.json and merges.txt, as older versions wrote it."""
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer.json").unlink()


def json_of(file: Path) -> Any:
    return json.loads(file.read_bytes())


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json_of(file) | changes))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def change_tensors(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Replace, add or remove (None) tensors of the folder's model."""
    kept = {name: tensor for name, tensor in weights_of(folder).items() if name not in changes}
    kept |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def assert_same_weights(one: Path, other: Path) -> None:
    """Two folders have the same tensors by name, shape and dtype, and the same bits in each."""
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert tensor.view(torch.uint8).equal(theirs[name].view(torch.uint8)), name


def imported(folder: Path, to: str = "ours", **flags: Any) -> Path:
    """The checkpoint of a folder, made beside it; the import compares the logits of both."""
    import_model(str(folder), folder.with_name(to), **flags)
    return folder.with_name(to) / STEP


def exported(checkpoint: Path, folder: Path, **flags: Any) -> Path:
    """Its export, beside this folder, and with the same bits; it compares the logits, too."""
    export_model(str(checkpoint), folder.with_name("back"), **flags)
    assert_same_weights(folder, folder.with_name("back"))
    return folder.with_name("back")


def load_and_save(checkpoint: Path, to: Path, tensor_size: int, factor: float = 1.0) -> None:
    """Saves the weights times `factor`, as a run at this layout saves them, to
    to/step_00000001."""
    mesh, manifest = mesh_of_ranks(tensor_size), read_manifest(checkpoint)
    model = load_model(verify(checkpoint, mesh), mesh, DTYPES[manifest["precision"]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= factor
    names = file_names(manifest["config"]["data"]["tokenizer_type"])
    files = {name: (checkpoint / name).read_bytes() for name in names}
    own = ("files", "tensors", "checksum", "format")
    facts = {key: value for key, value in manifest.items() if key not in own}
    save_checkpoint(to, 1, model_slices(model), facts, mesh, files)
