"""The executor of pipeline schedules: the only caller of a model in training and in evaluation.

A rank's program (parallel/schedules.py) lists what it does in a step. An action is the forward or
the backward of a micro-batch through a virtual stage, which is a range of the model's layers:

    one stage             F0  B0  F1  B1
    first stage of two    F0  send x0  F1  send x1  receive dx0  B0  receive dx1  B1
    last stage of two     receive x0  F0  receive x1  B0  send dx0  F1  B1  send dx1

    F    the batch to the device, the embedding (in the first stage), layers, and x to the next
         stage, or the loss
    B    autograd from the stage's outputs to its inputs, whose gradients go to the stage before.
         Gradients of weights go to buckets, which are reduced, as a rule, during a stage's
         last backward.

A receive starts at its place, and the action that uses the message waits for it. Every stage reads
the whole micro-batches of its data-parallel rank, so it knows the shapes of what it receives, and
masks and labels need no messages. A message is the hidden states, or a tuple of tensors; those of a
floating dtype have a gradient, which goes back the same way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.data.batch import Batch
from megatron.parallel.bucket import Deferred, gathered
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import start_receive, start_send
from megatron.parallel.cross_entropy import one_like
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.schedules import WHOLE_MODEL, Action, Message, PipelinePlan, Program
from megatron.parallel.stages import as_tuple
from megatron.train.objectives import Objective

AnyBatch = TypeVar("AnyBatch", bound=Batch)
Tensors = tuple[Tensor, ...]
SENDS = 2  # most messages to one rank that are in flight, and in memory, at a time


@dataclass(kw_only=True)
class Executor:
    """Runs the programs of one rank.

    batches: one per micro-batch. loss_scales: fp64 [k]. gradients: buckets to add to; None in an
    evaluation. on_action: called before each action. mark: starts a phase, see
    train/phases.py. hidden_states: receives the last layer's output, by micro-batch.
    """

    model: Any
    objective: Objective
    mesh: Mesh
    pipeline: PipelinePlan = WHOLE_MODEL
    batches: Sequence[Batch]
    loss_scales: Tensor
    gradients: GradientBuckets | None = None
    on_action: Callable[[Action], object] = lambda action: None
    mark: Callable[[str], object] = str
    hidden_states: dict[int, Tensor] | None = None

    def step(self) -> Tensor:
        """Runs a training step, which fills the gradient buckets. Returns as `run` does."""
        assert self.gradients is not None, "an evaluation is no training step"
        self.gradients.start()
        totals = self.run(self.pipeline.program(self.mesh.pipeline.rank, len(self.batches)))
        self.mark("reduction")
        self.gradients.finish()
        self.mark("")
        return totals

    def run(self, program: Program) -> Tensor:
        """Returns this rank's share of each term's sum, fp64 [k]; all stages but the last add 0."""
        self.totals = torch.zeros_like(self.loss_scales)
        self.messages = Messages(self.mesh.pipeline)
        self.in_flight: dict[tuple[int, int], tuple[Tensors, list[Any]]] = {}
        self.deferred: dict[tuple[int, int], list[Deferred]] = {}
        last = {each.stage: each for each in program if isinstance(each, Action)}  # B or W
        with gathered(self.model):
            for item in program:
                self.mark("p2p")
                if isinstance(item, Action):
                    self.on_action(item)
                    if item.direction == "forward":
                        self.forward(item.stage, item.micro_batch)
                    else:
                        self.backward(item, is_last=item is last[item.stage])
                elif item.sender == self.mesh.pipeline.rank:
                    self.messages.send(item)
                else:
                    self.messages.receive(item, self.like(item), self.mesh.device)
        self.mark("p2p")
        self.messages.close()
        return self.totals

    def forward(self, stage: int, number: int) -> None:
        """number: of the micro-batch."""
        inputs: Tensors = self.messages.take("forward", stage, number) if stage else ()
        self.mark("forward")
        if self.gradients is not None:
            inputs = tuple(each.detach().requires_grad_(has_gradient(each)) for each in inputs)
        batch = on_device(self.batches[number], self.mesh.device)
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        if stage == 0:
            x = self.model.embed(batch)
        if self.pipeline.stages == 1:
            x = self.model.layers(x, batch)
        else:
            x = self.model.layers(x, batch, numbers=self.pipeline.layers[stage])
        roots: list[Any]
        if stage < self.pipeline.stages - 1:
            outputs = as_tuple(x)
            self.messages.put("forward", stage + 1, number, (each.detach() for each in outputs))
            # Edges of the graph, not the outputs, whose memory is free once they are sent.
            roots = [
                get_gradient_edge(each) if each.requires_grad else None
                for each in outputs
                if has_gradient(each)
            ]
        else:
            if self.hidden_states is not None:
                self.hidden_states[number] = x.detach()
            sums = self.objective.loss(x, batch, self.loss_scales)
            self.totals += sums.detach() / self.loss_scales.to(sums.dtype)  # without their scales
            roots = [sums.sum()]
            if sums.requires_grad:
                roots[0].register_hook(one_like)
        if self.gradients is not None:
            self.in_flight[stage, number] = inputs, roots

    def backward(self, action: Action, *, is_last: bool) -> None:
        """is_last: the last backward of this stage; its buckets are reduced while it runs."""
        assert self.gradients is not None, "an evaluation has no backward"
        direction, stage, number = action
        bucket_stage = stage if self.pipeline.virtual > 1 else None  # see GradientBuckets.stage
        self.mark("backward")
        if direction == "backward_weight":
            deferred = self.deferred.pop((stage, number))
            self.gradients.add_deferred(deferred, is_last=is_last, stage=bucket_stage)
            return
        inputs, roots = self.in_flight.pop((stage, number))
        # None for the loss: if a root has a gradient, torch imports sympy, which takes 0.4 s.
        root_gradients: Sequence[Tensor | None] = (None,)
        if stage < self.pipeline.stages - 1:
            self.mark("p2p")
            root_gradients = self.messages.take("backward", stage, number)
            self.mark("backward")
        # A root is None where its output does not require a gradient.
        pairs = [each for each in zip(roots, root_gradients, strict=True) if each[0] is not None]
        is_half = direction == "backward_input"
        with self.gradients.backward(
            is_last=is_last, stage=bucket_stage, is_deferred=is_half
        ) as deferred:
            torch.autograd.backward([root for root, _ in pairs], [each for _, each in pairs])
        if is_half:
            self.deferred[stage, number] = deferred
        if stage > 0:
            leaves = [each for each in inputs if has_gradient(each)]
            sent = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
            self.messages.put("backward", stage - 1, number, sent)

    def like(self, message: Message) -> Tensors:
        """Meta tensors with the shapes and dtypes of the message's; strides do not matter."""
        direction, stage, number = message[:3]
        # The gradient of this stage's output is like the input of the next stage.
        like_input_of = stage if direction == "forward" else stage + 1
        first_layer = self.pipeline.layers[like_input_of].start
        inputs = as_tuple(self.model.stream(self.batches[number], first_layer))
        if direction == "forward":
            return inputs
        return tuple(each for each in inputs if has_gradient(each))


