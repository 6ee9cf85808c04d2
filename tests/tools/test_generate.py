"""tools/generate.py: its text against transformers', its records, its layouts, and what it refuses.

What is drawn, and how, is tested in tests/train/test_generate.py.
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.checks import SettingError
from megatron.config.parse import parse
from megatron.data.tokenizer import GPT2BPETokenizer, read_tokenizer
from megatron.train.evaluate import load_newest
from megatron.train.trained import open_trained
from tests.data.samples import write_tokenizer
from tests.dist import Pool
from tests.tools.convert.models import write_model
from tests.tools.texts import texts_of
from tools.convert_hf import import_model
from tools.generate import Reader, Settings, main, read_prompts

ROOT = Path(__file__).parents[2]
POSITIONS = 48
TEXTS = ["the thing", "in", "Then, in the inn, the wind is thin.", "the thing"]


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


def generated(
    capsys: pytest.CaptureFixture[str], trained: Path, *words: str
) -> list[dict[str, Any]]:
    """What the program prints."""
    capsys.readouterr()
    main(["--load", str(trained), *words], {})
    return json.loads(capsys.readouterr().out)


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
            assert record == {
                "prompt": text,
                "text": tokenizer.decode(new),
                "tokens": new,
                "finished": "end of document" if is_ended else "length",
            }


def test_an_empty_prompt_begins_with_the_end_mark_and_no_other_does(trained: Path) -> None:
    settings = parse(Settings, ["--load", str(trained), "--prompt", "", "in"], {})
    tokenizer = open_trained(settings.trained, settings.parallel, 1)[1]
    prompts = read_prompts(settings, Reader(tokenizer, POSITIONS, 10))
    assert [prompt.tokens for prompt in prompts] == [[tokenizer.eod], tokenizer.encode("in")]


def test_a_text_ends_with_its_document(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of many draws of a model of 261 tokens that knows nothing, some are the end mark."""
    words = ["--prompt", *["in"] * 40, "--max-new-tokens", "40", "--temperature", "3"]
    records = generated(capsys, trained, *words)
    ends = {record["finished"] for record in records}
    assert ends == {"end of document", "length"}
    for record in records:
        assert (len(record["tokens"]) == 40) == (record["finished"] == "length")
        assert 260 not in record["tokens"]


def test_a_seed_gives_the_same_texts_again(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", *TEXTS, "--max-new-tokens", "12", "--top-k", "50"]
    first = generated(capsys, trained, *words, "--seed", "7")
    assert generated(capsys, trained, *words, "--seed", "7") == first
    assert generated(capsys, trained, *words, "--seed", "7", "--micro-batch-size", "1") == first
    assert generated(capsys, trained, *words, "--seed", "8") != first
    assert first[0] != first[3], "the same prompt, another number"


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


def test_typed_lines_are_continued_to_an_empty_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    typed = "\n".join([TEXTS[0], "the " * POSITIONS, TEXTS[1], "", "never read"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode() + b"\n")))
    words = ["--load", str(trained), "--max-new-tokens", "8", "--interactive"]
    output = tmp_path / "texts.json"
    main([*words, "--output", str(output)], {})
    records = json.loads(output.read_text(encoding="utf-8"))
    printed = capsys.readouterr()
    assert "error: line 2: 49 tokens and --max-new-tokens 8 do not fit" in printed.err
    assert printed.out == "".join(record["text"] + "\n" for record in records)
    words = ["--prompt", *TEXTS[:2], "--max-new-tokens", "8"]
    assert records == generated(capsys, trained, *words)


