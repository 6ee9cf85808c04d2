"""The same numbers from lm-evaluation-harness.

    python tools/experiments/lm_harness.py --lambada-data lambada_test.jsonl \\
        --wikitext-data wiki.test.tokens
    python tools/experiments/lm_harness.py --load checkpoints \\
        --lambada-data lambada_test.jsonl --wikitext-data wiki.test.tokens

Three ways to compute LAMBADA's and WikiText103's figures of one model, in fp32: the harness with
its own HuggingFace model, on the export of tools/convert_hf.py; tasks/main.py; and the harness on
the checkpoint, by tools/lm_harness.py. Figures have to agree within a relative 1e-4; a single
additional hit exceeds it. Without --load the model is a GPT-2 of transformers with large random
weights that learns the last words of every second passage, so that there are hits to compare: its
figures show that the conventions are equal, and say nothing about a model. Finished stages are
reused.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.data.files import write_atomically
from megatron.errors import UsageError
from megatron.libraries import Library
from megatron.libraries import load as load_library
from tools.experiments import results, runner, stages
from tools.experiments.runner import ROOT, Machine, Stage, StageError, Word
from tools.report.corpus import read_json
from tools.report.sections import Page, Section, Table

hf_models = Library("lm_eval.models.huggingface")

PROGRAM = "tools/experiments/lm_harness.py"
TASKS = {"lambada_openai": "LAMBADA", "wikitext": "WIKITEXT103"}  # names of the harness and here
FIGURES = {  # title: task, name in tasks/, name in the harness
    "LAMBADA, accuracy": ("lambada_openai", "strict_accuracy", "acc,none"),
    "perplexity of last words": ("lambada_openai", "last_word_perplexity", "perplexity,none"),
    "perplexity per word": ("wikitext", "word_perplexity_per_document", "word_perplexity,none"),
    "bits per byte": ("wikitext", "bits_per_byte_per_document", "bits_per_byte,none"),
}
TOLERANCE = 1e-4
VOCABULARY = {"--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # so that all three ways compute on the CPU


@dataclass(frozen=True, kw_only=True)
class Settings(runner.Settings):
    lambada_data: Path = runner.DATA / "lambada" / "lambada_test_first500.jsonl"
    """Passages of LAMBADA."""
    wikitext_data: Path = runner.DATA / "wikitext103" / "wiki.valid.tokens"
    """Raw WikiText."""
    load: Path | None = None
    """Folder of checkpoints; without it, a model is made."""
    tokenizer: Path = runner.DATA / "gpt2"
    """Folder with vocab.json and merges.txt, for a model that is made."""
    output: Path = ROOT / "runs" / "lm_harness"


def run(settings: Settings) -> None:
    runner.check_inputs(lambada_data=settings.lambada_data, wikitext_data=settings.wikitext_data)
    if settings.load is not None:
        stages.check_checkpoint("load", settings.load)
    elif not all(file.is_file() for file in vocabulary(settings)):
        names = " and ".join(VOCABULARY.values())
        raise UsageError("--tokenizer", settings.tokenizer, f"a folder with {names}")
    runner.run_experiment(settings, PROGRAM, list_stages, report, "lm_harness")


def vocabulary(settings: Settings) -> list[Path]:
    return [settings.tokenizer / name for name in VOCABULARY.values()]


def check_libraries() -> None:
    """Raises MissingLibrary. The harness's own model needs accelerate."""
    for name in ("lm_eval", "accelerate"):
        load_library(name)


