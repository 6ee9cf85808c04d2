"""This project's LAMBADA and WikiText103 beside lm-evaluation-harness, on the same model.

    python benchmarks/lm_harness.py --lambada-data FILE --wikitext-data FILE --load checkpoints

Three ways to the same numbers: tasks/main.py on the checkpoint; the harness's own HuggingFace model
on the folder that tools/convert_hf.py exports; and the harness with the checkpoint behind it
(tools/lm_harness.py). Prints the figures and their differences, passage by passage too, and fails
where they do not agree. Without --load the model is a small one of transformers
that is made here. Needs lm-eval and
accelerate, which its HuggingFace model imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro
from tqdm import tqdm

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import JsonFile, facts, markdown, told
from megatron.config.checkpoint import TrainedConfig
from megatron.config.parse import user_errors
from megatron.config.training import ParallelConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.train.trained import open_trained
from tasks import lambada
from tasks.common import score_windows
from tools.harness.definitions import READERS, find_harness
from tools.lm_harness import ask, find_tasks, write_local

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("lambada_openai", "wikitext")
WAYS = ("tasks/main.py", "harness, exported folder", "harness, checkpoint")
PERPLEXITY = 1e-4  # largest relative difference
EXACT = 0.0


@dataclass(frozen=True)
class Figure:
    """Under which name each side has it, and how far the values may be apart, relatively."""

    task: str
    ours: str
    theirs: str
    tolerance: float


FIGURES = (
    Figure("lambada_openai", "strict_accuracy", "acc,none", EXACT),
    Figure("lambada_openai", "last_word_perplexity", "perplexity,none", PERPLEXITY),
    Figure("wikitext", "word_perplexity_per_document", "word_perplexity,none", PERPLEXITY),
    Figure("wikitext", "bits_per_byte_per_document", "bits_per_byte,none", PERPLEXITY),
)


def program(*arguments: str | Path) -> None:
    """Run one of this project's programs to its end; prints its errors where it fails."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    done.check_returncode()


def make_checkpoint(folder: Path, passages: Path, vocab_file: Path, merge_file: Path) -> Path:
    """A GPT-2 of transformers with wide random weights, so that probabilities vary, which then
    learns the last words of every second passage, so that there are hits to agree on."""
    import torch
    import transformers

    torch.manual_seed(1234)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, n_positions=256, initializer_range=0.1
    )
    model = transformers.GPT2LMHeadModel(config)
    tokenizer = build_tokenizer("GPT2BPETokenizer", str(vocab_file), str(merge_file))
    teach(model, [tokenizer.encode(text) for text in READERS["lambada_openai"](passages)[::2]])
    model.save_pretrained(folder / "made")
    program(
        "tools/convert_hf.py", "import", "--from", folder / "made", "--to", folder / "checkpoint",
        "--vocab-file", vocab_file, "--merge-file", merge_file,
    )  # fmt: skip
    return folder / "checkpoint"


def teach(model: Any, texts: Sequence[Sequence[int]]) -> None:
    """Eight rounds of Adam on the last three tokens of each text."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for ids in tqdm([*texts] * 8, "teaching"):
        tokens = torch.tensor([ids[-model.config.n_positions :]])
        x = model.transformer(tokens).last_hidden_state[0, -4:-1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.lm_head(x), tokens[0, -3:]).backward()
        optimizer.step()


def by_our_tasks(load: Path, files: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """The records of tasks/main.py, by the harness's names of the tasks."""
    records = {}
    for task, name in zip(TASKS, ("LAMBADA", "WIKITEXT103"), strict=True):
        output = folder / f"{name}.json"
        program(
            "tasks/main.py", "--task", name, "--load", load, "--valid-data", files[task],
            "--output", output,
        )  # fmt: skip
        records[task] = json.loads(output.read_text())
    return records


def by_exported_folder(load: Path, definitions: Path, folder: Path) -> dict[str, Any]:
    """What the harness finds with its own model of the exported folder, in fp32."""
    from lm_eval.models.huggingface import HFLM

    exported = folder / "exported"
    program("tools/convert_hf.py", "export", "--from", load, "--to", exported)
    lm = HFLM(str(exported), device="cpu", dtype="float32", batch_size=8)
    return ask(lm, TASKS, find_tasks(TASKS, [definitions]), None)


def by_checkpoint(load: Path, definitions: Path) -> dict[str, Any]:
    """What the harness finds with this project's model of the checkpoint."""
    from megatron.parallel.mesh import serial_mesh
    from megatron.train.evaluate import load_newest
    from tools.harness.language_model import CheckpointLM

    mesh = serial_mesh()
    folders, tokenizer, _ = open_trained(TrainedConfig(load=str(load)), ParallelConfig(), 1)
    _, model = load_newest(folders, mesh)
    lm = CheckpointLM(model, mesh, tokenizer, 8)
    return ask(lm, TASKS, find_tasks(TASKS, [definitions]), None)


