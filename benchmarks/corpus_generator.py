"""A corpus of any size with known near-duplicates, the same for the same seed.

    python benchmarks/corpus_generator.py --output DIR [--text FILE...] [--size 1GB]

Documents are sentences of real text, drawn at random, in the lengths of the real documents. The
last of every block (of 20 at the default share) is a near-duplicate: an earlier document with words
replaced until the exact Jaccard similarity of the two sets of character 5-grams (lower case, runs
of white space as one blank) is near one of TARGETS. DIR/shards holds the documents as JSON lines
{"text", "source", "id"}, DIR/truth.jsonl a line per near-duplicate: {"id", "of", "jaccard"}.

A document is a function of the seed and of its shard, block and number: the original of a
near-duplicate, which may lie in any of the shards before, is made again, and neither the number of
workers nor (but for the last shard) the size changes a byte. No document is the original of two.

Unrelated documents stay apart although sentences recur: with 4 LONGEST_SENTENCE characters or more
a similarity of 0.5 takes three shared sentences, and enough different sentences are asked for.
"""

import math
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.harness import cli
from megatron.data.json_lines import find_shards, open_shard, parse_record
from tools.corpus import harvest
from tools.corpus.program import progress, say
from tools.corpus.scheduler import Call, open_scheduler
from tools.corpus.settings import parse_size
from tools.corpus.shards import placed, write_shard

HARVESTED = Path(__file__).resolve().parents[1] / "runs" / "benchmarks" / "harvested.jsonl"
TARGETS = (0.6, 0.66, 0.72, 0.78, 0.85, 0.92, 1.0)
SHORTEST_SENTENCE, LONGEST_SENTENCE = 40, 160  # characters
SHORTEST, LONGEST = 4 * LONGEST_SENTENCE, 300_000  # characters of a document
MOST_TEXT = 128_000_000  # characters of the text that are read; the rest would only take memory
SHARD_BYTES = 32_000_000
WORDS = 20_000  # that replace others
WRAPPING = 50  # bytes of a line around its text
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
PARAGRAPH_END = re.compile(r"\n\s*\n")
Line = dict[str, Any]  # of JSON lines
Numbers = NDArray[np.int64]


def real_text(given: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """Those given, or 30 MB of English from this Python installation, collected once."""
    if missing := [each for each in given if not each.exists()]:
        raise FileNotFoundError(f"--text {missing[0]}: there is no such file or folder")
    if not given and not HARVESTED.exists():
        say(f"no --text is given: English of this Python installation goes into {HARVESTED}")
        harvest.run(harvest.Settings(output=HARVESTED, max_bytes=30_000_000))
    return tuple(each.resolve() for each in given) or (HARVESTED,)


class Base(NamedTuple):
    """What documents are made of."""

    sentences: list[str]  # with what follows: a blank, or a blank line after a paragraph
    sizes: Numbers  # characters of each sentence
    lengths: Numbers  # characters of the real documents, SHORTEST to LONGEST
    words: list[str]


class Plan(NamedTuple):
    """What decides a document."""

    text: tuple[str, ...]
    seed: int
    block: int  # documents of a block, of which the last is a near-duplicate; 0 for none

    @property
    def originals(self) -> int:
        return self.block - 1 if self.block else 20


@cache
def load_base(text: tuple[str, ...]) -> Base:
    """Of files or folders of JSON lines. About three times the text in memory."""
    sentences: dict[str, str] = {}
    lengths, read = [], 0
    for shard in find_shards([Path(each) for each in text]):
        with open_shard(shard) as lines:
            for line in lines:
                if read > MOST_TEXT:
                    break
                document = parse_record(line)["text"]
                sentences.update(split_sentences(document))
                lengths.append(len(document))
                read += len(document)
    endings = [sentence + end for sentence, end in sentences.items()]
    words = sorted({word for each in sentences for word in each.split() if word.isalpha()})
    return Base(
        endings,
        np.array([len(each) for each in endings]),
        np.array([each for each in lengths if SHORTEST <= each <= LONGEST]),
        [words[k] for k in np.random.default_rng(0).permutation(len(words))[:WORDS]],
    )


def split_sentences(text: str) -> Iterator[tuple[str, str]]:
    """(sentence on one line, what follows it); those too short or too long are left out."""
    for paragraph in PARAGRAPH_END.split(text):
        parts = SENTENCE_END.split(" ".join(paragraph.split()))
        for number, sentence in enumerate(parts, start=1):
            if SHORTEST_SENTENCE <= len(sentence) <= LONGEST_SENTENCE:
                yield sentence, "\n\n" if number == len(parts) else " "


def least_sentences(base: Base, documents: float) -> int:
    """For less than one pair of unrelated documents that share three sentences of six.

    Only documents within twice the shortest count: longer ones need to share more of them, and
    documents of which one is twice as long as the other are not similar at all.
    """
    short = documents * float((base.lengths < 2 * SHORTEST).mean())
    sharing = math.comb(6, 3) ** 2 * math.factorial(3)  # ways, of the cube of the sentences
    return math.ceil((short**2 / 2 * sharing) ** (1 / 3))


def make_originals(plan: Plan, shard: int, block: int) -> list[str]:
    """The documents of a block that are no near-duplicates."""
    base = load_base(plan.text)
    random = np.random.default_rng([plan.seed, shard, block])
    lengths = random.choice(base.lengths, plan.originals)
    counts = lengths // SHORTEST_SENTENCE + 1
    drawn = random.integers(len(base.sentences), size=counts.sum())
    documents = []
    for part, length in zip(np.split(drawn, np.cumsum(counts)[:-1]), lengths, strict=True):
        enough = np.searchsorted(np.cumsum(base.sizes[part]), length) + 1
        documents.append("".join([base.sentences[k] for k in part[:enough].tolist()]).rstrip())
    return documents


def five_grams(text: str) -> set[str]:
    """Of characters of the normalised text."""
    line = " ".join(text.lower().split())
    return {line[k : k + 5] for k in range(max(1, len(line) - 4))}


def jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)


