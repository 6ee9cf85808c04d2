"""The stages from RACE's archives to text that contains no evaluation data."""

from itertools import pairwise
from pathlib import Path

from tools.command import on_all, python
from tools.paper.data import LAMBADA, RACE_DEV, RACE_TRAIN, WIKITEXT103
from tools.stages import Stage

CORPUS_STEPS = ("extract", "clean", "decontaminate", "dedup", "split")
DEV_SHARD = "part-00000-000.jsonl"  # the only shard of an archive as small as this


def corpus_stages(data: Path, output: Path, cores: int) -> list[Stage]:
    """corpus: the articles of RACE's two archives; clean: all later steps."""
    folder = output / "corpus"
    archives = {"extract": data / RACE_TRAIN, "race-dev": data / RACE_DEV}
    extract = [
        python("-m", "tools.corpus.extract", "--input", archive, "--format", "json",
               "--key", "article", "--source", "race", "--output", folder / name)
        for name, archive in archives.items()
    ]  # fmt: skip
    evaluation = [*evaluation_files(data).values(), folder / "race-dev" / DEV_SHARD]
    more: dict[str, list[str | Path]] = {"decontaminate": ["--evaluation", *evaluation]}
    steps = [
        on_all(python("-m", f"tools.corpus.{step}", "--input", folder / before,
                      "--output", folder / step, *more.get(step, [])), cores)
        for before, step in pairwise(CORPUS_STEPS)
    ]  # fmt: skip
    corpus = Stage(
        name="corpus",
        commands=tuple(extract),
        inputs=tuple(archives.values()),
        outputs=tuple(folder / name for name in archives),
    )
    clean = Stage(
        name="clean",
        commands=tuple(steps),
        inputs=tuple(evaluation_files(data).values()),
        outputs=tuple(folder / step for step in CORPUS_STEPS[1:]),
    )
    return [corpus, clean]


def evaluation_files(data: Path) -> dict[str, Path]:
    """Files by the task that reads them."""
    return {"wikitext103": data / WIKITEXT103, "lambada": data / LAMBADA}


def training_text(output: Path) -> Path:
    return output / "corpus" / "split" / "train"


def heldout_text(output: Path) -> Path:
    return output / "corpus" / "split" / "valid"
