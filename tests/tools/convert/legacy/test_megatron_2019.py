"""Checkpoints of Megatron-LM of 2019 and 2020 become ours: every weight and the logits of a plain
model, from every order and cut.

The old files are made up from whole weights of ours, by a code that shares nothing with what is
tested: what each rank held, under the old names.
"""

import argparse
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from tests import plain
from tests.data.samples import write_tokenizer
from tests.refusals import field_of, leaving_nothing, refusal
from tests.tiny import assert_exact
from tools.convert.legacy.megatron_2019 import POINTER
from tools.import_megatron import main

LAYERS, HIDDEN, HEADS, POSITIONS = 2, 32, 8, 16
VOCABULARY = 261  # of tests/data/samples.py's tokenizer
Rank = dict[str, Tensor]


# Parts of a layer by our names: the names of 2019, the shape of the weight, and what ranks cut.
LAYER: dict[str, tuple[str, tuple[int, ...], int | None]] = {
    "attention_norm": ("input_layernorm", (HIDDEN,), None),
    "attention.qkv": ("attention.query_key_value", (3, HIDDEN, HIDDEN), 1),
    "attention.output": ("attention.dense", (HIDDEN, HIDDEN), 1),
    "mlp_norm": ("post_attention_layernorm", (HIDDEN,), None),
    "mlp.up": ("mlp.dense_h_to_4h", (4 * HIDDEN, HIDDEN), 0),
    "mlp.down": ("mlp.dense_4h_to_h", (HIDDEN, 4 * HIDDEN), 1),
}
# Orders of [3, heads, size]: Q of all heads, then K, then V; Q, K and V of one number after
# another, and of one head after another.
ORDERS = ((0, 1, 2), (1, 2, 0), (1, 0, 2))


def our_weights(dtype: torch.dtype = torch.float32) -> Rank:
    """Random ones by the names of this project."""
    sizes = {
        f"transformer.layers.{n}.{name}": size
        for n in range(LAYERS)
        for name, (_, size, _) in LAYER.items()
    }
    shapes: dict[str, tuple[int, ...]] = {"word_embedding.weight": (VOCABULARY, HIDDEN)}
    shapes |= {"position_embedding.weight": (POSITIONS, HIDDEN)}
    for name, size in (sizes | {"final_norm": (HIDDEN,)}).items():
        shapes |= {f"{name}.weight": size, f"{name}.bias": size[:-1] or size}
    generator = torch.Generator().manual_seed(1)
    return {
        name: ("norm.weight" in name) + 0.2 * torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }


def old_weights(ranks: int, dtype: torch.dtype = torch.float32, version: int = 0) -> list[Rank]:
    """Slices of our weights on each rank, by the flat names of 2019."""
    parts: list[Rank] = [{} for _ in range(ranks)]
    for name, whole in our_weights(dtype).items():
        old = name.replace("final_norm", "transformer.final_layernorm")
        old, cuts = old.replace("_embedding.", "_embeddings."), [whole] * ranks
        for ours, (theirs, _, dim) in LAYER.items():
            if f".{ours}." in name:
                old = name.replace(ours, theirs)
                if ours == "attention.qkv":
                    heads = whole.unflatten(1, (ranks, HEADS // ranks, HIDDEN // HEADS))
                    order = (*ORDERS[version], *range(3, whole.dim() + 1))
                    cuts = [heads[:, rank].permute(order).flatten(0, 2) for rank in range(ranks)]
                elif dim is not None and dim < whole.dim():
                    cuts = [*whole.chunk(ranks, dim)]
        if "word" in name:  # padded to a multiple of 8 for each
            rows = -(-VOCABULARY // (8 * ranks)) * 8 * ranks
            cuts = [*F.pad(whole, (0, 0, 0, rows - VOCABULARY), value=0.1).chunk(ranks)]
        for part, cut in zip(parts, cuts, strict=True):
            part[old] = cut.clone()
    return parts


def nested(part: Rank, transformer: str = "transformer", attention: str = "attention") -> Any:
    """As the code of 2020 keeps it; later code says encoder and self_attention."""
    names = ("word_embeddings", "position_embeddings")
    embedding = {name: {"weight": part[f"{name}.weight"]} for name in names}
    layers = {
        name.removeprefix("transformer.").replace(".attention.", f".{attention}."): tensor
        for name, tensor in part.items()
        if name.startswith("transformer.")
    }
    return {"language_model": {"embedding": embedding, transformer: layers}}


LATER = partial(nested, transformer="encoder", attention="self_attention")


def old_args(ranks: int, **changes: Any) -> argparse.Namespace:
    known = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS, "layernorm_epsilon": 1e-5,
        "make_vocab_size_divisible_by": 8, "model_parallel_size": ranks, "hidden_dropout": 0.25,
        "params_dtype": torch.half, "save": "checkpoints", "lr": None,
    }  # fmt: skip
    return argparse.Namespace(**(known | changes))


def write_old(
    folder: Path, parts: list[Rank], *, model: Callable[[Rank], Any] = nested,
    zipped: bool = False, iteration: str = "250000", **known: Any,
) -> Path:  # fmt: skip
    """A --save directory with one file per rank, which holds all of a running training. known: args
    and checkpoint_version, which the files of some versions have."""
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.ones(2, 3)}}, "param_groups": []}
    drawn = torch.arange(816, dtype=torch.uint8)
    others = {
        "iteration": 250000, "optimizer": {"optimizer": optimizer, "loss_scaler": 65536.0},
        "lr_scheduler": {"max_lr": 1.5e-4, "decay_style": "cosine"},
        "random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(), "cuda_rng_state": drawn,
        "rng_tracker_states": {"model-parallel-rng": drawn},
        **{name: value for name, value in known.items() if value is not None},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)
    name = iteration if iteration == "release" else f"iter_{int(iteration):07d}"
    for number, part in enumerate(parts):
        file = folder / name / f"mp_rank_{number:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        content = {"model": model(part), **others}
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return folder


