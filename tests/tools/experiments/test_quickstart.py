"""The quickstart: its commands, what it refuses, and its page."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.indexed import IndexedDataset
from tests.data.samples import write_data
from tests.refusals import field_of, refusal
from tests.tools.experiments.test_commands import program_of
from tests.tools.report.pages import HOSTILE, ParsedPage
from tools.corpus.files import Count, DocumentCounts
from tools.experiments.quickstart import (
    Settings,
    check_corpus_size,
    list_stages,
    make_page,
    run,
)
from tools.experiments.runner import Machine, Stage
from tools.report.sections import Figure

CPU = Machine(0, 2)


def stages_of(machine: Machine = CPU, **settings: Any) -> dict[str, Stage]:
    return {stage.name: stage for stage in list_stages(Settings(**settings), machine)}


def test_the_training_command_fits_its_processes() -> None:
    for gpus, steps in ((0, 1), (2, 2600), (5, None), (8, 50)):
        stage = stages_of(Machine(gpus, 16), train_iters=steps)["pretrain"]
        program, flags, world = program_of(stage.commands[0])
        config = parse(PretrainGPT2Config, flags, {})
        config.check(world)
        assert program == "pretrain_gpt2.py"
        assert world == max(2, min(8, gpus // 2 * 2))
        assert config.global_batch_size(world) == 4
        assert config.training.train_iters == (steps or 2600)
        assert config.logging.log_interval <= config.training.train_iters


@pytest.mark.parametrize(("positions", "count"), [(256, 96), (64, 35), (20, 1)])
def test_samples_fit_the_positions_of_the_model(tmp_path: Path, positions: int, count: int) -> None:
    preset = tmp_path / "own.toml"
    text = Settings().preset.read_text()
    for key in ("max_position_embeddings", "seq_length"):
        text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {positions}", text)
    preset.write_text(text)
    argv = stages_of(preset=preset)["sample"].commands[0].argv
    assert argv[argv.index("--max-new-tokens") + 1] == str(count)


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [([200] * 19, None), ([200] * 10, 200), ([2000], 0), ([257] * 2, None), ([256] * 2, 256)],
)
def test_a_corpus_gives_training_and_validation_a_sample_each(
    tmp_path: Path, sizes: list[int], tokens: int | None
) -> None:
    """tokens: of the smaller part if it is too small."""
    write_data(tmp_path / "data", [[1] * size for size in sizes])
    data = IndexedDataset(str(tmp_path / "data"))
    if tokens is None:
        check_corpus_size(data, 256)
    else:
        error = refusal(lambda: check_corpus_size(data, 256))
        assert field_of(error) == "corpus"
        assert f" {tokens} tokens" in str(error)


def test_an_own_corpus_and_vocabulary_replace_the_commands_that_make_them(tmp_path: Path) -> None:
    names = ("c", "v", "m")
    corpus, vocabulary, merges = (tmp_path / name for name in names)
    corpus.touch()
    own = stages_of(corpus=corpus, vocab_file=vocabulary, merge_file=merges)
    assert not own["corpus"].commands
    assert not own["tokenizer"].commands
    assert str(corpus) in own["clean"].commands[0].argv
    assert str(vocabulary) in own["preprocess"].commands[0].argv
    assert list(own) == list(stages_of())


def test_a_corpus_under_another_key_is_named_after_its_file_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "c.jsonl").touch()
    monkeypatch.chdir(tmp_path / "mine")
    for corpus, name in ((Path(), "mine"), (Path("c.jsonl"), "c.jsonl")):
        argv = stages_of(corpus=corpus, json_key="body")["clean"].commands[0].argv
        assert argv[argv.index("--source") + 1] == name


@pytest.mark.parametrize(
    ("content", "changes", "field"),
    [
        (None, {}, "corpus"),
        ("", {}, "corpus"),
        ('{"body": 1}\n{}\n', {}, "corpus"),
        ('{"text": "in"}\n', {"vocab_size": 256}, "--vocab-size"),  # no room for the bytes
        ('{"text": "in"}\n', {"vocab_file": Path("vocab.json")}, "--vocab-file"),  # alone
        (
            '{"text": "in"}\n',
            {"tensor_model_parallel_size": 3},
            "--tensor-model-parallel-size",
        ),
    ],
)
def test_a_bad_corpus_or_vocabulary_is_refused(
    tmp_path: Path, content: str | None, changes: dict[str, Any], field: str
) -> None:
    corpus = tmp_path / "c.jsonl"
    if content is not None:
        corpus.write_text(content)
    settings = replace(Settings(corpus=corpus, output=tmp_path / "out"), **changes)
    assert field_of(refusal(lambda: run(settings))) == field
    assert not (tmp_path / "out").exists()


def test_the_page_escapes_texts_and_loads_nothing() -> None:
    counted = {"documents": 2, "bytes": 20}
    read, lost = Count(3, 40), Count(1, 10)  # of 20 bytes left; the other 10 were cut
    counts = DocumentCounts({"a": read}, {"a": Count(2, 20)}, {HOSTILE: {"a": lost}})
    step = {**counts.to_json(), "bad_lines": []}
    clean = {**step, "repaired": 1, "unit_of_length": "pieces"}
    names = ("token", "bigram", "unigram", "word")
    facts = {
        "corpus": {"clean": clean, "split": {**step, "sides": {"train": counted}}},
        "layout": {"device": "cpu", "tensor_parallel_size": 2, "data_parallel_size": 1},
        "seconds": {"clean": 1.5},
        "training": {"steps": 3, "tokens_per_second": 7.5, "compiled": True},
        "evaluation": {
            **{f"{name}_perplexity": 7.0 for name in names},
            **dict.fromkeys(("bits_per_byte", "xz_bits_per_byte", "cloze_accuracy"), 0.5),
            **dict.fromkeys(("tokens", "words", "bytes"), 9),
        },
        "samples": [{"prompt": HOSTILE, "text": HOSTILE + HOSTILE}],
        "commands": {"clean": [HOSTILE], "tokenizer": []},
    }
    page = make_page(facts, Figure("<svg></svg>"), Path("runs"))
    assert ParsedPage(page.html()).text.count(HOSTILE) == 5
    text = page.markdown().decode()
    assert "| **Raw** | **3** | **40 B** |" in text
    assert " | \N{MINUS SIGN}10 B | 25.00 % |\n" in text
