"""Stages that several experiments have: articles of RACE, a clean corpus, tokens, a training,
evaluations; the checkpoint that they start from, and random weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import one_step, step_folders
from megatron.config.parallel import ParallelConfig
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from megatron.errors import UsageError, flag
from megatron.train.trained import open_model
from tools.experiments import runner
from tools.experiments.runner import Command, Machine, Stage, Word, python

# Files of a folder laid out as MEGATRON_TEST_DATA.
RACE_TRAIN = "race/RACE_train.tar.xz"
RACE_DEV = "race/RACE_dev.tar.xz"
WIKITEXT103 = "wikitext103/wiki.valid.tokens"
LAMBADA = "lambada/lambada_test_first500.jsonl"
FILES = (RACE_TRAIN, RACE_DEV, WIKITEXT103, LAMBADA)  # for a run from articles to table 3
EVALUATION_FILES = {"wikitext103": WIKITEXT103, "lambada": LAMBADA}  # by the task that reads them

CORPUS_STEPS = ("extract", "clean", "decontaminate", "dedup", "split")
DEV_SHARD = "part-00000-000.jsonl"  # the only shard of an archive as small as this

PROGRAMS = {
    "gpt2": ("pretrain_gpt2.py", PretrainGPT2Config, "train_text_document"),
    "bert": ("pretrain_bert.py", PretrainBertConfig, "train_text_sentence"),
}
TOKENIZERS = {"gpt2": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"}


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Raises UsageError, naming every file of the folder --data that is missing or empty."""
    paths = [folder / name for name in names]
    missing = [str(path) for path in paths if not path.is_file() or not path.stat().st_size]
    if missing:
        raise UsageError("--data", folder, f"a folder that has, not empty, {', '.join(missing)}")


def check_checkpoint(name: str, load: Path, kinds: Sequence[str] | None = None) -> None:
    """Raises UsageError, naming the setting, if the folder has no readable checkpoint of a model of
    these kinds; by default, of those that write text."""
    open_model(str(load), ParallelConfig(), 1, kinds, flag(name))


def checkpoint_files(load: Path) -> list[Path]:
    """Files that tell whether a folder's newest checkpoint is still the same one: `latest`, and the
    manifest, which has the checksums of all other files."""
    one = one_step(load)
    newest = [one] if one is not None else step_folders(load)[:1]
    files = [load / "latest", *(folder / "manifest.json" for folder in newest)]
    return [file for file in files if file.is_file()]


def initial_weights(config: Any, vocab_size: int, seed: int) -> dict[str, Any]:
    """Whole fp32 initial parameters of the model of this config, by name."""
    from megatron.models.build import build_on_meta
    from megatron.parallel.initialize import initial_value
    from megatron.parallel.mesh import serial_mesh
    from megatron.parallel.sharding import sharding_specs

    specs = sharding_specs(build_on_meta(config, serial_mesh(), vocab_size))
    return {name: initial_value(name, spec, seed) for name, spec in specs.items()}


def extract_race(archive: Path, output: Path) -> Command:
    flags = ("--format", "json", "--key", "article", "--source", "race", "--output", output)
    return python("tools/corpus.py", "extract", "--input", archive, *flags)


def clean_stage(
    raw: Path,
    corpus: Path,
    steps: Mapping[str, Iterable[Word]],
    cores: int,
    inputs: Sequence[Path] = (),
) -> Stage:
    """Steps of tools/corpus.py, each of which reads the previous one's output.

    steps: {name: further flags}. corpus: folder with a folder for each step.
    """
    commands, source = [], raw
    for step, flags in steps.items():
        output = corpus / step
        words = ("tools/corpus.py", step, "--input", source, "--output", output, *flags)
        commands.append(python(*words, workers=cores))
        source = output
    outputs = [corpus / step for step in steps]
    return Stage(name="clean", commands=commands, inputs=inputs, outputs=outputs)


def article_stages(data: Path, corpus: Path, cores: int) -> list[Stage]:
    """corpus, clean: RACE's articles without what the evaluations ask; leaves split/train and
    split/valid."""
    archives = {"extract": data / RACE_TRAIN, "race-dev": data / RACE_DEV}
    evaluations = [data / file for file in EVALUATION_FILES.values()]
    steps: dict[str, list[Word]] = {step: [] for step in CORPUS_STEPS[1:]}
    steps["decontaminate"] = ["--evaluation", *evaluations, corpus / "race-dev" / DEV_SHARD]
    extract = Stage(
        name="corpus",
        commands=[extract_race(archive, corpus / name) for name, archive in archives.items()],
        inputs=list(archives.values()),
        outputs=[corpus / name for name in archives],
    )
    return [extract, clean_stage(corpus / "extract", corpus, steps, cores, inputs=evaluations)]


