"""Prove that a model of transformers, sharded by a plan, computes the same as the unmodified one.

    python tools/prove_plan.py --model DIR --show --picture plan.svg
    python tools/prove_plan.py --model HuggingFaceTB/SmolLM-135M --plan mine.toml --json proof.json

A tiny model of the architecture (2 layers, 8 heads, random weights in fp64) is sharded over 2 and
over 4 processes on this machine. Its loss, its logits, every gradient and the output of every
module are compared with the unmodified model's. See docs/parallelism.md for plans.

Exit status: 0 the plan is right at those of the two sizes that the model can be sharded over, 1 a
module is wrong, 2 a wrong argument or no proof.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron.config.checks import writable
from megatron.config.parse import parse_call, whole_program
from megatron.data.files import write_atomically
from megatron.errors import UsageError, switch
from megatron.huggingface.config import (
    HuggingFaceConfig,
    HuggingFaceMaskedConfig,
    kind_of,
    read_hf_config,
)
from tools.layouts import plan_picture
from tools.layouts.plan_picture import Row
from tools.report.figures import drawable
from tools.report.numbers import aligned

if TYPE_CHECKING:
    from megatron.huggingface.proof import Proof

SIZES = (2, 4)
HEADER = ("module", "becomes", "whole", "local", "communication")
LEGEND = """\
f: all-reduce of the input's gradient in the backward, once for layers that read one tensor
g: all-reduce of the output in the forward"""


def prove_plan(
    *,
    model: str,
    plan: str = "auto",
    masked: bool | None = None,
    show: bool = False,
    json: Path | None = None,
    picture: Path | None = None,
) -> int:
    """Prove that a model of transformers, sharded by a plan, computes the same as the unmodified
    one: loss, logits and every gradient of a tiny model in fp64, on 2 and on 4 ranks.

    Exit status: 0 the plan is right at those of the two sizes that the model can be sharded over,
    1 a module is wrong, 2 a wrong argument or no proof.

    Args:
        model: A folder with a config.json, or a name on the HuggingFace hub.
        plan: auto, for transformers' own plan or one of this project's; or a TOML file.
        masked: Whether it predicts masked tokens; by default decided by its config.json.
        show: List modules with their replacements, shapes and communication.
        json: JSON file for the results.
        picture: .png or .svg file: what --show lists, drawn as in figure 3 of the Megatron-LM
            paper.
    """
    files = SimpleNamespace(json=json, picture=picture)
    writable(files, "json")
    drawable(files, "picture")
    config = read(model, plan, masked)
    rows = {size: modules_of(config, size, is_ordered=picture is not None) for size in SIZES}
    shown = {size: each for size, each in rows.items() if not isinstance(each, str)}
    found: dict[int, Proof | str] = {t: each for t, each in rows.items() if isinstance(each, str)}
    if show and shown:
        for size, each in shown.items():
            print(f"t = {size}:\n{aligned([HEADER, *(row.cells for row in each)])}\n")
        print(f"{LEGEND}\n", flush=True)
    if not shown and len({*found.values()}) == 1:
        allowed = f"one that fits {model}: {found[SIZES[0]]}"
        raise UsageError("--plan", None if plan == "auto" else plan, allowed)
    if picture is not None:
        size = min(shown)
        legend = LEGEND.splitlines()
        plan_picture.write(picture, title(model, size), shown[size], legend, size)
    if shown:
        from tools.layouts.processes import on_ranks
        from tools.layouts.proofs import prove_at

        (outcomes,), *_ = on_ranks(max(shown), prove_at, [config], list(shown))
        for size, outcome in zip(shown, outcomes, strict=True):
            if isinstance(outcome, Exception):
                found[size] = f"not proved by a tiny model: {outcome}"
            else:
                found[size] = outcome
    for size in SIZES:
        outcome = found[size]
        wrong = [] if isinstance(outcome, str) else outcome.wrong
        for line in wrong or [outcome]:
            print(f"t = {size}: {line}")
    if json is not None:
        write_atomically(json, (dumped(found, shown) + "\n").encode())
    outcomes = [found[size] for size in shown]
    if any(not isinstance(each, str) and each.wrong for each in outcomes):
        return 1
    return 0 if outcomes and not any(isinstance(each, str) for each in outcomes) else 2


def title(model: str, size: int) -> str:
    return f"{Path(model).name}, tensor-parallel size {size}"


def read(model: str, plan: str, masked: bool | None) -> HuggingFaceConfig:
    """The config of the model. Raises UsageError if the model or plan cannot be read, or if
    `masked` contradicts the model's kind in pretrain.py."""
    described = read_hf_config(model)
    own = kind_of({"model_type": "", **json.loads(described)})
    if masked is None:
        masked = own == HuggingFaceMaskedConfig.kind
    kind = HuggingFaceMaskedConfig if masked else HuggingFaceConfig
    if own not in (None, kind.kind):
        what = "the next token" if masked else "masked tokens"
        raise UsageError(switch("masked", masked), None, f"left out: {model} predicts {what}")
    return kind(hf_model=model, plan=plan, hf_config=described)


