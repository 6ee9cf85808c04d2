"""The paper in miniature: corpus, GPT-2, BERT, WikiText103, LAMBADA, RACE, and one report.

    python tools/experiments/miniature.py --data DATA
    python tools/experiments/miniature.py --data DATA --tensor-model-parallel-size 2 --plan-only

Finished stages are reused.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.checks import positive
from megatron.config.presets import find_preset
from megatron.config.pretrain import PretrainBertConfig
from megatron.data.json_lines import MANIFEST
from megatron.train.metrics import read_metrics
from tools.experiments import results, runner, stages
from tools.experiments.results import Facts, millions, standard_error
from tools.experiments.runner import ROOT, Machine, Stage, Stamps, Word, python
from tools.report import curves, figures
from tools.report.corpus import accounting_of, read_json, step_facts
from tools.report.numbers import decimal, duration, percent, whole
from tools.report.sections import Items, Number, Page, Part, Section, Table
from tools.train_tokenizer import check_vocab_size

PROGRAM = "scripts/paper/miniature.sh"
PRESETS = ROOT / "scripts" / "presets"
MINUTES = {  # planned on two cores, by stage
    "corpus": 1.0,
    "clean": 2.0,
    "gpt2-data": 1.0,
    "gpt2": 12.0,
    "bert-data": 2.0,
    "bert": 11.0,
    "heldout": 1.0,
    "wikitext103": 4.0,
    "lambada": 0.5,
    "race-data": 0.5,
    "race": 8.0,
}
RESULTS = ("heldout", "wikitext103", "lambada", "race")
# Flags of RACE's fine-tuning, beside the sizes in the settings.
RACE = ("--epochs", "1", "--lr", "1e-4", "--micro-batch-size", "4", "--global-batch-size", "16",
        "--hidden-dropout", "0", "--attention-dropout", "0",
        "--max-truncated", "1", "--compare-paper")  # fmt: skip
CHANCE = 0.25  # of RACE, which has four options
NAMES = {"gpt2": "GPT-2", "bert": "BERT"}
TERMS = {"gpt2": "loss", "bert": "mlm_loss"}  # the term of each model's loss that is drawn
LEAKAGE_NAMES = {stages.DEV_SHARD: "RACE, development set"}  # of files with other names


@dataclass(frozen=True, kw_only=True)
class Settings(runner.Settings):
    data: Path
    """Folder laid out as MEGATRON_TEST_DATA."""
    output: Path = ROOT / "runs" / "miniature"
    gpt2_preset: Path = PRESETS / "miniature_gpt2.toml"
    """Settings of GPT-2 and its training (TOML)."""
    bert_preset: Path = PRESETS / "miniature_bert.toml"
    """Settings of BERT and its training (TOML)."""
    tensor_model_parallel_size: int = 2
    """Processes that share each model."""
    vocab_size: int = 8192
    """Vocabulary size of each of the two tokenizers that are trained."""
    overlapping_eval: int = 32
    """Stride of WikiText103's window, the paper's by default."""
    race_train: int = 1200
    """Passages of RACE to fine-tune on."""
    race_dev: int = 400
    """Passages of RACE to evaluate on."""


def run(settings: Settings) -> None:
    stages.check_files(settings.data, stages.FILES)
    positive(settings, "race_train", "race_dev", "overlapping_eval")
    check_vocab_size(settings.vocab_size)
    runner.run_experiment(settings, PROGRAM, list_stages, report, "report", MINUTES)


def list_stages(settings: Settings, machine: Machine) -> list[Stage]:
    """The stages from the archives of RACE to the evaluations, in order."""
    data, output, cores = settings.data, settings.output, machine.cores
    text = output / "corpus" / "split"
    listed = stages.article_stages(data, output / "corpus", cores)

    tensor: list[Word] = ["--tensor-model-parallel-size", settings.tensor_model_parallel_size]
    presets = {"gpt2": settings.gpt2_preset, "bert": settings.bert_preset}
    for kind, given in presets.items():
        preset, folder = find_preset(str(given)), output / kind
        packed = stages.data_prefix(folder, kind)
        listed += [
            stages.data_stage(folder, text / "train", kind, settings.vocab_size, cores),
            stages.pretrain_stage(kind, kind, preset, tensor, packed, folder, machine),
        ]

    checkpoints, record = output / "gpt2" / "checkpoints", output / "heldout.json"
    flags = ["--input", text / "valid", "--train-data", stages.data_prefix(output / "gpt2", "gpt2")]
    heldout = stages.evaluate("heldout", checkpoints, flags, record, cores)
    listed.append(Stage(name="heldout", commands=[heldout], outputs=[record]))
    for task in stages.EVALUATION_FILES:
        records = {checkpoints: output / f"{task}.json"}
        stride = settings.overlapping_eval
        listed.append(stages.zero_shot_stage(task, data, stride, records, cores))

    folder, record = output / "race", output / "race.json"
    archives = {"train": data / stages.RACE_TRAIN, "dev": data / stages.RACE_DEV}
    counts = {"train": settings.race_train, "dev": settings.race_dev}
    unpack = [
        python("tools/experiments/passages.py", "--archive", archive,
               "--count", counts[side], "--output", folder / side)
        for side, archive in archives.items()
    ]  # fmt: skip
    bert_flags: list[Word] = ["--preset", find_preset(str(settings.bert_preset)), *tensor]
    bert = runner.parse_training(PretrainBertConfig, bert_flags)
    fine_tune = runner.torchrun(
        runner.fit_processes(bert, machine),
        "tasks/main.py", "--task", "RACE", *tensor,
        "--pretrained-checkpoint", output / "bert" / "checkpoints",
        "--train-data", folder / "train", "--valid-data", folder / "dev",
        "--seq-length", bert.data.seq_length, *RACE, "--output", record,
    )  # fmt: skip
    sides = [folder / side for side in archives]
    return [
        *listed,
        Stage(name="race-data", commands=unpack, inputs=[*archives.values()], outputs=sides),
        Stage(name="race", commands=[fine_tune], outputs=[record]),
    ]


def report(settings: Settings, stamps: Stamps) -> str:
    """Write report.json, report.md and report.html; returns the text."""
    output = settings.output
    facts = gather(output, stamps)
    losses = []
    for kind, term in TERMS.items():
        runs = {NAMES[kind]: read_metrics(output / kind / "metrics.jsonl")}
        paint = partial(curves.draw_losses, runs=runs, term=term)
        losses.append(figures.draw(paint, f"{NAMES[kind]}: {term.replace('_', ' ')} by step"))
    page = make_page(facts, losses)
    return results.write_results(output, "report", page, facts, indent=1)


def gather(output: Path, stamps: Stamps) -> dict[str, Any]:
    """The numbers of the run, as report.json has them."""
    manifests = {step: output / "corpus" / step / MANIFEST for step in stages.CORPUS_STEPS}
    training = {}
    for kind, term in TERMS.items():
        lines = read_metrics(output / kind / "metrics.jsonl")
        validation = results.curve(lines, f"validation_{term}")
        if not validation:
            raise ValueError(f"{output / kind} has no evaluation; a preset with eval_iters works")
        training[kind] = {
            **curves.last_figures(lines),
            **read_json(output / kind / "run.json"),
            "validation": validation[-1][1],  # of the term that is drawn
        }
    return {
        "corpus": {step: step_facts(manifest) for step, manifest in manifests.items()},
        "training": training,
        "results": {name: read_json(output / f"{name}.json") for name in RESULTS},
        "seconds": {name: stamp["seconds"] for name, stamp in stamps.items()},
        "budget": MINUTES,
        "commands": {name: stamp["commands"] for name, stamp in stamps.items()},
    }


def make_page(facts: Facts, losses: Sequence[Part]) -> Page:
    """facts: see `gather`."""
    scores, corpus = facts["results"], facts["corpus"]
    wikitext, lambada = scores["wikitext103"], scores["lambada"]
    race, held_out = scores["race"], scores["heldout"]
    parameters = millions(wikitext["model"]["parameters"])
    of_bert = f"of BERT {millions(race['model']['parameters'])}"
    perplexity = decimal(wikitext["word_perplexity"])
    bigram = f"bigram {decimal(held_out['bigram_perplexity'])}"
    on_articles = decimal(held_out["token_perplexity"])
    strict = percent(lambada["strict_accuracy"])
    seconds = sum(facts["seconds"].values())
    numbers = [
        Number(perplexity, "WikiText103, per word", "8.3B of the paper: 10.81"),
        Number(strict, "LAMBADA, strict", "8.3B of the paper: 66.5 %"),
        Number(percent(race["accuracy"]), "RACE", f"chance: {percent(CHANCE)}"),
        Number(parameters, "parameters of GPT-2", of_bert),
        Number(on_articles, "perplexity on held-out articles", bigram),
        Number(duration(seconds), "in all", race["device"]),
    ]
    table_3 = results.table_3([(f"this run, {parameters}", wikitext, lambada)])
    held_out_table = results.held_out_table(held_out, "held-out articles of RACE")
    rows = [
        (name, duration(taken), f"{MINUTES[name]:g} min")
        for name, taken in facts["seconds"].items()
    ]
    rows.append(("in all", duration(seconds), f"{sum(MINUTES.values()):g} min"))
    times = Table(("stage", "took", "planned, on two cores"), rows, marked=[len(rows) - 1])
    leakage = leakage_table(corpus["decontaminate"]["leakage"])
    return Page(
        "The paper in miniature",
        "Every step of the paper, from raw text to its tables, with models of a few million "
        "parameters that are trained for minutes. The paper's rows show the form of its results; "
        "they are not reached here.",
        [
            Section("Zero-shot, table 3 of the paper", [table_3]),
            Section("Fine-tuned, table 5 of the paper", [race_table(race), judge_race(race)]),
            Section("Held-out text of the same kind", [held_out_table]),
            Section("Conventions", [Items(explain(scores))]),
            Section("Training", [training_table(facts["training"]), *losses]),
            Section("Corpus", [accounting_of(corpus)]),
            Section("Evaluation text in the corpus", [leakage]),
            Section("Time", [times]),
            results.command_section(facts["commands"]),
        ],
        numbers,
    )


def race_table(record: Facts) -> Table:
    """The RACE column of the paper's table 5, this run, and two kinds of guessing."""
    figure_names = record["paper"]["figures"]
    rows = [
        (f"paper, {each['model']}", *(percent(each[name]) for name in figure_names))
        for each in record["paper"]["rows"]
    ]
    marked = [len(rows)]
    # A level without passages has no figure.
    ours = [percent(record.get(name)) for name in figure_names]
    majority_names = [name.replace("accuracy", "majority_accuracy") for name in figure_names]
    majority = [percent(record.get(name)) for name in majority_names]
    rows.append((f"this run, {millions(record['model']['parameters'])}", *ours))
    rows.append(("always the commonest letter", *majority))
    rows.append(("chance, one of four", *[percent(CHANCE)] * len(figure_names)))
    return Table(("BERT", "RACE", "middle", "high"), rows, marked)


