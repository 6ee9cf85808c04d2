"""The same numbers from lm-evaluation-harness.

Three ways to LAMBADA's and WikiText103's figures of one model, in fp32: the harness with its own
HuggingFace model, on what tools/convert_hf.py exports; what tasks/main.py computes; the harness
with the checkpoint behind it, as in tools/lm_harness.py. Hits have to be the same, perplexities and
bits per byte within a relative 1e-4, or nothing is reported. Without --load the model is a
GPT-2 of transformers with wide random weights, which learns the last words of every second passage,
so that there are hits to agree on: its figures say that the conventions are the same, and nothing
of a model.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.harness import Column, Contender, Figures, Flags, Rank, Turn, scratch
from benchmarks.program import DATA, WholeRuns
from megatron.config.checkpoint import TrainedConfig
from megatron.config.training import ParallelConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.train.evaluate import load_newest
from megatron.train.trained import open_trained
from tasks import lambada, wikitext103
from tasks.common import score_windows
from tasks.main import evaluate
from tools.convert_hf import export_model, import_model
from tools.harness.definitions import READERS, find_harness
from tools.lm_harness import ask, find_tasks, write_local

LAMBADA, WIKITEXT = TASKS = ("lambada_openai", "wikitext")
SAME = {"figures": 1e-4, "passages": 0.0}
FIGURES = {  # task, name here, name there
    "LAMBADA, accuracy": (LAMBADA, "strict_accuracy", "acc"),
    "perplexity of last words": (LAMBADA, "last_word_perplexity", "perplexity"),
    "WikiText, perplexity per word": (WIKITEXT, "word_perplexity_per_document", "word_perplexity"),
    "bits per byte": (WIKITEXT, "bits_per_byte_per_document", "bits_per_byte"),
}


def compared(figures: Figures, hits: list[bool]) -> Figures:
    """With what has to be the same."""
    return {**figures, "hits": sum(hits), "figures": [*figures.values()], "passages": hits}


def by_tasks(rank: Rank, load: str, files: Mapping[str, str]) -> Turn:
    trained, mesh = TrainedConfig(load=load), rank.mesh()
    folders, tokenizer, manifest = open_trained(trained, ParallelConfig(), 1)
    model = load_newest(folders, mesh)[1]

    def turn() -> Figures:
        records = {}
        for name, module in {WIKITEXT: wikitext103, LAMBADA: lambada}.items():
            settings = module.Settings(trained=trained, valid_data=Path(files[name]))
            task = module.prepare(settings, manifest, tokenizer)
            records[name] = evaluate(task, model, mesh, 8, name)
        scores = score_windows(model, mesh, task, 8, LAMBADA)
        figures = {title: records[name][ours] for title, (name, ours, _) in FIGURES.items()}
        return compared(figures, scores.all_hit.tolist())

    return turn


def by_harness(rank: Rank, load: str, files: Mapping[str, str], exported: bool) -> Turn:
    """exported: with the harness's own model."""
    lm: Any
    if exported:
        from lm_eval.models.huggingface import HFLM

        to = scratch() / "exported"
        export_model(load, to)
        lm = HFLM(str(to), device=rank.device_type, dtype="float32", batch_size=8)
    else:
        from tools.harness.language_model import CheckpointLM

        mesh = rank.mesh()
        folders, tokenizer, _ = open_trained(TrainedConfig(load=load), ParallelConfig(), 1)
        lm = CheckpointLM(load_newest(folders, mesh)[1], mesh, tokenizer, 8)

    def turn() -> Figures:
        write_local(scratch(), find_harness(), {x: Path(file) for x, file in files.items()})
        said = ask(lm, TASKS, find_tasks(TASKS, [scratch()]), None)
        samples = sorted(said["samples"][LAMBADA], key=lambda each: each["doc_id"])
        results = said["results"]
        figures = {title: results[name][f"{its},none"] for title, (name, _, its) in FIGURES.items()}
        return compared(figures, [each["filtered_resps"][0][1] for each in samples])

    return turn


def made(passages: Path, folder: Path) -> Path:
    """A checkpoint, after eight rounds of Adam on the last tokens of every second passage."""
    torch.manual_seed(1234)
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    tokenizer = build_tokenizer("GPT2BPETokenizer", *files)
    shape = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **shape)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for ids in [tokenizer.encode(text) for text in READERS[LAMBADA](passages)[::2]] * 8:
        tokens = torch.tensor([ids[-256:]])
        x = model.transformer(tokens).last_hidden_state[0, -4:-1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.lm_head(x), tokens[0, -3:]).backward()
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
    """Compare the three ways; files are by default in the folder MEGATRON_TEST_DATA.

    Args:
        load: directory of checkpoints, or one of them; a small model is made if not given.
        tokenizer: folder with vocab.json and merges.txt, for the model that is made.
    """
    data = {LAMBADA: lambada_data, WIKITEXT: wikitext_data}
    files = {task: str(file.resolve()) for task, file in data.items()}
    load = load or made(lambada_data, tokenizer)
    ours: dict[str, Any] = {"load": str(load.resolve()), "files": files}
    for name, run, own, needs in (
        ("harness, exported folder", by_harness, {"exported": True}, ("lm_eval", "accelerate")),
        ("tasks/main.py", by_tasks, {}, ()),
        ("harness, checkpoint", by_harness, {"exported": False}, ("lm_eval",)),
    ):
        yield Contender(name, run, ours | own, threads=2, needs=needs, same=SAME)


QUESTION = WholeRuns(
    contenders,
    (*(Column(title, title, "{:.10g}") for title in FIGURES), Column("hits", "hits", "{:.0f}")),
    lambda found: (
        f"The ways to score one model agree; {found.range('hits', '{:.0f}')} passages are hits."
    ),
)

if __name__ == "__main__":
    QUESTION.run()
