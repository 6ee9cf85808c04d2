"""Parts of one's own: registries, names that are refused, and what --print-config prints."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain
from megatron.config.parse import parse, user_errors
from megatron.config.parts import PARTS, register_part, see_modules_in
from megatron.config.pretrain import PretrainGPT2Config
from megatron.models.build import build_on_meta
from megatron.parallel.collectives import all_reduce
from megatron.parallel.factory import layer_factory
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import build_state
from megatron.train.step import train_step
from tests.dist import Pool, on_ranks
from tests.programs import lines_of
from tests.refusals import refusal
from tests.tiny import SEED, VOCABULARY, mesh_of_ranks, micro_batches, samples, tiny_config

HERE = "tests.config.test_parts:"
SMALL = ["--num-layers=2", "--hidden-size=8", "--num-attention-heads=4", "--train-iters=3"]


def no_seed(number: int, samples_per_epoch: int) -> int:
    return number


def more(number: int, samples_per_epoch: int, seed: int, shift: int) -> int:
    return number + shift


def fits(number: int, samples_per_epoch: int, seed: int) -> int:
    return number


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers samplers for a test."""
    before = dict(PARTS["sampler"].parts)
    yield partial(register_part, "sampler")
    PARTS["sampler"].parts.clear()
    PARTS["sampler"].parts.update(before)


def test_a_registered_part_has_a_name_of_its_own(register: Callable[..., None]) -> None:
    register("mine", fits)
    config = parse(PretrainGPT2Config, [*SMALL, "--sampler", "mine"], {})
    config.check(1)
    assert PARTS["sampler"].find(config.data.sampler) is fits
    for name, part, named in (
        ("mine", fits, "mine"),
        ("in-order", fits, "in-order"),
        ("a:b", fits, "a:b"),
        ("other", no_seed, "seed"),
        ("other", more, "shift"),
        ("other", 3, "int"),
    ):
        with pytest.raises(ValueError, match=named):
            register(name, part)


BAD = [  # setting, its value, what the error names besides the file and its line
    ("sampler", HERE + "no_seed", "seed"),
    ("sampler", HERE + "more", "shift"),
    ("sampler", HERE + "nowhere", "nowhere"),
    ("sampler", HERE + "HERE", "str"),
    ("sampler", "tests.no_such_module:part", "no_such_module"),
    ("optimizer", HERE + "fits", "params"),
    ("lr_decay_style", "sine", "cosine"),
    ("pipeline_schedule", "2f2b", "1f1b"),
    ("gradient_reduction", HERE + "fits", "argument"),
    ("process_group", "nccl", "torch"),
    ("dataset", "data", "module:name"),
]


@pytest.mark.parametrize(("setting", "value", "named"), BAD)
def test_a_part_that_does_not_fit_is_refused_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, value: str, named: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'# parts\n\n{setting} = "{value}"\n')
    with pytest.raises(SystemExit), user_errors({}):
        parse(PretrainGPT2Config, [*SMALL, "--preset", str(file)], {}).check(1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"--preset {file}, line 3: {setting} = " in said
    assert named in said


def test_modules_of_a_folder_come_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", before := [*sys.path])
    see_modules_in(str(tmp_path))
    assert before[-1] == str(tmp_path)


def slim_norm(mesh: Any, hidden_size: int) -> torch.nn.Module:
    return torch.nn.Identity()


def test_a_layer_that_does_not_fit_is_refused() -> None:
    for layer, named in (
        ("norm=megatron.api:RMSNorm", "rms_norm"),
        ("layer_norm=megatron.api:NoNorm", "NoNorm"),
        (f"layer_norm={HERE}slim_norm", "epsilon"),
        (f"factory={HERE}slim_norm", "custom"),
        ("layer_norm", "module:name"),
        ("rms_norm=megatron.api:RMSNorm", "gpt2"),  # which has none
        (" ".join(["rms_norm=megatron.api:RMSNorm"] * 2), "given once"),
    ):
        config = tiny_config(layers=tuple(layer.split()))
        refusal(partial(build_on_meta, config, serial_mesh(), VOCABULARY), named, field="--layers")


def test_layers_after_the_stream_is_gathered_are_ones_own() -> None:
    factory = layer_factory(serial_mesh(), custom={"linear": slim_norm})
    assert isinstance(factory.whole().linear(4), torch.nn.Identity)


def doubled(x: Tensor, axis: Any) -> Tensor:
    return 2 * all_reduce(x, axis)


def one_number(x: Tensor, axis: Any) -> Tensor:
    return all_reduce(x, axis).sum()


def norms(layout: str, zero: int, reduction: str) -> list[float]:
    mesh = mesh_of_ranks(layout)
    state = build_state(
        tiny_config(), mesh, VOCABULARY, seed=SEED, zero_stage=zero, reduction=reduction
    )
    steps = [micro_batches(samples(8, first=8 * n), mesh, 2) for n in range(2)]
    return [train_step(state, each, 1e-3).grad_norm for each in steps]


@pytest.mark.parametrize("zero", range(4))
def test_gradients_are_reduced_by_a_part_of_one_s_own(gloo: Pool, zero: int) -> None:
    ours, same, twice = (
        gloo.run(2, norms, "data=2", zero, name)
        for name in ("sum", "megatron.api:all_reduce", f"{HERE}doubled")
    )
    assert same == ours
    assert twice[0][0] == pytest.approx(2 * ours[0][0])


@on_ranks(2)
def test_a_sum_of_another_shape_is_refused() -> None:
    assert "--gradient" in str(refusal(lambda: norms("data=2", 0, f"{HERE}one_number")))


def test_what_print_config_prints_gives_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--model gpt2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 "
    flags += "--max-position-embeddings 16 --activation relu --distributed-timeout-minutes 9 "
    flags += "--mock-data --seq-length 16 --optimizer rmsprop --lr-warmup-fraction 0.5 --seed 5 "
    flags += "--train-iters 4 --eval-iters 0 --global-batch-size 2 --no-bf16 --log-interval 1 "
    words = [*flags.split(), "--save", str(tmp_path / "save")]
    with pytest.raises(SystemExit) as stop:
        pretrain.main([*words, "--print-config"], {})
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "save").exists()
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    with pytest.raises(SystemExit):
        pretrain.main(["--preset", str(file), "--print-config"], {})
    assert capsys.readouterr().out == printed

    runs = []
    for name, arguments in (("flags", words), ("preset", ["--preset", str(file)])):
        pretrain.main([*arguments, "--save", str(tmp_path / name)], {})
        lines = lines_of(tmp_path / name)
        runs.append([(each["loss"], each["grad_norm"], each["lr"]) for each in lines])
    assert len(runs[0]) == 4
    assert runs[0] == runs[1]
    # Every table has a value that is not the default.
    given = vars(parse(PretrainGPT2Config, words[2:], {}))
    plain = vars(parse(PretrainGPT2Config, SMALL, {}))
    assert all(config != plain[name] for name, config in given.items())
