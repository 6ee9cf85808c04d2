"""The configs of a training run other than its model, in the order of --help."""

import math
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import ClassVar, Literal

from megatron.config.checks import (
    at_most,
    excludes,
    fraction,
    left_out,
    needs,
    non_negative,
    not_empty,
    positive,
    share,
)
from megatron.config.parts import check_parts
from megatron.errors import UsageError, flag

SOURCES = {"mock_data", "data_path", "dataset_name", "dataset"}
"""Fields that say where the samples are from."""
OF_PACKED = {"reset_position_ids", "reset_attention_mask", "eod_mask_loss"}
OF_PADDED = {"json_key", "begin_token", "end_token", "too_long", "cache_tokens"}
OF_PADDED |= {"dataset_name", "dataset_config", "dataset_split"}
OF_FILES = {"data_path", "split", "tokenizer_type", "vocab_file", "merge_file", "shuffle", "pad"}
OF_FILES |= OF_PACKED | {"short_seq_prob", "max_ngram_size"}
OF_FILES |= {"cache_dir", "crop_padding", "flip", "dataset"}
"""Fields that have no effect on mock data."""
# Metadata of fields that each kind of data explains in its own words.
PATH: dict[str, object] = {"replaces": SOURCES - {"data_path"}, "resume": "free"}
MOCK: dict[str, object] = {"replaces": OF_FILES | OF_PADDED | {"epochs"}, "resume": "free"}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data settings of all pretraining programs."""

    resume: ClassVar[str] = "data"

    data_path: tuple[str, ...] = field(default=(), metadata=PATH)

    mock_data: bool = field(default=False, metadata=MOCK)
    """Random samples in place of --data-path, to try a layout."""

    shuffle: bool = True
    """Read the samples of each epoch in its own random order; with --no-shuffle in file order."""

    dataset: str | None = field(default=None, metadata={"replaces": SOURCES - {"dataset"}})
    """Data set of your own in place of --data-path: module:name of a function that takes config,
    the settings of the run, and returns its Inputs."""

    sampler: str = "in-order"
    """Part that chooses the sample that is read in place of number n: in-order, or module:name of a
    function of number, samples_per_epoch and seed. The order of --shuffle comes after it."""

    num_workers: int = field(default=2, metadata={"resume": "free"})
    """Threads that prefetch, one step each."""

    def __post_init__(self) -> None:
        not_empty(self)
        check_parts(self, custom=False)
        positive(self, "num_workers")
        excludes(self, "dataset", "data_path")
        excludes(self, "mock_data", *(each.name for each in fields(self) if each.name in OF_FILES))

    @property
    def source(self) -> tuple[str, ...]:
        """The flag that says where the samples are from, with its values."""
        for name in ("dataset", "dataset_name"):
            if (value := getattr(self, name, None)) is not None:
                return flag(name), value
        return "--data-path", *self.data_path


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(DataConfig):
    """Data settings of models of text."""

    data_path: tuple[str, ...] = field(default=(), metadata=PATH)
    """Prefix of a .bin/.idx pair, or weights and prefixes in turn: 0.3 first 0.7 second. GPT-2
    with --pad: files of JSON lines or parquet, folders of parquet or of datasets' save_to_disk."""

    mock_data: bool = field(default=False, metadata=MOCK)
    """Random tokens in place of --data-path, to try a layout; the vocabulary is --vocab-size."""

    split: str = "29,1,0"
    """Shares of the documents for training, validation and test."""

    seq_length: int = 1024
    """Tokens of a sample."""

    tokenizer_type: str = field(default="GPT2BPETokenizer", metadata={"resume": "free"})
    """Kind of tokenizer that made the data set."""

    vocab_file: str | None = field(
        default=None, metadata={"alias": "tokenizer_model", "resume": "free"}
    )
    """The tokenizer's vocabulary: vocab.json, vocab.txt of a WordPiece, or for a
    HuggingFaceTokenizer tokenizer.json or its folder. Also spelt --tokenizer-model."""

    merge_file: str | None = field(default=None, metadata={"resume": "free"})
    """The byte-pair encoding's merges (merges.txt)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "seq_length")
        try:
            weights = [Fraction(weight) for weight in self.split.split(",")]
        except (ValueError, ZeroDivisionError):
            weights = []
        if len(weights) != 3 or min(weights) < 0 or sum(weights) == 0:
            allowed = "three weights (training, validation, test), 0 or above, not all 0"
            raise UsageError("--split", self.split, allowed, works="1,0,0")


@dataclass(frozen=True, kw_only=True)
class GPT2DataConfig(TextDataConfig):
    reset_position_ids: bool = False
    """Count positions from 0 again after each end-of-document mark."""

    reset_attention_mask: bool = False
    """Let no token attend to an earlier document."""

    eod_mask_loss: bool = False
    """Leave out the loss where the input is an end-of-document mark."""

    pad: bool = False
    """Read documents, one per sample, tokenised on demand and padded on the right. Padding is not
    in the loss, and not counted in tokens/s."""

    dataset_name: str | None = field(
        default=None, metadata={"replaces": SOURCES - {"dataset_name"}, "resume": "free"}
    )
    """With --pad, in place of --data-path: a data set on the hub, or a local folder or file of
    JSON, CSV, parquet or text, which datasets.load_dataset copies to its cache."""

    dataset_config: str | None = field(default=None, metadata={"resume": "free"})
    """The configuration, if --dataset-name or a folder of parquet has several."""

    dataset_split: str | None = field(default=None, metadata={"resume": "free"})
    """The split of --dataset-name, or of a folder of --data-path that holds several; train if not
    given. Then --split divides it."""

    json_key: str = field(default="text", metadata={"alias": "text_column", "resume": "free"})
    """The key of a JSON line, or the column, that holds a --pad document's text."""

    begin_token: str | None = None
    """Token of the vocabulary before each --pad document, such as [BOT]; none if not given."""

    end_token: str | None = None
    """Token of the vocabulary after each --pad document; the tokenizer's end mark if not given."""

    too_long: Literal["cut", "refuse"] = field(default="cut", metadata={"resume": "free"})
    """Treatment of a --pad document of more than --seq-length + 1 tokens, begin and end included.
    cut: it is cut, and counted in the metrics. refuse: an error at the start, for which all
    documents are tokenised."""

    cache_tokens: bool = False
    """Cache the tokens of --pad's JSON lines in a file beside them, whose name has the hash of
    their content and of the tokenizer. Every later run and epoch reads this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in fields(self):
            if each.name in OF_PACKED:
                excludes(self, each.name, "pad", because="with which a sample is one document")
            elif each.name in OF_PADDED:
                needs(self, each.name, "pad")
        excludes(self, "data_path", "dataset_name")
        excludes(self, "dataset", "dataset_name")


@dataclass(frozen=True, kw_only=True)
class LlamaDataConfig(GPT2DataConfig):
    tokenizer_type: str = "HuggingFaceTokenizer"


@dataclass(frozen=True, kw_only=True)
class BertDataConfig(TextDataConfig):
    seq_length: int = 512
    """Tokens of a sample, padding and marks included."""

    tokenizer_type: str = "BertWordPieceLowerCase"

    mask_prob: float = 0.15
    """Share of the tokens that are to be predicted."""

    short_seq_prob: float = 0.1
    """Probability of a sample that is shorter than --seq-length would allow."""

    max_ngram_size: int = 3
    """Most words that are masked together; n words have a probability in proportion to 1/n."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_ngram_size", "mask_prob")
        share(self, "mask_prob")
        fraction(self, "short_seq_prob")


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig(DataConfig):
    data_path: tuple[str, ...] = field(default=(), metadata=PATH)
    """Folder with train/CLASS/ and test/CLASS/ of images, or with the binary files of CIFAR-10; or
    the packed file that an earlier run made of it."""

    mock_data: bool = field(default=False, metadata=MOCK)
    """Random images in place of --data-path, to try a layout."""

    cache_dir: str | None = field(default=None, metadata={"resume": "free"})
    """Folder of the packed images, made at the first start; the one of --data-path if not given."""

    crop_padding: int = 4
    """Black pixels on each side of a training image before a random crop to its size; 0 crops
    none."""

    flip: bool = True
    """Mirror every other training image, at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        non_negative(self, "crop_padding")
        if len(self.data_path) > 1:
            raise UsageError("--data-path", " ".join(self.data_path), "one folder or packed file")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    resume: ClassVar[str] = "free"

    lr: float = 1.5e-4
    """Highest learning rate, reached at the end of warm-up."""

    min_lr: float = 1e-5
    """Learning rate at and after the end of decay."""

    lr_decay_style: str = "cosine"
    """Curve of the learning rate after warm-up: cosine, linear, constant, inverse-sqrt, wsd
    (constant, then linear over --lr-wsd-decay-iters), or module:name of a part."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of the decay at the end of --lr-decay-style wsd; a tenth of all if not given."""

    lr_decay_iters: int | None = None
    """Iteration at which decay ends, warm-up included; --train-iters if not given."""

    lr_warmup_iters: int = field(default=0, metadata={"replaces": {"lr_warmup_fraction"}})
    """Iterations over which the learning rate rises linearly from 0, or --lr-warmup-init."""

    lr_warmup_fraction: float | None = field(
        default=None, metadata={"replaces": {"lr_warmup_iters"}}
    )
    """Warm-up as a share of the iterations until the end of decay, in place of --lr-warmup-iters;
    rounded to whole iterations, at least 1."""

    lr_warmup_init: float | None = None
    """Learning rate of the first update, from which it rises. If given, warm-up and decay count
    completed updates, as torch's schedulers and Megatron-LM do, without the current one."""

    weight_decay: float = 0.01
    """Weight decay; biases and norms are exempt."""

    decoupled_weight_decay: bool = True
    """AdamW's decay, which shrinks the weights themselves; with --no-decoupled-weight-decay that of
    torch.optim.Adam, which is added to the gradient, after clipping; sgd, adagrad and rmsprop have
    no other."""

    decay_biases_and_norms: bool = False
    """Let weight decay act on biases and norms, too, as torch's optimizers do by default."""

    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""

    adam_beta2: float = 0.999
    """Decay of Adam's mean of squared gradients."""

    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""

    optimizer: str = field(default="adamw", metadata={"resume": "state"})
    """Part that updates the weights: adamw; torch's sgd, adam, adagrad and rmsprop; muon and
    adafactor, which need whole matrices, without tensor parallelism and ZeRO; or module:name."""

    sgd_momentum: float = field(default=0.9, metadata={"resume": "state"})
    """Momentum of --optimizer sgd."""

    optimizer_impl: Literal["torch", "apex", "compiled"] = "torch"
    """adamw: torch's own fused kernel, NVIDIA apex's FusedAdam, or a kernel by torch.compile that
    also rounds the weights (not yet run on a GPU)."""

    optimizer_cpu_offload: bool = False
    """Keep master weights and Adam's moments in host memory and update them there."""

    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0 disables clipping."""

    def __post_init__(self) -> None:
        check_parts(self, custom=False)
        no_cpu = "as the host's Adam is torch's"
        excludes(self, "optimizer_impl", "optimizer_cpu_offload", because=no_cpu)
        excludes(self, "optimizer", "optimizer_impl", because="which is an AdamW")
        if self.optimizer in ("sgd", "adagrad", "rmsprop", "muon", "adafactor"):
            kind = "decoupled" if self.optimizer in ("muon", "adafactor") else "in the gradient"
            reason = f"with {{}} {self.optimizer}, whose decay is always {kind}"
            left_out(self, "decoupled_weight_decay", reason, "--optimizer")
        if self.optimizer != "sgd":
            left_out(self, "sgd_momentum", "without {} sgd", "--optimizer")
        if self.lr_decay_style != "wsd":
            left_out(self, "lr_wsd_decay_iters", "without {} wsd", "--lr-decay-style")
        excludes(self, "lr_warmup_fraction", "lr_warmup_iters")
        needs(self, "lr_warmup_init", "lr_warmup_iters", "lr_warmup_fraction")
        positive(self, "lr", "adam_eps", "lr_decay_iters", "lr_warmup_fraction")
        positive(self, "lr_wsd_decay_iters")
        non_negative(self, "min_lr", "lr_warmup_iters", "lr_warmup_init", "weight_decay")
        non_negative(self, "clip_grad")
        fraction(self, "adam_beta1", "adam_beta2", "sgd_momentum")
        share(self, "lr_warmup_fraction")
        at_most(self, "min_lr", self.lr, "--lr")
        at_most(self, "lr_warmup_init", self.lr, "--lr")

    def warmup_iters(self, decay_iters: int) -> int:
        """Iterations of warm-up, where decay ends at iteration `decay_iters`."""
        if self.lr_warmup_fraction is None:
            return self.lr_warmup_iters
        return max(1, round(self.lr_warmup_fraction * decay_iters))


@dataclass(frozen=True, kw_only=True)
class BertOptimizerConfig(OptimizerConfig):
    """Defaults of the paper's BERT (section 4.2)."""

    lr: float = 1e-4
    min_lr: float = 0.0
    lr_decay_style: str = "linear"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    resume: ClassVar[str] = "free"

    train_iters: int | None = field(default=None, metadata={"replaces": {"epochs"}})
    """Optimizer steps to train for, those before a resume included; this or --epochs is needed."""

    epochs: int | None = field(default=None, metadata={"replaces": {"train_iters"}})
    """Passes over the training split to train for, in place of --train-iters: the steps of whole
    global batches in them. A blend ends when one of its data sets has been read this many times."""

    micro_batch_size: int = 1
    """Samples of one forward and backward pass on one model; in --tensor-parallel-mode 2d, 2.5d and
    3d, on each of the processes of a model that read different samples."""

    global_batch_size: int | None = None
    """Samples of an optimizer step. If not given: --micro-batch-size x the processes that read
    different samples, which are the data-parallel models except in --tensor-parallel-mode 2d, 2.5d
    and 3d."""

    seed: int = field(default=1234, metadata={"resume": "data"})
    """Seed of initialisation, data order and dropout."""

    eval_interval: int | None = 1000
    """Steps between evaluations on the validation split."""

    eval_iters: int = 100
    """Global batches of an evaluation; 0 disables evaluation."""

    exit_interval: int | None = None
    """Save and exit at the next step that is a multiple of this."""

    exit_duration_in_mins: float | None = None
    """Save and exit after this many minutes."""

    compile: bool | None = None
    """Compile the transformer's layers with torch.compile: seconds to a minute at the start, then
    faster steps. If not given, only on a GPU whose compiler works, and not for --model
    huggingface."""

    cuda_graph: bool | None = field(default=None, metadata={"resume": "effect"})
    """Record forward and backward of a step as one CUDA graph, which the GPU replays without
    waiting for the host. The graph keeps the memory of a step between steps. If not given: with
    one process on a GPU, but not with --fp16, --cpu-offload-activations, --model huggingface,
    apex's norm, or --attention-dropout drawn by a kernel."""

    deterministic: bool = False
    """Give the same bits in every run, by deterministic operators, cuBLAS, NCCL and compiler:
    slower on a GPU. On a CPU it changes nothing."""

    check_replicas_interval: int = 100
    """Steps between comparisons of the state that ranks hold in common; 0 disables them."""

    def __post_init__(self) -> None:
        positive(self, "train_iters", "epochs", "micro_batch_size", "global_batch_size")
        positive(self, "eval_interval", "exit_interval", "exit_duration_in_mins")
        non_negative(self, "seed", "eval_iters", "check_replicas_interval")
        if self.train_iters is None and self.epochs is None:
            raise UsageError("--train-iters", None, "given, or else {}", "--epochs", works=1000)
        excludes(self, "train_iters", "epochs")

    @property
    def steps(self) -> int:
        """Optimizer steps to train for; with --epochs they are known once the data are open, see
        `PretrainConfig.with_steps`."""
        assert self.train_iters is not None
        return self.train_iters


