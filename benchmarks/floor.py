"""The floor under a training step: the time of its matrix products alone, each in the layout of
its factors and of its result that is fastest here, whatever layout the step has them in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Product
from megatron.parallel.kernels import matmul as our_product

TRIES = 4  # of each layout; the fastest counts
TURNS = "as is", "transposed"


@dataclass(frozen=True)
class Choice:
    """A product in the layout that was fastest."""

    product: Product
    layout: str
    run: Callable[[], Tensor]
    seconds: float  # of one, when it was chosen

    @property
    def tflops(self) -> float:
        return self.product.flops / self.product.times / self.seconds / 1e12


class Floor:
    """The products of a step."""

    def __init__(
        self,
        products: Sequence[Product],
        dtype: torch.dtype,
        device: torch.device,
        wait: Callable[[], object],
    ) -> None:
        """wait: until all that was started is done."""
        self.products, self.wait = products, wait
        self.kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.choices: list[Choice] = []

    def choose(self) -> list[Choice]:
        """Try all layouts, while nothing else runs."""
        self.choices = [self._choose(product) for product in self.products]
        return self.choices

    def _choose(self, product: Product) -> Choice:
        best = None
        for layout, run in layouts(product, **self.kind):
            seconds = fastest(run, self.wait)
            if best is None or seconds < best.seconds:
                best = Choice(product, layout, run, seconds)
        assert best is not None
        return best

    def step(self, number: int) -> float:
        """Every product as often as a step needs it; no loss comes of it."""
        for choice in self.choices:
            for _ in range(round(choice.product.times)):
                choice.run()
        return 0.0


def layouts(
    product: Product, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Either factor and the result in memory by rows or by columns; by torch, and as we do it."""
    b, m, k, n = product.batch, product.m, product.k, product.n
    left = torch.randn(b, m, k, dtype=dtype, device=device).squeeze(0)
    right = torch.randn(b, k, n, dtype=dtype, device=device).squeeze(0)
    for turned in combinations((False, True), repeat=3):
        x, y = (
            each.mT.contiguous().mT if turn else each
            for each, turn in zip((left, right), turned, strict=False)
        )
        if turned[2]:  # (x y)' = y' x', so that memory holds the result by columns
            x, y = y.mT, x.mT
        out = torch.matmul(x, y)
        name = ", ".join(TURNS[turn] for turn in turned)
        yield name, lambda x=x, y=y, out=out: torch.matmul(x, y, out=out)
        if x.dim() == 2:
            yield f"{name}, ours", lambda x=x, y=y: our_product(x, y.mT)


def fastest(run: Callable[[], Tensor], wait: Callable[[], object]) -> float:
    run()
    found = []
    for _ in range(TRIES):
        wait()
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    return min(found)
