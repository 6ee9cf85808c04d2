"""The tokenizers of --tokenizer-type: GPT-2's byte-pair encoding, BERT's WordPiece, and any that a
tokenizer.json describes."""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.errors import UsageError

VOCABULARY, TYPE = "--vocab-file", "--tokenizer-type"
END_OF_DOCUMENT = "<|endoftext|>"
PAD, UNKNOWN, CLS, SEP, MASK = MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Marks that end or pad a document, if no file beside a tokenizer.json names one.
END_MARKS = (END_OF_DOCUMENT, "</s>", "[EOT]", SEP, "<eos>", "<|end_of_text|>")
PAD_MARKS = (PAD, "<pad>")
CONTINUATION = "##"
LONGEST_WORD = 100  # characters; a longer one is [UNK]
# Largest share with capitals, of a lower-case vocabulary's tokens with letters: none in BERT's own,
# "<S>" and "<T>" in its Chinese one; 31 % in one of 30,000 trained on cased text.
CASED = 0.02

EncodedTexts = tuple[NDArray[np.uint32], NDArray[np.int32]]
"""(the ids of all texts one after another, how many of them each text has)"""


class Tokenizer:
    """Converts text to ids and back, with a tokenizers.Tokenizer.

    Text that spells a special token, such as the end mark, is encoded as the ordinary characters it
    is made of. __init__ raises ValueError or OSError, naming the flag, for a file that is not as it
    should be.
    """

    kind: str
    """Its value of --tokenizer-type."""
    names: ClassVar[Mapping[str, str]]
    """Name of each file in a tokenizer's folder: {parameter: name}."""
    vocab_size: int
    """Number of ids, the end mark's included; every id is below it."""
    eod: int
    """Id of the mark that ends a document; no text is encoded as it."""
    bos_id: int | None = None
    """Id of the mark that begins a document, for other programs: here no text starts with it. None
    if the tokenizer names none."""
    pad_id: int | None = None
    """Id of the mark that pads a sample; None if the tokenizer has none."""
    more_ends: tuple[int, ...] = ()
    """Other ids that end a generated text, by the files beside the model's weights."""
    fingerprint: str
    """SHA-256, in hex, of all that decides the ids: if equal, so are the ids of every text."""
    files: Mapping[str, bytes]
    """{name: content} of the files it was made of, from which read_tokenizer makes it again."""
    library: Any
    """A tokenizers.Tokenizer."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Every id that ends a generated text, eod first."""
        return (self.eod, *self.more_ends)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_arrays(self, texts: Sequence[str]) -> EncodedTexts:
        return encode_arrays(self.library, texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with marks spelt out."""
        return str(self.library.decode(list(ids), skip_special_tokens=False))

    def decode_after(self, ids: Sequence[int]) -> str:
        """The text of ids that follow other ids. Decoded alone, they would lack the blank that many
        tokenizers remove from the start of a text."""
        before = self.encode("a")
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def token_id(self, text: str) -> int:
        """The id of the token spelt `text`; ValueError, naming similar ones, if there is none.

        A byte-level token is spelt in the characters that stand for its bytes.
        """
        token_id: int | None = self.library.token_to_id(text)
        if token_id is None:
            near = difflib.get_close_matches(text, self.library.get_vocab(), cutoff=0.5)
            cure = f"; {' or '.join(map(repr, near))} would work" if near else ""
            raise ValueError(f"the vocabulary has no token {text!r}{cure}")
        return token_id


def encode_arrays(library: Any, texts: Sequence[str]) -> EncodedTexts:
    """library: a tokenizers.Tokenizer."""
    encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
    ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
    sizes = np.array([len(each) for each in ids], np.int32)
    return np.concatenate(ids or [np.empty(0, np.uint32)]), sizes


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level byte-pair encoding."""

    kind = "GPT2BPETokenizer"
    names: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}

    def __init__(self, vocab_file: str | None, merge_file: str | None) -> None:
        import tokenizers

        vocab_content = _read(VOCABULARY, vocab_file)
        allowed = "a vocab.json, a JSON object of tokens with the ids 0, 1, 2, ..., or with "
        allowed += "{} HuggingFaceTokenizer a tokenizer.json"
        vocabulary: dict[str, int] = _parse_object(vocab_content, vocab_file, allowed, TYPE)
        ids = list(vocabulary.values())
        if any(type(each) is not int for each in ids) or set(ids) != set(range(len(ids))):
            raise UsageError(VOCABULARY, vocab_file, allowed, TYPE)
        missing = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        if missing or END_OF_DOCUMENT not in vocabulary:
            allowed = f"one with {END_OF_DOCUMENT} and the 256 bytes, as GPT-2's own vocab.json is"
            raise UsageError(VOCABULARY, vocab_file, allowed)
        merge_content, merges = _read("--merge-file", merge_file), []
        text = _decode(merge_content, "--merge-file", merge_file, "UTF-8 text")
        text = text.replace("\r", "\n")
        for number, line in enumerate(text.split("\n"), start=1):
            if not line or line.startswith("#version"):
                continue
            left, _, right = line.partition(" ")
            if not {left, right, left + right} <= vocabulary.keys():
                allowed = f"of the same tokenizer as {{}}: line {number}, {{}}, has other tokens"
                raise UsageError("--merge-file", merge_file, allowed, VOCABULARY, repr(line))
            merges.append((left, right))
        self.files = dict(zip(self.names.values(), (vocab_content, merge_content), strict=True))
        self.vocab_size = len(vocabulary)
        self.eod = vocabulary[END_OF_DOCUMENT]
        # A hash of the content: the formatting of the files does not count.
        content = json.dumps([sorted(vocabulary, key=vocabulary.__getitem__), merges])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        self.library = bpe


