"""The commands of experiments: every one is one that its program takes, only what is compared
differs, and settings that cannot be run are refused."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse, parse_call
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from megatron.data.indexed import IndexedDataset
from tasks.main import find_module, split_task
from tests.data.samples import write_data
from tests.refusals import field_of, refusal
from tests.test_results import parse_words
from tests.tools.papers import small_preset, write_folder, write_race
from tools.convert_hf import export_model, import_model
from tools.experiments import (
    context_memory,
    dropout_quality,
    figure6,
    figure7,
    finetuning,
    learning_curves,
    lm_harness,
    miniature,
    quickstart,
)
from tools.experiments.passages import passages
from tools.experiments.runner import ROOT, Command, Machine, Stage
from tools.experiments.stages import FILES, LAMBADA, RACE_DEV, WIKITEXT103
from tools.train_tokenizer import train_tokenizer

CPU = Machine(0, 2)
DATA = Path("/data")
FIGURE7 = figure7.Settings(data=DATA, depths=(6, 12), rates=(2e-3, 5e-4))
SIZES = ("2x64", "4x128", "6x256")
UNCOMPARABLE = (("2x64",), ("2x64", "2x64"), ("4x128", "2x64"), ("2x64", "4-128"))
FUNCTIONS = {
    "tools/train_tokenizer.py": train_tokenizer,
    "tools/experiments/passages.py": passages,
    "tools/convert_hf.py import": import_model,
    "tools/convert_hf.py export": export_model,
}


@cache
def experiments() -> dict[str, Sequence[Stage]]:
    return {
        "quickstart": quickstart.list_stages(quickstart.Settings(), CPU),
        "miniature": miniature.list_stages(miniature.Settings(data=DATA), CPU),
        "figure6": figure6.list_stages(figure6.Settings(data=DATA), CPU),
        "figure7": figure7.list_stages(FIGURE7, CPU),
        "figure7 without data": figure7.list_stages(replace(FIGURE7, data=None), CPU),
        "learning_curves": learning_curves.list_stages(learning_curves.Settings(seeds=2), CPU),
        "finetuning": finetuning.list_stages(finetuning.Settings(), CPU),
        "lm_harness": lm_harness.list_stages(lm_harness.Settings(), CPU),
    }


def program_of(command: Command) -> tuple[str, list[str], int]:
    """(file or module, its arguments, processes). Python code that trains counts as the program
    whose flags it takes."""
    words, world = [*command.argv[1:], *command.tuning], 1
    if words[:2] == ["-m", "torch.distributed.run"]:
        world = int(words[words.index("--nproc-per-node") + 1])
        words = words[words.index("--nproc-per-node") + 2 :]
    if words[0] == "-c" and re.search("pretrain_gpt2.py|train_transformers", words[1]):
        return "pretrain_gpt2.py", words[2:], world
    if words[0] == "tools/convert_hf.py":
        words = [" ".join(words[:2]), *words[2:]]
    return words[0], words[1:], world


def parse_command(command: Command) -> Any:
    """The settings that the program makes of the flags; an error if it refuses them."""
    program, flags, world = program_of(command)
    if program == "tasks/main.py":
        name, rest = split_task(flags)
        return parse(find_module(name).Settings, rest, {})
    if program == "-c":
        module, name = re.search(r"from (\S+) import (\w+)", flags[0]).groups()
        return signature(getattr(import_module(module), name)).bind(*flags[1:])
    if program in FUNCTIONS:
        return parse_call(FUNCTIONS[program], flags, {})
    settings = parse_words(program, flags)
    if program.startswith("pretrain"):
        settings.check(world)
    return settings


def test_commands_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of what they write exist, as in a run."""
    monkeypatch.chdir(tmp_path)
    Path("scripts").symlink_to(ROOT / "scripts")
    parsed = {}
    for name, stages in experiments().items():
        commands = [command for stage in stages for command in stage.commands]
        for command in commands:
            if "--output" in command.argv:
                output = Path(command.argv[command.argv.index("--output") + 1])
                output.parent.mkdir(parents=True, exist_ok=True)
        parsed[name] = [parse_command(command) for command in commands]
    runs = [each for each in parsed["figure6"] if isinstance(each, PretrainGPT2Config)]
    assert [f"{run.model.num_layers}x{run.model.hidden_size}" for run in runs] == list(SIZES)
    # A killed training goes on from its last evaluation.
    assert all(run.checkpoint.save_interval == run.training.eval_interval for run in runs)
    for name in ("figure7", "figure7 without data"):
        berts = [each for each in parsed[name] if isinstance(each, PretrainBertConfig)]
        values = [(r.model.residual_order, r.model.num_layers, r.optimizer.lr) for r in berts]
        both = [(depth, rate) for rate in FIGURE7.rates for depth in FIGURE7.depths]
        assert values == [(order, *each) for each in both for order in ("pre-ln", "post-ln")]
    seeds = [each.training.seed for each in parsed["learning_curves"]]
    assert seeds == [1234] * (len(seeds) - 4) + [1, 1, 2, 2]


