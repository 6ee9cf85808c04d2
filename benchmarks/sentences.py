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
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_generator import real_text
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from megatron.data.json_lines import open_shard, parse_record

CASES = Path(__file__).with_name("sentence_cases.txt")
OURS, RIGHT, SPEED = "tools/sentences.py", "right of 60", "MB/s"
Split = Callable[[str], list[str]]


def spacy(library: Any) -> Split:
    language = library.blank("en")
    language.add_pipe("sentencizer")
    return lambda text: [sentence.text for sentence in language(text).sents]


def syntok(text: str, library: Any) -> list[str]:
    starts = [sentence[0].offset for part in library.analyze(text) for sentence in part]
    return [text[start:stop] for start, stop in pairwise([*starts, len(text)])]


LIBRARIES: dict[str, tuple[str, Callable[[Any], Split]]] = {  # module, and its function
    OURS: ("tools.sentences", lambda own: own.split_sentences),
    "sentencex": ("sentencex", lambda own: lambda text: own.segment("en", text)),
    "pysbd": ("pysbd", lambda own: own.Segmenter(language="en", clean=False).segment),
    "syntok": ("syntok.segmenter", lambda own: lambda text: syntok(text, own)),
    "spacy": ("spacy", spacy),
    "blingfire": ("blingfire", lambda own: lambda text: own.text_to_sentences(text).split("\n")),
}


def dense(text: str) -> str:
    return "".join(text.split())


def marks(split: Split) -> Figures:
    """right: cases without a wrong cut. extra, missed: cuts of all cases."""
    found = {"right": 0, "extra": 0, "missed": 0}
    for line in CASES.read_text("utf-8").splitlines()[1:]:
        case = line.replace("\\n", "\n").split(" | ")
        own, wanted = (
            {*accumulate(len(dense(sentence)) for sentence in sentences)} - {0}
            for sentences in (split(" ".join(case)), case)
        )
        found["right"] += own == wanted
        found["extra"] += len(own - wanted)
        found["missed"] += len(wanted - own)
    return found


def run(rank: Rank, library: str, text: str, seconds: float) -> Turn:
    module, make = LIBRARIES[library]
    split = make(import_module(module))

    def turn() -> Figures:
        found = marks(split) | dict.fromkeys(("cpu", "bytes", "sentences", "lower", "changed"), 0)
        with open_shard(text) as lines:
            for document in (parse_record(line)["text"] for line in lines):
                start = time.process_time()
                sentences = split(document)
                found["cpu"] += time.process_time() - start
                found["bytes"] += len(document.encode())
                found["sentences"] += len(sentences)
                found["lower"] += sum(each.lstrip()[:1].islower() for each in sentences)
                found["changed"] += dense("".join(sentences)) != dense(document)
                if found["cpu"] > seconds:
                    break
        return found

    return turn


def contenders(flags: Flags, text: tuple[Path, ...] = (), seconds: int = 5) -> Iterator[Contender]:
    """Split files of JSON lines, by default English of this Python, for so many CPU seconds."""
    for file in real_text(text):
        for library, (module, _) in LIBRARIES.items():
            arguments = {"library": library, "text": str(file), "seconds": seconds}
            group, needs = file.name.partition(".")[0], [module.partition(".")[0]]
            yield Contender(library, run, arguments, group=group, needs=needs)


COLUMNS = (
    Column(RIGHT, "right", "{:.0f}"),
    Column("extra cuts", "extra", "{:.0f}"),
    Column("missed cuts", "missed", "{:.0f}"),
    Column(SPEED, "bytes", "{:.2f}", per="cpu", unit=1e6),
    Column("begin in lower case", "lower", "{:.1%}", per="sentences"),
    Column("documents changed", "changed", "{:.0f}"),
)
QUESTION = Question(
    contenders,
    COLUMNS,
    lambda found: f"{OURS} cuts {found.median(*found.rows[0], RIGHT):.0f} of 60 cases as wanted.",
    rounds=1,
    warm_up=0,
    picture="bars",
    drawn=(RIGHT, SPEED),
)

if __name__ == "__main__":
    QUESTION.run()