class BertTokenizer(Tokenizer):
    """BERT's WordPiece. Text without any character of a word, such as "\\u200b", becomes no
    token."""

    names: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.txt"}
    is_lower_case: ClassVar[bool]
    """Whether text is lower-cased, and its accents removed, before it is encoded."""
    is_continuation: NDArray[np.bool_]
    """[vocabulary]: whether a piece continues the word of the piece before it."""

    def __init__(self, vocab_file: str | None) -> None:
        content = _read(VOCABULARY, vocab_file)
        text = _decode(content, VOCABULARY, vocab_file, "UTF-8 text such as BERT's own vocab.txt")
        tokens = text.removesuffix("\n").split("\n")
        if missing := [mark for mark in MARKS if mark not in tokens]:
            allowed = "a vocab.txt of BERT or of tools/train_tokenizer.py: this lacks the lines "
            raise UsageError(VOCABULARY, vocab_file, f"{allowed}{' '.join(missing)}")
        first: dict[str, int] = {}
        for number, token in enumerate(tokens, start=1):
            if not token:
                allowed = f"a token on every line; line {number} is empty"
                raise UsageError(VOCABULARY, vocab_file, allowed)
            if first.setdefault(token, number) != number:
                allowed = f"of different tokens; {token!r} is in lines {first[token]} and {number}"
                raise UsageError(VOCABULARY, vocab_file, allowed)
        ordinary = [token for token in tokens if token not in MARKS]
        letters = sum(token.lower() != token.upper() for token in ordinary)
        capitals = sum(token.lower() != token for token in ordinary)
        if letters and (capitals <= CASED * letters) != self.is_lower_case:
            other = BertWordPieceCase if self.is_lower_case else BertWordPieceLowerCase
            allowed = f"{'without' if self.is_lower_case else 'with'} capitals, or read with "
            allowed += f"{{}} {other.kind} where data is made: {capitals} of {letters} tokens with "
            allowed += "letters have capitals"
            raise UsageError(VOCABULARY, vocab_file, allowed, TYPE)
        self.library = build_wordpiece(tokens, is_lower_case=self.is_lower_case)
        self.files = {self.names["vocab_file"]: content}
        self.vocab_size = len(tokens)
        numbers = map(tokens.index, (PAD, UNKNOWN, CLS, SEP, MASK))
        self.pad, self.unknown, self.cls, self.sep, self.mask = numbers
        self.eod, self.pad_id = self.sep, self.pad
        self.fingerprint = hashlib.sha256(json.dumps([self.kind, tokens]).encode()).hexdigest()
        self.is_continuation = np.array([token.startswith(CONTINUATION) for token in tokens])

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, start and end of each in the text, in characters)."""
        encoding = self.library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets


class BertWordPieceLowerCase(BertTokenizer):
    kind = "BertWordPieceLowerCase"
    is_lower_case = True


class BertWordPieceCase(BertTokenizer):
    kind = "BertWordPieceCase"
    is_lower_case = False


def build_wordpiece(tokens: Sequence[str], *, is_lower_case: bool) -> Any:
    """A tokenizers.Tokenizer, as transformers makes it; ids are indices of `tokens`."""
    import tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD
        )
    )
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=is_lower_case)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece(prefix=CONTINUATION)
    return library


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes.

    No special token is added to a text; truncation and padding of the file are off. Added tokens
    that are not special are found in texts. eod is the eos_token of the files beside
    tokenizer.json, else the first of END_MARKS among its added tokens, else in its vocabulary.
    pad_id is found likewise from pad_token and PAD_MARKS, or is None; bos_id is that of their
    bos_token, or None.
    """

    kind = "HuggingFaceTokenizer"
    names: ClassVar[Mapping[str, str]] = {"vocab_file": "tokenizer.json"}
    beside: ClassVar = ("tokenizer_config.json", "special_tokens_map.json")
    """Files that name the marks; the first that does counts. `files` has them if they exist."""
    marks: tuple[str, ...]
    """The special tokens."""

    def __init__(self, vocab_file: str | None) -> None:
        """vocab_file: a tokenizer.json, or a model folder that holds one. A file that would not
        give the same ids each time, or has no end mark, is refused, too."""
        name = self.names["vocab_file"]
        if vocab_file is not None and Path(vocab_file).is_dir():
            vocab_file = _find_in_folder(Path(vocab_file), name)
        content = _read(VOCABULARY, vocab_file)
        folder = Path(str(vocab_file)).parent
        beside = [each for each in self.beside if (folder / each).is_file()]
        self.files = {name: content} | {each: (folder / each).read_bytes() for each in beside}
        description = _parse_object(content, vocab_file, "a tokenizer.json, a JSON object")
        model = description.get("model")
        if isinstance(model, dict) and model.get("dropout"):
            allowed = f"one whose model.dropout is null: with {model['dropout']} a text has other "
            raise UsageError(VOCABULARY, vocab_file, f"{allowed}ids each time")
        library = _build_described(description, vocab_file)
        vocabulary: dict[str, int] = library.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = {token.content: token for token in library.get_added_tokens_decoder().values()}
        allowed = "one whose {} beside it is a JSON object"
        configs = {x: _parse_object(self.files[x], vocab_file, allowed, x) for x in beside}

        def find_mark(key: str, usual: Sequence[str] = ()) -> str | None:
            """The token that the files beside call `key`, else a usual one, if there is any."""
            for config_name, config in configs.items():
                mark = config.get(key)
                if isinstance(mark, dict):  # with its treatment of blanks, as older versions wrote
                    mark = mark.get("content")
                if mark is not None and str(mark) not in vocabulary:
                    allowed = f"one with an id for {mark!r}, the {key} of {config_name} beside it"
                    raise UsageError(VOCABULARY, vocab_file, allowed)
                if mark is not None:
                    return str(mark)
            known = (mark for tokens in (added, vocabulary) for mark in usual if mark in tokens)
            return next(known, None)

        end = find_mark("eos_token", END_MARKS)
        if end is None:
            allowed = f"one with an end mark: one of {' '.join(END_MARKS)} in its vocabulary, or "
            allowed += f"the eos_token of a {self.beside[0]} beside it"
            raise UsageError(VOCABULARY, vocab_file, allowed)
        if end in added and not added[end].special:  # else it would be found in texts
            for token in description["added_tokens"]:
                token["special"] = token["special"] or token["content"] == end
            library = _build_described(description, vocab_file)
        library.encode_special_tokens = True
        self.library, self.eod = library, vocabulary[end]
        if self.eod in self.encode(f"{end}a{end} {end}"):
            allowed = "one such as the byte-level BPE of tools/train_tokenizer.py: with this one, "
            allowed += f"text that spells {end} becomes the end mark"
            raise UsageError(VOCABULARY, vocab_file, allowed)
        pad, bos = find_mark("pad_token", PAD_MARKS), find_mark("bos_token")
        self.pad_id = None if pad is None else vocabulary[pad]
        self.bos_id = None if bos is None else vocabulary[bos]
        self.marks = tuple(name for name in added if name == end or added[name].special)
        self.fingerprint = _fingerprint(library, self.eod)


