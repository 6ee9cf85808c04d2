"""A model that --model huggingface trained is written back as the folder that it came from."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.save import save_checkpoint
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_newest
from tests.data.samples import write_data_of_tokenizer
from tests.dist import Pool
from tests.models.test_hf_weights import CASES, config_of, rewrite, state_of, write_folder
from tests.programs import finished, newest
from tests.refusals import field_of, refusal
from tests.tiny import VOCABULARY
from tests.tools.convert import models
from tests.tools.texts import generated, texts_of_transformers
from tools.convert.compare import compare_logits
from tools.convert.exporting import write_unmodified
from tools.convert_hf import export_model

RATES = "--lr 1e-2 --lr-warmup-iters 0 --lr-decay-iters 4"


def save(folders: dict[str, Path], to: Path, tensor_size: int) -> None:
    """A checkpoint of each folder's weights, as a run makes it before its first step."""
    for name, folder in folders.items():
        config = config_of(folder, CASES[name])
        state = state_of(config, tensor_size, CASES[name].dtype, draws=False)
        state.load_folder(str(folder))
        facts = {
            "kind": config.kind,
            "config": {"model": asdict(config), "data": {"tokenizer_type": "GPT2BPETokenizer"}},
            "vocab_size": VOCABULARY,
            "tokenizer": "",
        }
        facts |= state.facts()
        save_checkpoint(to / folder.name, 0, state.slices(), facts, state.mesh, config.files(None))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, gloo: Pool) -> dict[str, tuple[Path, Path]]:
    """(folder, checkpoints that two ranks made of it) of every case."""
    place = tmp_path_factory.mktemp("folders")
    folders = {
        name: write_folder(place / str(number), case._replace(change=dict))
        for number, (name, case) in enumerate(CASES.items())
    }
    gloo.run(2, save, folders, place / "checkpoints", 2)
    return {name: (each, place / "checkpoints" / each.name) for name, each in folders.items()}


@pytest.mark.parametrize("name", CASES)
def test_export(made: dict[str, tuple[Path, Path]], tmp_path: Path, name: str) -> None:
    folder, checkpoints = made[name]
    export_model(str(checkpoints), tmp_path / "back")  # compares the logits
    by_them = tmp_path / "by_them"
    getattr(transformers, CASES[name].auto_class).from_pretrained(folder).save_pretrained(by_them)
    models.assert_same_weights(by_them, tmp_path / "back")
    if CASES[name].saved_class is None:
        models.assert_same_weights(folder, tmp_path / "back")
    ours, theirs = (models.json_of(each / "config.json") for each in (tmp_path / "back", by_them))
    assert {key: value for key, value in theirs.items() if key in ours} == ours
    assert ours["architectures"] == theirs["architectures"]
    generation = "generation_config.json"
    if (folder / generation).exists():
        assert (folder / generation).read_bytes() == (tmp_path / "back" / generation).read_bytes()
    found = generation_of(tmp_path / "back")
    assert found == generation_of(by_them)
    assert found is None or found["use_cache"] is not False


def generation_of(folder: Path) -> dict[str, Any] | None:
    """Where a text ends and whether a cache is used, if the files of the folder say it."""
    if not (folder / "generation_config.json").exists():
        return None
    config = GenerationConfig.from_pretrained(folder).to_dict()
    names = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names}


def test_several_files(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    folder, checkpoints = made["GPT-2"]
    checkpoint = load_newest([newest(checkpoints)], serial_mesh())[0]
    write_unmodified(tmp_path, checkpoint, shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    models.assert_same_weights(folder, tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_compare(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    _, checkpoints = made["GPT-2"]
    checkpoint = load_newest([newest(checkpoints)], serial_mesh())[0]
    write_unmodified(tmp_path, checkpoint)
    rewrite(tmp_path, lambda old: {key: x * (1 + 1e-4 * ("ln_f" in key)) for key, x in old.items()})
    error = refusal(lambda: compare_logits(newest(checkpoints), tmp_path, None))
    assert field_of(error) == str(newest(checkpoints))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a GPT-2 with a tokenizer that was fine-tuned by the program at two ranks
    with ZeRO, and resumed at one without its folder; "hf" beside it is the folder and "exported"
    the export."""
    place = tmp_path_factory.mktemp("tuned")
    numbers = np.random.default_rng(0)
    documents = [[*numbers.integers(260, size=200).tolist(), 260] for _ in range(8)]
    write_data_of_tokenizer(place / "text_document", documents)
    folder = models.write_model(place / "hf")
    models.change_json(folder / "generation_config.json", repetition_penalty=1.0)  # its own
    moved = shutil.copytree(folder, place / "moved")
    words = f"{RATES} --save {place / 'run'}"
    train(place, moved, f"{words} --train-iters 2 --zero-stage 3", world=2)
    shutil.rmtree(moved)
    train(place, moved, f"{words} --train-iters 4 --load {place / 'run'}")
    export_model(str(place / "run"), place / "exported")
    return place / "run"


def train(place: Path, folder: Path, words: str, **more: int) -> str:
    """Run the program on the data in this place; returns what it printed."""
    data, shape = place / "text_document", f"--model huggingface --hf-model {folder}"
    return finished(words, folder=place, program="pretrain", data=data, shape=shape, **more)


def test_runs(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The export has all files of the folder, which is gone, every weight has moved, and a text of
    the checkpoint is that of the export."""
    assert read_manifest(newest(tuned))["counters"]["step"] == 4
    folder, back = tuned.with_name("hf"), tuned.with_name("exported")
    names = {each.name for each in folder.iterdir()}
    assert names == {each.name for each in back.iterdir()}
    for name in names - {"config.json", "model.safetensors"}:
        assert (folder / name).read_bytes() == (back / name).read_bytes(), name
    before, after = models.weights_of(folder), models.weights_of(back)
    assert after.keys() == {name for name in before if not torch.equal(after[name], before[name])}
    prompts = ["the", "in the"]
    asked = ["--prompt", *prompts, "--greedy", "--max-new-tokens", "5"]
    tokens = [record["tokens"] for record in generated(capsys, tuned, *asked)]
    assert tokens == texts_of_transformers(back, prompts, new=5)


def test_resume_of_another_model(tuned: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tuned.with_name("hf"), tmp_path / "other")
    models.change_json(other / "config.json", layer_norm_epsilon=0.1)
    words = f"{RATES} --train-iters 6 --load {tuned}"
    said = train(tuned.parent, other, words, code=2)
    assert field_of(said) == "--hf-model"
    assert all(each in said for each in ("layer_norm_epsilon", "0.1", "1e-05"))
