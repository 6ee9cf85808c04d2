"""Parses the command line into a program's settings, for every program: the one wrapper of tyro.

A program looks like this; its modules that need torch are imported after `parse`:

    with user_errors(environ):
        settings = parse(Settings, arguments, environ)
"""

import contextlib
import functools
import inspect
import io
import itertools
import os
import re
import select
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from megatron.config import help as helps
from megatron.config.launch import interruptible, is_first, write_error_file
from megatron.config.presets import (
    PRESETS,
    PresetSetting,
    as_toml,
    find_preset,
    read_preset,
    read_toml,
    settings_of,
)
from megatron.errors import (
    CommandLineError,
    UsageError,
    by_flag,
    field_of,
    flag,
    setting,
    spelling,
    spellings,
    types_within,
)
from megatron.libraries import MissingLibrary

Program = TypeVar("Program")

PATIENCE = 3.0  # seconds within which a launcher ends all ranks after the first failure
PRINT = "--print-config"
CLOSED = 141  # status in shells of a program whose reader went away: 128 + SIGPIPE

_PRESET_HELP = (
    "--preset FILE|NAME reads settings from a TOML file (num_layers = 24), or from that of this "
    "name in scripts/presets; it may be given several times, and the flags on the command line "
    "win. --print-config prints all settings as such a file, and ends."
)

# Flags of other trainers, and their names here (the first that the program has).
_SYNONYMS = {
    "--batch-size": ("--global-batch-size", "--micro-batch-size"),
    "--block-size": ("--seq-length",),
    "--config": ("--preset",),
    "--context-length": ("--seq-length",),
    "--d-model": ("--hidden-size",),
    "--data": ("--data-path",),
    "--dropout": ("--hidden-dropout",),
    "--iters": ("--train-iters",),
    "--learning-rate": ("--lr",),
    "--max-iters": ("--train-iters",),
    "--max-steps": ("--train-iters",),
    "--n-embd": ("--hidden-size",),
    "--n-head": ("--num-attention-heads",),
    "--n-layer": ("--num-layers",),
    "--num-heads": ("--num-attention-heads",),
    "--num-train-epochs": ("--epochs",),
    "--output-dir": ("--save", "--output"),
    "--resume": ("--load",),
    "--tensor-parallel-size": ("--tensor-model-parallel-size",),
    "--tp": ("--tensor-model-parallel-size",),
    "--warmup-iters": ("--lr-warmup-iters",),
    "--warmup-ratio": ("--lr-warmup-fraction",),
    "--warmup-steps": ("--lr-warmup-iters",),
}

# Earlier spellings of flags. They still work where the program has the flag of today; a warning
# names it.
_RENAMED = {
    "--out": "--output",
    "--output-dir": "--output",
    "--report": "--json",
    "--tensor-parallel": "--tensor-model-parallel-size",
    "--to": "--output",
}


@contextlib.contextmanager
def user_errors(
    environ: Mapping[str, str],
    *,
    agreed: bool = False,
    kinds: tuple[type[Exception], ...] = (ValueError, OSError),
) -> Iterator[None]:
    """End the program with status 2 and one message if an error of these kinds is raised, or a
    library is missing.

    Prints each warning as one line, once. If the reader of stdout has gone (`| head`), the program
    ends without a message and with status 141. Most errors are the same on every rank. So only rank
    0 (RANK in environ) prints warnings, and another rank prints its error only after the launcher
    would have ended it because of rank 0. agreed: every rank raises the same error, and only rank 0
    prints it.
    """

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if is_first(environ) and str(message) not in _said:
            _said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    errors: tuple[type[Exception], ...] = (MissingLibrary, *kinds)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            try:
                yield
            finally:
                print(end="", flush=True)
    except errors as error:
        if isinstance(error, BrokenPipeError):
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if any(events & select.POLLERR for _, events in poll.poll(0)):
                # Output that is still buffered goes nowhere.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(CLOSED) from None
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        text = f"error: {_by_origin(error)}{notes}"
        if not is_first(environ) and not agreed:
            time.sleep(PATIENCE)
            text = f"rank {environ['RANK']}: {text}"
        if is_first(environ) or not agreed:
            print(text, file=sys.stderr, flush=True)
            write_error_file(environ.get("TORCHELASTIC_ERROR_FILE"), text)
        raise SystemExit(2) from error


