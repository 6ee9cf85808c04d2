"""A tokenizer.json from training it to text, and to transformers and back."""

import json
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

from megatron.checkpoint.format import read_manifest
from megatron.config.checkpoint import TrainedConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse_call
from megatron.data.indexed import Description, IndexedDataset
from megatron.data.tokenizer import HuggingFaceTokenizer
from megatron.train.trained import open_trained
from tests.data.samples import write_tokenizer_json
from tests.programs import newest, pretrain
from tests.refusals import refusal, refused
from tests.tools.convert.models import change_json, weights_of
from tests.tools.texts import generated
from tools.convert_hf import export_model, import_model
from tools.corpus.tokenize import step as preprocess_data
from tools.corpus.tokenize.encoders import PROBES
from tools.train_tokenizer import train_tokenizer

KIND = HuggingFaceTokenizer.kind
SPECIAL = ("[BOT]", "[EOT]", "[PAD]")
TRICKY = [*PROBES, *list(topics.values())[:20]]
FLAGS = ["--tokenizer-type", KIND, "--append-eod", "--workers", "1"]


def write_topics(folder: Path) -> Path:
    file = folder / "in.jsonl"
    texts = [f"{name} [EOT] {text}" for name, text in sorted(topics.items())[:20]]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a tokenizer that has been trained on it, its data set, and a model of that."""
    folder = tmp_path_factory.mktemp("journey")
    train_tokenizer((write_topics(folder),), 400, folder / "tokenizer", KIND, SPECIAL)
    words = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "p")]
    preprocess_data.main([*words, *FLAGS, "--tokenizer-model", str(folder / "tokenizer")])
    data = f"--data-path {folder / 'p_text_document'} --tokenizer-type {KIND} --eval-iters 0"
    words = f"{data} --train-iters 2 --save {folder / 'trained'}"
    with pretrain(words, folder=folder) as run:
        assert run.wait() == [0], run.text()
    return folder


def test_the_data_set_has_the_ids_and_carries_the_tokenizer(folder: Path) -> None:
    prefix = str(folder / "p_text_document")
    tokenizer = HuggingFaceTokenizer(str(folder / "tokenizer"))
    described = Description.read(prefix)
    assert described is not None
    facts = described.tokenizer_type, described.tokenizer_fingerprint, described.vocab_size
    assert facts == (KIND, tokenizer.fingerprint, 400)
    assert described.eod == tokenizer.eod == 1
    data = IndexedDataset(prefix)
    lines = (folder / "in.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        tokens = data.token_range(range(number, number + 1))
        document = data.read(tokens.start, tokens.stop).tolist()
        assert document == [*tokenizer.encode(json.loads(line)["text"]), 1]
        assert document.count(1) == 1
    beside = folder / "p_text_document.tokenizer"
    assert {file.name: file.read_bytes() for file in beside.iterdir()} == tokenizer.files
    assert set(tokenizer.files) == {"tokenizer.json", "tokenizer_config.json"}


def test_generation_finds_the_tokenizer_in_the_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainedConfig(load=str(folder / "trained"))
    _, tokenizer, manifest = open_trained(config, ParallelConfig(), 1)
    assert (tokenizer.kind, tokenizer.fingerprint) == (KIND, manifest["tokenizer"])
    words = ["--prompt", "a [EOT]", "", "--max-new-tokens", "5", "--temperature", "5"]
    for record in generated(capsys, folder / "trained", *words):
        assert record["text"] == tokenizer.decode(record["tokens"])
        assert 1 not in record["tokens"]
    other = write_tokenizer_json(folder / "other")
    error = refusal(
        lambda: generated(capsys, folder / "trained", *words, "--tokenizer-model", other)
    )
    assert "--vocab-file" in str(error)


def test_a_run_is_resumed_with_its_tokenizer_and_no_other(folder: Path) -> None:
    data = f"--data-path {folder / 'p_text_document'} --eval-iters 0 --train-iters 3"
    words = f"{data} --load {folder / 'trained'} --save {folder / 'resumed'}"
    with pretrain(f"{words} --tokenizer-type GPT2BPETokenizer", folder=folder) as run:
        assert run.wait() == [2]
        assert f"--tokenizer-type {KIND}" in run.text()
    given = f"--tokenizer-type {KIND} --tokenizer-model {folder / 'tokenizer'}"
    for flags in ("", f"{given} --train-iters 4"):  # of the checkpoint, or of the flags
        with pretrain(f"{words} {flags}", folder=folder) as run:
            assert run.wait() == [0], run.text()
    assert read_manifest(newest(folder / "resumed"))["counters"]["step"] == 4


def test_an_export_loads_in_transformers_and_comes_back(folder: Path, tmp_path: Path) -> None:
    checkpoint = newest(folder / "trained")
    export_model(str(checkpoint), tmp_path / "back")
    ours, theirs = (
        HuggingFaceTokenizer(str(folder / "tokenizer")),
        AutoTokenizer.from_pretrained(tmp_path / "back"),
    )
    assert [theirs.eos_token, theirs.bos_token, theirs.pad_token] == ["[EOT]", "[BOT]", "[PAD]"]
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eod, ours.pad_id)
    for text in TRICKY:
        assert theirs.encode(text, verbose=False) == ours.encode(text)
    config = json.loads((tmp_path / "back" / "config.json").read_bytes())
    assert (config["eos_token_id"], config["vocab_size"]) == (1, 400)
    error = refusal(lambda: import_model(str(tmp_path / "back"), tmp_path / "again"))
    assert f"--tokenizer-type {KIND}" in str(error)
    import_model(str(tmp_path / "back"), tmp_path / "again", tokenizer_type=KIND)
    again = tmp_path / "again" / "step_00000000"
    one, other = weights_of(checkpoint), weights_of(again)
    assert all(one[f"model.{n}"].equal(other[f"model.{n}"]) for n in read_names(again))
    manifest = read_manifest(again)
    assert manifest["tokenizer"] == ours.fingerprint
    assert manifest["config"]["data"]["tokenizer_type"] == KIND


def read_names(checkpoint: Path) -> list[str]:
    return [key.removeprefix("model.") for key in read_manifest(checkpoint)["tensors"]]


def test_imports_without_a_tokenizer_or_with_one_given(folder: Path, tmp_path: Path) -> None:
    export_model(str(folder / "trained"), tmp_path / "back")
    given = str(folder / "tokenizer")
    import_model(str(tmp_path / "back"), tmp_path / "two", given, tokenizer_type=KIND)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "back" / name).unlink()
    none = partial(import_model, str(tmp_path / "back"), tmp_path / "none", tokenizer_type=KIND)
    assert "--vocab-file" in str(refusal(none))
    import_model(str(tmp_path / "back"), tmp_path / "given", given, tokenizer_type=KIND)
    import_model(str(tmp_path / "back"), tmp_path / "without", no_tokenizer=True)
    for place in (given, f"{given}/tokenizer.json"):
        error = refusal(partial(export_model, str(tmp_path / "without"), tmp_path / "out", place))
        assert f"--tokenizer-type {KIND}" in str(error)
    export_model(str(tmp_path / "without"), tmp_path / "out", given, tokenizer_type=KIND)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_class_of_transformers_that_changes_the_ids_is_refused_or_left_out(
    folder: Path, tmp_path: Path
) -> None:
    """GPT2Tokenizer leaves out the normalizer: an import that would believe it is refused, and an
    export loads as its tokenizer.json says."""
    export_model(str(folder / "trained"), tmp_path / "back")
    given = str(tmp_path / "back")
    import_model(given, tmp_path / "without", no_tokenizer=True)
    change_json(tmp_path / "back" / "tokenizer.json", normalizer={"type": "Lowercase"})
    change_json(tmp_path / "back" / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    refusal(lambda: import_model(given, tmp_path / "again", tokenizer_type=KIND))
    assert not (tmp_path / "again").exists()
    export_model(str(tmp_path / "without"), tmp_path / "out", given, tokenizer_type=KIND)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = HuggingFaceTokenizer(given).encode("The END")
    assert theirs.encode("The END") == ids == theirs.encode("the end")


def test_the_trained_folder_loads_in_transformers(folder: Path) -> None:
    ours, theirs = (
        HuggingFaceTokenizer(str(folder / "tokenizer")),
        AutoTokenizer.from_pretrained(folder / "tokenizer"),
    )
    assert len(theirs) == ours.vocab_size == 400
    assert theirs.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id] == [0, 1, 2]
    assert [ours.eod, ours.pad_id] == [1, 2]
    for text in TRICKY:
        assert theirs.encode(text) == ours.encode(text)
        assert ours.decode(ours.encode(text)) == text
    # There a mark in a text is the mark, here it is the characters.
    assert theirs.encode("[EOT]") == [1]
    assert 1 not in ours.encode("[EOT]")


@pytest.mark.parametrize(
    ("kind", "special", "size", "flag"),
    [
        (KIND, (), 300, "--special-tokens"),
        (KIND, ("[BOT]", "[PAD]"), 300, "--special-tokens"),
        (KIND, ("[EOT]", "[EOT]"), 300, "--special-tokens"),
        (KIND, ("[EOT]", "a"), 300, "--special-tokens"),
        (KIND, ("[EOT]", "[PAD]"), 257, "--vocab-size"),
        ("GPT2BPETokenizer", ("<s>",), 300, "--special-tokens"),
        ("BertWordPieceCase", ("[EOT]",), 300, "--special-tokens"),
    ],
)
def test_special_tokens_that_cannot_be(
    tmp_path: Path, kind: str, special: tuple[str, ...], size: int, flag: str
) -> None:
    words = ["--input", str(write_topics(tmp_path)), "--output", str(tmp_path / "out")]
    words += ["--vocab-size", str(size), "--tokenizer-type", kind]
    words += ["--special-tokens", *special] if special else []
    assert refused(lambda given: parse_call(train_tokenizer, given, {})(), words) == flag
    assert HuggingFaceTokenizer(str(tmp_path / "out")).vocab_size >= 258
