"""The same numbers from lm-evaluation-harness.

Three ways to compute LAMBADA's and WikiText103's figures of one model, in fp32: the harness with
its own HuggingFace model, on the export of tools/convert_hf.py; tasks/main.py; and the harness on
the checkpoint, by tools/lm_harness.py. Figures have to agree within a relative 1e-4, or nothing is
reported; a single additional hit exceeds it. Without --load the model is a GPT-2 of transformers
with large random weights that learns the last words of every second passage, so that there are hits
to compare: its figures show that the conventions are equal, and say nothing about a model.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.harness import Column, Contender, Figures, Flags, Rank, Turn, scratch
from benchmarks.program import DATA, WholeRuns, record_of
from megatron.data.tokenizer import build_tokenizer
from megatron.libraries import Library
from tools.convert_hf import export_model, import_model
from tools.harness.definitions import READERS, find_harness
from tools.lm_harness import ask, find_tasks, write_local

hf_models = Library("lm_eval.models.huggingface")

LAMBADA, WIKITEXT = TASKS = ("lambada_openai", "wikitext")
OURS = {LAMBADA: "LAMBADA", WIKITEXT: "WIKITEXT103"}
FIGURES = {  # task, name in tasks/, name in the harness
    "LAMBADA, accuracy": (LAMBADA, "strict_accuracy", "acc,none"),
    "perplexity of last words": (LAMBADA, "last_word_perplexity", "perplexity,none"),
    "perplexity per word": (WIKITEXT, "word_perplexity_per_document", "word_perplexity,none"),
    "bits per byte": (WIKITEXT, "bits_per_byte_per_document", "bits_per_byte,none"),
}


def figures(records: Mapping[str, Any], place: int) -> Figures:
    """The figures in the records by task. place: index of their name in FIGURES, 1 or 2."""
    found = {title: records[names[0]][names[place]] for title, names in FIGURES.items()}
    return {**found, "all": [*found.values()]}


def by_tasks(rank: Rank, load: str, files: Mapping[str, str]) -> Turn:
    words = {task: ["--task", OURS[task], "--valid-data", files[task]] for task in TASKS}
    words[WIKITEXT].append("--per-document")
    return lambda: figures(
        {x: record_of(rank, "tasks/main.py", "--load", load, *words[x]) for x in TASKS}, 1
    )


def by_tool(rank: Rank, load: str, files: Mapping[str, str]) -> Turn:
    words = ["--load", load, "--tasks", ",".join(TASKS)]
    words += ["--lambada-data", files[LAMBADA], "--wikitext-data", files[WIKITEXT]]
    return lambda: figures(record_of(rank, "tools/lm_harness.py", *words)["results"], 2)


def by_harness(rank: Rank, load: str, files: Mapping[str, str]) -> Turn:
    exported = scratch() / "exported"
    export_model(load, exported)
    lm: Any = hf_models.HFLM(str(exported), device=rank.device_type, dtype="float32", batch_size=8)
    write_local(scratch(), find_harness(), {task: Path(file) for task, file in files.items()})
    return lambda: figures(ask(lm, TASKS, find_tasks(TASKS, [scratch()]), None)["results"], 2)


def made(passages: Path, folder: Path) -> Path:
    """A checkpoint, after eight rounds of Adam on the last tokens of every second passage."""
    torch.manual_seed(1234)
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    tokenizer = build_tokenizer("GPT2BPETokenizer", *files)
    shape: Any = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **shape)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for ids in [tokenizer.encode(text) for text in READERS[LAMBADA](passages)[::2]] * 8:
        tokens = torch.tensor([ids[-256:]])
        logits = model(tokens, logits_to_keep=4).logits[0, :-1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, tokens[0, -3:]).backward()
        optimizer.step()
    model.save_pretrained(scratch() / "made")
    import_model(str(scratch() / "made"), scratch() / "checkpoint", *files)
    return scratch() / "checkpoint"


def contenders(
    flags: Flags,
    lambada_data: Path = DATA / "lambada/lambada_test_first500.jsonl",
    wikitext_data: Path = DATA / "wikitext103/wiki.valid.tokens",
    load: Path | None = None,
    tokenizer: Path = DATA / "gpt2",
) -> Iterator[Contender]:
    """Compare the three ways; by default, files are in the folder MEGATRON_TEST_DATA.

    load: a checkpoint. tokenizer: folder with vocab.json and merges.txt, for a model made here.
    """
    load = load or made(lambada_data, tokenizer)
    files = {LAMBADA: str(lambada_data.resolve()), WIKITEXT: str(wikitext_data.resolve())}
    for name, run, needs in (
        ("harness, exported folder", by_harness, ("lm_eval", "accelerate")),
        ("tasks/main.py", by_tasks, ()),
        ("harness, checkpoint", by_tool, ("lm_eval",)),
    ):
        own = {"load": str(load.resolve()), "files": files}
        yield Contender(name, run, own, threads=2, needs=needs, same={"all": 1e-4})


COLUMNS = [Column(title, title, "{:.10g}") for title in FIGURES]
RESULT = "The ways to score one model agree: its accuracy on LAMBADA is {}."
QUESTION = WholeRuns(
    contenders, COLUMNS, lambda found: RESULT.format(found.range(COLUMNS[0].title, "{:.4f}"))
)

if __name__ == "__main__":
    QUESTION.run()
