"""Make docs/api.md from the docstrings of the names in megatron/api.pyi, and the table of parts in
docs/configuration.md; a test compares them.

    python tools/api_page.py
    python -m pytest tests/test_package.py    # compares
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import api
from megatron.config.parse import parse_call, user_errors
from megatron.config.parts import PARTS
from megatron.errors import flag

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- parts: made by tools/api_page.py -->\n"
MOST_USED = {
    "launch": "starts the ranks and gives the mesh",
    "ParallelConfig": "says how many ranks share a model, and how",
    "build_state": "makes a model of the project with its optimizer",
    "train_step": "trains one step, on any layout",
    "save_checkpoint": "and `newest_checkpoint`, `TrainState.load`: save, and resume at any layout",
    "prefetch": "reads the micro-batches of this rank from a data set",
    "ColumnParallelLinear": "and `RowParallelLinear`: the paper's pair of layers, for your module",
    "layer_factory": "makes the layers of any mode: 1D, 2D, 2.5D, 3D",
    "parallelize": "cuts an unmodified model by a plan",
    "GradientBuckets": "sums gradients over ranks, with ZeRO, for an optimizer of torch",
    "run_pipeline": "runs stages of yours by a schedule",
    "offload_activations": "keeps on the host what the GPU does not need now",
}
INTRODUCTION = """\
# The public API

`from megatron.api import ...` gives these names, and loads what is asked for;
[`examples/`](../examples) use nothing else. This page is made from their docstrings:
`python tools/api_page.py`.

b samples, s tokens of each, n = b x s, h hidden size, v padded vocabulary, t ranks of the tensor
axis. Layers take a mesh first; where [n, h] is written, [b, s, h] works as well, but not under
sequence parallelism, where a rank holds n / t rows. Layers that are built outside of
`torch.device("meta")` have their initial values at once, drawn from torch's own generator.

In 2D, 2.5D and 3D tensor parallelism the stream's columns are cut, too: c ranks share them, q of a
q x q square or l of an l x l x l cube, and a rank reads the samples of its place along
`mesh.axis("batch")`. `split_stream` cuts a whole x, `gather_stream` puts it together.
`layer_factory` makes the layers of the mesh's mode: one module for all of them
([`examples/mlp_2d.py`](../examples/mlp_2d.py)).

Under context parallelism the c ranks of `mesh.context` share the tokens of each sample: where n or
s is written, a rank has n / c or s / c. `train_step`, `run_pipeline` and `mean_losses` take batches
of whole samples; a loop of one's own takes its tokens by `local_tokens`, or by `context.positions`
of `layer_factory` ([`examples/long_context.py`](../examples/long_context.py)).

Layers of torch beside them, such as `nn.Linear` and norms, are taken to be whole on every rank.
That is right outside of a pair of column and row layers and without sequence parallelism. Elsewhere
they are refused unless `specs={name: replicated(parameter, mesh)}` of GradientBuckets says how. It
is given to `model_slices`, `optimizer_slices`, `load_optimizer` and `to_dtensors`, too.

In bf16 the parameters are (`model.to(torch.bfloat16)`), and gradients are added up in fp32; layers
refuse `torch.autocast`. `model.compile()` keeps the names of parameters, which
`torch.compile(model)` does not.
"""


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
    contents, parts = list[str](), list[str]()
    for line in Path(api.__file__).with_suffix(".pyi").read_text().splitlines():
        if line.startswith("# ") and "noqa" not in line:
            parts.append(f"## {line[2:]}\n")
            contents.append(f"- **{line[2:]}:**")
        for name in re.findall(r"(\w+) as \w+", line):
            value = getattr(api, name)
            parts.append(f"### {name}\n")
            parts += [f"{text}\n" for text in described(value, name) if text]
            contents[-1] += f" {link(name)}"
    start = [f"| {link(name)} | {text} |" for name, text in MOST_USED.items()]
    rows = "\n".join(["| most used | it |", "|---|---|", *start])
    first, _, rest = INTRODUCTION.partition("\n\nb samples")
    return "\n".join([f"{first}\n\n{rows}\n", *contents, f"\nb samples{rest}", *parts])


def link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def parts_table() -> str:
    lines = ["| setting | names, the default first | called with | a part |", "|---|---|---|---|"]
    for name, each in PARTS.items():
        names = sorted(each.parts, key=lambda part, default=each.default: part != default)
        cells = ", ".join(f"`{part}`" for part in names), ", ".join(f"`{k}`" for k in each.takes)
        lines.append(f"| `{flag(name)}` | {' | '.join(cells)} | {each.does} |")
    return "\n".join(lines)


def with_parts(text: str) -> str:
    """A page with the table of parts between its two marks."""
    before, mark, rest = text.partition(MARK)
    _, end, after = rest.partition("<!-- end -->")
    return f"{before}{mark}{parts_table()}\n{end}{after}"


def write() -> None:
    """Make docs/api.md from the docstrings of the names in megatron/api.pyi, and the table of parts
    in docs/configuration.md from their registries."""
    (ROOT / "docs" / "api.md").write_text(page())
    configuration = ROOT / "docs" / "configuration.md"
    configuration.write_text(with_parts(configuration.read_text()))


if __name__ == "__main__":
    with user_errors({}):
        parse_call(write, sys.argv[1:], {})()
