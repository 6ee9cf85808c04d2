"""The protocol of a task: settings, windows or examples, and the meaning of their scores; no torch.

The module of a task has
    Settings, a dataclass derived from TaskSettings, from ImageSettings, or from FinetuneSettings
    for a task that a pretrained BERT is fine-tuned on;
    prepare(settings, manifest, tokenizer), which reads and checks its input and returns a Task, an
    ImageTask (which has no tokenizer) or a Finetuning: each has a `score` that turns the model's
    output into figures.
A fine-tuned task that can score answers in a file also has score_only(settings) -> the figures and
their "conventions"; Settings.judged names the field of that file.
If one module has several tasks, each is a class with these as attributes, and is selected by, for
example, --task tasks.mine:Two. README.md adds a task of windows and a fine-tuned one in
40 lines; cifar10.py is a task of images.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp, inf
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.config.checkpoint import TrainedConfig
from megatron.config.checks import fraction, non_negative, positive, share, writable
from megatron.config.model import Head, RecomputeGranularity
from megatron.config.parallel import ContextParallelConfig, FinetuneParallelConfig
from megatron.data.text_checks import MAX_UNKNOWN
from megatron.data.tokenizer import GPT2BPETokenizer, Tokenizer
from megatron.errors import UsageError

if TYPE_CHECKING:
    from megatron.data.images import Images

Tokens: TypeAlias = Sequence[int] | NDArray[Any]
Logits: TypeAlias = Mapping[str, Sequence[NDArray[np.float32]]]
"""By evaluation, an array per example, in order: [classes], [options], or [n, 2] for the n tokens
of its sequence, as start and as end of the answer."""

TABLE_6 = ("epochs", "lr", "global_batch_size")  # set by presets, which evaluations may use, too
REGULARIZATION = ("weight_decay", "clip_grad", "hidden_dropout", "attention_dropout")
# Searched by --search: settings of training that `prepare` does not read.
SEARCHED = (*TABLE_6, "lr_warmup_fraction", *REGULARIZATION)
SHORT = {"batch": "global_batch_size"}  # as in the paper's table 6


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    compare_paper: bool = False
    """Show the paper's figures next to the result, and put them into the record."""

    output: Path | None = field(default=None, metadata={"alias": "json"})
    """JSON file for the result, which is also printed. Also spelt --json."""

    def __post_init__(self) -> None:
        writable(self, "output")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(ReportConfig):
    micro_batch_size: int = 8
    """Windows per forward pass; it changes the result only by rounding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings that all tasks have; each task adds its own fields."""

    trained: TrainedConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)

    @property
    def files(self) -> Sequence[Path]:
        """Input files, which the record identifies: every field that is the path of a file."""
        return [each for each in vars(self).values() if isinstance(each, Path) and each.is_file()]


@dataclass(frozen=True, kw_only=True)
class ImageEvaluationConfig(EvaluationConfig):
    micro_batch_size: int = 8
    """Images per forward pass; it changes the result only by rounding."""


@dataclass(frozen=True, kw_only=True)
class ImageModelConfig:
    load: str
    """Directory of checkpoints, whose newest one is used; or one of its subdirectories."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and activations."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Settings of a task of images; each task adds its own fields."""

    trained: ImageModelConfig
    evaluation: ImageEvaluationConfig = field(default_factory=ImageEvaluationConfig)
    parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)


@dataclass(frozen=True)
class Window:
    """One forward pass: inputs and labels of equal length. Labels from `first` on are scored, at
    least one. Label i is the token that follows inputs[: i + 1]."""

    inputs: Tokens
    labels: Tokens
    first: int


class WindowSequence(Protocol):
    """Windows by number, 0 to len - 1: a list, or an object that makes each window on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Window: ...


@dataclass(frozen=True)
class Scores:
    """A model's scores for the scored labels of each window, in the order of the windows."""

    log_probability: NDArray[np.float64]  # [N], natural, summed over the window's scored labels
    tokens: NDArray[np.int64]  # [N], number of scored labels
    hits: NDArray[np.int64]  # [N], how many of them were the most probable token
    last_hit: NDArray[np.bool_]  # [N], whether the last of them was the most probable token

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Scores:
        return Scores(*(array[part] for array in vars(self).values()))

    @property
    def all_hit(self) -> NDArray[np.bool_]:
        """[N], whether every scored label was the most probable token."""
        return np.equal(self.hits, self.tokens)

    def perplexity(self, count: float) -> float:
        """exp of the total negative log-likelihood / `count`; infinite if that overflows."""
        mean = -float(self.log_probability.sum()) / count
        return inf if mean > 700 else exp(mean)