def answers(found: Mapping[str, Any], task: str) -> list[Any]:
    """What the model answered about each document, in the order of the file."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"][0] for sample in samples]


def our_passages(load: Path, file: Path) -> list[tuple[float, bool]]:
    """What this project's task says of each passage: ln p of its last word, and whether a hit."""
    from megatron.parallel.mesh import serial_mesh
    from megatron.train.evaluate import load_newest

    settings = lambada.Settings(trained=TrainedConfig(load=str(load)), valid_data=file)
    folders, tokenizer, manifest = open_trained(settings.trained, settings.parallel, 1)
    mesh = serial_mesh()
    _, model = load_newest(folders, mesh)
    task = lambada.prepare(settings, manifest, tokenizer)
    scores = score_windows(model, mesh, task, settings.evaluation.micro_batch_size, "LAMBADA")
    return list(zip(scores.log_probability.tolist(), scores.all_hit.tolist(), strict=True))


def compare_answers(
    passages: Sequence[tuple[float, bool]], founds: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Document by document: hits that differ, and the largest difference of log-probabilities.

    passages: what this project's task says. founds: what the harness found, way by way.
    """
    theirs = [answers(found, "lambada_openai") for found in founds]
    words = list(zip(passages, *theirs, strict=True))
    pages = list(zip(*(answers(found, "wikitext") for found in founds), strict=True))
    return {
        "passages": len(words),
        "hits": sum(ours[1] for ours, *_ in words),
        "passages whose hit differs": sum(len({hit for _, hit in each}) > 1 for each in words),
        "largest difference of ln p of a word": max(
            abs(other[0] - ours[0]) for ours, *others in words for other in others
        ),
        "pages": len(pages),
        "largest relative difference of ln p of a page": max(abs(a / b - 1) for a, b in pages),
    }


def rows(
    ours: Mapping[str, Any], exported: Mapping[str, Any], checkpoint: Mapping[str, Any]
) -> list[tuple[Figure, list[float], float]]:
    """Of each figure the three values, and the largest relative difference from ours."""
    table = []
    for figure in FIGURES:
        value = ours[figure.task][figure.ours]
        theirs = [each["results"][figure.task][figure.theirs] for each in (exported, checkpoint)]
        apart = max(abs(other - value) / (abs(value) or 1.0) for other in theirs)
        table.append((figure, [value, *theirs], apart))
    return table


def show(table: Sequence[tuple[Figure, list[float], float]], details: Mapping[str, Any]) -> None:
    header = ("task", "here", "there", *WAYS, "largest relative difference", "allowed")
    lines = [
        (each.task, each.ours, each.theirs, *(f"{value:.10g}" for value in values), f"{apart:.1e}",
         "none" if each.tolerance == EXACT else f"{each.tolerance:g}")
        for each, values, apart in table
    ]  # fmt: skip
    print(markdown(header, lines), "\n")
    print(markdown(("document by document", ""), [(k, f"{v:.3g}") for k, v in details.items()]))


def main(
    lambada_data: Path,
    wikitext_data: Path,
    load: Path | None = None,
    vocab_file: Path = Path("vocab.json"),
    merge_file: Path = Path("merges.txt"),
    json_file: JsonFile = None,
) -> None:
    """Compare the three ways.

    Args:
        lambada_data: {"text": ...} a line, or plain text, a passage a line.
        wikitext_data: raw WikiText, such as wiki.valid.tokens.
        load: directory of checkpoints, or one of them; a small model is made if not given.
        vocab_file: vocabulary of the model that is made.
        merge_file: merges of the model that is made.
        json_file: where to write the figures.
    """
    files = dict(zip(TASKS, (lambada_data.resolve(), wikitext_data.resolve()), strict=True))
    print(told(facts("lm-eval", "transformers", "torch", "datasets", "accelerate")), "\n")
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_local(folder, find_harness(), files)
        if load is None:
            load = make_checkpoint(folder, lambada_data, vocab_file.resolve(), merge_file.resolve())
        started = time.monotonic()
        ours = by_our_tasks(load.resolve(), files, folder)
        exported = by_exported_folder(load.resolve(), folder, folder)
        checkpoint = by_checkpoint(load.resolve(), folder)
        passages = our_passages(load.resolve(), files["lambada_openai"])
    table = rows(ours, exported, checkpoint)
    details = compare_answers(passages, (exported, checkpoint))
    show(table, details)
    print(f"\n{time.monotonic() - started:.0f} s; checkpoint {ours['wikitext']['checkpoint_hash']}")
    if json_file is not None:
        values = {each.ours: dict(zip(WAYS, found, strict=True)) for each, found, _ in table}
        json_file.write_text(json.dumps({"figures": values, "answers": details}, indent=1) + "\n")
    apart = [each.ours for each, _, apart in table if apart > each.tolerance]
    if apart or details["passages whose hit differs"]:
        raise SystemExit(f"they do not agree: {', '.join(apart) or 'which passages are hits'}")


if __name__ == "__main__":
    with user_errors(os.environ):
        tyro.cli(main, config=(tyro.conf.DisallowNone,))
