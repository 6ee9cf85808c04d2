"""A corpus of any size with known near-duplicates, the same for the same seed.

    python benchmarks/corpus_generator.py --text FILE [FILE...] --output DIR --size 1GB

Documents are sentences of real text, drawn at random, in the lengths of the real documents.  In
every block of them (20 at the default share) the last is a near-duplicate: an earlier document
with words replaced one by one until the exact Jaccard similarity of the two sets of character
5-grams (lower case, runs of white space as one blank) is as near as it gets to one of TARGETS.
DIR/shards holds the documents as JSON lines {"text", "source", "id"}, DIR/truth.jsonl a line per
near-duplicate: {"id", "of", "jaccard"}.

A document is a function of the seed and of its shard, block and number.  So the original of a
near-duplicate, which may lie in any of the shards before, is made again instead of remembered, and
neither the number of workers nor (but for the last shard) the size changes a byte.  No document is
the original of two, and no near-duplicate is an original.

Unrelated documents have to stay apart although sentences recur.  A document has at least
SHORTEST = 4 LONGEST_SENTENCE characters, so that a similarity of 0.5 takes three shared sentences
or more; the chance that any two documents share three is kept small by asking for enough different
sentences (`least_sentences`), which is checked before anything is written.
"""

import math
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import tyro
from numpy.typing import NDArray

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.json_lines import find_shards, open_shard, parse_record
from tools.corpus.program import progress
from tools.corpus.scheduler import Call, open_scheduler
from tools.corpus.settings import parse_size
from tools.corpus.shards import concatenate, placed, write_shard

TARGETS = (0.6, 0.66, 0.72, 0.78, 0.85, 0.92, 1.0)
SHORTEST_SENTENCE, LONGEST_SENTENCE = 40, 160  # characters
SHORTEST, LONGEST = 4 * LONGEST_SENTENCE, 300_000  # characters of a document
MOST_TEXT = 128_000_000  # characters of the text that are read; the rest would only take memory
SHARD_BYTES = 32_000_000
WORDS = 20_000  # that replace others
EVALUATIONS = 6  # of the similarity, at most, for one near-duplicate
WRAPPING = 50  # bytes of a line around its text
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
PARAGRAPH_END = re.compile(r"\n\s*\n")

Grams = NDArray[np.uint64]


class Base(NamedTuple):
    """What documents are made of."""

    sentences: list[str]
    """Each with what follows it: a blank, or a blank line at the end of a paragraph."""
    sizes: NDArray[np.int64]
    """Characters of each sentence."""
    lengths: NDArray[np.int64]
    """Characters of the real documents, SHORTEST to LONGEST."""
    words: list[str]
    letters: NDArray[np.uint64]
    """Number of each code point among those in use, less than 2^12."""


class Plan(NamedTuple):
    """What decides a document; the numbers of a block are its documents."""

    text: tuple[str, ...]
    seed: int
    block: int
    """Documents in a block, of which the last is a near-duplicate; 0 for none."""

    @property
    def documents(self) -> int:
        """In a block that are no near-duplicates."""
        return self.block - 1 if self.block else 20


class Place(NamedTuple):
    shard: int
    block: int
    number: int

    @property
    def id(self) -> str:
        return f"{self.shard:05}-{self.block:05}-{self.number:03}"


@cache
def load_base(text: tuple[str, ...]) -> Base:
    """Of files or folders of JSON lines.  About three times the text in memory."""
    sentences: dict[str, str] = {}
    lengths: list[int] = []
    read = 0
    for document in read_texts(text):
        sentences.update(split_sentences(document))
        lengths.append(len(document))
        read += len(document)
        if read > MOST_TEXT:
            break
    endings = [sentence + end for sentence, end in sentences.items()]
    words = sorted({word for each in sentences for word in each.split() if word.isalpha()})
    random = np.random.default_rng(0)
    chosen = random.permutation(len(words))[:WORDS]
    return Base(
        endings,
        np.array([len(each) for each in endings]),
        np.array([each for each in lengths if SHORTEST <= each <= LONGEST]),
        [words[k] for k in chosen],
        number_letters(sentences),
    )


