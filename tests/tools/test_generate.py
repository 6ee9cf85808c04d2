"""tools/generate.py: its text against transformers', its records, its layouts, what it refuses, and
lines that are typed at a terminal, into a pipe or to several processes.

What is drawn, and how, is tested in tests/inference/test_generate.py.
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

from megatron.checkpoint.format import read_manifest
from megatron.config.parse import parse
from megatron.train.trained import open_trained
from tests.dist import Pool
from tests.programs import start_ranks
from tests.refusals import refused
from tests.tools.convert.models import write_model
from tests.tools.texts import POSITIONS, TEXTS, failure_of, generated, texts_of
from tools.convert_hf import import_model
from tools.generate import Reader, Settings, main, read_prompts

ROOT = Path(__file__).parents[2]


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


def test_greedy_text_is_that_of_transformers_on_the_same_model(
    exported: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    words = ["--prompt", *TEXTS, "--max-new-tokens", "12", "--greedy"]
    for size in ("1", "4"):
        records = generated(capsys, trained, *words, "--micro-batch-size", size)
        for text, record in zip(TEXTS, records, strict=True):
            inputs = tokenizer(text, return_tensors="pt")
            whole = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
            new = whole[inputs["input_ids"].shape[1] :].tolist()
            is_ended = new[-1] == tokenizer.eos_token_id
            new = new[:-1] if is_ended else new
            expected = {
                "prompt": text,
                "text": tokenizer.decode(new),
                "tokens": new,
                "finished": "end of document" if is_ended else "length",
            }
            assert expected.items() <= record.items()


def test_a_record_says_what_its_text_depends_on(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_an_empty_prompt_begins_with_the_end_mark_and_no_other_does(trained: Path) -> None:
    settings = parse(Settings, ["--load", str(trained), "--prompt", "", "in"], {})
    tokenizer = open_trained(settings.trained, settings.parallel, 1)[1]
    prompts = read_prompts(settings, Reader(tokenizer, POSITIONS, 10))
    assert [prompt.tokens for prompt in prompts] == [[tokenizer.eod], tokenizer.encode("in")]


def test_a_text_ends_with_its_document(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 261 tokens that knows nothing draws the end mark now and then."""
    words = ["--prompt", *["in"] * 40, "--max-new-tokens", "40", "--temperature", "3"]
    records = generated(capsys, trained, *words)
    ends = {record["finished"] for record in records}
    assert ends == {"end of document", "length"}
    for record in records:
        assert (len(record["tokens"]) == 40) == (record["finished"] == "length")
        assert 260 not in record["tokens"]


def test_prompts_of_a_file_are_continued_like_those_of_the_command_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "prompts.txt", tmp_path / "texts.json"
    texts = [*TEXTS, "\u00fc\u2028x"]  # which is one line
    file.write_text("\n".join([*texts, ""]), encoding="utf-8")
    words = ["--max-new-tokens", "8", "--output", str(output)]
    found = generated(capsys, trained, "--prompt-file", str(file), *words)
    assert json.loads(output.read_text(encoding="utf-8")) == found
    assert [record["prompt"] for record in found] == texts
    assert generated(capsys, trained, "--prompt", *texts, "--max-new-tokens", "8") == found


@pytest.mark.parametrize("choice", ["--greedy", "--top-p=0.9"])
def test_the_texts_are_the_same_at_every_layout(gloo: Pool, trained: Path, choice: str) -> None:
    words = ["--load", str(trained), "--prompt", *TEXTS, "x", "--max-new-tokens", "12", choice]
    words += ["--micro-batch-size", "2"]
    expected = texts_of(1, words)
    for world, tensor_size in ((2, 2), (2, 1), (4, 2), (4, 1)):
        for found in gloo.run(world, texts_of, tensor_size, words):
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
def test_settings_that_cannot_be_are_refused(flag: str) -> None:
    for words in REFUSED[flag].split("|"):
        assert refused(settings_of, words) == flag


def test_a_prompt_may_begin_with_hyphens_and_greedy_is_temperature_0() -> None:
    settings = settings_of(["--prompt=--greedy"])
    assert (settings.prompt, settings.greedy) == (("--greedy",), False)
    assert settings.sampling.temperature == 1
    for words in (["--greedy"], ["--temperature", "0"], ["--greedy", "--temperature", "0"]):
        assert settings_of(["--prompt", "a", *words]).sampling.temperature == 0


def test_a_model_that_diverges_on_one_rank_is_told_on_all(gloo: Pool, trained: Path) -> None:
    words = ["--load", str(trained), "--prompt", *TEXTS[1:3], "--max-new-tokens", "2"]
    words += ["--micro-batch-size", "1"]  # one prompt a rank, of which only the second is long
    for failure in gloo.run(2, failure_of, 1, words, 8):
        assert failure.startswith("prompt 2: ")


def test_typed_lines_are_continued_to_an_empty_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
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
    """The screen until the program has ended, which is told by an OSError."""
    seen = b""
    with suppress(OSError):
        while True:
            seen += os.read(typed, 1000)
    return seen.decode()


def test_a_blank_line_at_a_terminal_ends_in_silence(
    terminal: Terminal, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, process = terminal
    for line in (b"in\n", b"\n"):
        read_until(typed, "> ")
        os.write(typed, line)
    assert not rest(typed).strip()
    assert process.wait() == 0
    words = ["--prompt", "in", "--max-new-tokens", "8", "--greedy"]
    assert process.communicate()[0] == generated(capsys, trained, *words)[0]["text"] + "\n"


def test_ctrl_c_at_a_terminal_ends_without_a_traceback(terminal: Terminal) -> None:
    typed, process = terminal
    read_until(typed, "> ")
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in rest(typed)
    assert process.wait() == 130


def typed_on_a_rank(words: list[str], typed: Path) -> None:
    with typed.open() as sys.stdin:
        main(words, os.environ)


def test_several_processes_type_and_continue_together(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = tmp_path / "typed"
    typed.write_text("\n".join([*TEXTS[:2], ""]))
    words = ["--max-new-tokens", "8", "--greedy"]
    ours = ["--load", str(trained), *words, "--interactive", "--tensor-model-parallel-size", "2"]
    with start_ranks(partial(typed_on_a_rank, ours, typed), range(2), 2, tmp_path) as ranks:
        assert ranks.wait() == [0, 0], ranks.text()
    expected = generated(capsys, trained, "--prompt", *TEXTS[:2], *words)
    assert ranks.text(0) == "".join(record["text"] + "\n" for record in expected)
