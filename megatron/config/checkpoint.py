"""Where checkpoints are written and read, and which of them are kept."""

from dataclasses import dataclass, field
from typing import Literal

from megatron.config.checks import at_least, needs, not_empty, positive


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save: str | None = None
    """Directory for checkpoints, one subdirectory per step."""

    load: str | None = None
    """Directory of checkpoints, to resume from the newest that is whole; or one of its
    subdirectories, to resume from that one. A later checkpoint in --save takes precedence. Model
    and tokenizer are those of the checkpoint unless a flag or preset gives them. Settings that
    contradict the checkpoint are refused, except dropout, which may change."""

    save_interval: int | None = None
    """Steps between checkpoints; if not given, one is saved only at the end."""

    keep_checkpoints: int | None = None
    """Keep this many of the newest checkpoints, at least 2, and the one with the lowest validation
    loss; all if not given. None is removed before this many newer ones have been read back."""

    async_save: bool = False
    """Write checkpoints while training continues; the loop waits only for the copy to host
    memory."""

    memory_checkpoint_interval: int | None = None
    """Steps between checkpoints in the shared memory of the hosts, which outlives the processes:
    the same command resumes from the newest one if it is beyond those in --save. It takes memory
    for two checkpoints, and on several hosts twice that."""

    override_data: bool = False
    """Resume even if seed, tokenizer, data or sequence length differ from the checkpoint's."""

    finetune: bool = False
    """Take only the weights from --load and start at step 0; once --save holds checkpoints, the
    same command resumes from them."""

    def __post_init__(self) -> None:
        not_empty(self)
        of_save = ("save_interval", "keep_checkpoints", "async_save", "memory_checkpoint_interval")
        for name in of_save:
            needs(self, name, "save")
        for name in ("finetune", "override_data", "memory_checkpoint_interval"):
            needs(self, name, "load")
        positive(self, "save_interval", "memory_checkpoint_interval")
        at_least(self, keep_checkpoints=2)  # the newest may be damaged


@dataclass(frozen=True, kw_only=True)
class TrainedConfig:
    """A model that has been trained, for programs that evaluate or use it."""

    load: str
    """Directory of checkpoints, whose newest one is used; or one of its subdirectories."""

    tokenizer_type: str | None = None
    """Kind of tokenizer that made the training data; the checkpoint's own if not given."""

    vocab_file: str | None = field(default=None, metadata={"alias": "tokenizer_model"})
    """The tokenizer's vocabulary (vocab.json, or tokenizer.json or its folder); the checkpoint's
    own if not given. Also spelt --tokenizer-model."""

    merge_file: str | None = None
    """The byte-pair encoding's merges (merges.txt); the checkpoint's own if not given."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of weights and activations."""
