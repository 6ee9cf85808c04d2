"""Time of a step by phase: forward, backward, p2p, reduction, optimizer.

    forward, backward    of stages; tensor-parallel collectives inside layers are part of them
    p2p                  sends, and waiting for messages of other pipeline stages
    reduction            waiting for sums of gradients that the last backward has not hidden
    optimizer            update and publication of the weights

On a GPU these are times of the device between CUDA events. They are read in a later step, when the
host has waited for that step's loss anyway.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch


class Phases:
    """The phases of one step on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []  # name, seconds or an event

    def mark(self, name: str) -> None:
        """The phase from here to the next mark; "" for none. A CUDA graph has no marks inside."""
        if not self._is_gpu:
            self._marks.append((name, time.perf_counter()))
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))

    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase; on a GPU the step must be complete."""
        found = defaultdict[str, float](float)
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[name] += start.elapsed_time(end) / 1000 if self._is_gpu else end - start
        found.pop("", None)
        return dict(found)
