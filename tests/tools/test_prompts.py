"""Prompts of generate.py: what becomes one, what is refused and where it stands, typed lines."""

import os
from functools import partial
from pathlib import Path

import pytest

from megatron.data.tokenizer import GPT2BPETokenizer, read_tokenizer
from tests.data.samples import write_tokenizer
from tests.refusals import field_of, refusal
from tools.generate import Lines, Reader, of_command_line, of_file


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    write_tokenizer(tmp_path)
    tokenizer = read_tokenizer(GPT2BPETokenizer.kind, tmp_path)
    return Reader(tokenizer, positions=20, max_new_tokens=12)


def test_a_prompt_that_just_fits_is_taken(reader: Reader) -> None:
    assert len(reader.prompt("here", b"x" * 8).tokens) == 8


@pytest.mark.parametrize(("length", "works"), [(0, 19), (9, 11), (19, 1), (20, 12), (50, 12)])
def test_a_prompt_that_does_not_fit_is_named(reader: Reader, length: int, works: int) -> None:
    longer = Reader(reader.tokenizer, positions=20, max_new_tokens=20 if length == 0 else 12)
    error = refusal(lambda: longer.prompt("here", b"x" * length))
    assert field_of(error) == "here"
    assert f"--max-new-tokens {works} " in str(error)
    if length < 20:
        Reader(reader.tokenizer, positions=20, max_new_tokens=works).prompt("here", b"x" * length)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"in\n\nthe\n", "line 2"),
        (b"", "prompts.txt"),
        (b"\xef\xbb\xbf", "prompts.txt"),
        (b"\n", "line 1"),
        (b"in\n \t\r\n", "line 2"),
        (b"in\nthe \xff\n", "line 2"),
        (b"in\n" + b"x" * 30, "line 2"),
    ],
)
def test_a_file_of_prompts_is_refused_with_its_line(
    reader: Reader, tmp_path: Path, content: bytes, named: str
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    error = refusal(lambda: prompts_of(reader, of_file(file)))
    assert field_of(error) == "--prompt-file"
    assert named in str(error)


def prompts_of(reader: Reader, contents: dict[str, bytes]) -> list[str]:
    return [reader.prompt(place, content).text for place, content in contents.items()]


def test_a_file_is_read_line_by_line_whatever_ends_them(reader: Reader, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfin\r\n the \nno end")
    assert prompts_of(reader, of_file(file)) == ["in", " the ", "no end"]


def test_a_file_of_prompts_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (Path("nowhere"), tmp_path, tmp_path / "pipe"):
        error = refusal(partial(of_file, file))
        assert field_of(error) == "--prompt-file"
        assert str(file) in str(error)


def test_a_begin_token_stands_before_every_prompt(reader: Reader) -> None:
    begun = Reader(reader.tokenizer, positions=20, max_new_tokens=12, begin_token="the")
    number = reader.tokenizer.token_id("the")
    for text in ("in the", ""):
        tokens = begun.prompt("here", text.encode()).tokens
        assert tokens == [number, *reader.tokenizer.encode(text)]
    other = partial(Reader, reader.tokenizer, positions=20, max_new_tokens=12, begin_token="[BOT]")
    assert field_of(refusal(other)) == "--begin-token"
    refusal(lambda: begun.prompt("here", b"x" * 8))


def test_a_prompt_of_bytes_that_are_no_text_is_refused(reader: Reader) -> None:
    error = refusal(lambda: prompts_of(reader, of_command_line(["\u00fc", "x\udcff"])))
    assert "--prompt 2" in str(error)


def test_lines_come_as_they_are_typed() -> None:
    end, keyboard = os.pipe()
    lines = Lines(end)
    assert lines.next(0) is None
    os.write(keyboard, b"the")
    assert lines.next(0) is None, "it has no end"
    os.write(keyboard, b" wind\r\nin\n\xff")
    assert [lines.next(0) for _ in range(3)] == [b"the wind", b"in", None]
    os.close(keyboard)
    assert [lines.next(0) for _ in range(3)] == [b"\xff", b"", b""]
    os.close(end)