def test_narrow_weights_are_loaded_and_used(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype in ("bf16", "fp16"):
        words = ["--prompt", *TEXTS, "--max-new-tokens", "4", "--dtype", dtype]
        assert [len(each["tokens"]) for each in generated(capsys, trained, *words)] == [4] * 4


@pytest.mark.parametrize("choice", ["--greedy", "--top-p=0.9"])
def test_the_texts_are_the_same_at_every_layout(gloo: Pool, trained: Path, choice: str) -> None:
    words = ["--load", str(trained), "--prompt", *TEXTS, "x", "--max-new-tokens", "12", choice]
    words += ["--micro-batch-size", "2"]
    expected = texts_of(1, words)
    for world, tensor_size in ((2, 2), (2, 1), (4, 2), (4, 1)):
        for found in gloo.run(world, texts_of, tensor_size, words):
            assert found == expected


def test_several_processes_type_and_continue_together(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--load", str(trained), "--max-new-tokens", "8", "--greedy"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        *("tools/generate.py", *words, "--interactive", "--tensor-model-parallel-size", "2"),
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    typed = "\n".join([*TEXTS[:2], ""])
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, input=typed, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    expected = generated(
        capsys, trained, "--prompt", *TEXTS[:2], "--max-new-tokens", "8", "--greedy"
    )
    assert ended.stdout == "".join(record["text"] + "\n" for record in expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "one of --prompt, --prompt-file and --interactive is needed"),
        ("--prompt", "one of --prompt, --prompt-file and --interactive is needed"),
        ("--prompt a --interactive", "one of --prompt, .* is needed, and no other"),
        ("--prompt a --prompt-file b", "one of --prompt, .* is needed, and no other"),
        ("--prompt a --greedy --temperature 0.7", "--greedy contradicts --temperature 0.7"),
        ("--prompt a --temperature -1", "--temperature -1.0 should be 0 or above"),
        ("--prompt a --top-p 1.5", "--top-p 1.5 should be above 0 and at most 1"),
        ("--prompt a --top-p 0", "--top-p 0.0 should be above 0"),
        ("--prompt a --top-k -1", "--top-k -1 should be 0 or above"),
        ("--prompt a --max-new-tokens 0", "--max-new-tokens 0 should be above 0"),
        ("--prompt a --micro-batch-size 0", "--micro-batch-size 0 should be above 0"),
        (
            "--prompt a --output nowhere/x.json",
            "--output nowhere/x.json should be a file .* x.json",
        ),
        ("--prompt a --output .", "--output . should be a file in a folder that is there"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse(Settings, ["--load", "x", *words.split()], {})


def test_greedy_and_temperature_0_are_one() -> None:
    for words in (["--greedy"], ["--temperature", "0"], ["--greedy", "--temperature", "0"]):
        settings = parse(Settings, ["--load", "x", "--prompt", "a", *words], {})
        assert settings.sampling.temperature == 0
    assert parse(Settings, ["--load", "x", "--prompt", "a"], {}).sampling.temperature == 1


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    write_tokenizer(tmp_path)
    tokenizer = read_tokenizer(GPT2BPETokenizer.kind, tmp_path)
    return Reader(tokenizer, positions=20, max_new_tokens=12)


def test_a_prompt_that_just_fits_is_taken(reader: Reader) -> None:
    assert len(reader.prompt("here", "x" * 8).tokens) == 8


@pytest.mark.parametrize(
    ("length", "cure"),
    [
        (9, "--max-new-tokens 11 would work"),
        (19, "--max-new-tokens 1 would work"),
        (20, "a prompt of at most 8 tokens with --max-new-tokens 12 would work"),
        (50, "a prompt of at most 8 tokens with --max-new-tokens 12 would work"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(reader: Reader, length: int, cure: str) -> None:
    message = f"^here: {length} tokens and --max-new-tokens 12 do not fit .* 20 positions; {cure}$"
    with pytest.raises(ValueError, match=message):
        reader.prompt("here", "x" * length)


def test_more_new_tokens_than_positions_are_refused(reader: Reader) -> None:
    longer = Reader(reader.tokenizer, positions=20, max_new_tokens=20)
    with pytest.raises(ValueError, match="1 tokens and .*; --max-new-tokens 19 would work"):
        longer.prompt("here", "")
    with pytest.raises(ValueError, match="at most 1 tokens with --max-new-tokens 19 would work"):
        longer.prompt("here", "x" * 20)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"in\n\nthe\n", "line 2 is blank"),
        (b"", "line 1 is blank"),
        (b"in\n \t\r\n", "line 2 is blank"),
        (b"in\nthe \xff\n", "is not UTF-8 text"),
        (b"in\n" + b"x" * 30, r"line 2: 30 tokens and --max-new-tokens 12 do not fit"),
    ],
)
def test_a_file_of_prompts_is_refused_with_its_line(
    reader: Reader, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    settings = parse(Settings, ["--load", "x", "--prompt-file", str(file)], {})
    with pytest.raises(ValueError, match=f"--prompt-file {file}.*{message}"):
        read_prompts(settings, reader)


def test_a_missing_file_of_prompts_is_refused(reader: Reader) -> None:
    settings = parse(Settings, ["--load", "x", "--prompt-file", "nowhere"], {})
    with pytest.raises(FileNotFoundError, match="--prompt-file nowhere: no such file"):
        read_prompts(settings, reader)


def test_a_prompt_of_bytes_that_are_no_text_is_refused(reader: Reader) -> None:
    settings = parse(Settings, ["--load", "x", "--prompt", "in", "\udcff"], {})
    with pytest.raises(ValueError, match="--prompt 2 is not UTF-8 text"):
        read_prompts(settings, reader)


def test_what_does_not_fit_is_told_before_torch_is_imported(trained: Path) -> None:
    words = ["--load", str(trained), "--max-new-tokens", "9", "--prompt", "in", "the" * 40]
    program = (
        "import os, sys\nfrom tools.generate import main\n"
        f"try:\n    main({words!r}, os.environ)\n"
        "except SystemExit as stop:\n    print(stop.code, 'torch' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "2 False\n"
    assert ended.stderr.startswith("error: --prompt 2: 40 tokens and --max-new-tokens 9 do not")


def test_a_model_that_has_diverged_is_told(
    trained: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import megatron.train.evaluate

    def broken(*arguments: Any) -> Any:
        path, model = load_newest(*arguments)
        torch.nn.init.constant_(model.final_norm.bias, torch.nan)
        return path, model

    monkeypatch.setattr(megatron.train.evaluate, "load_newest", broken)
    with pytest.raises(SystemExit):
        main(["--load", str(trained), "--prompt", "in", "--max-new-tokens", "8"], {})
    assert "error: prompt 1: after 0 new tokens the logits are not" in capsys.readouterr().err
