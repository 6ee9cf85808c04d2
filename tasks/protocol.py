"""The protocol of a task that a pretrained BERT is fine-tuned on; needs no torch.

The module of such a task has
    Settings, a dataclass made from FinetuneSettings;
    prepare(settings, manifest, tokenizer) -> Finetuning, which reads and checks its input;
    and, if it can judge answers that a file holds, score_only(settings) -> the figures and their
    "conventions", or None where the settings name no such file; Settings.judged is its field.
Where one module has several tasks, each is a class with these as attributes, and --task calls it
tasks.glue:QQP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import UsageError, fraction, non_negative, positive
from megatron.config.model import Head, RecomputeGranularity
from megatron.config.parallel import FinetuneParallelConfig
from tasks.common import ReportConfig, Tokens

BESIDE = {"decides": False}  # metadata of a setting without a say in what is learned or said


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """What every fine-tuned task takes; each adds fields, and has its own defaults."""

    judged: ClassVar[str] = ""
    """Which field names the file of answers for `score_only`, of a task that has it."""

    load: str | None = field(default=None, metadata={"alias": "pretrained_checkpoint", **BESIDE})
    """Checkpoint of a pretrained BERT, to be fine-tuned; or of a fine-tuned one, which is only
    evaluated. A directory, of which the newest is used, or one of its subdirectories. Also spelt
    --pretrained-checkpoint."""

    ensemble: tuple[str, ...] = field(default=(), metadata=BESIDE)
    """Checkpoints of fine-tuned models, in place of --load: each is evaluated, and so is the mean
    of their logits (paper, table 5)."""

    vocab_file: str | None = field(default=None, metadata=BESIDE)
    """The tokenizer's vocabulary (vocab.txt); the checkpoint's own if not given."""

    train_data: tuple[Path, ...] = ()
    """What to train on; without it a fine-tuned model is evaluated."""

    valid_data: tuple[Path, ...]
    """What to evaluate on, after every epoch."""

    seq_length: int = 512
    """Longest sequence, in tokens, with its special ones; longer ones are cut."""

    epochs: int = 3
    """Times that every example is trained on."""

    seeds: int = field(default=1, metadata=BESIDE)
    """Runs, with --seed, --seed + 1, ...; the median and the spread are reported."""

    seed: int = field(default=1234, metadata=BESIDE)
    """Seed of the new head, the order of the examples and dropout."""

    deterministic: bool = False
    """Give the same bits in every run; see pretrain_bert.py --help."""

    lr: float = 2e-5
    """Highest learning rate, from which it falls linearly to 0."""

    lr_warmup_fraction: float = 0.065
    """Share of the steps in which the learning rate rises linearly from 0."""

    weight_decay: float = 0.1
    """Decoupled weight decay; biases and LayerNorm are exempt."""

    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0 does not clip."""

    hidden_dropout: float = 0.1
    """Dropout probability of the embeddings, before each residual add and before the head."""

    attention_dropout: float = 0.1
    """Dropout probability of the attention probabilities."""

    micro_batch_size: int = 8
    """Examples of one forward pass, each with all of its options; it changes the result by rounding
    alone."""

    global_batch_size: int = 32
    """Examples of an optimizer step; the last one of an epoch has those that are left."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Weights and activations are computed in it; master weights are fp32. If not given, training
    takes bf16 where the device has it, else fp32, and an evaluation what the model was fine-tuned
    in, fp32 for one that was imported."""

    recompute_granularity: RecomputeGranularity = field(
        default="none", metadata={"alias": "checkpoint_activations", **BESIDE}
    )
    """What the backward pass computes again, to save memory: full, each layer from its input;
    selective, attention's core alone, which saves its probabilities where its kernel keeps them.
    Also spelt --checkpoint-activations."""

    save: Path | None = None
    """Directory for the checkpoints of every seed's last and best epoch. Seeds that are finished
    there are not run again by the same command."""

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
        """The input, files and folders, which the record identifies."""
        single = [each for each in vars(self).values() if isinstance(each, Path)]
        others = [path for path in single if path.is_file()]
        return [*self.train_data, *self.valid_data, *others]


@dataclass(frozen=True)
class Encoding:
    """One sequence as BERT reads it: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

    tokens: Tokens  # [n]
    second: int  # token type 1 from here on, after a's [SEP]; n where there is no b


@dataclass(frozen=True)
class Example:
    """One sequence and its class or its span; or all options of a question and the right one."""

    options: tuple[Encoding, ...]
    label: tuple[int, ...]
    """(class,), (right option,), or (first token, last token) of the answer; () where it is not
    known, which can be evaluated alone."""

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(each.tokens) for each in self.options)


class Finetuning(ABC):
    """What is trained and evaluated. A subclass has these as fields, or as class attributes."""

    head: Head
    """classifier: a class of a sequence; choice: one of several sequences; span: a part of one."""

    labels: tuple[str, ...]
    """A classifier's classes, in the order of their ids; () of the other heads."""

    train: Sequence[Example]
    """All with as many options; empty where nothing is trained."""

    evaluations: Mapping[str, Sequence[Example]]
    """By name, such as matched and mismatched. The name "" is for a task that has only one."""

    best: tuple[str, str]
    """(evaluation, figure), the highest of which tells the best epoch."""

    conventions: Mapping[str, str]
    """What each figure means, by its name in the record (see `figure_name`)."""

    notes: Mapping[str, Any]
    """For the record, JSON. What was counted of the input, and cut of it, is under "input": of
    "train", and under "valid" of each evaluation by its name."""

    paper: str | None = None
    """The task's name in the paper's table 5 (tasks/paper.py), where it is not that of --task."""

    @abstractmethod
    def figures(self, name: str, logits: Sequence[NDArray[np.float32]]) -> Mapping[str, Any]:
        """The figures of the evaluation `name`: numbers, or mappings of such.

        logits: of each example in order: [classes], [options], or [n, 2] for the n tokens of its
        sequence, as starts and as ends of the answer. Only the first rank asks.
        """

    def combined(self, figures: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Further figures, of all evaluations together, from those of each by its name."""
        return {}


def figure_name(evaluation: str, figure: str) -> str:
    """What the record calls a figure: matched_accuracy; accuracy of the evaluation "" and of
    `combined`."""
    return f"{evaluation}_{figure}" if evaluation else figure


def name_conventions(evaluations: Iterable[str], meanings: Mapping[str, str]) -> dict[str, str]:
    """The conventions of evaluations that all have these figures."""
    return {
        figure_name(evaluation, figure): meaning
        for evaluation in evaluations
        for figure, meaning in meanings.items()
    }
