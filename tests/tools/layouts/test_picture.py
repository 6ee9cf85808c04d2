"""The blocks of a layout: those of the papers, each matrix whole, and those of ranks that run; the
picture and the table of them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.models.gpt import MLP
from megatron.parallel.bucket import ALIGNMENT
from megatron.parallel.context import local_tokens
from tests.dist import Pool
from tests.refusals import by_last_flag, refused
from tests.tiny import mesh_of_ranks, micro_batches, samples, summed_loss, tiny_model
from tests.tools.report.pages import ParsedPage, texts_of
from tools.experiments.runner import ROOT
from tools.layouts import __main__ as layouts
from tools.layouts import picture
from tools.layouts.blocks import Blocks, Matrix, read_blocks
from tools.layouts.layout import MODES, parse_layout
from tools.report.sections import Page, Section

PAGE = ROOT / "docs" / "parallelism.md"
# Blocks of one size, row by row; the ranks of each. From the papers: in 2d rank (i, j) holds block
# (i, j) of all; in 2.5d each square holds W; in 3d rank (i, j, k) holds of x rows (i, j) and
# columns k, of W1 rows (k, i) and columns j, of y1 rows (i, k) and columns j, of W2 rows (j, i) and
# columns k.
EXPECTED = {
    "serial": ("0", "0", "0", "0", "0"),
    "tensor=2": ("0+1", "0 1", "0 1", "0 / 1", "0+1"),
    "tensor=2,sequence": ("0 / 1", "0 1", "0 1", "0 / 1", "0 / 1"),
    "tensor=4:2d": ("0 1 / 2 3",) * 5,
    "tensor=8:2.5d:2": (
        "0 1 / 2 3 / 4 5 / 6 7", "0+4 1+5 / 2+6 3+7", "0 1 / 2 3 / 4 5 / 6 7",
        "0+4 1+5 / 2+6 3+7", "0 1 / 2 3 / 4 5 / 6 7",
    ),
    "tensor=8:3d": (
        "0 1 / 2 3 / 4 5 / 6 7", "0 2 / 4 6 / 1 3 / 5 7", "0 2 / 1 3 / 4 6 / 5 7",
        "0 1 / 4 5 / 2 3 / 6 7", "0 1 / 2 3 / 4 5 / 6 7",
    ),
    "data=2": ("0 / 1", "0+1", "0 / 1", "0+1", "0 / 1"),
    "context=2": ("0 / 1", "0+1", "0 / 1", "0+1", "0 / 1"),
    # Buckets begin with the last parameter, whose gradient is complete first.
    "data=2,zero=3": ("0 / 1", "1", "0 / 1", "0", "0 / 1"),
    "tensor=2,data=2": ("0+1 / 2+3", "0+2 1+3", "0 1 / 2 3", "0+2 / 1+3", "0+1 / 2+3"),
    "tensor=2,pipeline=2": ("0+1", "0 1", "0 1", "0 / 1", "0+1"),
}  # fmt: skip
OTHERS = (
    "context=2:p2p", "tensor=2,context=2:p2p,sequence", "tensor=9:2d", "tensor=27:3d",
    "tensor=18:2.5d:2", "tensor=8:3d,data=3", "data=3,zero=3", "tensor=2,data=4,zero=3",
    "tensor=8:2.5d:2,zero=3", "tensor=4:2d,data=2,zero=3", "data=16,zero=3",
    "tensor=3,data=2,context=4,zero=1",
)  # fmt: skip
RUN = (
    "tensor=2", "tensor=2,sequence", "context=2:p2p", "tensor=4:2d", "data=2,tensor=2",
    "tensor=2,context=2,sequence", "tensor=8:2.5d:2", "tensor=8:3d",
)  # fmt: skip


def blocks_of(name: str) -> Blocks:
    return read_blocks(parse_layout(name))


def grid(matrix: Matrix) -> str:
    """The ranks of each block, as in EXPECTED. Fails where blocks have several sizes."""
    assert len({(len(each.rows), len(each.columns)) for each in matrix.blocks}) == 1
    rows: dict[int, list[str]] = {}
    for block in matrix.blocks:
        rows.setdefault(block.rows.start, []).append("+".join(map(str, block.ranks)))
    return " / ".join(" ".join(row) for row in rows.values())


@pytest.mark.parametrize("name", [*EXPECTED])
def test_the_blocks_are_those_of_the_papers(name: str) -> None:
    blocks = blocks_of(name)
    assert [each.name for each in blocks.matrices] == ["x", "W1", "y1", "W2", "y2"]
    assert tuple(map(grid, blocks.matrices)) == EXPECTED[name]


@pytest.mark.parametrize("name", [*EXPECTED, *OTHERS])
def test_each_element_is_held_equally_often(name: str) -> None:
    """And each rank holds equally many of x, y1 and y2, and of the weights together but for the
    padding of a bucket."""
    blocks = blocks_of(name)
    numbers = np.zeros((len(blocks.matrices), blocks.ranks), int)
    for matrix, number in zip(blocks.matrices, numbers, strict=True):
        held = np.zeros(matrix.shape, int)
        for block in matrix.blocks:
            held[np.ix_(block.rows, block.columns)] += len(block.ranks)
            number[[*block.ranks]] += len(block.rows) * len(block.columns)
        assert held.min() == held.max() > 0, matrix.name
    x, w1, y1, w2, y2 = numbers
    for each in (x, y1, y2):
        assert each.min() == each.max()
    assert np.ptp(w1 + w2) <= (ALIGNMENT if "data=3,zero=3" in name else 0)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("tensor=8:2.5d:2,zero=3", "tensor=8:2.5d:2"),  # over depth, too
        ("tensor=2,data=4,zero=3", "tensor=2,data=4"),
    ],
)
def test_zero_divides_what_each_tensor_parallel_rank_holds(name: str, whole: str) -> None:
    for matrix, other in zip(blocks_of(name).matrices, blocks_of(whole).matrices, strict=True):
        scale = matrix.shape[0] // other.shape[0], matrix.shape[1] // other.shape[1]
        for block in matrix.blocks:
            assert len(block.ranks) == 1 or matrix.name in ("x", "y2")
            own = next(each for each in other.blocks if block.ranks[0] in each.ranks)
            assert {*block.rows} <= {*indices([own.rows], scale[0])}
            assert {*block.columns} <= {*indices([own.columns], scale[1])}


def captured(name: str) -> dict[str, Tensor]:
    """This rank's matrices of the first MLP of a model that runs, one sample a rank along the
    batch; alone, all samples of the layout."""
    layout = parse_layout(name)
    mesh = mesh_of_ranks(name)
    model, found = tiny_model(mesh), dict[str, Tensor]()
    mlp: Any = next(each for each in model.modules() if isinstance(each, MLP))

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        x, y_name = ("x", "y1") if module is mlp.up else ("", "y2")
        found.update({y_name: y.detach()} | ({x: inputs[0].detach()} if x else {}))

    mlp.up.register_forward_hook(keep)
    mlp.down.register_forward_hook(keep)
    batch = samples(blocks_of(layout.name).samples)
    size = 1 if mesh.size() > 1 else batch.num_samples
    (own,) = micro_batches(batch, mesh, size)
    with torch.no_grad():
        summed_loss(model, local_tokens(own, mesh), torch.device("cpu"))
    weights = {"W1": mlp.up.weight.T, "W2": mlp.down.weight.T}
    return found | {each: weight.detach().clone() for each, weight in weights.items()}


@pytest.mark.parametrize("name", RUN)
def test_ranks_that_run_hold_these_blocks(gloo: Pool, name: str) -> None:
    whole = captured(name)
    locals_ = gloo.run(parse_layout(name).ranks, captured, name)
    for matrix in blocks_of(name).matrices:
        values = whole[matrix.name]
        for rank, by_name in enumerate(locals_):
            own = [each for each in matrix.blocks if rank in each.ranks]
            rows = indices((each.rows for each in own), values.shape[0] // matrix.shape[0])
            columns = indices((each.columns for each in own), values.shape[1] // matrix.shape[1])
            expected = values[rows][:, columns]
            is_equal = by_name[matrix.name].shape == expected.shape and torch.allclose(
                by_name[matrix.name], expected, rtol=1e-9, atol=1e-12
            )
            assert is_equal, f"{matrix.name} of rank {rank}"


def indices(spans: Iterable[range], scale: int) -> list[int]:
    """The indices of all spans, where `scale` indices stand for one."""
    numbers = sorted({number for span in spans for number in span})
    return [scale * number + part for number in numbers for part in range(scale)]


LAST = """
--layout tensor=3:2d | --layout sequence | --layout tensr=2 | --layout data=513
--layout tensor=99999999999999 | --layout tensor=2 --output x.jpg
--layout tensor=2 --output none/x.png
"""


@pytest.mark.parametrize(("words", "field"), [*by_last_flag(LAST), ("", "--layout")])
def test_what_is_refused(
    words: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a picture that works instead is written here

    def program(words: list[str]) -> None:
        assert layouts.main(["picture", *words], {}) == 0

    assert refused(program, words) == field
    assert not [*tmp_path.glob("*.jpg")]


def test_the_table_and_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["picture", "--layout", "tensor=2,context=2:p2p"]
    assert layouts.main(words, {}) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line if cell] for line in lines]
    assert cells[0] == ["matrix", "ranks", "rows", "columns"]
    assert cells[1:4] == [
        ["x", "0, 1", "0:2", "0:8"],
        ["x", "2, 3", "2:6", "0:8"],
        ["x", "0, 1", "6:8", "0:8"],
    ]
    assert ["W2", "1, 3", "16:32", "0:8"] in cells
    assert layouts.main([*words, "--output", str(tmp_path / "a.png")], {}) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def commands_of_docs() -> list[list[str]]:
    """Words after the program, of docs/parallelism.md."""
    found = re.findall(r"^python tools/layouts\.py (picture .*)$", PAGE.read_text(), re.MULTILINE)
    return [each.split() for each in found]


@pytest.mark.parametrize("words", commands_of_docs(), ids=" ".join)
def test_pictures_of_the_docs_are_what_the_tool_draws(words: list[str], tmp_path: Path) -> None:
    kept = ROOT / words[-1]
    assert f"](layouts/{kept.name})" in PAGE.read_text()
    assert layouts.main([*words[:-1], str(tmp_path / kept.name)], {}) == 0
    assert texts_of(tmp_path / kept.name) == texts_of(kept)


def test_each_tensor_parallel_mode_has_its_picture() -> None:
    modes = {parse_layout(words[2]).mode for words in commands_of_docs()}
    assert modes == {"1d", *MODES}


@pytest.mark.parametrize(
    ("ranks", "number", "words"),
    [
        ((0,), 1, "0"),
        ((0, 1), 2, "all"),
        ((0, 2), 4, "0, 2"),
        ((0, 1, 2, 3), 8, "0 to 3"),
        ((1, 3, 5, 7), 8, "1, 3 .. 7"),
        ((0, 1, 4, 5), 8, "0, 1, 4, 5"),
    ],
)
def test_ranks_in_words(ranks: tuple[int, ...], number: int, words: str) -> None:
    assert picture.ranks_in_words(ranks, number) == words


@pytest.mark.parametrize("name", ["tensor=8:2.5d:2", "tensor=8,data=32,pipeline=2,zero=1"])
def test_a_figure_of_a_page_names_the_ranks(name: str) -> None:
    figure = picture.layout_figure(parse_layout(name))
    ParsedPage(Page("Layout", "", [Section("Blocks", [figure])]).html())
    labels = set(re.findall(r"<text[^>]*>([^<]+)</text>", figure.svg))
    blocks = blocks_of(name)
    for matrix in blocks.matrices[1:4:2]:  # the weights, whose blocks have room
        expected = [picture.ranks_in_words(block.ranks, blocks.ranks) for block in matrix.blocks]
        assert all(words in labels or {*words.split()} <= labels for words in expected)
    assert "var(--paper)" in figure.svg
    assert "#fdfdfc" not in figure.svg
