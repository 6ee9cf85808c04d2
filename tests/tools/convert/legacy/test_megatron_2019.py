"""Checkpoints of Megatron-LM of 2019 and 2020 become ours: the same logits as the old model's, at
every order and cut.

The files are made up, and the old model is written anew: from what each rank holds, under the old
names, each rank its heads and columns, sums over ranks. It shares nothing with what is tested.
"""

import argparse
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import verify
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, whole_logits
from tests.data.samples import write_tokenizer
from tests.refusals import field_of, leaving_nothing, refusal
from tools.convert.legacy.megatron_2019 import POINTER
from tools.import_megatron import main

LAYERS, HIDDEN, HEADS, POSITIONS = 2, 32, 8, 16
VOCABULARY = 261  # of tests/data/samples.py's tokenizer
Rank = dict[str, Tensor]


def old_weights(
    ranks: int, dtype: torch.dtype = torch.float32, divisible_by: int = 8
) -> list[Rank]:
    """Random weights of each rank, by the flat names of 2019."""
    generator = torch.Generator().manual_seed(ranks)

    def drawn(*shape: int, scale: float = 0.2) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    h, own = HIDDEN, HIDDEN // ranks
    rows = -(-VOCABULARY // (divisible_by * ranks)) * divisible_by
    parts: list[Rank] = [{"word_embeddings.weight": drawn(rows, h)} for _ in range(ranks)]
    shared = {"position_embeddings.weight": drawn(POSITIONS, h)}
    for n in range(LAYERS):
        place = f"transformer.layers.{n}"
        for part in parts:
            part[f"{place}.attention.query_key_value.weight"] = drawn(3 * own, h)
            part[f"{place}.attention.query_key_value.bias"] = drawn(3 * own)
            part[f"{place}.attention.dense.weight"] = drawn(h, own)
            part[f"{place}.mlp.dense_h_to_4h.weight"] = drawn(4 * own, h)
            part[f"{place}.mlp.dense_h_to_4h.bias"] = drawn(4 * own)
            part[f"{place}.mlp.dense_4h_to_h.weight"] = drawn(h, 4 * own)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shared[f"{place}.{name}.weight"] = 1 + drawn(h)
            shared[f"{place}.{name}.bias"] = drawn(h)
        shared[f"{place}.attention.dense.bias"] = drawn(h)
        shared[f"{place}.mlp.dense_4h_to_h.bias"] = drawn(h)
    shared["transformer.final_layernorm.weight"] = 1 + drawn(h)
    shared["transformer.final_layernorm.bias"] = drawn(h)
    return [part | shared for part in parts]


def nested(part: Rank, transformer: str = "transformer", attention: str = "attention") -> Any:
    """As the code of 2020 keeps it; later code says encoder and self_attention."""
    prefix = "transformer."
    return {
        "language_model": {
            "embedding": {
                name: {"weight": part[f"{name}.weight"]}
                for name in ("word_embeddings", "position_embeddings")
            },
            transformer: {
                name.removeprefix(prefix).replace(".attention.", f".{attention}."): tensor
                for name, tensor in part.items()
                if name.startswith(prefix)
            },
        }
    }


def old_args(ranks: int, **changes: Any) -> argparse.Namespace:
    known = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "layernorm_epsilon": 1e-5,
        "make_vocab_size_divisible_by": 8,
        "model_parallel_size": ranks,
        "hidden_dropout": 0.25,
        "params_dtype": torch.half,
        "save": "checkpoints",
        "lr": None,
    }
    return argparse.Namespace(**(known | changes))


def everything(model: Any, args: Any, version: float | None) -> dict[str, Any]:
    """All that a file of a running training holds."""
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.ones(2, 3)}}, "param_groups": []}
    return {
        "model": model,
        **({} if args is None else {"args": args}),
        **({} if version is None else {"checkpoint_version": version}),
        "iteration": 250000,
        "total_iters": 250000,
        "optimizer": {"optimizer": optimizer, "loss_scaler": 65536.0},
        "lr_scheduler": {"max_lr": 1.5e-4, "decay_style": "cosine"},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.arange(816, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(816, dtype=torch.uint8)},
    }


