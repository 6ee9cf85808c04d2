"""Train a byte-level BPE like GPT-2's: the same pre-tokenizer, <|endoftext|> as the last id."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import tyro
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.tokenizer import END_OF_DOCUMENT
from tools.corpus.records import Funnel, documents, read_documents
from tools.corpus.shards import cut, find_shards, placed

BYTES = 256
UNIT_BYTES = 1 << 40  # a file is read from its start to its end


def train_tokenizer(input: tuple[Path, ...], vocab_size: int, output_dir: Path) -> None:
    """Train a byte-level BPE on the "text" of JSON lines.

    Args:
        input: files of JSON lines (plain, .gz or .zst), or folders of them, with a "text" in each
            line.
        vocab_size: ids in all: 256 bytes, the merges, and the end mark; fewer come out where the
            text has no more pairs to merge.
        output_dir: the folder for vocab.json and merges.txt.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=ByteLevel.alphabet(), show_progress=True
    )
    tokenizer.train_from_iterator(texts(input), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = {**model["vocab"], END_OF_DOCUMENT: len(model["vocab"])}
    merges = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    with placed(output_dir / "vocab.json") as file:
        file.write(json.dumps(vocabulary, ensure_ascii=False).encode())
    with placed(output_dir / "merges.txt") as file:
        file.write("\n".join([*merges, ""]).encode())
    smaller = "" if len(vocabulary) == vocab_size else f" (asked for {vocab_size}: no more pairs)"
    print(f"{len(vocabulary)} ids in {output_dir}{smaller}", file=sys.stderr)


def check_vocab_size(vocab_size: int) -> None:
    if vocab_size <= BYTES:
        raise ValueError(
            f"--vocab-size {vocab_size}: has to be at least {BYTES + 1}, "
            "for the 256 bytes and the end mark"
        )


def texts(paths: Sequence[Path]) -> Iterator[str]:
    """The documents' texts, one at a time; lines that hold none are counted and said.

    ValueError, naming the first such line, where there is no document at all.
    """
    funnel = Funnel()
    for unit in cut(find_shards(paths), UNIT_BYTES):
        for document in read_documents(unit, funnel):
            yield document.text
    bad = ["{file}, byte {offset}: {reason}".format(**line) for line in islice(funnel.rejected, 1)]
    if documents(funnel.input) == len(funnel.rejected):
        raise ValueError(
            f"--input {' '.join(map(str, paths))} holds no document{f' ({bad[0]})' if bad else ''};"
            ' a line of {"text": "..."} each would work'
        )
    if bad:
        print(
            f"warning: {len(funnel.rejected)} lines set aside, the first: {bad[0]}", file=sys.stderr
        )


if __name__ == "__main__":
    try:
        tyro.cli(train_tokenizer)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