def _find_in_folder(folder: Path, name: str) -> str:
    """The file of this name; UsageError, with what works instead, if the folder has none."""
    if (folder / name).is_file():
        return str(folder / name)
    allowed = f"a folder with a {name}, as transformers' "
    allowed += "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes it"
    files = [str(folder / each) for each in GPT2BPETokenizer.names.values()]
    works: tuple[str, ...] = ()
    if all(Path(file).is_file() for file in files):
        kind = (TYPE, GPT2BPETokenizer.kind)
        works = (*kind, VOCABULARY, files[0], "--merge-file", files[1])
    raise UsageError(VOCABULARY, folder, allowed, works=works)


def _build_described(description: Mapping[str, Any], file: str | None) -> Any:
    """The tokenizers.Tokenizer of a tokenizer.json, which neither truncates nor pads."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises no other class
        allowed = "a tokenizer.json as transformers' save_pretrained or tools/train_tokenizer.py "
        raise UsageError(VOCABULARY, file, f"{allowed}makes it ({error})") from error
    library.no_truncation()
    library.no_padding()
    return library


def _fingerprint(library: Any, eod: int) -> str:
    """SHA-256 of normalizer, pre-tokenizer, model, added tokens and end mark.

    The library writes them in one form, for any form of the file. Null and false values are left
    out, so that options of its later versions change nothing.
    """

    def without_empty(value: Any) -> Any:
        if isinstance(value, list):
            return [without_empty(each) for each in value]
        if not isinstance(value, dict):
            return value
        values = {key: each for key, each in value.items() if each is not None}
        return {key: without_empty(each) for key, each in values.items() if each is not False}

    description = json.loads(library.to_str())
    parts = [description[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
    content = json.dumps([*map(without_empty, parts), eod], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _read(flag: str, file: str | None) -> bytes:
    """Content of the flag's file; UsageError without one."""
    if file is None:
        raise UsageError(flag, None, "given: it names a file of the tokenizer")
    if Path(file).is_dir():
        raise UsageError(flag, file, "a file, or with {} HuggingFaceTokenizer a folder", TYPE)
    if not Path(file).is_file():
        raise UsageError(flag, file, "a file that exists")
    return Path(file).read_bytes()


