"""The settings of a pretraining run, and the checks across its configs."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import at_most, left_out
from megatron.config.model import BertConfig, GPT2Config, KindConfig, LlamaConfig, TextModelConfig
from megatron.config.parallel import TrainingParallelConfig
from megatron.config.training import (
    BertDataConfig,
    BertOptimizerConfig,
    DataConfig,
    GPT2DataConfig,
    LlamaDataConfig,
    LoggingConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.errors import UsageError, flag
from megatron.libraries import failure


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings that the programs share; each has its own configs of model and data."""

    model: KindConfig
    parallel: TrainingParallelConfig = field(default_factory=TrainingParallelConfig)
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def data_parallel_size(self, world_size: int) -> int:
        """Models trained side by side by world_size processes."""
        return self.parallel.data_parallel_size(world_size)

    def global_batch_size(self, world_size: int) -> int:
        """Samples of an optimizer step."""
        readers = self.parallel.batch_parallel_size(world_size)
        smallest = self.training.micro_batch_size * readers
        return self.training.global_batch_size or smallest

    def lr_decay_iters(self) -> int:
        """Iteration at which the learning rate reaches its floor."""
        return self.optimizer.lr_decay_iters or self.training.steps

    def metrics_file(self) -> str | None:
        """File of the record of the run; None keeps none."""
        save = self.checkpoint.save
        return self.logging.metrics_file or (save and str(Path(save) / "metrics.jsonl"))

    def check(self, world_size: int) -> None:
        """Raise UsageError if two configs, or a config and world_size processes, disagree."""
        if self.data.mock_data:
            left_out(self.training, "epochs", "with --mock-data, which has no end")
        if (given := self.model.recompute_granularity) not in (known := self.model.granularities):
            name, last = "--recompute-granularity", known[-1]
            allowed = f"{' or '.join(known)} of a model of the kind {self.model.kind}"
            raise UsageError(name, given, allowed, works=(name, last))
        self.parallel.check_kind(self.model)
        if (mode := self.parallel.tensor_parallel_mode) != "1d":
            reason = f"with --tensor-parallel-mode {mode}, which cuts what a norm is of"
            left_out(self.model, "layernorm_impl", reason)
        if self.training.compile and not self.model.can_compile:
            allowed = (
                "left out: layers of --model huggingface, or with apex's norm, are not compiled"
            )
            raise UsageError("--compile", None, allowed, works=("--no-compile",))
        is_compiled = self.training.compile is not False and self.model.can_compile
        if (rng := self.model.attention_dropout_rng) == "coordinates-flex" and not is_compiled:
            name = "--attention-dropout-rng"
            allowed = (
                "coordinates where layers are not compiled: with --no-compile, --model huggingface "
                "or apex's norm"
            )
            raise UsageError(name, rng, allowed, works=(name, "coordinates"))
        self.parallel.check(world_size, self.model.widths, self.data.seq_length)
        self.parallel.check_model(self.model)
        batch = self.global_batch_size(world_size)
        readers = self.parallel.batch_parallel_size(world_size)
        smallest = self.training.micro_batch_size * readers
        if batch % smallest:
            raise UsageError(
                "--global-batch-size",
                batch,
                f"a multiple of --micro-batch-size {self.training.micro_batch_size} x the "
                f"{readers} processes that read different samples",
                works=("--global-batch-size", str(-(-batch // smallest) * smallest)),
            )
        if self.training.train_iters is not None:
            self._check_warmup()
        if self.precision.pure_bf16:
            left_out(self.optimizer, "optimizer_impl", "with --pure-bf16: apex's moments are fp32")
        require_apex(
            optimizer_impl=self.optimizer.optimizer_impl, layernorm_impl=self.model.layernorm_impl
        )
        require_sinks(self.logging, self.metrics_file())

    def with_steps(
        self,
        samples_in: Callable[[int], int],
        world_size: int,
        *,
        steps_done: int = 0,
        samples_done: int = 0,
    ) -> Self:
        """This config with --train-iters in place of --epochs, where an incomplete global batch at
        the end is dropped, and --lr-warmup-iters in place of --lr-warmup-fraction.

        samples_in: samples of a number of epochs. steps_done, samples_done: those of the resumed
        checkpoint, whose global batch may have been another. Raises UsageError if no batch is
        filled, or warm-up does not fit.
        """
        config = self
        if (epochs := self.training.epochs) is not None:
            batch = self.global_batch_size(world_size)
            samples_left = max(0, samples_in(epochs) - samples_done)
            if not (steps := steps_done + samples_left // batch):
                raise UsageError(
                    "--epochs",
                    epochs,
                    f"enough for a global batch of {batch}: the first has {samples_in(1)} samples",
                    works=("--epochs", str(epochs_of(batch, samples_in))),
                )
            training = replace(self.training, train_iters=steps, epochs=None)
            config = replace(self, training=training)
        warmup = self.optimizer.warmup_iters(config.lr_decay_iters())
        optimizer = replace(self.optimizer, lr_warmup_iters=warmup, lr_warmup_fraction=None)
        config = replace(config, optimizer=optimizer)
        config._check_warmup()
        return config

    def _check_warmup(self) -> None:
        end = self.lr_decay_iters()
        source = "train" if self.optimizer.lr_decay_iters is None else "lr-decay"
        works = ("--lr-warmup-fraction", "0.1")
        at_most(self.optimizer, "lr_warmup_iters", end, f"--{source}-iters", works=works)

    def warnings(self, device: str) -> list[str]:
        """Warnings of valid settings, rarely meant. device: torch's device type, such as "cpu"."""
        found: list[str] = []
        steps = self.training.steps
        if self.checkpoint.save is None:
            found.append("warning: nothing of this run is kept; --save checkpoints keeps it")
        elif self.checkpoint.save_interval is None and steps > 1:
            some = min(1000, max(1, steps // 4))
            found.append(f"warning: saved only at the end; --save-interval {some} saves on the way")
        if self.model.draws_in_kernel(device):
            found.append(
                "warning: attention's dropout is drawn by its kernel and depends on the layout; "
                "with --attention-dropout-rng coordinates it does not, at a cost of time and memory"
            )
        if self.precision.fp16 and device == "cpu":
            found.append("warning: --fp16 on a CPU is many times slower than --bf16 or --no-bf16")
        if device == "cpu":
            if self.model.attention_dropout_rng == "coordinates-flex":
                found.append("warning: a CPU computes coordinates-flex as coordinates")
            given = {"--optimizer-cpu-offload": self.optimizer.optimizer_cpu_offload}
            given |= {"--cpu-offload-activations": self.model.cpu_offload_activations}
            found += [
                f"warning: {name} frees no memory on a CPU" for name, on in given.items() if on
            ]
        return found


def epochs_of(samples: int, samples_in: Callable[[int], int]) -> int:
    """The fewest epochs with at least `samples`; samples_in: samples of a number of epochs."""
    return bisect_left(range(samples), samples, key=samples_in)


@dataclass(frozen=True, kw_only=True)
class PretrainTextConfig(PretrainConfig):
    model: TextModelConfig

    def check(self, world_size: int) -> None:
        super().check(world_size)
        positions = self.model.max_position_embeddings
        at_most(self.data, "seq_length", positions, "--max-position-embeddings")


@dataclass(frozen=True, kw_only=True)
class PretrainGPT2Config(PretrainTextConfig):
    model: GPT2Config
    data: GPT2DataConfig = field(default_factory=GPT2DataConfig)


@dataclass(frozen=True, kw_only=True)
class PretrainLlamaConfig(PretrainTextConfig):
    model: LlamaConfig
    data: LlamaDataConfig = field(default_factory=LlamaDataConfig)


@dataclass(frozen=True, kw_only=True)
class PretrainBertConfig(PretrainTextConfig):
    model: BertConfig
    data: BertDataConfig = field(default_factory=BertDataConfig)
    optimizer: BertOptimizerConfig = field(default_factory=BertOptimizerConfig)


# Parts of NVIDIA's apex that each setting needs: a file, and the extension with its kernel.
_APEX = {
    "optimizer_impl": ("optimizers/fused_adam.py", "amp_C"),
    "layernorm_impl": ("normalization/fused_layer_norm.py", "fused_layer_norm_cuda"),
}


def require_apex(*, optimizer_impl: str, layernorm_impl: str) -> None:
    """Raise UsageError if an implementation is "apex" and its parts are not installed."""
    for name, given in (("optimizer_impl", optimizer_impl), ("layernorm_impl", layernorm_impl)):
        if given != "apex":
            continue
        file, extension = _APEX[name]
        if (where := _origin("apex")) is None:
            reason = "NVIDIA's apex is not installed"
        elif not (where.parent / file).is_file():
            reason = f"{where} is not NVIDIA's but most likely PyPI's apex (pip uninstall apex)"
        elif _origin(extension) is None:
            reason = f"apex is installed without its extension {extension}"
        else:
            continue
        allowed = f"torch: {reason}; bash scripts/setup.sh --with-apex DIR builds NVIDIA's"
        raise UsageError(flag(name), "apex", allowed, works=(flag(name), "torch"))


def require_sinks(logging: LoggingConfig, metrics_file: str | None) -> None:
    """Raise UsageError if a sink's library is missing, or wandb has no folder for its run."""
    for name, library in (("wandb_project", "wandb"), ("tensorboard_dir", "tensorboard")):
        if (value := getattr(logging, name)) is not None and (lack := failure(library)):
            raise UsageError(flag(name), value, f"left out: {lack}")
    if (project := logging.wandb_project) is not None and metrics_file is None:
        works = ("--wandb-project", project, "--save", "checkpoints")
        allowed = "given with --save or --metrics-file, beside which it keeps its run"
        raise UsageError("--wandb-project", project, allowed, works=works)


def _origin(package: str) -> Path | None:
    """The file of a part of apex, found without an import, because its extensions load torch; None
    if there is none."""
    spec = find_spec(package)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
