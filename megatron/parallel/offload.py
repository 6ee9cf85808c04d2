"""Offload: tensors that live on the host between uses, and are copied to the device and back.

    optimizer      local gradients -> host | AdamW of one bucket, copies of the others | -> weights
    activations    forward of layer n | copies of layer n - 1        backward: the reverse

On CUDA, host memory is pinned, and copies run on their own streams while kernels run. On a CPU,
host and device are the same: the copies are still made, but free nothing. ZeRO 3 with offload has
trained on one GPU; neither time nor memory is measured there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from megatron.parallel.bucket import Bucket, LocalShard, nothing

HOST = torch.device("cpu")
SMALLEST = 4096  # bytes; a smaller storage is not worth a copy

on_host: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tensors that `host_empty` made, as keys. A count of the device's bytes leaves them out."""


def host_empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [size] on the host, pinned if `device`, to which it is copied, is a GPU."""
    made = torch.empty(size, dtype=dtype, device=HOST, pin_memory=device.type == "cuda")
    on_host[made] = True
    return made


@cache
def _stream(device: torch.device, direction: str) -> Any:
    """The CUDA stream of copies "to host" or "to device"."""
    return torch.cuda.Stream(device)


def start_to_host(source: Tensor, host: Tensor) -> Callable[[], object]:
    """Start a copy of `source` to `host`, after the kernels that are already queued. Returns a
    function that blocks the host until the copy is done."""
    if source.device.type != "cuda":
        host.copy_(source)
        return nothing
    stream = _stream(source.device, "to host")
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        host.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    source.record_stream(stream)  # its memory is not reused before the copy ends
    return done.synchronize


class HostShard(LocalShard):
    """The local part of a bucket on the host: masters, a copy of the gradients, rounded weights."""

    def __init__(self, bucket: Bucket) -> None:
        assert bucket.weights is not None
        self.device_gradients = bucket.own_gradients
        self.device = bucket.device
        self.masters = host_empty(len(self.device_gradients), bucket.dtype, self.device)
        self.masters.copy_(bucket.weights[bucket.part])
        self.gradients = self.zeros()
        self.rounded = self.masters  # copied to the device
        if bucket.weight_dtype != bucket.dtype:
            self.rounded = host_empty(len(self.masters), bucket.weight_dtype, self.device)
            self.round()

    def zeros(self) -> Tensor:
        return host_empty(len(self.masters), self.masters.dtype, self.device).zero_()

    def start(self) -> Callable[[], object]:
        """Start to copy the summed gradients to the host."""
        return start_to_host(self.device_gradients, self.gradients)

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters after an update. Nothing reads `rounded` then: the gradients of the
        update came after a backward, and the backward after the last copy to the device."""
        if self.rounded is not self.masters:
            self.rounded.copy_(self.masters)

    def write(self, own_weights: Tensor) -> None:
        own_weights.copy_(self.rounded, non_blocking=True)


class HostCopy:
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
        if self.device.type != "cuda":
            self.fetched = self.host.clone()
            return
        stream = _stream(self.device, "to device")
        with torch.cuda.stream(stream):
            stream.wait_stream(_stream(self.device, "to host"))
            self.fetched = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self.fetched.copy_(self.host, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def fetch(
        self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int
    ) -> Tensor:
        """A view of the storage on the device, for the current stream. The storage stays until
        autograd drops this copy."""
        self.start()
        assert self.fetched is not None
        if self.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.arrived)
            self.fetched.record_stream(current)
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self.fetched.untyped_storage(), offset, shape, stride)


class LayerOffload:
    """Tensors that one call of a layer saves for its backward, on the host.

    Parameters, buffers and small tensors stay where they are. So do integer tensors such as masks,
    which layers share.
    """

    def __init__(self, module: nn.Module, previous: LayerOffload | None) -> None:
        """previous: that of the layer whose backward comes next."""
        self.previous = previous
        weights = [*module.parameters(), *module.buffers()]
        self.stays = {each.untyped_storage().data_ptr() for each in weights}
        self.alive = WeakSet[HostCopy]()
        self.by_storage: WeakIdKeyDictionary | None = WeakIdKeyDictionary()
        """{storage: its copies, as {version of the tensor: HostCopy}}."""

    def pack(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Copy a tensor to the host. Returns a function that fetches it; None if it stays."""
        storage = tensor.untyped_storage()
        if (
            not tensor.is_floating_point()
            or storage.nbytes() < SMALLEST
            or storage.data_ptr() in self.stays
            or type(tensor) not in (Tensor, nn.Parameter)
            or tensor.is_meta
        ):
            return None
        assert self.by_storage is not None
        copies = self.by_storage.setdefault(storage, {})
        if (copy := copies.get(tensor._version)) is None:
            copy = copies[tensor._version] = HostCopy(storage, tensor.device)
            self.alive.add(copy)
        offset = int(tensor.storage_offset())
        return partial(copy.fetch, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def end(self) -> None:
        """The forward has ended: from now on only autograd holds the saved tensors."""
        self.by_storage = None

    def start(self) -> None:
        """Start to fetch all that the backward needs."""
        for each in list(self.alive):
            each.start()
