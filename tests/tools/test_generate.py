"""tools/generate.py: its text against transformers', its records, prompts and what it refuses of
them, and lines that are typed at a terminal, into a pipe or to several processes.

tests/inference/test_generate.py tests what is drawn, and how, also at several layouts.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from transformers import AutoTokenizer

from megatron.checkpoint.format import read_manifest
from megatron.config.parse import parse
from megatron.data.tokenizer import GPT2BPETokenizer, read_tokenizer
from megatron.inference.generate import DivergedError
from megatron.inference.prompts import of_file
from tests.data.samples import write_tokenizer
from tests.dist import Pool
from tests.programs import ROOT, start_ranks
from tests.refusals import field_of, refusal, refused
from tests.tools.convert.models import write_model
from tests.tools.texts import POSITIONS, TEXTS, generated, texts_of, texts_of_transformers
from tools.convert_hf import import_model
from tools.generate import Lines, Reader, Settings, main, of_command_line

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers writes it."""
    return write_model(tmp_path_factory.mktemp("hf") / "model", n_positions=POSITIONS)


@pytest.fixture(scope="module")
def trained(exported: Path) -> Path:
    """The same as a checkpoint, which brings its tokenizer."""
    checkpoint = exported.with_name("checkpoint")
    import_model(str(exported), checkpoint)
    return checkpoint


