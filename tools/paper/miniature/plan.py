"""Which commands make up each stage, and how many minutes of two cores each may take."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from tools.command import Command, on_all, python, shown
from tools.paper.data import LAMBADA, RACE_DEV, RACE_TRAIN, WIKITEXT103
from tools.processes import Processes, fit_processes
from tools.stages import Stage

# Minutes of two cores, by stage.
BUDGET = {
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
    "report": 0.5,
}
CORPUS_STEPS = ("extract", "clean", "decontaminate", "dedup", "split")
RESULTS = ("heldout", "wikitext103", "lambada", "race")
TASKS = {"gpt2": ("pretrain_gpt2.py", PretrainGPT2Config, "train_text_document"),
         "bert": ("pretrain_bert.py", PretrainBertConfig, "train_text_sentence")}  # fmt: skip
TOKENIZERS = {"gpt2": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"}
# Of RACE's fine-tuning, beside the sizes that the settings have.
RACE = ("--epochs", "1", "--lr", "1e-4", "--micro-batch-size", "4", "--global-batch-size", "16",
        "--hidden-dropout", "0", "--attention-dropout", "0",
        "--max-truncated", "1", "--compare-paper")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user chose; paths are absolute."""

    data: Path
    output: Path
    gpt2_preset: Path
    bert_preset: Path
    tensor_parallel: int
    vocab_size: int
    overlapping_eval: int
    race_train: int
    race_dev: int

    def preset(self, model: str) -> Path:
        return self.gpt2_preset if model == "gpt2" else self.bert_preset


def training_flags(settings: Settings, model: str, preset: str) -> list[str]:
    size = str(settings.tensor_parallel)
    return ["--preset", preset, "--tensor-model-parallel-size", size]


def training_config(settings: Settings, model: str) -> PretrainConfig:
    flags = training_flags(settings, model, str(settings.preset(model)))
    return parse(TASKS[model][1], flags, {})


def choose_processes(settings: Settings, gpus: int, cores: int) -> dict[str, Processes]:
    """Of each model; ValueError, naming flags, where preset and sizes do not fit."""
    return {model: fit_processes(training_config(settings, model), gpus, cores) for model in TASKS}


def plan(settings: Settings, processes: dict[str, Processes], cores: int) -> list[Stage]:
    """The stages from the archive of RACE to the report, in order."""
    return [
        *corpus_stages(settings, cores),
        data_stage(settings, "gpt2", cores),
        pretrain_stage(settings, "gpt2", processes["gpt2"]),
        data_stage(settings, "bert", cores),
        pretrain_stage(settings, "bert", processes["bert"]),
        *zero_shot_stages(settings, cores),
        *race_stages(settings, processes["bert"]),
        report_stage(settings),
    ]


def corpus_stages(settings: Settings, cores: int) -> list[Stage]:
    """corpus: the articles of RACE's two archives; clean: all steps after it."""
    folder = settings.output / "corpus"
    archives = {"extract": settings.data / RACE_TRAIN, "race-dev": settings.data / RACE_DEV}
    extract = [
        python("-m", "tools.corpus.extract", "--input", archive, "--format", "json",
               "--key", "article", "--source", "race", "--output", folder / name)
        for name, archive in archives.items()
    ]  # fmt: skip
    evaluation = [*evaluation_files(settings).values(), folder / "race-dev" / DEV_SHARD]
    more: dict[str, list[str | Path]] = {"decontaminate": ["--evaluation", *evaluation]}
    steps = [
        on_all(python("-m", f"tools.corpus.{step}", "--input", folder / before,
                      "--output", folder / step, *more.get(step, [])), cores)
        for before, step in pairwise(CORPUS_STEPS)
    ]  # fmt: skip
    corpus = Stage(
        name="corpus",
        commands=tuple(extract),
        inputs=tuple(archives.values()),
        outputs=tuple(folder / name for name in archives),
    )
    clean = Stage(
        name="clean",
        commands=tuple(steps),
        inputs=tuple(evaluation_files(settings).values()),
        outputs=tuple(folder / step for step in CORPUS_STEPS[1:]),
    )
    return [corpus, clean]


DEV_SHARD = "part-00000-000.jsonl"  # of an archive as small as this the only one


def evaluation_files(settings: Settings) -> dict[str, Path]:
    """By the tasks that ask for them."""
    return {"wikitext103": settings.data / WIKITEXT103, "lambada": settings.data / LAMBADA}


def data_prefix(settings: Settings, model: str) -> Path:
    return settings.output / model / "data" / TASKS[model][2]


