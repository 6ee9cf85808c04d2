"""The executor of pipeline schedules: the only caller of a model in training and in evaluation.

A schedule is a list of actions for each rank (parallel/schedules.py). An action is the forward or
the backward of a micro-batch through a virtual stage, which is a range of the model's layers.
Training without a pipeline is the list F0 B0 F1 B1 of one stage.

    a rank's program:   F0  F1  receive d0  B0  send dx0  F2  ..

Every rank reads the whole batch, so it knows the shapes of the tensors that it receives, and masks
and labels need no messages. A stage sends the hidden states, or a tuple of tensors, to the next
one; tensors of a floating dtype have a gradient, which goes back the same way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.data.batch import Batch
from megatron.parallel.bucket import gathered
from megatron.parallel.buckets import Deferred, GradientBuckets
from megatron.parallel.collectives import all_reduce, start_receive, start_send
from megatron.parallel.cross_entropy import from_one
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.pipeline import UNCUT, PipelinePlan
from megatron.parallel.schedules import Action, Message, Program
from megatron.parallel.stages import PipelineModel, as_tuple
from megatron.train.objectives import Objective

AnyBatch = TypeVar("AnyBatch", bound=Batch)
Tensors = tuple[Tensor, ...]
SENDS = 2  # most messages to one rank that are in flight, and in memory, at a time


@dataclass(kw_only=True)
class Executor:
    """Runs the programs of one rank.

    batches: one per micro-batch. loss_scales: fp64 [k]. gradients: buckets to add to; None in an
    evaluation. before: called before each action. seen: gets the last layer's output, by number.
    """

    model: Any
    objective: Objective
    mesh: Mesh
    pipeline: PipelinePlan = UNCUT
    batches: Sequence[Batch]
    loss_scales: Tensor
    gradients: GradientBuckets | None = None
    before: Callable[[Action], object] = lambda action: None
    seen: dict[int, Tensor] | None = None

    def run(self, program: Program) -> Tensor:
        """Returns this rank's sum of each term, fp64 [k]; 0 except on the last pipeline stage."""
        self.totals = torch.zeros_like(self.loss_scales)
        self.messages = Messages(self.mesh.pipeline)
        self.in_flight: dict[tuple[int, int], tuple[Tensors, list[Any]]] = {}
        self.deferred: dict[tuple[int, int], list[Deferred]] = {}
        last = {each.stage: each for each in program if isinstance(each, Action)}
        with gathered(self.model):
            for event in program:
                if isinstance(event, Message):
                    self.pass_on(event)
                    continue
                self.before(event)
                if event.direction == "forward":
                    self.forward(event.stage, event.micro_batch)
                else:
                    self.backward(event, is_last=event is last[event.stage])
        self.messages.close()
        return self.totals

    def forward(self, stage: int, number: int) -> None:
        inputs: Tensors = self.messages.take("forward", stage, number) if stage else ()
        if self.gradients is not None:
            inputs = tuple(each.detach().requires_grad_(has_gradient(each)) for each in inputs)
        batch = on_device(self.batches[number], self.mesh.device)
        roots: list[Any]
        if stage < self.pipeline.stages - 1:
            outputs = as_tuple(self.run_layers(stage, inputs, batch))
            self.messages.put("forward", stage + 1, number, (each.detach() for each in outputs))
            # Edges of the graph, not the outputs, whose memory is free once they are sent.
            roots = [edge_of(each) for each in outputs if has_gradient(each)]
        else:
            x = self.run_layers(stage, inputs, batch)
            if self.seen is not None:
                self.seen[number] = x.detach()
            sums = self.run_loss(x, batch)
            self.totals += sums.detach() / self.loss_scales.to(sums.dtype)
            roots = [from_one(sums.sum())]
        if self.gradients is not None:
            self.in_flight[stage, number] = inputs, roots

    def run_layers(self, stage: int, inputs: Tensors, batch: Batch) -> Any:
        """The output of a stage's layers. inputs: the output of the previous stage."""
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        if stage == 0:
            x = self.model.embed(batch)
        if self.pipeline.stages == 1:
            return self.model.layers(x, batch)
        return self.model.layers(x, batch, numbers=self.pipeline.layers[stage])

    def run_loss(self, x: Any, batch: Batch) -> Tensor:
        """The sum of each term over a batch x its loss scale, [k]."""
        return self.objective.loss(x, batch, self.loss_scales)

    def backward(self, action: Action, *, is_last: bool) -> None:
        """is_last: the last backward of this stage; its buckets are reduced while it runs."""
        assert self.gradients is not None, "an evaluation has no backward"
        direction, stage, number = action
        part = stage if self.pipeline.virtual > 1 else None
        if direction == "backward_weight":
            deferred = self.deferred.pop((stage, number))
            self.gradients.add_deferred(deferred, is_last=is_last, stage=part)
            return
        inputs, roots = self.in_flight.pop((stage, number))
        given: Sequence[Tensor | None] = (None,)
        if stage < self.pipeline.stages - 1:
            given = self.messages.take("backward", stage, number)
        pairs = [pair for pair in zip(roots, given, strict=True) if pair[0] is not None]
        is_half = direction == "backward_input"
        with self.gradients.backward(is_last=is_last, stage=part, is_deferred=is_half) as deferred:
            torch.autograd.backward([root for root, _ in pairs], [each for _, each in pairs])
        if is_half:
            self.deferred[stage, number] = deferred
        if stage > 0:
            own = (each for each in inputs if has_gradient(each))
            found = (torch.zeros_like(x) if x.grad is None else x.grad for x in own)
            self.messages.put("backward", stage - 1, number, found)

    def pass_on(self, message: Message) -> None:
        direction, stage, number = message[:3]
        if message.sender == self.mesh.pipeline.rank:
            self.messages.send(message)
            return
        # The gradient of a stage's output has the shapes and dtypes of the next stage's input.
        entered = stage if direction == "forward" else stage + 1
        first = self.pipeline.layers[entered].start
        like = as_tuple(self.model.stream(self.batches[number], first))
        if direction == "backward":
            like = tuple(each for each in like if has_gradient(each))
        self.messages.receive(message, like, self.mesh.device)


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
        if key in self.ready:
            return self.ready.pop(key)
        return wait_for(self.coming.pop(key))

    def send(self, message: Message) -> None:
        sending, receiver = self.sending[message.receiver], message.receiver
        while len(sending) >= SENDS:
            wait_for(sending.popleft())
        what, tensors = describe(message), self.ready.pop(message[:3])
        sending.append([start_send(each, self.axis, receiver, what) for each in tensors])

    def receive(self, message: Message, like: Tensors, device: torch.device) -> None:
        """like: meta tensors with the shapes and dtypes to receive; their strides do not matter."""
        what, sender = describe(message), message.sender
        buffers = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in like]
        waits = [start_receive(each, self.axis, sender, what) for each in buffers]
        self.coming[message[:3]] = waits

    def close(self) -> None:
        for sending in self.sending.values():
            while sending:
                wait_for(sending.popleft())


