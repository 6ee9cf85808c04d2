"""What was trained here, or goes on here from what was imported."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import verify
from megatron.data.indexed import token_dtype
from megatron.data.tokenizer import GPT2BPETokenizer
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, whole_logits
from tests.data.samples import write_tokenizer
from tests.programs import SHAPE, newest, pretrain
from tests.tools.convert.models import weights_of, write_model
from tests.tools.texts import generated
from tools.checkpoint import show
from tools.checkpoint import verify as verify_files
from tools.convert_hf import export_model, import_model
from tools.data_files import IndexedDatasetWriter


@pytest.fixture
def flags(tmp_path: Path) -> str:
    """Those of a data set of random ids and of its tokenizer."""
    files = write_tokenizer(tmp_path)
    tokenizer = GPT2BPETokenizer(*files)
    dtype = token_dtype(tokenizer.vocab_size)
    numbers = np.random.default_rng(0)
    with IndexedDatasetWriter(str(tmp_path / "data"), dtype) as writer:
        for _ in range(8):
            ids = [*numbers.integers(tokenizer.eod, size=200), tokenizer.eod]
            writer.add(np.array(ids, dtype), np.array([len(ids)], np.int32))
        writer.commit(
            tokenizer_type=tokenizer.kind,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            shuffled=True,
        )
    data = f"--data-path {tmp_path / 'data'} --vocab-file {files[0]} --merge-file {files[1]}"
    return f"{data} --train-iters 3 --lr 1e-2 --lr-warmup-iters 0 --save {tmp_path / 'trained'}"


@pytest.mark.parametrize(
    ("layout", "world"),
    [("--tensor-model-parallel-size 2", 2), ("--zero-stage 3 --global-batch-size 6", 3)],
)
@torch.no_grad()
def test_what_was_trained_at_several_ranks_is_the_same_model_in_transformers(
    tmp_path: Path, flags: str, layout: str, world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeRO cuts rows of 12 anywhere: a file then has several slices of a tensor."""
    words = f"{flags} {layout}"
    shape = f"{SHAPE} --hidden-size 12"
    with pretrain(words, world=world, folder=tmp_path, shape=shape) as run:
        assert run.wait() == [0] * world, run.text()
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


def test_an_import_is_fine_tuned_and_never_resumed(tmp_path: Path, flags: str) -> None:
    import_model(str(write_model(tmp_path / "hf")), tmp_path / "ours")
    words = f"{flags} --load {tmp_path / 'ours'}"
    with pretrain(words, folder=tmp_path) as run:
        assert run.wait() == [2]
        assert "--finetune works" in run.text()
    with pretrain(
        f"{words} --finetune --lr 1e-30 --min-lr 0 --weight-decay 0", folder=tmp_path
    ) as run:
        assert run.wait() == [0], run.text()
    manifest = read_manifest(newest(tmp_path / "trained"))
    imported = read_manifest(tmp_path / "ours" / "step_00000000")
    assert manifest["weights_of"] == imported["run"]
    export_model(str(tmp_path / "trained"), tmp_path / "back")
    one, other = weights_of(tmp_path / "hf"), weights_of(tmp_path / "back")
    assert all(one[name].equal(other[name]) for name in one)
