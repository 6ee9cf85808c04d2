"""README.md's training commands, with the presets that they name, as far as their plan; the files
that CONTRIBUTING.md names."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from megatron.models.build import build_model
from megatron.parallel.mesh import absent_mesh

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"pretrain_gpt2": PretrainGPT2Config, "pretrain_bert": PretrainBertConfig}
VOCABULARY = 50_257


def training_commands() -> list[list[str]]:
    """Words of every command that pretrains, whatever kind of block it is in."""
    lines = (ROOT / "README.md").read_text().replace("\\\n", " ").splitlines()
    program = re.compile(r"(torchrun|python|sbatch) .*pretrain_\w+\.(py|sh) ")
    return [shlex.split(line) for line in map(str.strip, lines) if program.match(line)]


def option(words: list[str], name: str) -> int:
    return int(words[words.index(name) + 1]) if name in words else 1


@pytest.mark.parametrize("words", training_commands(), ids=" ".join)
def test_a_training_command_fits_its_preset(words: list[str]) -> None:
    (program,) = (word for word in words if Path(word).stem in PROGRAMS)
    world_size = option(words, "--nproc-per-node") * option(words, "--nnodes")
    world_size *= option(words, "--ntasks-per-node") * option(words, "--nodes")
    flags = words[words.index(program) + 1 :]
    while "..." in flags:  # in place of the reader's own path
        place = flags.index("...")
        del flags[place - 1 : place + 1]
    if program.endswith(".sh"):
        flags = ["--preset", *flags]
    flags = [f"{ROOT}/{word}" if word.startswith("scripts/") else word for word in flags]
    config = parse(PROGRAMS[Path(program).stem], flags, {})
    config.check(world_size)
    if world_size > 2:  # too large to run here
        sizes = {**config.parallel.sizes, "data": config.data_parallel_size(world_size)}
        mesh = absent_mesh(sizes, torch.device("meta"))
        model = build_model(config.model, mesh, VOCABULARY, seed=None, dtype=torch.bfloat16)
        assert mesh.size() == world_size
        assert {each.device.type for each in model.parameters()} == {"meta"}


def test_the_training_commands_are_found() -> None:
    programs = {words[0] for words in training_commands()}
    assert programs == {"torchrun", "python", "sbatch"}
