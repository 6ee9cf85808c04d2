"""Llamas as transformers itself writes them, in today's form and in that of older files."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
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


def make_old(folder: Path, key: str = "rope_type") -> None:
    """Rewrite config.json as transformers wrote it before its version 5; key: of the type."""
    file = folder / "config.json"
    config = json.loads(file.read_bytes())
    rope = config.pop("rope_parameters")
    config["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    del config["head_dim"]
    file.write_text(json.dumps(config))
