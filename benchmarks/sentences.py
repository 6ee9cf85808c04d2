"""Libraries that split text into sentences: cases cut by hand, and speed on real text.

Each gets the 60 cases of sentence_cases.txt (abbreviations, initials, quotes, numbers, lists,
ellipses, lines without a full stop), which were cut before any library had seen them, and then a
text, document by document, until its CPU seconds are over. Cuts are compared by how many characters
that are no white space stand before them. Speed is in MB of UTF-8 per CPU second. A sentence that
begins with a lower-case letter is mostly one cut too often; "changed" are documents of which such
characters were lost, doubled or moved.
"""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_generator import real_text
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
from benchmarks.report import Results
from tools.corpus.records import Funnel, read_documents
from tools.corpus.shards import cut
from tools.sentences import split_sentences

CASES = Path(__file__).with_name("sentence_cases.txt")
OURS, SPEED = "tools/sentences.py", "MB/s"
Split = Callable[[str], Sequence[str]]


def sentencex() -> Split:
    import sentencex

    return lambda text: sentencex.segment("en", text)


def pysbd() -> Split:
    import pysbd

    return pysbd.Segmenter(language="en", clean=False).segment


def syntok() -> Split:
    from syntok import segmenter

    def split(text: str) -> list[str]:
        paragraphs = segmenter.analyze(text)
        starts = [sentence[0].offset for paragraph in paragraphs for sentence in paragraph]
        stops = [*starts[1:], len(text)]
        return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]

    return split


def spacy() -> Split:
    import spacy

    language = spacy.blank("en")
    language.add_pipe("sentencizer")
    return lambda text: [sentence.text for sentence in language(text).sents]


def blingfire() -> Split:
    import blingfire

    return lambda text: blingfire.text_to_sentences(text).split("\n")


LIBRARIES: dict[str, Callable[[], Split]] = {
    OURS: lambda: split_sentences,
    "sentencex": sentencex,
    "pysbd": pysbd,
    "syntok": syntok,
    "spacy": spacy,
    "blingfire": blingfire,
}


def dense(text: str) -> str:
    return "".join(text.split())


def cuts(sentences: Sequence[str]) -> set[int]:
    """Characters that are no white space up to the end of each sentence."""
    return {*accumulate(map(len, map(dense, sentences)))} - {0}


def marks(split: Split) -> dict[str, int]:
    """right: cases without a wrong cut. extra, missed: cuts of all cases."""
    found = {"right": 0, "extra": 0, "missed": 0}
    for line in CASES.read_text("utf-8").splitlines()[1:]:
        case = line.replace("\\n", "\n").split(" | ")
        own, wanted = cuts(split(" ".join(case))), cuts(case)
        found["right"] += own == wanted
        found["extra"] += len(own - wanted)
        found["missed"] += len(wanted - own)
    return found


def run(rank: Rank, library: str, text: str, seconds: float) -> Turn:
    split, (unit,) = LIBRARIES[library](), cut([Path(text)], 1 << 40)
    scored = marks(split)

    def turn() -> dict[str, Any]:
        spent = [0.0, 0.0]
        size = count = lower = changed = 0
        for document in read_documents(unit, Funnel()):
            start = time.perf_counter(), time.process_time()
            sentences = split(document.text)
            spent[0] += time.perf_counter() - start[0]
            spent[1] += time.process_time() - start[1]
            size += len(document.text.encode())
            count += len(sentences)
            lower += sum(each.lstrip()[:1].islower() for each in sentences)
            changed += dense("".join(sentences)) != dense(document.text)
            if spent[1] > seconds:
                break
        facts = {"bytes": size, "lower": lower / count, "changed": changed}
        return {"wall": spent[0], "cpu": spent[1], **facts, **scored}

    return turn


def result(found: Results) -> str:
    group = found.rows[0][0]
    right, speed = (found.median(group, OURS, each) for each in ("right of 60", SPEED))
    which = f"{OURS} (sentencex, a line at a time)"
    return f"{which} cuts {right:.0f} of 60 cases as wanted, at {speed:.0f} MB/s."


def main(flags: Flags, text: tuple[Path, ...] = (), seconds: float = 5.0) -> None:
    """Compare libraries.

    Args:
        text: files of JSON lines, a group each; by default English of this Python.
        seconds: CPU seconds that a library gets for each text.
    """
    contenders = [
        Contender(
            name=library,
            group=file.name.partition(".")[0],
            run=run,
            arguments={"library": library, "text": str(file), "seconds": seconds},
            needs=() if library == OURS else (library,),
        )
        for file in real_text(text)
        for library in LIBRARIES
    ]
    question = Question(
        title="Sentence splitting for BERT: which library",
        method=__doc__,
        contenders=contenders,
        columns=(
            Column("right of 60", "right", "{:.0f}"),
            Column("extra cuts", "extra", "{:.0f}"),
            Column("missed cuts", "missed", "{:.0f}"),
            Column(SPEED, "bytes", "{:.2f}", per="cpu", unit=1e6),
            Column("begin in lower case", "lower", "{:.1%}"),
            Column("documents changed", "changed", "{:.0f}"),
        ),
        result=result,
        rounds=1,
        warm_up=0,
        packages=("sentencex", "pysbd", "syntok", "spacy", "blingfire"),
        settings={"seconds_each": seconds},
        picture="bars",
        drawn=("right of 60", SPEED),
    )
    ask(question, flags)


if __name__ == "__main__":
    cli(main)
