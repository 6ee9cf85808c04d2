"""The tokenizer of a folder in HuggingFace's format, or of files given by flags.

It is accepted if it gives the same ids as the folder's does in transformers for PROBES, and the
folder has no part that changes the ids of rare texts alone: an added token, a rule of PARTS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.data.tokenizer import (
    END_OF_DOCUMENT,
    LONGEST_WORD,
    MARKS,
    BertTokenizer,
    BertWordPieceCase,
    BertWordPieceLowerCase,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    file_flags,
    file_names,
    read_tokenizer,
)
from megatron.errors import UsageError
from tools.convert.folder import read_object
from tools.corpus.tokenize.encoders import PROBES

JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
VOCABULARY, MERGES = GPT2BPETokenizer.names.values()
(WORD_PIECES,) = BertTokenizer.names.values()

# Requirements on a tokenizer.json that PROBES cannot check: a part, an option of it, and the values
# that it may have; None stands for an absent one.
BERT_PARTS = (
    ("normalizer", "type", ("BertNormalizer",)),
    ("pre_tokenizer", "type", ("BertPreTokenizer",)),
)
PARTS: Mapping[str, Sequence[tuple[str, str, tuple[Any, ...]]]] = {
    GPT2BPETokenizer.kind: (
        ("normalizer", "type", (None,)),
        ("pre_tokenizer", "type", ("ByteLevel",)),
        ("model", "dropout", (None, 0.0)),
        ("model", "ignore_merges", (None, False)),
    ),
    BertWordPieceLowerCase.kind: BERT_PARTS,
    BertWordPieceCase.kind: BERT_PARTS,
}


@dataclass(frozen=True, kw_only=True)
class NoTokenizer:
    """Stands in for a missing tokenizer: has its kind, but no ids for any text.

    Its empty fingerprint matches that of every tokenizer with at most the model's number of ids.
    """

    kind: str
    fingerprint: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


def find_tokenizer(
    folder: Path,
    kinds: Sequence[str],
    vocab_size: int,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_type: str | None = None,
    no_tokenizer: bool = False,
) -> Tokenizer | NoTokenizer:
    """The tokenizer of the folder or of the flags; if there are both, they must be the same. With
    --no-tokenizer the folder's is ignored.

    kinds: see Family.tokenizers. vocab_size: rows of the model's word embedding. Raises ValueError
    or OSError, naming the file or the flag, if the tokenizer is missing, of another kind, or has
    more ids.
    """
    has_flags = vocab_file is not None or merge_file is not None
    kind = tokenizer_type or kinds[0]
    if kind not in kinds:
        raise UsageError("--tokenizer-type", kind, " or ".join(kinds))
    if no_tokenizer:
        if has_flags:
            allowed = "left out beside --vocab-file and --merge-file"
            raise UsageError("--no-tokenizer", None, allowed, works=("--no-no-tokenizer",))
        return NoTokenizer(kind=kind)
    config, described = (
        read_object(folder / name) if (folder / name).is_file() else {} for name in (CONFIG, JSON)
    )
    if tokenizer_type is None and kind == BertWordPieceLowerCase.kind:
        is_lower_case = (described.get("normalizer") or {}).get("lowercase", True)
        if not config.get("do_lower_case", is_lower_case):
            kind = BertWordPieceCase.kind
    found: dict[str, Tokenizer] = {}
    if has_flags:
        found[f"--vocab-file {vocab_file}"] = build_tokenizer(kind, vocab_file, merge_file)
    if all((folder / name).is_file() for name in file_names(kind)):
        found[str(folder / file_names(kind)[0])] = read_tokenizer(kind, folder)
    if described and kind != HuggingFaceTokenizer.kind:
        found[str(folder / JSON)] = _read_json(folder / JSON, described, kind, _cure(kinds))
    if not found:
        files = dict.fromkeys([" and ".join(file_names(kind)), JSON])
        raise FileNotFoundError(
            f"{folder} has no tokenizer, which is {' or '.join(files)}; {file_flags(kind)} would "
            "work, or --no-tokenizer for the weights alone"
        )
    (name, tokenizer), *others = found.items()
    for other, another in others:
        if another.fingerprint != tokenizer.fingerprint:
            raise ValueError(f"{name} and {other} are not the same tokenizer; one of them is wrong")
    if tokenizer.vocab_size > vocab_size:
        allowed = f"at least the {tokenizer.vocab_size} ids of the tokenizer ({name})"
        raise UsageError(f"{folder / 'config.json'}: vocab_size", vocab_size, allowed)
    return tokenizer


def _cure(kinds: Sequence[str]) -> str:
    """The end of a message that refuses the folder's tokenizer."""
    flag = f"--tokenizer-type {HuggingFaceTokenizer.kind}"
    return f"; {flag} takes any other" if HuggingFaceTokenizer.kind in kinds else ""