class Messages:
    """Tensors that pass between virtual stages: over the pipeline axis, or on one rank."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.ready: dict[tuple[str, int, int], Tensors] = {}
        self.coming: dict[tuple[str, int, int], list[Callable[[], Tensor]]] = {}
        self.sending: dict[int, deque[list[Callable[[], Tensor]]]] = defaultdict(deque)

    def put(self, direction: str, stage: int, number: int, tensors: Iterable[Tensor]) -> None:
        """Keeps tensors for a stage of this rank, or for `send` to send to another rank."""
        self.ready[direction, stage, number] = tuple(tensors)

    def take(self, direction: str, stage: int, number: int) -> Tensors:
        """Tensors for a stage of this rank; waits for those that are still being received."""
        key = direction, stage, number
        return self.ready.pop(key) if key in self.ready else wait_for(self.coming.pop(key))

    def send(self, message: Message) -> None:
        sending, receiver = self.sending[message.receiver], message.receiver
        # gloo reports a send as complete only once it is waited for, so the oldest is waited for.
        while len(sending) >= SENDS:
            wait_for(sending.popleft())
        tensors = self.ready.pop(message[:3])
        # A wait keeps its tensor, because isend reads the memory after it has returned.
        sending.append([start_send(each, self.axis, receiver, str(message)) for each in tensors])

    def receive(self, message: Message, like: Tensors, device: torch.device) -> None:
        buffers = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in like]
        waits = [start_receive(x, self.axis, message.sender, str(message)) for x in buffers]
        self.coming[message[:3]] = waits

    def close(self) -> None:
        for sending in self.sending.values():
            while sending:
                wait_for(sending.popleft())


def wait_for(waits: Iterable[Callable[[], Tensor]]) -> Tensors:
    return tuple(wait() for wait in waits)


def has_gradient(x: Tensor) -> bool:
    return x.is_floating_point()


def on_device(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """A copy of the batch with its arrays as tensors on the device; tensors stay as they are."""
    arrays = {each.name: getattr(batch, each.name) for each in fields(batch)}
    for name, array in arrays.items():
        if array is not None and not isinstance(array, Tensor):
            arrays[name] = to_device(device, array)[0]
    return batch.with_arrays(**arrays)


def start_read(x: Tensor) -> Callable[[], list[float]]:
    """Start to copy a vector to the host. Returns a function that waits for it, and not for what
    is queued later, and returns its numbers."""
    if not x.is_cuda:
        return x.tolist
    host, done = torch.empty_like(x, device="cpu", pin_memory=True), torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    done.record()

    def read() -> list[float]:
        done.synchronize()
        return host.tolist()

    return read


def to_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Copies on the device; to a GPU from pinned memory, so that the host does not wait."""
    tensors = map(torch.from_numpy, arrays)
    if device.type == "cuda":
        return [each.pin_memory().to(device, non_blocking=True) for each in tensors]
    return [each.to(device) for each in tensors]
