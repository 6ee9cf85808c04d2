"""Programs that use a trained model refuse what does not fit it before torch comes."""

import json
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.format import seal
from megatron.config.checkpoint import TrainedConfig
from megatron.config.parallel import ParallelConfig
from megatron.data.tokenizer import GPT2BPETokenizer, Tokenizer
from megatron.train.trained import open_trained
from tests.config.test_checks import settings
from tests.data.samples import write_tokenizer
from tests.refusals import field_of, refusal


def write_checkpoint(directory: Path, tokenizer: Tokenizer, *, attached: bool = True) -> Path:
    """Of 4 heads, without tensors."""
    folder = directory / "step_00000002"
    folder.mkdir(parents=True)
    files = {}
    for name, content in tokenizer.files.items() if attached else ():
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    manifest = {
        "format": 2,
        "files": files,
        "tensors": {},
        "config": asdict(settings()),
        "vocab_size": 261,
        "tokenizer": tokenizer.fingerprint,
        "data": [],
    }
    (folder / "manifest.json").write_text(json.dumps(seal(manifest)))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*write_tokenizer(tmp_path))


@pytest.fixture
def trained(tmp_path: Path, tokenizer: GPT2BPETokenizer) -> TrainedConfig:
    """A checkpoint without a tokenizer, and the tokenizer's files."""
    write_checkpoint(tmp_path, tokenizer, attached=False)
    files = (str(tmp_path / name) for name in tokenizer.files)
    return TrainedConfig(load=str(tmp_path), vocab_file=next(files), merge_file=next(files))


def test_opens_what_fits(trained: TrainedConfig) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    folders, tokenizer, manifest = open_trained(trained, parallel, 2)
    assert folders[0] == Path(trained.load) / "step_00000002"
    assert manifest["tokenizer"] == tokenizer.fingerprint
    assert manifest["config"]["model"]["num_attention_heads"] == 4


def test_a_checkpoint_brings_its_tokenizer(tmp_path: Path, tokenizer: GPT2BPETokenizer) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints", tokenizer)
    for load in (folder, folder.parent):
        _, found, _ = open_trained(TrainedConfig(load=str(load)), ParallelConfig(), 1)
        assert found.fingerprint == tokenizer.fingerprint
        assert found.encode("the thing") == tokenizer.encode("the thing")


def test_flags_win_over_the_checkpoint(tmp_path: Path, tokenizer: GPT2BPETokenizer) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints", tokenizer)
    (folder / "vocab.json").write_text("x" * len(tokenizer.files["vocab.json"]))  # damaged
    config = TrainedConfig(load=str(folder))
    assert folder.name in str(refusal(lambda: open_trained(config, ParallelConfig(), 1)))
    vocab, merges = (str(tmp_path / name) for name in ("vocab.json", "merges.txt"))
    config = replace(config, vocab_file=vocab, merge_file=merges)
    assert open_trained(config, ParallelConfig(), 1)[1].fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("changes", "size", "world", "flag"),
    [
        ({"vocab_file": None}, 1, 1, "--vocab-file"),
        ({"merge_file": None}, 1, 1, "--merge-file"),
        ({"tokenizer_type": "T5"}, 1, 1, "--tokenizer-type"),
        ({}, 2, 1, "--tensor-model-parallel-size"),
        ({}, 3, 3, "--tensor-model-parallel-size"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    trained: TrainedConfig, changes: dict[str, Any], size: int, world: int, flag: str
) -> None:
    """size: of the tensor axis. world: processes."""
    parallel = ParallelConfig(tensor_model_parallel_size=size)
    error = refusal(lambda: open_trained(replace(trained, **changes), parallel, world))
    assert field_of(error) == flag


@pytest.mark.parametrize("attached", [False, True])
def test_another_tokenizer_is_refused(
    tmp_path: Path, tokenizer: GPT2BPETokenizer, attached: bool
) -> None:
    """That of the flags, or that in the checkpoint."""
    merges = tokenizer.files["merges.txt"].replace(b"i n\n", b"\n\n\n\n")
    (tmp_path / "merges.txt").write_bytes(merges)
    if attached:
        tokenizer.files = {**tokenizer.files, "merges.txt": merges}
    folder = write_checkpoint(tmp_path / "checkpoints", tokenizer, attached=attached)
    flags = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    given = {} if attached else {name: str(file) for name, file in flags.items()}
    config = TrainedConfig(load=str(folder), **given)
    error = refusal(lambda: open_trained(config, ParallelConfig(), 1))
    assert field_of(error) == "--vocab-file and --merge-file"
