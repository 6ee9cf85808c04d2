"""The two scripts and every command of the README, in miniature, as a user types them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from megatron.config import PretrainBertConfig, PretrainGPT2Config, parse
from tools.inspect_data import Settings as InspectSettings

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PRESET = """
num_layers = 2
hidden_size = 32
num_attention_heads = 4
seq_length = 64
max_position_embeddings = 64
attention_dropout = 0.0
hidden_dropout = 0.0
micro_batch_size = 8
global_batch_size = 8
train_iters = 30
lr = 5e-3
log_interval = 5
eval_interval = 15
eval_iters = 1
"""
WIKITEXT = """
 = Statements =

 An assignment binds a name ; it is one of 3 @,@ 000 statements .

 = = Loops = =

 A loop ( of any kind ) runs until it ends .
"""

COLUMNS = "sentence1\tsentence2\tgold_label"
LABELS = ("contradiction", "entailment", "neutral")

pytestmark = pytest.mark.slow


def shell(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run in the repository's root, with the environment of this Python first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus of real English and a small preset."""
    folder = tmp_path_factory.mktemp("quickstart")
    with (folder / "corpus.jsonl").open("w") as file:
        for name, text in sorted(topics.items()):
            file.write(json.dumps({"text": text, "id": name}) + "\n")
    (folder / "tiny.toml").write_text(PRESET)
    (folder / "wiki.tokens").write_text(WIKITEXT)
    (folder / "finetune.toml").write_text("epochs = 1\nglobal_batch_size = 4\n")
    for name in ("train", "dev_matched", "dev_mismatched"):
        rows = [f"{name} {n}\tThe answer is {n}.\t{LABELS[n % 3]}" for n in range(6)]
        (folder / f"{name}.tsv").write_text("\n".join([COLUMNS, *rows, ""]))
    (folder / "lambada.jsonl").write_text(json.dumps({"text": "One two three and so to bed"}))
    return folder


@pytest.fixture(scope="module")
def quickstart(folder: Path) -> str:
    """The command line of the README, made small."""
    return (
        f"bash scripts/quickstart.sh {folder}/corpus.jsonl --out {folder}/runs "
        f"--preset {folder}/tiny.toml --vocab-size 512"
    )


def test_quickstart_leaves_what_the_contract_names(folder: Path, quickstart: str) -> None:
    ended = shell(quickstart)
    assert ended.returncode == 0, ended.stderr
    out = folder / "runs"
    report = json.loads((out / "report.json").read_text())
    assert {"corpus", "layout", "seconds", "training", "evaluation", "samples"} <= report.keys()
    assert report["layout"]["tensor_parallel_size"] == 2
    assert {"tokens_per_second", "train_loss", "validation_loss"} <= report["training"].keys()
    evaluation = report["evaluation"]
    assert evaluation["token_perplexity"] < 512  # it has learnt: uniform is 512
    assert evaluation["bigram_perplexity"] < evaluation["unigram_perplexity"]
    assert evaluation["word_perplexity"] > evaluation["token_perplexity"]
    assert 0 < evaluation["xz_bits_per_byte"] < 8
    assert 0 < evaluation["bits_per_byte"] < 8
    assert 0 <= evaluation["cloze_accuracy"] <= 1
    assert all(sample["text"] for sample in report["samples"])
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all("step" in line for line in steps)
    assert [line["step"] for line in steps if "loss" in line] == list(range(5, 31, 5))
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r'(src|href)="?https?:', page), "the page opens offline"

    again = shell(quickstart)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("reused") == 8


def readme_commands() -> list[str]:
    """The commands of the README's bash blocks, line continuations joined."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_command_of_the_readme_runs(folder: Path, quickstart: str) -> None:
    assert shell(quickstart).returncode == 0  # reused where the test above has run
    commands = readme_commands()
    assert len(commands) == 30
    small = {
        "runs/quickstart/corpus/raw.jsonl": f"{folder}/corpus.jsonl",
        "runs/quickstart": f"{folder}/runs",
        "runs/mine": f"{folder}/mine",
        "data/wikitext103/wiki.test.tokens": f"{folder}/wiki.tokens",
        "data/lambada_test.jsonl": f"{folder}/lambada.jsonl",
        "data/mnli": str(folder),
        "scripts/presets/quickstart.toml": f"{folder}/tiny.toml",
        "scripts/presets/miniature_bert.toml": f"{folder}/tiny.toml",
        "scripts/presets/finetune/mnli_336m.toml": f"{folder}/finetune.toml",
        "--seq-length 256": "--seq-length 64",
        "--vocab-size 8000": "--vocab-size 600",
        "--seeds 5": "--seeds 2",
        "--train-iters 400": "--train-iters 4",
        "--train-iters 200": "--train-iters 4",
        "--save-interval 100": "--save-interval 2",
        "--train-iters 300": "--train-iters 6",
    }
    for command in commands:
        for text, instead in small.items():
            command = command.replace(text, instead)
        ended = shell(command, OMP_NUM_THREADS="1")
        assert ended.returncode == 0, f"{command}\n{ended.stderr}"
    assert (folder / "mine" / "checkpoints" / "latest").read_text() == "step_00000006\n"
    assert "<svg" in (folder / "mine" / "corpus.html").read_text()


def test_the_command_for_many_nodes_has_a_preset_that_fits() -> None:
    command = re.search(r"torchrun --nnodes 8 --nproc-per-node 8.*?--save", README, re.DOTALL)
    assert command is not None
    words = shlex.split(command[0].replace("\\\n", " "))
    preset = words[words.index("--preset") + 1]
    parse(PretrainGPT2Config, ["--preset", str(ROOT / preset)], {}).check(64)


def test_what_the_readme_inspects_is_what_its_model_reads() -> None:
    inspected = parse(InspectSettings, words_of("tools/inspect_data.py"), {})
    trained = parse(PretrainBertConfig, words_of("pretrain_bert.py"), {})
    assert (inspected.data, inspected.seed) == (trained.data, trained.training.seed)


def words_of(program: str) -> list[str]:
    """The flags that the README gives a program, for any working directory."""
    (words,) = [shlex.split(line) for line in readme_commands() if program in line]
    flags = words[words.index(program) + 1 :]
    return [word.replace("scripts/", f"{ROOT}/scripts/") for word in flags]
