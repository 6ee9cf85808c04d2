"""Offload: what lives on the host between its uses, and crosses to the device and back.

    optimizer      own gradients -> host | AdamW of one bucket, copies of the others | -> weights
    activations    forward of layer n | copies of layer n - 1        backward: the other way round

On CUDA the host's memory is pinned and copies run on streams of their own, beside the kernels. On a
CPU host and device are one: the copies are made all the same, and free nothing. ZeRO 3 with
offload has trained on one GPU; neither time nor memory is measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

HOST = torch.device("cpu")
SMALLEST = 4096  # bytes of a storage that is worth a copy

on_host: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The tensors that `host_empty` made, as keys: what a count of the device's bytes leaves out."""


def host_empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size] on the host, pinned where `device`, to which it is copied, is a GPU."""
    made = torch.empty(size, dtype=dtype, device=HOST, pin_memory=device.type == "cuda")
    on_host[made] = True
    return made


class Streams(NamedTuple):
    """Of copies from the device to the host, and back."""

    out: Any
    back: Any


@cache
def _streams(device: torch.device) -> Streams | None:
    if device.type != "cuda":
        return None
    return Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))


def start_to_host(source: Tensor, host: Tensor) -> Callable[[], object]:
    """Start a copy of what `source` holds when the kernels before are done; what is returned waits,
    on the host, until it is there."""
    streams = _streams(source.device)
    if streams is None:
        host.copy_(source)
        return lambda: None
    streams.out.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(streams.out):
        host.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    source.record_stream(streams.out)  # its memory is not given away before
    return done.synchronize


class HostPart:
    """The own part of a bucket on the host: masters, a copy of the gradients, rounded weights."""

    def __init__(
        self, size: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
    ) -> None:
        """device: that weights and gradients are on."""
        self.masters = host_empty(size, dtype, device).zero_()
        self.gradients = host_empty(size, dtype, device).zero_()
        self.rounded = self.masters  # what crosses to the device
        if weight_dtype != dtype:
            self.rounded = host_empty(size, weight_dtype, device).zero_()

    def start(self, gradients: Tensor) -> Callable[[], object]:
        """Start to copy the summed gradients here."""
        return start_to_host(gradients, self.gradients)

    @torch.no_grad()
    def round(self) -> None:
        """The masters were changed. Nothing reads `rounded` by then: the gradients that changed
        them came behind a backward, and that behind the last copy to the device."""
        if self.rounded is not self.masters:
            self.rounded.copy_(self.masters)


class Kept:
    """A storage that autograd keeps, on the host; all its views share one copy, there and back."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.device = device
        self.host = host_empty(source.numel(), torch.uint8, device)
        self.fetched: Tensor | None = None
        self.arrived: Any = None  # event
        start_to_host(source, self.host)

    def start(self) -> None:
        """Start to copy it back to the device."""
        if self.fetched is not None:
            return
        streams = _streams(self.device)
        if streams is None:
            self.fetched = self.host.clone()
            return
        with torch.cuda.stream(streams.back):
            streams.back.wait_stream(streams.out)  # the copy that made it
            self.fetched = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self.fetched.copy_(self.host, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def storage(self) -> torch.UntypedStorage:
        """On the device, for the current stream; there until autograd forgets it."""
        self.start()
        assert self.fetched is not None
        if self.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.arrived)
            self.fetched.record_stream(current)
        return self.fetched.untyped_storage()


class Offloaded(NamedTuple):
    """A view of a storage on the host, in place of a tensor that autograd keeps."""

    kept: Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.kept.device)
        return empty.set_(self.kept.storage(), self.offset, self.shape, self.stride)


class Trip:
    """What one call of a layer keeps for its backward, on the host.

    Parameters and buffers stay where they are, and so do small tensors and those of integers, such
    as masks, which layers share.
    """

    def __init__(self, module: nn.Module, before: Trip | None) -> None:
        """before: of the layer whose backward comes next."""
        self.before = before
        own = [*module.parameters(), *module.buffers()]
        self.stays = {each.untyped_storage().data_ptr() for each in own}
        self.alive = WeakSet[Kept]()
        self.seen: WeakIdKeyDictionary | None = WeakIdKeyDictionary()
        """Storages, each with its copies: {version of the tensor: Kept}."""

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if (
            not tensor.is_floating_point()
            or storage.nbytes() < SMALLEST
            or storage.data_ptr() in self.stays
            or type(tensor) not in (Tensor, nn.Parameter)
            or tensor.is_meta
        ):
            return tensor
        assert self.seen is not None
        copies = self.seen.setdefault(storage, {})
        if (kept := copies.get(tensor._version)) is None:
            kept = copies[tensor._version] = Kept(storage, tensor.device)
            self.alive.add(kept)
        offset = int(tensor.storage_offset())
        return Offloaded(kept, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def end(self) -> None:
        """Of the forward: from now on autograd alone holds what was kept."""
        self.seen = None

    def start(self) -> None:
        """Start to fetch all that the backward needs."""
        for each in list(self.alive):
            each.start()


class Plain(NamedTuple):
    """What autograd keeps as it is. Of what hooks pack it does not see itself that it was written
    to."""

    tensor: Tensor
    version: int


def saving(
    by_name: Callable[[Tensor], Any] | None,
    to_host: Callable[[Tensor], Any] | None,
    unpack: Callable[[Any], Tensor],
) -> AbstractContextManager[object]:
    """Hooks of what autograd saves. by_name, to_host: give a tensor that they do not take as it is;
    `unpack` takes what they make of others.

    Of hooks inside others torch calls the inner ones alone. What is no weight goes on to the outer
    ones here, such as those of a checkpoint that a model has around a layer.
    """
    if by_name is None and to_host is None:
        return nullcontext()
    # Private, as torch has no public function for it (2.11 to 2.13).
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    packs = [each for each in (by_name, to_host if outer is None else None) if each is not None]

    def pack(tensor: Tensor) -> Any:
        results: Iterator[Any] = (each(tensor) for each in packs)
        found = next((found for found in results if found is not tensor), None)
        if found is not None:
            return found
        return Plain(tensor, tensor._version) if outer is None else (outer[0](tensor),)

    def get(kept: Any) -> Tensor:
        if isinstance(kept, Plain):
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    f"a tensor {list(kept.tensor.shape)} that a backward needs has been modified "
                    "by an inplace operation behind the forward that kept it"
                )
            return kept.tensor
        if outer is not None and type(kept) is tuple:
            whole: Tensor = outer[1](kept[0])
            return whole
        return unpack(kept)

    return saved_tensors_hooks(pack, get)
