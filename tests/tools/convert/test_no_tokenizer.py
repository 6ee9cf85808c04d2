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
from tests.tools.convert.berts import write_bert
from tests.tools.convert.llamas import write_llama
from tests.tools.convert.models import assert_same_weights, write_model
from tools.convert_hf import export_model, import_model

CASES = {"gpt2": write_model, "bert": write_bert, "llama": write_llama}


def weights_alone(folder: Path, kind: str, **changes: int) -> Path:
    CASES[kind](folder, **changes)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    return folder


def files_of_tokenizer(folder: Path, kind: str) -> dict[str, str]:
    if kind == "bert":
        return {"vocab_file": write_wordpiece(folder)}
    if kind == "llama":
        return {"vocab_file": write_tokenizer_json(folder / "json")}
    vocabulary, merges = write_tokenizer(folder)
    return {"vocab_file": vocabulary, "merge_file": merges}


@pytest.mark.parametrize("kind", CASES)
def test_weights_come_in_and_go_back_out(tmp_path: Path, kind: str) -> None:
    folder = weights_alone(tmp_path / "hf", kind)
    with pytest.raises(FileNotFoundError, match="--no-tokenizer"):
        import_model(str(folder), tmp_path / "ours")
    import_model(str(folder), tmp_path / "ours", no_tokenizer=True)
    manifest = read_manifest(tmp_path / "ours" / "step_00000000")
    names = file_names(manifest["config"]["data"]["tokenizer_type"])
    assert not set(names) & manifest["files"].keys()
    files = files_of_tokenizer(tmp_path, kind)
    export_model(str(tmp_path / "ours"), tmp_path / "back", **files)
    assert_same_weights(folder, tmp_path / "back")


@pytest.mark.parametrize("kind", CASES)
def test_a_reader_of_text_needs_a_tokenizer_of_no_more_ids_than_the_model_has_rows(
    tmp_path: Path, kind: str
) -> None:
    import_model(str(weights_alone(tmp_path / "hf", kind)), tmp_path / "ours", no_tokenizer=True)
    import_model(
        str(weights_alone(tmp_path / "small", kind, vocab_size=90)),
        tmp_path / "other",
        no_tokenizer=True,
    )
    files = files_of_tokenizer(tmp_path, kind)

    def opened(name: str, **given: str) -> int:
        trained = TrainedConfig(load=str(tmp_path / name), **given)
        return open_trained(trained, ParallelConfig(), 1, [*CASES])[1].vocab_size

    with pytest.raises(ValueError, match="--vocab-file"):
        opened("ours")
    assert opened("ours", **files) > 90
    with pytest.raises(ValueError, match="90"):
        opened("other", **files)


def test_a_tokenizer_is_either_given_or_not(tmp_path: Path) -> None:
    folder = weights_alone(tmp_path / "hf", "gpt2")
    files = files_of_tokenizer(tmp_path, "gpt2")
    with pytest.raises(ValueError, match="--no-tokenizer"):
        import_model(str(folder), tmp_path / "ours", no_tokenizer=True, **files)
    with pytest.raises(ValueError, match="--tokenizer-type"):
        import_model(
            str(folder),
            tmp_path / "ours",
            no_tokenizer=True,
            tokenizer_type="BertWordPieceCase",
        )
    assert not (tmp_path / "ours").exists()


def test_training_goes_on_from_it(tmp_path: Path) -> None:
    some_data(tmp_path)
    folder = weights_alone(tmp_path / "hf", "gpt2", vocab_size=100)
    import_model(str(folder), tmp_path / "ours", no_tokenizer=True)
    words = f"--load {tmp_path}/ours --finetune --train-iters 2 --eval-iters 0"
    with pretrain(words, folder=tmp_path) as run:
        assert run.wait() == [0], run.text()