def _parse_object(content: bytes, file: str | None, allowed: str, *others: str) -> dict[str, Any]:
    """file, allowed, others: for the UsageError of a content that is no JSON object."""
    try:
        value: Any = json.loads(content)
    except ValueError as error:
        raise UsageError(VOCABULARY, file, f"{allowed} ({error})", *others) from error
    if not isinstance(value, dict):
        raise UsageError(VOCABULARY, file, allowed, *others)
    return value


def _decode(content: bytes, flag: str, file: str | None, allowed: str) -> str:
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(flag, file, f"{allowed} ({error})") from error


Maker = type[GPT2BPETokenizer] | type[BertTokenizer] | type[HuggingFaceTokenizer]
MAKERS = GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase, HuggingFaceTokenizer
TOKENIZERS: dict[str, Maker] = {each.kind: each for each in MAKERS}


def build_tokenizer(kind: str, vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """The tokenizer of this kind; ValueError or OSError, naming the flag, if it cannot be built."""
    maker = _maker(kind)
    if merge_file is not None and "merge_file" not in maker.names:
        allowed = f"left out with {{}} {kind}"
        raise UsageError("--merge-file", merge_file, allowed, TYPE)
    files = {"vocab_file": vocab_file, "merge_file": merge_file}
    return maker(**{parameter: files[parameter] for parameter in maker.names})


def read_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """The tokenizer of this kind whose files are in the folder, as Tokenizer.files names them.

    Raises ValueError, naming the folder and the file, if one is missing or damaged.
    """
    maker = _maker(kind)
    try:
        return maker(**{parameter: str(folder / name) for parameter, name in maker.names.items()})
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {error}; {file_flags(kind)} would work"
        ) from error


def file_names(kind: str) -> tuple[str, ...]:
    """Names of such a tokenizer's files in a folder; ValueError for an unknown kind."""
    return tuple(_maker(kind).names.values())


def file_flags(kind: str) -> str:
    """The flags that name these files, for messages: "--vocab-file and --merge-file"."""
    return " and ".join(f"--{name.replace('_', '-')}" for name in _maker(kind).names)


def _maker(kind: str) -> Maker:
    if kind not in TOKENIZERS:
        raise UsageError(TYPE, kind, " or ".join(TOKENIZERS))
    return TOKENIZERS[kind]
