"""Models and tokenizers as transformers itself writes them."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import load_checkpoint, model_slices, verify
from megatron.checkpoint.save import save_checkpoint
from megatron.data.tokenizer import file_names
from megatron.models.build import build_model
from megatron.models.registry import config_of
from megatron.train.state import DTYPES
from tests.data.samples import write_tokenizer
from tests.tiny import mesh_of_ranks

SHAPE = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16}
VOCABULARY = 261  # that of write_tokenizer


def write_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    files: tuple[Path, Path] | None = None,
    shard_size: str = "50GB",
    **changes: Any,
) -> Path:
    """A GPT-2 whose every parameter, biases and norms too, is random; returns its folder.

    files: of its tokenizer, else those of write_tokenizer. changes: to its configuration.
    """
    folder.mkdir()
    vocabulary, merges = files or map(Path, write_tokenizer(folder.parent))
    tokenizer = GPT2Tokenizer(vocab=str(vocabulary), merges=str(merges))
    end = tokenizer.eos_token_id
    numbers = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end}
    model = GPT2LMHeadModel(GPT2Config(**(SHAPE | numbers | changes)))
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


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_weights(one: Path, other: Path) -> None:
    """Two folders have the same tensors by name, shape and dtype, and the same bits in each."""
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert tensor.view(torch.uint8).equal(theirs[name].view(torch.uint8)), name


def load_and_save(checkpoint: Path, to: Path, tensor_size: int) -> None:
    """What a run at this layout would do with the weights; makes to/step_00000001."""
    mesh, manifest = mesh_of_ranks(tensor_size), read_manifest(checkpoint)
    dtype = DTYPES[manifest["precision"]]
    section, size = config_of(manifest), manifest["vocab_size"]
    model = build_model(section, mesh, size, seed=None, dtype=dtype)
    load_checkpoint(verify(checkpoint, mesh), model_slices(model))
    names = file_names(manifest["config"]["data"]["tokenizer_type"])
    files = {name: (checkpoint / name).read_bytes() for name in names}
    own = ("files", "tensors", "checksum", "format")
    facts = {key: value for key, value in manifest.items() if key not in own}
    save_checkpoint(to, 1, model_slices(model), facts, mesh, files)


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


def split_tokenizer(folder: Path) -> None:
    """Replace tokenizer.json by vocab.json and merges.txt, as older versions wrote it."""
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer.json").unlink()
