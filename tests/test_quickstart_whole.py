"""The quickstart and every command of the README, as a user types them and with the presets that it
names; only lengths are cut, and folders are a test's own."""

import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.tools.papers import WIKITEXT

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FEW = 48  # documents, of which an example reads a whole epoch
LENGTHS = {  # of the quickstart, which takes them from its preset
    "train_iters": 30,
    "lr_warmup_fraction": 0.17,
    "log_interval": 5,
    "eval_interval": 15,
    "eval_iters": 1,
}
COLUMNS = "sentence1\tsentence2\tgold_label"
LABELS = ("contradiction", "entailment", "neutral")

pytestmark = pytest.mark.slow


def shell(command: str) -> str:
    """What the command prints, run in the repository's root with this Python first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data/ as the README has it, and a corpus of real English."""
    folder = tmp_path_factory.mktemp("quickstart")
    with (folder / "mine.jsonl").open("w") as file:
        for name, text in sorted(topics.items()):
            file.write(json.dumps({"text": text, "id": name}) + "\n")
    data = folder / "data"
    (data / "wikitext103").mkdir(parents=True)
    (data / "wikitext103" / "wiki.test.tokens").write_text(WIKITEXT)
    (data / "lambada_test.jsonl").write_text(json.dumps({"text": "One two three and so to bed"}))
    (data / "mnli").mkdir()
    for name, count in (("train", 128), ("dev_matched", 6), ("dev_mismatched", 6)):
        rows = [f"{name} {n}\tThe answer is {n}.\t{LABELS[n % 3]}" for n in range(count)]
        (data / "mnli" / f"{name}.tsv").write_text("\n".join([COLUMNS, *rows, ""]))
    return folder


@pytest.fixture(scope="module")
def quickstart(folder: Path) -> Path:
    """What it leaves of a corpus of one's own."""
    preset = (ROOT / "scripts" / "presets" / "quickstart.toml").read_text()
    for key, value in LENGTHS.items():
        preset, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", preset)
        assert count == 1, key
    (folder / "short.toml").write_text(preset)
    out = folder / "runs" / "quickstart"
    command = f"bash scripts/quickstart.sh {folder}/mine.jsonl --output {out}"
    command += f" --preset {folder}/short.toml"
    shell(command)
    assert shell(command).count("reused") == 7
    (out / "corpus" / "raw.jsonl").symlink_to(folder / "mine.jsonl")
    with (out / "corpus" / "split" / "train" / "part-00000.jsonl").open() as documents:
        (folder / "few.jsonl").write_text("".join(islice(documents, FEW)))
    return out


def test_quickstart_leaves_what_the_contract_names(quickstart: Path) -> None:
    report = json.loads((quickstart / "report.json").read_text())
    assert {"corpus", "layout", "seconds", "training", "evaluation", "samples"} <= report.keys()
    assert report["layout"]["tensor_parallel_size"] == 2
    assert {"tokens_per_second", "train_loss", "validation_loss"} <= report["training"].keys()
    evaluation = report["evaluation"]
    assert evaluation["token_perplexity"] < 1000  # it has learnt: uniform is 2048
    assert evaluation["bigram_perplexity"] < evaluation["unigram_perplexity"]
    assert evaluation["word_perplexity"] > evaluation["token_perplexity"]
    assert 0 < evaluation["xz_bits_per_byte"] < 8
    assert 0 < evaluation["bits_per_byte"] < 8
    assert 0 <= evaluation["cloze_accuracy"] <= 1
    assert all(sample["text"] for sample in report["samples"])
    steps = [json.loads(line) for line in (quickstart / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(5, 31, 5))
    page = (quickstart / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r'(src|href)="?https?:', page), "the page opens offline"


def readme_commands() -> list[str]:
    """The commands of the README's bash blocks, line continuations joined."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def shortened(command: str, folder: Path) -> str:
    """With lengths cut, and runs/ and data/ in the folder."""

    def iterations(found: re.Match[str]) -> str:
        steps = max(2, int(found[1]) // 100)
        return f"--train-iters {steps} --lr-warmup-iters 1 --eval-iters 1"

    if "--train-iters" in command:
        command = re.sub(r"--lr-warmup-iters \d+", "", command)
    if "--epochs 1" in command:
        command = re.sub(r"--data-path \S+", f"--data-path {folder}/few.jsonl", command)
    command = re.sub(r"(?<![\w/.-])(runs|data)/", rf"{folder}/\1/", command)
    command = re.sub(r"--train-iters (\d+)", iterations, command)
    command = command.replace("--save-interval 100", "--save-interval 1")
    return command.replace("--seeds 5", "--seeds 2 --epochs 1")


def test_every_command_of_the_readme_runs(folder: Path, quickstart: Path) -> None:
    commands = readme_commands()
    assert len(commands) > 20
    for command in commands:
        shell(shortened(command, folder))
    latest = folder / "runs" / "mine" / "checkpoints" / "latest"
    assert latest.read_text() == "step_00000003\n"
    assert "<svg" in (folder / "runs" / "mine" / "corpus.html").read_text()