@contextlib.contextmanager
def whole_program(
    environ: Mapping[str, str], kinds: tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[None]:
    """Wraps a whole program that starts no ranks: `user_errors` and `interruptible`."""
    with interruptible(environ), user_errors(environ, kinds=kinds):
        yield


_said: set[str] = set()
"""Warnings since the last `parse` or `parse_call`: several parts of a start check the same."""

_in_force: list[PresetSetting] = []
"""The settings of presets that no flag has overridden, as the last `parse` left them: a UsageError
of any part of the program may be about one."""


def _by_origin(error: Exception) -> str:
    """The message, where a preset has the refused setting as its line; then the lines of presets
    that have the other settings it names."""
    if not isinstance(error, UsageError):
        return str(error)
    text, lines = str(error), dict[Path, list[str]]()
    for each in _in_force:
        if error.flag in spellings(each.name):
            text = error.in_toml(each.beside, f"--preset {each}")
        elif not spellings(each.name).isdisjoint(error.others):
            line = f"{setting(each.key, each.value)} (line {each.line})"
            lines.setdefault(each.file, []).append(line)
    return text + "".join(f"; --preset {f} has {', '.join(each)}" for f, each in lines.items())


def parse(
    program: type[Program],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str | None = None,
    description: str | None = None,
    saved: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
) -> Program:
    """The program's settings from its arguments (those after the program's name).

    program: a dataclass of settings and of configs, which are dataclasses too. A field's metadata
    {"alias": name} is a second name; {"replaces": names} are settings of presets that the flag
    replaces, or the same key of a later preset. prog, description: the program's name and
    description in its help; by default those of its file. saved: maps the words of presets and
    command line to {key: value} of settings that both may leave out.
    Raises UsageError for values that a config refuses, and for missing, unknown or malformed
    presets; CommandLineError for missing, unknown or malformed flags. With -h or --help-all it
    prints help (on rank 0) and raises SystemExit with status 0.
    """
    import tyro

    _said.clear()
    types: dict[str, Any] = {}  # the type of every setting, by each of its names
    names: dict[str, str] = {}  # its first name, by each of its names
    replaces: dict[str, Collection[str]] = {}  # keys of presets, by the setting in their place
    required: set[str] = set()
    for name, kind, setting_of in settings_of(program):
        if setting_of.default is MISSING and setting_of.default_factory is MISSING:
            required.add(name)
        replaces[name] = setting_of.metadata.get("replaces", ())
        for each in (name, setting_of.metadata.get("alias", name)):
            types[each] = kind
            names[each] = name
    presets: list[PresetSetting] = []
    words: list[str] = []  # of the command line, with first names
    replaced: set[str] = set()
    remaining = iter(argv)
    for word in remaining:
        name, equals, value = word.partition("=")
        field = field_of(name)
        if name == "--preset" and "preset" not in types:
            value = value if equals else next(remaining, "")
            file = find_preset("" if value.startswith("-") else value, types)
            given = list(read_preset(file, program, names))
            on = [each.name for each in given if each.value is not False]
            others = set[str]().union(*(replaces[name] for name in on))
            presets = [each for each in presets if each.name not in others] + given
        elif name.startswith("--") and field in names:
            words.append(flag(names[field]) + equals + value)
            replaced.update(replaces[names[field]])
        elif word.replace("_", "-") != PRINT:
            words.append(word)
    presets = [each for each in presets if each.name not in replaced]
    # Presets become arguments before those of the command line, which win.
    spelt = {word.partition("=")[0].replace("_", "-") for word in words}
    left = {key for key in types if spelt.isdisjoint(spellings(names[key]))}
    _in_force[:] = [
        replace(each, beside={key: each.beside[key] for key in left.intersection(each.beside)})
        for each in presets
        if each.name in left
    ]
    first = [word for each in _in_force for word in _arguments(each.name, each.value)]
    if saved is not None and not helps.WORDS & set(words):
        saved_words: list[str] = []
        for key, value in saved([*first, *words]).items():
            if key in names and not isinstance(value, Mapping):
                saved_words += _arguments(key, value)
        first = saved_words + first
    _refuse_values(first + words, types)
    description = description or sys.modules["__main__"].__doc__ or ""
    text = textwrap.dedent(description).strip()
    text += f"\n\n{_PRESET_HELP}" * ("preset" not in types)
    call, about = functools.partial(tyro.cli, program, description=text), (description, program)
    try:
        settings: Program = _run_tyro(call, first + words, environ, [*types, "preset"], prog, about)
    except CommandLineError as error:
        for each in _in_force:
            if fit := _misfit(types[each.key], each.value, _arguments(each.key, each.value)):
                raise each.error(fit) from None
        _check_types(words, types)
        missing = {each for each in required if flag(each) not in spelt}
        if missing and not presets:
            files = {file.stem: read_toml(file) for file in PRESETS.glob("*.toml")}
            missing &= {key for settings in files.values() for key in settings}
            whole = [n for n, keys in files.items() if missing <= keys.keys() <= types.keys()]
            whole.sort(key=lambda n: files[n].get("num_layers", 0) * files[n].get("hidden_size", 0))
            # gpt2_30m is a preset of PretrainGPT2Config.
            kind = program.__name__.removeprefix("Pretrain").removesuffix("Config").lower()
            whole = [each for each in whole if kind in each] or whole
            if missing and whole:
                works = f"--preset NAME gives them all, such as {', '.join(whole[:3])}."
                raise CommandLineError(f"{error}\n{works}") from None
        raise
    if PRINT in [word.replace("_", "-") for word in argv]:
        if is_first(environ):
            print(as_toml(settings), end="")
        raise SystemExit(0)
    return settings


def parse_table(program: type[Program], table: Mapping[str, Any]) -> Program:
    """The settings of a table of a TOML file, whose keys are all settings of the program. Raises
    as `parse`, and UsageError for a value that is not of its setting's type."""
    import tyro

    types = {name: kind for name, kind, _ in settings_of(program)}
    for key, value in table.items():
        within, values = types_within(types[key]), value if isinstance(value, list) else [value]
        if str not in within and within & {int, float} and str in map(type, values):
            raise UsageError(flag(key), value, _described(types[key]))
    words = [word for key, value in table.items() for word in _arguments(key, value)]
    try:
        return _run_tyro(functools.partial(tyro.cli, program), words, {}, ())
    except CommandLineError:
        for key, value in table.items():
            if fit := _misfit(types[key], value, _arguments(key, value)):
                raise UsageError(flag(key), value, fit) from None
        raise


def _refuse_values(words: Sequence[str], types: Mapping[str, Any]) -> None:
    """Raise UsageError for an integer that torch cannot hold, and for a path that is empty, as
    where a shell's variable is not set: it would be the current folder."""
    for word, *values in by_flag(words):
        name, equals, value = word.partition("=")
        kinds = types_within(types.get(field_of(name)))
        for each in [value] if equals else values:
            if Path in kinds and not each:
                raise UsageError(name, "''", "a path")
            digits = re.fullmatch(r"[+-]?0*(\d{19,})", each.replace("_", ""))
            if int in kinds and digits and (len(digits[1]) > 19 or int(digits[1]) >= 2**63):
                raise UsageError(name, each[:40], "an integer below 2^63")


def _check_types(words: Sequence[str], types: Mapping[str, Any]) -> None:
    """Raise UsageError for a flag whose value is not of its setting's type, or for one too many."""
    for word, *values in by_flag(words):
        name, equals, value = word.partition("=")
        kind = types.get(field_of(name)) if name.startswith("--") else None
        if tuple not in (get_origin(kind), *map(get_origin, get_args(kind))):
            del values[0 if equals else 1 :]  # a positional argument may follow
        text = value if equals else " ".join(values)
        if bool in (kind, *get_args(kind)) and text.lower() in _SWITCHES:
            works = spelling(field_of(name), _SWITCHES[text.lower()])
            raise UsageError(name, text, "given without a value", works=works) from None
        if kind is not None and (fit := _misfit(kind, True, [word, *values])):
            value = " ".join([*[value] * bool(equals), *values])
            raise UsageError(name, value or None, fit) from None


_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_WORDS = {int: "an integer", float: "a number", str: "text", Path: "a path"}
_SEVERAL = {int: "integers", float: "numbers", str: "texts", Path: "paths"}


def _misfit(kind: Any, value: Any, words: Sequence[str]) -> str | None:
    """The type that a setting must have where its value, given as these words, does not have it."""
    import tyro

    if bool in (kind, *get_args(kind)):
        return None if isinstance(value, bool) else "true or false"
    field = field_of(words[0].partition("=")[0])
    try:
        _run_tyro(
            functools.partial(tyro.cli, make_dataclass("one", [(field, kind)])), words, {}, ()
        )
    except CommandLineError:
        return _described(kind)
    return None


def _described(kind: Any) -> str:
    """A setting's type in words."""
    parts = [each for each in get_args(kind) if each is not type(None)]
    if get_origin(kind) is Literal:
        return " or ".join(map(str, parts))
    if get_origin(kind) is tuple and parts[0] in _SEVERAL:
        count = "" if ... in parts else f"{len(parts)} "
        return f"{count}{_SEVERAL[parts[0]]}"
    if parts:  # a value that may be left out, or several
        return _described(parts[0])
    return _WORDS.get(kind, "a value of its type")


def parse_part(part: type[Program], argv: Sequence[str], environ: Mapping[str, str]) -> Program:
    """The settings of one config among the arguments of a program. Raises as `parse`."""
    import tyro

    call = functools.partial(tyro.cli, part, return_unknown_args=True)
    try:
        return _run_tyro(call, argv, environ, ())[0]
    except CommandLineError:
        _check_types(argv, {name: kind for name, kind, _ in settings_of(part)})
        raise


def parse_call(
    functions: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    examples: str = "",
) -> Callable[[], Any]:
    """The function with the arguments of the command line bound, to be called; a mapping has
    subcommands. The parameters are the flags, and the docstring is --help. examples: commands for
    -h, after those of the module's docstring. Raises as `parse`."""
    import tyro

    _said.clear()

    def later(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def bind(*words: Any, **flags: Any) -> Any:
            return functools.partial(function, *words, **flags)

        return bind

    if isinstance(functions, Mapping):
        commands = {name: later(function) for name, function in functions.items()}
        names = [name for each in functions.values() for name in inspect.signature(each).parameters]
        call = functools.partial(tyro.extras.subcommand_cli_from_dict, commands)
    else:
        names = list(inspect.signature(functions).parameters)
        call = functools.partial(tyro.cli, later(functions))
    about = functions.values() if isinstance(functions, Mapping) else [functions]
    given = functions.get(next(iter(argv), "")) if isinstance(functions, Mapping) else functions
    types = get_type_hints(given) if given else {}
    _refuse_values(argv, types)
    try:
        return _run_tyro(call, argv, environ, names, None, [*about, examples])
    except CommandLineError:
        _check_types(argv, types)
        raise


def _run_tyro(
    call: Callable[..., Any],
    arguments: Sequence[str],
    environ: Mapping[str, str],
    names: Collection[str],
    prog: str | None = None,
    about: Sequence[object] = (),
    has_texts: bool = False,
) -> Any:
    """names: those of settings that a flag of another trainer may stand for. about: where the
    examples of -h are, see `help.examples`. has_texts: read the docstrings of settings, half of
    the time, which only help and errors show. Raises UsageError for such a flag, and
    CommandLineError with tyro's own message."""
    import tyro

    flags = {flag(field) for field in names}
    arguments = list(arguments)
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        near = [each for each in _SYNONYMS.get(name, ()) if each in flags]
        today = _RENAMED.get(name)
        if today in flags and name not in flags and near in ([], [today]):
            warnings.warn(f"{name} is now {today}", stacklevel=1)
            arguments[index] = today + equals + value
            continue
        if near and name not in flags:
            values = [value] if equals else arguments[index + 1 :]
            values = [*itertools.takewhile(lambda word: not word.startswith("--"), values)]
            works = (near[0], *values)
            raise UsageError(name, " ".join(values) or None, "a flag of this program", works=works)
    wanted = helps.WORDS & set(arguments)
    if wanted:  # in the place of the first: it may follow a subcommand
        first = min(map(arguments.index, wanted))
        arguments[first:] = ["--help", *(x for x in arguments[first:] if x not in helps.WORDS)]
    message, whole = io.StringIO(), io.StringIO()
    marks: list[Any] = [tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone]
    if not (wanted or has_texts):
        marks.append(tyro.conf.HelptextFromCommentsOff)
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(whole):
            prints = is_first(environ) or not wanted
            return call(prog=prog, args=arguments, console_outputs=prints, config=marks)
    except SystemExit as stop:
        cause: BaseException | None = stop
        while cause is not None:  # tyro wraps a UsageError, and draws a box round it
            if isinstance(cause, UsageError):
                raise cause from None
            cause = cause.__context__
        if not stop.code and (text := whole.getvalue()):
            is_short = helps.ALL not in wanted
            print(helps.shown(text, helps.examples(*about), is_short=is_short), end="")
        if stop.code != 2:  # 2 is tyro's refusal; a signal has another status
            raise
    if not has_texts:
        return _run_tyro(call, arguments, environ, names, prog, about, has_texts=True)
    _, *lines = map(str.rstrip, message.getvalue().rstrip().splitlines())  # without title and rules
    text = textwrap.dedent("\n".join(line for line in lines if line.strip("─- ")))
    raise CommandLineError(text.removesuffix("--help") + helps.ALL * text.endswith("--help"))


def _arguments(field: str, value: Any) -> list[str]:
    """A value of a preset, as words of the command line."""
    if isinstance(value, bool | list):
        return list(spelling(field, value))
    return [f"{flag(field)}={value}"]  # as one word, since a value may begin with --
