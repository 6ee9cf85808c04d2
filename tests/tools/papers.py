"""A small folder laid out as MEGATRON_TEST_DATA, of the English that Python itself holds; and the
experiments that read it, as their users start them."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import pytest

from megatron.config.parse import parse
from tests.programs import run_command
from tests.tools.corpus.lines import write_jsonl
from tools.experiments import runner
from tools.experiments.runner import ROOT
from tools.experiments.stages import LAMBADA, RACE_DEV, RACE_TRAIN, WIKITEXT103

WIKITEXT = """
 = Statements =

 An assignment binds a name ; it is one of 3 @,@ 000 statements .

 = = Loops = =

 A loop ( of any kind ) runs until it ends .
"""
LONGEST = 1500  # characters of an article
SHORTEST = 800


def articles() -> Iterator[str]:
    """Parts of Python's topics, each long enough to be kept as a document."""
    for _, text in sorted(topics.items()):
        for start in range(0, len(text) - SHORTEST, LONGEST):
            yield text[start : start + LONGEST]


def passage(article: str, number: int) -> dict[str, Any]:
    """As RACE has them: an article, two questions, four options each, the right letters."""
    return {
        "article": article,
        "questions": ["What is it about?", "It is about  _  ."],
        "options": [["names", "loops", "types", "files"], ["values", "calls", "text", "bytes"]],
        "answers": ["ABCD"[number % 4], "ABCD"[number // 4 % 4]],
        "id": f"{number}.txt",
    }


def write_race(archive: Path, root: str, texts: Iterator[str]) -> None:
    """An archive as released: root/middle/1.txt, root/high/2.txt, ..."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=0) as members:
        for number, text in enumerate(texts):
            content = json.dumps(passage(text, number)).encode()
            level = ("middle", "high")[number % 2]
            member = tarfile.TarInfo(f"{root}/{level}/{number}.txt")
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))


def write_folder(folder: Path) -> Path:
    """The files that scripts/paper/miniature.sh asks for."""
    texts = articles()
    write_race(folder / RACE_DEV, "dev", islice(texts, 10))
    write_race(folder / RACE_TRAIN, "RACE/train", islice(texts, 200))
    lambada = [{"text": "One two three and so to bed"}, {"text": "It ends with the last word"}]
    write_jsonl(folder / LAMBADA, lambada)
    (folder / WIKITEXT103).parent.mkdir()
    (folder / WIKITEXT103).write_text(WIKITEXT)
    return folder


def small_preset(folder: Path, name: str, sizes: Mapping[str, object]) -> Path:
    """The preset of this name with a toy's sizes, by setting."""
    text = (ROOT / "scripts" / "presets" / f"{name}.toml").read_text()
    for key, value in sizes.items():
        names = r"lr_warmup_\w+" if key == "lr_warmup_iters" else key
        text, count = re.subn(rf"(?m)^{names} = .*$", f"{key} = {value}", text)
        assert count == 1, key
    preset = folder / f"{name}.toml"
    preset.write_text(text)
    return preset


def forked(name: str, commands: Sequence[runner.Command], output: Path) -> None:
    """In place of runner.run_commands: each in processes that have imported torch before."""
    for command in commands:
        run_command(command.argv + command.tuning, output / "stages", command.accepts)


def fork_commands(patch: pytest.MonkeyPatch) -> None:
    """Let experiments start their commands so, with a thread each, as tests run beside others."""
    patch.setattr(os, "sched_getaffinity", lambda _: {0})
    patch.setattr(runner, "run_commands", forked)


def shell(*words: object) -> str:
    """The output of bash for these words, in the root of the repository and with this Python first
    on the path; it has to end well."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    command = ["bash", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, f"{words}\n{ended.stdout[-2000:]}{ended.stderr[-3000:]}"
    return ended.stdout


def reused_stages(experiment: ModuleType, words: list[object]) -> int:
    """How many stages the experiment reuses with these flags, where it has run before."""
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(runner, "PYTHON", ROOT / ".venv" / "bin" / "python")  # as scripts have it
        fork_commands(patch)
        experiment.run(parse(experiment.Settings, [str(word) for word in words], {}))
    printed.seek(0)
    return printed.read().count("reused")
