"""An installation: its files, what is loaded when asked, what may stand beside it, and the files
that a training step enters."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from megatron import api
from tests.dist import Pool
from tests.trace_step import calls_of_a_step
from tools.api_page import page, with_parts

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers", "datasets", "tokenizers")
# Imported where a flag asks for them.
PROGRAMS = "import megatron.train.pretrain, tools.corpus.dedup, tools.generate, tasks.main"
WITHOUT_TORCH = "megatron.huggingface.plan, tools.checkpoint, tools.convert_dcp, tools.convert_hf"
WITHOUT_TORCH += ", tools.import_megatron"
OPTIONAL = ("apex", "datasets", "datasketch", "pyarrow", "tensorboard", "wandb")


def run(*arguments: str, cwd: Path = ROOT, program: str = sys.executable, **environ: str) -> str:
    """The output of Python, which has to end well."""
    inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [program, *arguments],
        cwd=cwd,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_name_of_the_api_is_there_and_says_what_it_is() -> None:
    assert set(dir(api)) == set(api.__all__)
    for name in api.__all__:
        assert getattr(api, name).__doc__, name
    assert not hasattr(api, "no_such_name")


def test_every_name_of_the_api_is_used() -> None:
    """By an example, in the code of a page, or by another name's entry in api.md, as types are.
    Layers of grids are all there, as in Colossal-AI."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = {each.name: each.read_text() for each in pages}
    preface, *entries = re.split(r"^### ", texts.pop("api.md"), flags=re.MULTILINE)
    in_code = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
    code = [each.read_text() for each in (ROOT / "examples").glob("*.py")]
    code += in_code.findall("\n".join(texts.values()))
    used = {*re.findall(r"\w+", "\n".join(code))}
    for entry in entries:
        own, *others = re.findall(r"\w+", "\n".join([entry.split()[0], *in_code.findall(entry)]))
        used |= {*others} - {own}
    used |= {*re.findall(r"\w+", "\n".join(in_code.findall(preface)))}
    assert {each for each in api.__all__ if each[-2:] not in ("2D", "3D")} <= used


def test_the_page_of_the_api_is_that_of_the_docstrings() -> None:
    """python tools/api_page.py makes it anew."""
    assert (ROOT / "docs" / "api.md").read_text() == page()
    configuration = (ROOT / "docs" / "configuration.md").read_text()
    assert "| `--optimizer` |" in configuration
    assert with_parts(configuration) == configuration


@pytest.mark.parametrize(
    ("code", "libraries", "loaded"),
    [
        ("from megatron.api import GPT2Config, RandomText, ParallelConfig", LIBRARIES, set()),
        ("from megatron.api import GradientBuckets, build_state, launch", LIBRARIES, {"torch"}),
        (PROGRAMS, OPTIONAL, set()),
        (f"import {WITHOUT_TORCH}", ("torch",), set()),
    ],
)
def test_libraries_are_loaded_when_asked_for(
    code: str, libraries: tuple[str, ...], loaded: set[str]
) -> None:
    said = run("-c", f"{code}; import sys; print(*(set({libraries}) & set(sys.modules)))")
    assert set(said.split()) == loaded


ONE_STEP = """
from importlib.util import find_spec
from megatron import api

sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
model = api.GPT2Config(**sizes, max_position_embeddings=8)
with api.launch(api.ParallelConfig()) as mesh:
    state = api.build_state(model, mesh, 31, seed=1, optimizer=api.OptimizerConfig(lr=1e-3))
    data = api.RandomText(vocabulary=31, length=8, seed=1)
    place = {"data_rank": 0, "data_size": 1}
    for micro_batches in api.prefetch(data, range(0, 2, 2), micro_batch_size=2, **place):
        loss = api.train_step(state, micro_batches, 1e-3).loss
    beside = [name for name in ("tools", "tasks", "tests", "scripts") if find_spec(name)]
print(api.__file__, state.step, 3 < loss < 4, beside, {hasattr(api, name) for name in dir(api)})
"""


def installed(source: Path, folder: Path) -> tuple[set[str], Path, str]:
    """The files of the wheel of source, which is installed alone in an environment; where they are,
    and its Python. torch comes from this environment."""
    run("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", cwd=source)
    (wheel,) = source.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    python = str(environment / "bin" / "python")
    options = "--no-deps", "--no-index", "--no-compile", "--quiet"
    run("-m", "pip", "--python", python, "install", *options, str(wheel), cwd=folder)
    (packages,) = environment.glob("lib/python*/site-packages")
    outer = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (packages / "outer.pth").write_text("\n".join(outer))  # but no .pth file in there is read
    return names, packages, python


def test_a_wheel_is_whole_and_trains_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """It holds all files of megatron/ and nothing else."""
    source, empty = tmp_path / "source", tmp_path / "empty"
    for name in ("megatron", "tools", "tasks"):
        shutil.copytree(ROOT / name, source / name, ignore=lambda *_: ["__pycache__"])
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    files = {str(each.relative_to(source)) for each in source.glob("megatron/**/*.*")}
    names, packages, python = installed(source, tmp_path)
    assert names == files > {"megatron/py.typed", "megatron/api.py", "megatron/api.pyi"}
    empty.mkdir()
    said = run("-c", ONE_STEP, cwd=empty, program=python)
    assert said.split(maxsplit=1) == [str(packages / "megatron/api.py"), "1 True [] {True}\n"]


