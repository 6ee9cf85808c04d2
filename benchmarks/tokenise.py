"""JSON lines to a uint16 .bin beside a Pool of `tokenizers`.

The peer has the shape of Megatron's own tools/preprocess_data.py: lines go to the workers, each of
which parses and encodes one document with the `tokenizers` library, and ids come back as lists,
which the first process writes. Every round has generated text of its own and new processes, whose
caches are empty. The peer gets less text, for it is much slower; of that text both have to write
the same tokens. MB are those of the JSON lines, CPU seconds those of all
processes. The start (imports and the making of the vocabulary), of which the peer's shorter run has
a larger share, is timed on one line; the ratio is of what is left. With --real a row of this
project shows real text, which each process reads once: in it no sentence recurs.
"""

import json
import multiprocessing
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
from benchmarks.watched import Usage, watched
from megatron.data.json_lines import find_shards
from megatron.data.tokenizer import GPT2BPETokenizer, Tokenizer

OURS, PEER = "this project", "Pool of tokenizers"
SPEED, RATIO = "MB per CPU second", "this project's speed / its"
ROUNDS = 5
CHUNK = 25  # lines that a worker of the Pool is handed at a time


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Of GPT-2's byte-pair encoding."""

    vocab_file: Path = Path("runs/quickstart/tokenizer/vocab.json")
    """The tokenizer's vocabulary; by default the quickstart's."""

    merge_file: Path = Path("runs/quickstart/tokenizer/merges.txt")
    """Its merges."""

    @property
    def files(self) -> list[str]:
        """Raises ValueError where one is not there."""
        for file in (self.vocab_file, self.merge_file):
            if not file.is_file():
                raise ValueError(
                    f"{file} is not there: bash scripts/quickstart.sh makes it, or --vocab-file "
                    "and --merge-file name other files"
                )
        return [str(self.vocab_file.resolve()), str(self.merge_file.resolve())]


POOL = "import sys; from benchmarks.tokenise import pool; pool(*sys.argv[1:])"
tokenizers: list[Tokenizer] = []  # of a worker of the Pool


def pool(output: str, workers: str, vocab_file: str, merge_file: str, *shards: str) -> None:
    """The peer's program."""
    context, files = multiprocessing.get_context("spawn"), (vocab_file, merge_file)
    lines = (line for shard in shards for line in Path(shard).read_bytes().splitlines())
    with Path(output).open("wb") as file, context.Pool(int(workers), load, files) as started:
        for ids in started.imap(encode, lines, CHUNK):
            file.write(np.array(ids, np.uint16).tobytes())
        started.close()
        started.join()


def load(vocab_file: str, merge_file: str) -> None:
    tokenizers.append(GPT2BPETokenizer(vocab_file, merge_file))


def encode(line: bytes) -> list[int]:
    (tokenizer,) = tokenizers
    return [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eod]


def run(rank: Rank, name: str, folder: str, real: str, words: list[str], workers: int) -> Turn:
    """real: a file of text in place of the round's. words: of the vocabulary."""
    made, out = Path(folder), Path(folder, name, "p_text_document.bin")
    sizes = {each: made / each / str(rank.round) / "shards" for each in ("peer", "ours")}
    out.parent.mkdir(exist_ok=True)

    def write(source: Path) -> Usage:
        shards = [str(shard) for shard in find_shards([source])]
        if name == PEER:
            return watched([sys.executable, "-c", POOL, str(out), str(workers), *words, *shards])
        command = [sys.executable, "tools/preprocess_data.py", "--overwrite", "--append-eod"]
        command += ["--output-prefix", str(out.with_name("p")), "--workers", str(workers)]
        command += ["--vocab-file", words[0], "--merge-file", words[1], "--input", *shards]
        return watched(command)

    def digest() -> str:
        return sha256(out.read_bytes()).hexdigest()

    if name == OURS:  # the peer's text, of which the peer's turn leaves the tokens
        write(sizes["peer"])
    source = Path(real) if real else sizes["ours" if name == OURS else "peer"]
    size = sum(shard.stat().st_size for shard in find_shards([source]))
    (line := made / "line.jsonl").write_text('{"text": "one"}\n')
    tokens = digest() if name == OURS else ""

    def turn() -> dict[str, Any]:
        start, used = write(line), write(source)
        speed = size / 1e6 / (used.cpu - start.cpu)
        return {**vars(used), "bytes": size, "speed": speed, "tokens": tokens or digest()}

    return turn


def main(
    flags: Flags,
    vocabulary: Vocabulary,
    text: tuple[Path, ...] = (),
    real: Path | None = None,
    size: str = "100MB",
    peer_size: str = "8MB",
    workers: int = 1,
) -> None:
    """Compare tokenising.

    Args:
        text: JSON lines of real text, whose sentences the text is made of; by default English of
            this Python.
        real: JSON lines of real text that this project is timed on besides.
        size: of the text of a round.
        peer_size: of the peer's.
        workers: processes of both.
    """
    from benchmarks.corpus_generator import corpora  # not to be imported by workers of the Pool

    words, sizes = vocabulary.files, {"ours": size, "peer": peer_size}
    with corpora(sizes, flags.rounds or ROUNDS, text, near_duplicates=0) as folder:
        arguments = {"folder": str(folder), "real": "", "words": words, "workers": workers}
        contenders = [
            Contender(
                name=name,
                group="generated text",
                run=run,
                arguments={**arguments, "name": name},
                same={"tokens": 0},
            )
            for name in (OURS, PEER)
        ]
        if real:
            own = {**arguments, "name": OURS, "real": str(real.resolve())}
            contenders.append(Contender(name=OURS, group="real text", run=run, arguments=own))
        question = Question(
            title="Text to tokens",
            method=__doc__,
            contenders=contenders,
            columns=(
                Column(SPEED, "speed", "{:.1f}"),
                Column(RATIO, "speed", "{:.1f}", "first / its"),
                Column("with the start, MB per CPU second", "bytes", "{:.1f}", per="cpu", unit=1e6),
                Column("MB", "bytes", "{:.0f}", unit=1e6),
                Column("peak MB of memory", "peak_bytes", "{:,.0f}", unit=1e6),
            ),
            result=lambda found: (
                f"{found.median('generated text', OURS, SPEED):.0f} MB per CPU second, "
                f"{found.median('generated text', PEER, RATIO):.0f} times as fast as a Pool of "
                "`tokenizers`."
            ),
            rounds=ROUNDS,
            warm_up=0,
            packages=("tokenizers", "gigatoken", "orjson", "numpy"),
            settings={"size": size, "peer_size": peer_size, "workers": workers},
        )
        ask(question, flags)


if __name__ == "__main__":
    cli(main)
