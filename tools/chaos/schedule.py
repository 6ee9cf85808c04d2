"""The faults file: which faults come when, as a function of its seed."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

from megatron.errors import UsageError

During = Literal["any", "start", "train", "evaluation", "save"]
KINDS = (
    "kill", "terminate", "stop", "slow", "drop", "memory", "full_disk", "truncate", "flip_file",
    "flip_weight",
)  # fmt: skip
TARGETS = {"kill": ("all", "launcher"), "terminate": ("all", "launcher"), "stop": ("all",)}
"""Targets, other than one rank, that these kinds hit."""
TIMED = ("stop", "slow")
"""Kinds that last for some seconds."""


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """A [[fault]] table."""

    kind: str
    weight: float = 1.0
    """Its share of the faults, relative to the others'."""
    during: During = "any"
    seconds: float = 1.0
    """How long a stop lasts, or a rank is slow."""
    rank: int | str = "random"

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, f"kind = {self.kind!r}", f"one of {', '.join(KINDS)}")
        _require(_is_positive(self.weight), f"weight = {self.weight!r}", "a finite number above 0")
        _require(
            _is_positive(self.seconds), f"seconds = {self.seconds!r}", "a finite number above 0"
        )
        phases = get_args(During)
        _require(self.during in phases, f"during = {self.during!r}", f"one of {', '.join(phases)}")
        targets = ("random", *TARGETS.get(self.kind, ()))
        is_rank = type(self.rank) is int and self.rank >= 0
        allowed = f'a rank, or one of {", ".join(targets)}, for the kind "{self.kind}"'
        _require(is_rank or self.rank in targets, f"rank = {self.rank!r}", allowed)


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
class Schedule:
    """A faults file."""

    fault: Sequence[FaultConfig]
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
    layout: Sequence[Mapping[str, str]] = field(default=())
    """Flags and values that replace those of the command, taken in turn at each start."""

    def __post_init__(self) -> None:
        _require(bool(self.fault), "no [[fault]]", "at least one [[fault]] table with a kind")
        for name in ("seed", "count"):
            value = getattr(self, name)
            _require(type(value) is int and value >= 0, f"{name} = {value!r}", "a number from 0")
        for name in ("fixed", "in_turn"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} = {value!r}", "true or false")
        given = [x for x in (self.every_seconds, self.every_steps) if x is not None]
        names = "every_seconds and every_steps"
        _require(len(given) == 1, f"{len(given)} of {names}", "one of them")
        _require(_is_positive(given[0]), f"{given[0]!r} in {names}", "a finite number above 0")

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
        tables = _tables(content, "fault")
        faults = [FaultConfig(**_known(each, FaultConfig, "[[fault]] ")) for each in tables]
        layouts = [
            {f"--{key.lstrip('-')}": str(value) for key, value in each.items()}
            for each in _tables(content, "layout")
        ]
        return Schedule(fault=faults, layout=layouts, **_known(content, Schedule, ""))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError("--faults", file, f"a TOML file of faults ({error})") from error
    except _WrongError as error:
        raise UsageError("--faults", f"{file}: {error.args[0]}", error.args[1]) from error


class _WrongError(Exception):
    """(what is in the file, what is allowed there)"""


def _require(holds: bool, given: str, allowed: str) -> None:
    if not holds:
        raise _WrongError(given, allowed)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def _tables(content: dict[str, Any], key: str) -> list[dict[str, Any]]:
    tables = content.pop(key, [])
    is_list = isinstance(tables, list) and all(isinstance(each, dict) for each in tables)
    _require(is_list, f"{key} = {tables!r}", f"[[{key}]] tables")
    return list(tables)


def _known(table: Any, kind: type, where: str) -> dict[str, Any]:
    """The table, which has only keys of this dataclass."""
    _require(isinstance(table, Mapping), f"{where}{table!r}", "a table")
    names = [each.name for each in fields(kind)]
    for key in table:
        _require(key in names, f"{where}{key}", f"one of the keys {', '.join(names)}")
    required = [each for each in ("kind",) if each in names and each not in table]
    _require(not required, f"{where}without kind", f"a table with a kind: {', '.join(KINDS)}")
    return dict(table)
