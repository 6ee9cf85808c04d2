"""docs/reproduce.md: commands that are there, links that lead somewhere, one status each."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from tools.plan.hardware import load_hardware

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reproduce.md"
TEXT = PAGE.read_text()
STATUSES = ["not run", "miniature", "simulated", "per rank", "at size"]  # the best is last
HEADLINES = ["Figures 1 and 5", "Figure 6", "Figure 7", "Table 3", "Table 5"]
TRAINING = {"pretrain_gpt2.sh": PretrainGPT2Config, "pretrain_bert.sh": PretrainBertConfig}


def commands() -> list[list[str]]:
    """The words of every indented command, continuations joined, loops' own lines left out."""
    lines = re.sub(r"\\\n *", "", TEXT).splitlines()
    found = [line.strip() for line in lines if line.startswith("    ")]
    return [shlex.split(line, comments=True) for line in found if not re.match("for |done", line)]


def rows(text: str) -> dict[str, str]:
    """Name to status of a page's first table; a name may be a link."""
    table = re.search(r"^\|(.*\n\|)+.*", text, re.MULTILINE)
    cells = [line.split("|")[1:-1] for line in table[0].splitlines()[2:]]
    return {re.sub(r"\[|\]\(.*?\)", "", row[0]).strip(): row[2].strip() for row in cells}


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_item_has_one_status_and_no_headline_is_without_a_run() -> None:
    found = rows(TEXT)
    assert set(found.values()) <= set(STATUSES)
    for name in HEADLINES:
        assert STATUSES.index(found[name]) >= STATUSES.index("miniature"), name


def test_the_readmes_first_table_is_this_list_in_short() -> None:
    here, there = rows(TEXT), rows((ROOT / "README.md").read_text())
    assert set(HEADLINES) <= there.keys()
    assert {name: here.get(name) for name in there} == there


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", TEXT)
    assert len(links) > 20
    for path, anchor in links:
        page = (PAGE.parent / path).resolve() if path else PAGE
        assert page.exists(), path
        assert not anchor or anchor in anchors(page), anchor


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_what_a_command_names_is_there(words: list[str]) -> None:
    for word in words:
        if re.fullmatch(r"[\w/.-]+\.(py|sh|toml)", word) or word.startswith("tests/"):
            assert (ROOT / word).exists(), word
    if "-m" in words:
        module = words[words.index("-m") + 1].replace(".", "/")
        assert module == "pytest" or (ROOT / f"{module}.py").exists() or (ROOT / module).is_dir()
    if "--hardware" in words:
        load_hardware(words[words.index("--hardware") + 1])


SUBMITTED = [words for words in commands() if words[0] == "sbatch"]


@pytest.mark.parametrize("words", SUBMITTED, ids=" ".join)
def test_what_is_submitted_fits_its_preset(words: list[str]) -> None:
    script = next(word for word in words if word.startswith("scripts/slurm/"))
    nodes, tasks = (words[words.index(name) + 1] for name in ("--nodes", "--ntasks-per-node"))
    assert words[words.index("--gpus-per-node") + 1] == tasks
    first, *flags = words[words.index(script) + 1 :]
    if not first.startswith("-"):
        preset = ROOT / "scripts" / "presets" / f"{first}.toml"
        assert preset.exists()
        config = TRAINING.get(Path(script).name)
        if config:
            parse(config, ["--preset", str(preset), *flags], {}).check(int(nodes) * int(tasks))


def test_every_training_preset_of_the_paper_is_submitted() -> None:
    text = " ".join(" ".join(words) for words in SUBMITTED)
    for name in ("gpt2_355m", "gpt2_2.5b", "gpt2_8.3b", "bert_336m", "bert_1.3b", "bert_3.9b"):
        assert f" {name} " in text
