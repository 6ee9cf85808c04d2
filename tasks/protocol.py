"""The protocol of a task that a pretrained BERT is fine-tuned on; needs no torch.

The module of such a task has
    Settings, a dataclass derived from FinetuneSettings;
    prepare(settings, manifest, tokenizer) -> Finetuning, which reads and checks its input;
    and, if it can score answers in a file, score_only(settings) -> the figures and their
    "conventions", or None where the settings name no such file; Settings.judged names the field.
If one module has several tasks, each is a class with these as attributes, and is selected by, for
example, --task tasks.glue:QQP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import fraction, non_negative, positive
from megatron.config.model import Head, RecomputeGranularity
from megatron.config.parallel import FinetuneParallelConfig
from megatron.errors import UsageError
from tasks.common import ReportConfig, Tokens

BESIDE = {"decides": False}  # metadata of a setting that affects neither training nor answers


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Settings that all fine-tuned tasks have; each adds fields, and has its own defaults."""

    judged: ClassVar[str] = ""
    """Name of the field with the file of answers, for a task that has `score_only`."""

    load: str | None = field(default=None, metadata={"alias": "pretrained_checkpoint", **BESIDE})
    """Checkpoint of a pretrained BERT to fine-tune, or of a fine-tuned one, which is only
    evaluated. A directory, whose newest checkpoint is used, or one of its subdirectories. Also
    spelt --pretrained-checkpoint."""

    ensemble: tuple[str, ...] = field(default=(), metadata=BESIDE)
    """Checkpoints of fine-tuned models, in place of --load. Each model is evaluated, and so is the
    mean of their logits (paper, table 5)."""

    vocab_file: str | None = field(default=None, metadata=BESIDE)
    """The tokenizer's vocabulary (vocab.txt); the checkpoint's own if not given."""

    train_data: tuple[Path, ...] = ()
    """Training data; without it a fine-tuned model is evaluated."""

    valid_data: tuple[Path, ...]
    """Evaluation data, used after every epoch."""

    seq_length: int = 512
    """Longest sequence, in tokens, special tokens included; longer ones are cut."""

    epochs: int = 3
    """Number of times that every example is trained on."""

    seeds: int = field(default=1, metadata=BESIDE)
    """Number of runs, with --seed, --seed + 1, ...; the median and the spread are reported."""

    seed: int = field(default=1234, metadata=BESIDE)
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
        default="none", metadata={"alias": "checkpoint_activations", **BESIDE}
    )
    """Activations recomputed in the backward pass, to save memory: full, each layer from its input;
    selective, only the attention core, which saves the memory of its probabilities where its kernel
    keeps them. Also spelt --checkpoint-activations."""

    save: Path | None = None
    """Directory for the checkpoints of every seed's last and best epoch. The same command does not
    run seeds again that are finished there."""

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

    best: tuple[str, str]
    """(evaluation, figure); the epoch with the highest value of it is the best one."""

    conventions: Mapping[str, str]
    """Meaning of each figure, by its name in the record (see `figure_name`)."""

    notes: Mapping[str, Any]
    """For the record, JSON. Its entry "input" says what was counted and cut in the data: "train",
    and "valid" with one entry per evaluation."""

    paper: str | None = None
    """The task's name in the paper's table 5 (tasks/paper.py), if it differs from --task."""

    @abstractmethod
    def figures(self, name: str, logits: Sequence[NDArray[np.float32]]) -> Mapping[str, Any]:
        """The figures of the evaluation `name`: numbers, or mappings of numbers.

        logits: one array per example, in order: [classes], [options], or [n, 2] for the n tokens of
        its sequence, as start and as end of the answer. Called only on the first rank.
        """

    def combined(self, figures: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Further figures over all evaluations. figures: those of each evaluation, by its name."""
        return {}


def figure_name(evaluation: str, figure: str) -> str:
    """Name of a figure in the record, such as matched_accuracy. The figures of the evaluation ""
    and of `combined` have no prefix (accuracy)."""
    return f"{evaluation}_{figure}" if evaluation else figure


def name_conventions(evaluations: Iterable[str], meanings: Mapping[str, str]) -> dict[str, str]:
    """`Finetuning.conventions` for evaluations that all have these figures."""
    return {
        figure_name(evaluation, figure): meaning
        for evaluation in evaluations
        for figure, meaning in meanings.items()
    }
