"""Old checkpoints become ours: the same logits as the old model's, at every order and cut."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import verify
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, whole_logits
from tests.data.samples import write_tokenizer
from tests.refusals import leaving_nothing, refusal
from tests.tools.convert.legacy.megatron_files import (
    HIDDEN,
    POSITIONS,
    VOCABULARY,
    Rank,
    nested,
    old_args,
    old_logits,
    old_weights,
    write_old,
)
from tools.convert.legacy.megatron_2019 import main

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


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_logits_are_the_old_models_at_every_order_and_cut(
    tmp_path: Path, version: int, ranks: int
) -> None:
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


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("model", [nested, flat, wrapped, later])
def test_names_of_all_years_in_both_formats(
    tmp_path: Path, model: Callable[[Rank], Any], zipped: bool
) -> None:
    parts = old_weights(2)
    source = write_old(tmp_path / "old", parts, model=model, zipped=zipped, iteration="release")
    assert_same_model(run(source, tmp_path / "new", FLAGS), parts, 0)


def test_an_iteration_or_a_file_is_read_as_well(tmp_path: Path) -> None:
    parts = old_weights(1)
    folder = write_old(tmp_path / "old", parts, args=old_args(1)) / "iter_0250000"
    for number, source in enumerate((folder, folder / "mp_rank_00" / "model_optim_rng.pt")):
        assert_same_model(run(source, tmp_path / f"new_{number}"), parts, 0)


def test_settings_come_from_args_and_else_from_flags(tmp_path: Path) -> None:
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


def test_fp16_stays_fp16_and_the_manifest_tells_where_it_is_from(tmp_path: Path) -> None:
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


def error_of_import(source: Path, to: Path, flags: str = "") -> str:
    return str(refusal(lambda: program(words_of(source, to, flags))))


Break = Callable[[list[Rank]], Any]


def change(name: str, rank: int, to: Callable[[Tensor], Tensor | None]) -> Break:
    """Replaces a tensor of one rank, or removes it."""

    def broken(parts: list[Rank]) -> None:
        new = to(parts[rank].pop(name))
        if new is not None:
            parts[rank][name] = new

    return broken


def add(name: str, count: int = 2) -> Break:
    def broken(parts: list[Rank]) -> None:
        for part in parts[:count]:
            part[name] = torch.ones(HIDDEN)

    return broken


DENSE = "transformer.layers.1.attention.dense.bias"
QKV = "transformer.layers.0.attention.query_key_value.weight"


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (change(DENSE, 1, lambda t: t + 1e-6), DENSE.removeprefix("transformer.")),
        (change(DENSE, 1, lambda _: None), DENSE.removeprefix("transformer.")),
        (change(QKV, 1, lambda t: t[:-3]), "[45, 32]"),
        (change(QKV, 0, lambda t: t.half()), "float16"),
        (change(QKV, 0, lambda t: t.fill_(NAN)), "attention.qkv.weight"),
        (change(QKV, 0, lambda t: t.fill_(1e38)), "model_optim_rng.pt"),
        (add("transformer.layers.1.attention.rotary.weight"), "layers.1.attention.rotary"),
        (add("decoder.layers.0.input_layernorm.weight"), "decoder.layers.0.input_layernorm"),
        (add("transformer.layers.7.input_layernorm.bias"), "num_layers 2"),
        (add("language_model.pooler.dense.weight"), "pooler"),
        (add("lm_head.bias"), "lm_head"),
        (add("binary_head.weight"), "binary_head"),
        (add("tokentype_embeddings.weight"), "tokentype_embeddings"),
        (add(f"module.{DENSE}"), DENSE.removeprefix("transformer.")),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, broken: Break, named: str) -> None:
    parts = old_weights(2)
    broken(parts)
    source = write_old(tmp_path / "old", parts, args=old_args(2), model=flat)
    assert named in error_of_import(source, tmp_path / "new")


@pytest.mark.parametrize(
    ("changes", "flags", "named"),
    [
        (None, "", "--num-attention-heads"),
        (None, "--num-attention-heads 5", "--num-attention-heads 5"),
        (None, "--num-attention-heads 0", "--num-attention-heads 0"),
        (None, "--num-attention-heads 8", "512"),
        ({}, "--num-attention-heads 2", "--num-attention-heads 2"),
        ({}, "--layernorm-epsilon 0.5", "--layernorm-epsilon 0.5"),
        ({"num_layers": 3}, "", "num_layers 3"),
        ({"hidden_size": 64}, "", "hidden_size 64"),
        ({"model_parallel_size": 4}, "", "model_parallel_size 4"),
        ({"num_attention_heads": torch.half}, "", "num_attention_heads"),
        (
            {"apply_residual_connection_post_layernorm": True},
            "",
            "apply_residual_connection_post_layernorm",
        ),
        *(({"version": each}, "", f"checkpoint_version {each!r}") for each in (1.5, -1, "2", NAN)),
    ],
)
def test_settings_that_are_missing_or_disagree_are_named(
    tmp_path: Path, changes: dict[str, Any] | None, flags: str, named: str
) -> None:
    version = changes.pop("version", None) if changes else None
    args = None if changes is None else old_args(2, **changes)
    source = write_old(tmp_path / "old", old_weights(2), args=args, version=version)
    assert named in error_of_import(source, tmp_path / "new", flags)


def test_a_vocabulary_of_another_size_is_told_with_both_numbers(tmp_path: Path) -> None:
    parts = old_weights(1)
    words = parts[0]["word_embeddings.weight"]
    for number, rows in enumerate((words[:256], torch.cat([words, words[:8]]))):
        other = [parts[0] | {"word_embeddings.weight": rows}]
        source = write_old(tmp_path / f"old_{number}", other, args=old_args(1))
        told = error_of_import(source, tmp_path / "new")
        assert {str(len(rows)), str(VOCABULARY)} <= set(re.findall(r"\d+", told))


def test_folders_that_are_no_checkpoint_are_named(tmp_path: Path) -> None:
    to = tmp_path / "new"
    assert "--from" in error_of_import(tmp_path / "old", to)
    old = write_old(tmp_path / "old", old_weights(4), args=old_args(4))
    folder = old / "iter_0250000"
    (folder / "mp_rank_02" / "model_optim_rng.pt").unlink()
    assert "mp_rank_02/model_optim_rng.pt" in error_of_import(old, to)
    (folder / "mp_rank_03" / "model_optim_rng.pt").rename(tmp_path / "away.pt")
    (folder / "mp_rank_03").rmdir()
    (folder / "mp_rank_02").rmdir()
    assert "model_parallel_size 4" in error_of_import(old, to)
    (folder / "mp_rank_01").rename(folder / "mp_rank_00_001")
    assert "--pipeline-model-parallel-size 1" in error_of_import(old, to)
    (old / "latest_checkpointed_iteration.txt").write_text("../../elsewhere")
    assert "../../elsewhere" in error_of_import(old, to)
    (tmp_path / "empty").mkdir()
    assert "mp_rank_00" in error_of_import(tmp_path / "empty", to)


def test_files_that_are_no_checkpoint_are_named(tmp_path: Path) -> None:
    file, to = tmp_path / "model_optim_rng.pt", tmp_path / "new"
    old = write_old(tmp_path / "old", old_weights(1), args=old_args(1))
    whole = (old / "iter_0250000/mp_rank_00/model_optim_rng.pt").read_bytes()
    for content in (b"", b"hello, world\n" * 9, b'{"model": 1}', whole[: len(whole) // 2]):
        file.write_bytes(content)
        assert error_of_import(file, to).startswith(str(file))
    torch.save({"state_dict": {}}, file)
    assert error_of_import(file, to).startswith(str(file))


@pytest.mark.parametrize("program", [["tools/import_megatron.py"], ["-m", "tools.import_megatron"]])
def test_the_program_ends_with_a_line_and_knows_the_earlier_flag(
    tmp_path: Path, program: list[str]
) -> None:
    source = write_old(tmp_path / "old", old_weights(2), args=old_args(2, num_layers=3))
    words = ["--to" if word == "--output" else word for word in words_of(source, tmp_path / "new")]
    command = [sys.executable, *program, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "num_layers 3" in done.stderr
    assert done.stderr.count("--output") == 1