def judge_race(record: Facts) -> str:
    count, accuracy = record["questions"], record["accuracy"]
    error = standard_error(CHANCE, count)
    verdict = "above" if accuracy > CHANCE + 2 * error else "not to be told from"
    return (
        f"RACE: {percent(accuracy)} of {whole(count)} questions, where guessing gives "
        f"{percent(CHANCE)} with a standard error of {percent(error)}: {verdict} chance. A BERT "
        "of this size that has read for minutes does not understand passages, and hardly beats "
        "guessing; the stage shows that every step of the paper's runs."
    )


def explain(scores: Facts) -> list[tuple[str, str]]:
    """(figure, what it measures and by which convention)."""
    race = scores["race"]
    flags, asked = race["hyper_parameters"], race["notes"]["input"]["train"]["questions"]
    return [
        results.explain_wikitext(scores["wikitext103"]),
        results.explain_lambada(scores["lambada"]),
        (
            "RACE",
            f"accuracy: {race['conventions']['accuracy']}. Fine-tuned on {whole(asked)} of the "
            f"87,866 questions of the training set, epochs: {flags['epochs']}, one seed, passages "
            f"cut at {flags['seq_length']} tokens with question and option; asked "
            f"{whole(race['questions'])} of the 4,887 of the development set; "
            f"{race['paper']['note']}.",
        ),
        (
            "Held-out articles",
            "Articles of RACE's training archive that nothing is trained on; all three models "
            "predict the same tokens, the end mark of each article included.",
        ),
    ]


def training_table(runs: Mapping[str, Facts]) -> Table:
    rows = []
    for name, run in runs.items():
        sizes = [whole(run[key]) for key in ("parameters", "steps", "samples")]
        speed = whole(run["tokens_per_second"])
        rows.append([NAMES[name], *sizes, decimal(run["validation"], 3), speed])
    loss = "validation loss, nats a token"
    return Table(("model", "parameters", "steps", "samples", loss, "tokens per second"), rows)


def leakage_table(leakage: Mapping[str, Facts]) -> Table:
    """leakage: of the corpus step `decontaminate`, by evaluation file."""
    rows = []
    for name, each in leakage.items():
        shares = [percent(each[key], 3) for key in ("before", "after")]
        rows.append([LEAKAGE_NAMES.get(name, name), whole(each["ngrams"]), *shares])
    return Table(("evaluation set", "8-grams", "found in the corpus", "after the cuts"), rows)


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
