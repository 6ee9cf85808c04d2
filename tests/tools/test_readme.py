"""Training commands of README.md and docs/, with the presets that they name, as far as their plan;
what else docs/sources.md and docs/parallelism.md name."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.config.parse import parse
from megatron.config.pretrain import (
    PretrainBertConfig,
    PretrainGPT2Config,
    PretrainLlamaConfig,
)
from megatron.huggingface.pretrain import PretrainHuggingFaceConfig
from megatron.models.build import build_model
from megatron.train.pipelining import plan_of_run
from tests.huggingface import write_folder
from tests.test_reproduce import anchors
from tools.layouts.job import program_of
from tools.plan import __main__ as plan
from tools.plan.absent import absent_mesh
from tools.plan.hardware import load_hardware

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "pretrain_gpt2": PretrainGPT2Config,
    "pretrain_bert": PretrainBertConfig,
}
KINDS = {"llama": PretrainLlamaConfig, "huggingface": PretrainHuggingFaceConfig}  # of pretrain.py
VOCABULARY = 50_257
PAGES = [ROOT / "docs" / name for name in ("sources.md", "parallelism.md")]


def commands(page: Path, program: str) -> list[list[str]]:
    """Words of every command of the program, a regular expression, whatever block it is in."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    found = [line.strip().removeprefix("$ ") for line in lines]
    wanted = re.compile(rf"(torchrun|python|sbatch) .*{program} ")
    return [shlex.split(line, comments=True) for line in found if wanted.match(line)]


def training_commands() -> list[list[str]]:
    pages = ROOT / "README.md", *PAGES
    return [each for page in pages for each in commands(page, r"pretrain(_\w+)?\.(py|sh)")]


def option(words: list[str], name: str) -> int:
    return int(words[words.index(name) + 1]) if name in words else 1


@pytest.mark.parametrize("words", training_commands(), ids=" ".join)
def test_a_training_command_fits_its_preset(words: list[str], tmp_path: Path) -> None:
    (program,) = (word for word in words if Path(word).stem in {*PROGRAMS, "pretrain"})
    world_size = option(words, "--nproc-per-node") * option(words, "--nnodes")
    world_size *= option(words, "--ntasks-per-node") * option(words, "--nodes")
    flags = words[words.index(program) + 1 :]
    while "..." in flags:  # in place of the reader's own path
        place = flags.index("...")
        del flags[place - 1 : place + 1]
    kind = PROGRAMS.get(Path(program).stem)
    if program == "pretrain.py":
        assert flags[0] == "--model"
        kind = KINDS[flags[1]]
        del flags[:2]
    if "--hf-model" in flags:  # in place of the reader's own model
        write_folder(tmp_path, "qwen3", vocab_size=VOCABULARY, max_position_embeddings=1024)
        flags[flags.index("--hf-model") + 1] = str(tmp_path)
    if program.endswith(".sh"):
        flags = ["--preset", *flags]
    flags = [f"{ROOT}/{word}" if word.startswith("scripts/") else word for word in flags]
    assert kind is not None
    config = parse(kind, flags, {})
    config.check(world_size)
    if world_size > 2:  # too large to run here
        sizes = {**config.parallel.sizes, "data": config.data_parallel_size(world_size)}
        mode = config.parallel.tensor_parallel_mode
        mesh = absent_mesh(sizes, torch.device("meta"), tensor_parallel_mode=mode)
        vocabulary = config.model.vocab_size or VOCABULARY
        stages = plan_of_run(config, vocabulary)
        model = build_model(
            config.model, mesh, vocabulary, seed=None, dtype=torch.bfloat16, pipeline=stages
        )
        assert mesh.size() == world_size
        assert {each.device.type for each in model.parameters()} == {"meta"}


def test_the_training_commands_are_found() -> None:
    programs = {words[0] for words in training_commands()}
    assert programs == {"torchrun", "python", "sbatch"}


@pytest.mark.parametrize("words", commands(PAGES[0], r"examples/\w+\.py"), ids=" ".join)
def test_examples_in_docs_have_the_flags_that_they_are_given(words: list[str]) -> None:
    (program,) = (word for word in words if word.startswith("examples/"))
    ended = subprocess.run(
        [sys.executable, program, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    flags = [word for word in words[words.index(program) :] if word.startswith("--")]
    assert flags
    assert not [flag for flag in flags if f"{flag} " not in ended.stdout]


def test_plans_in_docs_fit_their_presets() -> None:
    (words,) = commands(PAGES[0], r"tools/plan\.py")
    flags = words[2:]
    config = parse(program_of(flags, question=plan.QuestionConfig), flags, {})
    config.check(config.question.gpus)
    assert plan_of_run(config, VOCABULARY).ranks == 8
    load_hardware(config.question.hardware)


def test_pictures_of_schedules_are_what_the_tool_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(PAGES[1], r"tools/plan\.py schedule")
    assert plan.main(words[2:], {}) == 0
    picture, _, _ = capsys.readouterr().out.partition("\n\n")
    assert picture.count("rank") == 4
    assert picture in PAGES[1].read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text())
    assert len(links) > 10
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), anchor