def wait_for(waits: Iterable[Callable[[], Tensor]]) -> Tensors:
    return tuple(wait() for wait in waits)


def describe(message: Message) -> str:
    """The message in words, for the failure watch."""
    what = "the input" if message.direction == "forward" else "the gradient"
    return f"{what} of stage {message.stage}, micro-batch {message.micro_batch}"


def has_gradient(x: Tensor) -> bool:
    return x.is_floating_point()


def edge_of(x: Tensor) -> GradientEdge | None:
    return get_gradient_edge(x) if x.requires_grad else None


def run_pipeline(
    model: PipelineModel, gradients: GradientBuckets, micro_batches: Sequence[Batch]
) -> Tensor:
    """Forward and backward of a global batch through the stages of a user's model (every rank calls
    this). Then each parameter has its `.grad`, for an optimizer of torch and for `clip_grad_norm`.

    gradients: the model's. micro_batches: this rank's along the mesh's batch axis, with arrays as
    fields; the ranks of one model have the same. Returns the mean of the loss over the global
    batch, an fp64 scalar, the same on every rank; NaN if the denominators are 0. Raises ValueError,
    before any message is sent, if the schedule does not have this number of micro-batches or a
    stage does not run on meta.
    """
    mesh, pipeline = model.mesh, model.pipeline
    program = pipeline.program(mesh.pipeline.rank, len(micro_batches))
    for each in micro_batches if pipeline.ranks > 1 else ():
        model.stream(each, model.count - 1)
    own = [model.denominators(each) for each in micro_batches]
    counts = torch.tensor(own, dtype=torch.float64).sum(0).to(mesh.device)
    counts = all_reduce(counts, mesh.loss)
    executor = Executor(
        model=model,
        objective=model,
        mesh=mesh,
        pipeline=pipeline,
        batches=micro_batches,
        loss_scales=1 / counts.where(counts > 0, 1),
        gradients=gradients,
    )
    gradients.start()
    totals = executor.run(program)
    gradients.finish()
    return (all_reduce(totals, mesh.loss_sums) / counts).sum()


def on_device(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """A copy of the batch with its arrays as tensors on the device; tensors stay as they are."""
    moved = copy(batch)  # dataclasses.replace would derive fields again, from tensors
    for each in fields(batch):
        array = getattr(batch, each.name)
        if array is not None and not isinstance(array, Tensor):
            object.__setattr__(moved, each.name, to_device(device, array)[0])
    return moved


def to_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Copies on the device; to a GPU from pinned memory, so that the host does not wait."""
    tensors = map(torch.from_numpy, arrays)
    if device.type == "cuda":
        return [each.pin_memory().to(device, non_blocking=True) for each in tensors]
    return [each.to(device) for each in tensors]
