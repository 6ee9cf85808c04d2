"""The public API: the names that examples/ import, and the only ones that a user's program needs.

api.pyi lists the names, for type checkers and for this file. A module is imported when one of its
names is first used: importing megatron.api by itself loads neither torch nor transformers.
tools/api_page.py makes docs/api.md from their docstrings.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_SOURCES = {
    each.asname or each.name: (f"megatron.{line.module}", each.name)
    for line in _STUB.body
    if isinstance(line, ast.ImportFrom)
    for each in line.names
}
__all__ = list(_SOURCES)


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"megatron.api has no {name}; docs/api.md lists its names")
    module, its_name = _SOURCES[name]
    value = globals()[name] = getattr(import_module(module), its_name)
    return value


def __dir__() -> list[str]:
    return __all__
