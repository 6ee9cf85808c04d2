"""tools/generate.py: its text against transformers', its records, its layouts, and what it refuses.

What is drawn, and how, is tested in tests/train/test_generate.py; typed lines are in
test_generate_typed.py.
"""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.checkpoint.format import read_manifest
from megatron.config.parse import parse
from megatron.train.trained import open_trained
from tests.dist import Pool
from tests.refusals import refusal, refused
from tests.tools.convert.models import write_model
from tests.tools.texts import POSITIONS, TEXTS, failure_of, generated, texts_of
from tools.convert_hf import import_model
from tools.generate import Settings, main, read_prompts
from tools.prompts import Reader

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
    words = ["--prompt", "in", "in", "--max-new-tokens", "3", "--top-k", "5", "--top-p", "0.9"]
    records = generated(capsys, trained, *words, "--seed", "7", "--dtype", "bf16")
    assert [record["number"] for record in records] == [1, 2]
    checkpoint = trained / "step_00000000"
    expected = {
        "sampling": {
            "max_new_tokens": 3, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 7,
        },
        "checkpoint": str(checkpoint),
        "checkpoint_hash": read_manifest(checkpoint)["checksum"],
        "dtype": "bf16",
    }  # fmt: skip
    for record in records:
        assert expected.items() <= record.items()


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


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("", "--prompt"),
        ("--prompt", "--prompt"),
        ("--prompt a --interactive", "--prompt"),
        ("--prompt a --prompt-file b", "--prompt"),
        ("--prompt a --greedy --temperature 0.7", "--greedy"),
        ("--prompt a --temperature -1", "--temperature"),
        ("--prompt a --top-p 1.5", "--top-p"),
        ("--prompt a --top-p 0", "--top-p"),
        ("--prompt a --top-k -1", "--top-k"),
        ("--prompt a --max-new-tokens 0", "--max-new-tokens"),
        ("--prompt a --micro-batch-size 0", "--micro-batch-size"),
        ("--prompt a --output nowhere/x.json", "--output"),
        ("--prompt a --output .", "--output"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: str, flag: str) -> None:
    assert refused(lambda given: parse(Settings, given, {}), f"--load x {words}") == flag


def test_a_prompt_may_begin_with_hyphens() -> None:
    settings = parse(Settings, ["--load", "x", "--prompt=--greedy"], {})
    assert settings.prompt == ("--greedy",)
    assert not settings.greedy


def test_greedy_and_temperature_0_are_one() -> None:
    for words in (["--greedy"], ["--temperature", "0"], ["--greedy", "--temperature", "0"]):
        settings = parse(Settings, ["--load", "x", "--prompt", "a", *words], {})
        assert settings.sampling.temperature == 0
    assert parse(Settings, ["--load", "x", "--prompt", "a"], {}).sampling.temperature == 1


def test_a_prompt_that_does_not_fit_is_told_before_torch_is_imported(trained: Path) -> None:
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
    assert "--prompt 2" in ended.stderr


def test_a_model_that_diverges_on_one_rank_is_told_on_all(gloo: Pool, trained: Path) -> None:
    words = ["--load", str(trained), "--prompt", *TEXTS[1:3], "--max-new-tokens", "2"]
    words += ["--micro-batch-size", "1"]  # one prompt a rank, of which only the second is long
    for failure in gloo.run(2, failure_of, 1, words, 8):
        assert failure.startswith("prompt 2: ")


def test_an_output_that_a_disk_has_no_room_for_is_whole_as_before(
    trained: Path, small_disk: Path
) -> None:
    output = small_disk / "texts.json"
    output.write_text("before")
    with suppress(OSError), (small_disk / "rest").open("wb") as rest:
        rest.write(bytes(1 << 21))
    words = ["--load", str(trained), "--prompt", *["in"] * 400, "--max-new-tokens", "2"]
    error = refusal(
        lambda: main([*words, "--micro-batch-size", "400", "--output", str(output)], {})
    )
    assert isinstance(error, OSError)
    assert output.read_text() == "before"
