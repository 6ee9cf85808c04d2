"""The events of a rank, written by a callback of the training: a line of JSON for each.

Each rank appends lines to rank_R.jsonl in the folder that the variable CHAOS_EVENTS names:

    {"time": 812.5, "pid": 4711, "event": "step", "step": 7}

time: of time.monotonic(), the one clock of all processes of a Linux host. event: "start" (here
when the callbacks are made: imports, process groups and data are before it), "loaded" (the model is
built and the checkpoint read; step is the one of the checkpoint), "step" (it is done),
"evaluation" and "save" (with "at", "begin" or "end"), "end" (after the last step). Another trainer
that writes the same lines gets the same account. Without the variable nothing is written.

request_R.json in that folder asks a rank for a fault that only its process can make; the answer is
an event "fault" with its number, "what" was done or why it was "refused", and the "key" of a weight
that was flipped.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.api import Callback
from tools.chaos.supervise import FOLDER

if TYPE_CHECKING:
    from megatron.data.batch import Batch
    from megatron.train.step import StepResult


class Probe(Callback):
    """Writes the events of this rank, and does what a request asks for after its next step."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        folder, rank = os.environ.get(FOLDER), os.environ.get("RANK", "0")
        self._file = self._request = None
        if folder is not None:
            self._request = Path(folder, f"request_{rank}.json")
            self._file = os.open(
                Path(folder, f"rank_{rank}.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
            )
        self._note("start")

    def _note(self, event: str, **facts: Any) -> None:
        if self._file is not None:
            line = {"time": time.monotonic(), "pid": os.getpid(), "event": event, **facts}
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def _note_step(self, event: str, **facts: Any) -> None:
        self._note(event, step=self.training.state.step, **facts)

    def pre_train(self) -> None:
        self._note_step("loaded")

    def log_metrics(self, line: Mapping[str, Any]) -> None:
        if "start_seconds" in line:
            self._note("started", seconds=line["start_seconds"])

    def pre_step(self, batches: Sequence[Batch]) -> None:
        if self._request is None or not self._request.exists():
            return
        request = json.loads(self._request.read_text())
        if request["kind"] == "drop":
            self._request.unlink()
            self._note_step("fault", number=request["number"], **drop())

    def post_step(self, result: StepResult) -> None:
        self._note_step("step")
        if self._request is None or not self._request.exists():
            return
        request = json.loads(self._request.read_text())
        if request["kind"] == "flip_weight":
            self._request.unlink()
            facts = flip(self.training.state, request["seed"])
            self._note_step("fault", number=request["number"], **facts)

    def pre_evaluation(self) -> None:
        self._note_step("evaluation", at="begin")

    def post_evaluation(self, loss: float | None) -> None:
        self._note_step("evaluation", at="end")

    def pre_save(self) -> None:
        self._note_step("save", at="begin")

    def post_save(self) -> None:
        self._note_step("save", at="end")

    def post_train(self, end: str) -> None:
        self._note_step("end")


def flip(state: Any, seed: int) -> dict[str, Any]:
    """Flips a bit of a weight that another rank holds, too; "refused" says if there is none."""
    import torch

    mesh, draw = state.mesh, random.Random(seed)
    shared = [
        each
        for each in state.slices()
        if each.key.startswith("model.")
        and each.local.numel()
        and any(axis.size > 1 for axis in each.spec.copied_over(*mesh.axes))
    ]
    if not shared:
        return {"refused": "no weight of this rank has a replica: no check can find a flipped bit"}
    chosen = draw.choice(shared)
    place = tuple(draw.randrange(size) for size in chosen.local.shape)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[chosen.local.element_size()]
    bit = draw.randrange(8 * chosen.local.element_size() - 1)
    with torch.no_grad():
        chosen.local.data[place].view(words).bitwise_xor_(1 << bit)
    return {"what": f"bit {bit} of {chosen.key}{[*place]}", "key": chosen.key}


def drop() -> dict[str, Any]:
    """Shuts down the TCP connections of this process to other ranks, without that to the store."""
    port, count = int(os.environ.get("MASTER_PORT", "0")), 0
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_socket():
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not is_tcp or connection.type != socket.SOCK_STREAM:
                continue
            if port not in (connection.getpeername()[1], connection.getsockname()[1]):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    if not count:
        return {"refused": "this rank has no connection to another one"}
    return {"what": f"{count} connections shut down"}
