"""BERTs and their tokenizers as transformers itself writes them."""

import contextlib
import io
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.data.samples import write_wordpiece
from tests.tools.convert.models import randomise

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
NAMES = {"post-ln": "Bert", "pre-ln": "MegatronBert"}


def write_bert(
    folder: Path,
    order: str = "post-ln",
    task: str = "PreTraining",
    *,
    dtype: torch.dtype = torch.float32,
    vocab_file: Path | None = None,
    do_lower_case: bool = True,
    **changes: Any,
) -> Path:
    """A BERT whose every parameter, biases and norms too, is random; returns its folder.

    vocab_file: of its tokenizer, else that of write_wordpiece. changes: to its configuration.
    """
    folder.mkdir()
    tokenizer = make_tokenizer(vocab_file or write_vocabulary(folder, do_lower_case), do_lower_case)
    (folder / "vocab.txt").unlink(missing_ok=True)
    name = NAMES[order]
    config = getattr(transformers, f"{name}Config")
    numbers = {"vocab_size": len(tokenizer), "layer_norm_eps": 1e-5}
    model = getattr(transformers, f"{name}For{task}")(config(**(SHAPE | numbers | changes)))
    randomise(model)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_vocabulary(folder: Path, do_lower_case: bool = True) -> Path:
    """A vocab.txt; of the other casing it has the capitals too."""
    return Path(write_wordpiece(folder, *("" if do_lower_case else string.ascii_uppercase)))


def make_tokenizer(vocab_file: Path, do_lower_case: bool) -> Any:
    tokens = vocab_file.read_bytes().decode().removesuffix("\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.BertTokenizer(vocab=vocabulary, do_lower_case=do_lower_case)


def change_tensors(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Replace, add or remove (None) tensors of the folder's model."""
    tensors: dict[str, Tensor | None] = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
