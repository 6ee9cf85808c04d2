"""Programs run where a package is missing, or fails at import, that only other features need."""

import ast
import itertools
import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tokenizers import Tokenizer
from tokenizers.models import BPE

from megatron.libraries import Library, MissingLibrary, failure, load
from tools.corpus.tokenize.encoders import build_encoder

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megatron", "tools", "tasks", "benchmarks", "examples")
NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "transformers", "tyro", "pytest")
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 "
TINY += "--seq-length 16 --train-iters 2 --eval-iters 1 --micro-batch-size 2 --mock-data"
PYTEST = "-m pytest -q -x -p no:cacheprovider"
LAYOUT = "tests/layouts/test_matrix.py::test_a_layout_equals_one_process_and_divides_the_work"
# Read by each Python that starts, child processes included.
SITE = """
import json, os, sys
from importlib.machinery import ModuleSpec, PathFinder

MODE, NAMES = json.loads(os.environ["MISSING"])

class Broken:
    def create_module(self, spec): pass
    def exec_module(self, module): raise AttributeError("of another release")

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in NAMES:
            return super().find_spec(name, path, target)
        return ModuleSpec(name, Broken()) if MODE == "broken" else None

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def closure() -> set[str]:
    """NEEDED, and what their metadata requires here."""
    todo, found = [*NEEDED], set[str]()
    while todo:
        if (name := canonicalize_name(todo.pop())) in found:
            continue
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        found.add(name)
        each = [Requirement(line) for line in lines]
        todo += [
            one.name for one in each if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return found


def modules(*, ours: bool) -> list[str]:
    """Top-level modules of packages that are installed beside the closure. ours: those alone that
    the project asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}
    here, own = closure(), canonicalize_name(project["name"])
    names = {
        module: {canonicalize_name(each) for each in packages}
        for module, packages in packages_distributions().items()
    }
    return [
        m
        for m, each in names.items()
        if own not in each and not each & here and (each & asked or not ours)
    ]


def environ_without(mode: str, folder: Path) -> dict[str, str]:
    """That of a Python whose packages beside NEEDED are absent or broken, by a file in folder."""
    (folder / "sitecustomize.py").write_text(SITE)
    missing = json.dumps([mode, modules(ours=mode == "broken")])
    environ = {"MISSING": missing, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return os.environ | environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def test_a_program_needs_no_library_of_another_feature(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "pretrain_gpt2.py", *TINY.split(), "--save", str(tmp_path / "save")],
        cwd=ROOT,
        env=environ_without("broken", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout


# Trains, and compares a layout, in one process.
BOTH = f"""
import sys, pretrain, pytest
pretrain.main({TINY.split()!r} + sys.argv[1:], {{}})
sys.exit(pytest.main({PYTEST.split()[2:]!r} + ["{LAYOUT}[tensor=2-llama]"]))
"""


def test_the_rest_works_without_huggingface_and_other_libraries(tmp_path: Path) -> None:
    """A copy, since the ranks that a test starts import the folder, too. megatron is a namespace:
    what the copy lacks would be found in an installation, so a file that raises takes its place."""
    for name in ("megatron", "tools", "benchmarks", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "huggingface" if name == "megatron" else "")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("pyproject.toml", "pretrain.py"):
        shutil.copy(ROOT / name, tmp_path)
    folder = tmp_path / "megatron" / "huggingface"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ModuleNotFoundError(__name__)\n")

    environ = environ_without("absent", tmp_path)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True
        )

    assert "ModuleNotFoundError" in run("-c", "import megatron.huggingface.config").stderr
    words = "--model gpt2 --vocab-size 96 --no-bf16 --save saved"
    ended = run("-c", BOTH, *words.split())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
    assert (tmp_path / "saved" / "latest").exists()
    others = "from tools import convert_hf\nfrom tools.convert import compare, exporting\n"
    ended = run("-c", f"{others}import benchmarks.train_step, benchmarks.harness")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_no_module_imports_a_library_but_through_the_mechanism() -> None:
    """Libraries beside the closure; only a type checker reads what is under TYPE_CHECKING."""
    optional, found = set(modules(ours=False)), set[str]()
    files = [ROOT.glob("*.py"), *(ROOT.glob(f"{folder}/**/*.py") for folder in FOLDERS)]
    for file in itertools.chain(*files):
        todo = [ast.parse(file.read_text())]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                todo += node.orelse
                continue
            todo += ast.iter_child_nodes(node)
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {f"{file}: {name}" for name in names if name.partition(".")[0] in optional}
    assert not found


# The code of a library, and what its user is told to do. None: it is not there.
FAILURES = {
    None: "pip install",
    "": "",
    "import nothing_of_this_name": "pip install",
    "raise AttributeError('no such function')": "another release",
    "raise OSError('libgomp.so is missing')": "another release",
    "raise RuntimeError('of numpy 1')": "another release",
}


@pytest.mark.parametrize("code", FAILURES)
def test_a_library_that_fails_in_any_way_is_absent_and_its_error_says_why(
    code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gigatoken"  # which preprocessing does without
    for loaded in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)  # the end of the test removes what it imports
    if code is not None:
        del sys.modules[name]
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / f"{name}.py").write_text(f"{code}\nanswer = 42")
    library = Library(name, "--encoder tokenizers")
    if not (cure := FAILURES[code]):
        assert library.answer == load(name).answer == 42
        assert failure(name) == ""
        return
    with pytest.raises(MissingLibrary) as missing:
        _ = library.answer
    for word in (name, (code or "").partition("'")[2].strip("')"), cure, "--encoder tokenizers"):
        assert word in str(missing.value)
    assert cure in failure(name)
    said = build_encoder("auto", Tokenizer(BPE())).description
    assert said.startswith("tokenizers")
    assert name in said


def test_a_folder_without_code_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb_of_a_run").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert failure("wandb_of_a_run")
