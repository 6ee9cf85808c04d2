"""The faults file: which faults come when, as a function of its seed."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from megatron.config.checks import non_negative, positive
from megatron.config.parse import parse_table
from megatron.errors import UsageError, field_of, flag, setting

Kind = Literal[
    "kill", "terminate", "stop", "slow", "drop", "memory", "full_disk", "truncate", "flip_file",
    "flip_weight",
]  # fmt: skip
TARGETS = {"kill": ("all", "launcher"), "terminate": ("all", "launcher"), "stop": ("all",)}
"""Targets, other than one rank, that these kinds hit."""
TIMED = ("stop", "slow")
"""Kinds that last for some seconds."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """A [[fault]] table."""

    kind: Kind
    weight: float = 1.0
    """Its share of the faults, relative to the others'."""
    during: Literal["any", "start", "train", "evaluation", "save"] = "any"
    seconds: float = 1.0
    """How long a stop lasts, or a rank is slow."""
    rank: int | str = "random"

    def __post_init__(self) -> None:
        positive(self, "weight", "seconds")
        targets = ("random", *TARGETS.get(self.kind, ()))
        is_rank = isinstance(self.rank, int) and self.rank >= 0
        if not is_rank and self.rank not in targets:
            allowed = f'a rank, or one of {", ".join(targets)}, for the kind "{self.kind}"'
            raise UsageError("--rank", self.rank, allowed)


@dataclass(frozen=True)
class Fault:
    """One fault of the schedule. gap: seconds, or steps, after the previous one. draw: of its own
    random numbers, such as the rank."""

    number: int
    config: FaultConfig
    gap: float
    draw: int

    @property
    def label(self) -> str:
        """Its kind, as the tables of the report name it."""
        target = self.config.rank if self.config.rank in ("all", "launcher") else ""
        long = f"{self.config.seconds:g} s" if self.config.kind in TIMED else ""
        return " ".join(filter(None, (self.config.kind.replace("_", " "), str(target), long)))

    def random(self) -> random.Random:
        return random.Random(self.draw)


@dataclass(frozen=True, kw_only=True)
class Times:
    """The keys of a faults file beside its tables."""

    seed: int = 1234
    count: int = 10
    every_seconds: float | None = None
    """Mean of the seconds between two faults, drawn from an exponential distribution."""
    every_steps: int | None = None
    """Steps that are done between two faults, in place of every_seconds."""
    fixed: bool = False
    """Whether every_seconds is no mean but the same for all."""
    in_turn: bool = False
    """Whether the tables follow each other, in place of a draw by weight."""

    def __post_init__(self) -> None:
        non_negative(self, "seed", "count")
        positive(self, "every_seconds", "every_steps")
        if (self.every_seconds is None) == (self.every_steps is None):
            allowed = "given, or every_steps"
            if self.every_steps is not None:
                allowed = "left out beside every_steps"
            raise UsageError("--every-seconds", self.every_seconds, allowed)


@dataclass(frozen=True, kw_only=True)
class Schedule(Times):
    """A faults file."""

    fault: Sequence[FaultConfig]
    layout: Sequence[Mapping[str, str]] = ()
    """Flags and values that replace those of the command, taken in turn at each start."""

    def faults(self) -> list[Fault]:
        """All faults in their order; the same seed draws the same."""
        draw, drawn = random.Random(self.seed), []
        for number in range(1, self.count + 1):
            (config,) = draw.choices(self.fault, [each.weight for each in self.fault])
            if self.in_turn:
                config = self.fault[(number - 1) % len(self.fault)]
            if self.every_steps is not None:
                gap = float(self.every_steps)
            else:
                mean = self.every_seconds or 0.0
                gap = mean if self.fixed else draw.expovariate(1 / mean)
            drawn.append(Fault(number, config, gap, draw.getrandbits(32)))
        return drawn


def read_schedule(file: Path) -> Schedule:
    """Raises UsageError for a file that is no TOML, has unknown keys or wrong values."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        faults, layouts = (_tables(content, key) for key in ("fault", "layout"))
        if not faults:
            raise UsageError("--fault", None, "given: at least one [[fault]] table with a kind")
        return Schedule(
            fault=[_settings(FaultConfig, each) for each in faults],
            layout=[
                {f"--{key.lstrip('-')}": str(value) for key, value in each.items()}
                for each in layouts
            ],
            **vars(_settings(Times, content)),
        )
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError("--faults", file, f"a TOML file of faults ({error})") from error
    except UsageError as error:
        field = field_of(error.flag)
        given = field if error.value is None else setting(field, error.value)
        raise error.about("--faults", f"{file}: {given}") from error


def _tables(content: dict[str, Any], key: str) -> list[dict[str, Any]]:
    tables = content.pop(key, [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise UsageError(flag(key), tables, f"[[{key}]] tables")
    return tables


def _settings(kind: type[T], table: Mapping[str, Any]) -> T:
    whole: Any = Schedule if kind is Times else kind
    names = [each.name for each in fields(whole)]
    for key in table:
        if key not in names:  # shown as it stands, with its hyphens
            raise UsageError(key, table[key], f"one of the keys {', '.join(names)}")
    if "kind" in names and "kind" not in table:
        raise UsageError("--kind", None, f"given, as one of {', '.join(get_args(Kind))}")
    return parse_table(kind, table)