@dataclass(frozen=True)
class Prompts:
    """Texts to continue by greedy decoding: the most probable token each time."""

    tokens: Sequence[Tokens]
    is_done: Callable[[Sequence[int]], bool]  # whether these new tokens are enough
    most: int  # largest number of new tokens per prompt
    ends: Sequence[int]  # tokens that end a text; they are not part of the result


class Task(ABC):
    """The windows of a task (len and indexing), and the figures computed from their scores."""

    prompts: Prompts | None = None
    """Set by a task that compares the text that the model writes."""
    windows: WindowSequence
    """All windows, where the task makes them in advance. A task that makes each window on demand
    overrides __len__ and __getitem__ instead."""

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> Window:
        return self.windows[number]

    @abstractmethod
    def score(self, scores: Scores, continuations: Sequence[Sequence[int]]) -> Mapping[str, Any]:
        """The figures, JSON; called only on the first rank. "conventions" gives the meaning of each
        figure by its name, and "protocol", where needed, how the figures were measured.

        continuations: the new tokens of each prompt; empty without prompts.
        """


class ImageTask(ABC):
    """Images by class, and the figures computed from a model's predictions."""

    images: Images
    data: Mapping[str, Any]
    """Identity of the images, for the record."""

    @abstractmethod
    def score(self, best: NDArray[np.int64]) -> Mapping[str, Any]:
        """The figures, as those of a Task.

        best: [images, up to 5], the classes with the highest scores of each image, best first.
        """


