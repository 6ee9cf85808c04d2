"""Offload: tensors that live on the host between uses, and are copied to the device and back.

    optimizer      local gradients -> host | AdamW of one bucket, copies of the others | -> weights
    activations    forward of layer n | copies of layer n - 1        backward: the reverse

On CUDA, host memory is pinned, and copies run on their own streams while kernels run. On a CPU,
host and device are the same: the copies are still made, but free nothing. ZeRO 3 with offload has
trained on one GPU; neither time nor memory is measured there.
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

from megatron.parallel.bucket import Bucket, LocalPart

HOST = torch.device("cpu")
SMALLEST = 4096  # bytes; a smaller storage is not worth a copy

on_host: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tensors that `host_empty` made, as keys. A count of the device's bytes leaves them out."""


def host_empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [size] on the host, pinned if `device`, to which it is copied, is a GPU."""
    made = torch.empty(size, dtype=dtype, device=HOST, pin_memory=device.type == "cuda")
    on_host[made] = True
    return made


class Streams(NamedTuple):
    """CUDA streams for copies from the device to the host (`out`), and `back`."""

    out: Any
    back: Any


@cache
def _streams(device: torch.device) -> Streams | None:
    if device.type != "cuda":
        return None
    return Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))


def start_to_host(source: Tensor, host: Tensor) -> Callable[[], object]:
    """Start a copy of `source` to `host`, after the kernels that are already queued. Returns a
    function that blocks the host until the copy is done."""
    streams = _streams(source.device)
    if streams is None:
        host.copy_(source)
        return lambda: None
    streams.out.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(streams.out):
        host.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    source.record_stream(streams.out)  # its memory is not reused before the copy ends
    return done.synchronize


class HostPart(LocalPart):
    """The local part of a bucket on the host: masters, a copy of the gradients, rounded weights."""

    def __init__(self, bucket: Bucket) -> None:
        self.summed, self.device, size = bucket.own, bucket.device, len(bucket.own)
        self.masters = host_empty(size, bucket.dtype, self.device).zero_()
        self.gradients = host_empty(size, bucket.dtype, self.device).zero_()
        self.rounded = self.masters  # copied to the device
        if bucket.weight_dtype != bucket.dtype:
            self.rounded = host_empty(size, bucket.weight_dtype, self.device).zero_()
        if bucket.weights is not None:
            self.masters.copy_(bucket.weights[bucket.part])
            self.round()

    def zeros(self) -> Tensor:
        return host_empty(len(self.masters), self.masters.dtype, self.device).zero_()

    def start(self) -> Callable[[], object]:
        """Start to copy the summed gradients to the host."""
        return start_to_host(self.summed, self.gradients)

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters after an update. Nothing reads `rounded` then: the gradients of the
        update came after a backward, and the backward after the last copy to the device."""
        if self.rounded is not self.masters:
            self.rounded.copy_(self.masters)

    def write(self, own: Tensor) -> None:
        own.copy_(self.rounded, non_blocking=True)


class Kept:
    """A storage that autograd saves, on the host. All its views share one copy each way."""

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
            streams.back.wait_stream(streams.out)  # the copy to the host
            self.fetched = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self.fetched.copy_(self.host, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device, for the current stream; it stays until autograd drops it."""
        self.start()
        assert self.fetched is not None
        if self.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.arrived)
            self.fetched.record_stream(current)
        return self.fetched.untyped_storage()


class Offloaded(NamedTuple):
    """Stands in for a tensor that autograd saves: a view of a storage on the host."""

    kept: Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.kept.device)
        return empty.set_(self.kept.storage(), self.offset, self.shape, self.stride)


class Trip:
    """Tensors that one call of a layer saves for its backward, on the host.

    Parameters, buffers and small tensors stay where they are. So do integer tensors such as masks,
    which layers share.
    """

    def __init__(self, module: nn.Module, before: Trip | None) -> None:
        """before: the Trip of the layer whose backward comes next."""
        self.before = before
        own = [*module.parameters(), *module.buffers()]
        self.stays = {each.untyped_storage().data_ptr() for each in own}
        self.alive = WeakSet[Kept]()
        self.seen: WeakIdKeyDictionary | None = WeakIdKeyDictionary()
        """{storage: its copies, as {version of the tensor: Kept}}."""

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
        """The forward has ended: from now on only autograd holds the saved tensors."""
        self.seen = None

    def start(self) -> None:
        """Start to fetch all that the backward needs."""
        for each in list(self.alive):
            each.start()


class Plain(NamedTuple):
    """A tensor that autograd saves as it is, with its version. Autograd itself does not check
    whether a tensor that hooks pack was written to."""

    tensor: Tensor
    version: int


def saving(
    by_name: Callable[[Tensor], Any] | None,
    to_host: Callable[[Tensor], Any] | None,
    unpack: Callable[[Any], Tensor],
) -> AbstractContextManager[object]:
    """Saved-tensor hooks. by_name, to_host: return a substitute for a tensor, or the tensor itself
    if they do not handle it. `unpack` restores the tensor from its substitute.

    torch calls only the innermost saved-tensor hooks. These pass every tensor that is not a weight
    on to the outer ones, such as those of a checkpoint that a model has around a layer.
    """
    if by_name is None and to_host is None:
        return nullcontext()
    # Private, because torch has no public function for it (2.11 to 2.13).
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
