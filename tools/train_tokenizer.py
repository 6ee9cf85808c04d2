"""Train a tokenizer on text: a byte-level BPE like GPT-2's, or a WordPiece like BERT's.

    python tools/train_tokenizer.py --input FILE|FOLDER... --vocab-size N --output FOLDER
        [--tokenizer-type BertWordPieceLowerCase]
    python tools/train_tokenizer.py ... --tokenizer-type HuggingFaceTokenizer
        --special-tokens '[BOT]' '[EOT]' '[PAD]'

A BPE has GPT-2's pre-tokenizer and <|endoftext|> as the last id; in a tokenizer.json it has the
given special tokens as the first ids.  A WordPiece begins with [PAD].  Existing files are replaced.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from megatron.config.checks import fillable
from megatron.config.parse import parse_call, whole_program
from megatron.data.files import write_atomically
from megatron.data.json_lines import find_shards
from megatron.data.tokenizer import (
    CONTINUATION,
    END_MARKS,
    END_OF_DOCUMENT,
    MARKS,
    PAD_MARKS,
    BertWordPieceCase,
    BertWordPieceLowerCase,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    build_wordpiece,
    read_tokenizer,
)
from megatron.errors import UsageError
from tools.corpus.files import DocumentCounts, cut, documents, read_documents

BYTES = 256
# Usual names of the mark that begins a text; END_MARKS end texts and PAD_MARKS pad them.
BEGIN_MARKS = ("[BOT]", "<s>", "[CLS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>")
MOST_LETTERS = 1000  # in the vocabulary of a WordPiece, as in BERT's; rarer ones are [UNK]
UNIT_BYTES = 1 << 40  # so large that every file is one unit

Files = Mapping[str, bytes]


def train_tokenizer(
    input: tuple[Path, ...],
    vocab_size: int,
    output: Path,
    tokenizer_type: str = GPT2BPETokenizer.kind,
    special_tokens: tuple[str, ...] = (),
) -> None:
    """Train a byte-level BPE, or a WordPiece, on the "text" of JSON lines, or on text files.

    Args:
        input: files of JSON lines with a "text" in each, and *.txt, each a document (plain, .gz or
            .zst), or folders of them.
        vocab_size: total number of ids. For a BPE: 256 bytes, merges, and the end mark or the
            special tokens; for a WordPiece: five marks, letters and pieces. The result has fewer
            ids if the text has no more pairs to merge.
        output: the folder for vocab.json and merges.txt, for vocab.txt, or for tokenizer.json
            and tokenizer_config.json; existing ones are replaced.
        tokenizer_type: GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase, or
            HuggingFaceTokenizer, a byte-level BPE in a tokenizer.json.
        special_tokens: only for a HuggingFaceTokenizer: its first ids, including an end mark such
            as [EOT] or <|endoftext|>. Text that spells one is ordinary text.
    """
    if tokenizer_type not in TRAINERS:
        known = ", ".join(TRAINERS)
        raise UsageError("--tokenizer-type", tokenizer_type, f"one of {known}")
    check_special_tokens(special_tokens, tokenizer_type)
    check_vocab_size(vocab_size, tokenizer_type, len(special_tokens))
    fillable("--output", output)
    special = {"special_tokens": special_tokens} if special_tokens else {}
    files = TRAINERS[tokenizer_type](input, vocab_size, **special)
    there = {name: output / name for name in files if (output / name).is_file()}
    if replaced := [name for name, file in there.items() if file.read_bytes() != files[name]]:
        print(f"replaced {' and '.join(replaced)} in {output}", file=sys.stderr)
    for name, content in files.items():
        write_atomically(output / name, content)
    size = read_tokenizer(tokenizer_type, output).vocab_size
    smaller = "" if size == vocab_size else f" (asked for {vocab_size}: no more pairs)"
    print(f"{size} ids in {output}{smaller}", file=sys.stderr)


def check_special_tokens(special_tokens: Sequence[str], tokenizer_type: str) -> None:
    """Raise UsageError if the kind has no special tokens, or if they lack an end mark."""
    name, given = "--special-tokens", " ".join(special_tokens) or None
    has_end = not set(special_tokens).isdisjoint(END_MARKS)
    if tokenizer_type != HuggingFaceTokenizer.kind:
        if special_tokens:
            end = () if has_end else ("[EOT]",)
            works = ("--tokenizer-type", HuggingFaceTokenizer.kind, name, *special_tokens, *end)
            raise UsageError(name, given, f"left out with {tokenizer_type}", works=works)
        return
    if not has_end:
        works = (name, *special_tokens, "[EOT]")
        raise UsageError(name, given, f"with an end mark: {' or '.join(END_MARKS)}", works=works)
    if len(set(special_tokens)) < len(special_tokens) or not all(map(str.strip, special_tokens)):
        works = (name, *(each for each in dict.fromkeys(special_tokens) if each.strip()))
        raise UsageError(name, given, "different tokens, none of them blank", works=works)


def check_vocab_size(
    vocab_size: int, tokenizer_type: str = GPT2BPETokenizer.kind, special_tokens: int = 0
) -> None:
    """Raise ValueError for a size too small for the ids that every vocabulary of the kind has."""
    if tokenizer_type == GPT2BPETokenizer.kind:
        least, needed = BYTES + 1, f"the {BYTES} bytes and the end mark"
    elif tokenizer_type == HuggingFaceTokenizer.kind:
        least, needed = BYTES + special_tokens, f"the {BYTES} bytes and --special-tokens"
    else:
        least, needed = 100, f"{len(MARKS)} marks, the letters and their continuations"
    if vocab_size < least:
        works = ("--vocab-size", str(least))
        raise UsageError("--vocab-size", vocab_size, f"at least {least}, for {needed}", works=works)


def build_byte_pairs(
    paths: Sequence[Path], vocab_size: int, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Train a byte-level BPE. special_tokens: get the first ids."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(paths), trainer)
    return tokenizer


def train_tokenizer_json(
    paths: Sequence[Path], vocab_size: int, special_tokens: Sequence[str]
) -> Files:
    """tokenizer.json, and tokenizer_config.json, by which transformers loads the folder."""
    tokenizer = build_byte_pairs(paths, vocab_size, special_tokens)
    tokenizer.encode_special_tokens = True
    if words := [t for t in special_tokens if tokenizer.token_to_id(t) in tokenizer.encode(t).ids]:
        works = ("--special-tokens", *(f"[{t}]" if t in words else t for t in special_tokens))
        raise UsageError(
            "--special-tokens", " ".join(words), "tokens that no text is made of", works=works
        )
    marks = {"eos_token": END_MARKS, "bos_token": BEGIN_MARKS, "pad_token": PAD_MARKS}
    config: dict[str, str] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, usual in marks.items():
        if found := [mark for mark in usual if mark in special_tokens]:
            config[name] = found[0]
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": f"{json.dumps(config, indent=2)}\n".encode(),
    }


def train_byte_pairs(paths: Sequence[Path], vocab_size: int) -> Files:
    model = json.loads(build_byte_pairs(paths, vocab_size - 1).to_str())["model"]
    vocabulary = {**model["vocab"], END_OF_DOCUMENT: len(model["vocab"])}
    merges = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    return {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False).encode(),
        "merges.txt": "\n".join([*merges, ""]).encode(),
    }


def train_wordpiece(paths: Sequence[Path], vocab_size: int, *, is_lower_case: bool) -> Files:
    tokenizer = build_wordpiece(MARKS, is_lower_case=is_lower_case)
    # A letter takes two ids; all letters together get at most a quarter of the ids.
    letters = find_letters(tokenizer, texts(paths), min(MOST_LETTERS, vocab_size // 8))
    # By itself the library numbers continuations in an order that changes from run to run, and
    # merges, of equally frequent pairs, the one with the lower numbers.
    alphabet = [*letters, *continuations(tokenizer, letters)]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*MARKS, *alphabet],
        continuing_subword_prefix=CONTINUATION,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(paths, again=True), trainer)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {"vocab.txt": "".join(f"{token}\n" for token in tokens).encode()}


def find_letters(tokenizer: Tokenizer, texts: Iterator[str], most: int) -> list[str]:
    """The `most` most frequent characters, in Unicode order."""
    counts = Counter[str]()
    for text in texts:
        counts.update("".join(tokenizer.normalizer.normalize_str(text).split()))
    return sorted(sorted(counts, key=lambda letter: (-counts[letter], letter))[:most])


def continuations(tokenizer: Tokenizer, letters: Sequence[str]) -> Iterator[str]:
    """Continuation pieces of letters that can be inside a word: no punctuation or Chinese ones."""
    for letter in letters:
        word = tokenizer.normalizer.normalize_str(f"a{letter}")
        if len(tokenizer.pre_tokenizer.pre_tokenize_str(word)) == 1:
            yield CONTINUATION + letter


TRAINERS: dict[str, Callable[..., Files]] = {
    GPT2BPETokenizer.kind: train_byte_pairs,
    HuggingFaceTokenizer.kind: train_tokenizer_json,
    **{
        maker.kind: partial(train_wordpiece, is_lower_case=maker.is_lower_case)
        for maker in (BertWordPieceLowerCase, BertWordPieceCase)
    },
}


def texts(paths: Sequence[Path], *, again: bool = False) -> Iterator[str]:
    """The documents' texts, one at a time; a warning counts lines without one, unless `again`.

    Raises ValueError, naming the first such line, if there is no document at all.
    """
    accounting = DocumentCounts()
    for unit in cut(find_shards(paths), UNIT_BYTES):
        for document in read_documents(unit, accounting):
            yield document.text
    count = len(accounting.rejected)
    first = "".join(
        "{file}, byte {offset}: {reason}".format(**line) for line in islice(accounting.rejected, 1)
    )
    if documents(accounting.input) == count:
        raise ValueError(
            f"--input {' '.join(map(str, paths))} holds no document{f' ({first})' if first else ''}"
            '; a line of {"text": "..."} each would work'
        )
    if first and not again:
        print(f"warning: {count} lines set aside, the first: {first}", file=sys.stderr)


if __name__ == "__main__":
    with whole_program({}):
        parse_call(train_tokenizer, sys.argv[1:], {})()
