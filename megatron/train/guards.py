"""Selects the guards: conditions that each call of a compiled layer checks before it runs a graph.

All layers of a model share graphs; guards say for which layer, input and mode each graph is valid.
A GPT-2 layer has 268, which take a third of the host's time. Guards on tensors, modes, settings,
identities and classes of modules stay. Guards on what two layers cannot differ in are left out:

- globals: functions, classes and constants of modules;
- that an instance does not hide an attribute of its class, if the class has only methods to hide;
- the class of a dict, and of a dataclass without subclasses: its fields have guards of their own.
"""

from collections.abc import Sequence
from dataclasses import is_dataclass
from itertools import takewhile
from typing import Any

from torch import nn


def keeps(guards: Sequence[Any]) -> list[bool]:
    """torch.compile's `guard_filter_fn`: whether each guard stays."""
    return [not (each.is_global or _hides_nothing(each) or _is_plain(each)) for each in guards]


def _hides_nothing(guard: Any) -> bool:
    is_absence = guard.guard_type == "NOT_PRESENT_IN_GENERIC_DICT"
    return is_absence and (is_dataclass(guard.value) or not _has_defaults(type(guard.value)))


def _has_defaults(kind: type) -> bool:
    """Whether the module's classes below nn.Module have attributes other than methods."""
    methods = property, staticmethod, classmethod
    return any(
        not (name.startswith("__") or callable(value) or isinstance(value, methods))
        for each in takewhile(lambda each: each is not nn.Module, kind.__mro__)
        for name, value in vars(each).items()
    )


def _is_plain(guard: Any) -> bool:
    value = guard.value
    is_final = is_dataclass(value) and not type.__subclasses__(type(value))
    return guard.guard_type == "TYPE_MATCH" and (isinstance(value, dict) or is_final)
