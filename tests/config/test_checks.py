from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.config import (
    CheckpointConfig,
    GPT2DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    PretrainGPT2Config,
    TrainingConfig,
    UsageError,
)
from megatron.config.checks import writable

REQUIRED: dict[type, dict[str, Any]] = {
    ModelConfig: {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4},
    TrainingConfig: {"train_iters": 3},
}

REFUSED: list[tuple[type, dict[str, Any], str]] = [
    *(
        (ModelConfig, {name: value}, f"--{name.replace('_', '-')} {value}")
        for name in REQUIRED[ModelConfig] | {"max_position_embeddings": 0, "vocab_size": 0}
        for value in (0, -1)
    ),
    (ModelConfig, {"make_vocab_size_divisible_by": 0}, "--make-vocab-size-divisible-by 1 would"),
    (ModelConfig, {"layernorm_epsilon": 0.0}, "--layernorm-epsilon"),
    (ModelConfig, {"init_method_std": float("nan")}, "--init-method-std nan"),
    (ModelConfig, {"attention_dropout": 1.0}, "--attention-dropout 1.0"),
    (ModelConfig, {"hidden_dropout": -0.1}, "--hidden-dropout -0.1"),
    (ModelConfig, {"num_attention_heads": 3}, "--hidden-size 8 .*--hidden-size 9 would work"),
    (ParallelConfig, {"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 1 would"),
    (GPT2DataConfig, {"seq_length": 0}, "--seq-length 1 would work"),
    (OptimizerConfig, {"lr": 0.0}, "--lr 0.0"),
    (OptimizerConfig, {"lr": float("inf")}, "--lr inf"),
    (OptimizerConfig, {"min_lr": -1e-5}, "--min-lr"),
    (OptimizerConfig, {"lr": 1e-4, "min_lr": 1e-3}, "--min-lr 0.001 .*--min-lr 0.0001 would"),
    (OptimizerConfig, {"lr_decay_iters": 0}, "--lr-decay-iters 1 would work"),
    (OptimizerConfig, {"lr_warmup_iters": -1}, "--lr-warmup-iters 0 would work"),
    (OptimizerConfig, {"weight_decay": -0.1}, "--weight-decay"),
    (OptimizerConfig, {"adam_beta1": 1.0}, "--adam-beta1"),
    (OptimizerConfig, {"adam_beta2": -0.1}, "--adam-beta2"),
    (OptimizerConfig, {"adam_eps": 0.0}, "--adam-eps"),
    (OptimizerConfig, {"clip_grad": -1.0}, "--clip-grad -1.0 .*--clip-grad 0 would work"),
    (TrainingConfig, {"train_iters": 0}, "--train-iters 1 would work"),
    (TrainingConfig, {"micro_batch_size": 0}, "--micro-batch-size"),
    (TrainingConfig, {"global_batch_size": 0}, "--global-batch-size"),
    (TrainingConfig, {"seed": -1}, "--seed"),
    (LoggingConfig, {"log_interval": 0}, "--log-interval"),
    (TrainingConfig, {"check_replicas_interval": -1}, "--check-replicas-interval 0 would work"),
    (ParallelConfig, {"distributed_timeout_minutes": 0.0}, "--distributed-timeout-minutes"),
    (TrainingConfig, {"eval_interval": 0}, "--eval-interval"),
    (TrainingConfig, {"eval_iters": -1}, "--eval-iters"),
    (TrainingConfig, {"exit_interval": 0}, "--exit-interval"),
    (TrainingConfig, {"exit_duration_in_mins": 0.0}, "--exit-duration-in-mins"),
    (PrecisionConfig, {"bf16": True, "fp16": True}, "--fp16 and --bf16 .*would work"),
    (PrecisionConfig, {"loss_scale": 8.0}, "--loss-scale .* --fp16 beside it would work"),
    (PrecisionConfig, {"hysteresis": 1, "bf16": True}, "--hysteresis .* --fp16 beside it"),
    *(
        (PrecisionConfig, {"fp16": True, "initial_loss_scale": text}, "2[*][*]16 would work")
        for text in ("0", "-1", "2**", "3**4", "2**9999", "2^16", "nan", "inf", "large")
    ),
    (
        PrecisionConfig,
        {"fp16": True, "initial_loss_scale": "2**3", "min_loss_scale": 16.0},
        "--initial-loss-scale 2[*][*]3 is below .*--min-loss-scale 8 would work",
    ),
    (PrecisionConfig, {"fp16": True, "loss_scale": 0.0}, "--loss-scale 0.0"),
    *(
        (PrecisionConfig, {"fp16": True, "loss_scale": 8.0} | one, "leaving one of them out")
        for one in ({"hysteresis": 1}, {"initial_loss_scale": "4"}, {"loss_scale_window": 9})
    ),
    (PrecisionConfig, {"fp16": True, "max_consecutive_skips": 0}, "--max-consecutive-skips 1"),
    (CheckpointConfig, {"save": "here", "save_interval": 0}, "--save-interval"),
    (CheckpointConfig, {"save_interval": 5}, "--save-interval 5 .*--save checkpoints"),
    (CheckpointConfig, {"async_save": True}, "--async-save has nowhere .*--save checkpoints"),
    (CheckpointConfig, {"save": "a", "keep_checkpoints": 1}, "--keep-checkpoints 2 would work"),
    (CheckpointConfig, {"save": "a", "finetune": True}, "--load checkpoints beside it would work"),
    (CheckpointConfig, {"save": "a", "load": "a", "finetune": True}, "another directory for"),
]


def settings(**changes: Any) -> PretrainGPT2Config:
    """A small run, with each change put into the section that has such a field."""
    sections = {
        "model": ModelConfig,
        "parallel": ParallelConfig,
        "data": GPT2DataConfig,
        "optimizer": OptimizerConfig,
        "training": TrainingConfig,
        "precision": PrecisionConfig,
        "checkpoint": CheckpointConfig,
    }
    return PretrainGPT2Config(
        **{
            name: section(
                **REQUIRED.get(section, {})
                | {key: changes[key] for key in changes if key in section.__dataclass_fields__}
            )
            for name, section in sections.items()
        }
    )


@pytest.mark.parametrize(("section", "values", "message"), REFUSED)
def test_refused(section: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        section(**REQUIRED.get(section, {}) | values)


@pytest.mark.parametrize(
    ("world_size", "changes", "message"),
    [
        (
            3,
            {"tensor_model_parallel_size": 3},
            "--num-attention-heads 4 .*-parallel-size 2 would work, on a multiple of 2 processes",
        ),
        (
            6,
            {"tensor_model_parallel_size": 4},
            "--tensor-model-parallel-size 4 does not fit a world of 6 .*parallel-size 2",
        ),
        (
            1,
            {"tensor_model_parallel_size": 2},
            "--tensor-model-parallel-size 2 .*--nproc-per-node 2 .*parallel-size 1",
        ),
        (
            4,
            {"tensor_model_parallel_size": 2, "micro_batch_size": 3, "global_batch_size": 8},
            "--global-batch-size 8 .*--global-batch-size 12 would work",
        ),
        (
            1,
            {"seq_length": 65, "max_position_embeddings": 64},
            "--seq-length 65 .*--seq-length 64 or --max-position-embeddings 65 would work",
        ),
        (1, {"lr_warmup_iters": 4}, "--lr-warmup-iters 4 is above --train-iters 3"),
        (
            1,
            {"lr_warmup_iters": 4, "lr_decay_iters": 2},
            "--lr-warmup-iters 4 is above --lr-decay-iters 2.*--lr-warmup-iters 2 would work",
        ),
    ],
)
def test_sections_that_disagree(world_size: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(**changes).check(world_size)


def test_sizes_of_a_run() -> None:
    config = settings(tensor_model_parallel_size=2, micro_batch_size=3, global_batch_size=12)
    config.check(4)
    assert (config.data_parallel_size(4), config.global_batch_size(4)) == (2, 12)
    default = settings(tensor_model_parallel_size=2, micro_batch_size=3)
    assert default.global_batch_size(4) == 6


@pytest.mark.parametrize(
    ("text", "scale"), [("2**16", 65536.0), ("2**-3", 0.125), ("4096", 4096.0), ("0.5", 0.5)]
)
def test_the_first_loss_scale_is_a_decimal_or_a_power_of_two(text: str, scale: float) -> None:
    section = PrecisionConfig(fp16=True, initial_loss_scale=text, min_loss_scale=0.1)
    assert section.first_scale() == scale


def test_a_file_to_write_needs_its_folder(tmp_path: Path) -> None:
    @dataclass
    class Section:
        output: Path | None

    writable(Section(None), "output")
    writable(Section(tmp_path / "new.json"), "output")
    with pytest.raises(UsageError, match=f"--output {tmp_path} is a folder; .*/result.json would"):
        writable(Section(tmp_path), "output")
    with pytest.raises(
        UsageError, match=f"no folder {tmp_path / 'no'}; mkdir -p {tmp_path}/no, or"
    ):
        writable(Section(tmp_path / "no" / "x.json"), "output")
    writable(Section(tmp_path / "new.png"), "output", ".png")
    with pytest.raises(UsageError, match=f"--output {tmp_path}/new.png would work"):
        writable(Section(tmp_path / "new.txt"), "output", ".png")
