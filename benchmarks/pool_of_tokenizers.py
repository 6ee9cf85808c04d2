"""The peer of tokenise.py: JSON lines to .bin with a Pool, json and `tokenizers`, a line at a time.

    python benchmarks/pool_of_tokenizers.py --input SHARD [SHARD ...] --output FILE.bin
        --vocab-file vocab.json --merge-file merges.txt --workers N

The shape of Megatron's own tools/preprocess_data.py: lines go to the workers, each of which parses
and encodes one document, and ids come back as lists, which the first process writes.
"""

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.tokenizer import GPT2BPETokenizer, Tokenizer

CHUNK = 25  # lines that a worker is handed at a time
tokenizers: list[Tokenizer] = []


def load(vocab_file: str, merge_file: str) -> None:
    tokenizers.append(GPT2BPETokenizer(vocab_file, merge_file))


def encode(line: bytes) -> list[int]:
    (tokenizer,) = tokenizers
    return [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eod]


def read_lines(shards: tuple[Path, ...]) -> Iterator[bytes]:
    for shard in shards:
        with shard.open("rb") as lines:
            yield from lines


def preprocess(
    input: tuple[Path, ...], output: Path, vocab_file: str, merge_file: str, workers: int = 1
) -> None:
    context = multiprocessing.get_context("spawn")
    with output.open("wb") as file, context.Pool(workers, load, (vocab_file, merge_file)) as pool:
        for ids in pool.imap(encode, read_lines(input), CHUNK):
            file.write(np.array(ids, np.uint16).tobytes())


if __name__ == "__main__":
    tyro.cli(preprocess)
