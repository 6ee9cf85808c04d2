"""Llamas as transformers itself writes them, in today's form and in that of older files."""

import contextlib
import io
import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.data.samples import write_tokenizer_json
from tests.tools.convert.models import randomise

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "max_position_embeddings": 16,
}
VOCABULARY = 263  # that of write_tokenizer_json
MARKS = {"bos_token": "[BOT]", "eos_token": "[EOT]", "pad_token": "[PAD]"}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TRAINED = {"original_max_position_embeddings": 8}
SCALED = {"rope_type": "llama3", "rope_theta": 500.0, **FACTORS, **TRAINED}


def write_llama(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "50GB",
    **changes: Any,
) -> Path:
    """A Llama whose every parameter is random; returns its folder.

    changes: to its configuration.
    """
    folder.mkdir()
    config = MARKS | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = AutoTokenizer.from_pretrained(
        write_tokenizer_json(folder.with_name("tokenizer"), config=config)
    )
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    model = LlamaForCausalLM(
        LlamaConfig(**({"vocab_size": VOCABULARY, "rms_norm_eps": 1e-5} | SHAPE | ids | changes))
    )
    randomise(model)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    return folder


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


def make_old(folder: Path, key: str = "rope_type") -> None:
    """Rewrite config.json as transformers wrote it before its version 5; key: of the type."""
    file = folder / "config.json"
    config = json.loads(file.read_bytes())
    rope = config.pop("rope_parameters")
    config["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    del config["head_dim"]
    file.write_text(json.dumps(config))
