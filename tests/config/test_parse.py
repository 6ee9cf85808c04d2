"""From arguments and presets to settings, and the errors of both; the number of processes.

Sizes of the presets' models: models/test_presets.py.
"""

import json
import re
import shlex
import signal
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from math import prod
from pathlib import Path

import pytest

from megatron.config.checkpoint import TrainedConfig
from megatron.config.launch import SIGNALS, StopSignals, world_size
from megatron.config.parse import (
    PRESETS,
    find_preset,
    parse,
    parse_call,
    parse_part,
    parse_table,
    user_errors,
)
from megatron.config.pretrain import (
    PretrainBertConfig,
    PretrainConfig,
    PretrainGPT2Config,
    PretrainLlamaConfig,
    PretrainViTConfig,
)
from megatron.errors import CommandLineError, UsageError
from megatron.models.registry import take_kind
from tests.refusals import refusal

MODEL = ["--num-layers=2", "--hidden-size=8", "--num-attention-heads=4"]
SMALL = [*MODEL, "--train-iters=3"]


def pretrain(*arguments: str) -> PretrainGPT2Config:
    return parse(PretrainGPT2Config, [*SMALL, *arguments], {})


def preset(folder: Path, text: str) -> str:
    file = folder / "preset.toml"
    file.write_text(text, encoding="latin-1")
    return str(file)


def test_the_type_of_a_setting_is_named() -> None:
    """Its choices in order, without the None of a setting that may be left out."""
    choices = "coordinates or coordinates-flex or kernel"
    for name, values, kind in (
        ("--num-layers", ["x"], "an integer"),
        ("--lr", ["x", "--seed", "1"], "a number"),
        ("--attention-dropout-rng", ["none"], choices),
    ):
        refusal(lambda name=name, words=values: pretrain(name, *words), kind, field=name)
    refusal(lambda: pretrain("--nun-layers", "2"), "--nun-layers", kind=CommandLineError)


@dataclass(frozen=True)
class Written:
    output: Path | None = None


def test_a_blank_path_and_an_endless_number_are_refused() -> None:
    """The path would be the current folder."""

    def program(input: tuple[Path, ...], output: Path | None = None, name: str = "") -> None: ...

    for words, flag in (
        ("--input a '' b", "--input"), ("--input a --output=", "--output"),
        ("--input a --output ''", "--output"),
    ):  # fmt: skip
        refusal(lambda words=words: parse_call(program, shlex.split(words), {}), field=flag)
    parse_call(program, ["--input", "a", "--name", ""], {})
    refusal(partial(parse, Written, ["--output", ""], {}), field="--output")
    refusal(lambda: pretrain("--seed", str(2**63)), field="--seed")
    pretrain("--seed", str(2**63 - 1))


def terminated() -> int:
    signal.raise_signal(signal.SIGTERM)
    return 1


@dataclass(frozen=True)
class Terminated:
    steps: int = field(default_factory=terminated)


