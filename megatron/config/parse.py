"""From the command line to a program's settings, without torch, in one place."""

import contextlib
import dataclasses
import io
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from megatron.config.checks import UsageError, flag
from megatron.config.failure import write_error_file
from megatron.config.preset import preset_arguments

Program = TypeVar("Program")

PATIENCE = 3.0  # seconds within which a launcher ends all ranks where the first has failed

_PRESET_HELP = (
    "--preset FILE reads settings from a TOML file (num_layers = 24); it may be given several "
    "times, and the flags on the command line win."
)


@contextlib.contextmanager
def user_errors(environ: Mapping[str, str], *, agreed: bool = False) -> Iterator[None]:
    """End the program with status 2 and one message where a ValueError or OSError is raised.

    A warning is one line, too. Mostly every rank meets the same, so that only rank 0 (RANK in
    environ) prints warnings, and an error of another rank waits until the launcher would have
    ended it for the one of rank 0. agreed: every rank raises the same, and rank 0 tells it.
    """

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if _is_first(environ):
            print(f"warning: {message}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    except (ValueError, OSError) as error:
        if not agreed or _is_first(environ):
            _tell(error, environ)
        raise SystemExit(2) from error


def _tell(error: Exception, environ: Mapping[str, str]) -> None:
    text = f"error: {error}"
    if not _is_first(environ):
        time.sleep(PATIENCE)
        text = f"rank {environ['RANK']}: {text}"
    print(text, file=sys.stderr, flush=True)
    write_error_file(environ.get("TORCHELASTIC_ERROR_FILE"), text, text)


def parse(
    program: type[Program],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str | None = None,
) -> Program:
    """The program's settings from its arguments (those after the program's name).

    program: a dataclass of settings and of sections, which are dataclasses too; a field's
    metadata {"alias": name} is a second name. Raises UsageError for presets and for values
    that a section refuses; for flags that are missing, unknown or malformed, and for --help,
    prints (on rank 0) and raises SystemExit.
    """
    import tyro

    fields = dict(_fields(program))
    aliases = {
        field.metadata["alias"]: name
        for name, (field, _) in fields.items()
        if "alias" in field.metadata
    }
    annotations = {name: annotation for name, (_, annotation) in fields.items()}
    known = annotations | {alias: annotations[name] for alias, name in aliases.items()}
    presets, own = _split_presets(argv)
    arguments = [word for file in presets for word in preset_arguments(file, known)] + own
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(
                program,
                args=[_without_alias(word, aliases) for word in arguments],
                prog=prog,
                description=_PRESET_HELP,
                console_outputs=_is_first(environ),
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
            )
    except SystemExit as stop:
        _raise_setting_error(stop)
        if _is_first(environ):
            sys.stderr.write(message.getvalue())
        raise


def _is_first(environ: Mapping[str, str]) -> bool:
    return environ.get("RANK", "0") == "0"


def _fields(program: type) -> Iterator[tuple[str, tuple[dataclasses.Field[Any], Any]]]:
    """(name, (field, annotation)) of every setting, those of the sections included."""
    hints = get_type_hints(program)
    for field in dataclasses.fields(program):
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            yield from _fields(annotation)
        else:
            yield field.name, (field, annotation)


def _split_presets(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of --preset FILE and --preset=FILE, and the other arguments."""
    files, others = [], []
    words = iter(argv)
    for word in words:
        name, equals, file = word.partition("=")
        if name != "--preset":
            others.append(word)
            continue
        file = file if equals else next(words, "")
        if not file or file.startswith("--"):
            raise UsageError(
                "--preset names no file; --preset scripts/presets/gpt2_355m.toml would work"
            )
        files.append(file)
    return files, others


def _without_alias(word: str, aliases: Mapping[str, str]) -> str:
    name, equals, value = word.partition("=")
    field = name.removeprefix("--").replace("-", "_")
    if name.startswith("--") and field in aliases:
        return flag(aliases[field]) + equals + value
    return word


def _raise_setting_error(stop: SystemExit) -> None:
    """Raise the UsageError that made tyro stop, if one did: tyro would box and wrap it."""
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, UsageError):
            raise cause
        cause = cause.__context__