NAN = float("nan")
TOKENS = torch.arange(2 * POSITIONS).mul(37).remainder(VOCABULARY).view(2, POSITIONS)
FLAGS = "--num-attention-heads 8 --make-vocab-size-divisible-by 8"


def words_of(source: Path, to: Path, flags: str = "") -> list[str]:
    vocabulary, merges = write_tokenizer(to.parent)
    words = ["--from", str(source), "--output", str(to), "--vocab-file", vocabulary]
    return [*words, "--merge-file", merges, *flags.split()]


def run(source: Path, to: Path, flags: str = "") -> Path:
    main(words_of(source, to, flags), {})
    return to / "step_00000000"


def assert_stored(step: Path, weights: Rank) -> None:
    stored = {f"model.{name}": whole for name, whole in weights.items()}
    assert_exact(load_file(step / "shard_00000.safetensors"), stored)


def assert_same_model(step: Path) -> None:
    expected = our_weights()
    assert_stored(step, expected)
    positions = torch.arange(POSITIONS).expand_as(TOKENS)
    batch = SimpleNamespace(tokens=TOKENS, positions=positions, document_starts=None)
    logits = plain.GPT2(expected, HEADS)(batch).detach()
    mesh = serial_mesh()
    found = whole_logits(load_model(verify(step, mesh), mesh, torch.float64), mesh, TOKENS)
    torch.testing.assert_close(found, logits, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_versions(tmp_path: Path, version: int, ranks: int) -> None:
    parts = old_weights(ranks, version=version)
    known = {"args": old_args(ranks), "checkpoint_version": float(version)}
    source = write_old(tmp_path / "old", parts, **known)
    assert_same_model(run(source, tmp_path / "new"))


def wrapped(part: Rank) -> Any:
    """A model that was saved with its wrappers of fp16 and data parallelism."""
    return {f"module.module.{name}": tensor for name, tensor in part.items()}


@pytest.mark.parametrize(
    ("model", "zipped"), [(nested, False), (dict, True), (wrapped, False), (LATER, True)]
)
def test_names_and_formats(tmp_path: Path, model: Callable[[Rank], Any], zipped: bool) -> None:
    parts = old_weights(2)
    source = write_old(tmp_path / "old", parts, model=model, zipped=zipped, iteration="release")
    assert_same_model(run(source, tmp_path / "new", FLAGS))


def test_iteration_or_file(tmp_path: Path) -> None:
    parts = old_weights(1)
    folder = write_old(tmp_path / "old", parts, args=old_args(1)) / "iter_0250000"
    for number, source in enumerate((folder, folder / "mp_rank_00" / "model_optim_rng.pt")):
        assert_same_model(run(source, tmp_path / f"new_{number}"))


def test_settings(tmp_path: Path) -> None:
    parts = old_weights(1)
    args = old_args(1, layernorm_epsilon=0.01, bias_gelu_fusion=False, openai_gelu=True)
    with_args = run(write_old(tmp_path / "a", parts, args=args), tmp_path / "new_a")
    flags = f"{FLAGS} --layernorm-epsilon 0.01"
    without = run(write_old(tmp_path / "b", parts), tmp_path / "new_b", flags)
    sections = [read_manifest(step)["config"]["model"] for step in (with_args, without)]
    assert sections[0].pop("hidden_dropout") == 0.25
    assert sections[1].pop("hidden_dropout") == 0.1
    assert sections[0] == sections[1]
    assert sections[0]["layernorm_epsilon"] == 0.01


def test_fp16_and_manifest(tmp_path: Path) -> None:
    args = old_args(2, bias_gelu_fusion=False, openai_gelu=False)
    parts = old_weights(2, torch.float16)
    step = run(write_old(tmp_path / "old", parts, args=args), tmp_path / "new")
    assert_stored(step, our_weights(torch.float16))
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


def second_rank(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = folder / FILE.replace("0/", "1/")
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)

    return act


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
    ("hidden_dropout 0.5, of rank 0 0.25",
     {"files": second_rank(lambda it: setattr(it["args"], "hidden_dropout", 0.5))}),
    ("checkpoint_version 2", {"files": second_rank(lambda it: it.update(checkpoint_version=2))}),
    (FILE, {"files": lambda folder: torch.save({"state_dict": {}}, folder / FILE)}),
]  # fmt: skip


@pytest.mark.parametrize(("named", "wrong"), REFUSED)
def test_refusals(tmp_path: Path, named: str, wrong: dict[str, Any]) -> None:
    parts = old_weights(2)
    wrong.get("parts", len)(parts)
    changes = wrong.get("args", {})
    args = None if changes is None else old_args(2, **changes)
    known = {"args": args, "checkpoint_version": wrong.get("version")}
    old = write_old(tmp_path / "old", parts, model=dict, **known)
    wrong.get("files", str)(old / "iter_0250000")
    words = words_of(old, tmp_path / "new", wrong.get("flags", ""))
    error = refusal(lambda: program(words))
    if named.startswith("--"):
        assert field_of(error) == named
    else:
        assert named in str(error)


def test_former_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_old(tmp_path / "old", old_weights(2), args=old_args(2, num_layers=3))
    words = ["--to" if word == "--output" else word for word in words_of(source, tmp_path / "new")]
    assert "num_layers 3" in str(refusal(lambda: main(words, {})))
    assert capsys.readouterr().err.count("--output") == 1
