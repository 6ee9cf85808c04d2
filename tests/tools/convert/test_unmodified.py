"""A model that --model huggingface trained is written back as the folder that it came from."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.save import save_checkpoint
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_newest
from tests.data.samples import write_data_of_tokenizer
from tests.dist import Pool
from tests.models.test_hf_weights import CASES, Case, rewrite, section_of, state_of, write_folder
from tests.programs import newest, pretrain
from tests.refusals import field_of, refusal
from tests.tiny import VOCABULARY
from tests.tools.convert.models import assert_same_weights, change_json, json_of, write_model
from tools.convert.compare import compare_logits
from tools.convert.exporting import write_unmodified
from tools.convert_hf import export_model
from tools.generate import main as generate_main

PROGRAM = "--model huggingface"
STILL = "--train-iters 1 --lr 1e-30 --min-lr 0 --weight-decay 0 --lr-warmup-iters 0"


def save(folders: dict[str, str], to: str, tensor_size: int) -> None:
    """A checkpoint of each folder's weights, as a run makes it before its first step."""
    for name, folder in folders.items():
        section = section_of(Path(folder), CASES[name])
        state = state_of(section, tensor_size, CASES[name].dtype, draws=False)
        state.load_folder(folder)
        facts = {
            "kind": section.kind,
            "config": {"model": asdict(section), "data": {"tokenizer_type": "GPT2BPETokenizer"}},
            "vocab_size": VOCABULARY,
            "tokenizer": "",
        }
        files = section.files(None)
        place = Path(to) / Path(folder).name
        save_checkpoint(place, 0, state.slices(), facts | state.facts(), state.mesh, files)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, gloo: Pool) -> dict[str, tuple[Path, Path]]:
    """(folder, checkpoints that two ranks made of it) of every case."""
    place = tmp_path_factory.mktemp("folders")
    cases = {name: case._replace(change=dict) for name, case in CASES.items()}
    folders = {
        name: str(write_folder(place / str(number), case))
        for number, (name, case) in enumerate(cases.items())
    }
    gloo.run(2, save, folders, str(place / "checkpoints"), 2)
    return {
        name: (Path(folder), place / "checkpoints" / Path(folder).name)
        for name, folder in folders.items()
    }


def saved_by_transformers(folder: Path, case: Case, to: Path) -> Path:
    model = getattr(transformers, case.auto_class).from_pretrained(folder)
    model.save_pretrained(to)
    return to


@pytest.mark.parametrize("name", CASES)
def test_the_export_has_the_names_and_bits_that_transformers_writes(
    made: dict[str, tuple[Path, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    folder, checkpoints = made[name]
    export_model(str(checkpoints), tmp_path / "back")  # compares the logits
    by_them = saved_by_transformers(folder, CASES[name], tmp_path / "by_them")
    assert_same_weights(by_them, tmp_path / "back")
    if CASES[name].saved_class is None:
        assert_same_weights(folder, tmp_path / "back")
    ours, theirs = (json_of(each / "config.json") for each in (tmp_path / "back", by_them))
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


def test_a_large_model_is_written_in_several_files(
    made: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, checkpoints = made["GPT-2"]
    checkpoint = load_newest([newest(checkpoints)], serial_mesh())[0]
    write_unmodified(tmp_path, checkpoint, shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_same_weights(folder, tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def damaged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: x * 1.0001 if "ln_f" in key else x for key, x in tensors.items()}


def test_another_model_is_no_result(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    _, checkpoints = made["GPT-2"]
    checkpoint = load_newest([newest(checkpoints)], serial_mesh())[0]
    write_unmodified(tmp_path, checkpoint)
    rewrite(tmp_path, damaged)
    error = refusal(lambda: compare_logits(newest(checkpoints), tmp_path, None))
    assert field_of(error) == str(newest(checkpoints))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A GPT-2 with a tokenizer, fine-tuned at two ranks by the program, resumed without its folder
    and exported; "still" is the export of a run that changed nothing."""
    place = tmp_path_factory.mktemp("tuned")
    numbers = np.random.default_rng(0)
    write_data_of_tokenizer(
        place / "text_document",
        [[*numbers.integers(260, size=200).tolist(), 260] for _ in range(8)],
    )
    folder = write_model(place / "hf")
    moved = shutil.copytree(folder, place / "moved")
    found = {"folder": folder}

    def run(words: str, world: int, is_cut: bool = True) -> None:
        with pretrain(
            f"--tensor-model-parallel-size {world if is_cut else 1} {words}",
            world=world,
            folder=place,
            program="pretrain",
            data=place / "text_document",
            shape=f"{PROGRAM} --hf-model {moved}",
        ) as started:
            assert started.wait() == [0] * world, started.text()

    run(f"{STILL} --save {place / 'still'} --zero-stage 3", 2, is_cut=False)
    words = f"--lr 1e-2 --lr-warmup-iters 0 --lr-decay-iters 4 --save {place / 'run'}"
    run(f"{words} --train-iters 2", 2)
    shutil.rmtree(moved)
    run(f"{words} --train-iters 4 --load {place / 'run'}", 1)
    for name in ("still", "run"):
        found[name] = place / f"{name}_exported"
        export_model(str(place / name), found[name])
        found[f"{name} checkpoints"] = place / name
    return found


def test_a_run_that_changes_nothing_is_exported_as_it_was(tuned: dict[str, Path]) -> None:
    assert_same_weights(tuned["folder"], tuned["still"])
    names = {each.name for each in tuned["folder"].iterdir()}
    assert names == {each.name for each in tuned["still"].iterdir()}
    for name in names - {"config.json", "model.safetensors"}:
        assert (tuned["folder"] / name).read_bytes() == (tuned["still"] / name).read_bytes(), name


def test_a_resumed_run_is_exported_with_the_files_of_the_folder_that_is_gone(
    tuned: dict[str, Path],
) -> None:
    assert read_manifest(newest(tuned["run checkpoints"]))["counters"]["step"] == 4
    names = {each.name for each in tuned["folder"].iterdir()}
    assert names == {each.name for each in tuned["run"].iterdir()}
    with pytest.raises(AssertionError):
        assert_same_weights(tuned["still"], tuned["run"])


def test_another_model_is_not_resumed(tuned: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(tuned["folder"], tmp_path / "other")
    change_json(other / "config.json", layer_norm_epsilon=0.1)
    words = f"--train-iters 6 --lr-decay-iters 6 --load {tuned['run checkpoints']}"
    with pretrain(
        words,
        folder=tmp_path,
        program="pretrain",
        data=tuned["folder"].with_name("text_document"),
        shape=f"{PROGRAM} --hf-model {other}",
    ) as started:
        assert started.wait() == [2]
        said = started.text()
    assert field_of(said) == "--hf-model"
    assert all(each in said for each in ("layer_norm_epsilon", "0.1", "1e-05"))


def test_a_program_goes_on_with_a_text_as_the_exported_folder(
    tuned: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--load", str(tuned["run checkpoints"]), "--prompt", "the", "in the", "--greedy"]
    generate_main([*words, "--max-new-tokens", "5"], {})
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned["run"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned["run"])
    for record in json.loads(capsys.readouterr().out):
        ids = torch.tensor([tokenizer(record["prompt"]).input_ids])
        whole = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=260)[0]
        assert record["tokens"] == [each for each in whole[ids.shape[1] :].tolist() if each != 260]