def list_stages(settings: Settings, machine: Machine) -> list[Stage]:
    """The model, if none is given, its export, and the three ways."""
    call = partial(runner.call, "tools.experiments.lm_harness")
    output, files = settings.output, [settings.lambada_data, settings.wikitext_data]
    found, load = [], settings.load
    if load is not None:
        model = stages.checkpoint_files(load)
    else:
        load, made, model = output / "checkpoint", output / "made", list[Path]()
        own: list[Word] = []
        for name, file in zip(VOCABULARY, vocabulary(settings), strict=True):
            own += [name, file]
        commands = [
            call("make_model", files[0], settings.tokenizer, made, threads=machine.cores),
            runner.python("tools/convert_hf.py", "import", "--from", made, "--output", load, *own),
        ]
        found.append(
            Stage(
                name="model",
                commands=commands,
                inputs=[files[0], *vocabulary(settings)],
                outputs=[made, load],
                check=check_libraries,
            )
        )
    exported = output / "exported"
    words: list[Word] = ["export", "--from", load, "--output", exported]
    export = runner.python("tools/convert_hf.py", *words)
    ours = [output / f"{each.lower()}.json" for each in TASKS.values()]
    flags: list[list[Word]] = [["--valid-data", each] for each in files]
    flags[1].append("--per-document")
    scores = [
        stages.evaluate(task, load, words, record, machine.cores)
        for task, words, record in zip(TASKS.values(), flags, ours, strict=True)
    ]
    theirs, own_model = output / "harness.json", output / "harness_exported.json"
    local: list[Word] = ["--lambada-data", files[0], "--wikitext-data", files[1]]
    words = ["--load", load, "--tasks", ",".join(TASKS), *local, "--output", theirs]
    tool = runner.python("tools/lm_harness.py", *words, threads=machine.cores, is_quiet=True)
    ask = call("ask_harness", exported, *files, own_model, threads=machine.cores)
    found.append(
        Stage(
            name="export",
            commands=[export],
            inputs=model,
            outputs=[exported],
            check=check_libraries,
        )
    )
    inputs = [*files, *model]
    for name, commands, outputs in (
        ("harness, exported folder", [ask], [own_model]),
        ("tasks", scores, ours),
        ("harness, checkpoint", [tool], [theirs]),
    ):
        on_cpu = [replace(each, environ={**each.environ, **NO_GPU}) for each in commands]
        found.append(Stage(name=name, commands=on_cpu, inputs=inputs, outputs=outputs))
    return found


def make_model(passages: str, tokenizer: str, output: str) -> None:
    """Write a GPT-2 of transformers after eight rounds of Adam on the last tokens of every second
    passage."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from megatron.data.tokenizer import build_tokenizer
    from tools.lm_harness import READERS

    torch.manual_seed(1234)
    files = f"{tokenizer}/vocab.json", f"{tokenizer}/merges.txt"
    encoder = build_tokenizer("GPT2BPETokenizer", *files)
    shape: Any = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=encoder.vocab_size, initializer_range=0.1, **shape)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    texts = READERS["lambada_openai"](Path(passages), "--lambada-data")[::2]
    for ids in [encoder.encode(text) for text in texts] * 8:
        tokens = torch.tensor([ids[-256:]])
        logits = model(tokens, logits_to_keep=4).logits[0, :-1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, tokens[0, -3:]).backward()
        optimizer.step()
    model.save_pretrained(output)


def ask_harness(exported: str, lambada: str, wikitext: str, output: str) -> None:
    """Write the results of the harness with its own model of an exported folder."""
    from tools.lm_harness import ask, find_harness, find_tasks, write_local

    model = hf_models.HFLM(exported, device="cpu", dtype="float32", batch_size=8)
    with TemporaryDirectory() as folder:
        files = dict(zip(TASKS, (Path(lambada), Path(wikitext)), strict=True))
        write_local(Path(folder), find_harness(), files)
        found = ask(model, list(TASKS), find_tasks(list(TASKS), Path(folder)), None)
    write_atomically(Path(output), json.dumps({"results": found["results"]}).encode())


def report(settings: Settings, _: object = None) -> str:
    """Write lm_harness.json, .md and .html; returns the text. Raises StageError where the ways
    differ."""
    output = settings.output
    own = {task: read_json(output / f"{name.lower()}.json") for task, name in TASKS.items()}
    facts = {
        "harness, exported folder": figures(read_json(output / "harness_exported.json"), 2),
        "tasks/main.py": figures({"results": own}, 1),
        "harness, checkpoint": figures(read_json(output / "harness.json"), 2),
    }
    first = facts["harness, exported folder"]
    if not any(first.values()) or not all(map(isfinite, first.values())):
        raise StageError(f"figures that are all 0 or not finite prove nothing: {first}")
    for name, values in facts.items():
        for title, value in values.items():
            if not abs(value - first[title]) <= TOLERANCE * abs(first[title]):
                raise StageError(f"{name}: {title} is {value:.10g} and not {first[title]:.10g}")
    rows = [(name, *(f"{each:.10g}" for each in row.values())) for name, row in facts.items()]
    accuracy = first["LAMBADA, accuracy"]
    page = Page(
        "The same numbers from lm-evaluation-harness",
        f"The ways to score one model agree: its accuracy on LAMBADA is {accuracy:.4f}.",
        [Section("Figures", [Table(("", *FIGURES), rows)])],
    )
    return results.write_measured(output, "lm_harness", page, {"figures": facts}, PROGRAM)


def figures(record: results.Facts, place: int) -> dict[str, float]:
    """The figures by title. place: index of their name in FIGURES, 1 or 2."""
    return {title: record["results"][names[0]][names[place]] for title, names in FIGURES.items()}


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
