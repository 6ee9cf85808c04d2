"""A corpus of any size with known near-duplicates, the same for the same seed.

A document consists of random sentences of real text, until it is as long as a randomly chosen real
document. Every 20th document is a near-duplicate: an earlier document of its shard, used once, with
a random share of its words replaced. FOLDER/shards holds JSON lines {"text", "source", "id"},
FOLDER/truth one line per near-duplicate: {"id", "of", "jaccard"}, the exact similarity of their
sets of character 5-grams. A shard is a function of the seed and its number.
"""

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.processes import ROOT
from megatron.data.json_lines import find_shards
from megatron.libraries import Library
from tools.corpus import harvest
from tools.corpus.files import DocumentCounts, cut, read_documents, write_shard
from tools.corpus.settings import parse_size

orjson = Library("orjson")

HARVESTED = ROOT / "runs" / "benchmarks" / "harvested.jsonl"
SENTENCE_END = re.compile(r"(?<=[.!?]\s)(?=[A-Z\"'(])|(?<=\n\n)")  # the blank ends the sentence
SHARD_BYTES = 32_000_000


def texts_of(text: Sequence[Path] = (), megabytes: float = math.inf) -> Iterator[str]:
    """Texts of the documents in JSON lines, up to so many MB. The default is 30 MB of English from
    this Python installation, collected once."""
    if not text and not HARVESTED.exists():
        harvest.run(harvest.Settings(output=HARVESTED, max_bytes=30_000_000))
    for unit in cut(find_shards(text or [HARVESTED]), 1 << 60):
        for document in read_documents(unit, DocumentCounts()):
            if megabytes <= 0:
                return
            megabytes -= len(document.text.encode()) / 1e6
            yield document.text


@cache
def load(text: tuple[Path, ...]) -> tuple[list[str], list[int]]:
    """(sentences of 40 to 160 characters, lengths of the documents that have at least 640)"""
    sentences, lengths = dict[str, None](), list[int]()
    for document in texts_of(text):
        lengths.append(len(document))
        sentences |= dict.fromkeys(SENTENCE_END.split(f"{document}\n\n"))
    kept = [each for each in sentences if 40 <= len(each) <= 160]
    return kept, [each for each in lengths if 640 <= each <= 300_000]


def five_grams(text: str) -> set[str]:
    line = " ".join(text.lower().split())
    return {line[k : k + 5] for k in range(max(1, len(line) - 4))}


def generate(output: Path, text: Sequence[Path] = (), size: str = "100MB", seed: int = 0) -> None:
    """Make a corpus in a new folder. size: of all lines together; each shard may exceed its part by
    one document."""
    total, (sentences, lengths) = parse_size("--size", size), load(tuple(text))
    # Two of the shortest documents, of six sentences, are half equal if they share three, as
    # comb(6, 3)**2 * 6 / sentences**3 of all pairs do. Less than one such pair is expected.
    least = 11 * (total * len(lengths) / max(1, sum(lengths))) ** (2 / 3)
    if len(sentences) < max(least, 1) or not lengths:
        raise ValueError(f"--text: too little for --size {size}, {least:.0f} sentences would do")
    output.mkdir(parents=True)
    for shard, start in enumerate(range(0, total, SHARD_BYTES)):
        name, random = f"{shard:05}", Random(f"{seed} {shard}")
        originals: list[tuple[str, str]] = []  # (id, text) of documents without near-duplicate
        with (
            write_shard(output / "shards", f"part-{name}", "none") as lines,
            write_shard(output / "truth", f"part-{name}", "none") as truth,
        ):
            while lines.bytes < min(SHARD_BYTES, total - start):
                own, document = f"{name}-{lines.documents:07}", ""
                if (lines.documents + 1) % 20:
                    length = random.choice(lengths)
                    while len(document) < length:
                        document += random.choice(sentences)
                    originals.append((own, document))
                else:
                    of, original = originals.pop(random.randrange(len(originals)))
                    document, jaccard = near_duplicate(original, sentences, random)
                    truth.write(orjson.dumps({"id": own, "of": of, "jaccard": jaccard}))
                lines.write(orjson.dumps({"text": document, "source": "generated", "id": own}))


def near_duplicate(text: str, sentences: Sequence[str], random: Random) -> tuple[str, float]:
    """(the text with some words replaced, the similarity: 0.5 or more)"""
    words, share = text.split(" "), random.uniform(0, 0.2)
    for k in random.sample(range(len(words)), round(share * len(words))):
        words[k] = random.choice(random.choice(sentences).split())
    one, other = five_grams(text), five_grams(" ".join(words))
    return " ".join(words), len(one & other) / len(one | other)


def read(folder: Path, pattern: str = "*") -> list[dict[str, Any]]:
    """All lines of FOLDER/shards, or of FOLDER/truth."""
    return [orjson.loads(line) for file in sorted(folder.glob(pattern)) for line in file.open("rb")]
