"""This project's LAMBADA and WikiText103 beside lm-evaluation-harness, on the same model.

Three ways to the same numbers, in fp32: the harness with its own HuggingFace model, on the folder
that tools/convert_hf.py exports; tasks/main.py on the checkpoint; and the harness with the
checkpoint behind it, as tools/lm_harness.py does. Accuracy and the passages that are hits have to
be the same, perplexities and bits per byte within 1e-4 of each other; else the exit status is 1.
ln p is that of a passage's last word and of a whole page. Without --load the model is a GPT-2 of
transformers with wide random weights, which then learns the last words of every second passage, so
that there are hits and misses to agree on: its figures say that the conventions are the same, and
nothing of a model.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from benchmarks.processes import ROOT
from benchmarks.program import DATA, found
from benchmarks.report import Results
from megatron.config.checkpoint import TrainedConfig
from megatron.config.training import ParallelConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.train.trained import open_trained
from tools.harness.definitions import READERS, find_harness
from tools.lm_harness import ask as ask_harness
from tools.lm_harness import find_tasks, write_local

ACCURACY = "LAMBADA, accuracy"
LAMBADA, WIKITEXT = TASKS = ("lambada_openai", "wikitext")
FIGURES = {  # task, name here, name there
    ACCURACY: (LAMBADA, "strict_accuracy", "acc"),
    "perplexity of last words": (LAMBADA, "last_word_perplexity", "perplexity"),
    "WikiText, perplexity per word": (WIKITEXT, "word_perplexity_per_document", "word_perplexity"),
    "bits per byte": (WIKITEXT, "bits_per_byte_per_document", "bits_per_byte"),
}
APART, HITS, LISTS = "largest relative difference", "hits that differ", {"words", "hits", "pages"}
TOLERANCE = 1e-4


def program(rank: Rank, *words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=rank.environ, check=True)


def own_model(rank: Rank, load: str) -> tuple[Any, ...]:
    """Mesh, model, tokenizer and manifest of a checkpoint."""
    from megatron.train.evaluate import load_newest

    folders, tokenizer, manifest = open_trained(TrainedConfig(load=load), ParallelConfig(), 1)
    mesh = rank.mesh()
    return mesh, load_newest(folders, mesh)[1], tokenizer, manifest


def by_tasks(rank: Rank, load: str, files: Mapping[str, str]) -> Turn:
    """tasks/main.py, and in this process what it says of each passage."""
    from tasks import lambada
    from tasks.common import score_windows

    def turn() -> Figures:
        records = {}
        with TemporaryDirectory() as folder:
            for task, name in zip(TASKS, ("LAMBADA", "WIKITEXT103"), strict=True):
                output = Path(folder, "record.json")
                words = ["--task", name, "--valid-data", files[task], "--output", output]
                program(rank, "tasks/main.py", "--load", load, *words)
                records[task] = json.loads(output.read_text())
        mesh, model, tokenizer, manifest = own_model(rank, load)
        trained = TrainedConfig(load=load)
        settings = lambada.Settings(trained=trained, valid_data=Path(files[LAMBADA]))
        passages = lambada.prepare(settings, manifest, tokenizer)
        scores = score_windows(model, mesh, passages, 8, "LAMBADA")
        return {
            **{title: records[task][ours] for title, (task, ours, _) in FIGURES.items()},
            "words": scores.log_probability.tolist(),
            "hits": scores.all_hit.tolist(),
        }

    return turn


def by_harness(rank: Rank, load: str, files: Mapping[str, str], *, exported: bool) -> Turn:
    """exported: with the harness's own model."""

    def turn() -> Figures:
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_local(folder, find_harness(), {task: Path(file) for task, file in files.items()})
            if exported:
                from lm_eval.models.huggingface import HFLM

                to = folder / "exported"
                program(rank, "tools/convert_hf.py", "export", "--from", load, "--to", to)
                lm = HFLM(str(to), device=rank.device_type, dtype="float32", batch_size=8)
            else:
                from tools.harness.language_model import CheckpointLM

                mesh, model, tokenizer, _ = own_model(rank, load)
                lm = CheckpointLM(model, mesh, tokenizer, 8)
            answered = ask_harness(lm, TASKS, find_tasks(TASKS, [folder]), None)
        answers = {}
        for task, samples in answered["samples"].items():
            ordered = sorted(samples, key=lambda each: each["doc_id"])
            answers[task] = [each["filtered_resps"][0] for each in ordered]
        return {
            **{
                t: answered["results"][task][f"{its},none"] for t, (task, _, its) in FIGURES.items()
            },
            "words": [p for p, _ in answers[LAMBADA]],
            "hits": [hit for _, hit in answers[LAMBADA]],
            "pages": answers[WIKITEXT],
        }

    return turn


