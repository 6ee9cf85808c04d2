"""BERT's WordPiece in a folder: vocab.txt, or tokenizer.json; a config beside it has the casing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.data.tokenizer import (
    CONTINUATION,
    LONGEST_WORD,
    MARKS,
    UNKNOWN,
    BertTokenizer,
    BertWordPieceCase,
    BertWordPieceLowerCase,
    Tokenizer,
)
from tools.convert.tokenizing import JSON, Tokenizing

KINDS = {kind.is_lower_case: kind.kind for kind in (BertWordPieceLowerCase, BertWordPieceCase)}
(VOCABULARY,) = BertTokenizer.names.values()
NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")

PARTS = (
    ("normalizer", "type", ("BertNormalizer",)),
    ("normalizer", "clean_text", (True,)),
    ("normalizer", "handle_chinese_chars", (True,)),
    ("normalizer", "strip_accents", (None,)),  # that is, as `lowercase`
    ("normalizer", "lowercase", (True, False)),
    ("pre_tokenizer", "type", ("BertPreTokenizer",)),
    ("model", "type", ("WordPiece",)),
    ("model", "unk_token", (UNKNOWN,)),
    ("model", "continuing_subword_prefix", (CONTINUATION,)),
    ("model", "max_input_chars_per_word", (LONGEST_WORD,)),
)
OPTIONS = (
    ("do_lower_case", (True, False)),
    ("do_basic_tokenize", (True,)),
    ("never_split", (None, [])),
    ("tokenize_chinese_chars", (True,)),
    ("strip_accents", (None,)),
    *((name, (mark,)) for name, mark in zip(NAMES, MARKS, strict=True)),
)


def _kind_of(config: Mapping[str, Any]) -> str:
    return KINDS[config.get("do_lower_case", True)]


def _kind_of_json(content: Mapping[str, Any]) -> str:
    return KINDS[(content.get("normalizer") or {}).get("lowercase", True)]


def _write_model(folder: Path, model: Mapping[str, Any]) -> None:
    vocabulary = model["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError("the ids of model.vocab are not 0, 1, 2, ... without gaps")
    text = "".join(f"{token}\n" for token in tokens)
    (folder / VOCABULARY).write_text(text, encoding="utf-8", newline="\n")


def _write(folder: Path, tokenizer: Tokenizer, positions: int) -> None:
    import transformers

    lines = tokenizer.files[VOCABULARY].decode().replace("\r\n", "\n").removesuffix("\n")
    vocabulary = {token: number for number, token in enumerate(lines.split("\n"))}
    theirs = transformers.BertTokenizer(
        vocab=vocabulary,
        do_lower_case=tokenizer.kind == BertWordPieceLowerCase.kind,
        model_max_length=positions,
    )
    theirs.save_pretrained(folder)
    _write_model(folder, {"vocab": vocabulary})


def _cured(said: str, file: str) -> str:
    for is_lower_case, kind in KINDS.items():
        value = json.dumps(is_lower_case)
        cure = f"do_lower_case {value} in {file}"
        if file == JSON:
            cure = f"normalizer.lowercase {value}"
        said = said.replace(f"--tokenizer-type {kind}", cure)
    return said


WORD_PIECES = Tokenizing(
    whose="BERT's",
    kinds=tuple(KINDS.values()),
    marks=MARKS,
    parts=PARTS,
    options=OPTIONS,
    kind_of=_kind_of,
    kind_of_json=_kind_of_json,
    write_files=_write_model,
    write=_write,
    cured=_cured,
    around=lambda tokenizer: ([tokenizer.cls], [tokenizer.sep]),
)