def read_texts(text: tuple[str, ...]) -> Iterator[str]:
    for shard in find_shards([Path(each) for each in text]):
        with open_shard(shard) as lines:
            yield from (parse_record(line)["text"] for line in lines)


def split_sentences(text: str) -> Iterator[tuple[str, str]]:
    """(sentence on one line, what follows it); those too short, too long or cased oddly left out.

    A capital sigma is lower-cased by what stands around it, so that editing a word would change
    its neighbours: sentences with one are left out.
    """
    for paragraph in PARAGRAPH_END.split(text):
        parts = SENTENCE_END.split(" ".join(paragraph.split()))
        for number, sentence in enumerate(parts, start=1):
            fits = SHORTEST_SENTENCE <= len(sentence) <= LONGEST_SENTENCE
            if fits and "\u03a3" not in sentence:
                yield sentence, "\n\n" if number == len(parts) else " "


def number_letters(sentences: dict[str, str]) -> NDArray[np.uint64]:
    letters = sorted(set(chain(" ", *(set(each.lower()) for each in sentences))))
    assert len(letters) < 1 << 12, "a 5-gram of these letters does not fit 60 bits"
    numbers = np.zeros(ord(letters[-1]) + 1, np.uint64)
    numbers[[ord(letter) for letter in letters]] = np.arange(len(letters))
    return numbers


def least_sentences(base: Base, documents: float) -> int:
    """For less than one pair of unrelated documents that share three sentences of six.

    Only documents within twice the shortest count: longer ones need to share more of them, and
    documents of which one is twice as long as the other are not similar at all.
    """
    short = documents * float((base.lengths < 2 * SHORTEST).mean())
    sharing = math.comb(6, 3) ** 2 * math.factorial(3)  # ways, of the cube of the sentences
    return math.ceil((short**2 / 2 * sharing) ** (1 / 3))


