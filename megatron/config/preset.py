"""Presets: TOML files whose keys are flags, turned into arguments before the user's own."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from megatron.config.checks import UsageError, flag, switch

# What TOML has to hold for a field of each type; other types (paths) are written as text.
_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number such as 24"),
    float: ((int, float), "a number such as 1e-4"),
}
_TEXT = ((str,), "text in quotes")


def preset_arguments(file: str, annotations: Mapping[str, Any]) -> list[str]:
    """The file's settings as command-line arguments.

    annotations: the type of every setting that the program knows, by name.
    Errors name the file, the line and what would work.
    """
    text = _read(file)
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"preset {file} is not TOML: {error}; lines such as num_layers = 24 would work"
        ) from error
    arguments = []
    for key, value in settings.items():
        if cure := _cure(key, value, annotations):
            raise UsageError(f"preset {file}, line {_line(text, key)}: {cure}")
        arguments += _arguments(key, value)
    return arguments


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--preset {file} is not UTF-8 text; a TOML file would work") from error
    except OSError as error:
        others = [str(path) for path in sorted(Path(file).parent.glob("*.toml")) if path.is_file()]
        nearest = difflib.get_close_matches(file, others, n=1) or others[:1]
        known = nearest[0] if nearest else "scripts/presets/gpt2_355m.toml"
        raise UsageError(
            f"--preset {file} cannot be read ({error.strerror}); --preset {known} would work"
        ) from error


def _line(text: str, key: str) -> int:
    """The first line that sets the key, as a value or as a table; tomllib does not say."""
    name = re.escape(key)
    opening = re.compile(rf"""^\s*\[*\s*(["']?){name}\1\s*[=.\]]""")
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if opening.match(line)), 1)


def _cure(key: str, value: Any, annotations: Mapping[str, Any]) -> str | None:
    """What is wrong and would work, or None where the setting is sound."""
    if key not in annotations:
        nearest = difflib.get_close_matches(key, annotations, n=1, cutoff=0)
        return f"unknown setting {key}; {nearest[0]} would work"
    wanted = _wanted(annotations[key], value)
    return wanted and f"{key} is {value!r}; {wanted} would work"


def _wanted(annotation: Any, value: Any) -> str | None:
    """What TOML should hold for the annotation, or None where the value is that."""
    options = [option for option in get_args(annotation) if option not in (NoneType, ...)]
    if get_origin(annotation) is Literal:
        return None if value in options else " or ".join(f'"{option}"' for option in options)
    if get_origin(annotation) is tuple:
        sound = isinstance(value, list) and all(_wanted(options[0], item) is None for item in value)
        return None if sound else 'a list such as ["0.3", "first", "0.7", "second"]'
    if options:
        assert len(options) == 1, f"a setting of type {annotation} has no form in TOML"
        return _wanted(options[0], value)
    types, wanted = _SCALARS.get(annotation, _TEXT)
    return None if type(value) in types else wanted


def _arguments(key: str, value: Any) -> list[str]:
    name = flag(key)
    if isinstance(value, bool):
        return [switch(key, value)]
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [f"{name}={value}"]