def test_the_wheel_of_conformance_holds_a_trainer_to_its_figures(tmp_path: Path) -> None:
    """It has the fixtures, and needs nothing of this repository."""
    source, empty = tmp_path / "source", tmp_path / "empty"
    built = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "conformance", source, ignore=built)
    files = {each for kind in ("py", "json", "safetensors") for each in source.rglob(f"*.{kind}")}
    names, packages, python = installed(source, tmp_path)
    assert names == {f"conformance/{each.relative_to(source)}" for each in files}
    empty.mkdir()
    words = "--adapter conformance.adapters.torch:Adapter --layout data=2 --model gpt2"
    patience = "--timeout", "1800"
    said = run("-m", "conformance.run", *words.split(), *patience, cwd=empty, program=python)
    assert "gpt2: agreement" in said
    found = run("-c", "import conformance; print(conformance.__file__)", cwd=empty, program=python)
    assert found == f"{packages / 'conformance' / '__init__.py'}\n"


def required(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    return {re.split(r"[=\[]", line)[0] for line in lines if line and not line.startswith("-r")}


def test_the_package_depends_on_what_setup_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[>=\[]", each)[0] for each in project["dependencies"]}
    assert names == required("requirements.txt")
    assert "wandb" in names
    assert not names & required("requirements-test.txt")


def programs() -> list[Path]:
    """Files that are run, or of `python -m` what Python reads first. conformance/ runs in other
    trainers' environments too, from Python 3.10 on."""
    files = [file for file in ROOT.glob("[!.]*/**/*.py") if "tests" not in file.parts]
    starts = [file for file in (*ROOT.glob("*.py"), *files) if '== "__main__"' in file.read_text()]
    tools = ROOT / "tools"
    folders = tools, tools / "experiments"
    outer = [file for file in starts if file.parent in folders or tools not in file.parents]
    return [tools / "__init__.py", ROOT / "benchmarks" / "__init__.py", *outer]


def test_every_program_says_which_python_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, before it imports anything; an older one can parse the whole file."""
    started = programs()
    assert len(started) > 50
    before = set(sys.modules)
    for file in started:
        ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=(3, 8))
        is_for_others = "conformance" in file.parts
        monkeypatch.setattr("sys.hexversion", 0x3090DF0 if is_for_others else 0x30A0DF0)
        with pytest.raises(SystemExit) as refused:
            runpy.run_path(str(file), run_name="__main__")
        monkeypatch.undo()
        needed = r".*\b3\.10\b.*" if is_for_others else r".*\b3\.11\b.*"
        assert re.fullmatch(needed, str(refused.value.code)), file
    assert set(sys.modules) == before


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_second_megatron_is_found_beside_this_one(tmp_path: Path, ours_first: bool) -> None:
    """NVIDIA's megatron.core may be in the same environment: megatron is a namespace."""
    core = tmp_path / "other" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("NAME = 'core'\n")
    folders = [str(ROOT), str(core.parents[1])]
    path = os.pathsep.join(folders if ours_first else folders[::-1])
    code = "import megatron.core, megatron.config, megatron.parallel.mesh\n"
    code += "print(megatron.core.NAME, megatron.config.__file__)"
    said = run("-c", code, cwd=tmp_path, PYTHONPATH=path)
    assert said.split() == ["core", str(ROOT / "megatron" / "config" / "__init__.py")]
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_the_installed_package_is_found_without_the_repository(tmp_path: Path) -> None:
    """As an editable installation leaves it, beside another megatron.core."""
    if "megatron-lm-reproduction" not in {each.name for each in distributions()}:
        pytest.skip("the project is not installed; scripts/setup.sh installs it")
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    run("-c", "import megatron.core, megatron.config", cwd=tmp_path)


def core_path() -> list[str]:
    """The files that CONTRIBUTING.md lists."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The core path")[2]
    return re.findall(r"^\d+\. `(\S+)`", text, re.MULTILINE)


def test_a_step_enters_the_files_of_the_core_path_alone(gloo: Pool) -> None:
    for found in gloo.run(2, calls_of_a_step):
        files = {file for file, _ in found}
        assert files <= set(core_path())
        # The program, the loop and the table of specs come before the step.
        before = {"train/pretrain.py", "train/loop.py", "parallel/sharding.py"}
        assert set(core_path()) - files == {f"megatron/{name}" for name in before}
        # Autograd calls the backward of our own functions on this thread too.
        assert ("megatron/parallel/collectives.py", "backward") in found


def test_the_core_path_is_short() -> None:
    names = core_path()
    assert len(set(names)) == len(names) <= 19
    assert sum(len((ROOT / name).read_text().splitlines()) for name in names) <= 5950


def test_every_promise_names_its_test() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Promises")[2].partition("\n## ")[0]
    named = re.findall(r"`(\S+\.py)::(test_\w+)` \|$", text, re.MULTILINE)
    assert len(named) == text.count("\n|") - 2 > 30
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), name
