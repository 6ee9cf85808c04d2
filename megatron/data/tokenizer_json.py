"""HuggingFace's tokenizers: any that a tokenizer.json describes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from megatron.data.tokenizer_base import END_OF_DOCUMENT, PAD, SEP, Tokenizer, read_given

# Marks that end or pad a document, if no file beside a tokenizer.json names one.
END_MARKS = (END_OF_DOCUMENT, "</s>", "[EOT]", SEP, "<eos>", "<|end_of_text|>")
PAD_MARKS = (PAD, "<pad>")


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes.

    Text that spells a special token is encoded as the ordinary characters it is made of; no special
    token is added to a text; truncation and padding of the file are off. Other added tokens are
    found in texts. eod is the eos_token of the files beside tokenizer.json, else the first of
    END_MARKS among its added tokens, else in its vocabulary. pad_id is found likewise from
    pad_token and PAD_MARKS, or is None; bos_id is that of their bos_token, or None.
    """

    kind = "HuggingFaceTokenizer"
    names: ClassVar[Mapping[str, str]] = {"vocab_file": "tokenizer.json"}
    beside: ClassVar = ("tokenizer_config.json", "special_tokens_map.json")
    """Files that name the marks; the first that does counts. `files` has them if they exist."""
    marks: tuple[str, ...]
    """The special tokens."""

    def __init__(self, vocab_file: str | None) -> None:
        """vocab_file: a tokenizer.json, or a model folder that holds one.

        Raises ValueError or OSError, naming the flag, for a file that is no tokenizer.json, has no
        end mark, or would not give the same ids each time.
        """
        path = _find_json(vocab_file, self.names["vocab_file"])
        content, given = read_given("--vocab-file", path), f"--vocab-file {path}"
        folder = Path(str(path)).parent
        self.files = {self.names["vocab_file"]: content} | {
            name: (folder / name).read_bytes() for name in self.beside if (folder / name).is_file()
        }
        description = _parse_object(content, given)
        model = description.get("model")
        if isinstance(model, dict) and model.get("dropout"):
            raise ValueError(
                f"{given}: model.dropout is {model['dropout']}, which gives a text other ids each "
                "time; null would work"
            )
        library = _build_described(description, given)
        vocabulary: dict[str, int] = library.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = {token.content: token for token in library.get_added_tokens_decoder().values()}
        named = {name: _parse_object(self.files[name], str(folder / name))
                 for name in self.beside if name in self.files}  # fmt: skip
        end = _find_mark("eos_token", END_MARKS, named, added, vocabulary)
        if end is None:
            raise ValueError(
                f"{given} has no end mark; one of {' '.join(END_MARKS)} in its vocabulary, or a "
                f"{self.beside[0]} beside it with an eos_token, would work"
            )
        if end in added and not added[end].special:  # else it would be found in texts
            for token in description["added_tokens"]:
                token["special"] = token["special"] or token["content"] == end
            library = _build_described(description, given)
        library.encode_special_tokens = True
        self.library, self.eod = library, vocabulary[end]
        if self.eod in self.encode(f"{end}a{end} {end}"):
            raise ValueError(
                f"{given}: text that spells {end} becomes the end mark itself; a byte-level BPE "
                "such as tools/train_tokenizer.py makes would work"
            )
        pad = _find_mark("pad_token", PAD_MARKS, named, added, vocabulary)
        self.pad_id = None if pad is None else vocabulary[pad]
        bos = _find_mark("bos_token", (), named, added, vocabulary)
        self.bos_id = None if bos is None else vocabulary[bos]
        self.marks = tuple(name for name in added if name == end or added[name].special)
        self.fingerprint = _fingerprint(library, self.eod)


def _find_json(vocab_file: str | None, name: str) -> str | None:
    """The tokenizer.json of the flag, which may name its folder; ValueError for one without it."""
    if vocab_file is None or not (folder := Path(vocab_file)).is_dir():
        return vocab_file
    if (folder / name).is_file():
        return str(folder / name)
    cure = "that transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes"
    files = folder / "vocab.json", folder / "merges.txt"
    if all(file.is_file() for file in files):
        flags = f"--vocab-file {files[0]} --merge-file {files[1]}"
        cure += f", or --tokenizer-type GPT2BPETokenizer {flags},"
    raise ValueError(f"--vocab-file {folder} has no {name}; one {cure} would work")


def _parse_object(content: bytes, given: str) -> dict[str, Any]:
    """given: flag or file, for the ValueError if the content is not a JSON object."""
    try:
        found: Any = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{given} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{given} should be a JSON object")
    return found


def _build_described(description: Mapping[str, Any], given: str) -> Any:
    """The tokenizers.Tokenizer of a tokenizer.json, which neither truncates nor pads."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises no other class
        raise ValueError(
            f"{given} is no tokenizer.json ({error}); one that transformers' save_pretrained or "
            "tools/train_tokenizer.py makes would work"
        ) from error
    library.no_truncation()
    library.no_padding()
    return library


def _find_mark(
    key: str,
    usual: Sequence[str],
    named: Mapping[str, Mapping[str, Any]],
    added: Mapping[str, Any],
    vocabulary: Mapping[str, int],
) -> str | None:
    """The token that files beside a tokenizer.json call `key`, else a usual one, if there is any.

    named: {name of a file: its content}. Raises ValueError for a token without an id.
    """
    for name, content in named.items():
        mark = content.get(key)
        if isinstance(mark, dict):  # with its treatment of blanks, as older versions wrote it
            mark = mark.get("content")
        if mark is not None:
            if str(mark) not in vocabulary:
                raise ValueError(
                    f"--vocab-file: the {key} of {name} is {mark!r}, which has no id in the "
                    "tokenizer.json beside it; transformers' save_pretrained makes files that agree"
                )
            return str(mark)
    return next((mark for known in (added, vocabulary) for mark in usual if mark in known), None)


def _fingerprint(library: Any, eod: int) -> str:
    """SHA-256 of normalizer, pre-tokenizer, model, added tokens and end mark.

    The library writes them in one form, for any form of the file. Null and false values are left
    out, so that options of its later versions change nothing.
    """

    def without_empty(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: without_empty(each)
                for key, each in value.items()
                if each is not None and each is not False
            }
        return [without_empty(each) for each in value] if isinstance(value, list) else value

    description = json.loads(library.to_str())
    parts = [description[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
    content = json.dumps([*map(without_empty, parts), eod], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
