"""Libraries that split text into sentences: cases cut by hand, and speed on real text.

    python benchmarks/sentences.py --text JSONL [JSONL ...] [--seconds S] [--json FILE]

Each contestant gets the cases of sentence_cases.txt, and then every text document by document until
its seconds are over.  Cuts are compared by how many characters that are no white space stand before
them; a contestant that loses or adds such characters is told of.  Speed is in MB of UTF-8 per CPU
second.  A sentence that begins with a lower-case letter is mostly one cut too often.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import JsonFile, facts, installed, markdown, told, write_json
from tools.corpus.records import Funnel, read_documents
from tools.corpus.shards import cut
from tools.sentences import split_sentences

CASES = Path(__file__).with_name("sentence_cases.txt")
Split = Callable[[str], list[str]]


def make_pysbd() -> Split:
    import pysbd

    return pysbd.Segmenter(language="en", clean=False).segment  # type: ignore[no-any-return]


def make_syntok() -> Split:
    from syntok import segmenter

    def split(text: str) -> list[str]:
        paragraphs = segmenter.analyze(text)
        starts = [sentence[0].offset for paragraph in paragraphs for sentence in paragraph]
        stops = [*starts[1:], len(text)]
        return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]

    return split


def make_spacy() -> Split:
    import spacy

    language = spacy.blank("en")
    language.add_pipe("sentencizer")
    return lambda text: [sentence.text for sentence in language(text).sents]


def make_blingfire() -> Split:
    import blingfire

    return lambda text: blingfire.text_to_sentences(text).split("\n")


def make_sentencex() -> Split:
    import sentencex

    return lambda text: sentencex.segment("en", text)


CONTESTANTS: dict[str, tuple[str | None, Callable[[], Split]]] = {
    "tools/sentences.py": (None, lambda: split_sentences),
    "sentencex": ("sentencex", make_sentencex),
    "pysbd": ("pysbd", make_pysbd),
    "syntok": ("syntok", make_syntok),
    "spaCy's sentencizer": ("spacy", make_spacy),
    "blingfire": ("blingfire", make_blingfire),
}


@dataclass
class Score:
    right: int = 0
    """Cases without a wrong cut."""
    extra: int = 0
    """Cuts where there should be none."""
    missed: int = 0
    """Cuts that should be there."""


@dataclass
class Reading:
    """What a contestant did to one text."""

    megabytes: float = 0.0
    seconds: float = 0.0
    sentences: int = 0
    lower: int = 0
    """Of the sentences, that begin with a lower-case letter."""
    changed: int = 0
    """Documents of which characters were lost, added or moved."""


def read_cases() -> Iterator[list[str]]:
    """The sentences of each case."""
    for line in CASES.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            yield line.replace("\\n", "\n").split(" | ")


def cuts(sentences: Sequence[str]) -> list[int]:
    """Characters that are no white space up to the end of each sentence that has any."""
    ends, count = [], 0
    for sentence in sentences:
        if length := len("".join(sentence.split())):
            count += length
            ends.append(count)
    return ends


def score(split: Split) -> Score:
    result = Score()
    for sentences in read_cases():
        found, expected = set(cuts(split(" ".join(sentences)))), set(cuts(sentences))
        result.right += found == expected
        result.extra += len(found - expected)
        result.missed += len(expected - found)
    return result


def read(split: Split, documents: Sequence[str], limit: float) -> Reading:
    """limit: CPU seconds after which the rest is left."""
    result = Reading()
    for text in documents:
        start = time.process_time()
        sentences = split(text)
        result.seconds += time.process_time() - start
        result.megabytes += len(text.encode()) / 1e6
        result.sentences += len(sentences)
        result.lower += sum(sentence.lstrip()[:1].islower() for sentence in sentences)
        result.changed += "".join("".join(sentences).split()) != "".join(text.split())
        if result.seconds > limit:
            break
    return result


def row(name: str, marks: Score, readings: Sequence[Reading]) -> list[str]:
    lower = sum(each.lower for each in readings) / sum(each.sentences for each in readings)
    return [
        name,
        f"{marks.right}",
        f"{marks.extra}",
        f"{marks.missed}",
        *(f"{each.megabytes / each.seconds:.2f}" for each in readings),
        f"{lower:.1%}",
        f"{sum(each.changed for each in readings)}",
    ]


def benchmark(text: tuple[Path, ...], seconds: float = 5.0, json_file: JsonFile = None) -> None:
    """Run and print.

    Args:
        text: JSON lines of real text, a column each.
        seconds: CPU seconds that a contestant gets for each text.
        json_file: where all figures are written.
    """
    documents = [
        [each.text for unit in cut([file], 1 << 40) for each in read_documents(unit, Funnel())]
        for file in text
    ]
    record = facts("sentencex", "pysbd", "syntok", "spacy", "blingfire")
    runs, rows = {}, []
    for name, make in installed(CONTESTANTS).items():
        split = make()
        marks = score(split)
        readings = [read(split, each, seconds) for each in documents]
        rows.append(row(name, marks, readings))
        runs[name] = {"cases": asdict(marks), "texts": [asdict(each) for each in readings]}
    print(told(record))
    header = ["", f"right of {sum(1 for _ in read_cases())}", "extra cuts", "missed cuts",
              *(f"{file.name.partition('.')[0]}, MB/s" for file in text),
              "begin in lower case", "documents changed"]  # fmt: skip
    print(markdown(header, rows))
    write_json(json_file, record | {"runs": runs})


if __name__ == "__main__":
    tyro.cli(benchmark)
