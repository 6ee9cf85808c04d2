"""Where checkpoints are written and read."""

from dataclasses import dataclass

from megatron.config.checks import SettingError, optional_positive


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save: str | None = None
    """Directory for checkpoints, one subdirectory a step."""

    load: str | None = None
    """Directory of checkpoints to go on from."""

    save_interval: int | None = None
    """Steps between checkpoints; only at the end if not given."""

    def __post_init__(self) -> None:
        optional_positive(self, "save_interval")
        if self.save_interval is not None and self.save is None:
            raise SettingError(
                f"--save-interval {self.save_interval} has nowhere to save to; "
                "--save checkpoints beside it would work"
            )
