"""A corpus of any size with known near-duplicates, the same for the same seed.

    python benchmarks/corpus_generator.py --output DIR [--text FILE...] [--size 1GB]

A document is sentences of real text, drawn until it is as long as a drawn real document. The last
of every 20 is a near-duplicate: an earlier document of its shard, used once, with a drawn share of
its words replaced. DIR/shards holds JSON lines {"text", "source", "id"}, DIR/truth one for each
near-duplicate: {"id", "of", "jaccard"}, the exact similarity of their sets of character 5-grams.
A shard is a function of the seed and its number.
"""

import re
import sys
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson
import tyro

from megatron.data.json_lines import find_shards, open_shard, parse_record
from tools.corpus import harvest
from tools.corpus.program import running
from tools.corpus.scheduler import Call, open_scheduler
from tools.corpus.settings import parse_size
from tools.corpus.shards import write_shard

HARVESTED = Path(__file__).resolve().parents[1] / "runs" / "benchmarks" / "harvested.jsonl"
SENTENCE_END = re.compile(r"(?<=[.!?]\s)(?=[A-Z\"'(])|(?<=\n\n)")  # the blank is the sentence's
SHARD_BYTES = 32_000_000


def real_text(given: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """Those given, or 30 MB of English from this Python installation, collected once."""
    if not given and not HARVESTED.exists():
        harvest.run(harvest.Settings(output=HARVESTED, max_bytes=30_000_000))
    return tuple(each.resolve() for each in given) or (HARVESTED,)


@cache
def load(text: tuple[Path, ...]) -> tuple[list[str], list[int]]:
    """(sentences of 40 to 160 characters, lengths of the documents that have at least 640)"""
    sentences, lengths = dict[str, None](), list[int]()
    for shard in find_shards(text):
        with open_shard(shard) as lines:
            for document in (parse_record(line)["text"] for line in lines):
                lengths.append(len(document))
                sentences |= dict.fromkeys(SENTENCE_END.split(f"{document}\n\n"))
    kept = [each for each in sentences if 40 <= len(each) <= 160]
    return kept, [each for each in lengths if 640 <= each <= 300_000]


def five_grams(text: str) -> set[str]:
    line = " ".join(text.lower().split())
    return {line[k : k + 5] for k in range(max(1, len(line) - 4))}


def make_shard(text: tuple[Path, ...], seed: int, shard: int, size: int, output: Path) -> None:
    """Write bytes up to the size, or a document more."""
    (sentences, lengths), random = load(text), Random(f"{seed} {shard}")
    originals: list[tuple[str, str]] = []  # (id, text), of which no near-duplicate is made yet
    open_in = partial(write_shard, name=f"part-{shard:05}", compression="none")
    with open_in(output / "shards") as lines, open_in(output / "truth") as truth:
        while lines.bytes < size:
            name, document = f"{shard:05}-{lines.documents:07}", ""
            if (lines.documents + 1) % 20:
                length = random.choice(lengths)
                while len(document) < length:
                    document += random.choice(sentences)
                originals.append((name, document))
            else:
                of, original = originals.pop(random.randrange(len(originals)))
                words, share = original.split(" "), random.uniform(0, 0.2)  # similar to 0.5 or more
                for k in random.sample(range(len(words)), round(share * len(words))):
                    words[k] = random.choice(random.choice(sentences).split())
                document = " ".join(words)
                one, other = five_grams(original), five_grams(document)
                jaccard = len(one & other) / len(one | other)
                truth.write(orjson.dumps({"id": name, "of": of, "jaccard": jaccard}))
            lines.write(orjson.dumps({"text": document, "source": "generated", "id": name}))


def generate(
    output: Path, text: tuple[Path, ...] = (), size: str = "100MB", seed: int = 0, workers: int = 2
) -> None:
    """Make a corpus.

    Args:
        output: a folder that is not there yet.
        text: JSON lines of real text, or folders of them; by default English of this Python.
        size: of the JSON lines, such as 100MB or 5GB; up to a document more in each shard.
        seed: another seed draws other documents.
        workers: processes; they do not change what is written.
    """
    text, total = real_text(text), parse_size("--size", size)
    sentences, lengths = load(text)
    # Two of the shortest documents, of six sentences, are half the same where they share three, as
    # comb(6, 3)**2 * 6 / sentences**3 of all pairs do. Less than one pair is to be expected.
    least = 11 * (total * len(lengths) / max(1, sum(lengths))) ** (2 / 3)
    if len(sentences) < max(least, 1) or not lengths:
        raise ValueError(f"--text: too little for --size {size}, {least:.0f} sentences would do")
    output.mkdir(parents=True)
    sizes = [SHARD_BYTES] * (total // SHARD_BYTES) + [total % SHARD_BYTES]
    calls = [Call(make_shard, (text, seed, *each, output)) for each in enumerate(sizes)]
    with open_scheduler("local", workers, 0) as scheduler:
        list(scheduler.run(calls))


def read(folder: Path, pattern: str = "*") -> list[dict[str, Any]]:
    """All lines of DIR/shards, or of DIR/truth."""
    return [orjson.loads(line) for file in sorted(folder.glob(pattern)) for line in file.open("rb")]


if __name__ == "__main__":
    with running():
        tyro.cli(generate)
