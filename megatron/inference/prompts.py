"""Prompts from a file. Importing this needs no torch."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

from megatron.errors import UsageError


def of_file(file: Path, flag: str = "--prompt-file") -> dict[str, bytes]:
    """{file and line number: content}. flag: names the file. Raises UsageError."""
    if not file.exists():
        raise UsageError(flag, file, "a file that exists")
    fault = "is a folder" if file.is_dir() else "" if file.is_file() else "is no regular file"
    content = b"" if fault else file.read_bytes().removeprefix(BOM_UTF8)
    if not content:
        raise UsageError(flag, file, f"a file of texts, one a line: it {fault or 'is empty'}")
    prompts = {}
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        if not line.strip():
            cure = '; --prompt "" is an empty prompt' if flag == "--prompt-file" else ""
            raise UsageError(flag, file, f"without blank lines, as line {number}{cure}")
        prompts[f"{flag} {file}, line {number}"] = line.removesuffix(b"\r")
    return prompts
