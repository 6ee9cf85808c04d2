"""Cleaning text: repair beside plain ftfy, language identification beside langdetect.

All read the same documents, one of each file in turn. The repaired texts have to be equal; of
languages the table says for how many documents both say English or both do not. langdetect draws
lots, from a fixed seed here, and reads up to 10,000 characters of a document; the step reads up to
4,000, and one row shows whole documents. The last row is the whole of tools/corpus/clean.py, from
jsonl to jsonl. MB are 10^6 bytes of UTF-8 text.
"""

import sys
from collections.abc import Callable
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson

from benchmarks.corpus_generator import real_text
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
from megatron.data.json_lines import find_shards
from tools.corpus import clean
from tools.corpus.language import identify
from tools.corpus.records import Funnel, read_documents
from tools.corpus.repair import repair
from tools.corpus.shards import cut, write_shard

OURS, SPEED, RATIO = "this project", "MB per CPU second", "this project's speed / its"
Job = Callable[[Path, list[str]], list[str]]  # of a file and its texts


def fix_text(_: Path, texts: list[str]) -> list[str]:
    import ftfy

    return [ftfy.fix_text(text) for text in texts]


def langdetect(_: Path, texts: list[str]) -> list[str]:
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    found = []
    for text in texts:
        try:
            found.append(detect(text))
        except LangDetectException:
            found.append("un")
    return found


def whole_step(file: Path, texts: list[str]) -> list[str]:
    settings = clean.Settings(input=(file,), output=file.parent / "out")
    (unit,) = cut([file], 1 << 40)
    with write_shard(settings.output, "part", "none") as shard:
        clean.clean_unit(unit, settings, Funnel(), shard)
    return texts


JOBS: dict[tuple[str, str], Job] = {
    ("repair", OURS): lambda _, texts: [repair(text) for text in texts],
    ("repair", "ftfy"): fix_text,
    ("language", OURS): lambda _, texts: [identify(text) for text in texts],
    ("language", "langdetect"): langdetect,
    ("language of whole texts", OURS): lambda _, texts: [identify(t, len(t)) for t in texts],
    ("whole step", OURS): whole_step,
}


def run(rank: Rank, group: str, name: str, file: str) -> Turn:
    job, source = JOBS[group, name], Path(file)
    texts = [orjson.loads(line)["text"] for line in source.read_bytes().splitlines()]
    found = job(source, texts)
    facts: dict[str, Any] = {"bytes": sum(len(text.encode()) for text in texts)}
    facts["digest"] = sha256("\0".join(found).encode(errors="surrogatepass")).hexdigest()
    if name == "langdetect":
        pairs = zip(found, map(identify, texts), strict=True)
        facts["agree"] = sum((its == "en") == (own == "en") for its, own in pairs) / len(texts)

    def turn() -> dict[str, Any]:
        job(source, texts)
        return facts

    return turn


def main(flags: Flags, text: tuple[Path, ...] = (), megabytes: float = 4) -> None:
    """Compare cleaning.

    Args:
        text: JSON lines of real text, or folders of them; by default English of this Python.
        megabytes: how much of it is read.
    """
    streams = [
        chain.from_iterable(read_documents(unit, Funnel()) for unit in cut([shard], 1 << 40))
        for shard in find_shards(real_text(text))
    ]
    texts, left = [], megabytes * 1e6
    for document in filter(None, chain.from_iterable(zip_longest(*streams))):
        texts.append(document.text)
        if (left := left - len(document.text.encode())) <= 0:
            break
    ascii = sum(len(each) for each in texts if each.isascii()) / sum(map(len, texts))
    with TemporaryDirectory() as folder:
        file = Path(folder, "text.jsonl")
        file.write_bytes(b"".join(orjson.dumps({"text": each}) + b"\n" for each in texts))
        contenders = [
            Contender(
                name=name,
                group=group,
                run=run,
                arguments={"group": group, "name": name, "file": str(file)},
                needs=() if name == OURS else (name,),
                same={"digest": 0} if group == "repair" else {},
            )
            for group, name in JOBS
        ]
        question = Question(
            title="Cleaning text",
            method=__doc__,
            contenders=contenders,
            columns=(
                Column(SPEED, "bytes", "{:.2f}", per="cpu", unit=1e6),
                Column(RATIO, "cpu", "{:.1f}", "its / first"),
                Column("English to both or neither", "agree", "{:.1%}"),
            ),
            result=lambda found: (
                f"The step cleans {found.median('whole step', OURS, SPEED):.0f} MB per CPU second; "
                f"it repairs text {found.median('repair', 'ftfy', RATIO):.1f} times as fast as "
                "plain ftfy, to the same text."
            ),
            rounds=6,
            warm_up=0,
            packages=("ftfy", "pycld2", "langdetect", "tokenizers"),
            settings={"documents": len(texts), "megabytes": megabytes, "ascii": f"{ascii:.2f}"},
            picture="bars",
        )
        ask(question, flags)


if __name__ == "__main__":
    cli(main)
