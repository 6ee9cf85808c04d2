"""The quickstart, and every command of the pages with the presets that it names, in
processes that have imported torch before; only sizes and lengths are cut, and folders are a test's
own."""

import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.programs import run_command
from tests.tools.papers import WIKITEXT, reused_stages, shell, small_preset
from tools.experiments import quickstart as experiment

ROOT = Path(__file__).resolve().parents[1]
# In an order in which a page's files are there. The rest of docs has no bash blocks, or names files
# of the reader's.
PAGES = ("tutorial_corpus", "pretrain", "data", "library", "finetune", "evaluate", "convert")
PAGES += ("plan", "operations", "corpus")
FEW = 16  # documents, of which an example reads a whole epoch
MODEL = {"num_layers": 2, "hidden_size": 64}
SIZES = {  # of the quickstart, which takes them from its preset
    **MODEL,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "train_iters": 60,
    "lr_warmup_fraction": 0.17,
    "log_interval": 10,
    "eval_interval": 30,
    "eval_iters": 1,
}
WORDS = 512  # of each vocabulary
ELSEWHERE = {"python tools/plan.py figure5 --hardware dgx2h"}  # tests/tools/plan/test_plan.py
COLUMNS = "sentence1\tsentence2\tgold_label"
LABELS = ("contradiction", "entailment", "neutral")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data/ as the pages have it, and a corpus of real English."""
    folder = tmp_path_factory.mktemp("quickstart")
    with (folder / "mine.jsonl").open("w") as file:
        for name, text in sorted(topics.items()):
            file.write(json.dumps({"text": text, "id": name}) + "\n")
    data = folder / "data"
    (data / "wikitext103").mkdir(parents=True)
    (data / "wikitext103" / "wiki.test.tokens").write_text(WIKITEXT)
    (data / "lambada_test.jsonl").write_text(json.dumps({"text": "One two three and so to bed"}))
    (data / "mine.jsonl").symlink_to(folder / "mine.jsonl")
    (data / "mnli").mkdir()
    for name, count in (("train", 128), ("dev_matched", 6), ("dev_mismatched", 6)):
        rows = [f"{name} {n}\tThe answer is {n}.\t{LABELS[n % 3]}" for n in range(count)]
        (data / "mnli" / f"{name}.tsv").write_text("\n".join([COLUMNS, *rows, ""]))
    return folder


@pytest.fixture(scope="module")
def quickstart(folder: Path) -> Path:
    """The folder that the quickstart leaves of a user's own corpus."""
    small_preset(folder, "miniature_llama", MODEL)
    small_preset(folder, "miniature_bert", {**MODEL, "micro_batch_size": 2, "global_batch_size": 2})
    lengths = {"seq_length": 128, "max_position_embeddings": 128, "num_attention_heads": 4}
    batch = {"micro_batch_size": 2, "global_batch_size": 2}
    small_preset(folder, "gpt2_124m", {**MODEL, **lengths, **batch})
    preset = small_preset(folder, "quickstart", SIZES)
    out = folder / "runs" / "quickstart"
    words = [folder / "mine.jsonl", "--output", out, "--preset", preset, "--vocab-size", WORDS]
    assert "[7/7]" in shell("scripts/quickstart.sh", *words, "--plan-only")
    assert reused_stages(experiment, words) == 0
    (out / "corpus" / "raw.jsonl").symlink_to(folder / "mine.jsonl")
    with (out / "corpus" / "split" / "train" / "part-00000.jsonl").open() as documents:
        (folder / "few.jsonl").write_text("".join(islice(documents, FEW)))
    return out


def test_quickstart(quickstart: Path) -> None:
    report = json.loads((quickstart / "report.json").read_text())
    assert {"corpus", "layout", "seconds", "training", "evaluation", "samples"} <= report.keys()
    assert report["layout"]["tensor_parallel_size"] == 2
    assert {"tokens_per_second", "train_loss", "validation_loss"} <= report["training"].keys()
    evaluation = report["evaluation"]
    assert evaluation["token_perplexity"] < 0.7 * WORDS  # it has learnt
    assert evaluation["bigram_perplexity"] < evaluation["unigram_perplexity"]
    assert evaluation["word_perplexity"] > evaluation["token_perplexity"]
    assert 0 < evaluation["xz_bits_per_byte"] < 8
    assert 0 < evaluation["bits_per_byte"] < 8
    assert 0 <= evaluation["cloze_accuracy"] <= 1
    assert all(sample["text"] for sample in report["samples"])
    steps = [json.loads(line) for line in (quickstart / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(10, 61, 10))
    page = (quickstart / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r'(src|href)="?https?:', page), "the page opens offline"


def blocks_of_pages() -> list[list[str]]:
    """The commands of each of the pages' bash blocks, line continuations joined."""
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)
    blocks = re.findall(r"```bash\n(.*?)```", pages, re.DOTALL)
    lines = [block.replace("\\\n", " ").splitlines() for block in blocks]
    return [[line for line in block if line and not line.startswith("#")] for block in lines]