@dataclass(frozen=True, kw_only=True)
class ImageTrainingConfig(TrainingConfig):
    eval_interval: int | None = None
    """Steps between evaluations on the validation split; an epoch's steps if not given."""

    eval_iters: int = 1000
    """Global batches of an evaluation, at most those of the validation split; 0 disables it."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    resume: ClassVar[str] = "free"

    bf16: bool | None = field(default=None, metadata={"replaces": {"fp16"}, "resume": "effect"})
    """Compute in bfloat16, with fp32 master weights and gradient accumulation. If neither this nor
    --fp16 is given: as in the resumed checkpoint, else on if the device has it."""

    fp16: bool = field(
        default=False, metadata={"replaces": {"bf16", "pure_bf16"}, "resume": "effect"}
    )
    """Compute in float16 with loss scaling and fp32 master weights."""

    pure_bf16: bool = field(default=False, metadata={"replaces": {"fp16"}, "resume": "effect"})
    """Keep everything in bfloat16: weights, gradients and Adam's moments, without master weights. A
    weight takes 8 bytes in place of 18; updates below its rounding, one part in 256, are lost."""

    loss_scale: float | None = None
    """Loss scale that never changes; dynamic if not given."""

    initial_loss_scale: str = "2**16"
    """Loss scale to start with: a decimal or 2**N."""

    loss_scale_window: int = 1000
    """Steps without overflow after which the loss scale is raised."""

    loss_scale_factor: float = 2.0
    """Factor that multiplies the loss scale after a window, and divides it after overflows."""

    hysteresis: int = 2
    """Overflows within a window after which the loss scale is lowered."""

    min_loss_scale: float = 1.0
    """Lowest loss scale; an overflow there ends the run."""

    max_consecutive_skips: int = 50
    """Steps skipped in a row for overflow after which the run ends."""

    def __post_init__(self) -> None:
        excludes(self, "fp16", "bf16")
        excludes(self, "pure_bf16", "fp16")
        if self.pure_bf16 and self.bf16 is False:
            works = ("--bf16", "--pure-bf16")
            raise UsageError("--pure-bf16", None, "given without {}", "--no-bf16", works=works)
        of_dynamic = ["initial_loss_scale", "loss_scale_window", "loss_scale_factor"]
        of_dynamic += ["hysteresis", "min_loss_scale"]
        for name in ("loss_scale", "max_consecutive_skips", *of_dynamic):
            needs(self, name, "fp16")
        for name in of_dynamic:
            excludes(self, name, "loss_scale", because="which never changes")
        positive(self, "loss_scale", "loss_scale_window", "hysteresis")
        positive(self, "min_loss_scale", "max_consecutive_skips")
        if not 1 < self.loss_scale_factor < math.inf:
            raise UsageError("--loss-scale-factor", self.loss_scale_factor, "above 1", works=2)
        if self.fp16 and self.loss_scale is None:
            at_most(self, "min_loss_scale", self.first_scale(), "--initial-loss-scale")

    @property
    def name(self) -> str | None:
        """Dtype of the computation: "fp16", "bf16" or "fp32", or None if the command line leaves it
        open."""
        if self.fp16:
            return "fp16"
        if self.pure_bf16:
            return "bf16"
        return None if self.bf16 is None else "bf16" if self.bf16 else "fp32"

    def first_scale(self) -> float:
        """The dynamic loss scale of the first step."""
        name, text = "--initial-loss-scale", self.initial_loss_scale.replace(" ", "")
        try:
            value = 2.0 ** int(text[3:]) if text.startswith("2**") else float(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not 0 < value < math.inf:
            raise UsageError(name, text, "a positive decimal or 2**N", works="2**16")
        return value


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    log_interval: int = 10
    """Steps between lines of metrics."""

    log_ranks: bool = False
    """Log a line for each rank at the start: its coordinate on each axis, host and device."""

    metrics_file: str | None = None
    """JSON lines of metrics, the record of a run; metrics.jsonl in --save if not given."""

    wandb_project: str | None = None
    """Send metrics to this project of Weights & Biases, too; without a key in the environment or a
    netrc file they are kept on disk, for wandb sync."""

    tensorboard_dir: str | None = None
    """Write metrics as TensorBoard event files to this folder, too."""

    callbacks: tuple[str, ...] = ()
    """Callbacks of one's own, each as module:name of a subclass of megatron.api.Callback or of a
    function that makes one: their methods run before and after training, steps, evaluations and
    saves."""

    sample_interval: int | None = None
    """Steps between continuations of --sample-prompts by the model as it is; they go to the log
    and the metrics. They are drawn from the 40 most probable tokens, at most 64 of them, by
    --seed."""

    sample_prompts: str | None = None
    """UTF-8 file of texts to continue, one per line, without blank lines."""

    profile_step_start: int | None = None
    """First step that is profiled: a table of where its time goes, and a trace of each process for
    Perfetto or chrome://tracing, in profile/ beside the metrics."""

    profile_step_end: int | None = None
    """Last step that is profiled."""

    def __post_init__(self) -> None:
        not_empty(self)
        check_parts(self, custom=False)
        for one, other in (
            ("sample_interval", "sample_prompts"),
            ("profile_step_start", "profile_step_end"),
        ):
            needs(self, one, other)
            needs(self, other, one)
        positive(self, "log_interval", "sample_interval", "profile_step_start", "profile_step_end")
        if self.profile_step_start is not None and self.profile_step_end is not None:
            at_most(self, "profile_step_start", self.profile_step_end, "--profile-step-end")