def modules_of(
    config: HuggingFaceConfig, size: int, *, is_ordered: bool = False
) -> list[Row] | str:
    """Rows of the table: modules of the full-size model and their replacements on the first of
    `size` ranks, layers of the same shape in one row; or the reason why it cannot be sharded.
    is_ordered: find the order of the calls, too, which takes seconds for a deep model."""
    import torch

    from megatron.huggingface.layers import ParallelizedModule
    from megatron.huggingface.plan import Local, PlanError, plan_of
    from megatron.huggingface.replacements import unmodified
    from megatron.models.build import build_on_meta
    from tools.plan.absent import absent_mesh

    mesh = absent_mesh({"tensor": size}, torch.device("meta"))
    try:
        model = build_on_meta(config, mesh, 1)
        whole = unmodified(config, model.auto_class)
        plan = plan_of(whole, config.stated_plan)
    except PlanError as error:
        return str(error)
    except Exception as error:  # any model's code in transformers may raise it
        if isinstance(error.__cause__, PlanError):
            return str(error.__cause__)
        if isinstance(error, UsageError):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        allowed = f"a model that transformers builds ({reason})"
        raise UsageError("--model", config.hf_model, allowed) from error
    rows, order = dict[tuple[str, ...], Row](), order_of_calls(whole) if is_ordered else {}
    for name, module in model.model.named_modules():
        if isinstance(module, ParallelizedModule):
            general = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
            specs = module.specs
            shapes = ", ".join(f"{each} {shape(spec.shape)}" for each, spec in specs.items())
            local = ", ".join(shape(spec.local_shape) for spec in specs.values())
            cells = becomes(module), shapes, local, sent(module)
            facts = {**cut(module), "order": order.get(name, 0)}
            found = rows.setdefault((general, *cells), Row(("", *cells), general, **facts))
            times = found.times + 1
            head = f"{general} ({times} x)"
            rows[general, *cells] = found._replace(cells=(head, *cells), times=times)
    styles = (
        Row((pattern, said(style), "", "", ""), pattern)
        for pattern, style in plan.items()
        if isinstance(style, Local)
    )
    return [*rows.values(), *styles]


def order_of_calls(model: Any) -> dict[str, int]:
    """Numbers of the modules in the order in which a forward on shapes first calls them; empty if
    the model does not run on shapes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    order: dict[str, int] = {}

    def enter(name: str, *_: object) -> None:
        order.setdefault(name, len(order))

    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(enter, name))
    model.eval()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():

            def on_shapes(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
                return {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors}

            state = on_shapes([*model.named_parameters(), *model.named_buffers()])
            torch.func.functional_call(model, state, (), on_shapes(model.dummy_inputs.items()))
    except Exception:  # from the model's code, which may read values
        return {}
    return order


def cut(module: Any) -> dict[str, Any]:
    """`cut` and `source` of a Row."""
    from megatron.huggingface.layers import ColumnLinear, CutEmbedding

    facts: dict[str, Any] = {}
    if isinstance(module, ColumnLinear):
        facts["source"] = id(module.shared_input)
    spec = module.specs.get("weight")
    if spec is not None and spec.shards:
        # A weight is stored as [.., out, in], that of an embedding as [in, out].
        is_last = spec.shards[0][0] == len(spec.shape) - 1
        facts["cut"] = int(is_last == isinstance(module, CutEmbedding))
    return facts


def becomes(module: Any) -> str:
    from megatron.huggingface import layers

    if isinstance(module, layers.SummedParameters):
        return "Summed()"
    return said(module.style) if hasattr(module, "style") else "holds a shard"


def said(style: Any) -> str:
    """The style in words, without its default values."""
    if hasattr(style, "attributes"):
        words = [*style.attributes, *(f"{name}={value}" for name, value in style.values)]
    else:
        plain = type(style)()
        words = [
            f"{name}={value}"
            for name, value in vars(style).items()
            if value != getattr(plain, name) and name != "queries"
        ]
    return f"{type(style).__name__}({', '.join(words)})"


def shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def sent(module: Any) -> str:
    """The communication of a sharded module."""
    from megatron.huggingface import layers
    from megatron.huggingface.plan import Column

    if isinstance(module, layers.ColumnLinear):
        if module.rows_in_use is not None:
            return "f, sum of the gradient"
        entering = "all-gather of tokens" if module.style.tokens else "f"
        return f"{entering}, all-gather of the output" if module.style.gather else entering
    if isinstance(module, layers.CutEmbedding) and isinstance(module.style, Column):
        return "all-gather of the output" if module.style.gather else ""
    if isinstance(module, layers.RowLinear | layers.CutEmbedding):
        return "reduce-scatter of tokens" if module.style.tokens else "g"
    return "sum of the gradient" if isinstance(module, layers.SummedParameters) else ""


def dumped(found: Mapping[int, Proof | str], shown: Mapping[int, Any]) -> str:
    rows = []
    for size, outcome in found.items():
        row: dict[str, Any] = {"tensor": size}
        if isinstance(outcome, str):
            row["refused"] = outcome
        else:
            row |= {
                "wrong": outcome.wrong,
                "first": outcome.first,
                "differences": {"loss": outcome.loss, "logits": outcome.logits},
                "gradients": dict(outcome.gradients),
                "outputs": dict(outcome.outputs),
                "matmul_flops": outcome.flops,
            }
        modules = shown.get(size, [])
        rows.append(
            row | {"modules": [dict(zip(HEADER, each.cells, strict=True)) for each in modules]}
        )
    return json.dumps(rows, indent=1)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program; returns the exit status."""
    with whole_program(environ):
        command = parse_call(prove_plan, arguments, environ)
        try:
            return int(command())
        except UsageError as error:  # of a config of pretrain.py, whose cure would be its flags
            if error.flag != "--hf-model":
                raise
            raise error.about("--model", error.value) from None
