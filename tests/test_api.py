"""The public API: what it loads, what its page says, what a type checker sees."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron import api
from tests.data.samples import write_data_of_tokenizer
from tools.api_page import page

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import megatron.api", set()),
        ("from megatron.api import GPT2Config, RandomText, ParallelConfig", set()),
        ("from megatron.api import launch", {"torch"}),
        ("from megatron.api import GradientBuckets, build_state, train_step", {"torch"}),
    ],
)
def test_it_loads_what_is_asked_for(code: str, loaded: set[str]) -> None:
    looked_for = ("torch", "transformers", "datasets", "tokenizers")
    code = f"{code}; import sys; print(*(each for each in {looked_for} if each in sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == loaded


def test_every_name_is_there_and_says_what_it_is() -> None:
    assert set(dir(api)) == set(api.__all__)
    for name in api.__all__:
        assert getattr(api, name).__doc__, name
    assert not hasattr(api, "no_such_name")


def test_the_page_is_that_of_the_docstrings() -> None:
    """python tools/api_page.py makes it anew."""
    assert (ROOT / "docs" / "api.md").read_text() == page()


def test_a_data_set_is_opened_by_its_names(tmp_path: Path) -> None:
    """Packed and padded, as the programs open them."""
    tokenizer = write_data_of_tokenizer(tmp_path / "packed", [[*range(1, 40), 0]] * 4)
    packed, *_ = api.open_splits(
        api.open_corpus([str(tmp_path / "packed")], tokenizer), split="1,0,0", seq_length=8, seed=1
    )
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 4)
    texts = api.open_document_corpus([str(tmp_path / "a.jsonl")], tokenizer)
    padded, *_ = api.open_padded_splits(texts, tokenizer, split="1,0,0", seq_length=8, seed=1)
    for data, samples in ((packed, 19), (padded, 4)):
        assert data.samples_per_epoch == samples
        numbers = api.micro_batch_numbers(
            0, global_batch_size=4, micro_batch_size=2, data_rank=1, data_size=2
        )
        assert data.batch(numbers[0]).tokens.shape == (2, 8)


def test_a_wheel_holds_what_a_type_checker_reads(tmp_path: Path) -> None:
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "megatron", tmp_path / "megatron")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--quiet"], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"megatron/py.typed", "megatron/api.py", "megatron/api.pyi"} <= set(names)
