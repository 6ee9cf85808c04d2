"""Names of the axes of ranks, and of their unions, by tensor-parallel mode; mesh.py says what each
union is for. Needs no torch, so that settings read these tables too.

              axes                     samples differ along   hidden dim, vocabulary   heads
    1d        tensor                                          whole, tensor            tensor
    2d        row, column              row                    column                   column
    2.5d      depth, row, column       depth, row             column                   column
    3d        weight, input, output    weight, input          output                   input
"""

from __future__ import annotations

Names = tuple[str, ...]
OUTER: Names = ("pipeline", "data", "context")
INNER: dict[str, Names] = {
    "1d": ("tensor",),
    "2d": ("row", "column"),
    "2.5d": ("depth", "row", "column"),
    "3d": ("weight", "input", "output"),
}
"""Axes over which a layer is cut, by tensor-parallel mode, slowest first. All have the same size,
the side of the grid, except depth."""


def _unions(
    mode: str,
    *,
    copies: Names = (),
    tokens: Names = (),
    hidden: Names = (),
    inner_tokens: Names | None = None,
    inner_hidden: Names | None = None,
) -> dict[str, Names]:
    """copies: axes of a layer that divide only the samples. The others: see Mesh."""
    cut = tuple(name for name in INNER[mode] if name not in copies)
    return {
        "replicas": ("data", "context", *copies),
        "copies": ("data", *copies),
        "tokens": tokens,
        "hidden": hidden,
        "inner_tokens": tokens if inner_tokens is None else inner_tokens,
        "inner_hidden": hidden if inner_hidden is None else inner_hidden,
        "vocabulary": hidden or cut,
        "batch": ("data", *copies, *tokens),
        "loss": ("data", "context", *copies, *tokens),
        "loss_sums": ("pipeline", "data", "context", *copies, *tokens),
        "model_parallel": ("pipeline", *cut),
        "tensor": INNER[mode],
    }


UNIONS = {
    "1d": _unions("1d", inner_hidden=("tensor",)),
    "2d": _unions("2d", tokens=("row",), hidden=("column",)),
    "2.5d": _unions("2.5d", copies=("depth",), tokens=("row",), hidden=("column",)),
    "3d": _unions(
        "3d",
        tokens=("weight", "input"),
        hidden=("output",),
        inner_tokens=("weight", "output"),
        inner_hidden=("input",),
    ),
}
"""Axes of each union, by tensor-parallel mode. Unions of the same ranks share the group and the
name of the first of them, so messages may name that one."""

BATCH_AXES = frozenset(name for unions in UNIONS.values() for name in unions["batch"])
"""Axes along which ranks read different samples, in some mode."""


def token_pieces(ranks: int, cp_comm_type: str) -> int:
    """Equal pieces into which context-parallel ranks cut the tokens of a sample: two of a rank in
    zigzag order."""
    return 2 * ranks if ranks > 1 and cp_comm_type == "p2p" else ranks