def write_old(
    folder: Path,
    parts: list[Rank],
    *,
    args: Any = None,
    version: float | None = None,
    model: Callable[[Rank], Any] = nested,
    zipped: bool = False,
    iteration: str = "250000",
) -> Path:
    """A --save directory with one file per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)
    name = iteration if iteration == "release" else f"iter_{int(iteration):07d}"
    for number, part in enumerate(parts):
        file = folder / name / f"mp_rank_{number:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        content = everything(model(part), args, version)
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return folder


def old_logits(parts: list[Rank], version: int, tokens: Tensor, eps: float = 1e-5) -> Tensor:
    """Logits [b, s, v] fp64, of the padded vocabulary, of tokens [b, s]."""
    ranks = [{name: tensor.double() for name, tensor in part.items()} for part in parts]
    words = torch.cat([rank["word_embeddings.weight"] for rank in ranks])
    x = words[tokens] + ranks[0]["position_embeddings.weight"][: tokens.shape[1]]
    for n in range(LAYERS):
        place = f"transformer.layers.{n}"
        inner = norm(x, ranks[0], f"{place}.input_layernorm", eps)
        x = x + ranks[0][f"{place}.attention.dense.bias"]
        x = x + sum(attention(inner, rank, place, version, len(ranks)) for rank in ranks)
        inner = norm(x, ranks[0], f"{place}.post_attention_layernorm", eps)
        x = (
            x
            + ranks[0][f"{place}.mlp.dense_4h_to_h.bias"]
            + sum(mlp(inner, r, place) for r in ranks)
        )
    return norm(x, ranks[0], "transformer.final_layernorm", eps) @ words.T


def norm(x: Tensor, rank: Rank, place: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * rank[f"{place}.weight"] + rank[f"{place}.bias"]


def mlp(x: Tensor, rank: Rank, place: str) -> Tensor:
    up = x @ rank[f"{place}.mlp.dense_h_to_4h.weight"].T + rank[f"{place}.mlp.dense_h_to_4h.bias"]
    return F.gelu(up, approximate="tanh") @ rank[f"{place}.mlp.dense_4h_to_h.weight"].T


def attention(x: Tensor, rank: Rank, place: str, version: int, ranks: int) -> Tensor:
    """A rank's heads, through its part of the output layer, without the bias."""
    place = f"{place}.attention"
    mixed = x @ rank[f"{place}.query_key_value.weight"].T + rank[f"{place}.query_key_value.bias"]
    heads, size = HEADS // ranks, HIDDEN // HEADS
    if version == 0:  # Q of all heads, then K, then V
        triple = [part.unflatten(-1, (heads, size)) for part in mixed.chunk(3, -1)]
    elif version == 1:  # Q, K and V of one number after another
        triple = [mixed[..., kind::3].unflatten(-1, (heads, size)) for kind in range(3)]
    else:  # Q, K and V of one head after another
        triple = list(mixed.unflatten(-1, (heads, 3 * size)).split(size, -1))
    q, k, v = (part.transpose(1, 2) for part in triple)
    score = q @ k.transpose(-1, -2) / size**0.5
    later = torch.ones(score.shape[-2:]).triu(1).bool()
    mixed = score.masked_fill(later, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2) @ rank[f"{place}.dense.weight"].T


ROOT = Path(__file__).parents[4]
NAN = float("nan")
TOKENS = torch.arange(2 * POSITIONS).mul(37).remainder(VOCABULARY).view(2, POSITIONS)
FLAGS = "--num-attention-heads 8 --make-vocab-size-divisible-by 8"


def words_of(source: Path, to: Path, flags: str = "") -> list[str]:
    vocabulary, merges = write_tokenizer(to.parent)
    words = ["--from", str(source), "--output", str(to), "--vocab-file", vocabulary]
    return [*words, "--merge-file", merges, *flags.split()]


def run(source: Path, to: Path, flags: str = "") -> Path:
    """Import; the new checkpoint's step folder."""
    main(words_of(source, to, flags), {})
    return to / "step_00000000"


def our_logits(step: Path) -> Tensor:
    mesh = serial_mesh()
    return whole_logits(load_model(verify(step, mesh), mesh, torch.float64), mesh, TOKENS)


