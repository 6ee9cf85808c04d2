"""The settings of a pretraining run, and the checks across its configs."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import at_most, left_out
from megatron.config.model import (
    BertConfig,
    GPT2Config,
    KindConfig,
    LlamaConfig,
    TextModelConfig,
    ViTConfig,
)
from megatron.config.parallel import TENSOR, TrainingParallelConfig
from megatron.config.parts import check_parts, custom_layers
from megatron.config.training import (
    BertDataConfig,
    BertOptimizerConfig,
    DataConfig,
    GPT2DataConfig,
    ImageDataConfig,
    ImageTrainingConfig,
    LlamaDataConfig,
    LoggingConfig,
    OptimizerConfig,
    PrecisionConfig,
    TextDataConfig,
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

    @property
    def seq_length(self) -> int:
        """Tokens of a sample."""
        return vars(self.data)["seq_length"]

    @property
    def scored(self) -> float:
        """Share of the tokens whose logits the head computes."""
        return getattr(self.data, "mask_prob", 1.0)

    @property
    def tokens_per_unit(self) -> int:
        """Tokens of what throughput counts: a token, or an image."""
        return 1

    def data_parallel_size(self, world_size: int) -> int:
        """Models trained side by side by world_size processes."""
        return self.parallel.data_parallel_size(world_size)

    def global_batch_size(self, world_size: int) -> int:
        """Samples of an optimizer step."""
        readers = self.parallel.batch_parallel_size(world_size)
        smallest = self.training.micro_batch_size * readers
        return self.training.global_batch_size or smallest

    def micro_batches(self, world_size: int) -> int:
        """Micro-batches of an optimizer step on each process."""
        readers = self.parallel.batch_parallel_size(world_size)
        return self.global_batch_size(world_size) // (self.training.micro_batch_size * readers)

    def lr_decay_iters(self) -> int:
        """Iteration at which the learning rate reaches its floor."""
        return self.optimizer.lr_decay_iters or self.training.steps

    def metrics_file(self) -> str | None:
        """File of the record of the run; None keeps none."""
        save = self.checkpoint.save
        return self.logging.metrics_file or (save and str(Path(save) / "metrics.jsonl"))

    def check_layout(self, world_size: int) -> None:
        """Raise UsageError if the processes cannot divide the model or its samples evenly."""
        self.parallel.check(world_size, self.model.widths, self.seq_length)

    def check(self, world_size: int) -> None:
        """Raise UsageError if two configs, or a config and world_size processes, disagree, or a
        part of one's own does not fit."""
        for config in (self.data, self.optimizer, self.logging):
            check_parts(config)
        custom_layers(self.model.layers)
        if self.data.mock_data:
            left_out(self.training, "epochs", "with {}, which has no end", "--mock-data")
        if self.model.recompute_granularity not in self.model.granularities:
            values = " and ".join(self.model.granularities)
            reason = f"with a model of the kind {self.model.kind}, which has {values}"
            left_out(self.model, "recompute_granularity", reason)
        self.parallel.check_kind(self.model)
        if (mode := self.parallel.tensor_parallel_mode) != "1d":
            reason = f"with {{}} {mode}, which cuts what a norm is of"
            left_out(self.model, "layernorm_impl", reason, "--tensor-parallel-mode")
        uncompiled = "with apex's norm, whose layers are not compiled"
        if self.training.compile and not self.model.can_compile:
            left_out(self.training, "compile", uncompiled, works=False)
        if self.model.is_unmodified and self.model.recompute_granularity == "full":
            reason = "with --model huggingface and {} full: no graph holds both"
            left_out(self.training, "compile", reason, "--recompute-granularity", works=False)
        is_compiled = self.training.compile is not False and self.model.compiles_by_default
        if self.model.attention_dropout_rng == "coordinates-flex" and not is_compiled:
            reason = f"with {{}} or --model huggingface, or {uncompiled}"
            name, other = "attention_dropout_rng", "--no-compile"
            left_out(self.model, name, reason, other, works="coordinates")
        other_dropout = self.model.attention_dropout_rng in ("kernel", "coordinates-flex")
        if self.parallel.is_ring and other_dropout:
            name, other = "attention_dropout_rng", "--cp-comm-type"
            reason = "with {} p2p, whose dropout is by coordinates"
            left_out(self.model, name, reason, other, works="coordinates")
        self.check_layout(world_size)
        self.parallel.check_model(self.model)
        if self.optimizer.optimizer in ("muon", "adafactor"):
            reason = "with {}, which cuts the matrices that it needs whole"
            if self.parallel.tensor_model_parallel_size > 1:
                left_out(self.optimizer, "optimizer", reason, TENSOR)
            if self.parallel.divides_state(world_size):
                left_out(self.optimizer, "optimizer", reason, self.parallel.zero_flag)
        name, batch = "--global-batch-size", self.global_batch_size(world_size)
        micro_batch = self.training.micro_batch_size
        readers = self.parallel.batch_parallel_size(world_size)
        if batch % (micro_batch * readers):
            allowed = f"a multiple of {{}} {micro_batch} x the {readers} processes that read "
            allowed += "different samples"
            works = math.ceil(batch / (micro_batch * readers)) * micro_batch * readers
            raise UsageError(name, batch, allowed, "--micro-batch-size", works=works)
        if self.training.train_iters is not None:
            self._check_warmup()
        if self.precision.pure_bf16 and self.optimizer.optimizer_impl == "apex":
            reason = "with {}: apex's moments are fp32"
            left_out(self.optimizer, "optimizer_impl", reason, "--pure-bf16")
        require_apex(
            optimizer_impl=self.optimizer.optimizer_impl, layernorm_impl=self.model.layernorm_impl
        )
        for name, library in (("wandb_project", "wandb"), ("tensorboard_dir", "tensorboard")):
            if getattr(self.logging, name) is not None and (lack := failure(library)):
                left_out(self.logging, name, f"here: {lack}")
        for name, what in (("wandb_project", "run"), ("profile_step_start", "traces")):
            value = getattr(self.logging, name)
            if value is not None and self.metrics_file() is None:
                cure = (flag(name), str(value), "--save", "checkpoints")
                allowed = f"given with {{}} or {{}}, beside which it keeps its {what}"
                others = ("--save", "--metrics-file")
                raise UsageError(flag(name), value, allowed, *others, works=cure)
        if self.training.train_iters is not None:
            at_most(self.logging, "profile_step_start", self.training.train_iters, "--train-iters")
        file = self.logging.metrics_file
        if file is not None and Path(file).is_dir():
            inside = str(Path(file, "metrics.jsonl"))
            raise UsageError("--metrics-file", file, "a file, not a folder", works=inside)
        prompts = self.logging.sample_prompts
        if prompts is not None and not Path(prompts).is_file():
            raise UsageError("--sample-prompts", prompts, "a file that exists")

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
        training, batch = self.training, self.global_batch_size(world_size)
        if (epochs := training.epochs) is not None:
            samples_left = max(0, samples_in(epochs) - samples_done)
            if not (steps := steps_done + samples_left // batch):
                allowed = f"enough for a global batch of {batch}: the first has {samples_in(1)} "
                works = epochs_of(batch, samples_in)
                raise UsageError("--epochs", epochs, f"{allowed}samples", works=works)
            training = replace(training, train_iters=steps, epochs=None)
        if training.eval_interval is None:
            training = replace(training, eval_interval=max(1, samples_in(1) // batch))
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
        at_most(self.optimizer, "lr_wsd_decay_iters", end, f"--{source}-iters")

    def warnings(self, device: str) -> list[str]:
        """Warnings of valid settings, rarely meant. device: torch's device type, such as "cpu"."""
        texts: list[str] = []
        steps = self.training.steps
        if self.checkpoint.save is None:
            texts.append("nothing of this run is kept; --save checkpoints keeps it")
        elif self.checkpoint.save_interval is None and steps > 1:
            some = min(1000, max(1, steps // 4))
            texts.append(f"saved only at the end; --save-interval {some} saves on the way")
        if self.parallel.is_ring and self.model.drops_attention:
            texts.append(
                "--cp-comm-type p2p computes attention's dropout by coordinates, which takes more "
                "time than --attention-dropout 0 or --cp-comm-type a2a"
            )
        elif self.model.draws_in_kernel(device):
            texts.append(
                "attention's dropout is drawn by its kernel and depends on the layout; with "
                "--attention-dropout-rng coordinates it does not, at a cost of time and memory"
            )
        if device == "cpu":
            if self.precision.fp16:
                texts.append("--fp16 on a CPU is many times slower than --bf16 or --no-bf16")
            if self.model.attention_dropout_rng == "coordinates-flex":
                texts.append("a CPU computes coordinates-flex as coordinates")
            if self.optimizer.optimizer_cpu_offload:
                texts.append("--optimizer-cpu-offload frees no memory on a CPU")
            if self.model.cpu_offload_activations:
                texts.append("--cpu-offload-activations frees no memory on a CPU")
        return [f"warning: {text}" for text in texts]


def epochs_of(samples: int, samples_in: Callable[[int], int]) -> int:
    """The fewest epochs with at least `samples`; samples_in: samples of a number of epochs."""
    return bisect_left(range(samples), samples, key=samples_in)


@dataclass(frozen=True, kw_only=True)
class PretrainTextConfig(PretrainConfig):
    model: TextModelConfig
    data: TextDataConfig

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


@dataclass(frozen=True, kw_only=True)
class PretrainViTConfig(PretrainConfig):
    model: ViTConfig
    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    training: ImageTrainingConfig

    @property
    def seq_length(self) -> int:
        return self.model.positions

    def check_layout(self, world_size: int) -> None:
        """An image may have an odd number of tokens: sequence parallelism divides those of a
        micro-batch."""
        self.parallel.check(world_size, self.model.widths)
        images, tokens = self.training.micro_batch_size, self.model.positions
        ranks = self.parallel.tensor_model_parallel_size
        is_cured = self.model.patches % self.parallel.context_pieces == 0
        self.parallel.check_images(tokens, ("--pooling", "mean") if is_cured else 1)
        tokens //= self.parallel.context_parallel_size
        if self.parallel.cuts_stream and images * tokens % ranks:
            multiple = ranks // math.gcd(ranks, tokens)
            works = math.ceil(images / multiple) * multiple
            allowed = f"a multiple of {multiple}, as {{}} divides its images' tokens"
            other = "--sequence-parallel"
            raise UsageError("--micro-batch-size", images, allowed, other, works=works)

    @property
    def scored(self) -> float:
        return 1 / self.model.positions

    @property
    def tokens_per_unit(self) -> int:
        return self.model.positions


def require_apex(*, optimizer_impl: str, layernorm_impl: str) -> None:
    """Raise UsageError if an implementation is "apex" and its parts are not installed: a file of
    NVIDIA's apex and an extension, found without an import, because extensions load torch."""
    norm = "normalization/fused_layer_norm.py"
    for name, value, file, extension in (
        ("optimizer_impl", optimizer_impl, "optimizers/fused_adam.py", "amp_C"),
        ("layernorm_impl", layernorm_impl, norm, "fused_layer_norm_cuda"),
    ):
        if value != "apex":
            continue
        if (origin := getattr(find_spec("apex"), "origin", None)) is None:
            reason = "NVIDIA's apex is not installed"
        elif not (Path(origin).parent / file).is_file():
            reason = f"{origin} is not NVIDIA's but most likely PyPI's apex (pip uninstall apex)"
        elif getattr(find_spec(extension), "origin", None) is None:
            reason = f"apex is installed without its extension {extension}"
        else:
            continue
        allowed = f"torch: {reason}; bash scripts/setup.sh --with-apex DIR builds NVIDIA's"
        raise UsageError(flag(name), "apex", allowed, works="torch")