def differing(one: Command, other: Command) -> set[str]:
    """The flags whose values differ."""
    ours, theirs = (program_of(command)[1] for command in (one, other))
    return {flag for flag, a, b in zip(ours, ours[1:], theirs[1:], strict=False) if a != b}


def test_compared_runs_are_alike() -> None:
    pairs = [stage.commands for stage in experiments()["figure7"] if stage.is_parallel]
    assert pairs
    for one, other in pairs:
        assert differing(one, other) == {"--residual-order", "--metrics-file"}
    stages = {stage.name: stage for stage in experiments()["figure6"]}
    for name in SIZES[1:]:
        flags = {"--num-layers", "--hidden-size", "--save", "--load", "--metrics-file"}
        assert differing(stages[SIZES[0]].commands[0], stages[name].commands[0]) == flags
    for task in ("wikitext103", "lambada"):
        first, *others = stages[task].commands
        for size, other in zip(SIZES[1:], others, strict=True):
            assert differing(first, other) == {"--load", "--output"}
            folder = f"runs/figure6/runs/{size}"
            assert {f"{folder}/checkpoints", f"{folder}/{task}.json"} <= {*other.argv}


def test_stages_depend_on_their_model(tmp_path: Path) -> None:
    names = ("latest", "step_00000001/manifest.json", "vocab.json", "merges.txt", "data", "dev")
    files = {name: tmp_path / name for name in names}
    data = files["data"]
    texts: dict[str, Any] = {"lambada_data": data, "wikitext_data": data, "tokenizer": tmp_path}
    tuned = finetuning.Settings(pretrained=tmp_path, train_data=data, valid_data=files["dev"])
    given, made = (lm_harness.Settings(load=load, **texts) for load in (tmp_path, None))

    def fingerprints() -> list[list[str]]:
        found = (
            finetuning.list_stages(tuned, CPU),
            lm_harness.list_stages(given, CPU),
            lm_harness.list_stages(made, CPU)[:1],
        )
        return [[stage.fingerprint() for stage in stages] for stages in found]

    for file in files.values():
        file.parent.mkdir(exist_ok=True)
        file.write_text("1")
    for name, changed in zip(names[:4], ({0, 1}, {0, 1}, {2}, {2}), strict=True):
        before = fingerprints()
        files[name].write_text("2")
        for number, (old, new) in enumerate(zip(before, fingerprints(), strict=True)):
            same = {*old} & {*new}
            assert not same if number in changed else old == new, name
    before = fingerprints()[0]
    files["dev"].write_text("2")
    assert {*before} & {*fingerprints()[0]} == {before[0]}  # the initial weights


def test_ways_of_lm_harness_compute_on_the_cpu() -> None:
    found = lm_harness.list_stages(lm_harness.Settings(), CPU)
    commands = [command for stage in found[2:] for command in stage.commands]
    assert len(commands) == 4
    assert all(command.environ["CUDA_VISIBLE_DEVICES"] == "" for command in commands)


def test_evaluated_text_is_not_trained_on() -> None:
    clean = experiments()["miniature"][1]
    cut = next(c for c in clean.commands if c.argv[2] == "decontaminate")
    flags = list(cut.argv)
    evaluated = flags[flags.index("--evaluation") + 1 :]
    assert evaluated[:2] == [*map(str, clean.inputs)]
    assert clean.inputs == [DATA / WIKITEXT103, DATA / LAMBADA]
    assert evaluated[2].startswith("runs/miniature/corpus/race-dev/")


