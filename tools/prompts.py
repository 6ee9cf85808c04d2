"""Texts to continue, from the command line, from a file or typed, and their encoding to prompts."""

from __future__ import annotations

import os
import select
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data.tokenizer import Tokenizer
from megatron.errors import UsageError

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh


@dataclass(frozen=True)
class Prompt:
    text: str
    tokens: Sequence[int]


@dataclass(frozen=True)
class Reader:
    """Turns text into prompts that a model with this number of positions can continue.

    begin_token: see --begin-token; raises UsageError if the vocabulary lacks it.
    """

    tokenizer: Tokenizer
    positions: int
    max_new_tokens: int
    begin_token: str | None = None
    begin: Sequence[int] = field(init=False)
    """Token ids at the beginning of each prompt."""

    def __post_init__(self) -> None:
        token = self.begin_token
        try:
            begin = [] if token is None else [self.tokenizer.token_id(token)]
        except ValueError as error:
            allowed = f"a token of the vocabulary: {error}"
            raise UsageError("--begin-token", token, allowed) from error
        object.__setattr__(self, "begin", begin)

    def prompt(self, place: str, content: bytes) -> Prompt:
        """place: source of the content, for the message. Raises ValueError if the content is not
        UTF-8 or does not fit the model's positions."""
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} is not UTF-8 text: {error}") from error
        tokens = [*self.begin, *self.tokenizer.encode(text)] or [self.tokenizer.eod]
        room = self.positions - len(tokens)
        if room < self.max_new_tokens:
            new = min(self.max_new_tokens, self.positions - 1)
            cure = f"a prompt of at most {self.positions - new} tokens with --max-new-tokens {new}"
            raise ValueError(
                f"{place}: {len(tokens)} tokens and --max-new-tokens {self.max_new_tokens} do not "
                f"fit the model's {self.positions} positions; "
                f"{f'--max-new-tokens {room}' if room > 0 else cure} would work"
            )
        return Prompt(text, tokens)


def of_command_line(texts: Sequence[str]) -> dict[str, bytes]:
    """{flag and number: content}; bytes that are not UTF-8 are restored as they were typed."""
    return {f"--prompt {n}": t.encode(errors="surrogateescape") for n, t in enumerate(texts, 1)}


def of_file(file: Path) -> dict[str, bytes]:
    """{file and line number: content}. Raises ValueError or FileNotFoundError."""
    if not file.exists():
        raise UsageError("--prompt-file", file, "a file that is there")
    fault = "is a folder" if file.is_dir() else "" if file.is_file() else "is no regular file"
    content = b"" if fault else file.read_bytes().removeprefix(BOM_UTF8)
    if not content:
        raise UsageError(
            "--prompt-file", file, f"a file of texts, one a line: it {fault or 'is empty'}"
        )
    lines = content.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UsageError(
                "--prompt-file",
                file,
                f'without blank lines, as line {number}; --prompt "" is an empty prompt',
            )
    return {
        f"--prompt-file {file}, line {n}": e.removesuffix(b"\r") for n, e in enumerate(lines, 1)
    }


def typed_lines(mesh: Mesh) -> Iterator[bytes]:
    """On every rank the lines that are typed at the first rank, until an empty one.

    The first rank sends the others a message every second, as a long silence counts as a failure.
    """
    lines = Lines(sys.stdin.fileno()) if mesh.is_first else None
    is_seen = mesh.is_first and sys.stdin.isatty() and sys.stderr.isatty()
    _show("ready: an empty line ends\n", is_seen)
    while True:
        _show("> ", is_seen)
        line = None
        while line is None:
            line = mesh.control.gather(None if lines is None else lines.next(1.0))[0]
        if not line:
            return
        yield line


def _show(sign: str, is_seen: bool) -> None:
    if is_seen:
        print(sign, end="", file=sys.stderr, flush=True)


class Lines:
    """Lines of a terminal, pipe or file, read with a time limit.

    Reads the descriptor directly: a thread that waits in Python's own reader would hold its lock
    when the program ends, which aborts the program.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def next(self, seconds: float) -> bytes | None:
        """The next line without its end, None if it does not come in time, b"" after the last."""
        if b"\n" not in self._unread:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            more = os.read(self._descriptor, 1 << 16)
            self._unread += more or b"\n"  # at the end of the input, ends the last line
        line, end, rest = self._unread.partition(b"\n")
        if not end:
            return None
        self._unread = rest
        return line.rstrip(b"\r")