def _read_json(file: Path, content: Mapping[str, Any], kind: str, cure: str) -> Tokenizer:
    """The tokenizer of this kind that has the vocabulary of a tokenizer.json. Its other parts are
    only checked against PARTS: `compare_ids` finds out whether they mean the same. Raises
    ValueError, naming the file, if there is none."""
    for part, option, allowed in PARTS[kind]:
        options = content.get(part)
        value = options.get(option) if isinstance(options, dict) else options
        if value not in allowed:
            known = " or ".join(map(json.dumps, allowed))
            raise ValueError(
                f"{file}: {part}.{option} is {json.dumps(value)}, and in a {kind} {known}{cure}"
            )
    try:
        with TemporaryDirectory() as place:
            added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
            vocabulary = {**content["model"]["vocab"], **added}
            if kind == GPT2BPETokenizer.kind:
                # A merge is "a b", or in newer files ["a", "b"].
                merges = content["model"]["merges"]
                lines = (each if isinstance(each, str) else " ".join(each) for each in merges)
                _write_byte_pairs(Path(place), vocabulary, lines)
            else:
                _write_word_pieces(Path(place), vocabulary)
            return read_tokenizer(kind, Path(place))
    except (KeyError, TypeError, ValueError) as error:
        # The errors of read_tokenizer name files that the user has never seen.
        raise ValueError(f"{file} does not have the vocabulary of a {kind}{cure}") from error


def _write_byte_pairs(folder: Path, vocabulary: Mapping[str, int], merges: Iterable[str]) -> None:
    """Write both files. merges.txt gets a version line, as some readers skip the first line."""
    (folder / VOCABULARY).write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *merges, ""]
    (folder / MERGES).write_text("\n".join(lines), encoding="utf-8", newline="\n")