def stages_of(machine: Machine = CPU, **settings: Any) -> dict[str, Stage]:
    """The stages of the quickstart."""
    found = quickstart.list_stages(quickstart.Settings(**settings), machine)
    return {stage.name: stage for stage in found}


def test_quickstart_fits_its_processes() -> None:
    for gpus, steps in ((0, 1), (2, 2600), (5, None), (8, 50)):
        stage = stages_of(Machine(gpus, 16), train_iters=steps)["pretrain"]
        program, flags, world = program_of(stage.commands[0])
        config = parse(PretrainGPT2Config, flags, {})
        config.check(world)
        assert program == "pretrain_gpt2.py"
        assert world == max(2, min(8, gpus // 2 * 2))
        assert config.global_batch_size(world) == 4
        assert config.training.train_iters == (steps or 2600)
        assert config.logging.log_interval <= config.training.train_iters


@pytest.mark.parametrize(("positions", "count"), [(256, 96), (64, 35), (20, 1)])
def test_quickstart_samples_fit_the_model(tmp_path: Path, positions: int, count: int) -> None:
    sizes = dict.fromkeys(("max_position_embeddings", "seq_length"), positions)
    preset = small_preset(tmp_path, "quickstart", sizes)
    argv = stages_of(preset=preset)["sample"].commands[0].argv
    assert argv[argv.index("--max-new-tokens") + 1] == str(count)


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [([200] * 19, None), ([200] * 10, 200), ([2000], 0), ([257] * 2, None), ([256] * 2, 256)],
)
def test_quickstart_checks_the_corpus_size(
    tmp_path: Path, sizes: list[int], tokens: int | None
) -> None:
    """tokens: of the smaller part if it is too small."""
    write_data(tmp_path / "data", [[1] * size for size in sizes])
    data = IndexedDataset(str(tmp_path / "data"))
    if tokens is None:
        quickstart.check_corpus_size(data, 256)
    else:
        error = refusal(lambda: quickstart.check_corpus_size(data, 256))
        assert field_of(error) == "corpus"
        assert f" {tokens} tokens" in str(error)


def test_quickstart_with_own_corpus_and_vocabulary(tmp_path: Path) -> None:
    corpus, vocabulary, merges = (tmp_path / name for name in "cvm")
    corpus.touch()
    own = stages_of(corpus=corpus, vocab_file=vocabulary, merge_file=merges)
    assert not own["corpus"].commands
    assert not own["tokenizer"].commands
    assert str(corpus) in own["clean"].commands[0].argv
    assert str(vocabulary) in own["preprocess"].commands[0].argv
    assert list(own) == list(stages_of())


def test_quickstart_names_a_corpus_under_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "c.jsonl").touch()
    monkeypatch.chdir(tmp_path / "mine")
    for corpus, name in ((Path(), "mine"), (Path("c.jsonl"), "c.jsonl")):
        argv = stages_of(corpus=corpus, json_key="body")["clean"].commands[0].argv
        assert argv[argv.index("--source") + 1] == name


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    data, output = write_folder(tmp_path / "data"), tmp_path / "out"
    (data / LAMBADA).unlink()
    (data / RACE_DEV).write_bytes(b"")
    nowhere = tmp_path / "nowhere"
    for experiment, folder in ((miniature, data), (figure6, data), (figure7, nowhere)):
        settings = experiment.Settings(data=folder, output=output)
        error = refusal(partial(experiment.run, settings))
        assert field_of(error) == "--data"
        if folder == data:
            assert all(name in str(error) for name in (LAMBADA, RACE_DEV))
    assert not output.exists()


