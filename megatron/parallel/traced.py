"""How a compiled backward adds its gradients to their buckets.

A graph cannot write into a bucket: from ZeRO stage 2 on, the bucket gets its memory with the first
gradient, and a zero-bubble pipeline computes gradients of weights later. Instead, the graph calls
an operator with a handle, a number on the host that stands for a GradientView. The operator looks
the view up when it runs, so all layers share one graph. It returns a zero, which the graph returns
as the gradient of the handle: a call whose result is not used would be removed from the graph. Two
equal calls in one graph, of a layer that reads the same x twice, would count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megatron.parallel.bucket import Deferral, GradientView

_numbers = count()
_views = WeakValueDictionary[int, GradientView]()
_library = torch.library.Library("megatron", "FRAGMENT")
_library.define("add_matmul(Tensor handle, Tensor dy, Tensor x) -> Tensor")
_library.define("add_gradient(Tensor handle, Tensor gradient) -> Tensor")


def handle_of(view: GradientView) -> Tensor:
    """fp64 [1] on the host, which requires a gradient. It is no scalar, because each call of a
    compiled layer would check a scalar for NaN, which takes as long as all its other checks."""
    number = next(_numbers)
    _views[number] = view
    return torch.tensor([float(number)], dtype=torch.float64, device="cpu", requires_grad=True)


def _add_matmul(handle: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    view = _views[int(handle)]
    if view.deferral.is_on:
        # The graph reuses their memory. An x that two weights share is cloned for each.
        dy, x = dy.clone(), x.clone()
        view.deferral.add(view, lambda: view.add_matmul(dy, x))
    else:
        view.add_matmul(dy, x)
    return handle.new_zeros(1)


def _add_gradient(handle: Tensor, gradient: Tensor) -> Tensor:
    _views[int(handle)].add(gradient)
    return handle.new_zeros(1)


for _name, _function in (("add_matmul", _add_matmul), ("add_gradient", _add_gradient)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megatron::{_name}", lambda handle, *_: handle.new_zeros(1))


class TracedView:
    """Stands in for a view while a graph is traced. token: result of the last operator."""

    deferral: ClassVar[Deferral] = Deferral()  # off: the operator defers, not the graph

    def __init__(self, handle: Tensor, dtype: torch.dtype) -> None:
        self.handle, self.dtype = handle, dtype
        self.token: Tensor | None = None

    def add_matmul(self, dy: Tensor, x: Tensor) -> None:
        self.token = torch.ops.megatron.add_matmul(self.handle, dy, x)

    def add(self, gradient: Tensor) -> None:
        self.token = torch.ops.megatron.add_gradient(self.handle, gradient)


def traced_views(
    handles: Sequence[Tensor | None], views: Sequence[GradientView | None]
) -> list[TracedView | None]:
    """The traced view of each handle; None where there is no handle or no view."""
    pairs = zip(handles, views, strict=True)
    return [
        None if handle is None or view is None else TracedView(handle, view.dtype)
        for handle, view in pairs
    ]
