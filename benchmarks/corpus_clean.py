"""Cleaning text: repair beside plain ftfy, language identification beside langdetect.

    python benchmarks/corpus_clean.py --input SHARD [SHARD ...] [--megabytes N] [--rounds N]
                                      [--json FILE]

The peer of language identification is no requirement of the project: pip install langdetect==1.0.9.
Both of a row read the same documents, one after the other, in one process; which is first changes
from round to round.  Before anything is timed the repaired texts are compared, all of them, and of
the languages it is printed how many agree.  langdetect reads up to 10,000 characters of a document,
the step up to 4,000, and a row of its own shows whole documents.  The step's row is the whole of
tools/corpus/clean.py, from jsonl to jsonl.  MB are 10^6 bytes of UTF-8 text, seconds those of the
CPU.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ftfy
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from megatron.data.json_lines import find_shards
from tools.corpus import clean
from tools.corpus.language import identify
from tools.corpus.records import Funnel, read_documents
from tools.corpus.repair import repair
from tools.corpus.shards import cut, write_shard

Function = Callable[[str], str]


@dataclass(frozen=True)
class Comparison:
    """One row: MB per CPU second of each round; the peer's are empty if it has none."""

    job: str
    peer: str
    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


def read_texts(shards: Sequence[Path], most: int) -> list[str]:
    """The texts of the shards, one document of each in turn, until there are `most` bytes."""
    texts: list[str] = []
    streams = [
        itertools.chain.from_iterable(
            read_documents(unit, Funnel()) for unit in cut([shard], 1 << 30)
        )
        for shard in shards
    ]
    for document in itertools.chain.from_iterable(itertools.zip_longest(*streams)):
        if document is not None:
            texts.append(document.text)
            most -= len(document.text.encode())
        if most <= 0:
            break
    return texts


def size_of(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def load_langdetect() -> Function:
    """langdetect, which draws lots; from a fixed seed here."""
    try:
        import langdetect
    except ImportError:
        sys.exit("error: langdetect is missing: pip install langdetect==1.0.9")
    langdetect.DetectorFactory.seed = 0

    def detect(text: str) -> str:
        try:
            return str(langdetect.detect(text))
        except langdetect.LangDetectException:
            return "un"

    return detect


def speed(function: Function, texts: Sequence[str]) -> float:
    """MB per CPU second."""
    start = time.process_time()
    for text in texts:
        function(text)
    return size_of(texts) / (time.process_time() - start) / 1e6


def compare(
    job: str, ours: Function, peer: str, theirs: Function, texts: Sequence[str], rounds: int
) -> Comparison:
    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        pair = [("ours", ours), ("theirs", theirs)]
        for name, function in pair if number % 2 else reversed(pair):
            speeds[name].append(speed(function, texts))
    return Comparison(job, peer, **speeds)


def whole(text: str) -> str:
    return identify(text, most=len(text))


def step_speed(texts: Sequence[str]) -> float:
    """MB per CPU second of the step, from a shard to a shard."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "in.jsonl")
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        settings = clean.Settings(input=(source,), output=Path(name, "out"))
        (unit,) = cut([source], 1 << 40)
        start = time.process_time()
        with write_shard(settings.output, "part", "none") as shard:
            clean.clean_unit(unit, settings, Funnel(), shard)
        return size_of(texts) / (time.process_time() - start) / 1e6


def agreement(ours: Function, theirs: Function, texts: Sequence[str]) -> str:
    pairs = [(ours(text), theirs(text)) for text in texts]
    same = sum((first == "en") == (second == "en") for first, second in pairs)
    return f"{same} of {len(pairs)} documents are English to both or to neither"


def table(results: Sequence[Comparison]) -> str:
    rows = []
    for each in results:
        theirs = [spread(each.theirs, 2), spread(each.ratios)] if each.theirs else ["-", "-"]
        rows.append([each.job, each.peer, spread(each.ours), *theirs])
    return markdown(["job", "peer", "ours, MB/s", "peer, MB/s", "ours / peer"], rows)


def corpus_clean(
    input: tuple[Path, ...],
    megabytes: float = 4,
    rounds: int = 6,
    json_file: JsonFile = None,
) -> None:
    """Compare and print.

    Args:
        input: shards of jsonl; a document is taken of each in turn.
        megabytes: how much text is read.
        rounds: times that the two are timed in turn; an even number lets each go first as often.
        json_file: where every round's figures are written.
    """
    detect = load_langdetect()
    texts = read_texts(find_shards(input), int(megabytes * 1e6))
    assert [repair(text) for text in texts] == [ftfy.fix_text(text) for text in texts]
    record = facts("ftfy", "pycld2", "langdetect", "tokenizers") | {
        "documents": len(texts),
        "bytes": size_of(texts),
        "ascii": round(size_of([text for text in texts if text.isascii()]) / size_of(texts), 3),
        "rounds": rounds,
    }
    print(told(record))
    print(agreement(identify, detect, texts))
    results = [
        compare("repair", repair, "ftfy", ftfy.fix_text, texts, rounds),
        compare("language", identify, "langdetect", detect, texts, rounds),
        Comparison("language, whole texts", "-", [speed(whole, texts) for _ in range(rounds)], []),
        Comparison("whole step", "-", [step_speed(texts) for _ in range(rounds)], []),
    ]
    print(table(results))
    write_json(json_file, record | {"results": [asdict(each) for each in results]})


if __name__ == "__main__":
    tyro.cli(corpus_clean)
