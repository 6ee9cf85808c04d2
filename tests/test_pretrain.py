"""pretrain.py: every kind of model by --model, also one's own."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt2
from pretrain import main
from tests.data.samples import write_data
from tests.refusals import field_of, refusal

SIZES = (
    *("--num-layers", "1", "--hidden-size", "48", "--num-attention-heads", "12"),
    *("--max-position-embeddings", "32", "--seq-length", "32", "--micro-batch-size", "2"),
    *("--train-iters", "3", "--lr-warmup-iters", "0", "--eval-iters", "0", "--no-bf16"),
    *("--split", "9,1,0", "--log-interval", "1"),
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], ["gpt2", "bert"]),
        (["--model", "gpt2", "--help"], ["--reset-position-ids", "--activation"]),
        (["--model=bert", "--help"], ["--mask-prob", "--untie-embeddings-and-output-weights"]),
        (["--model", "tests.models.own_kind:KIND", "--help"], ["--key-value-heads"]),
    ],
)
def test_help_names_kinds_and_flags(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words, {})
    assert stop.value.code == 0
    assert set(expected) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


@pytest.mark.parametrize("kind", ["", "gpt9", "finetuned", "tests.models.own_kind:MISNAMED"])
def test_a_kind_that_cannot_be_pretrained_is_refused(data: Path, kind: str) -> None:
    """MISNAMED has the config of another, by which its checkpoints would be read."""
    model = ["--model", kind] if kind else []
    error = refusal(lambda: main([*model, *SIZES, "--data-path", str(data)], {}))
    assert field_of(error) == "--model"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten documents of random tokens."""
    prefix, rng = tmp_path_factory.mktemp("data") / "text_document", np.random.default_rng(0)
    write_data(prefix, [[*rng.integers(1, 101, 200), 0] for _ in range(10)], vocab_size=101)
    return prefix


def test_it_trains_as_the_papers_program_and_a_kind_of_ones_own(data: Path, tmp_path: Path) -> None:
    losses = {}
    programs = {
        "gpt2 alone": (pretrain_gpt2.main, []),
        "gpt2": (main, ["--model", "gpt2"]),
        "own": (main, ["--model", "tests.models.own_kind:KIND"]),
    }
    for name, (program, words) in programs.items():
        record = tmp_path / f"{name}.jsonl"
        program([*words, *SIZES, "--data-path", str(data), "--metrics-file", str(record)], {})
        lines = map(json.loads, record.read_text().splitlines())
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    assert len(losses["own"]) == 3
    assert losses["gpt2"] == losses["gpt2 alone"] != losses["own"]