def _write_word_pieces(folder: Path, vocabulary: Mapping[str, int]) -> None:
    """Raises ValueError if the ids have gaps: that of a token is the number of its line."""
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError("the ids are not 0, 1, 2, ...")
    text = "".join(f"{token}\n" for token in tokens)
    (folder / WORD_PIECES).write_text(text, encoding="utf-8", newline="\n")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, positions: int) -> None:
    """Write the files that AutoTokenizer and its older versions load. positions: the number of
    tokens above which transformers warns."""
    import transformers

    if isinstance(tokenizer, HuggingFaceTokenizer):
        for name, content in tokenizer.files.items():
            (folder / name).write_bytes(content)
        config = json.loads(tokenizer.files.get(CONFIG, b"{}"))
        # This class loads any tokenizer.json unchanged.
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
        marks = {"bos": tokenizer.bos_id, "eos": tokenizer.eod, "pad": tokenizer.pad_id}
        for name, number in marks.items():
            if number is not None:
                config[f"{name}_token"] = tokenizer.library.id_to_token(number)
        (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    elif isinstance(tokenizer, BertTokenizer):
        text = tokenizer.files[WORD_PIECES].decode().replace("\r\n", "\n").removesuffix("\n")
        vocabulary = {token: number for number, token in enumerate(text.split("\n"))}
        transformers.BertTokenizer(
            vocab=vocabulary, do_lower_case=tokenizer.is_lower_case, model_max_length=positions
        ).save_pretrained(folder)
        _write_word_pieces(folder, vocabulary)
    else:
        vocabulary = json.loads(tokenizer.files[VOCABULARY])
        lines = tokenizer.files[MERGES].decode().splitlines()
        merges = [line for line in lines if line and not line.startswith("#version")]
        pairs = [tuple(line.split(" ")) for line in merges]
        transformers.GPT2Tokenizer(
            vocab=vocabulary, merges=pairs, model_max_length=positions
        ).save_pretrained(folder)
        _write_byte_pairs(folder, vocabulary, merges)


def compare_ids(tokenizer: Tokenizer, folder: Path, kinds: Sequence[str]) -> None:
    """Raise ValueError if the folder's tokenizer, if it has any, gives other ids than ours for some
    text.

    Texts that spell a mark are left out: transformers reads the mark, this project its characters.
    Marks that a BERT's tokenizer.json puts before and after a text are left out, too, unless the
    class of transformers takes them from there. Other added tokens change the ids of any text that
    spells them, within words, too: they are an error where ours has no such tokens.
    """
    import tokenizers
    import transformers

    if not any((folder / name).is_file() for name in (VOCABULARY, WORD_PIECES, JSON)):
        return

    def marked(ids: list[int]) -> list[int]:
        """The ids of a text as transformers gives them, with those of marks around them."""
        is_bert = isinstance(tokenizer, BertTokenizer)
        return [tokenizer.cls, *ids, tokenizer.sep] if is_bert else ids

    try:
        auto = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        readers: list[Callable[[str], list[int]]]
        if isinstance(tokenizer, HuggingFaceTokenizer):
            marks, added = set(tokenizer.marks), set[str]()
            readers = [lambda text: auto.encode(text, verbose=False, add_special_tokens=False)]
        else:
            marks = set(MARKS if isinstance(tokenizer, BertTokenizer) else (END_OF_DOCUMENT,))
            added = {token.content for token in auto.added_tokens_decoder.values()}
            readers = [lambda text: auto.encode(text, verbose=False)]
            if (folder / JSON).is_file():  # of which a class of transformers may ignore parts
                library = tokenizers.Tokenizer.from_file(str(folder / JSON))
                library.no_truncation()
                library.no_padding()
                added |= {each.content for each in library.get_added_tokens_decoder().values()}
                has_marks = not isinstance(tokenizer, BertTokenizer)
                readers.append(
                    lambda text: marked(library.encode(text, add_special_tokens=has_marks).ids)
                )
    except Exception as error:  # tokenizers raises no other class
        raise ValueError(f"{folder}: its tokenizer cannot be read: {error}") from error
    if others := sorted(added - marks):
        raise ValueError(
            f"{folder}: its tokenizer adds the token {others[0]!r}; a {tokenizer.kind} has "
            f"{' '.join(sorted(marks))} alone{_cure(kinds)}"
        )
    # WordPiece makes a word above its limit [UNK].
    texts = [*PROBES, "a" * LONGEST_WORD, "a" * (LONGEST_WORD + 1)]
    texts = [text for text in texts if not any(mark in text for mark in marks)]
    if type(auto).__name__ == "LlamaTokenizer":
        # In version 5 it loses a leading blank of a text; tokenizer.json and version 4 keep it.
        texts = [text for text in texts if not text.startswith(" ")]
    for text in texts:
        ids = marked(tokenizer.encode(text))
        for read in readers:
            if read(text) != ids:
                raise ValueError(
                    f"{folder}: its tokenizer gives other ids than ours for {text[:40]!r}"
                    f"{_cure(kinds)}"
                )
