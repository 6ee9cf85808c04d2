"""Which conditions each call of a compiled layer checks before it runs a graph.

All layers of a model share graphs, whose guards say for which layer, input and mode each holds:
268 of a GPT-2 layer, a third of the host's time. Those on tensors, modes, settings, identities and
classes of modules stay. Left out is what two layers cannot differ in:

- globals: functions, classes and constants of modules;
- that an instance does not hide an attribute of its class, where that has methods alone to hide;
- the class of a dict, and of a dataclass without subclasses: its fields are guarded one by one.
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
    """Whether a module's own classes have attributes that are no methods."""
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
