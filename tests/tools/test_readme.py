"""README.md's training commands, with the presets that they name, as far as their plan; the files
that CONTRIBUTING.md names."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"pretrain_gpt2.py": PretrainGPT2Config, "pretrain_bert.py": PretrainBertConfig}


def training_commands() -> list[list[str]]:
    """Words of every command that pretrains, whatever kind of block it is in."""
    lines = (ROOT / "README.md").read_text().replace("\\\n", " ").splitlines()
    program = re.compile(r"(torchrun|python) .*pretrain_\w+\.py ")
    return [shlex.split(line) for line in map(str.strip, lines) if program.match(line)]


def option(words: list[str], name: str) -> int:
    return int(words[words.index(name) + 1]) if name in words else 1


@pytest.mark.parametrize("words", training_commands(), ids=" ".join)
def test_a_training_command_fits_its_preset(words: list[str]) -> None:
    (program,) = PROGRAMS.keys() & set(words)
    world_size = option(words, "--nproc-per-node") * option(words, "--nnodes")
    flags = [word for word in words[words.index(program) + 1 :] if word != "..."]
    if flags[-2:] == ["--data-path", "--save"]:  # "--data-path ... --save ..."
        flags = flags[:-2]
    flags = [f"{ROOT}/{word}" if word.startswith("scripts/") else word for word in flags]
    parse(PROGRAMS[program], flags, {}).check(world_size)


def test_the_training_commands_are_found() -> None:
    assert len(training_commands()) >= 5


def test_the_core_path_is_short() -> None:
    """What a reader opens to follow one training step."""
    path = (ROOT / "CONTRIBUTING.md").read_text().partition("## The core path")[2]
    names = re.findall(r"^\d+\. `(\S+)`", path, re.MULTILINE)
    assert 10 < len(names) <= 15
    assert len(set(names)) == len(names)
    assert sum(len((ROOT / name).read_text().splitlines()) for name in names) <= 4000
