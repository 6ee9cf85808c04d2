"""Where the numbers of a run go."""

from dataclasses import dataclass
from importlib.util import find_spec

from megatron.config.checks import UsageError, positive


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    log_interval: int = 10
    """Steps between lines of metrics."""

    metrics_file: str | None = None
    """JSON lines of metrics, the record of a run; metrics.jsonl in --save if not given."""

    wandb_project: str | None = None
    """Send metrics to this project of Weights & Biases, too; without a key in the environment or a
    netrc file they are kept on disk, for wandb sync."""

    tensorboard_dir: str | None = None
    """Write metrics as TensorBoard event files to this folder, too."""

    def __post_init__(self) -> None:
        positive(self, "log_interval")


def require_sinks(section: LoggingConfig, metrics_file: str | None) -> None:
    """UsageError if a sink's library is missing, or wandb has no folder to keep its run in."""
    if section.wandb_project is not None:
        _require("--wandb-project", "wandb")
        if metrics_file is None:
            raise UsageError(
                "--wandb-project keeps its run beside the file of metrics, and there is none; "
                "--save DIR or --metrics-file FILE would work"
            )
    if section.tensorboard_dir is not None:
        _require("--tensorboard-dir", "tensorboard")


def _require(flag: str, library: str) -> None:
    spec = find_spec(library)
    if spec is None or spec.origin is None:  # a folder that happens to be called wandb
        raise UsageError(f"{flag} needs {library}; pip install {library} would work")