BLOCKS = blocks_of_pages()


def program_of(number: int) -> str:
    """The first program of a block, as its name."""
    return Path(re.search(r"[\w/.]+\.py|(?<=-m )[\w.]+", BLOCKS[number][0])[0]).stem


def needed_blocks(number: int) -> list[int]:
    """Earlier blocks that name one of the block's paths in runs/mine, which may make it."""
    paths = [set(re.findall(r"runs/mine/[\w/]+", " ".join(block))) for block in BLOCKS]
    return [earlier for earlier in range(number) if paths[earlier] & paths[number]]


def shortened(command: str, folder: Path) -> str:
    """With sizes and lengths cut, and runs/ and data/ in the folder."""

    def iterations(found: re.Match[str]) -> str:
        steps = min(3, max(2, int(found[1]) // 100))
        return f"--train-iters {steps} --lr-warmup-iters 1 --eval-iters 1"

    if "--train-iters" in command or "--epochs 1" in command:
        command = re.sub(r"--lr-warmup-iters \d+", "", command)
    if "--epochs 1" in command:
        command = re.sub(r"--data-path \S+", f"--data-path {folder}/few.jsonl", command)
        command += " --lr-warmup-iters 1 --seq-length 128 --hidden-size 96"
    elif " examples/" in command and "pretrain.py" not in command:
        command += " --steps 2"
    for preset in folder.glob("*.toml"):
        names = rf"--preset (scripts/presets/)?{preset.stem}(\.toml)?(?=\s|$)"
        command = re.sub(names, f"--preset {preset}", command)
    command = re.sub(r"(?<![\w/.-])(runs|data)/", rf"{folder}/\1/", command)
    command = re.sub(r"--train-iters (\d+)", iterations, command)
    command = re.sub(r"--vocab-size (4096|8000|32768)", f"--vocab-size {WORDS}", command)
    command = command.replace("--steps 3", "--steps 1 --num-layers 4")
    command = command.replace("--seq-length 256", "--seq-length 64")
    command = command.replace("--save-interval 100", "--save-interval 1")
    return command.replace("--seeds 5", "--seeds 2 --epochs 1")


@pytest.fixture(scope="module")
def run_block(folder: Path, quickstart: Path) -> Callable[[int], None]:
    """Runs a block of the pages, once."""

    @cache
    def run(number: int) -> None:
        for needed in needed_blocks(number):
            run(needed)
        for command in (each for each in BLOCKS[number] if each not in ELSEWHERE):
            run_command(shlex.split(shortened(command, folder), comments=True), folder)

    return run


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=program_of)
def test_commands_of_the_pages(number: int, run_block: Callable[[int], None], folder: Path) -> None:
    run_block(number)
    if any("runs/mine/checkpoints" in command for command in BLOCKS[number]):
        latest = folder / "runs" / "mine" / "checkpoints" / "latest"
        assert latest.read_text() == "step_00000003\n"
    if any("runs/mine/corpus.html" in command for command in BLOCKS[number]):
        assert "<svg" in (folder / "runs" / "mine" / "corpus.html").read_text()


def test_the_pages_have_their_commands() -> None:
    assert sum(map(len, BLOCKS)) > 40
    assert {each for block in BLOCKS for each in block} >= ELSEWHERE
    pages = {page.stem for page in (ROOT / "docs").glob("*.md") if "```bash" in page.read_text()}
    # test_own_parts.py and test_pages.py have these.
    assert pages - {*PAGES} == {"configuration", "parallelism", "sources", "tutorial_layout"}
    assert "```bash" not in (ROOT / "README.md").read_text()
