"""Which settings decide what is learned or said, and which do nothing in this command."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megatron.config.checks import UsageError, flag
from megatron.config.training import ParallelConfig
from tasks.checks import ChecksConfig
from tasks.common import ReportConfig
from tasks.finetuning import FinetuneSettings

TABLE_6 = ("epochs", "lr", "global_batch_size")  # what presets set, an evaluation's too
TRAINING = (
    *TABLE_6,
    "lr_warmup_fraction",
    "weight_decay",
    "clip_grad",
    "hidden_dropout",
    "attention_dropout",
    "recompute_granularity",
)
TRAINING_ALONE = (*TRAINING, "seed", "seeds", "save")
ROUNDING = ("micro_batch_size", "dtype")  # change an evaluation by rounding alone


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    value: Any
    is_changed: bool  # from its default
    decides: bool  # what is learned or said; else it says where things are, or how much is run


def settings_of(section: Any) -> Iterator[Setting]:
    """Every setting, those of sections included, but of the report and of how the model is cut."""
    hints = get_type_hints(type(section))
    for field in fields(section):
        value, hint = getattr(section, field.name), hints[field.name]
        if is_dataclass(value):
            if not isinstance(value, ReportConfig | ParallelConfig):
                yield from settings_of(value)
            continue
        yield Setting(
            name=field.name,
            value=value,
            is_changed=field.default is not MISSING and value != field.default,
            decides=Path not in (hint, *get_args(hint)) and field.metadata.get("decides", True),
        )


def hyper_parameters(settings: FinetuneSettings) -> dict[str, Any]:
    """What, beside data, model and seed, decides a result, as JSON; training's where it trains. The
    precision of an evaluation is that of each model."""
    left_out = () if settings.train_data else (*TRAINING, "dtype")
    return {
        each.name: each.value if isinstance(each.value, int | float | None) else str(each.value)
        for each in settings_of(settings)
        if each.decides and each.name not in left_out
    }


def checks_of(settings: FinetuneSettings) -> dict[str, Any]:
    """What the checks of the input allow; nothing of a task without them."""
    names = {field.name for field in fields(ChecksConfig)}
    return {each.name: each.value for each in settings_of(settings) if each.name in names}


def check_trained(settings: FinetuneSettings) -> None:
    """Raise UsageError for settings of training where nothing is trained; those that a preset of
    table 6 sets are a warning."""
    if not settings.train_data:
        _refuse(
            [each for each in settings_of(settings) if each.name in TRAINING_ALONE],
            "about training, which takes --train-data; that, or leaving {} out, would work",
        )


def check_judged(settings: FinetuneSettings) -> None:
    """The same for all settings of a model where answers in a file are judged without one."""
    every = {field.name for field in fields(FinetuneSettings)}
    own = {field.name for field in fields(settings)} - every
    _refuse(
        [each for each in settings_of(settings) if each.name not in own],
        "of models, and answers in a file are judged without one; leaving {} out would work",
    )


def _refuse(settings: Sequence[Setting], why: str) -> None:
    changed = [each.name for each in settings if each.is_changed]
    if refused := [name for name in changed if name not in TABLE_6]:
        one = len(refused) == 1
        reason = why.format("it" if one else "them")
        raise UsageError(f"{_flags(refused)} {'is' if one else 'are'} {reason}")
    if changed:
        one = len(changed) == 1
        warnings.warn(
            f"{_flags(changed)} {'does' if one else 'do'} nothing here, where nothing is trained",
            stacklevel=4,
        )


def _flags(names: Sequence[str]) -> str:
    return " and ".join(map(flag, names))


def warn_of_changes(settings: FinetuneSettings, path: Path, finetuned: Mapping[str, Any]) -> None:
    """Of settings that change the figures, and are not those that the model was fine-tuned with.

    finetuned: how the model of the checkpoint at `path` was, of its manifest.
    """
    then = finetuned.get("hyper_parameters", {})
    for name, now in hyper_parameters(settings).items():
        if name not in ROUNDING and then.get(name, now) != now:
            warnings.warn(
                f"{flag(name)} is {now}, but {path} was fine-tuned with {then[name]}; "
                f"{flag(name)} {then[name]} would give the figures of that time",
                stacklevel=2,
            )
