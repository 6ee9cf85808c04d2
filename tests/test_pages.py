"""Commands and links of README.md and docs/: training commands fit their presets, as far as their
plan; files, flags and anchors are there; docs/reproduce.md has one status for each item."""

import re
import shlex
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.config.parse import parse
from megatron.models.build import build_model
from megatron.train.inputs import vocabulary_of
from megatron.train.pipelining import plan_of_run
from tests.huggingface import write_folder
from tests.layouts.test_matrix import case_id, groups
from tests.programs import run_python, run_ranks, run_script, start_ranks
from tests.test_results import of_training
from tools.layouts.job import program_of
from tools.plan import __main__ as plan
from tools.plan.absent import absent_mesh
from tools.plan.hardware import load_hardware

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SOURCES, PARALLELISM, REPRODUCE, OPERATIONS = (
    ROOT / "docs" / f"{page}.md" for page in ("sources", "parallelism", "reproduce", "operations")
)
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS, *sorted((ROOT / "docs" / "results").glob("*.md"))]
PROGRAMS = ("pretrain", "pretrain_gpt2", "pretrain_bert")
VOCABULARY = 50_257
STATUSES = ["not run", "miniature", "simulated", "per rank", "at size"]  # the best is last
HEADLINES = ["Figures 1 and 5", "Figure 6", "Figure 7", "Table 3", "Table 5"]
SUBMITTED = ("gpt2_355m", "gpt2_2.5b", "gpt2_8.3b", "bert_336m", "bert_1.3b", "bert_3.9b")


def rows(text: str) -> dict[str, str]:
    """Name to status of a page's first table; a name may be a link."""
    table = re.search(r"^\|(.*\n\|)+.*", text, re.MULTILINE)
    cells = [line.split("|")[1:-1] for line in table[0].splitlines()[2:]]
    return {re.sub(r"\[|\]\(.*?\)", "", row[0]).strip(): row[2].strip() for row in cells}


def test_every_item_has_one_status() -> None:
    found, there = rows(REPRODUCE.read_text()), rows(README.read_text())
    assert set(found.values()) <= set(STATUSES)
    for name in HEADLINES:
        assert STATUSES.index(found[name]) >= STATUSES.index("miniature"), name
    # The README's first table is this list in short.
    assert set(HEADLINES) <= there.keys()
    assert {name: found.get(name) for name in there} == there


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of each link that leads to no other site."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?(?: \"[^\"]*\")?\)", text)
    return [((page.parent / path).resolve() if path else page, anchor) for path, anchor in found]


def test_links_lead_somewhere() -> None:
    assert sum(len(links(page)) for page in PAGES) > 300
    for page in PAGES:
        for target, anchor in links(page):
            assert target.exists(), (page, target)
            assert not anchor or anchor in anchors(target), (page, anchor)


@pytest.mark.parametrize("folder", ["docs", "docs/results"])
def test_an_index_has_every_page_of_its_folder(folder: str) -> None:
    page = ROOT / folder / "README.md"
    assert {*page.parent.glob("*.md")} - {target for target, _ in links(page)} == {page}


def test_what_works_together_is_a_case_of_the_matrix() -> None:
    named = re.findall(r'\[yes\]\(tests/layouts/cover.py "(.*?)"\)', README.read_text())
    assert len(named) > 40
    assert not {*named} - {case_id(case) for case in groups(False)}


