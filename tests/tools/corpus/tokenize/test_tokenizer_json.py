"""A tokenizer.json from training it to text, and to transformers and back."""

import json
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

from megatron.checkpoint.format import read_manifest
from megatron.config.parse import parse_call
from megatron.data.indexed import Description, IndexedDataset
from megatron.data.tokenizer import HuggingFaceTokenizer
from tests.programs import finished, newest
from tests.refusals import by_last_flag, refusal, refused
from tests.tools.convert.models import change_json, weights_of
from tests.tools.corpus.lines import write_jsonl
from tools.convert_hf import export_model, import_model
from tools.corpus.tokenize import step as preprocess_data
from tools.corpus.tokenize.encoders import PROBES
from tools.train_tokenizer import train_tokenizer

KIND = HuggingFaceTokenizer.kind
SPECIAL = ("[BOT]", "[EOT]", "[PAD]")
TRICKY = [*PROBES, *list(topics.values())[:20]]
FLAGS = ["--tokenizer-type", KIND, "--append-eod", "--workers", "1"]


def write_topics(folder: Path) -> Path:
    texts = [f"{name} [EOT] {text}" for name, text in sorted(topics.items())[:20]]
    return write_jsonl(folder / "in.jsonl", [{"text": text} for text in texts])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a tokenizer that has been trained on it, its data set, and a model of that."""
    folder = tmp_path_factory.mktemp("journey")
    train_tokenizer((write_topics(folder),), 400, folder / "tokenizer", KIND, SPECIAL)
    words = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "p")]
    preprocess_data.main([*words, *FLAGS, "--tokenizer-model", str(folder / "tokenizer")])
    data = f"--data-path {folder / 'p_text_document'} --tokenizer-type {KIND} --eval-iters 0"
    words = f"{data} --train-iters 2 --save {folder / 'trained'}"
    finished(words, folder=folder)
    return folder


def test_the_data_set_has_the_ids_and_carries_the_tokenizer(folder: Path) -> None:
    prefix = str(folder / "p_text_document")
    tokenizer, described = HuggingFaceTokenizer(str(folder / "tokenizer")), Description.read(prefix)
    assert described is not None
    facts = described.tokenizer_type, described.tokenizer_fingerprint, described.vocab_size
    assert (*facts, described.eod) == (KIND, tokenizer.fingerprint, 400, tokenizer.eod)
    data = IndexedDataset(prefix)
    lines = (folder / "in.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        tokens = data.token_range(range(number, number + 1))
        document = data.read(tokens.start, tokens.stop).tolist()
        assert document == [*tokenizer.encode(json.loads(line)["text"]), 1]
    beside = folder / "p_text_document.tokenizer"
    assert {file.name: file.read_bytes() for file in beside.iterdir()} == tokenizer.files
    assert set(tokenizer.files) == {"tokenizer.json", "tokenizer_config.json"}


def test_a_run_is_resumed_with_its_tokenizer_and_no_other(folder: Path) -> None:
    data = f"--data-path {folder / 'p_text_document'} --eval-iters 0 --train-iters 3"
    words = f"{data} --load {folder / 'trained'} --save {folder / 'resumed'}"
    said = finished(f"{words} --tokenizer-type GPT2BPETokenizer", folder=folder, code=2)
    assert f"--tokenizer-type {KIND}" in said
    given = f"--tokenizer-type {KIND} --tokenizer-model {folder / 'tokenizer'}"
    for flags in ("", f"{given} --train-iters 4"):  # of the checkpoint, or of the flags
        finished(f"{words} {flags}", folder=folder)
    assert read_manifest(newest(folder / "resumed"))["counters"]["step"] == 4


def test_an_export_loads_in_transformers_and_comes_back(folder: Path, tmp_path: Path) -> None:
    checkpoint = newest(folder / "trained")
    export_model(str(checkpoint), tmp_path / "back")
    ours = HuggingFaceTokenizer(str(folder / "tokenizer"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert theirs.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id] == [0, 1, 2]
    assert (ours.eod, ours.pad_id) == (1, 2)
    for text in TRICKY:
        assert theirs.encode(text, verbose=False) == ours.encode(text)
        assert ours.decode(ours.encode(text)) == text
    # There a mark in a text is the mark, here it is the characters.
    assert theirs.encode("[EOT]") == [1]
    assert 1 not in ours.encode("[EOT]")
    config = json.loads((tmp_path / "back" / "config.json").read_bytes())
    assert (config["eos_token_id"], config["vocab_size"]) == (1, 400)
    error = refusal(lambda: import_model(str(tmp_path / "back"), tmp_path / "again"))
    assert f"--tokenizer-type {KIND}" in str(error)
    import_model(str(tmp_path / "back"), tmp_path / "again", tokenizer_type=KIND)
    again = tmp_path / "again" / "step_00000000"
    manifest = read_manifest(again)
    one, other = weights_of(checkpoint), weights_of(again)
    assert all(one[name].equal(other[name]) for name in manifest["tensors"])
    assert manifest["tokenizer"] == ours.fingerprint
    assert manifest["config"]["data"]["tokenizer_type"] == KIND


def test_a_tokenizer_is_given_and_a_class_that_changes_its_ids_is_refused_or_left_out(
    folder: Path, tmp_path: Path
) -> None:
    """GPT2Tokenizer leaves out the normalizer: an import that would believe it is refused, and an
    export loads as its tokenizer.json says."""
    export_model(str(folder / "trained"), tmp_path / "back")
    back, without, given = str(tmp_path / "back"), str(tmp_path / "without"), folder / "tokenizer"
    import_model(back, tmp_path / "given", str(given), tokenizer_type=KIND)
    import_model(back, tmp_path / "without", no_tokenizer=True)
    for place in (given, given / "tokenizer.json"):
        error = refusal(partial(export_model, without, tmp_path / "out", str(place)))
        assert f"--tokenizer-type {KIND}" in str(error)
    change_json(tmp_path / "back" / "tokenizer.json", normalizer={"type": "Lowercase"})
    change_json(tmp_path / "back" / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    refusal(lambda: import_model(back, tmp_path / "again", tokenizer_type=KIND))
    assert not (tmp_path / "again").exists()
    export_model(without, tmp_path / "out", back, tokenizer_type=KIND)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = HuggingFaceTokenizer(back).encode("The END")
    assert theirs.encode("The END") == ids == theirs.encode("the end")


LAST = """
--vocab-size 300 --special-tokens [BOT] [PAD] | --vocab-size 300 --special-tokens [EOT] [EOT]
--vocab-size 300 --special-tokens [EOT] a | --special-tokens [EOT] [PAD] --vocab-size 257
--vocab-size 300 --tokenizer-type GPT2BPETokenizer --special-tokens <s>
--vocab-size 300 --tokenizer-type BertWordPieceCase --special-tokens [EOT]
"""
ROWS = [*by_last_flag(LAST), ("--vocab-size 300", "--special-tokens")]


@pytest.mark.parametrize(("row", "flag"), ROWS)
def test_special_tokens_that_cannot_be(tmp_path: Path, row: str, flag: str) -> None:
    words = ["--input", str(write_topics(tmp_path)), "--output", str(tmp_path / "out")]
    words += [*row.split(), *([] if "--tokenizer-type" in row else ["--tokenizer-type", KIND])]
    assert refused(lambda given: parse_call(train_tokenizer, given, {})(), words) == flag
    assert HuggingFaceTokenizer(str(tmp_path / "out")).vocab_size >= 258
