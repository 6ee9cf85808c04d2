"""Prompts from a file. Importing this needs no torch."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

from megatron.errors import UsageError


def of_file(file: Path, flag: str = "--prompt-file") -> dict[str, bytes]:
    """{file and line number: content}. flag: names the file. Raises UsageError."""
    if not file.exists():
        raise UsageError(flag, file, "a file that exists")
    content = file.read_bytes().removeprefix(BOM_UTF8) if file.is_file() else b""
    if not content:
        fault = "is empty" if file.is_file() else "is no regular file"
        raise UsageError(flag, file, f"a file of texts, one a line: it {fault}")
    prompts = {}
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        if not line.strip():
            cure = '; --prompt "" is an empty prompt' if flag == "--prompt-file" else ""
            raise UsageError(flag, file, f"without blank lines, as line {number}{cure}")
        prompts[f"{flag} {file}, line {number}"] = line.removesuffix(b"\r")
    return prompts