def python_of(page: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return str(code)


def test_the_readme_is_short_and_its_library_code_gives_one_process_numbers(tmp_path: Path) -> None:
    assert len(README.read_text().splitlines()) <= 160
    code, said = tmp_path / "mine.py", []
    for world, size in ((1, 1), (4, 2)):
        setting = f"tensor_model_parallel_size={size}"
        code.write_text(python_of(README).replace("tensor_model_parallel_size=2", setting))
        lines = run_script(code, world=world, folder=tmp_path).splitlines()
        said.append([[*map(float, line.split())] for line in lines])
    assert len(said[0]) == 10
    assert np.array(said[1]) == pytest.approx(np.array(said[0]), rel=1e-4)


def test_the_tutorial_on_layouts(tmp_path: Path) -> None:
    """Its commands print the same lines, but the one with a wrong plan, which ends."""
    page, code, said = ROOT / "docs" / "tutorial_layout.md", tmp_path / "mine.py", set()
    code.write_text(python_of(page))
    found = {tuple(words) for words in commands(page, "mine.py")}
    wrong = {words for words in found if "--without" in words}
    assert (len(found), len(wrong)) == (3, 1)
    for words in [*found, ("python", "mine.py")]:
        world, flags = option(words, "--nproc-per-node"), words[words.index("mine.py") + 1 :]
        target = partial(run_python, [str(code), *flags])
        with start_ranks(target, range(world), world, tmp_path) as run:
            assert any(run.wait()) == (words in wrong), run.text()
            if words in wrong:
                assert re.search(r"RuntimeError: gradients of .*0\.scale\.weight", run.text())
            else:
                said.add(tuple(re.findall(r"^1?0?\.\d+ .*", run.text(0), re.MULTILINE)))
    assert len(said) == 1
    assert len(said.pop()) == 3


def indented_commands() -> list[list[str]]:
    """The words of every indented command of reproduce.md, loops' own lines left out."""
    lines = re.sub(r"\\\n *", "", REPRODUCE.read_text()).splitlines()
    found = [line.strip() for line in lines if line.startswith("    ")]
    return [shlex.split(line, comments=True) for line in found if not re.match("for |done", line)]


@pytest.mark.parametrize("words", indented_commands(), ids=" ".join)
def test_what_a_command_names_is_there(words: list[str]) -> None:
    for word in words:
        if re.fullmatch(r"[\w/.-]+\.(py|sh|toml)", word) or word.startswith("tests/"):
            assert (ROOT / word).exists(), word
    if "-m" in words:
        module = words[words.index("-m") + 1].replace(".", "/")
        assert module == "pytest" or (ROOT / f"{module}.py").exists() or (ROOT / module).is_dir()
    if "--hardware" in words:
        load_hardware(words[words.index("--hardware") + 1])
    if words[0] == "sbatch":
        assert option(words, "--gpus-per-node") == option(words, "--ntasks-per-node")
        script = next(place for place, word in enumerate(words) if "scripts/slurm/" in word)
        preset = words[script + 1]
        assert preset.startswith("-") or (ROOT / "scripts" / "presets" / f"{preset}.toml").exists()


def commands(page: Path, program: str) -> list[list[str]]:
    """Words of every command of the program, a regular expression, whatever block it is in."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    found = [line.strip().removeprefix("$ ") for line in lines]
    wanted = re.compile(rf"(torchrun|python|sbatch) .*{program} ")
    return [shlex.split(line, comments=True) for line in found if wanted.match(line)]


def training_commands() -> list[list[str]]:
    """But those that leave the preset to the reader, or read a file of another command."""
    pages = (page for page in DOCS if page.stem not in ("operations", "configuration"))
    program = r"pretrain(_\w+)?\.(py|sh)"
    return [each for page in (README, *pages) for each in commands(page, program)]


def option(words: Sequence[str], name: str) -> int:
    return int(words[words.index(name) + 1]) if name in words else 1


@pytest.mark.parametrize("words", training_commands(), ids=" ".join)
def test_training_command_fits_its_preset(words: list[str], tmp_path: Path) -> None:
    (program,) = (word for word in words if Path(word).stem in PROGRAMS)
    world_size = option(words, "--nproc-per-node") * option(words, "--nnodes")
    world_size *= option(words, "--ntasks-per-node") * option(words, "--nodes")
    flags = words[words.index(program) + 1 :]
    if "tools.chaos" in words:  # which adds these
        flags += ["--save", "run", "--load", "run"]
    while "..." in flags:  # in place of the reader's own path
        place = flags.index("...")
        del flags[place - 1 : place + 1]
    kind, flags = of_training(program, flags)
    if "--hf-model" in flags:  # in place of the reader's own model
        write_folder(tmp_path, "qwen3", vocab_size=VOCABULARY, max_position_embeddings=1024)
        flags[flags.index("--hf-model") + 1] = str(tmp_path)
    if program.endswith(".sh"):
        flags = ["--preset", *flags]
    flags = [f"{ROOT}/{word}" if word.startswith("scripts/") else word for word in flags]
    config = parse(kind, flags, {})
    config.check(world_size)
    if world_size > 2:  # too large to run here
        sizes = {**config.parallel.sizes, "data": config.data_parallel_size(world_size)}
        mode = config.parallel.tensor_parallel_mode
        mesh = absent_mesh(sizes, torch.device("meta"), tensor_parallel_mode=mode)
        vocabulary = vocabulary_of(config)
        stages = plan_of_run(config, vocabulary, world_size)
        model = build_model(
            config.model, mesh, vocabulary, seed=None, dtype=torch.bfloat16, pipeline=stages
        )
        assert mesh.size() == world_size
        assert {each.device.type for each in model.parameters()} == {"meta"}


def test_the_training_commands_are_found() -> None:
    found = training_commands()
    assert {words[0] for words in found} == {"torchrun", "python", "sbatch"}
    submitted = {word for words in found if words[0] == "sbatch" for word in words}
    assert submitted >= {*SUBMITTED}


@pytest.mark.parametrize("words", commands(SOURCES, r"examples/\w+\.py"), ids=" ".join)
def test_flags_of_examples(words: list[str], tmp_path: Path) -> None:
    (program,) = (word for word in words if word.startswith("examples/"))
    text = run_ranks(partial(run_python, [program, "--help"]), 1, tmp_path)
    flags = [word for word in words[words.index(program) :] if word.startswith("--")]
    assert flags
    assert not [flag for flag in flags if f"{flag} " not in text]


def test_plans_in_docs_fit_their_presets() -> None:
    (words,) = commands(SOURCES, r"tools/plan\.py")
    flags = words[2:]
    config = parse(program_of(flags, question=plan.QuestionConfig), flags, {})
    config.check(config.question.gpus)
    assert plan_of_run(config, VOCABULARY, config.question.gpus).ranks == 8
    load_hardware(config.question.hardware)


def test_pictures_of_schedules_are_what_the_tool_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(PARALLELISM, r"tools/plan\.py schedule")
    assert plan.main(words[2:], {}) == 0
    picture, _, _ = capsys.readouterr().out.partition("\n\n")
    assert picture.count("rank") == 4
    assert picture in PARALLELISM.read_text()


def test_the_table_of_save_intervals_is_what_the_tool_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_run, assumed = (words[2:] for words in commands(OPERATIONS, r"tools/plan\.py"))
    assert parse(plan.InterruptionsConfig, of_run, {}).run == Path("CHECKPOINTS")
    assert plan.main(assumed, {}) == 0
    _, _, table = capsys.readouterr().out.rstrip().rpartition("\n\n")
    assert table.count("rsc-1") == 6
    assert textwrap.indent(table, "    ") in OPERATIONS.read_text()
