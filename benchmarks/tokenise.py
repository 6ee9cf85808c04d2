"""Text to tokens.

JSON lines to a uint16 .bin, by tools/preprocess_data.py and by a peer in the shape of Megatron's
own: a Pool, whose workers parse and encode a document each with the `tokenizers` library and send
ids back as lists, which the first process writes. Every round has generated text of its own and new
processes, whose caches are empty; the peer gets less of it, of which both have to write the same
tokens. MB are those of the JSON lines, CPU seconds those of all processes. The start, timed on one
line, is not part of the speed and the ratio. With --real a row shows this project on real text,
which each process reads once: in it no sentence recurs.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache, partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.watched import watched
from megatron.data.json_lines import find_shards
from megatron.data.tokenizer import GPT2BPETokenizer

OURS, PEER = "this project", "Pool of tokenizers"
GENERATED, SPEED, RATIO = "generated text", "MB per CPU second", "this project's speed / its"
POOL = "import sys; from benchmarks.tokenise import pool; pool(*sys.argv[1:])"
load = cache(GPT2BPETokenizer)


def encode(files: tuple[str, str], line: bytes) -> list[int]:
    return [*load(*files).encode(json.loads(line)["text"]), load(*files).eod]


def pool(output: str, workers: str, vocab_file: str, merge_file: str, *shards: str) -> None:
    """The peer's program."""
    lines = (line for shard in shards for line in Path(shard).read_bytes().splitlines())
    to_ids = partial(encode, (vocab_file, merge_file))
    with Path(output).open("wb") as file, get_context("spawn").Pool(int(workers)) as started:
        for ids in started.imap(to_ids, lines, chunksize=25):
            file.write(np.array(ids, np.uint16).tobytes())


def run(rank: Rank, name: str, folder: str, real: str, words: list[str], workers: int) -> Turn:
    """real: a file of text in place of the round's. words: the files of the vocabulary."""
    made, prefix = Path(folder, str(rank.round)), Path(folder, name)
    binary = f"{prefix}_text_document.bin"

    def write(source: Path) -> Figures:
        shards = [str(shard) for shard in find_shards([source])]
        if name == PEER:
            return watched([sys.executable, "-c", POOL, binary, str(workers), *words, *shards])
        flags = ["--output-prefix", str(prefix), "--overwrite", "--append-eod", "--vocab-file"]
        flags += [words[0], "--merge-file", words[1], "--workers", str(workers), "--input"]
        return watched([sys.executable, "tools/preprocess_data.py", *flags, *shards])

    write(made / "peer" / "shards")
    tokens = sha256(Path(binary).read_bytes()).hexdigest()
    source = Path(real) if real else made / ("peer" if name == PEER else "ours") / "shards"
    size = sum(shard.stat().st_size for shard in find_shards([source]))
    (line := made / f"{name}.jsonl").write_text('{"text": "one"}\n')

    def turn() -> Figures:
        start, used = write(line), write(source)
        speed = size / 1e6 / (used["cpu"] - start["cpu"])
        return {**used, "bytes": size, "speed": speed, "tokens": tokens}

    return turn


def contenders(
    flags: Flags,
    tokenizer: Path = Path("runs/quickstart/tokenizer"),
    text: tuple[Path, ...] = (),
    real: Path | None = None,
    size: str = "100MB",
    peer_size: str = "8MB",
    workers: int = 1,
) -> Iterator[Contender]:
    """Tokenise text made of JSON lines, by default of English of this Python; also real text.

    Args:
        tokenizer: folder of vocab.json and merges.txt.
        workers: processes of both contenders.
    """
    from benchmarks.corpus_generator import generate  # not to be imported by workers of the Pool

    for seed in range(flags.rounds or QUESTION.rounds):
        for name, each in (("ours", size), ("peer", peer_size)):
            generate(scratch() / str(seed) / name, text, each, seed)
    words = [str(tokenizer.resolve() / name) for name in ("vocab.json", "merges.txt")]
    own = {"folder": str(scratch()), "words": words, "workers": workers}
    for name in (OURS, PEER):
        arguments = {"name": name, "real": "", **own}
        yield Contender(name, run, arguments, group=GENERATED, same={"tokens": 0})
    if real:
        arguments = {"name": OURS, "real": str(real.resolve()), **own}
        yield Contender(OURS, run, arguments, group="real text")


QUESTION = Question(
    contenders,
    (
        Column(SPEED, "speed", "{:.1f}"),
        Column(RATIO, "speed", "{:.1f}", "first / its"),
        Column("with the start, MB per CPU second", "bytes", "{:.1f}", per="cpu", unit=1e6),
        Column("MB", "bytes", "{:.0f}", unit=1e6),
        Column("peak MB of memory", "peak_bytes", "{:,.0f}", unit=1e6),
    ),
    lambda found: (
        f"{found.median(GENERATED, OURS, SPEED):.0f} MB per CPU second, "
        f"{found.median(GENERATED, PEER, RATIO):.0f} times as fast as a Pool of `tokenizers`."
    ),
    warm_up=0,
)

if __name__ == "__main__":
    QUESTION.run()
