"""GPT-2's byte-level BPE in a folder (vocab.json and merges.txt, or tokenizer.json), or any other
tokenizer.json in its place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.data.tokenizer import (
    END_OF_DOCUMENT,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
)
from tools.convert.tokenizing import CONFIG, Tokenizing

KIND = GPT2BPETokenizer.kind
VOCABULARY, MERGES = GPT2BPETokenizer.names.values()

PARTS = (
    ("normalizer", "type", (None,)),
    ("pre_tokenizer", "type", ("ByteLevel",)),
    ("pre_tokenizer", "add_prefix_space", (False,)),
    ("pre_tokenizer", "use_regex", (True,)),
    ("model", "type", ("BPE",)),
    ("model", "dropout", (None, 0.0)),
    ("model", "continuing_subword_prefix", (None, "")),
    ("model", "end_of_word_suffix", (None, "")),
    ("model", "byte_fallback", (False,)),
    ("model", "ignore_merges", (False,)),
    ("decoder", "type", ("ByteLevel",)),
    ("post_processor", "type", (None, "ByteLevel", "TemplateProcessing")),
    ("post_processor", "special_tokens", ({},)),
)
OPTIONS = tuple(
    (option, (False, None)) for option in ("add_prefix_space", "add_bos_token", "add_eos_token")
)


def _write_model(folder: Path, model: Mapping[str, Any]) -> None:
    if "merges" not in model:
        raise ValueError("its model has no merges")
    # A merge is "a b", or in newer files ["a", "b"].
    merges = (each if isinstance(each, str) else " ".join(each) for each in model["merges"])
    _write_files(folder, model["vocab"], merges)


def _write_files(folder: Path, vocabulary: Mapping[str, int], merges: Iterable[str]) -> None:
    """Write both files. merges.txt gets a version line, as some readers skip the first line."""
    (folder / VOCABULARY).write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *merges, ""]
    (folder / MERGES).write_text("\n".join(lines), encoding="utf-8", newline="\n")


def _write(folder: Path, tokenizer: Tokenizer, positions: int) -> None:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        _write_described(folder, tokenizer, positions)
        return
    import transformers

    vocabulary = json.loads(tokenizer.files[VOCABULARY])
    lines = tokenizer.files[MERGES].decode().splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    pairs = [tuple(line.split(" ")) for line in merges]
    theirs = transformers.GPT2Tokenizer(vocab=vocabulary, merges=pairs, model_max_length=positions)
    theirs.save_pretrained(folder)
    _write_files(folder, vocabulary, merges)


def _write_described(folder: Path, tokenizer: HuggingFaceTokenizer, positions: int) -> None:
    """Write the tokenizer's own files. The configuration gets the special tokens that were detected
    and the class that loads any tokenizer.json unchanged."""
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    config = json.loads(tokenizer.files.get(CONFIG, b"{}"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    marks = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eod,
        "pad_token": tokenizer.pad_id,
    }
    config |= {
        name: tokenizer.library.id_to_token(number)
        for name, number in marks.items()
        if number is not None
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


BYTE_PAIRS = Tokenizing(
    whose="GPT-2's",
    kinds=(KIND,),
    takes_any_json=True,
    marks=(END_OF_DOCUMENT,),
    parts=PARTS,
    options=OPTIONS,
    kind_of=lambda config: KIND,
    kind_of_json=lambda content: KIND,
    write_files=_write_model,
    write=_write,
    around=lambda tokenizer: ([], []),
)
# For models whose tokenizer is any tokenizer.json, unless --tokenizer-type says that it is GPT-2's.
ANY_JSON = replace(BYTE_PAIRS, kind_of=lambda config: HuggingFaceTokenizer.kind)