def make_documents(plan: Plan, shard: int, block: int) -> list[NDArray[np.int64]]:
    """The numbers of the sentences of each document of a block that is no near-duplicate."""
    base = load_base(plan.text)
    random = np.random.default_rng([plan.seed, shard, block])
    lengths = random.choice(base.lengths, plan.documents)
    drawn = random.integers(len(base.sentences), size=(lengths // SHORTEST_SENTENCE + 1).sum())
    documents = []
    for part, length in zip(
        np.split(drawn, np.cumsum(lengths // SHORTEST_SENTENCE + 1)[:-1]), lengths, strict=True
    ):
        enough = np.searchsorted(np.cumsum(base.sizes[part]), length) + 1
        documents.append(part[:enough])
    return documents


def join(base: Base, document: NDArray[np.int64]) -> str:
    sentences = base.sentences
    return "".join([sentences[k] for k in document.tolist()]).rstrip()


def grams(base: Base, text: str) -> Grams:
    """The set of character 5-grams of the normalised text, sorted; exact, not hashed."""
    normalised = " ".join(text.lower().split())
    letters = base.letters[np.frombuffer(normalised.encode("utf-32-le"), np.uint32)]
    count = len(letters) - 4
    packed = letters[:count].copy()
    for k in range(1, 5):
        packed <<= np.uint64(12)
        packed |= letters[k : k + count]
    packed.sort()
    return packed[np.append(True, packed[1:] != packed[:-1])]


def jaccard(one: Grams, other: Grams) -> float:
    both = np.concatenate([one, other])
    both.sort()
    shared = int((both[1:] == both[:-1]).sum())
    return shared / (len(both) - shared)


def edit(base: Base, text: str, target: float, random: np.random.Generator) -> tuple[str, float]:
    """(the text with words replaced, its exact similarity to the text), as near `target` as found.

    After n edits that each destroy and make c of |A| 5-grams it is (|A| - n c) / (|A| + n c);
    each evaluation corrects c, and the nearest of them is taken.
    """
    if target == 1:
        return text, 1.0
    words, original = text.split(" "), grams(base, text)
    order = random.permutation(len(words)).tolist()
    others = random.integers(len(base.words), size=len(words)).tolist()
    per_edit, best, tried = 9 / len(original), (text, 1.0), {0}
    aim = (1 - target) / (1 + target)
    for _ in range(EVALUATIONS):
        edits = max(1, min(len(words), round(aim / per_edit)))
        if edits in tried:
            break
        tried.add(edits)
        changed = words.copy()
        for k in order[:edits]:
            changed[k] = base.words[others[k]]
        candidate = " ".join(changed)
        found = jaccard(original, grams(base, candidate))
        best = min(best, (candidate, found), key=lambda each: abs(each[1] - target))
        per_edit = max((1 - found) / (1 + found) / edits, 1e-9)
    return best


def make_near_duplicate(plan: Plan, shard: int, block: int) -> tuple[str, dict[str, Any]]:
    """The last document of a block and its line of truth.

    Its original is document `back` of the same block of the shard `back` before: no two
    near-duplicates meet there.
    """
    base = load_base(plan.text)
    random = np.random.default_rng([plan.seed, shard, block, 1])
    back = int(random.integers(min(shard, plan.documents - 1) + 1))
    original = Place(shard - back, block, back)
    text = join(base, make_documents(plan, original.shard, block)[back])
    changed, similarity = edit(base, text, random.choice(TARGETS), random)
    place = Place(shard, block, plan.documents)
    return changed, {"id": place.id, "of": original.id, "jaccard": similarity}


def make_shard(plan: Plan, shard: int, blocks: int, output: str) -> dict[str, Any]:
    """Write one shard and its part of the truth; the facts of the shard."""
    base = load_base(plan.text)
    folder = Path(output)
    with (
        placed(folder / "parts" / f"{shard:05}.jsonl") as truths,
        write_shard(folder / "shards", f"part-{shard:05}", "none") as lines,
    ):
        for block in range(blocks):
            texts = [join(base, each) for each in make_documents(plan, shard, block)]
            if plan.block:
                text, truth = make_near_duplicate(plan, shard, block)
                texts.append(text)
                truths.write(orjson.dumps(truth) + b"\n")
            for number, text in enumerate(texts):
                name = Place(shard, block, number).id
                lines.write(orjson.dumps({"text": text, "source": "generated", "id": name}))
    return lines.facts


def generate(
    text: tuple[Path, ...],
    output: Path,
    size: str = "100MB",
    near_duplicates: float = 0.05,
    seed: int = 1234,
    workers: int = 2,
) -> None:
    """Make a corpus.

    Args:
        text: JSON lines of real text, or folders of them, such as tools.corpus.harvest writes.
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
    plan = Plan(tuple(str(each) for each in text), seed, block)
    total = parse_size("--size", size)
    blocks = count_blocks(plan, total)
    calls = [
        Call(make_shard, (plan, shard, each, str(output))) for shard, each in enumerate(blocks)
    ]
    with open_scheduler("local", workers, 0) as scheduler, progress("generate", total, 0) as bar:
        for _, facts in scheduler.run(calls):
            bar.update(facts["bytes"])
    parts = sorted((output / "parts").iterdir())
    concatenate(parts, output / "truth.jsonl")
    for part in parts:
        part.unlink()
    (output / "parts").rmdir()


def count_blocks(plan: Plan, size: int) -> list[int]:
    """Blocks of each shard for a corpus of this many bytes.

    ValueError, naming --text, where there are too few sentences for it.
    """
    base = load_base(plan.text)
    if not len(base.lengths):
        raise ValueError(f"--text: no document of {SHORTEST} to {LONGEST} characters among them")
    document = base.lengths.mean() + base.sizes.mean() / 2 + WRAPPING
    needed = least_sentences(base, size / document)
    if len(base.sentences) < needed:
        raise ValueError(
            f"--text holds {len(base.sentences)} sentences; {needed} would keep the unrelated "
            f"documents of {size} bytes apart: more text, or a smaller --size"
        )
    in_block = document * (plan.block or plan.documents)
    total, full = max(1, round(size / in_block)), max(1, round(SHARD_BYTES / in_block))
    return [min(full, total - start) for start in range(0, total, full)]


if __name__ == "__main__":
    try:
        tyro.cli(generate)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
