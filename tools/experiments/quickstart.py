"""From raw text to an evaluated GPT-2: corpus, tokenizer, training, evaluation, samples, report.

    python tools/experiments/quickstart.py
    python tools/experiments/quickstart.py mine.jsonl --train-iters 500 --plan-only

Finished stages are reused.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron.config.presets import find_preset
from megatron.config.pretrain import PretrainConfig, PretrainGPT2Config
from megatron.data.indexed import IndexedDataset
from megatron.data.json_lines import MANIFEST, find_shards, parse_line, read_shard
from megatron.data.order import split_documents
from megatron.errors import UsageError
from megatron.train.metrics import read_metrics
from tools.experiments import results, runner, stages
from tools.experiments.runner import ROOT, Machine, Stage, Stamps, Word, python
from tools.report import curves, figures
from tools.report.corpus import accounting_of, read_json, step_facts
from tools.report.numbers import decimal, duration, percent, size, whole
from tools.report.sections import Commands, Grid, Mark, Number, Page, Quote, Section, Table, Text
from tools.train_tokenizer import check_vocab_size

PROGRAM = "scripts/quickstart.sh"
PROMPTS = (
    "The purpose of this",
    "If you want to",
    "In order to",
    "Permission is hereby granted",
)
NEW_TOKENS = 96
TRAIN_TO_HELDOUT = "19:1"  # documents; a twentieth is enough for the evaluation
SPLIT = "9,1,0"  # a small corpus needs the tenth to have one sample for validation
LINES_TRIED = 1000  # of a corpus, to find a document

CONVENTIONS = (
    "Per token: exp of the mean negative log-likelihood over the {tokens} held-out tokens of this "
    "run's tokenizer, each document's end mark included. GPT-2, bigram and unigram model learn "
    "from the same training tokens and predict the same tokens. Bigram: interpolated modified "
    "Kneser-Ney. Per word: the same sum divided by the {words} words (between white space) of the "
    "text. Bits per byte: the same sum in bits divided by the {bytes} UTF-8 bytes of the text; for "
    "xz, the compressed size of the same text. Last-word cloze: the last word of a held-out "
    "paragraph, predicted from what precedes it in the paragraph, counts if each of its tokens is "
    "the likeliest one."
)


@dataclass(frozen=True, kw_only=True)
class Settings(runner.Settings):
    corpus: Annotated[Path | None, tyro.conf.Positional] = None
    """File of JSON lines, one document per line, or of text, which is one document (*.txt), or a
    folder of such files; without it, the English of this Python installation."""
    json_key: str = "text"
    """Key of the text in a line."""
    tensor_model_parallel_size: int = 2
    """Processes that share the model."""
    output: Path = ROOT / "runs" / "quickstart"
    preset: Path = ROOT / "scripts" / "presets" / "quickstart.toml"
    """Settings of model and training (TOML)."""
    train_iters: int | None = None
    """Steps to train for, instead of the preset's."""
    vocab_size: int = 2048
    """Vocabulary size of the tokenizer that is trained."""
    vocab_file: Path | None = None
    """GPT-2's vocab.json or one like it, instead of training a tokenizer."""
    merge_file: Path | None = None
    """The merges.txt that belongs to --vocab-file."""


def run(settings: Settings) -> None:
    if settings.corpus is not None:
        check_corpus(settings.corpus, settings.json_key)
    check_vocab_size(settings.vocab_size)
    files = settings.vocab_file, settings.merge_file
    if files.count(None) == 1:
        raise UsageError("--vocab-file", files[0], f"given with --merge-file, now {files[1]}")
    runner.check_inputs(vocab_file=settings.vocab_file, merge_file=settings.merge_file)
    runner.run_experiment(settings, "the quickstart", list_stages, report, "report")


def check_corpus(path: Path, key: str) -> None:
    """Raises UsageError unless the first lines of one of the files contain a document."""
    if not path.exists():
        raise UsageError("corpus", path, "a file or folder that exists")
    reason = "it is empty"
    for file in find_shards([path]):
        for line in islice(read_shard(file, key=key), LINES_TRIED):
            try:
                parse_line(line, key)
            except ValueError as error:
                if reason == "it is empty":
                    reason = f"{file}, byte {line.offset}: {error}"
            else:
                return
    allowed = (
        f'lines of {{"{key}": "..."}} (see --json-key), or a *.txt; in its first lines {reason}'
    )
    raise UsageError("corpus", path, allowed)


