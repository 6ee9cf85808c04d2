"""Every command on the pages of docs/results is one that its program takes today."""

import re
import shlex
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from megatron.config.parse import parse, parse_call
from megatron.config.pretrain import PretrainConfig
from megatron.models.registry import find_kind, take_kind
from tools.corpus.__main__ import MODULES
from tools.corpus.settings import parse_settings
from tools.plan import __main__ as plan

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
COMMAND = re.compile(r"(\w+=\S+ )*(torchrun|python|bash|sbatch) ")


def commands(page: Path) -> Iterator[str]:
    """Those in blocks and between back quotes that name a file or a module."""
    text = page.read_text().replace("\\\n", " ")
    blocks = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    quoted = re.findall(r"`([^`]+)`", re.sub(r"\s*\n", " ", text))
    for line in (*blocks, *quoted):
        if COMMAND.match(line) and re.search(r"\.(py|sh)\b| -m ", line):
            yield line


ALL = [pytest.param(line, id=f"{page.stem}: {line}") for page in PAGES for line in commands(page)]


def of_training(path: str, words: Sequence[str]) -> tuple[type[PretrainConfig], list[str]]:
    """The settings of pretrain.py or pretrain_KIND.py, and the words that say them."""
    kind, rest = Path(path).stem.removeprefix("pretrain").removeprefix("_"), [*words]
    if not kind:
        kind, rest = take_kind(words, {})
    return resolve_name(str(find_kind(kind).program)), rest


def parse_words(name: str, words: Sequence[str]) -> Any:
    """The settings that the program of this file or module makes of the words; an error if it
    refuses them."""
    path = name if name.endswith((".py", ".sh")) else f"{name.replace('.', '/')}.py"
    folder = ROOT / path.removesuffix(".py")
    assert (ROOT / path).is_file() or (folder / "__main__.py").is_file()
    if path == "tools/corpus.py":
        return parse_settings(MODULES[words[0]], words[1:])
    if path.endswith(".sh"):
        text = (ROOT / path).read_text()
        assert not [word for word in words if word.startswith("--") and word not in text]
        return None
    if path.startswith("pretrain"):
        return parse(*of_training(path, words), {})
    module = import_module(path.removesuffix(".py").replace("/", "."))
    if hasattr(module, "__path__") and not hasattr(module, "Settings"):  # it shadows tools/NAME.py
        module = import_module(f"{module.__name__}.__main__")
    if hasattr(module, "main"):  # tools/NAME.py may start what is in a folder
        module = import_module(module.main.__module__)
    if module is plan:
        if words[0] in plan.STUDIES:
            return parse(plan.STUDIES[words[0]][0], words[1:], {})
        program = plan.program_of(words, question=plan.MeasureConfig)
        return parse(program, words, {})
    if hasattr(module, "QUESTION"):
        return parse_call(module.QUESTION.contenders, words, {})
    if hasattr(module, "Settings"):
        return parse(module.Settings, words, {})
    if hasattr(module, "options_of"):
        return module.options_of(words)
    return parse_call(module.main, words, {})


@pytest.mark.parametrize("line", ALL)
def test_a_command_of_a_page_is_accepted(line: str) -> None:
    words = shlex.split(line, comments=True)
    place = next(n for n, word in enumerate(words) if word.endswith((".py", ".sh")) or word == "-m")
    if words[place] == "-m":
        place += 1
    if words[place] == "pytest":
        assert [(ROOT / word).exists() for word in words if word.startswith("tests")] == [True]
        return
    parse_words(words[place], words[place + 1 :])
