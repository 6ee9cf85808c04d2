"""Parts of a run that a user replaces without a change to this project.

A setting that chooses a part takes a name of its registry, or "module:name" of a function or class
of one's own. Parts are called with keywords. A part that cannot be called so is refused before
anything is built, with the argument that does not fit. Needs no torch: an entry names its module.
docs/configuration.md has a table of the registries, made by tools/api_page.py.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.errors import UsageError, flag


@dataclass(frozen=True)
class Registry:
    """The parts of one kind, by name."""

    setting: str
    """The field of a config that names one."""
    takes: tuple[str, ...]
    """Keywords that a part is called with."""
    does: str
    """The result or the effect of a part."""
    default: str | None = None
    """The name of the part that a run has if none is given."""
    parts: dict[str, Any] = field(default_factory=dict)
    """A part, or its "module:name", by name."""

    def find(self, name: str) -> Any:
        """The part of this name, or at "module:name". Raises UsageError if there is none, or it
        does not fit."""
        part = self.parts.get(name, name)
        part, wrong = resolve(part) if isinstance(part, str) else (part, "")
        if not wrong:
            wrong = misfit(part, self.takes)
        if wrong:
            names = f"{', '.join(self.parts)}, or " if self.parts else ""
            allowed = f"{names}module:name of a part that takes {', '.join(self.takes)} ({wrong})"
            raise UsageError(flag(self.setting), name, allowed, works=self.default or ())
        return part


def register_part(setting: str, name: str, part: Callable[..., Any]) -> None:
    """Give a part of one's own a name, which the flag and key `setting` then take, such as
    "optimizer". Raises UsageError if the name is taken or has a colon, or the part does not fit."""
    if setting not in PARTS:
        raise UsageError(flag(setting), None, f"one of {', '.join(map(flag, PARTS))}")
    registry = PARTS[setting]
    if name in registry.parts or ":" in name:
        taken = "without a colon" if ":" in name else "a name that is not registered already"
        raise UsageError(flag(setting), name, taken)
    if wrong := misfit(part, registry.takes):
        allowed = f"a part that takes {', '.join(registry.takes)} ({wrong})"
        raise UsageError(flag(setting), name, allowed)
    registry.parts[name] = part


def resolve(name: str) -> tuple[Any, str]:
    """(the object at "module:name", or None; why there is none). Modules are found in the current
    folder, too."""
    if ":" not in name:
        return None, "no such name"
    see_modules_in(str(Path.cwd()))
    try:
        return resolve_name(name), ""
    except (ImportError, AttributeError, ValueError) as error:
        return None, str(error)


def see_modules_in(folder: str) -> None:
    """Let modules of this folder be imported, after those of all others."""
    if folder not in sys.path:
        sys.path.append(folder)


def misfit(part: Any, takes: Sequence[str], positional: int = 0) -> str:
    """Why a part cannot be called with so many arguments and these keywords; empty if it can be."""
    if not callable(part):
        return f"a {type(part).__name__} cannot be called"
    try:
        inspect.signature(part).bind(*range(positional), **dict.fromkeys(takes))
    except TypeError as error:
        return str(error)
    except ValueError:  # of C, without a signature
        return ""
    return ""


def check_parts(config: Any, *, custom: bool = True) -> None:
    """Raise UsageError for a part whose registry does not have it, and for one of one's own that is
    not there or does not fit. custom: whether to look at those, which imports them."""
    for each in fields(config):
        registry, value = PARTS.get(each.name), getattr(config, each.name)
        for name in value if isinstance(value, tuple) else (value,):
            # Those of the registry fit, and would take seconds to import.
            if registry is None or name is None or name in registry.parts:
                continue
            if custom or ":" not in name:
                registry.find(name)


MAKERS = {
    "column": (2, "parts bias std"),
    "grouped_query": (1, "heads key_value_heads head_size bias std"),
    "row": (2, "bias std"),
    "linear": (2, "bias std"),
    "gather": (0, ""),
    "input": (2, "bias std"),
    "output": (2, "bias std"),
    "word_embedding": (2, "divisible_by std is_tied"),
    "position_embedding": (2, "std"),
    "rotary": (1, "base scaling"),
    "layer_norm": (1, "epsilon"),
    "rms_norm": (1, "epsilon"),
    "inner_layer_norm": (1, "epsilon"),
    "dropout": (2, ""),
    "attention_core": (2, ""),
    "head": (2, "divisible_by bias untied_std"),
    "factory": (1, "custom norm draws_in_kernel by_flex"),
}
"""Makers of a layer factory (megatron/parallel/factory.py) that one of the user's own can replace:
(arguments after the mesh, names of keywords)."""


def custom_layers(settings: Sequence[str]) -> dict[str, Any]:
    """{name of a maker, or "factory": the user's own} of `KindConfig.layers`. Raises UsageError for
    a name that a factory does not have, and for a maker that is not there or does not fit."""
    custom = dict[str, Any]()
    for each in settings:
        name, _, path = each.partition("=")
        maker, wrong = resolve(path)
        if name in MAKERS and not wrong:
            count, keywords = MAKERS[name]
            wrong = misfit(maker, keywords.split(), 1 + count)
        if name not in MAKERS or wrong:
            allowed = f"NAME=module:name with NAME one of {', '.join(MAKERS)}"
            raise UsageError("--layers", each, allowed + (f" ({wrong})" if wrong else ""))
        if name in custom:
            raise UsageError("--layers", each, f"given once for {name}")
        custom[name] = maker
    return custom


PARTS = {
    each.setting: each
    for each in (
        Registry(
            "process_group",
            ("backend", "store", "rank", "world_size", "timeout", "device_id"),
            "connects the processes, by torch.distributed.init_process_group with what it is given",
            "torch",
            {"torch": "torch.distributed:init_process_group"},
        ),
        Registry(
            "gradient_reduction",
            ("x", "axis"),
            "returns the sum of gradients x [n] over the ranks of an axis, the same on each",
            "sum",
            {"sum": "megatron.parallel.collectives:all_reduce"},
        ),
        Registry(
            "pipeline_schedule",
            ("ranks", "micro_batches", "virtual"),
            "returns the actions of a training step, a sequence of Action for each rank",
            None,
            {
                "1f1b": "megatron.parallel.schedules:one_f_one_b",
                "gpipe": "megatron.parallel.schedules:gpipe",
                "interleaved": "megatron.parallel.schedules:interleaved",
                "zb-h1": "megatron.parallel.schedules:zb_h1",
            },
        ),
        Registry(
            "dataset",
            ("config",),
            "returns [Inputs](api.md#inputs), as Inputs.of_samples does, in place of --data-path",
        ),
        Registry(
            "sampler",
            ("number", "samples_per_epoch", "seed"),
            "returns the sample to read at place `number`, counted from 0 over all epochs",
            "in-order",
            {"in-order": "megatron.data.order:in_order"},
        ),
        Registry(
            "optimizer",
            ("params", "config"),
            "returns a torch.optim.Optimizer of these groups of parameters",
            "adamw",
            {
                "adamw": "megatron.optim.by_name:adam",  # MasterWeights has a faster one
                **{
                    name: f"megatron.optim.by_name:{name}"
                    for name in ("sgd", "adam", "adagrad", "rmsprop", "muon", "adafactor")
                },
            },
        ),
        Registry(
            "lr_decay_style",
            ("config", "update", "warmup", "end"),
            "returns the learning rate of an update after warm-up",
            "cosine",
            {
                name: f"megatron.optim.schedule:{name.replace('-', '_')}"
                for name in ("cosine", "linear", "constant", "inverse-sqrt", "wsd")
            },
        ),
        Registry(
            "callbacks",
            ("config",),
            "returns a [Callback](api.md#callback), whose methods run beside training; the flag "
            "takes several",
        ),
    )
}