def edit(base: Base, text: str, target: float, random: np.random.Generator) -> tuple[str, float]:
    """(the text with words replaced, its exact similarity to the text), as near `target` as may be
    by more or fewer words: each lowers the similarity."""
    words, original = text.split(" "), five_grams(text)
    order = random.permutation(len(words)).tolist()
    others = random.integers(len(base.words), size=len(words)).tolist()

    @cache
    def edited(count: int) -> tuple[str, float]:
        changed = words.copy()
        for k in order[:count]:
            changed[k] = base.words[others[k]]
        candidate = " ".join(changed)
        return candidate, jaccard(original, five_grams(candidate))

    below = bisect_left(range(len(words)), -target, key=lambda count: -edited(count)[1])
    nearest = edited(max(0, below - 1)), edited(below)
    return min(nearest, key=lambda each: abs(each[1] - target))


def make_shard(plan: Plan, shard: int, blocks: int, folder: str) -> tuple[int, list[Line]]:
    """Write one shard; returns its bytes and the truth of it.

    The original of a near-duplicate is document `back` of the same block of the shard `back`
    before: no two near-duplicates meet there.
    """
    base, truth = load_base(plan.text), []
    with write_shard(Path(folder), f"part-{shard:05}", "none") as lines:
        for block in range(blocks):
            texts = make_originals(plan, shard, block)
            if plan.block:
                random = np.random.default_rng([plan.seed, shard, block, 1])
                back = int(random.integers(min(shard, plan.originals - 1) + 1))
                original = make_originals(plan, shard - back, block)[back]
                changed, similarity = edit(base, original, random.choice(TARGETS), random)
                pair = id_of(shard, block, len(texts)), id_of(shard - back, block, back)
                truth.append({"id": pair[0], "of": pair[1], "jaccard": similarity})
                texts.append(changed)
            for number, text in enumerate(texts):
                name = id_of(shard, block, number)
                lines.write(orjson.dumps({"text": text, "source": "generated", "id": name}))
    return lines.bytes, truth


def id_of(shard: int, block: int, number: int) -> str:
    return f"{shard:05}-{block:05}-{number:03}"


def count_blocks(plan: Plan, size: int) -> list[int]:
    """Blocks of each shard for a corpus of this many bytes.

    ValueError, naming --text, where there are too few sentences for it.
    """
    base = load_base(plan.text)
    if not len(base.lengths):
        raise ValueError(f"--text: no document of {SHORTEST} to {LONGEST} characters among them")
    document = base.lengths.mean() + base.sizes.mean() / 2 + WRAPPING
    if len(base.sentences) < (needed := least_sentences(base, size / document)):
        raise ValueError(
            f"--text holds {len(base.sentences)} sentences; {needed} would keep the unrelated "
            f"documents of {size} bytes apart: more text, or a smaller --size"
        )
    in_block = document * (plan.block or plan.originals)
    total, full = max(1, round(size / in_block)), max(1, round(SHARD_BYTES / in_block))
    return [min(full, total - start) for start in range(0, total, full)]


def generate(
    text: tuple[Path, ...] = (),
    *,
    output: Path,
    size: str = "100MB",
    near_duplicates: float = 0.05,
    seed: int = 1234,
    workers: int = 2,
) -> None:
    """Make a corpus.

    Args:
        text: JSON lines of real text, or folders of them; by default English of this Python.
        output: an empty folder to fill.
        size: of the JSON lines, to within a few per cent; sizes such as 100MB or 5GB.
        near_duplicates: share of the documents, 0 to 0.5.
        seed: another seed draws other documents.
        workers: processes; they do not change what is written.
    """
    if not 0 <= near_duplicates <= 0.5:
        raise ValueError(f"--near-duplicates {near_duplicates}: 0 to 0.5 would work")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} holds files; an empty folder would work")
    block = round(1 / near_duplicates) if near_duplicates else 0
    plan = Plan(tuple(map(str, real_text(text))), seed, block)
    total, shards = parse_size("--size", size), str(output / "shards")
    blocks = count_blocks(plan, total)
    calls = [Call(make_shard, (plan, number, each, shards)) for number, each in enumerate(blocks)]
    truth: list[list[Line]] = [[] for _ in blocks]
    with open_scheduler("local", workers, 0) as scheduler, progress("generate", total, 0) as bar:
        for number, (written, lines) in scheduler.run(calls):
            bar.update(written)
            truth[number] = lines
    with placed(output / "truth.jsonl") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in chain.from_iterable(truth))


@contextmanager
def corpora(
    sizes: Mapping[str, str], rounds: int, text: tuple[Path, ...] = (), **options: Any
) -> Iterator[Path]:
    """A temporary folder with a corpus NAME/ROUND for each of these sizes in every round."""
    with TemporaryDirectory(dir=options.pop("work", None)) as folder:
        for name, size in sizes.items():
            for seed in range(rounds):
                generate(
                    text, output=Path(folder, name, str(seed)), size=size, seed=seed, **options
                )
        yield Path(folder)


def read(folder: Path) -> tuple[list[Line], list[Line]]:
    """The documents of a corpus, and the lines of its truth."""
    files = [*sorted((folder / "shards").iterdir()), folder / "truth.jsonl"]
    *shards, truth = [[*map(orjson.loads, each.read_bytes().splitlines())] for each in files]
    return [*chain.from_iterable(shards)], truth


if __name__ == "__main__":
    cli(generate)
