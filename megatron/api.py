"""The public API: what examples/ import, and the only names that a program of one's own needs.

api.pyi lists them, for type checkers and for this file, which imports a module when one of its
names is first asked for: importing megatron.api alone loads neither torch nor transformers.
docs/api.md is made from their docstrings by tools/api_page.py.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_PLACES = {
    each.asname or each.name: (f"megatron.{line.module}", each.name)
    for line in _STUB.body
    if isinstance(line, ast.ImportFrom)
    for each in line.names
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"megatron.api has no {name}; docs/api.md lists its names")
    module, its_name = _PLACES[name]
    value = globals()[name] = getattr(import_module(module), its_name)
    return value


def __dir__() -> list[str]:
    return __all__