def differences(own: Figures, first: Figures) -> Figures:
    if own is first or not first:
        return {}
    known = LISTS & own.keys() & first.keys()
    pairs = {key: zip(own[key], first[key], strict=True) for key in known}
    pages = [abs(a / b - 1) for a, b in pairs.get("pages", ())]
    return {
        APART: max(abs(own[title] / first[title] - 1) for title in FIGURES if first[title]),
        HITS: sum(a != b for a, b in pairs["hits"]),
        "ln p of a word, largest difference": max(abs(a - b) for a, b in pairs["words"]),
        **({"of a page, relative": max(pages)} if pages else {}),
    }


def difference(title: str, form: str = "{:.1e}") -> Column:
    return Column(title, lambda own, first: differences(own, first).get(title), form)


def measured(results: Results) -> dict[str, Figures]:
    return {name: rounds[-1] for (_, name), rounds in results.rounds.items() if rounds}


def result(results: Results) -> str:
    first, *others = measured(results).values()
    gap = max((differences(own, first)[APART] for own in others), default=math.nan)
    return (
        f"{1 + len(others)} ways to score one model find {sum(first['hits'])} of "
        f"{len(first['hits'])} answers; perplexities agree within {gap:.1e}."
    )


def failure(results: Results) -> str:
    first, *others = measured(results).values()
    found = [differences(own, first) for own in others]
    if any(each[HITS] for each in found) or len({each[ACCURACY] for each in (first, *others)}) > 1:
        return "they do not agree on which passages are hits"
    return "they do not agree" if any(each[APART] > TOLERANCE for each in found) else ""


def make_checkpoint(folder: Path, passages: Path, vocab_file: str, merge_file: str) -> Path:
    """Eight rounds of Adam on the last three tokens of every second passage."""
    import torch
    import transformers

    torch.manual_seed(1234)
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file, merge_file)
    shape = {"vocab_size": tokenizer.vocab_size, "n_positions": 256, "n_layer": 2, "n_embd": 64}
    config = transformers.GPT2Config(**shape, n_head=4, initializer_range=0.1)  # type: ignore[arg-type]
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for ids in [tokenizer.encode(text) for text in READERS[LAMBADA](passages)[::2]] * 8:
        tokens = torch.tensor([ids[-256:]])
        x = model.transformer(tokens).last_hidden_state[0, -4:-1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.lm_head(x), tokens[0, -3:]).backward()
        optimizer.step()
    model.save_pretrained(folder / "made")
    words = ["import", "--from", folder / "made", "--to", folder / "checkpoint"]
    words += ["--vocab-file", vocab_file, "--merge-file", merge_file]
    program(Rank(), "tools/convert_hf.py", *words)
    return folder / "checkpoint"


def main(
    flags: Flags,
    lambada_data: Path = DATA / "lambada" / "lambada_test_first500.jsonl",
    wikitext_data: Path = DATA / "wikitext103" / "wiki.valid.tokens",
    load: Path | None = None,
    vocab_file: Path = DATA / "gpt2" / "vocab.json",
    merge_file: Path = DATA / "gpt2" / "merges.txt",
) -> None:
    """Compare the three ways; files are by default in the folder MEGATRON_TEST_DATA.

    Args:
        lambada_data: {"text": ...} a line, or plain text, a passage a line.
        wikitext_data: raw WikiText, such as wiki.valid.tokens.
        load: directory of checkpoints, or one of them; a small model is made if not given.
        vocab_file: vocabulary of the model that is made.
        merge_file: merges of the model that is made.
    """
    files = {
        LAMBADA: found("--lambada-data", lambada_data),
        WIKITEXT: found("--wikitext-data", wikitext_data),
    }
    with TemporaryDirectory() as name:
        if load is None:
            tokenizer = found("--vocab-file", vocab_file), found("--merge-file", merge_file)
            load = make_checkpoint(Path(name), lambada_data, *tokenizer)
        common = {"load": found("--load", load), "files": files}
        ways: dict[str, tuple[Any, dict[str, bool], tuple[str, ...]]] = {
            "harness, exported folder": (by_harness, {"exported": True}, ("lm_eval", "accelerate")),
            "tasks/main.py": (by_tasks, {}, ()),
            "harness, checkpoint": (by_harness, {"exported": False}, ("lm_eval",)),
        }
        ask(
            Question(
                title="The same numbers from lm-evaluation-harness",
                method=__doc__,
                contenders=[
                    Contender(name=name, run=run, arguments=common | own, threads=2, needs=needs)
                    for name, (run, own, needs) in ways.items()
                ],
                columns=(
                    *(Column(title, title, "{:.10g}") for title in FIGURES),
                    difference(APART),
                    Column("hits", lambda own, _: sum(own["hits"]), "{:.0f}"),
                    difference(HITS, "{:.0f}"),
                    difference("ln p of a word, largest difference"),
                    difference("of a page, relative"),
                ),
                result=result,
                failure=failure,
                rounds=1,
                warm_up=0,
                together=False,
                packages=("lm-eval", "transformers", "torch", "datasets", "accelerate"),
            ),
            flags,
        )


if __name__ == "__main__":
    cli(main)
