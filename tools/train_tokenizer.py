"""Train a byte-level BPE like GPT-2's: the same pre-tokenizer, <|endoftext|> as the last id."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.tokenizer import END_OF_DOCUMENT
from tools.corpus.jsonl import Funnel, placed, read_records, run

BYTES = 256


def train_tokenizer(input: tuple[Path, ...], vocab_size: int, output_dir: Path) -> None:
    """Train a byte-level BPE on the "text" of jsonl files.

    Args:
        input: jsonl files with a "text" in each line.
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


def texts(paths: tuple[Path, ...]) -> Iterator[str]:
    for record in read_records(paths, Funnel("tokenizer")):
        yield record["text"]


if __name__ == "__main__":
    run(train_tokenizer)
