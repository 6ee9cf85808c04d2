"""Make the names of docs/api.md from the docstrings of those in megatron/api.pyi, and the table of
parts in docs/configuration.md; a test compares them. The rest of both pages stays as it is.

    python tools/api_page.py
    python -m pytest tests/test_package.py    # compares
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from megatron import api
from megatron.config.parse import parse_call, whole_program
from megatron.config.parts import PARTS
from megatron.errors import flag

ROOT = Path(__file__).resolve().parents[1]


def source(value: Any) -> Any:
    """The syntax tree of a class or function, with defaults as written in its source."""
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def signature(name: str, function: ast.FunctionDef) -> str:
    arguments = ast.unparse(function.args).removeprefix("self").removeprefix(", ")
    returns = function.returns and ast.unparse(function.returns)
    text = f"{name}({arguments})" + (f" -> {returns}" if returns not in (None, "None") else "")
    return f"```python\n{textwrap.fill(text, 100, subsequent_indent='    ')}\n```"


def fields_of(value: type) -> str:
    """A line for each field of a dataclass or named tuple, with the docstring or comment that
    follows it."""
    found: dict[str, str] = {}
    owners = [each for each in reversed(value.__mro__) if is_dataclass(each)]
    for owner in owners or [value] * hasattr(value, "_fields"):
        lines, body = inspect.getsource(owner).splitlines(), source(owner).body
        for line, after in zip(body, [*body[1:], None], strict=True):
            if not isinstance(line, ast.AnnAssign) or "ClassVar" in ast.unparse(line.annotation):
                continue
            text = lines[line.end_lineno - 1].partition("  # ")[2]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(after.value.value.split())
            if isinstance(line.value, ast.Call) and ast.unparse(line.value.func) == "field":
                line.value = {each.arg: each.value for each in line.value.keywords}.get("default")
            name = ast.unparse(line.target)
            if name.startswith("_"):
                continue
            text = text or found.get(name, "").partition("`: ")[2]
            found[name] = f"- `{ast.unparse(line)}`" + (f": {text}" if text else "")
    return "\n".join(found.values())


def described(value: Any, name: str) -> Iterator[str]:
    """Signature and docstring; for a class also its fields, methods and properties."""
    definition = source(value)
    if isinstance(definition, ast.FunctionDef):
        yield signature(name, definition)
        yield inspect.getdoc(value) or ""
        return
    methods = [each for each in definition.body if isinstance(each, ast.FunctionDef)]
    init = getattr(value, "__init__", None)
    is_plain = (
        inspect.isfunction(init)
        and init.__module__.startswith("megatron.")  # not torch's, which programs replace
        and not is_dataclass(value)
        and not getattr(value, "_is_protocol", False)
    )
    first = source(init) if is_plain else None
    if first is not None:
        yield signature(name, first)
    yield ast.get_docstring(definition) or ""
    if first is not None:
        yield ast.get_docstring(first) or ""
    yield fields_of(value)
    for each in methods:
        if each.name.startswith("_") or not (text := ast.get_docstring(each)):
            continue
        if any(ast.unparse(decorator).endswith("property") for decorator in each.decorator_list):
            yield f"`.{each.name}`: {text}"
        else:
            yield signature(f".{each.name}", each)
            yield text


def page() -> str:
    """docs/api.md with what is made anew: its contents, and the names."""
    contents, parts = list[str](), list[str]()
    for line in Path(api.__file__).with_suffix(".pyi").read_text().splitlines():
        if line.startswith("# ") and "noqa" not in line:
            parts.append(f"## {line[2:]}\n")
            contents.append(f"- **{line[2:]}:**")
        for name in re.findall(r"(\w+) as \w+", line):
            value = getattr(api, name)
            parts.append(f"### {name}\n")
            parts += [f"{text}\n" for text in described(value, name) if text]
            contents[-1] += f" [{name}](#{name.lower()})"
    text = filled((ROOT / "docs" / "api.md").read_text(), "contents", "\n".join(contents))
    return filled(text, "names", "\n".join(parts))


def filled(text: str, name: str, content: str) -> str:
    """A page with the content between the marks of this name."""
    before, mark, rest = text.partition(f"<!-- {name}: made by tools/api_page.py -->\n")
    _, end, after = rest.partition("<!-- end -->")
    return f"{before}{mark}{content}\n{end}{after}"


def parts_table() -> str:
    lines = ["| setting | names, the default first | called with | a part |", "|---|---|---|---|"]
    for name, each in PARTS.items():
        names = sorted(each.parts, key=lambda part, default=each.default: part != default)
        cells = ", ".join(f"`{part}`" for part in names), ", ".join(f"`{k}`" for k in each.takes)
        lines.append(f"| `{flag(name)}` | {' | '.join(cells)} | {each.does} |")
    return "\n".join(lines)


def with_parts(text: str) -> str:
    """A page with the table of parts between its two marks."""
    return filled(text, "parts", parts_table())


def write() -> None:
    """Make the names of docs/api.md from the docstrings of those in megatron/api.pyi, and the table
    of parts in docs/configuration.md from their registries."""
    (ROOT / "docs" / "api.md").write_text(page())
    configuration = ROOT / "docs" / "configuration.md"
    configuration.write_text(with_parts(configuration.read_text()))


if __name__ == "__main__":
    with whole_program({}):
        parse_call(write, sys.argv[1:], {})()
