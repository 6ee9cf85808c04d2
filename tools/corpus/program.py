"""A step as a program: its flags, its progress and its messages."""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from megatron.config.parse import parse, user_errors


class Unfinished(Exception):  # noqa: N818, it is no error
    """This --shard has done its share; others have not yet done theirs."""


def program(module: str, argv: Sequence[str] | None = None) -> None:
    """Run a step as a program: the `Settings` and the `run` of its module.

    The module is imported by its name, so that workers find its functions.
    """
    with running():
        step = importlib.import_module(module)
        step.run(parse_settings(module, sys.argv[1:] if argv is None else argv))


def parse_settings(module: str, argv: Sequence[str]) -> Any:
    """Settings from flags; the module's docstring is in --help.  Raises what parse raises."""
    step = importlib.import_module(module)
    description = step.__doc__ or ""
    return parse(step.Settings, argv, {}, prog=f"python -m {module}", description=description)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """An error ends the program with one message and status 2; ctrl-C and TERM with one line and
    the status that shells expect; Unfinished with its message and status 0."""
    owner = os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() != owner:  # a worker of a pool, which inherits the handler and is terminated
            os._exit(128 + number)
        signal.signal(number, signal.SIG_IGN)  # ignored from now on: ending takes a moment
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with user_errors({}):
            try:
                yield
            except Unfinished as unfinished:
                say(str(unfinished))
            except RuntimeError as error:  # such as workers that die again and again
                raise OSError(str(error)) from error
    except KeyboardInterrupt as stop:
        print("stopped; the same command goes on from there", file=sys.stderr)
        sys.exit(128 + (stop.args[0] if stop.args else signal.SIGINT))
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def progress(label: str, total: int, done: int) -> Iterator[Any]:
    """A progress bar, with an estimate of what is left."""
    with tqdm(
        total=total, initial=done, desc=label, unit="B", unit_scale=True, disable=None
    ) as bar:
        yield bar


def say(message: str) -> None:
    tqdm.write(message, file=sys.stderr)
