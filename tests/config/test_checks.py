"""What the programs refuse: each row is tried, and then again with what its error says works."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from megatron.config.checks import UsageError, at_least, share, writable
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from megatron.config.training import PrecisionConfig
from tools.planning.settings import PlanGPT2Config

SMALL = ["--num-layers=2", "--hidden-size=8", "--num-attention-heads=4", "--train-iters=300"]
PROGRAMS: dict[str, tuple[type[PretrainConfig], list[str]]] = {
    "gpt2": (PretrainGPT2Config, SMALL),
    "bert": (PretrainBertConfig, SMALL),
    "plan": (PlanGPT2Config, [*SMALL, "--gpus=8"]),
}
FP16 = "--fp16 --initial-loss-scale"

# Arguments, number of processes, and the flag that is refused; the error says what works.
REFUSED = [
    *(
        (f"{flag} 0", 1, flag)
        for flag in (
            "--num-layers",
            "--num-attention-heads",
            "--vocab-size",
            "--make-vocab-size-divisible-by",
            "--seq-length",
            "--train-iters",
            "--micro-batch-size",
            "--eval-interval",
            "--log-interval",
        )
    ),
    *(
        (f"{flag} -1", 1, flag)
        for flag in (
            "--tensor-model-parallel-size",
            "--global-batch-size",
            "--exit-interval",
            "--lr-decay-iters",
            "--lr-warmup-iters",
            "--clip-grad",
            "--seed",
            "--eval-iters",
            "--check-replicas-interval",
        )
    ),
    *(
        (f"{flag} {value}", 1, flag)
        for flag, values in {
            "--layernorm-epsilon": ("0", "inf"),
            "--init-method-std": ("0", "nan"),
            "--lr": ("0", "inf"),
            "--adam-eps": ("0",),
            "--distributed-timeout-minutes": ("0",),
            "--exit-duration-in-mins": ("0",),
            "--min-lr": ("-1e-5",),
            "--weight-decay": ("-0.1",),
            "--clip-grad": ("nan",),
            "--attention-dropout": ("1", "-0.1"),
            "--hidden-dropout": ("1",),
            "--adam-beta1": ("1",),
            "--adam-beta2": ("-0.1",),
        }.items()
        for value in values
    ),
    ("--lr 1e-4 --min-lr 1e-3", 1, "--min-lr"),
    ("--num-attention-heads 3", 1, "--num-attention-heads"),
    ("--hidden-size 256 --num-attention-heads 300", 1, "--num-attention-heads"),
    ("--fp16 --bf16", 1, "--fp16"),
    ("--loss-scale 8", 1, "--loss-scale"),
    ("--no-bf16 --hysteresis 1", 1, "--hysteresis"),
    *(
        (f"{FP16} {text}", 1, "--initial-loss-scale")
        for text in ("0", "2**", "3**4", "2**9999", "2^16", "nan", "inf", "large")
    ),
    (f"{FP16} 2**3 --min-loss-scale 16", 1, "--min-loss-scale"),
    ("--fp16 --loss-scale 0", 1, "--loss-scale"),
    ("--fp16 --loss-scale 8 --hysteresis 1", 1, "--hysteresis"),
    ("--fp16 --loss-scale 8 --loss-scale-window 9", 1, "--loss-scale-window"),
    ("--fp16 --max-consecutive-skips 0", 1, "--max-consecutive-skips"),
    ("--tensor-model-parallel-size 3", 3, "--tensor-model-parallel-size"),
    ("--tensor-model-parallel-size 4", 6, "--tensor-model-parallel-size"),
    ("--model-parallel-size 2", 1, "--tensor-model-parallel-size"),
    ("--micro-batch-size 3 --global-batch-size 8", 4, "--global-batch-size"),
    ("--seq-length 65 --max-position-embeddings 64", 1, "--seq-length"),
    ("--lr-warmup-iters 400", 1, "--lr-warmup-iters"),
    ("--lr-warmup-iters 4 --lr-decay-iters 2", 1, "--lr-warmup-iters"),
    ("--num-layer 3", 1, "--num-layer"),
    ("--learning-rate=1e-3", 1, "--learning-rate"),
    ("--batch-size 4", 1, "--batch-size"),
    ("--tp 2", 2, "--tp"),
    ("--warmup_steps 3", 1, "--warmup-steps"),
    ("--n-layer 3", 1, "--n-layer"),
    ("--lr-decay-style cos", 1, "--lr-decay-style"),
    ("--layernorm-impl apex", 1, "--layernorm-impl"),
    ("--optimizer-impl apex", 1, "--optimizer-impl"),
    ("--preset gpt2_365m", 1, "--preset"),
    ("--preset", 1, "--preset"),
]
# Refused without one value that would do.
NO_CURE = [
    ("--hidden-size 0", "--hidden-size"),
    ("--max-position-embeddings -1", "--max-position-embeddings"),
    ("--save a --save-interval 0", "--save-interval"),
    ("--save-interval 5", "--save-interval"),
    ("--async-save", "--async-save"),
    ("--save a --keep-checkpoints 1", "--keep-checkpoints"),
    ("--save a --finetune", "--finetune"),
    ("--seq-length x", "--seq-length"),
    ("--seq-length --lr 1", "--seq-length"),
    ("--lr 1e", "--lr"),
    ("extra", "extra"),
]


def settings(**changes: Any) -> PretrainGPT2Config:
    """A small run, with each change put into the config that has such a field."""
    small = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "train_iters": 3}
    given = small | changes
    configs = {
        each.name: each.type(
            **{
                name: value
                for name, value in given.items()
                if name in each.type.__dataclass_fields__
            }
        )
        for each in fields(PretrainGPT2Config)
    }
    return PretrainGPT2Config(**configs)


def accept(program: str, arguments: Sequence[str], world_size: int) -> PretrainConfig:
    kind, needed = PROGRAMS[program]
    config = parse(kind, [*needed, "--max-position-embeddings=1024", *arguments], {})
    config.check(world_size)
    return config


def mended(arguments: Sequence[str], error: UsageError) -> list[str]:
    """The arguments with what works in place of the flag that is refused, and its values."""
    kept, is_refused = [], False
    aliases = {"--model-parallel-size": "--tensor-model-parallel-size"}
    for word in arguments:
        if word.startswith("--"):
            name = word.partition("=")[0].replace("_", "-")
            is_refused = aliases.get(name, name) == error.flag
        if not is_refused:
            kept.append(word)
    return [*kept, *error.works]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_refused_and_what_works_instead_is_accepted(number: int) -> None:
    """Each parser has every third row: all are made of the same configs."""
    program = list(PROGRAMS)[number]
    for text, world_size, flag in REFUSED[number :: len(PROGRAMS)]:
        with pytest.raises(UsageError) as refused:
            accept(program, text.split(), world_size)
        assert refused.value.flag == flag, text
        accept(program, mended(text.split(), refused.value), world_size)


@pytest.mark.parametrize(("text", "flag"), NO_CURE)
def test_refused(text: str, flag: str) -> None:
    with pytest.raises(UsageError) as refused:
        accept("gpt2", text.split(), 1)
    assert refused.value.flag.startswith(flag)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UsageError) as refused:
        parse(PretrainGPT2Config, ["--num-layers", "2"], {})
    assert refused.value.flag == "--hidden-size --num-attention-heads --train-iters"


def test_sizes_of_a_run() -> None:
    words = ["--tensor-model-parallel-size", "2", "--micro-batch-size", "3"]
    config = accept("gpt2", [*words, "--global-batch-size", "12"], 4)
    assert (config.data_parallel_size(4), config.global_batch_size(4)) == (2, 12)
    assert accept("gpt2", words, 4).global_batch_size(4) == 6


@pytest.mark.parametrize(
    ("text", "scale"), [("2**16", 65536.0), ("2**-3", 0.125), ("4096", 4096.0), ("0.5", 0.5)]
)
def test_the_first_loss_scale_is_a_decimal_or_a_power_of_two(text: str, scale: float) -> None:
    config = PrecisionConfig(fp16=True, initial_loss_scale=text, min_loss_scale=0.1)
    assert config.first_scale() == scale


@pytest.mark.parametrize(("words", "device", "count"), [
    ("--fp16", "cpu", 1), ("--fp16", "cuda", 0), ("--bf16", "cpu", 0),
])  # fmt: skip
def test_fp16_on_a_cpu_is_warned_of(words: str, device: str, count: int) -> None:
    config = accept("gpt2", [words, "--save", "a", "--save-interval", "5"], 1)
    assert len(config.warnings(device)) == count


@dataclass
class Own:
    """A config of some tool."""

    output: Path | None = None
    rate: float | None = 0.5
    workers: int | None = 1


def test_checks_of_other_programs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, ending in (("", ".json"), ("no/x.json", ".json"), ("new.txt", ".png")):
        with pytest.raises(UsageError) as refused:
            writable(Own(output=tmp_path / path), "output", ending)
        name, works = refused.value.works
        assert (refused.value.flag, name) == ("--output", "--output")
        writable(Own(output=tmp_path / works), "output", ending)
    writable(Own(), "output")
    for own, check in (
        (Own(rate=1.5), lambda own: share(own, "rate")),
        (Own(workers=0), lambda own: at_least(own, workers=1)),
    ):
        with pytest.raises(UsageError) as refused:
            check(own)
        flag, works = refused.value.works
        check(Own(**{flag.removeprefix("--"): float(works)}))
    share(Own(rate=None), "rate")
    at_least(Own(workers=None), workers=1)
