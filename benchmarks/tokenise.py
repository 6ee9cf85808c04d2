"""Text to tokens.

JSON lines become ids in a uint16 .bin file, by tools/preprocess_data.py with one worker, and by a
peer built like Megatron's own: a Pool whose worker parses and encodes a document with the
`tokenizers` library and sends the ids back as a list, which the first process writes. Every round
generates new text and starts new processes with empty caches; both have to write the same bytes.
MB count the JSON lines, CPU seconds all processes. Start-up, timed on one line, is not part of the
speed; the Pool's worker starts with its vocabulary loaded.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
from collections.abc import Iterator
from functools import cache, partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.corpus_generator import generate
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.watched import watched
from megatron.data.json_lines import find_shards
from megatron.data.tokenizer import GPT2BPETokenizer

OURS, PEER = "this project", "Pool of tokenizers"
SPEED, RATIO = "MB per CPU second", "this project's speed / its"
load = cache(GPT2BPETokenizer)


def encode(files: tuple[str, str], line: bytes) -> list[int]:
    tokenizer = load(*files)
    return [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eod]


def run(rank: Rank, name: str, folder: str, files: tuple[str, str]) -> Turn:
    """files: vocab.json and merges.txt."""
    shards = find_shards([Path(folder, str(rank.round), "shards")])
    size = sum(shard.stat().st_size for shard in shards)
    binary, line = Path(folder, f"{name}_text_document.bin"), Path(folder, "line.json")
    line.write_text('{"text": "one"}\n')
    load(*files)

    def preprocess(*inputs: Path) -> Figures:
        flags = ["--workers", 1, "--overwrite", "--output-prefix"]
        flags += [f"{folder}/{name}", "--vocab-file", files[0], "--merge-file", files[1]]
        return watched("tools/preprocess_data.py", *flags, "--input", *inputs)

    def ours() -> Figures:
        start, used = preprocess(line)["cpu"], preprocess(*shards)
        return {**used, "start": start, "cpu": used["cpu"] - start}

    def peer() -> Figures:
        lines = (line for shard in shards for line in shard.open("rb"))
        with get_context("fork").Pool(1) as workers, binary.open("wb") as file:
            for ids in workers.imap(partial(encode, files), lines, chunksize=25):
                file.write(np.array(ids, np.uint16).tobytes())
        return {}

    def turn() -> Figures:
        used = ours() if name == OURS else peer()
        return {**used, "bytes": size, "ids": sha256(binary.read_bytes()).hexdigest()}

    return turn


def contenders(
    flags: Flags,
    tokenizer: Path = Path("runs/quickstart/tokenizer"),
    text: tuple[Path, ...] = (),
    size: str = "50MB",
) -> Iterator[Contender]:
    """Tokenise JSON lines of this size, generated from `text` (default: files of this Python).

    Args:
        tokenizer: folder with vocab.json and merges.txt.
    """
    files = [str(tokenizer.resolve() / name) for name in ("vocab.json", "merges.txt")]
    load(*files)  # reports errors before text is generated
    for seed in range(flags.rounds or QUESTION.rounds):
        generate(scratch() / str(seed), text, size, seed)
    for name in (OURS, PEER):
        arguments = {"name": name, "folder": str(scratch()), "files": tuple(files)}
        yield Contender(name, run, arguments, same={"ids": 0})


QUESTION = Question(
    contenders,
    (
        Column(SPEED, "bytes", "{:.1f}", per="cpu", unit=1e6),
        Column(RATIO, "cpu", "{:.1f}", "its / first"),
        Column("CPU seconds of the start", "start", "{:.2f}"),
    ),
    lambda found: (
        f"Tokenising runs at {found.median('', OURS, SPEED):.0f} MB per CPU second, "
        f"{found.median('', PEER, RATIO):.0f} times as fast as a Pool of `tokenizers`."
    ),
    warm_up=0,
)

if __name__ == "__main__":
    QUESTION.run()
