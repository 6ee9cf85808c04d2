"""A step as a program: its flags, its progress and its messages."""

import contextlib
import importlib
import io
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro
from tqdm import tqdm

Settings = TypeVar("Settings")


class Unfinished(Exception):  # noqa: N818, it is no error
    """This --shard has done its share, and others have not yet done theirs."""


def program(module: str, argv: Sequence[str] | None = None) -> None:
    """Run a step as a program: the `Settings` and the `run` of its module.

    A user's error ends it with one message and status 2.  The module is imported by its name, so
    that workers find its functions.
    """
    step = importlib.import_module(module)
    try:
        with stoppable():
            step.run(parse_settings(step.Settings, sys.argv[1:] if argv is None else argv, module))
    except Unfinished as unfinished:
        say(str(unfinished))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Where ctrl-C and TERM end the program with one line, and the status that shells expect."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KeyboardInterrupt as stop:
        print("stopped; the same command goes on from there", file=sys.stderr)
        sys.exit(128 + (stop.args[0] if stop.args else signal.SIGINT))
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough, and ending takes a moment
    raise KeyboardInterrupt(number)


def parse_settings(kind: type[Settings], argv: Sequence[str], module: str) -> Settings:
    """The settings that the flags make; the module's docstring is their --help.

    Raises the ValueError of a value that the settings refuse.  For flags that are missing, unknown
    or malformed, and for --help, prints and raises SystemExit.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                kind,
                prog=f"python -m {module}",
                description=importlib.import_module(module).__doc__,
                args=argv,
                config=(tyro.conf.DisallowNone,),
            )
    except SystemExit as stop:
        if refusal := _refusal(stop):
            raise refusal from None
        sys.stderr.write(said.getvalue())
        raise


def _refusal(stop: SystemExit) -> ValueError | None:
    """The settings' own error that made tyro stop, if one did: tyro would box and wrap it."""
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, ValueError) and str(cause).startswith("--"):
            return cause
        cause = cause.__context__
    return None


@contextlib.contextmanager
def progress(label: str, total: int, done: int) -> Iterator[Any]:
    """A bar with what is done and an estimate of what is left."""
    with tqdm(
        total=total, initial=done, desc=label, unit="B", unit_scale=True, disable=None
    ) as bar:
        yield bar


def say(message: str) -> None:
    tqdm.write(message, file=sys.stderr)
