"""Arrays of a batch, on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Copies that a GPU makes when it comes to them: from memory that is not pinned the host would
    wait for all that was begun before."""
    tensors = map(torch.from_numpy, arrays)
    if device.type == "cuda":
        return [each.pin_memory().to(device, non_blocking=True) for each in tensors]
    return [each.to(device) for each in tensors]