@dataclass(frozen=True)
class Sliding:
    """Windows of at most `length` in which every token but the first is scored exactly once.

    The first window scores all the tokens that it predicts. Each later window scores its last
    `stride` tokens, so each of them has at least length - stride tokens of context.

    Window k starts at k x stride, and the last one may be shorter, as in the paper (appendix E:
    length 1024, stride 32) and its authors' code. reach_back: the last window starts early enough
    to be full, which gives its tokens more context, as in lm-evaluation-harness.
    """

    tokens: Tokens
    length: int
    stride: int
    reach_back: bool = False

    def __post_init__(self) -> None:
        assert 1 <= self.stride <= self.length

    def __len__(self) -> int:
        predicted = len(self.tokens) - 1
        if predicted < 1:
            return 0
        return 1 + max(0, -(-(predicted - self.length) // self.stride))

    def __getitem__(self, number: int) -> Window:
        if not 0 <= number < len(self):
            raise IndexError(number)
        done = self.length + (number - 1) * self.stride if number else 0
        end = min(len(self.tokens) - 1, done + (self.stride if number else self.length))
        start = max(0, end - self.length) if self.reach_back else number * self.stride
        return Window(self.tokens[start:end], self.tokens[start + 1 : end + 1], done - start)


def encode_targets(
    tokenizer: Tokenizer, places: Sequence[object], contexts: Sequence[str], targets: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    """(ids of the context, ids of the target) of each pair: the ids of context + target, split
    where the ids of the context end.

    places: location of each pair in the input, for messages. Raises ValueError where no id begins
    at the target; lm-evaluation-harness splits inside the id there, and scores the rest.
    """
    wholes = list(map(add, contexts, targets))
    pairs = zip(tokenizer.encode_batch(contexts), tokenizer.encode_batch(wholes), strict=True)
    for place, target, (start, ids) in zip(places, targets, pairs, strict=True):
        if ids[: len(start)] != start or len(ids) == len(start):
            raise ValueError(
                f"{place}: no token of the model's tokenizer begins at {target!r}, so that it has "
                "no tokens to score; a model with a byte-level BPE would work, such as "
                f"--tokenizer-type {GPT2BPETokenizer.kind}"
            )
        yield start, ids[len(start) :]


@dataclass(frozen=True, kw_only=True)
class ChecksConfig:
    max_truncated: float = 0.25
    """Largest share of the sequences that may be cut at --seq-length; more is an error."""

    max_unknown: float = MAX_UNKNOWN
    """Largest share of the tokens that may be [UNK]; more is an error."""

    allow_lower_case: bool = False
    """Accept text without capitals though the model's vocabulary has them."""

    def __post_init__(self) -> None:
        share(self, "max_truncated", "max_unknown")


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Settings that all fine-tuned tasks have; each adds fields, and has its own defaults."""

    judged: ClassVar[str] = ""
    """Name of the field with the file of answers, for a task that has `score_only`."""
    hyper_parameters: ClassVar[tuple[str, ...]] = (
        "seq_length",
        "deterministic",
        *SEARCHED,
        "micro_batch_size",
        "dtype",
    )
    """Fields that decide a model's result besides data, model and seed; a task adds its own. A
    finished seed is reused only where they are the same."""
    other_settings: ClassVar[tuple[str, ...]] = ("checks",)
    """Fields that a task adds and that decide no result."""

    load: str | None = field(default=None, metadata={"alias": "pretrained_checkpoint"})
    """Checkpoint of a pretrained BERT to fine-tune, or of a fine-tuned one, which is only
    evaluated. A directory, whose newest checkpoint is used, or one of its subdirectories. Also
    spelt --pretrained-checkpoint."""

    ensemble: tuple[str, ...] = ()
    """Checkpoints of fine-tuned models, in place of --load. Each model is evaluated, and so is the
    mean of their logits (paper, table 5)."""

    vocab_file: str | None = None
    """The tokenizer's vocabulary (vocab.txt); the checkpoint's own if not given."""

    train_data: tuple[Path, ...] = ()
    """Training data; without it a fine-tuned model is evaluated."""

    valid_data: tuple[Path, ...]
    """Evaluation data, used after every epoch."""

    seq_length: int = 512
    """Longest sequence, in tokens, special tokens included; longer ones are cut."""

    epochs: int = 3
    """Number of times that every example is trained on."""

    seeds: int | None = None
    """Number of runs, with --seed, --seed + 1, ...; the median and the spread are reported. If not
    given, 1, or 5 with --search."""

    search: tuple[str, ...] = ()
    """Values to choose from, such as lr=1e-5,2e-5 batch=16,32: every combination is trained with
    --seed, and that with the highest figure on --valid-data at its last epoch is trained with all
    seeds. Names: lr, batch (or global-batch-size), epochs, lr-warmup-fraction, weight-decay,
    clip-grad, hidden-dropout, attention-dropout."""

    seed: int = 1234
    """Seed of the new head, the order of the examples and dropout."""

    deterministic: bool = False
    """Give bitwise the same result in every run; see pretrain_bert.py --help."""

    lr: float = 2e-5
    """Highest learning rate, from which it falls linearly to 0."""

    lr_warmup_fraction: float = 0.065
    """Fraction of the steps in which the learning rate rises linearly from 0."""

    weight_decay: float = 0.1
    """Decoupled weight decay; biases and LayerNorm are exempt."""

    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0 disables clipping."""

    hidden_dropout: float = 0.1
    """Dropout probability of the embeddings, before each residual add and before the head."""

    attention_dropout: float = 0.1
    """Dropout probability of the attention probabilities."""

    micro_batch_size: int = 8
    """Examples per forward pass, each with all of its options; it changes the result only by
    rounding."""

    global_batch_size: int = 32
    """Examples per optimizer step; the last step of an epoch has the remaining ones."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of weights and activations; master weights are fp32. If not given, training uses bf16
    where the device has it, else fp32; an evaluation uses the dtype of the fine-tuning, or fp32 for
    an imported model."""

    recompute_granularity: RecomputeGranularity = field(
        default="none", metadata={"alias": "checkpoint_activations"}
    )
    """Activations recomputed in the backward pass, to save memory: full, each layer from its input;
    selective, only the attention core, which saves the memory of its probabilities where its kernel
    keeps them. Also spelt --checkpoint-activations."""

    save: Path | None = None
    """Directory for the checkpoints of every seed's last and best epoch. The same command does not
    run seeds again that are finished there. With --search each combination has a folder there."""

    evaluation: ReportConfig = field(default_factory=ReportConfig)
    parallel: FinetuneParallelConfig = field(default_factory=FinetuneParallelConfig)

    def __post_init__(self) -> None:
        positive(
            self, "seq_length", "epochs", "seeds", "lr", "micro_batch_size", "global_batch_size"
        )
        non_negative(self, "seed", "weight_decay", "clip_grad")
        fraction(self, "lr_warmup_fraction", "hidden_dropout", "attention_dropout")
        if not self.valid_data:
            raise UsageError("--valid-data", None, "followed by files to evaluate on")
        self.combinations()  # refuses what cannot be searched

    def searched(self) -> dict[str, list[Any]]:
        """The values of --search by field; raises UsageError for other names and values."""
        found: dict[str, list[Any]] = {}
        for word in self.search:
            name, _, values = word.partition("=")
            name = name.lstrip("-").replace("-", "_")
            name = SHORT.get(name, name)
            if name not in SEARCHED or name in found:
                names = ", ".join([*SHORT, *SEARCHED]).replace("_", "-")
                raise UsageError("--search", word, f"NAME=VALUE,VALUE, once each of {names}")
            is_whole = name in ("global_batch_size", "epochs")
            try:
                found[name] = [(int if is_whole else float)(each) for each in values.split(",")]
            except ValueError:
                kind = "whole numbers" if is_whole else "numbers"
                raise UsageError("--search", word, f"{name}=VALUE,VALUE with {kind}") from None
        # In this order for every order of the words: it names the folders of --save.
        return {name: found[name] for name in SEARCHED if name in found}

    def combinations(self) -> list[dict[str, Any]]:
        """All values of --search. Raises UsageError for one that its own flag refuses."""
        if not self.search:
            return []
        searched = self.searched()
        found = [dict(zip(searched, values, strict=True)) for values in product(*searched.values())]
        for values in found:
            try:
                replace(self, search=(), **values)
            except UsageError as error:
                before = f"values that their flags accept: {error.flag} must be "
                raise error.about("--search", " ".join(self.search), before=before) from error
        return found

    @property
    def is_judged(self) -> bool:
        """Whether answers in a file are scored, without a model."""
        return bool(self.judged) and getattr(self, self.judged) is not None

    @property
    def files(self) -> Sequence[Path]:
        """Input files and folders, which the record identifies."""
        single = [each for each in vars(self).values() if isinstance(each, Path)]
        others = [path for path in single if path.is_file()]
        return [*self.train_data, *self.valid_data, *others]


@dataclass(frozen=True)
class Encoding:
    """One sequence as BERT reads it: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

    tokens: Tokens  # [n]
    second: int  # token type is 1 from this position on, after a's [SEP]; n where there is no b


@dataclass(frozen=True)
class Example:
    """One sequence and its class or span, or all options of a question and the right one."""

    options: tuple[Encoding, ...]
    label: tuple[int, ...]
    """(class,), (right option,), or (first token, last token) of the answer; () where it is
    unknown: such an example can only be evaluated."""

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(each.tokens) for each in self.options)


class Finetuning(ABC):
    """Data and figures of a task. A subclass has these as fields or as class attributes."""

    head: Head
    """classifier: class of a sequence; choice: one of several sequences; span: part of one."""

    labels: tuple[str, ...]
    """A classifier's classes, in the order of their ids; () for the other heads."""

    train: Sequence[Example]
    """Training examples, all with the same number of options; empty where nothing is trained."""

    evaluations: Mapping[str, Sequence[Example]]
    """Examples by evaluation, such as matched and mismatched; "" for a task with only one."""

    best: str
    """A figure; the epoch with the highest value of it is the best one."""

    conventions: Mapping[str, str]
    """Meaning of each figure, by its name in the record."""

    notes: Mapping[str, Any]
    """For the record, JSON. Its entry "input" says what was counted and cut in the data: "train",
    and "valid" with one entry per evaluation."""

    paper: str | None = None
    """The task's name in the paper's table 5 (tasks/paper.py), if it differs from --task."""

    @abstractmethod
    def score(self, logits: Logits) -> Mapping[str, Any]:
        """The figures of all evaluations: numbers, or mappings of numbers. Called only on the first
        rank. See `figure_name` for their names where there are several evaluations."""


def figure_name(evaluation: str, figure: str) -> str:
    """Name of a figure in the record, such as matched_accuracy. The figures of the evaluation ""
    and those over all evaluations have no prefix (accuracy)."""
    return f"{evaluation}_{figure}" if evaluation else figure


def by_evaluation(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures, or their meanings, of each evaluation by their names in the record."""
    return {
        figure_name(evaluation, figure): value
        for evaluation, figures in evaluations.items()
        for figure, value in figures.items()
    }
