"""The settings of tools/plan.py: those of pretraining, and what is asked about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.config.checks import UsageError, positive, writable
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config

Kind = Literal["gpt2", "bert"]

DEFAULT_HARDWARE = "dgx2h"


@dataclass(frozen=True, kw_only=True)
class QuestionConfig:
    gpus: int
    """Devices of the job."""

    hardware: str | None = None
    """Name of a file in scripts/hardware/, or a file like them; if not given, dgx2h, the machine
    of the paper (2018), with a warning."""

    kind: Kind | None = None
    """Kind of model; if not given, bert where the preset's name says so, else gpt2."""

    search: bool = False
    """List the layouts that fit, best first; the global batch stays as it is."""

    json: Path | None = None
    """File for all that was found."""

    picture: Path | None = None
    """PNG of where time and memory go."""

    def __post_init__(self) -> None:
        positive(self, "gpus")
        writable(self, "json")
        writable(self, "picture", ".png")


@dataclass(frozen=True, kw_only=True)
class PlanGPT2Config(PretrainGPT2Config):
    question: QuestionConfig


@dataclass(frozen=True, kw_only=True)
class PlanBertConfig(PretrainBertConfig):
    question: QuestionConfig


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    hardware: str = DEFAULT_HARDWARE
    """Name of a file in scripts/hardware/ that has an anchor, or a file like it."""

    json: Path | None = None
    """File for all that was found."""

    picture: Path | None = None
    """PNG like the paper's figure 5."""

    def __post_init__(self) -> None:
        writable(self, "json")
        writable(self, "picture", ".png")


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    measure: Path
    """File for a description of the machine at hand, which --hardware takes."""

    def __post_init__(self) -> None:
        writable(self, "measure")


def parse_plan(
    arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[PretrainConfig, QuestionConfig]:
    """Raises UsageError, as parse."""
    given = {word.partition("=")[0] for word in arguments}
    if not given & {"--preset", "--help", "-h"}:
        raise UsageError(
            "--preset", None, "given: it says what to plan", works=("--preset", "gpt2_scaling_8.3b")
        )
    if kind_of(arguments) == "bert":
        bert = parse(PlanBertConfig, arguments, environ)
        return bert, bert.question
    gpt2 = parse(PlanGPT2Config, arguments, environ)
    return gpt2, gpt2.question


def kind_of(arguments: Sequence[str]) -> str:
    """Of model: that of --kind, or what the name of a preset says."""
    told: dict[str, str] = {}
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, has_value, own = name.partition("=")
        told[flag] = told.get(flag, "") + (own if has_value else value)
    return told.get("--kind") or (
        "bert" if "bert" in Path(told.get("--preset", "")).name else "gpt2"
    )
