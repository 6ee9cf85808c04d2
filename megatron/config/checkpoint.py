"""Where checkpoints are written and read, and what of them is kept."""

from dataclasses import dataclass
from pathlib import Path

from megatron.config.checkpoints import save_directory
from megatron.config.checks import UsageError, flag, optional_positive


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save: str | None = None
    """Directory for checkpoints, one subdirectory a step."""

    load: str | None = None
    """Directory of checkpoints to go on from, at the newest that is whole; or one of its
    subdirectories, to go on from that one. The furthest in --save goes before."""

    save_interval: int | None = None
    """Steps between checkpoints; only at the end if not given."""

    keep_checkpoints: int | None = None
    """Keep this many of the newest checkpoints, at least 2, and the one with the lowest validation
    loss; all if not given. None is removed before as many newer ones have been read back."""

    async_save: bool = False
    """Write checkpoints while training goes on; the loop waits only for the copy to host memory."""

    override_data: bool = False
    """Go on although seed, tokenizer, data or sequence length are not those of the checkpoint."""

    finetune: bool = False
    """Take the weights alone from --load and start at step 0; once --save holds checkpoints, the
    same command goes on from these."""

    def __post_init__(self) -> None:
        optional_positive(self, "save_interval")
        if self.keep_checkpoints is not None and self.keep_checkpoints < 2:
            raise UsageError(
                f"--keep-checkpoints {self.keep_checkpoints} would leave nothing if the newest "
                "were damaged; --keep-checkpoints 2 would work"
            )
        for field in ("save_interval", "keep_checkpoints", "async_save"):
            if getattr(self, field) and self.save is None:
                value = "" if field == "async_save" else f" {getattr(self, field)}"
                raise UsageError(
                    f"{flag(field)}{value} has nowhere to save to; "
                    "--save checkpoints beside it would work"
                )
        if self.finetune:
            self._check_finetune()

    def _check_finetune(self) -> None:
        if self.load is None:
            raise UsageError(
                "--finetune needs weights to start from; --load checkpoints beside it would work"
            )
        if self.save is not None and save_directory(self.load) == Path(self.save).resolve():
            raise UsageError(
                f"--finetune would mix its checkpoints in --save {self.save} with those of --load "
                f"{self.load}; another directory for --save would work"
            )

    def warnings(self) -> list[str]:
        """What is allowed, but rarely meant for a long run."""
        if self.save is None:
            return ["warning: nothing of this run is kept; --save checkpoints would keep it"]
        if self.save_interval is None:
            return ["warning: saved at the end alone; --save-interval 1000 would save on the way"]
        return []