def data_stage(settings: Settings, model: str, cores: int) -> Stage:
    """A vocabulary of the corpus itself, and the corpus in its tokens."""
    text, folder = settings.output / "corpus" / "split" / "train", settings.output / model
    vocabulary = folder / "vocabulary"
    kind = ["--tokenizer-type", TOKENIZERS[model]]
    train = python("tools/train_tokenizer.py", "--input", text, *kind,
                   "--vocab-size", str(settings.vocab_size),
                   "--output-dir", vocabulary)  # fmt: skip
    own: dict[str, list[str | Path]] = {
        "gpt2": ["--vocab-file", vocabulary / "vocab.json",
                 "--merge-file", vocabulary / "merges.txt", "--append-eod"],
        "bert": ["--vocab-file", vocabulary / "vocab.txt", "--split-sentences"],
    }  # fmt: skip
    encode = python("tools/preprocess_data.py", "--input", text,
                    "--output-prefix", folder / "data" / "train", *kind, *own[model])  # fmt: skip
    return Stage(
        name=f"{model}-data",
        commands=(train, on_all(encode, cores)),
        outputs=(vocabulary, folder / "data"),
    )


def under_torchrun(processes: Processes, *arguments: str | Path) -> Command:
    return python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes.world),
        *arguments, OMP_NUM_THREADS=str(processes.threads),
    )  # fmt: skip


def pretrain_stage(settings: Settings, model: str, processes: Processes) -> Stage:
    folder = settings.output / model
    pretrain = under_torchrun(
        processes,
        TASKS[model][0], *training_flags(settings, model, shown(settings.preset(model))),
        "--micro-batch-size", str(processes.micro_batch_size),
        "--data-path", data_prefix(settings, model),
        "--save", folder / "checkpoints", "--metrics-file", folder / "metrics.jsonl",
    )  # fmt: skip
    return Stage(
        name=model,
        commands=(pretrain,),
        inputs=(settings.preset(model),),
        outputs=(folder / "checkpoints", folder / "metrics.jsonl", folder / "run.json"),
    )


def zero_shot_stages(settings: Settings, cores: int) -> list[Stage]:
    """heldout, wikitext103, lambada: what GPT-2 says of text that it has not seen."""
    files = evaluation_files(settings)
    flags: dict[str, list[str | Path]] = {
        "heldout": ["--input", settings.output / "corpus" / "split" / "valid",
                    "--train-data", data_prefix(settings, "gpt2")],
        "wikitext103": ["--valid-data", files["wikitext103"],
                        "--overlapping-eval", str(settings.overlapping_eval), "--compare-paper"],
        "lambada": ["--valid-data", files["lambada"], "--compare-paper"],
    }  # fmt: skip
    return [
        Stage(
            name=task,
            commands=(
                python("tasks/main.py", "--task", task.upper(),
                       "--load", settings.output / "gpt2" / "checkpoints", *own,
                       "--output", result_file(settings.output, task),
                       OMP_NUM_THREADS=str(cores)),
            ),
            inputs=(files[task],) if task in files else (),
            outputs=(result_file(settings.output, task),),
        )
        for task, own in flags.items()
    ]  # fmt: skip


def result_file(output: Path, task: str) -> Path:
    return output / f"{task}.json"


def race_stages(settings: Settings, processes: Processes) -> list[Stage]:
    """race-data: some passages of both archives; race: BERT fine-tuned on them."""
    folder, sides = settings.output / "race", ("train", "dev")
    archives = (settings.data / RACE_TRAIN, settings.data / RACE_DEV)
    counts = (settings.race_train, settings.race_dev)
    unpack = [
        python("-m", "tools.paper.miniature.passages", "--archive", archive,
               "--count", str(count), "--output", folder / side)
        for side, archive, count in zip(sides, archives, counts, strict=True)
    ]  # fmt: skip
    length = training_config(settings, "bert").data.seq_length
    result = result_file(settings.output, "race")
    fine_tune = under_torchrun(
        processes,
        "tasks/main.py", "--task", "RACE",
        "--tensor-model-parallel-size", str(settings.tensor_parallel),
        "--pretrained-checkpoint", settings.output / "bert" / "checkpoints",
        "--train-data", folder / "train", "--valid-data", folder / "dev",
        "--seq-length", str(length), *RACE, "--output", result,
    )  # fmt: skip
    return [
        Stage(
            name="race-data",
            commands=tuple(unpack),
            inputs=archives,
            outputs=tuple(folder / side for side in sides),
        ),
        Stage(name="race", commands=(fine_tune,), outputs=(result,)),
    ]


def report_stage(settings: Settings) -> Stage:
    report = python("-m", "tools.paper.miniature.report", "--output", settings.output)
    files = tuple(settings.output / f"report.{ending}" for ending in ("json", "md", "html"))
    return Stage(name="report", commands=(report,), outputs=files)
