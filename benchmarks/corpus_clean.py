"""Cleaning text.

All read the same documents, one of each file in turn. The repaired texts have to be equal to those
of plain ftfy; of languages the table says for how many documents langdetect and this project both
say English or both do not. langdetect draws lots, from a fixed seed here, and reads up to 10,000
characters of a document; the step reads up to 4,000, and one row shows whole documents. The last
row is the whole of tools/corpus/clean.py, from jsonl to jsonl. MB are 10^6 bytes of UTF-8 text.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson

from benchmarks.corpus_generator import real_text
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, scratch
from megatron.data.json_lines import find_shards
from tools.corpus import clean
from tools.corpus.language import identify
from tools.corpus.records import Funnel, read_documents
from tools.corpus.repair import repair
from tools.corpus.shards import cut, write_shard

OURS, SPEED, RATIO = "this project", "MB per CPU second", "this project's speed / its"
REPAIR, LANGUAGE, WHOLE, STEP = "repair", "language", "language of whole texts", "whole step"


def job(group: str, name: str, file: Path, texts: list[str]) -> list[str]:
    """What is made of the texts, or is said of them."""
    if name == "ftfy":
        from ftfy import fix_text

        return [*map(fix_text, texts)]
    if name == "langdetect":
        from langdetect import DetectorFactory, LangDetectException, detect

        DetectorFactory.seed, found = 0, []
        for text in texts:
            found.append("unknown")
            with suppress(LangDetectException):  # it says so of text without letters
                found[-1] = detect(text)
        return found
    if group == STEP:
        settings = clean.Settings(input=(file,), output=file.parent / "out")
        with write_shard(settings.output, "part", "none") as shard:
            clean.clean_unit(cut([file], 1 << 40)[0], settings, Funnel(), shard)
        return texts
    how = {REPAIR: repair, LANGUAGE: identify, WHOLE: lambda text: identify(text, len(text))}
    return [how[group](text) for text in texts]


def run(rank: Rank, group: str, name: str, file: str) -> Turn:
    texts = [orjson.loads(line)["text"] for line in Path(file).read_bytes().splitlines()]
    found, own = job(group, name, Path(file), texts), map(identify, texts)
    facts: dict[str, Any] = {"bytes": sum(len(text.encode()) for text in texts)}
    facts["digest"] = sha256("\0".join(found).encode(errors="surrogatepass")).hexdigest()
    if name == "langdetect":
        both = [(its == "en") == (ours == "en") for its, ours in zip(found, own, strict=True)]
        facts["agree"] = sum(both) / len(texts)

    def turn() -> dict[str, Any]:
        job(group, name, Path(file), texts)
        return facts

    return turn


def contenders(
    flags: Flags, text: tuple[Path, ...] = (), megabytes: float = 4
) -> Iterator[Contender]:
    """Clean so much of the text, JSON lines; by default English of this Python."""
    units = cut(find_shards(real_text(text)), 1 << 40)
    streams = zip_longest(*(read_documents(unit, Funnel()) for unit in units))
    file, left = scratch() / "text.jsonl", megabytes * 1e6
    with file.open("wb") as lines:
        for document in filter(None, chain.from_iterable(streams)):
            lines.write(orjson.dumps({"text": document.text}) + b"\n")
            if (left := left - len(document.text.encode())) <= 0:
                break
    peers = {REPAIR: "ftfy", LANGUAGE: "langdetect"}
    for group in (REPAIR, LANGUAGE, WHOLE, STEP):
        for name in filter(None, (OURS, peers.get(group))):
            arguments = {"group": group, "name": name, "file": str(file)}
            needs, same = [name][: name != OURS], {"digest": 0} if group == REPAIR else {}
            yield Contender(name, run, arguments, group=group, needs=needs, same=same)


QUESTION = Question(
    contenders,
    (
        Column(SPEED, "bytes", "{:.2f}", per="cpu", unit=1e6),
        Column(RATIO, "cpu", "{:.1f}", "its / first"),
        Column("English to both or neither", "agree", "{:.1%}"),
    ),
    lambda found: (
        f"The step cleans {found.median(STEP, OURS, SPEED):.0f} MB per CPU second; it repairs text "
        f"{found.median(REPAIR, 'ftfy', RATIO):.1f} times as fast as plain ftfy, to the same text."
    ),
    rounds=6,
    warm_up=0,
    picture="bars",
)

if __name__ == "__main__":
    QUESTION.run()
