"""TOML files of settings: presets, and what --print-config prints.

num_layers = 24            # a setting of any config, or in the table of its config:
[model]
kind = "gpt2"              # in place of --model
"""

import contextlib
import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

from megatron.config.parts import see_modules_in
from megatron.errors import UsageError, setting

PRESETS = Path(__file__).resolve().parents[2] / "scripts" / "presets"


@dataclass(frozen=True)
class PresetSetting:
    """A setting of a preset, and where it is. name: the first name of the setting. beside: types
    of the settings that may stand beside it."""

    key: str
    value: Any
    file: Path
    line: int
    name: str
    beside: Mapping[str, Any]

    def __str__(self) -> str:
        is_table = isinstance(self.value, dict)
        given = f"[{self.key}]" if is_table else setting(self.key, self.value)
        return f"{self.file}, line {self.line}: {given}"

    def error(self, allowed: str) -> UsageError:
        return UsageError("--preset", str(self), allowed)


def find_preset(name: str, keys: Collection[str] = ()) -> Path:
    """The file of this path, or the preset of this name in scripts/presets and its folders:
    mnli_336m or finetune/mnli_336m.

    Raises UsageError if there is neither; it names the nearest presets whose settings are
    all among `keys` (any presets if that is empty).
    """
    if Path(name).is_file():
        return Path(name)
    files = sorted(PRESETS.rglob("*.toml"), key=lambda file: (len(file.parts), file))
    for file in files:
        if name in (file.stem, str(file.relative_to(PRESETS).with_suffix(""))):
            return file
    names: dict[str, str] = {}
    folder: Path | None = None  # the presets of a folder are of one kind of program
    for file in (*Path(name).parent.glob("*.toml"), *files):
        with contextlib.suppress(UsageError, OSError):
            settings = read_toml(file).items()
            inside = (value if isinstance(value, dict) else [key] for key, value in settings)
            if keys and not set(chain(*inside)) - {"kind"} <= set(keys):
                continue
            if keys and file in files:
                folder = folder or file.parent
                if file.parent != folder:
                    continue
            names[file.stem] = file.stem if file in files else str(file)
    near = [names[each] for each in difflib.get_close_matches(Path(name).stem, names, 3, cutoff=0)]
    allowed = "a TOML file" + (f", or a preset's name such as {', '.join(near)}" if near else "")
    raise UsageError("--preset", name or None, allowed, works=near[0] if near else ())


def kind_of_presets(names: Iterable[str]) -> PresetSetting | None:
    """The last `kind` in a table [model] of these presets. Raises as `find_preset`."""
    found = None
    for name in names:
        file = find_preset(name)
        see_modules_in(str(file.resolve().parent))
        model = read_toml(file).get("model")
        if isinstance(model, dict) and "kind" in model:
            line = _line_numbers(file).get(("model", "kind"), 1)
            found = PresetSetting("kind", model["kind"], file, line, "model", {})
    return found


def read_preset(file: Path, program: type, names: Mapping[str, str]) -> Iterator[PresetSetting]:
    """Settings of a preset, which may be in a table with the name of their config. names: the first
    name of each setting, by each of its names. Raises UsageError for other keys."""
    hints = get_type_hints(program)
    tables = {each.name: hints[each.name] for each in fields(program)}
    tables = {name: config for name, config in tables.items() if is_dataclass(config)}
    see_modules_in(str(file.resolve().parent))  # those of its parts
    settings, lines, first = read_toml(file), _line_numbers(file), dict[str, int]()
    for key, value in settings.items():
        is_table, config = isinstance(value, dict), tables.get(key)
        if is_table and config is None:
            table = PresetSetting(key, value, file, lines.get((key, ""), 1), key, {})
            near = difflib.get_close_matches(key, tables, n=1, cutoff=0)
            raise table.error(f"a table of this program such as [{', '.join(near)}]")
        allowed = {name: kind for name, kind, _ in settings_of(config or program)}
        for name, each in value.items() if is_table else [(key, value)]:
            line = lines.get((key if is_table else "", name)) or lines.get((key, "")) or 1
            given = PresetSetting(name, each, file, line, names.get(name, name), allowed)
            if config and name == "kind" and name not in allowed and hasattr(config, "kind"):
                if each != config.kind:
                    raise given.error(f"the kind of the program or of its flag, {config.kind}")
                continue
            if name == "kind" and not is_table and "model" in tables:
                raise given.error("in the table [model]")
            if given.name not in allowed or isinstance(each, dict):
                for owner, other in tables.items():
                    is_there = given.name in {own for own, _, _ in settings_of(other)}
                    if is_table and not isinstance(each, dict) and other is not config and is_there:
                        raise given.error(f"in the table [{owner}]")
                near = difflib.get_close_matches(name, allowed, n=1)
                where = f"table [{key}]" if is_table else "program"
                raise given.error(" such as ".join([f"a setting of this {where}", *near]))
            if given.name in first:
                raise given.error(f"given once; line {first[given.name]} has it, too")
            first[given.name] = line
            yield given


def _line_numbers(file: Path) -> dict[tuple[str, str], int]:
    """Lines of (table, key), from 1, and of (table, "")."""
    table, found = "", dict[tuple[str, str], int]()
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if header := re.match(r"\s*\[\s*(\w+)\s*\]", line):
            table = header[1]
            found[table, ""] = number
        elif key := re.match(r"""\s*["']?(?:(\w+)["']?\s*\.\s*["']?)?([\w-]+)["']?\s*=""", line):
            found.setdefault((table or key[1] or "", key[2]), number)
            found.setdefault((key[2], ""), number)  # of a table in one line
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
