"""Models that were trained here are exported, and imported ones are trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import verify
from megatron.data.tokenizer import build_tokenizer
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, whole_logits
from tests.data.samples import write_data_of_tokenizer, write_sentences
from tests.programs import SHAPE, newest, pretrain
from tests.refusals import field_of
from tests.tools.convert.models import WRITERS, imported, weights_of, write_vocabulary
from tests.tools.texts import generated
from tools.checkpoint import show
from tools.checkpoint import verify as verify_files
from tools.convert_hf import export_model

LEARNS = "--lr 1e-2 --lr-warmup-iters 0"
STILL = "--lr 1e-30 --min-lr 0 --weight-decay 0"


def train(
    folder: Path, kind: str, words: str, *, world: int = 1, code: int = 0, shape: str = SHAPE
) -> str:
    """The output of three steps on random data of the kind's tokenizer; --save is the folder's
    "trained". code: with which they end."""
    random, prefix = np.random.default_rng(0), folder / f"{kind}_text"
    flags = f"--train-iters 3 --save {folder / 'trained'} {words}"
    if kind == "bert":
        file = str(write_vocabulary(folder))
        known = build_tokenizer("BertWordPieceLowerCase", file, None)
        documents = [random.integers(6, known.vocab_size, size=(7, 6)) for _ in range(30)]
        facts = {"fingerprint": known.fingerprint, "vocab_size": known.vocab_size}
        write_sentences(prefix, documents, **facts)
        flags += f" --vocab-file {file}"
    elif not prefix.with_suffix(".idx").exists():
        write_data_of_tokenizer(prefix, [[*random.integers(260, size=200), 260] for _ in range(8)])
    program = f"pretrain_{kind}"
    with pretrain(
        flags, world=world, folder=folder, program=program, data=prefix, shape=shape
    ) as run:
        assert run.wait() == [code] * world, run.text()
        return run.text()


@pytest.mark.parametrize(
    ("layout", "world"),
    [("--tensor-model-parallel-size 2", 2), ("--zero-stage 3 --global-batch-size 6", 3)],
)
@torch.no_grad()
def test_what_was_trained_at_several_ranks_is_the_same_model_in_transformers(
    tmp_path: Path, layout: str, world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeRO cuts rows of 12 anywhere: a file then has several slices of a tensor."""
    train(tmp_path, "gpt2", f"{LEARNS} {layout}", world=world, shape=f"{SHAPE} --hidden-size 12")
    export_model(str(tmp_path / "trained"), tmp_path / "back")
    checkpoint = newest(tmp_path / "trained")
    files = list(checkpoint.glob("shard_*"))
    stored = [key for file in files for key in load_file(file)]
    assert len(files) == world
    assert any("#" in key for key in stored) == ("zero" in layout)
    assert verify_files(checkpoint) == 0
    capsys.readouterr()
    show(checkpoint, json=True)
    shown = json.loads(capsys.readouterr().out)
    assert sum(len(each["slices"]) for each in shown["tensors"].values()) == len(stored)
    weights = weights_of(tmp_path / "back").values()
    assert shown["parameters"] == sum(each.numel() for each in weights)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(261, size=(4, 16)))
    ours = load_model(verify(checkpoint, serial_mesh()), serial_mesh(), torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float64)
    expected = theirs(tokens).logits
    found = whole_logits(ours, serial_mesh(), tokens)
    assert found.shape == expected.shape == (4, 16, 261)
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()
    words = ["--prompt", "in", "--greedy", "--max-new-tokens", "6"]
    (record,) = generated(capsys, tmp_path / "trained", *words)
    prompt = AutoTokenizer.from_pretrained(tmp_path / "back")("in", return_tensors="pt")
    whole = theirs.generate(**prompt, max_new_tokens=6, do_sample=False)[0].tolist()
    assert record["tokens"] == whole[-6:]


@pytest.mark.parametrize(("kind", "alone"), [("gpt2", False), ("gpt2", True), ("bert", False)])
def test_an_import_is_trained_on_and_never_resumed(tmp_path: Path, kind: str, alone: bool) -> None:
    """alone: of the weights, without a tokenizer."""
    step = imported(WRITERS[kind](tmp_path / "hf"), no_tokenizer=alone)
    words = f"--load {step.parent} {STILL}"
    assert field_of(train(tmp_path, kind, words, code=2)) == "--load"
    train(tmp_path, kind, f"--finetune {words}")
    if alone:
        return
    manifest = read_manifest(newest(tmp_path / "trained"))
    assert manifest["weights_of"] == read_manifest(step)["run"]
    export_model(str(tmp_path / "trained"), tmp_path / "back")
    one, other = weights_of(tmp_path / "hf"), weights_of(tmp_path / "back")
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