def assert_same_model(step: Path, parts: list[Rank], version: int, eps: float = 1e-5) -> None:
    expected = old_logits(parts, version, TOKENS, eps)[..., :VOCABULARY]
    torch.testing.assert_close(our_logits(step), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_logits(tmp_path: Path, version: int, ranks: int) -> None:
    parts = old_weights(ranks)
    source = write_old(tmp_path / "old", parts, args=old_args(ranks), version=float(version))
    assert_same_model(run(source, tmp_path / "new"), parts, version)
    expected = old_logits(parts, version, TOKENS)
    for other in {0, 1, 2} - {version}:
        assert (old_logits(parts, other, TOKENS) - expected).abs().max() > 0.01


def flat(part: Rank) -> Any:
    return dict(part)


def wrapped(part: Rank) -> Any:
    """A model that was saved with its wrappers of fp16 and data parallelism."""
    return {f"module.module.{name}": tensor for name, tensor in part.items()}


def later(part: Rank) -> Any:
    return nested(part, "encoder", "self_attention")


@pytest.mark.parametrize(
    ("model", "zipped"), [(nested, False), (flat, True), (wrapped, False), (later, True)]
)
def test_names_and_formats(tmp_path: Path, model: Callable[[Rank], Any], zipped: bool) -> None:
    parts = old_weights(2)
    source = write_old(tmp_path / "old", parts, model=model, zipped=zipped, iteration="release")
    assert_same_model(run(source, tmp_path / "new", FLAGS), parts, 0)


def test_iteration_or_file(tmp_path: Path) -> None:
    parts = old_weights(1)
    folder = write_old(tmp_path / "old", parts, args=old_args(1)) / "iter_0250000"
    for number, source in enumerate((folder, folder / "mp_rank_00" / "model_optim_rng.pt")):
        assert_same_model(run(source, tmp_path / f"new_{number}"), parts, 0)


def test_settings(tmp_path: Path) -> None:
    parts = old_weights(1)
    args = old_args(1, layernorm_epsilon=0.01)
    with_args = run(write_old(tmp_path / "a", parts, args=args), tmp_path / "new_a")
    flags = f"{FLAGS} --layernorm-epsilon 0.01"
    without = run(write_old(tmp_path / "b", parts), tmp_path / "new_b", flags)
    sections = [read_manifest(step)["config"]["model"] for step in (with_args, without)]
    assert sections[0].pop("hidden_dropout") == 0.25
    assert sections[1].pop("hidden_dropout") == 0.1
    assert sections[0] == sections[1]
    assert_same_model(with_args, parts, 0, eps=0.01)
    assert not torch.allclose(our_logits(with_args), old_logits(parts, 0, TOKENS)[..., :VOCABULARY])


def test_fp16_and_manifest(tmp_path: Path) -> None:
    parts = old_weights(2, torch.float16)
    args = old_args(2, bias_gelu_fusion=False, openai_gelu=False)
    step = run(write_old(tmp_path / "old", parts, args=args), tmp_path / "new")
    stored = load_file(step / "shard_00000.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    words = torch.cat([part["word_embeddings.weight"] for part in parts])
    assert torch.equal(stored["model.word_embedding.weight"], words[:VOCABULARY])
    manifest = read_manifest(step)
    assert manifest["precision"] == "fp16"
    assert manifest["config"]["model"]["activation"] == "gelu"  # else that of tanh, as above
    assert manifest["imported_from"].startswith("Megatron-LM, ")
    assert (step / "vocab.json").read_bytes() == (tmp_path / "vocab.json").read_bytes()


program = leaving_nothing(partial(main, environ={}))
Break = Callable[[list[Rank]], object]
FILE = "mp_rank_00/model_optim_rng.pt"


def change(name: str, to: Callable[[Tensor], Tensor], ranks: tuple[int, ...] = (0,)) -> Break:
    return lambda parts: [parts[rank].update({name: to(parts[rank][name])}) for rank in ranks]


def add(name: str) -> Break:
    return lambda parts: [part.update({name: torch.ones(HIDDEN)}) for part in parts]


def doubled(folder: Path) -> None:
    """2^60 names, by dicts that each stand in two places."""
    model: dict[str, Any] = {}
    for _ in range(60):
        model = {"module": model, "encoder": model}
    torch.save({"model": model}, folder / FILE)


DENSE = "transformer.layers.1.attention.dense.bias"
QKV = "transformer.layers.0.attention.query_key_value.weight"
WORDS = "word_embeddings.weight"
POST_NORM = "apply_residual_connection_post_layernorm"
# The name in the error, and the fault of the checkpoint or the flags.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("layers.1.attention.dense.bias", {"parts": change(DENSE, lambda t: t + 1e-6, (1,))}),
    ("layers.1.attention.dense.bias", {"parts": lambda parts: parts[1].pop(DENSE)}),
    ("layers.1.attention.dense.bias", {"parts": add(f"module.{DENSE}")}),
    ("[45, 32]", {"parts": change(QKV, lambda t: t[:-3], (1,))}),
    ("float16", {"parts": change(QKV, lambda t: t.half())}),
    ("attention.qkv.weight", {"parts": change(QKV, lambda t: t * NAN)}),
    (FILE, {"parts": change(QKV, lambda t: t.fill_(1e38))}),
    ("layers.1.attention.rotary", {"parts": add("transformer.layers.1.attention.rotary.weight")}),
    ("decoder.layers.0.input", {"parts": add("decoder.layers.0.input_layernorm.weight")}),
    ("num_layers 2", {"parts": add("transformer.layers.7.input_layernorm.bias")}),
    ("pooler", {"parts": add("language_model.pooler.dense.weight")}),
    ("lm_head", {"parts": add("lm_head.bias")}),
    ("binary_head", {"parts": add("binary_head.weight")}),
    ("tokentype_embeddings", {"parts": add("tokentype_embeddings.weight")}),
    ("256", {"parts": change(WORDS, lambda t: t[:128], (0, 1))}),
    ("288", {"parts": change(WORDS, lambda t: torch.cat([t, t[:8]]), (0, 1))}),
    ("--num-attention-heads", {"args": None}),
    ("--num-attention-heads", {"args": None, "flags": "--num-attention-heads 5"}),
    ("--num-attention-heads", {"args": None, "flags": "--num-attention-heads 0"}),
    ("512", {"args": None, "flags": "--num-attention-heads 8"}),
    ("--num-attention-heads", {"flags": "--num-attention-heads 2"}),
    ("--layernorm-epsilon", {"flags": "--layernorm-epsilon 0.5"}),
    ("num_layers 3", {"args": {"num_layers": 3}}),
    ("hidden_size 64", {"args": {"hidden_size": 64}}),
    ("model_parallel_size 4", {"args": {"model_parallel_size": 4}}),
    ("num_attention_heads", {"args": {"num_attention_heads": torch.half}}),
    (POST_NORM, {"args": {POST_NORM: True}}),
    *((f"checkpoint_version {each!r}", {"version": each}) for each in (1.5, -1, "2", NAN)),
    ("mp_rank_01/model_optim_rng.pt", {"files": lambda f: (f / FILE.replace("0/", "1/")).unlink()}),
    ("--from", {"files": lambda f: (f / "mp_rank_01").rename(f / "mp_rank_00_001")}),
    ("--from", {"files": shutil.rmtree}),
    ("--from", {"files": lambda f: shutil.rmtree(f.parent)}),
    ("../up", {"files": lambda f: (f.parent / POINTER).write_text("../up")}),
    (FILE, {"files": lambda folder: (folder / FILE).write_bytes(b"")}),
    (FILE, {"files": lambda folder: (folder / FILE).write_bytes(b"hello, world\n" * 9)}),
    ("two places", {"files": doubled}),
    (FILE, {"files": lambda folder: torch.save({"state_dict": {}}, folder / FILE)}),
]


@pytest.mark.parametrize(("named", "wrong"), REFUSED)
def test_refusals(tmp_path: Path, named: str, wrong: dict[str, Any]) -> None:
    parts = old_weights(2)
    wrong.get("parts", len)(parts)
    changes = wrong.get("args", {})
    args = None if changes is None else old_args(2, **changes)
    old = write_old(tmp_path / "old", parts, args=args, version=wrong.get("version"), model=flat)
    wrong.get("files", str)(old / "iter_0250000")
    words = words_of(old, tmp_path / "new", wrong.get("flags", ""))
    error = refusal(lambda: program(words))
    if named.startswith("--"):
        assert field_of(error) == named
    else:
        assert named in str(error)


def test_program(tmp_path: Path) -> None:
    source = write_old(tmp_path / "old", old_weights(2), args=old_args(2, num_layers=3))
    words = ["--to" if word == "--output" else word for word in words_of(source, tmp_path / "new")]
    command = [sys.executable, "tools/import_megatron.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "num_layers 3" in done.stderr
    assert done.stderr.count("--output") == 1
