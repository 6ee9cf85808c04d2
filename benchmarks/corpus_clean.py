"""Cleaning text, and splitting it into sentences.

All read the same documents. Repaired texts have to equal those of plain ftfy. For languages, "as
this project" is the share of documents that both call English, or both do not. langdetect is
random, here with a fixed seed, and reads up to 10,000 characters of a document, where this project
reads 4,000. The 60 cases of sentence_cases.txt (abbreviations, initials, quotes, numbers, lists,
lines without a full stop) were split by hand before any library was run on them. The last row is
the whole of tools/corpus/clean.py, from jsonl to jsonl. MB are 10^6 bytes of UTF-8 text.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.corpus_generator import texts_of
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from megatron.libraries import Library
from tools.corpus.files import DocumentCounts, cut, write_shard

orjson = Library("orjson")

CASES = Path(__file__).with_name("sentence_cases.txt")
OURS, SPEED, RATIO = "this project", "MB per CPU second", "this project's speed / its"
REPAIR, LANGUAGE, SENTENCES, STEP = "repair", "language", "sentences", "whole step"

Function = Callable[[str], Any]


def langdetect(module: Any) -> Function:
    module.DetectorFactory.seed = 0

    def is_english(text: str) -> bool:
        try:
            return bool(module.detect(text) == "en")
        except module.LangDetectException:  # raised for text without letters
            return False

    return is_english


def whole_step(module: Any) -> Function:
    def clean_file(file: str) -> None:
        settings = module.Settings(input=(Path(file),), output=Path(f"{file}.cleaned"))
        with write_shard(settings.output, "part", "none") as shard:
            module.clean_unit(cut([Path(file)], 1 << 40)[0], settings, DocumentCounts(), shard)

    return clean_file


# By group and contender: a module, and how to get a function of a text (STEP: of a file) from it.
FUNCTIONS: dict[tuple[str, str], tuple[str, Callable[[Any], Function]]] = {
    (REPAIR, OURS): ("tools.corpus.repair", lambda m: m.repair),
    (REPAIR, "ftfy"): ("ftfy", lambda m: m.fix_text),
    (LANGUAGE, OURS): ("tools.corpus.language", lambda m: lambda t: m.identify(t) == "en"),
    (LANGUAGE, "langdetect"): ("langdetect", langdetect),
    (SENTENCES, OURS): ("tools.corpus.tokenize.encode", lambda m: m.split_sentences),
    (SENTENCES, "sentencex"): ("sentencex", lambda m: lambda t: m.segment("en", t)),
    (SENTENCES, "pysbd"): ("pysbd", lambda m: m.Segmenter("en", clean=False).segment),
    (SENTENCES, "blingfire"): ("blingfire", lambda m: lambda t: m.text_to_sentences(t).split("\n")),
    (STEP, OURS): ("tools.corpus.clean", whole_step),
}


def load(group: str, name: str) -> Function:
    module, make = FUNCTIONS[group, name]
    return make(import_module(module))


def cuts(sentences: Sequence[str]) -> set[int]:
    """For each sentence, the number of characters up to its end, white space not counted."""
    return {*accumulate(len("".join(each.split())) for each in sentences)} - {0}


def marks(split: Function, file: Path = CASES) -> Figures:
    """right: number of cases without a wrong cut. extra, missed: cuts over all cases."""
    found = Counter[str]()
    for line in file.read_text("utf-8").splitlines()[1:]:
        case = line.replace("\\n", "\n").split(" | ")
        own, wanted = cuts(split(" ".join(case))), cuts(case)
        found.update(right=own == wanted, extra=len(own - wanted), missed=len(wanted - own))
    return dict(found)


def run(rank: Rank, group: str, name: str, file: str) -> Turn:
    texts, do = [*texts_of([Path(file)])], load(group, name)
    facts: Figures = {"bytes": sum(len(text.encode()) for text in texts)}
    if group == SENTENCES:
        facts |= marks(do)
    elif group != STEP:
        ours = load(group, OURS)
        same = [name == OURS or do(text) == ours(text) for text in texts]
        facts["as_ours"] = sum(same) / len(texts)
    inputs = [file] if group == STEP else texts

    def turn() -> Figures:
        for each in inputs:
            do(each)
        return facts

    return turn


def contenders(
    flags: Flags, text: tuple[Path, ...] = (), megabytes: float = 4
) -> Iterator[Contender]:
    """Clean so many megabytes of `text`, JSON lines; by default English of this Python's files."""
    file = scratch() / "text.jsonl"
    lines = (orjson.dumps({"text": each}) + b"\n" for each in texts_of(text, megabytes))
    file.write_bytes(b"".join(lines))
    for (group, name), (module, _) in FUNCTIONS.items():
        arguments = {"group": group, "name": name, "file": str(file)}
        same = {"as_ours": 0} if group == REPAIR else {}
        yield Contender(name, run, arguments, group=group, needs=[module], same=same)


QUESTION = Question(
    contenders,
    (
        Column(SPEED, "bytes", "{:.2f}", per="cpu", unit=1e6),
        Column(RATIO, "cpu", "{:.1f}", "its / first"),
        Column("as this project", "as_ours", "{:.1%}"),
        Column("right of 60", "right", "{:.0f}"),
        Column("extra cuts", "extra", "{:.0f}"),
        Column("missed cuts", "missed", "{:.0f}"),
    ),
    lambda found: (
        f"The step cleans {found.median(STEP, OURS, SPEED):.0f} MB per CPU second; it repairs text "
        f"{found.median(REPAIR, 'ftfy', RATIO):.1f} times as fast as plain ftfy, to the same text, "
        f"and cuts {found.median(SENTENCES, OURS, 'right of 60'):.0f} of 60 cases as wanted."
    ),
    rounds=6,
    warm_up=0,
)

if __name__ == "__main__":
    QUESTION.run()