def test_a_signal_ends_a_program_that_reads_its_arguments(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with StopSignals(), pytest.raises(SystemExit) as stop:
        parse_part(Terminated, [], {})
    assert stop.value.code == SIGNALS["SIGTERM"]
    assert "SIGTERM" in capfd.readouterr().err


def test_a_second_ctrl_c_alone_ends_a_step(capfd: pytest.CaptureFixture[str]) -> None:
    for name in SIGNALS:
        with StopSignals() as signals:
            signals.arm()
            signal.raise_signal(signal.Signals[name])
            assert signals.received == name
            with pytest.raises(SystemExit) if name == "SIGINT" else nullcontext():
                signal.raise_signal(signal.Signals[name])
    assert capfd.readouterr().err.count("ended by") == 1


def test_a_signal_goes_before_other_reasons() -> None:
    signals = StopSignals()
    for reason, received in (("good", "good"), ("enough", "good"), ("SIGTERM", "SIGTERM")):
        signals.ask(reason)
        assert signals.received == received
    signals.ask("SIGUSR1")
    assert signals.received == "SIGTERM"


def test_presets_are_named_where_sizes_are_missing() -> None:
    error = refusal(lambda: parse(PretrainGPT2Config, ["--train-iters=3"], {}))
    presets = re.findall(r"\bgpt2_\w+(?:\.\w+)?", str(error))
    assert presets
    for name in presets:
        parse(PretrainGPT2Config, ["--train-iters=3", "--preset", name], {})


@pytest.mark.parametrize("join", [" ", "="])
def test_spellings_of_one_flag(join: str) -> None:
    for name in ("tensor-model-parallel-size", "model-parallel-size", "model_parallel_size"):
        config = pretrain(*f"--{name}{join}4".split())
        assert config.parallel.tensor_model_parallel_size == 4

    def program(output: str, save: str = "") -> str:
        return output + save

    words = f"--out{join}here --save there".split()
    with pytest.warns(UserWarning, match="--out is now --output"):
        assert parse_call(program, words, {})() == "herethere"


def test_the_last_word_wins_and_presets_come_first(tmp_path: Path) -> None:
    file = preset(
        tmp_path,
        'num_layers = 7\nlr = 1\nbf16 = true\ndata_path = ["0.3", "a", "0.7", "b"]\n'
        'lr_decay_style = "linear"\nmodel_parallel_size = 2\nsave = "there"\n',
    )
    config = pretrain("--lr", "2", "--lr", "3", "--no-bf16", "--preset", file, f"--preset={file}")
    assert (config.model.num_layers, config.optimizer.lr, config.precision.bf16) == (2, 3.0, False)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.parallel.tensor_model_parallel_size == 2
    assert (config.optimizer.lr_decay_style, config.checkpoint.save) == ("linear", "there")


def test_bad_presets_name_file_and_key(tmp_path: Path) -> None:
    for text, key in (
        ("lr = 1\n\nnum_layer = 4\n", "num_layer"),
        ("seed = 1\n[model]\nnum_layer = 4\n", "line 3: num_layer"),
        ('seed = "x"\n', "seed"),
        ("seed = 4.0\n", "seed"),
        ("bf16 = true\nseed = 'x'\n", "seed ="),
        ("seed = true\n", "seed"),
        ("lr = [1, 2]\n", "lr"),
        ("bf16 = 1\n", "bf16"),
        ("seed = 1\nbf16 = 'x'\n", "bf16"),
        ("checkpoint_activations = true\n", "checkpoint_activations"),
        ("preset = 'b.toml'\n", "preset"),
        ("[model]\n\nseed = 1\n", "line 3: seed"),
        ("[training]\ntensor_model_parallel_size = 2\n", "must be in the table [parallel]"),
        ("[model]\nlr = {a = 1}\n", "a setting of this table [model]"),
        ("[modle]\nnum_layers = 4\n", "line 1: [modle]"),
        ("lr = 1\nmodel.num_layer = 4\n", "line 2: num_layer"),
        ("lr = 1\n'model' = {num_layer = 4}\n", "line 2: num_layer"),
        ('kind = "gpt2"\n', "line 1: kind"),
        ("lr = 1\n[optimizer]\nlr = 2\n", "line 3: lr = 2: must be given once; line 1"),
        ("tensor_model_parallel_size = 2\nmodel_parallel_size = 2\n", "line 2: model_"),
        ('[model]\nkind = "bert"\n', "line 2: kind"),
        ("[data]\n# a comment\nnum_workers = 3.5\n", "line 3: num_workers"),
        ("lr = 1\n\n[training]\nseed = 2.5\n", "line 4: seed"),
        ("seed: 4\n", "line 1"),
        ("\xff\xfe", "TOML"),
    ):
        file = preset(tmp_path, text)
        refusal(partial(pretrain, "--preset", file), file, key, field="--preset")


def test_a_kind_that_is_not_known_is_named_with_its_line(tmp_path: Path) -> None:
    words = ["--preset", preset(tmp_path, 'lr = 1\n\n[model]\nkind = "gpt"\n')]
    refusal(partial(take_kind, words, {}), "line 4: kind", field="--preset")
    later = tmp_path / "later.toml"
    later.write_text('model.kind = "vit"\n')
    assert take_kind([*words, "--preset", str(later)], {})[0] == "vit"
    missing = ["--preset", "nowhere"]  # `parse` knows which presets the kind has
    assert take_kind([*missing, "--model", "vit"], {}) == ("vit", missing)
    refusal(partial(take_kind, missing, {}), field="--preset")


def test_what_a_preset_has_is_refused_and_cured_as_lines_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever part of the program finds the fault. The cure, pasted in place of the line, works;
    what the command line gives stays a flag."""
    iters = "lr_warmup_iters = 4"
    for text, words, refused, cure, others in (
        (iters, "", (1, iters), "lr_warmup_fraction = 0.1", ""),
        (f"[optimizer]\n{iters}", "", (2, iters), "lr_warmup_fraction = 0.1", ""),
        (iters, "--lr-warmup-iters=0 --seed -1", None, "", ""),
        ("shuffle = false", "--mock-data --no-shuffle", None, "", ""),
        ('seed = 1\nlr_decay_style = "cos"', "", (2, 'lr_decay_style = "cos"'), None, ""),
        ("model_parallel_size = 3", "", (1, "model_parallel_size = 3"),
         "tensor_model_parallel_size = 1", ""),
        ("loss_scale = 8\nfp16 = true", "--no-fp16", (1, "loss_scale = 8"), None, ""),
        ("min_lr = 1.0\nlr = 0.5", "", (1, "min_lr = 1.0"), "min_lr = 0.5", "lr = 0.5 (line 2)"),
        ("lr = 0.5", "--min-lr 1", None, "--min-lr 0.5", "lr = 0.5 (line 1)"),
        ('loss_scale = "x"', "--loss-scale 8 --fp16 --seed -1", None, "", ""),
        ('lr_decay_style = "cos"', "--lr-decay-style linear --seed x", None, "", ""),
        ("pad = true\nreset_position_ids = true", "", (2, "reset_position_ids = true"),
         "reset_position_ids = false", "pad = true (line 1)"),
        ("bf16 = true\nfp16 = true", "", (2, "fp16 = true"), "fp16 = false",
         "bf16 = true (line 1)"),
        ("profile_step_start = 1\nprofile_step_end = 2", "", (1, "profile_step_start = 1"),
         'profile_step_start = 1\nsave = "checkpoints"', ""),
        ("[logging]\nprofile_step_start = 1\nprofile_step_end = 2", "",
         (2, "profile_step_start = 1"), "--profile-step-start 1 --save checkpoints", ""),
    ):  # fmt: skip
        file = preset(tmp_path, text)
        given = words.split()
        with pytest.raises(SystemExit), user_errors({}):
            pretrain("--preset", file, *given).check(1)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        line = f"--preset {file}, line {refused[0]}: {refused[1]}: must be " if refused else "--"
        assert said.startswith(f"error: {line}"), said
        assert said.endswith(f"; --preset {file} has {others}\n") if others else " has " not in said
        assert refused or not cure or f"; {cure} works" in said
        if refused and cure:
            assert f"; {' and '.join(cure.splitlines())} works" in said
            if cure.startswith("--"):
                given += cure.split()
            else:
                file = preset(tmp_path, text.replace(refused[1], cure))
            pretrain("--preset", file, *given).check(1)


def test_a_flag_wins_over_a_preset(tmp_path: Path) -> None:
    for text, words in (
        ('tokenizer_type = "x"\nshuffle = false\neod_mask_loss = true', "--mock-data"),
        ('pad = true\njson_key = "x"\ntoo_long = "refuse"', "--mock-data"),
        ('mock_data = true\ndata_path = ["x"]', "--pad --dataset-name x"),
        ("bf16 = true\npure_bf16 = true", "--fp16"),
        ("fp16 = true", "--bf16"),
    ):
        config = pretrain("--preset", preset(tmp_path, text), *words.split())
        given = {word.removeprefix("--").replace("-", "_") for word in words.split()}
        for part in (config.data, config.precision):
            changed = {
                each.name for each in fields(part) if getattr(part, each.name) != each.default
            }
            assert changed <= given


def test_a_later_preset_replaces_what_an_earlier_one_says_otherwise(tmp_path: Path) -> None:
    own = preset(tmp_path, "lr_warmup_iters = 7\nepochs = 2\n")
    base = ["--preset", "quickstart"]
    config = parse(PretrainGPT2Config, [*base, "--preset", own], {})
    assert (config.optimizer.lr_warmup_iters, config.optimizer.lr_warmup_fraction) == (7, None)
    assert (config.training.epochs, config.training.train_iters) == (2, None)
    config = parse(PretrainGPT2Config, ["--preset", own, *base], {})
    assert (config.optimizer.lr_warmup_iters, config.optimizer.lr_warmup_fraction) == (0, 0.0385)
    assert (config.training.epochs, config.training.train_iters) == (None, 2600)


def test_what_a_later_preset_turns_off_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text("bf16 = true\n")
    own = preset(tmp_path, "fp16 = false\n")
    assert pretrain("--preset", str(tmp_path / "first.toml"), "--preset", own).precision.bf16


def test_a_preset_is_found_by_path_or_by_name(tmp_path: Path) -> None:
    for name in ("mnli_336m", "finetune/mnli_336m"):
        assert find_preset(name) == PRESETS / "finetune" / "mnli_336m.toml"
    assert find_preset("gpt2_2.5b") == PRESETS / "gpt2_2.5b.toml"
    own = preset(tmp_path, "lr = 1\n")
    assert find_preset(own) == Path(own)


def test_a_missing_preset_names_the_nearest(tmp_path: Path) -> None:
    own = preset(tmp_path, 'lr = 1\n[model]\nkind = "gpt2"\n')
    (tmp_path / "presets_.toml").write_text("[tool]\nname = 1\n")
    for given, nearest in (
        ("quickstrat", "quickstart"),
        ("gpt2_365m.toml", "gpt2_355m"),
        (f"{tmp_path}/presets.toml", own),
    ):
        error = refusal(partial(pretrain, "--preset", given), kind=UsageError)
        assert error.works == ("--preset", nearest)
    for given in ("vit_tiny", "race_tiny"):  # those of fine-tuning fit, too
        words = ["--preset", given]
        error = refusal(partial(parse, PretrainViTConfig, words, {}), kind=UsageError)
        assert error.works == ("--preset", "vit_tiny_cifar10")
    words = ["--preset", "quickstrat", "--load", "x"]  # of a program that no preset fits
    error = refusal(lambda: parse(TrainedConfig, words, {}), kind=UsageError)
    assert (error.flag, error.works) == ("--preset", ())


def convert(source: str, count: int = 1, *, quiet: bool = False) -> tuple[str, int, bool]:
    """A program that is a function.

    Args:
        source: what to convert.
        count: how often.
        quiet: say nothing.
    """
    return source, count, quiet


def test_functions_and_subcommands() -> None:
    both = {"convert": convert, "again": convert}
    words = ["--source", "a", "--quiet"]
    assert parse_call(convert, words, {})() == ("a", 1, True)
    assert parse_call(both, ["again", *words, "--count=2"], {})() == ("a", 2, True)
    for functions, arguments, flag, kind in (
        (convert, [], "--source", CommandLineError),
        (convert, [*words, "--count", "x"], "--count", UsageError),
        (convert, [*words, "--cont", "2"], "--cont", CommandLineError),
        (both, ["convert", *words, "--cont", "2"], "--cont", CommandLineError),
        (both, ["again", *words, "--count", "x"], "--count", UsageError),
    ):
        call = partial(parse_call, functions, arguments, {})
        refusal(call, "an integer" if kind is UsageError else "", field=flag, kind=kind)


@dataclass
class Settings:
    count: int
    name: str = "a"
    files: tuple[Path, ...] = ()
    pair: tuple[float, float] | None = None
    counts: tuple[int, ...] = ()
    quiet: bool = False
    shown: bool | None = None


def test_a_table_of_a_file_becomes_settings() -> None:
    table = {"count": 2, "name": 7, "files": ["x", "y"], "quiet": True, "shown": False}
    assert parse_table(Settings, {"count": 2}) == Settings(2)
    assert parse_table(Settings, table) == Settings(
        2, "7", (Path("x"), Path("y")), quiet=True, shown=False
    )
    for key, value, kind in (
        ("count", "x", "an integer"),
        ("count", True, "an integer"),
        ("count", "3", "an integer"),
        ("name", [1, 2], "text"),
        ("pair", [1, 2, 3], "2 numbers"),
        ("counts", ["x"], "integers"),
        ("quiet", "true", "true or false"),
        ("shown", 1, "true or false"),
    ):
        wrong = {**table, key: value}
        error = refusal(lambda given=wrong: parse_table(Settings, given), kind=UsageError)
        assert (error.flag, error.value, error.allowed) == (f"--{key}", value, kind)


def test_another_rank_prints_after_rank_0_would_have_ended_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing where all ranks agree on the error."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    file = tmp_path / "error.json"
    for rank, agreed, message, waited in (
        ("0", False, "error: --flag 1 (a note)", []),
        ("3", False, "rank 3: error: --flag 1 (a note)", [3.0]),
        ("0", True, "error: --flag 1 (a note)", []),
        ("3", True, "", []),
    ):
        environ = {"RANK": rank, "TORCHELASTIC_ERROR_FILE": str(file)}
        error = refusal(partial(fail_in, user_errors(environ, agreed=agreed)))
        assert str(error) == "--flag 1"
        assert (capsys.readouterr().err.strip(), pauses) == (message, waited)
        found = json.loads(file.read_text())["message"]["message"] if file.exists() else ""
        assert found == message
        file.unlink(missing_ok=True)
        pauses.clear()


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for rank, message in (("0", "warning: --flag 1\n"), ("3", "")):
        with user_errors({"RANK": rank}):
            for _ in range(2):  # as two parts of a start do
                warnings.warn("--flag 1", stacklevel=1)
        assert capsys.readouterr().err == message
    with pytest.warns(UserWarning, match="later"):
        warnings.warn("later", stacklevel=1)


def fail_in(context: AbstractContextManager[None]) -> None:
    with context:
        error = ValueError("--flag 1")
        error.add_note("a note")
        raise error


def test_other_errors_are_not_the_user_s() -> None:
    with pytest.raises(AssertionError), user_errors({}):
        raise AssertionError
    with pytest.raises(ValueError, match="at fault"), user_errors({}, kinds=(OSError,)):
        raise ValueError("at fault")


def test_processes_of_the_run() -> None:
    assert world_size({}) == world_size({"WORLD_SIZE": "1"}) == 1
    assert world_size({"RANK": "3", "WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}) == 8
    assert world_size({"SLURM_NTASKS": "8"}) == 1  # a batch script: one process


def test_processes_that_do_not_know_of_each_other() -> None:
    """Several without ranks, or ranks of no number."""
    for environ, flag in (
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        *(({"RANK": "0", "WORLD_SIZE": size}, "WORLD_SIZE") for size in ("two", "0", "-1", "")),
    ):
        error = refusal(partial(world_size, environ), kind=UsageError)
        assert (error.flag, *error.works[:2]) == (flag, "torchrun", "--nproc-per-node")


PROGRAMS: dict[str, type[PretrainConfig]] = {
    "bert": PretrainBertConfig,
    "llama": PretrainLlamaConfig,
    "vit": PretrainViTConfig,
}


def load(name: str, *words: str) -> PretrainConfig:
    kinds = (program for kind, program in PROGRAMS.items() if kind in name)
    return parse(next(kinds, PretrainGPT2Config), ["--preset", name, *words], {})


@pytest.mark.parametrize("name", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_presets_fit_their_own_parallel_size_and_leave_places_to_the_user(name: str) -> None:
    config = load(name)
    config.check(prod(config.parallel.sizes.values()))
    assert config.data.data_path == ()
    assert (config.checkpoint.save, config.checkpoint.load) == (None, None)


WARMUPS = {"quickstart": 100, "miniature_gpt2": 100, "miniature_llama": 100, "miniature_bert": 80}


@pytest.mark.parametrize(("name", "warmup"), WARMUPS.items())
def test_a_warmup_fits_the_length_of_the_run(name: str, warmup: int) -> None:
    steps = load(name).training.steps
    for words, expected in (((), warmup), (("--train-iters", str(steps // 10)), warmup // 10)):
        assert load(name, *words).with_steps(int, 1).optimizer.lr_warmup_iters == expected
    assert load(name, "--lr-warmup-iters", "7").with_steps(int, 1).optimizer.lr_warmup_iters == 7


@pytest.mark.parametrize("name", ["miniature_llama", "llama_tutorial"])
def test_mock_data_stand_in_for_a_preset_s_files_and_epochs(name: str) -> None:
    config = load(name, *["--mock-data", "--vocab-size", "2048", "--train-iters", "10000"])
    config.check(prod(config.parallel.sizes.values()))
    assert config.data.mock_data
