"""Parts and a model of a user's own: the files of examples/, copied out of the project."""

import os
import re
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.data.samples import write_data_of_tokenizer
from tests.programs import ROOT, run_ranks, values_of

EXAMPLES = ROOT / "examples"
TOGETHER = ("process_group", "pipeline_schedule", "lr_decay_style", "callbacks")  # in one run
PARTS = {  # a number of a run that changes with the part, by its setting
    "kind": "loss",
    "layers": "loss",
    "process_group": r"connected (\d+) processes",
    "gradient_reduction": "grad_norm",
    "pipeline_schedule": r"at most (\d+) in flight",
    "dataset": "loss",
    "sampler": "loss",
    "optimizer": "loss",
    "lr_decay_style": "lr",
    "callbacks": "accuracy",
}
OURS = {"kind": ["--model", "gpt2"], "dataset": ["--mock-data", "--vocab-size", "64"]}


def _run(folder: Path, file: Path, words: list[str]) -> None:
    os.chdir(folder)
    sys.path[:] = [each for each in sys.path if Path(each) != Path()]
    sys.argv = [str(file), *words]
    runpy.run_path(str(file), run_name="__main__")


def run(file: str, *words: object, world: int, folder: Path) -> str:
    """The text of the first rank of a program that is started in `folder`."""
    target = partial(_run, folder, ROOT / file, [*map(str, words)])
    return run_ranks(target, world, folder)


def numbers(preset: str, folder: Path, *words: str) -> dict[str, object]:
    """The number of each of PARTS in a run with this preset."""
    file, record = folder / "preset.toml", folder / "metrics.jsonl"
    file.write_text(preset)
    record.unlink(missing_ok=True)
    words = (*words, "--preset", str(file), "--train-iters", "2", "--metrics-file", str(record))
    text = run("pretrain.py", *words, world=2, folder=folder)
    return {
        name: re.findall(number, text) if "(" in number else values_of(record, number)
        for name, number in PARTS.items()
    }


def test_each_part_changes_a_number_and_its_removal_changes_it_back(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "own_parts", tmp_path / "own_parts")
    lines = (EXAMPLES / "own_parts.toml").read_text().splitlines()
    part_of = {line.partition(" =")[0]: line for line in lines if "own_parts:" in line}
    assert part_of.keys() == PARTS.keys()

    def preset(*parts: str) -> str:
        return "\n".join(
            x for x in lines if x not in part_of.values() or x.partition(" =")[0] in parts
        )

    def start(*parts: str) -> dict[str, object]:
        ours = [word for name, words in OURS.items() if name not in parts for word in words]
        return numbers(preset(*parts), tmp_path, *ours)

    plain = start()
    for parts in [TOGETHER, *((name,) for name in PARTS if name not in TOGETHER)]:
        found = start(*parts)
        for name in parts:
            assert found[name] != plain[name], name
    every = start(*PARTS)
    assert every["process_group"] == ["2"]
    assert every["pipeline_schedule"] == ["8"]
    assert start() == plain


def test_a_model_is_trained_resumed_at_another_layout_and_generated_from(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "own_model.py", tmp_path / "mine.py")
    write_data_of_tokenizer(tmp_path / "text", [[*range(1, 40), 260]] * 4)
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 "
    words += "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --split 1,1,0 --no-bf16 "
    words += "--eval-iters 0 --data-path text --log-interval 1 --lr 1e-2 --lr-decay-iters 4 "
    start = partial(run, "pretrain.py", folder=tmp_path)
    whole = (*words.split(), "--train-iters", 4, "--metrics-file")
    mine = ("--model", "mine:KIND", "--label-smoothing", 0.1)
    start(*mine, *whole, "mine.jsonl", world=1)
    start(*mine[:2], *whole, "plain.jsonl", world=1)
    start("--model", "gpt2", *whole, "gpt2.jsonl", world=1)
    saved = (*mine, *words.split(), "--save", "save")
    start(*saved, "--train-iters", 2, "--tensor-model-parallel-size", 2, world=2)
    start(*saved, "--train-iters", 4, "--load", "save", world=2)  # data parallel
    losses = values_of(tmp_path / "mine.jsonl")
    assert values_of(tmp_path / "save") == pytest.approx(losses, rel=1e-5)
    for one, other in (("mine", "plain"), ("plain", "gpt2")):  # its loss, and its block
        values = (values_of(tmp_path / f"{name}.jsonl") for name in (one, other))
        assert next(values) != pytest.approx(next(values), rel=1e-3)
    flags = ["--load", "save", "--prompt", "a", "--max-new-tokens", "3"]
    text = run("tools/generate.py", *flags, "--temperature", 0, world=1, folder=tmp_path)
    assert text


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for command in block.splitlines():
        words, _, output = command.removeprefix("python ").partition(" > ")
        file, *flags = words.split()
        printed = run(file, *flags, world=1, folder=tmp_path)
        if output:
            (tmp_path / output).write_text(printed)
    assert "step 2 | done" in printed
    assert not (tmp_path / "checkpoints").exists()