def test_experiment_started_in_another_folder(tmp_path: Path) -> None:
    """Its commands, which run in the root of the repository, have the paths of that folder."""
    (tmp_path / "text.bin").touch()
    words = ["--plan-only", "--data-path", "text", "--output", "out"]
    command = [sys.executable, str(ROOT / learning_curves.PROGRAM), *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f" --data-path {tmp_path}/text " in ended.stdout
    assert f" --save {tmp_path}/out/runs/" in ended.stdout
    assert not (tmp_path / "out").exists()


def test_scripts_before_anything_is_installed(tmp_path: Path) -> None:
    # A copy without scripts/setup.sh could install nothing.
    for name in ("quickstart.sh", "test.sh", "paper/miniature.sh", "paper/start.sh"):
        copy = tmp_path / "scripts" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / "scripts" / name).read_bytes())

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = ["bash", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    (tmp_path / FILES[0]).parent.mkdir()
    (tmp_path / FILES[0]).touch()  # empty, as a download that broke off
    ended = run("scripts/paper/miniature.sh", "--fresh", "--data", tmp_path)
    assert ended.returncode == 2
    assert all(f"{tmp_path}/{name}" in ended.stderr for name in FILES)
    for name in ("quickstart.sh", "test.sh", "paper/miniature.sh"):
        for flag in ("--help", "-h"):
            ended = run(f"scripts/{name}", flag)
            assert (ended.returncode, ended.stderr) == (0, "")
            assert name in ended.stdout


@pytest.mark.parametrize(
    ("experiment", "changes", "field"),
    [
        (miniature, {"race_dev": 0}, "--race-dev"),
        (miniature, {"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size"),
        (figure6, {"overlapping_eval": 0}, "--overlapping-eval"),
        (figure6, {"vocab_size": 100}, "--vocab-size"),
        *((figure6, {"sizes": sizes}, "--sizes") for sizes in UNCOMPARABLE),
        (figure6, {"sizes": ("2x64", "4x130")}, "--num-attention-heads"),
        (figure7, {"depths": (6, 6)}, "--depths"),
        (figure7, {"rates": ()}, "--rates"),
        (learning_curves, {"runs": ("no such run",)}, "--runs"),
        (learning_curves, {"data_path": Path("none")}, "--data-path"),
        (finetuning, {"train_data": Path("none")}, "--train-data"),
        (finetuning, {"pretrained": Path("none")}, "--pretrained"),
        (lm_harness, {"wikitext_data": Path("none")}, "--wikitext-data"),
        (lm_harness, {"tokenizer": Path("none")}, "--tokenizer"),
        (lm_harness, {"load": Path("none")}, "--load"),
        (dropout_quality, {"rows": 300}, "--rows"),
        (dropout_quality, {"columns": 3}, "--columns"),
        (context_memory, {"lengths": (12,)}, "--seq-length"),
        (quickstart, {"corpus": Path("none")}, "corpus"),
        (quickstart, {"vocab_size": 256}, "--vocab-size"),  # no room for the bytes
        (quickstart, {"vocab_file": Path("vocab.json")}, "--vocab-file"),  # alone
        (quickstart, {"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size"),
    ],
)
def test_refusals(tmp_path: Path, experiment: Any, changes: Mapping[str, Any], field: str) -> None:
    """Before anything is written."""
    output, given = tmp_path / "out", {}
    if experiment in (miniature, figure6, figure7):
        given = {"data": write_folder(tmp_path / "data")}
    elif experiment is lm_harness:
        given = {"lambada_data": Path(__file__), "wikitext_data": Path(__file__)}
    elif experiment is finetuning:
        given = {"train_data": Path(__file__), "valid_data": Path(__file__)}
    settings = experiment.Settings(**{"output": output, **given, **changes})
    assert field_of(refusal(lambda: experiment.run(settings))) == field
    assert not output.exists()


@pytest.mark.parametrize("content", ["", '{"body": 1}\n{}\n'])
def test_quickstart_refuses_a_corpus_without_text(tmp_path: Path, content: str) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(content)
    settings = quickstart.Settings(corpus=corpus, output=tmp_path / "out")
    assert field_of(refusal(lambda: quickstart.run(settings))) == "corpus"


def test_fewer_passages_are_part_of_more(tmp_path: Path) -> None:
    archive = tmp_path / "race.tar.xz"
    write_race(archive, "RACE/train", iter(["text"] * 40))
    unpacked = {}
    for count in (8, 20, 99):
        folder = tmp_path / str(count)
        passages(archive, count, folder)
        unpacked[count] = {str(path.relative_to(folder)) for path in folder.rglob("*.txt")}
    assert [len(each) for each in unpacked.values()] == [8, 20, 40]
    assert unpacked[8] < unpacked[20] < unpacked[99]
    assert {name.split("/")[0] for name in unpacked[8]} == {"middle", "high"}
    archive.write_bytes(b"no archive")
    assert field_of(refusal(lambda: passages(archive, 1, tmp_path / "out"))) == "--archive"