def train_tokenizer(text: Path, kind: str, vocab_size: int, vocabulary: Path) -> Command:
    """kind: gpt2 or bert. vocabulary: the folder that it writes."""
    return python(
        "tools/train_tokenizer.py", "--input", text, "--tokenizer-type", TOKENIZERS[kind],
        "--vocab-size", vocab_size, "--output", vocabulary,
    )  # fmt: skip


def preprocess(
    text: Path, kind: str, vocabulary: Iterable[Path], data: Path, cores: int
) -> Command:
    """vocabulary: vocab.json and merges.txt of GPT-2, or vocab.txt of BERT. data: the folder that
    it writes."""
    flags: list[Word] = ["--tokenizer-type", TOKENIZERS[kind]]
    for name, file in zip(("--vocab-file", "--merge-file"), vocabulary, strict=False):
        flags += [name, file]
    if kind == "bert":
        flags.append("--split-sentences")
    prefix = data / "train"
    words = ("tools/preprocess_data.py", "--input", text, "--output-prefix", prefix, *flags)
    return python(*words, workers=cores)


def data_prefix(folder: Path, kind: str) -> Path:
    """The data set of `preprocess` in a folder that `data_stage` fills."""
    return folder / "data" / PROGRAMS[kind][2]


def data_stage(folder: Path, text: Path, kind: str, vocab_size: int, cores: int) -> Stage:
    """A vocabulary of the text, and the text as its tokens."""
    vocabulary, data = folder / "vocabulary", folder / "data"
    names = ("vocab.json", "merges.txt") if kind == "gpt2" else ("vocab.txt",)
    files = [vocabulary / name for name in names]
    train = train_tokenizer(text, kind, vocab_size, vocabulary)
    encode = preprocess(text, kind, files, data, cores)
    return Stage(name=f"{kind}-data", commands=[train, encode], outputs=[vocabulary, data])


def pretrain_stage(
    name: str,
    kind: str,
    preset: Path,
    flags: Iterable[Word],
    data: Path,
    folder: Path,
    machine: Machine,
    check: Callable[[], None] = lambda: None,
) -> Stage:
    """One training, which leaves checkpoints, metrics.jsonl and run.json in the folder.

    flags: those that the preset does not have. data: prefix of the data set. check: see `Stage`.
    Raises UsageError if preset and flags do not fit together.
    """
    program, config, _ = PROGRAMS[kind]
    words: list[Word] = ["--preset", preset, *flags]
    given = runner.parse_training(config, words)
    processes = runner.fit_processes(given, machine)
    words += ["--micro-batch-size", processes.micro_batch_size, "--data-path", data]
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"
    words += ["--save", checkpoints, "--load", checkpoints, "--metrics-file", metrics]
    words += ["--save-interval", given.training.eval_interval, "--keep-checkpoints", 2]
    return Stage(
        name=name,
        commands=[runner.torchrun(processes, program, *words)],
        inputs=[preset],
        outputs=[checkpoints, metrics, folder / "run.json"],
        goes_on=True,
        check=check,
    )


def evaluate(
    task: str, checkpoints: Path, flags: Iterable[Word], result: Path, cores: int
) -> Command:
    """result: the record that it writes (JSON)."""
    words = ("tasks/main.py", "--task", task.upper(), "--load", checkpoints, *flags)
    return python(*words, "--output", result, threads=cores, is_quiet=True)


def zero_shot_stage(
    task: str, data: Path, overlapping_eval: int, records: Mapping[Path, Path], cores: int
) -> Stage:
    """An evaluation of table 3.

    data: folder laid out as MEGATRON_TEST_DATA. overlapping_eval: stride of WikiText103's window.
    records: the record that it writes for each folder of checkpoints.
    """
    file = data / EVALUATION_FILES[task]
    flags: list[Word] = ["--valid-data", file]
    if task == "wikitext103":
        flags += ["--overlapping-eval", overlapping_eval]
    flags.append("--compare-paper")
    commands = [evaluate(task, load, flags, record, cores) for load, record in records.items()]
    return Stage(name=task, commands=commands, inputs=[file], outputs=[*records.values()])