def test_greedy_text(exported: Path, trained: Path, capsys: Capture) -> None:
    expected = texts_of_transformers(exported, TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    words = ["--prompt", *TEXTS, "--max-new-tokens", "12", "--greedy"]
    for size in ("1", "4"):
        records = generated(capsys, trained, *words, "--micro-batch-size", size)
        assert [record["prompt"] for record in records] == TEXTS
        assert [record["tokens"] for record in records] == expected
        for record in records:
            is_ended = len(record["tokens"]) < 12
            assert record["text"] == tokenizer.decode(record["tokens"])
            assert record["finished"] == ("end of document" if is_ended else "length")


def test_record(trained: Path, capsys: Capture) -> None:
    words = ["--prompt", "in", "in", "--max-new-tokens", "9", "--top-k", "5", "--top-p", "0.9"]
    records = generated(capsys, trained, *words, "--seed", "7", "--dtype", "bf16")
    assert [record["number"] for record in records] == [1, 2]
    checkpoint = trained / "step_00000000"
    expected = {
        "sampling": {
            "max_new_tokens": 9, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 7,
        },
        "checkpoint": str(checkpoint),
        "checkpoint_hash": read_manifest(checkpoint)["checksum"],
        "dtype": "bf16",
    }  # fmt: skip
    for record in records:
        assert expected.items() <= record.items()
    texts = [record["tokens"] for record in records]
    assert texts[0] != texts[1], "the same prompt, another number"
    for seed, is_same in (("7", True), ("8", False)):
        again = generated(capsys, trained, *words, "--seed", seed, "--dtype", "bf16")
        assert ([record["tokens"] for record in again] == texts) == is_same


def test_end_of_document(trained: Path, capsys: Capture) -> None:
    """A model of 261 tokens that knows nothing draws the end mark now and then."""
    words = ["--prompt", *["in"] * 40, "--max-new-tokens", "40", "--temperature", "3"]
    records = generated(capsys, trained, *words)
    ends = {record["finished"] for record in records}
    assert ends == {"end of document", "length"}
    for record in records:
        assert (len(record["tokens"]) == 40) == (record["finished"] == "length")
        assert 260 not in record["tokens"]


def test_prompt_file(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    file, output = tmp_path / "prompts.txt", tmp_path / "texts.json"
    texts = [*TEXTS, "\u00fc\u2028x"]  # which is one line
    file.write_text("\n".join([*texts, ""]), encoding="utf-8")
    words = ["--max-new-tokens", "8", "--output", str(output)]
    found = generated(capsys, trained, "--prompt-file", str(file), *words)
    assert json.loads(output.read_text(encoding="utf-8")) == found
    assert [record["prompt"] for record in found] == texts
    assert generated(capsys, trained, "--prompt", *texts, "--max-new-tokens", "8") == found


def test_layouts(gloo: Pool, trained: Path) -> None:
    """A draw depends on the number of the prompt, whichever rank and batch continues it."""
    words = ["--load", str(trained), "--prompt", *TEXTS, "x", "--max-new-tokens", "12"]
    words += ["--top-p", "0.9"]
    expected = texts_of(1, words)
    for world, tensor_size in ((2, 1), (4, 2)):
        for found in gloo.run(world, texts_of, tensor_size, [*words, "--micro-batch-size", "2"]):
            assert found == expected


# By the flag that is refused, what follows --load.
REFUSED = {
    "--prompt": " | --prompt | --prompt a --interactive | --prompt a --prompt-file b",
    "--greedy": "--prompt a --greedy --temperature 0.7",
    "--temperature": "--prompt a --temperature -1",
    "--top-p": "--prompt a --top-p 1.5 | --prompt a --top-p 0",
    "--top-k": "--prompt a --top-k -1",
    "--max-new-tokens": "--prompt a --max-new-tokens 0",
    "--micro-batch-size": "--prompt a --micro-batch-size 0",
    "--output": "--prompt a --output nowhere/x.json | --prompt a --output .",
}


def settings_of(words: Sequence[str]) -> Settings:
    return parse(Settings, ["--load", "x", *words], {})


@pytest.mark.parametrize("flag", REFUSED)
def test_settings_refused(flag: str) -> None:
    for words in REFUSED[flag].split("|"):
        assert refused(settings_of, words) == flag


def test_settings() -> None:
    settings = settings_of(["--prompt=--greedy"])
    assert (settings.prompt, settings.greedy) == (("--greedy",), False)
    assert settings.sampling.temperature == 1
    for words in (["--greedy"], ["--temperature", "0"], ["--greedy", "--temperature", "0"]):
        assert settings_of(["--prompt", "a", *words]).sampling.temperature == 0


# Prompts


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    write_tokenizer(tmp_path)
    tokenizer = read_tokenizer(GPT2BPETokenizer.kind, tmp_path)
    return Reader(tokenizer, positions=20, max_new_tokens=12)


@pytest.mark.parametrize(("length", "works"), [(0, 19), (9, 11), (19, 1), (20, 12), (50, 12)])
def test_long_prompt(reader: Reader, length: int, works: int) -> None:
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
def test_prompt_file_refused(reader: Reader, tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    error = refusal(lambda: prompts_of(reader, of_file(file)))
    assert field_of(error) == "--prompt-file"
    assert named in str(error)


def prompts_of(reader: Reader, contents: dict[str, bytes]) -> list[str]:
    return [reader.prompt(place, content).text for place, content in contents.items()]


def test_line_ends(reader: Reader, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfin\r\n the \nno end")
    assert prompts_of(reader, of_file(file)) == ["in", " the ", "no end"]


def test_irregular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (Path("nowhere"), tmp_path, tmp_path / "pipe"):
        error = refusal(partial(of_file, file))
        assert field_of(error) == "--prompt-file"
        assert str(file) in str(error)


def test_begin_token(reader: Reader) -> None:
    tokenizer = reader.tokenizer
    begun = Reader(tokenizer, positions=20, max_new_tokens=12, begin_token="the")
    for text in ("in the", ""):
        tokens = tokenizer.encode(text)
        assert reader.prompt("here", text.encode()).tokens == (tokens or [tokenizer.eod])
        found = begun.prompt("here", text.encode()).tokens
        assert found == [tokenizer.token_id("the"), *tokens]
    other = partial(Reader, tokenizer, positions=20, max_new_tokens=12, begin_token="[BOT]")
    assert field_of(refusal(other)) == "--begin-token"
    refusal(lambda: begun.prompt("here", b"x" * 8))


def test_no_utf8(reader: Reader) -> None:
    error = refusal(lambda: prompts_of(reader, of_command_line(["\u00fc", "x\udcff"])))
    assert "--prompt 2" in str(error)


def test_lines() -> None:
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


# Ranks and terminals


def failure_of(words: list[str], broken: int) -> str:
    with pytest.raises(DivergedError) as failure:
        texts_of(1, words, broken)
    return str(failure.value)


def test_divergence(gloo: Pool, trained: Path) -> None:
    words = ["--load", str(trained), "--prompt", *TEXTS[1:3], "--max-new-tokens", "2"]
    words += ["--micro-batch-size", "1"]  # one prompt a rank, of which only the second is long
    for failure in gloo.run(2, failure_of, words, 8):
        assert failure.startswith("prompt 2: ")


def test_typed_lines(trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    lines = [TEXTS[0].encode(), b"the " * POSITIONS, b"\xff", TEXTS[1].encode(), b"", b"never"]
    typed, output = tmp_path / "typed", tmp_path / "texts.json"
    typed.write_bytes(b"\n".join(lines))
    with typed.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        words = ["--load", str(trained), "--max-new-tokens", "8", "--interactive"]
        main([*words, "--output", str(output)], {})
    records = json.loads(output.read_text(encoding="utf-8"))
    printed = capsys.readouterr()
    assert printed.out == "".join(record["text"] + "\n" for record in records)
    errors = printed.err.splitlines()
    assert [re.findall(r"line \d", each) for each in errors] == [["line 2"], ["line 3"]]
    words = ["--prompt", *TEXTS[:2], "--max-new-tokens", "8"]
    assert records == generated(capsys, trained, *words)


Terminal: TypeAlias = tuple[int, subprocess.Popen[str]]


@pytest.fixture
def terminal(trained: Path) -> Iterator[Terminal]:
    """(what is typed, the program), on a terminal that stays open."""
    typed, seen = pty.openpty()
    command = [sys.executable, "tools/generate.py", "--load", str(trained), "--interactive"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--max-new-tokens", "8", "--greedy"],
        cwd=ROOT, env=environ, text=True, stdin=seen, stderr=seen, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        os.close(seen)
        yield typed, process
        process.kill()
    os.close(typed)


def read_until(typed: int, end: str) -> None:
    """Wait for these words on the screen."""
    seen = ""
    while not seen.endswith(end):
        seen += os.read(typed, 1).decode()


def rest(typed: int) -> str:
    """The screen until the program has ended, which an OSError shows."""
    seen = b""
    with suppress(OSError):
        while True:
            seen += os.read(typed, 1000)
    return seen.decode()


def test_terminal_blank_line(terminal: Terminal, trained: Path, capsys: Capture) -> None:
    typed, process = terminal
    for line in (b"in\n", b"\n"):
        read_until(typed, "> ")
        os.write(typed, line)
    assert not rest(typed).strip()
    assert process.wait() == 0
    words = ["--prompt", "in", "--max-new-tokens", "8", "--greedy"]
    assert process.communicate()[0] == generated(capsys, trained, *words)[0]["text"] + "\n"


def test_terminal_ctrl_c(terminal: Terminal) -> None:
    typed, process = terminal
    read_until(typed, "> ")
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in rest(typed)
    assert process.wait() == 130


def typed_on_a_rank(words: list[str], typed: Path) -> None:
    with typed.open() as sys.stdin:
        main(words, os.environ)


def test_typed_lines_of_two_processes(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    typed = tmp_path / "typed"
    typed.write_text("\n".join([*TEXTS[:2], ""]))
    words = ["--max-new-tokens", "8", "--greedy"]
    ours = ["--load", str(trained), *words, "--interactive", "--tensor-model-parallel-size", "2"]
    with start_ranks(partial(typed_on_a_rank, ours, typed), range(2), 2, tmp_path) as ranks:
        assert ranks.wait() == [0, 0], ranks.text()
    expected = generated(capsys, trained, "--prompt", *TEXTS[:2], *words)
    assert ranks.text(0) == "".join(record["text"] + "\n" for record in expected)