def check_corpus_size(data: IndexedDataset, seq_length: int) -> None:
    """Raises UsageError unless training and validation each get a sample: seq_length + 1 tokens."""
    documents = data.num_documents
    parts = split_documents(SPLIT, documents)[:2] if documents > 1 else ()
    smallest = min((len(data.token_range(part)) for part in parts), default=0)
    if smallest <= seq_length:
        mean = data.num_tokens / documents
        enough = max(10 * ceil((seq_length + 1) / mean), 2 * documents)
        raise UsageError(
            "corpus",
            None,
            f"larger, or the seq_length {seq_length} of --preset smaller: of the {documents} "
            f"documents left to train on, the part for training or for validation has "
            f"{smallest} tokens, and one sample has {seq_length + 1}; about {enough} documents "
            "like these are enough",
        )


def training_flags(settings: Settings) -> list[Word]:
    flags: list[Word] = ["--tensor-model-parallel-size", settings.tensor_model_parallel_size]
    flags += ["--split", SPLIT]
    if settings.train_iters is None:
        return flags
    # The preset's log interval, and a warm-up in steps, are for its own number of steps.
    steps = settings.train_iters
    preset = runner.parse_training(PretrainGPT2Config, ["--preset", settings.preset])
    interval = max(1, min(preset.logging.log_interval, steps // 2))
    flags += ["--train-iters", steps, "--log-interval", interval]
    if preset.optimizer.lr_warmup_fraction is None:
        flags += ["--lr-warmup-iters", min(preset.optimizer.lr_warmup_iters, steps // 10)]
    return flags


def list_stages(settings: Settings, machine: Machine) -> list[Stage]:
    """The stages from text to samples, in order."""
    output, cores = settings.output, machine.cores
    preset = find_preset(str(settings.preset))
    config: PretrainConfig = runner.parse_training(PretrainGPT2Config, ["--preset", preset])
    positions, seq_length = config.model.max_position_embeddings, config.data.seq_length

    corpus = output / "corpus"
    raw = settings.corpus or corpus / "raw.jsonl"
    if settings.corpus is None:
        words = ("--output", raw, "--json", corpus / "harvest.json")
        harvest = python("tools/corpus.py", "harvest", *words)
        first = Stage(name="corpus", commands=[harvest], outputs=[raw, corpus / "harvest.json"])
    else:
        first = Stage(name="corpus", inputs=find_shards([raw]))
    steps: dict[str, list[Word]] = {
        "clean": [],
        "dedup": [],
        "split": ["--ratio", TRAIN_TO_HELDOUT],
    }
    if settings.json_key != "text":  # the key that all later steps read
        flags = ["--format", "jsonl", "--key", settings.json_key, "--source", raw.resolve().name]
        steps = {"extract": list(flags), **steps}
    clean = stages.clean_stage(raw, corpus, steps, cores)
    text = corpus / "split" / "train"

    vocabulary = output / "tokenizer"
    if settings.vocab_file is not None and settings.merge_file is not None:
        files = [settings.vocab_file, settings.merge_file]
        tokenizer = Stage(name="tokenizer", inputs=files)
    else:
        files = [vocabulary / "vocab.json", vocabulary / "merges.txt"]
        train = stages.train_tokenizer(text, "gpt2", settings.vocab_size, vocabulary)
        tokenizer = Stage(name="tokenizer", commands=[train], outputs=[vocabulary])
    encode = stages.preprocess(text, "gpt2", files, output / "data", cores)
    preprocess = Stage(name="preprocess", commands=[encode], outputs=[output / "data"])

    data = stages.data_prefix(output, "gpt2")
    pretrain = stages.pretrain_stage(
        "pretrain",
        "gpt2",
        preset,
        training_flags(settings),
        data,
        output,
        machine,
        check=lambda: check_corpus_size(IndexedDataset(str(data)), seq_length),
    )

    checkpoints = output / "checkpoints"
    heldout_flags = ("--input", corpus / "split" / "valid", "--train-data", data)
    result = output / "evaluation.json"
    evaluate = stages.evaluate("heldout", checkpoints, heldout_flags, result, cores)
    # The end mark and the longest prompt take positions, too; a token is at least one byte.
    longest = 1 + max(len(prompt.encode()) for prompt in PROMPTS)
    new_tokens = max(1, min(NEW_TOKENS, positions - longest))
    sample = python(
        "tools/generate.py", "--load", checkpoints, "--prompt", *PROMPTS,
        "--max-new-tokens", new_tokens, "--temperature", 0.8, "--top-k", 50, "--seed", 1234,
        "--output", output / "samples.json",
        threads=cores, is_quiet=True,
    )  # fmt: skip
    return [
        first,
        clean,
        tokenizer,
        preprocess,
        pretrain,
        Stage(name="evaluate", commands=[evaluate], outputs=[result]),
        Stage(name="sample", commands=[sample], outputs=[output / "samples.json"]),
    ]


def report(settings: Settings, stamps: Stamps) -> str:
    """Write report.json, report.md and report.html; returns the result in a few lines."""
    output = settings.output
    facts = gather(output, stamps)
    lines = read_metrics(output / "metrics.jsonl")
    losses = figures.draw(lambda axes: curves.draw_losses(axes, {"": lines}), "Loss by step")
    page = make_page(facts, losses, output)
    results.write_results(output, "report", page, facts, indent=1)
    html = runner.to_open(output / "report.html")
    return f"{page.lead}\nThe report, with samples of its text: open {html} in a browser"


def gather(output: Path, stamps: Stamps) -> dict[str, Any]:
    """The numbers of the run, as report.json has them."""
    corpus = output / "corpus"
    # An earlier run with another --json-key may have left the manifest of an extract.
    steps = ["clean", "dedup", "split"]
    if any(name.startswith("corpus/extract/") for name in stamps["clean"]["outputs"]):
        steps.insert(0, "extract")
    manifests = {step: corpus / step / MANIFEST for step in steps}
    if stamps["corpus"]["commands"]:
        manifests = {"harvest": corpus / "harvest.json", **manifests}
    run = read_json(output / "run.json")
    return {
        "corpus": {step: step_facts(manifest) for step, manifest in manifests.items()},
        "layout": {**run.pop("layout"), **run},
        "seconds": {name: stamp["seconds"] for name, stamp in stamps.items()},
        "training": curves.last_figures(read_metrics(output / "metrics.jsonl")),
        "evaluation": read_json(output / "evaluation.json"),
        "samples": read_json(output / "samples.json"),
        "commands": {name: stamp["commands"] for name, stamp in stamps.items()},
    }


def make_page(facts: Mapping[str, Any], losses: figures.Figure, output: Path) -> Page:
    """facts: see `gather`."""
    scores, training, layout = facts["evaluation"], facts["training"], facts["layout"]
    ours, bigram = scores["token_perplexity"], scores["bigram_perplexity"]
    comparison = "beats" if ours < bigram else "does not beat"
    lead = (
        f"On documents that it has not seen, the trained GPT-2 {comparison} a bigram model of the "
        f"same training tokens: perplexity {decimal(ours)} against {decimal(bigram)}."
    )
    if ours >= bigram:
        lead += " More text helps, or a --preset that trains longer."

    xz = decimal(scores["xz_bits_per_byte"], 3)
    device = (
        f"{layout['device']}, tensor-parallel {layout['tensor_parallel_size']}, "
        f"data-parallel {layout['data_parallel_size']}"
    )
    train = facts["corpus"]["split"]["sides"]["train"]
    seconds = sum(facts["seconds"].values())
    numbers = [
        Number(decimal(ours), "perplexity per token", f"bigram {decimal(bigram)}"),
        Number(decimal(scores["bits_per_byte"], 3), "bits per byte", f"xz -9 {xz}"),
        Number(
            percent(scores["cloze_accuracy"]), "last words guessed right", "of held-out paragraphs"
        ),
        Number(whole(training["tokens_per_second"]), "tokens per second", device),
        Number(size(train["bytes"]), "training text", f"{whole(train['documents'])} documents"),
        Number(duration(seconds), "in all", f"{whole(training['steps'])} steps"),
    ]

    sizes = {key: whole(scores[key]) for key in ("tokens", "words", "bytes")}
    evaluation = [results.held_out_table(scores), Text(CONVENTIONS.format(**sizes), "note")]
    samples = []
    for sample in facts["samples"]:
        prompt = sample["prompt"]
        samples.append(Quote([Mark(prompt), sample["text"].removeprefix(prompt)]))
    python_name, checkpoints = runner.shown(runner.PYTHON), runner.shown(output / "checkpoints")
    what_next = [
        "From the root of the repository: let the model go on with a text of yours; train on a "
        "corpus of your own; estimate what a larger model needs.",
        Commands(
            [
                f"{python_name} tools/generate.py --load {checkpoints} --prompt 'In order to'",
                "bash scripts/quickstart.sh my.jsonl --output runs/my",
                f"{python_name} tools/plan.py --preset gpt2_355m --gpus 8 --hardware dgx-a100",
            ]
        ),
    ]
    run = {**layout, **training}
    rows = [(key.replace("_", " "), as_text(value)) for key, value in run.items()]
    times = [(name, duration(taken)) for name, taken in facts["seconds"].items()]
    tables = Grid([Table(("run", ""), rows, left=(0, 1)), Table(("stage", "time"), times)])
    return Page(
        "GPT-2 from raw text",
        lead,
        [
            Section("Loss", [losses]),
            Section("Evaluation on held-out documents", evaluation),
            Section("Samples", samples),
            Section("What next", what_next),
            Section("Corpus", [accounting_of(facts["corpus"])]),
            Section("Layout and throughput", [tables]),
            results.command_section(facts["commands"]),
        ],
        numbers,
    )


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return decimal(value, 4) if value < 100 else whole(value)
    return whole(value) if isinstance(value, int) else str(value)


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
