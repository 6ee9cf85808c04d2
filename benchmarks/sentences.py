"""Sentence splitting for BERT: which library.

Each gets the 60 cases of sentence_cases.txt (abbreviations, initials, quotes, numbers, lists,
ellipses, lines without a full stop), which were cut before any library had seen them, and then a
text, document by document, until its CPU seconds are over. Cuts are compared by how many characters
that are no white space stand before them. Speed is in MB of UTF-8 per CPU second. A sentence that
begins with a lower-case letter is mostly one cut too often; "changed" are documents of which such
characters were lost, doubled or moved.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_generator import real_text
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from tools.corpus.records import Funnel, read_documents
from tools.corpus.shards import cut

CASES = Path(__file__).with_name("sentence_cases.txt")
OURS, RIGHT, SPEED = "tools/sentences.py", "right of 60", "MB/s"
Split = Callable[[str], Sequence[str]]


def syntok(library: Any) -> Split:
    def split(text: str) -> list[str]:
        starts = [s[0].offset for paragraph in library.analyze(text) for s in paragraph]
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]

    return split


def spacy(library: Any) -> Split:
    language = library.blank("en")
    language.add_pipe("sentencizer")
    return lambda text: [sentence.text for sentence in language(text).sents]


LIBRARIES: dict[str, tuple[str, Callable[[Any], Split]]] = {  # module, what makes its function
    OURS: ("tools.sentences", lambda library: library.split_sentences),
    "sentencex": ("sentencex", lambda library: lambda text: library.segment("en", text)),
    "pysbd": ("pysbd", lambda library: library.Segmenter(language="en", clean=False).segment),
    "syntok": ("syntok.segmenter", syntok),
    "spacy": ("spacy", spacy),
    "blingfire": ("blingfire", lambda lib: lambda text: lib.text_to_sentences(text).split("\n")),
}


def dense(text: str) -> str:
    return "".join(text.split())


def marks(split: Split) -> Figures:
    """right: cases without a wrong cut. extra, missed: cuts of all cases."""
    found = {"right": 0, "extra": 0, "missed": 0}
    for line in CASES.read_text("utf-8").splitlines()[1:]:
        case = line.replace("\\n", "\n").split(" | ")
        own, wanted = (
            {*accumulate(len(dense(each)) for each in sentences)} - {0}
            for sentences in (split(" ".join(case)), case)
        )
        found["right"] += own == wanted
        found["extra"] += len(own - wanted)
        found["missed"] += len(wanted - own)
    return found


def run(rank: Rank, library: str, text: str, seconds: float) -> Turn:
    module, make = LIBRARIES[library]
    split = make(import_module(module))
    scored, (unit,) = marks(split), cut([Path(text)], 1 << 40)

    def turn() -> Figures:
        cpu, size, count, lower, changed = 0.0, 0, 0, 0, 0
        for document in read_documents(unit, Funnel()):
            start = time.process_time()
            sentences = split(document.text)
            cpu += time.process_time() - start
            size += len(document.text.encode())
            count += len(sentences)
            lower += sum(each.lstrip()[:1].islower() for each in sentences)
            changed += dense("".join(sentences)) != dense(document.text)
            if cpu > seconds:
                break
        return {"cpu": cpu, "bytes": size, "lower": lower / count, "changed": changed, **scored}

    return turn


def contenders(
    flags: Flags, text: tuple[Path, ...] = (), seconds: float = 5.0
) -> Iterator[Contender]:
    """Split files of JSON lines, by default English of this Python, for some CPU seconds each."""
    for file in real_text(text):
        for library, (module, _) in LIBRARIES.items():
            arguments = {"library": library, "text": str(file), "seconds": seconds}
            group = file.name.partition(".")[0]
            yield Contender(library, run, arguments, group=group, needs=[module])


QUESTION = Question(
    contenders,
    (
        Column(RIGHT, "right", "{:.0f}"),
        Column("extra cuts", "extra", "{:.0f}"),
        Column("missed cuts", "missed", "{:.0f}"),
        Column(SPEED, "bytes", "{:.2f}", per="cpu", unit=1e6),
        Column("begin in lower case", "lower", "{:.1%}"),
        Column("documents changed", "changed", "{:.0f}"),
    ),
    lambda found: (
        f"{OURS} (sentencex, a line at a time) is right in "
        f"{found.median(found.rows[0][0], OURS, RIGHT):.0f} of 60 cases."
    ),
    rounds=1,
    warm_up=0,
    picture="bars",
    drawn=(RIGHT, SPEED),
)

if __name__ == "__main__":
    QUESTION.run()
