"""The traffic of the layers of 2D, 2.5D and 3D: letters as in formulas.py.

An x of n tokens that one rank reads and W [out, in], of which each rank has 1 / (t e):

             gathered, and again in the backward    summed
    2D       x over columns, W over rows            dx over columns, dW over rows
    3D in    x over j, W over i; dy over k          dx over j, dW over i; y over k
    3D out   the same with j and k exchanged

SUMMA sends what one gather or sum does in t broadcasts or reductions, each of a t-th.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.layouts.formulas import Shape, Traffic


@dataclass(frozen=True)
class Lane:
    """An axis, and the calls in which one gather or sum over it goes."""

    axis: str
    size: int
    calls: int = 1


@dataclass(frozen=True)
class LinearLanes:
    """How x W' is computed: over which lanes x, W and y go."""

    x: Lane
    weight: Lane
    y: Lane


class Sender:
    def __init__(self, x: Shape, found: Traffic) -> None:
        self.x, self.found = x, found
        t, e = x.t, x.e
        if x.mode == "3d":
            weight = Lane("weight", t)
            i_to_k = Lane("input", t), Lane("output", t)
            self.hidden, self.inner_hidden, self.tokens = i_to_k[1], i_to_k[0], Lane("tokens", e)
            self.entering = LinearLanes(i_to_k[0], weight, i_to_k[1])
            self.leaving = LinearLanes(i_to_k[1], weight, i_to_k[0])
            self.outside = LinearLanes(self.hidden, self.tokens, Lane("", 1))
        else:
            self.hidden, self.tokens = Lane("column", t), Lane("row", t)
            self.inner_hidden = self.hidden
            summa = LinearLanes(Lane("column", t, t), Lane("row", t, t), Lane("", 1))
            self.entering = self.leaving = self.outside = summa

    def send(self, lane: Lane, whole: int, times: int, passes: int = 1) -> None:
        """whole: bytes of the gathered tensor, in `lane.calls` parts."""
        self.found.add(lane.axis, lane.size, passes, whole // lane.calls, times * lane.calls)

    def linear(
        self, matmul: LinearLanes, n: int, fan_in: int, *fan_outs: int, times: int, again: int = 0
    ) -> None:
        """again: number of additional forwards. fan_outs: of each weight; times t for those that
        every rank has whole."""
        x, forwards = self.x, times + again
        self.send(matmul.x, n * fan_in * x.w, forwards + 2 * times)  # x, and for dW; dx
        for fan_out in fan_outs:
            matrix = fan_in * fan_out * matmul.weight.size // (x.t * x.e)
            self.send(matmul.weight, matrix * x.w, forwards + times)  # W, and for dx
            self.send(matmul.weight, matrix * x.wide, times)  # dW
            self.send(matmul.y, n * fan_out * x.w, forwards + times)  # y; dy

    def norm(self, n: int, times: int, again: int = 0) -> None:
        """Squares of each rank's columns, and their mean but for RMSNorm; in the backward as many
        sums."""
        x = self.x
        whole = (1 if x.is_llama else 2) * n * x.wide
        self.send(self.hidden, x.columns * whole, times + again)
        self.send(self.hidden, whole, times, passes=2)

    def cut_columns(self, n: int, times: int) -> None:
        """x [n, h] gathered, or summed and scattered, over its columns."""
        self.send(self.hidden, n * self.x.h * self.x.w, times)


def of_layers(x: Shape, found: Traffic) -> None:
    """The traffic of layers, embedding and head of all micro-batches along the axes of a grid."""
    to, h, n, m = Sender(x, found), x.h, x.n, x.m
    times = x.layers * m
    again = times if x.recompute == "full" else 0
    if x.is_llama:
        qkv, up = (h, 2 * x.keys_width * x.t), 2 * x.f
    else:
        qkv, up = (3 * h,), x.f
    to.norm(n, 2 * times, 2 * again)
    to.linear(to.entering, n, h, *qkv, times=times, again=again)
    to.linear(to.leaving, n, h, h, times=times, again=again)
    to.linear(to.entering, n, h, up, times=times, again=again)
    to.linear(to.leaving, n, x.f, h, times=times, again=again)
    if x.mode == "3d":  # keys of dropout, and what else attention knows of samples
        for width, count in ((1, x.kind == "bert"), (8, x.dropout + x.documents + x.is_llama)):
            to.send(Lane("input", x.t), x.t * n * width, m * x.stages * count)
    if x.has_norm:
        to.norm(n, m)
    if x.is_first and x.kind != "vit":
        # Ids; rows of all samples there and back, then their columns.
        to.send(to.tokens, x.e * n * 8, m)
        to.send(to.tokens, x.e * n * h * x.w, 2 * m)
        to.cut_columns(n, 2 * m)
    if x.is_last:
        of_head(x, to)


def of_head(x: Shape, to: Sender) -> None:
    scored, m, h = x.k if x.kind == "bert" else x.n, x.m, x.h
    if x.kind == "vit":
        to.send(to.hidden, x.b * x.v * x.w, m, passes=2)
        return
    if x.kind == "bert":
        to.linear(to.outside, x.k, h, h, times=m)
        to.norm(x.k, m)
        to.linear(to.outside, x.b, h, h, times=m)
        to.send(to.hidden, x.b * 2 * x.w, m, passes=2)  # the order of segments
    matrix = x.v // x.t * h
    if x.whole_logits:
        to.cut_columns(x.n, 3 * m)
        to.send(to.tokens, matrix * x.w, 2 * m)
        to.send(to.hidden, x.n * x.v * x.w, m)
    else:
        to.cut_columns(scored, 2 * m)
        to.send(to.tokens, matrix * x.w, m)
        to.send(to.hidden, scored * x.wide, m, passes=2)  # a maximum, then two sums
        to.send(to.hidden, 2 * scored * x.wide, m, passes=2)
    to.send(to.tokens, matrix * x.wide, m)
