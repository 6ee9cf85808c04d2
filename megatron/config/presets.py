"""TOML files of settings: presets, and what --print-config prints.

num_layers = 24            # a setting of any config, or in the table of its config:
[model]
kind = "gpt2"              # in place of --model
"""

import contextlib
import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from megatron.config.parts import see_modules_in
from megatron.errors import UsageError, flag, setting, switch

PRESETS = Path(__file__).resolve().parents[2] / "scripts" / "presets"


@dataclass(frozen=True)
class PresetSetting:
    """A setting of a preset, and where it is. name: the first name of the setting."""

    key: str
    value: Any
    file: Path
    line: int
    name: str

    @property
    def flags(self) -> set[str]:
        return {flag(self.name), switch(self.name, False)}

    def error(self, allowed: str) -> UsageError:
        text = f"{self.file}, line {self.line}: {setting(self.key, self.value)}"
        return UsageError("--preset", text, allowed)


def find_preset(name: str, keys: Collection[str] = ()) -> Path:
    """The file of this path, or the preset of this name in scripts/presets and its folders:
    mnli_336m or finetune/mnli_336m.

    Raises UsageError if there is neither; it names the nearest presets whose settings are
    all among `keys` (any presets if that is empty).
    """
    if Path(name).is_file():
        return Path(name)
    files = sorted(PRESETS.rglob("*.toml"))
    for file in files:
        if name in (file.stem, str(file.relative_to(PRESETS).with_suffix(""))):
            return file
    names: dict[str, str] = {}
    folder: Path | None = None  # the presets of a folder are of one kind of program
    for file in (*Path(name).parent.glob("*.toml"), *files):
        with contextlib.suppress(UsageError, OSError):
            if keys and not read_toml(file).keys() <= set(keys):
                continue
            if keys and file in files:
                folder = folder or file.parent
                if file.parent != folder:
                    continue
            names[file.stem] = file.stem if file in files else str(file)
    near = [names[each] for each in difflib.get_close_matches(Path(name).stem, names, 3, cutoff=0)]
    allowed = "a TOML file" + (f", or a preset's name such as {', '.join(near)}" if near else "")
    works = ("--preset", near[0]) if near else ()
    raise UsageError("--preset", name or None, allowed, works=works)


def kind_of_preset(name: str) -> str | None:
    """The `kind` in the table [model] of a preset. Raises as `find_preset`."""
    file = find_preset(name)
    see_modules_in(str(file.resolve().parent))
    model = read_toml(file).get("model")
    return str(model["kind"]) if isinstance(model, dict) and "kind" in model else None


def read_preset(file: Path, program: type, names: Mapping[str, str]) -> Iterator[PresetSetting]:
    """Settings of a preset, which may be in a table with the name of their config. names: the first
    name of each setting, by each of its names. Raises UsageError for other keys."""
    hints = get_type_hints(program)
    configs = {each.name: hints[each.name] for each in fields(program)}
    see_modules_in(str(file.resolve().parent))  # those of its parts
    settings, lines = read_toml(file), _line_numbers(file)
    for key, value in settings.items():
        config: Any = configs.get(key)
        is_table = isinstance(value, dict) and is_dataclass(config)
        table, own = (key, value) if is_table else ("", {key: value})
        allowed = {name for name, _, _ in settings_of(config)} if is_table else names.keys()
        for name, each in own.items():
            line = lines.get((table, name)) or lines.get((table, "")) or 1
            given = PresetSetting(name, each, file, line, names.get(name, name))
            if is_table and name == "kind" and hasattr(config, "kind"):
                if each != config.kind:
                    raise given.error(f"that of --model, {config.kind}")
            elif given.name not in allowed or isinstance(each, dict):
                nearest = difflib.get_close_matches(name, allowed, n=1, cutoff=0)
                where = f"table [{table}]" if is_table else "program"
                raise given.error(f"a setting of this {where} such as {nearest[0]}")
            else:
                yield given


def _line_numbers(file: Path) -> dict[tuple[str, str], int]:
    """Lines of (table, key), from 1, and of (table, "")."""
    table, found = "", dict[tuple[str, str], int]()
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if header := re.match(r"\s*\[\s*(\w+)\s*\]", line):
            table = header[1]
            found[table, ""] = number
        elif key := re.match(r"\s*([\w-]+)\s*=", line):
            found.setdefault((table, key[1]), number)
    return found


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        allowed = f"TOML with lines such as num_layers = 24 ({error})"
        raise UsageError("--preset", file, allowed) from error


def as_toml(settings: Any) -> str:
    """A preset of these settings, with a table for each config; what is not given is left out."""
    top, tables = [], []
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            kind = {"kind": value.kind} if hasattr(value, "kind") else {}
            table = kind | {of.name: getattr(value, of.name) for of in fields(value)}
            tables += ["", f"[{each.name}]", *_lines_of(table)]
        else:
            top += _lines_of({each.name: value})
    return "\n".join([*top, *tables]).lstrip() + "\n"


def _lines_of(table: Mapping[str, Any]) -> list[str]:
    return [setting(key, value) for key, value in table.items() if value not in (None, ())]


def settings_of(program: type) -> Iterator[tuple[str, Any, Field[Any]]]:
    """(name, type, field) of every setting, including those of the configs in it."""
    hints = get_type_hints(program)
    for field in fields(program):
        annotation = hints[field.name]
        if isinstance(annotation, type) and is_dataclass(annotation):
            yield from settings_of(annotation)
        else:
            yield field.name, annotation, field
