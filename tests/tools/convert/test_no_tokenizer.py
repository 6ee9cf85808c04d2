"""A folder of weights alone becomes a checkpoint, whose users bring the tokenizer."""

from pathlib import Path

import pytest

from megatron.checkpoint.format import read_manifest
from megatron.config.checkpoint import TrainedConfig
from megatron.config.parallel import ParallelConfig
from megatron.data.tokenizer import file_names
from megatron.train.trained import open_trained
from tests.data.samples import write_tokenizer, write_tokenizer_json, write_wordpiece
from tests.programs import pretrain, some_data
from tests.refusals import refusal
from tests.tools.convert.models import WRITERS, assert_same_weights, imported
from tools.convert_hf import export_model


def weights_alone(folder: Path, kind: str, **changes: int) -> Path:
    WRITERS[kind](folder, **changes)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    return folder


def files_of_tokenizer(folder: Path, kind: str) -> dict[str, str]:
    if kind == "bert":
        return {"vocab_file": write_wordpiece(folder)}
    if kind == "llama":
        return {"vocab_file": write_tokenizer_json(folder / "json")}
    return dict(zip(("vocab_file", "merge_file"), write_tokenizer(folder), strict=True))


@pytest.mark.parametrize("kind", WRITERS)
def test_weights_alone_come_and_go_and_readers_of_text_need_a_tokenizer_that_fits(
    tmp_path: Path, kind: str
) -> None:
    folder = weights_alone(tmp_path / "hf", kind)
    step = imported(folder, no_tokenizer=True)
    manifest = read_manifest(step)
    names = file_names(manifest["config"]["data"]["tokenizer_type"])
    assert not set(names) & manifest["files"].keys()
    files = files_of_tokenizer(tmp_path, kind)
    export_model(str(step), tmp_path / "back", **files)
    assert_same_weights(folder, tmp_path / "back")

    def opened(step: Path, **given: str) -> int:
        trained = TrainedConfig(load=str(step), **given)
        return open_trained(trained, ParallelConfig(), 1, [*WRITERS])[1].vocab_size

    assert "--vocab-file" in str(refusal(lambda: opened(step)))
    assert opened(step, **files) > 90
    small = imported(weights_alone(tmp_path / "s", kind, vocab_size=90), "less", no_tokenizer=True)
    assert "90" in str(refusal(lambda: opened(small, **files)))


def test_training_goes_on_from_weights_alone(tmp_path: Path) -> None:
    some_data(tmp_path)
    step = imported(weights_alone(tmp_path / "hf", "gpt2", vocab_size=100), no_tokenizer=True)
    words = f"--load {step.parent} --finetune --train-iters 2 --eval-iters 0"
    with pretrain(words, folder=tmp_path) as run:
        assert run.wait() == [0], run.text()
