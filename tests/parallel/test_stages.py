"""Pipelines of stages of one's own, beside the same stages called one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import api
from megatron.api import GradientBuckets, Mesh, PipelineModel, PipelineStage, run_pipeline, tie
from megatron.parallel.bucket import sum_by
from megatron.parallel.collectives import all_reduce
from megatron.train.evaluate import mean_losses
from tests import plain
from tests.dist import Pool
from tests.refusals import refusal
from tests.tiny import whole_gradients, whole_slices, whole_weights, wide
from tools.layouts.layout import Layout, parse_layout
from tools.layouts.meters import counting

WORDS, WIDTH, MICRO_BATCHES, STEPS, CLIP = 11, 6, 6, 2, 0.1


@dataclass(frozen=True, kw_only=True)
class Sentences(api.Batch):
    per_token: ClassVar = ("tokens", "counted")
    tokens: Any  # int64 [b, s]
    counted: Any  # float64 [b, s]


def micro_batch(number: int, step: int = 0) -> Sentences:
    """Two samples; each has another length and another mask."""
    random = np.random.default_rng([step, number])
    tokens = random.integers(WORDS, size=(2, 2 + 2 * (number % 3)))
    return Sentences(tokens=tokens, counted=random.integers(2, size=tokens.shape).astype(float))


class Block(nn.Module):
    """x [n, width] to the same, between our layers."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = api.ColumnParallelLinear(mesh, WIDTH, 4 * WIDTH)
        self.down = api.RowParallelLinear(mesh, 4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(PipelineStage):
    """Returns x [n, width], column by column in memory, tokens [n], a mask without a gradient, and
    what nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x = self.embedding(batch.tokens.flatten()) * self.scale.sum()
        return x.T.contiguous().T, batch.tokens.flatten(), batch.counted.flatten(), x.sum()


class Widen(PipelineStage):
    """Its first output is transposed, and so is the gradient of that."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.block, self.wider = Block(mesh), nn.Linear(WIDTH, 9)

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x, tokens, counted, _ = inputs
        return self.wider(self.block(x)).T, x * counted[:, None].to(x.dtype), tokens


class Narrow(PipelineStage):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.block, self.narrower = Block(mesh), nn.Linear(9, WIDTH)
        self.look_up = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.ModuleDict({"gain": nn.Linear(3, 1, bias=False)})

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x, side, tokens = inputs
        x = self.block(self.narrower(x.T.tanh())) + side + self.look_up(tokens)
        return self.inner["gain"](x.view(-1, 3)).view(-1, WIDTH // 3).repeat(1, 3)


class Head(PipelineStage):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(3))
        self.logits = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x = self.two(self.one(*inputs).tanh()) * self.scale.sum()
        return self.logits(x), x


TIES = [
    tie("block", "1.block", "2.block"),
    tie("word", "3.logits.weight", "0.embedding.weight", "2.look_up.weight"),
    tie("again", "3.one", "3.two"),
    tie("scale", "0.scale", "3.scale"),
]


def makers(mesh: Mesh) -> Sequence[Callable[[], nn.Module]]:
    return [Words, lambda: Widen(mesh), lambda: Narrow(mesh), Head]


def loss(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    logits, x = outputs
    losses = F.cross_entropy(logits, batch.tokens.flatten(), reduction="none") + x.square().mean(-1)
    return (losses * batch.counted.flatten()).sum()


def counted(batch: Any) -> float:
    return float(batch.counted.sum())


class Found(NamedTuple):
    """losses and norms: of every step. Tensors are whole."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step
    after: dict[str, Tensor]
    flops: int = 0  # of this rank's matmuls in the last step; in the first one stages run on meta


def layout_of(name: str) -> Layout:
    """Also of virtual stages on one rank, which no command has."""
    return Layout(virtual=4) if name == "virtual=4" else parse_layout(name)


def build(name: str = "serial", **changes: Any) -> PipelineModel:
    """name: of a layout, as all that are given here."""
    layout = layout_of(name)
    mesh = layout.mesh(torch.device("cpu"))
    settings = {"ties": TIES, "virtual": layout.virtual, "schedule": layout.schedule}
    stages = changes.pop("makers", makers)(mesh)
    with wide():
        return PipelineModel(mesh, stages, loss, counted, seed=1, **settings | changes)


def train(name: str, steps: range = range(STEPS), folder: Path | None = None) -> Found:
    """With a folder it resumes from what is saved there, and saves the end there."""
    model, zero = build(name), layout_of(name).zero
    mesh = model.mesh
    optimizer: Any = None
    if zero:
        gradients = GradientBuckets.for_master_weights(model, 2048, zero_stage=zero)
        # As AdamW's defaults.
        config = api.OptimizerConfig(weight_decay=0.01, decay_biases_and_norms=True, lr=0.01)
        optimizer = api.MasterWeights(gradients, config)
        update = partial(optimizer.step, 0.01)
    else:
        gradients = GradientBuckets(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        update = optimizer.step
    if folder is not None and (saved := api.newest_checkpoint(folder, mesh)):
        api.load_checkpoint(saved, api.model_slices(model), mesh=mesh)
        api.load_optimizer(saved, model, optimizer)
    losses, norms, of_first = [], [], dict[str, Tensor]()
    ties = [axis for bucket in gradients.tied for axis in bucket.axes]
    for step in steps:
        with counting(mesh, ties) as counts:
            losses.append(float(run_pipeline(model, gradients, own_batches(mesh, step))))
        of_first = of_first or whole_gradients(gradients)
        norms.append(float(api.clip_grad_norm(gradients, CLIP)))
        update()
    if folder is not None:
        slices = [*api.model_slices(model), *api.optimizer_slices(model, optimizer)]
        api.save_checkpoint(folder, steps.stop, slices, {}, mesh)
    after = whole_slices(optimizer.masters()) if zero else whole_weights(model)
    return Found(losses, norms, of_first, after, counts.matmul_flops)


def own_batches(mesh: Mesh, step: int) -> list[Sentences]:
    numbers = range(mesh.rank("batch"), MICRO_BATCHES, mesh.size("batch"))
    return [micro_batch(number, step) for number in numbers]


def plain_run(weights: dict[str, Tensor]) -> Found:
    """The stages in one process, tied by hand, with autograd and torch's clipping."""
    with wide():
        words, widen, narrow, head = (make() for make in makers(api.serial_mesh()))
    narrow.block, head.two, head.scale = widen.block, head.one, words.scale
    narrow.look_up.weight = head.logits.weight = words.embedding.weight
    model, tied = nn.Module(), nn.Module()
    tied.block, tied.again = widen.block, head.one
    tied.word, tied.scale = words.embedding.weight, words.scale
    model.tied, model.stages = tied, nn.ModuleList([words, widen, narrow, head])
    named = dict(model.named_parameters())  # a shared one by its first name
    for name, parameter in named.items():
        parameter.data.copy_(weights[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms, of_first = [], [], dict[str, Tensor]()
    for step in range(STEPS):
        batches = [micro_batch(number, step) for number in range(MICRO_BATCHES)]
        total = torch.zeros((), dtype=torch.float64)
        for each in batches:
            tokens, mask = torch.from_numpy(each.tokens), torch.from_numpy(each.counted)
            batch: Any = Sentences(tokens=tokens, counted=mask)
            x = widen(batch, *words(batch))
            total = total + loss(head(batch, narrow(batch, *x)), batch)
        total = total / sum(map(counted, batches))
        if step == 0:
            found = torch.autograd.grad(total, [*named.values()], retain_graph=True)
            of_first = dict(zip(named, found, strict=True))
        norms.append(float(plain.update(optimizer, total, CLIP)))
        losses.append(total.item())
    after = {name: each.detach() for name, each in named.items()}
    return Found(losses, norms, of_first, after)


def joined(ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of all stages; those that several ranks have are equal on them."""
    table: dict[str, Tensor] = {}
    for own in ranks:
        for name, value in own.items():
            assert torch.equal(table.setdefault(name, value), value), name
    return table


def assert_equal(
    ranks: Sequence[Found], expected: Found, steps: slice = slice(None), *, of_first: bool = True
) -> None:
    """of_first: whether the first of the steps is that of `expected`, with its gradients."""
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    for found in ranks:
        assert found[:2] == ranks[0][:2]
        close(torch.tensor(found.losses), torch.tensor(expected.losses[steps]))
        close(torch.tensor(found.norms), torch.tensor(expected.norms[steps]))
    pairs = [(joined([each.after for each in ranks]), expected.after)]
    pairs += [(joined([each.gradients for each in ranks]), expected.gradients)] * of_first
    for own, wanted in pairs:
        close(own, wanted)


LAYOUTS = [
    "serial",
    "virtual=4",
    "pipeline=2",
    "pipeline=2,virtual=2",
    "pipeline=2,schedule=gpipe",
    "pipeline=4,schedule=zb-h1",
    "tensor=2,pipeline=2,virtual=2",
    "context=2",
    "data=2,pipeline=2,virtual=2,zero=1",
    "data=2,schedule=zb-h1,zero=2",
    "tensor=2,data=2,zero=3",
]


def on_ranks(gloo: Pool, function: Callable[..., Any], name: str, *arguments: Any) -> list[Any]:
    return gloo.run(layout_of(name).ranks, function, name, *arguments)


@pytest.fixture(scope="module")
def expected() -> Found:
    return plain_run(whole_weights(build()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_numbers_of_one_process_and_divides_the_work(
    name: str, expected: Found, gloo: Pool
) -> None:
    ranks = on_ranks(gloo, train, name)
    assert_equal(ranks, expected)
    # The tensor axis divides two blocks of two matrices, which a step multiplies thrice.
    tokens = sum(micro_batch(number).tokens.size for number in range(MICRO_BATCHES))
    of_blocks = 2 * 2 * 3 * 2 * tokens * WIDTH * 4 * WIDTH
    tensor = layout_of(name).size("tensor")
    whole = tensor * train("serial").flops - (tensor - 1) * of_blocks
    assert sum(each.flops for each in ranks) == whole


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("pipeline=2,virtual=2", "tensor=2,pipeline=2"), ("pipeline=2", "serial")],
)
def test_a_checkpoint_goes_on_at_another_layout(
    saved: str, resumed: str, expected: Found, gloo: Pool, tmp_path: Path
) -> None:
    on_ranks(gloo, train, saved, range(1), tmp_path)
    ranks = on_ranks(gloo, train, resumed, range(1, STEPS), tmp_path)
    assert_equal(ranks, expected, slice(1, None), of_first=False)


def in_halves(is_halved: bool) -> dict[str, Tensor]:
    """Gradients; several stages of a rank run the halves of their backwards apart, or not."""
    model = build("data=2", virtual=4)
    batches = own_batches(model.mesh, 0)
    if is_halved:
        halves = {"forward": ("forward",), "backward": ("backward_input", "backward_weight")}
        (actions,) = model.pipeline.lists(len(batches))
        own = [x._replace(direction=way) for x in actions for way in halves[x.direction]]
        model.pipeline = replace(model.pipeline, custom_schedule=(tuple(own),))
    gradients = GradientBuckets(model)
    for bucket in gradients.buckets:  # by a sum that is over at once: what comes later is missing
        bucket.custom_sum = sum_by(all_reduce)
    run_pipeline(model, gradients, batches)
    return whole_gradients(gradients)


def test_halves_of_several_stages_add_up_before_ranks_do(gloo: Pool) -> None:
    whole, halved = (gloo.run(2, in_halves, each) for each in (False, True))
    torch.testing.assert_close(halved, whole)


def evaluate(name: str) -> float:
    model = build(name)
    data: Any = SimpleNamespace(samples_per_epoch=100, batch=lambda numbers: micro_batch(*numbers))
    (mean,) = mean_losses(model, model, data, 5, 1, model.mesh, model.pipeline).values()
    return mean


def test_evaluation_is_the_same_at_every_layout(gloo: Pool) -> None:
    one = evaluate("serial")
    for name in ("pipeline=2", "pipeline=2,virtual=2"):
        assert on_ranks(gloo, evaluate, name) == pytest.approx([one] * 2, rel=1e-12)


def in_bf16(name: str) -> tuple[list[torch.dtype], float]:
    """By model.to() after it is built."""
    model = build(name).to(torch.bfloat16)
    batches = [
        Sentences(tokens=each.tokens, counted=each.counted.astype(np.float32))
        for each in own_batches(model.mesh, 0)
    ]
    loss = run_pipeline(model, GradientBuckets(model), batches)
    return [p.grad.dtype for p in model.parameters() if p.grad is not None], float(loss)


def test_a_model_in_bf16_passes_bf16(gloo: Pool) -> None:
    _, one = in_bf16("serial")
    for dtypes, loss in on_ranks(gloo, in_bf16, "pipeline=2"):
        assert set(dtypes) == {torch.bfloat16}
        assert loss == pytest.approx(one, rel=1e-6)


class Add(PipelineStage):
    """Has no parameter."""

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x, *_ = inputs
        return x + x.tanh()


class Sum(PipelineStage):
    """Does not use `spare`, whose weight is that of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.spare = (nn.Linear(WIDTH, WORDS) for _ in range(2))

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        return self.logits(*inputs), *inputs


def train_around_an_empty_stage(name: str) -> tuple[float, float, list[str]]:
    """(loss, norm, parameters of the last stage that are named on standard error)."""
    ties = [tie("spare", "0.embedding.weight", "2.spare.weight")]
    model = build(name, makers=lambda mesh: [Words, Add, Sum], ties=ties)
    gradients, printed = GradientBuckets(model), StringIO()
    with redirect_stderr(printed):
        for _ in range(2):
            loss = run_pipeline(model, gradients, [micro_batch(0), micro_batch(1)])
    named = re.findall(r"stages\.\w+\.\w+\.\w+", printed.getvalue())
    return float(loss), float(api.clip_grad_norm(gradients, CLIP)), named


def test_a_stage_without_parameters(gloo: Pool) -> None:
    *one, named = train_around_an_empty_stage("serial")
    assert named == ["stages.2.spare.bias"]
    for rank, found in enumerate(on_ranks(gloo, train_around_an_empty_stage, "pipeline=3")):
        assert found[:2] == pytest.approx(one, rel=1e-12)
        assert found[2] == named * (rank == 0)


class Counts(PipelineStage):
    """Its result has as many rows as the batch counts: no function of shapes."""

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        return inputs[0][batch.counted.flatten() > 0]


class Grows(PipelineStage):
    """Returns another width on a device than on meta."""

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x, *_ = inputs
        return x if x.is_meta else x.repeat(1, 2)


BLOCK = tie("a", "1.block", "2.block")
BAD_TIES = {
    "no such attribute": [tie("a", "0.embedding", "1.no_such")],
    "no such stage": [tie("a", "0.embedding", "4.look_up")],
    "no module": [tie("a", "0.embedding", "2.training")],
    "another shape": [tie("a", "0.embedding", "2.narrower")],
    "another shape on one stage": [tie("a", "3.one", "3.logits")],
    "twice the same name": [tie("a", "3.one", "3.two"), BLOCK],
    "within another tie": [BLOCK, tie("b", "1.block.norm", "2.block.norm")],
}
BAD: dict[str, dict[str, Any]] = {
    "fewer stages than ranks": {"makers": lambda mesh: [Words], "ties": []},
    "more virtual stages than stages": {"virtual": 3},
    "stages that do not divide": {"makers": lambda mesh: [*makers(mesh), Head], "virtual": 2},
    "no schedule": {"schedule": "2f2b"},
    "a schedule of virtual stages": {"schedule": "interleaved"},
    "a schedule of plain stages": {"virtual": 2, "schedule": "zb-h1"},
    "parts of gradients": {"zero": 2},
    "rows that the data decide": {"makers": lambda mesh: [Words, Counts, Add, Sum], "ties": []},
    **{f"tie: {name}": {"ties": ties} for name, ties in BAD_TIES.items()},
}


def run_one(zero: int = 0, **changes: Any) -> None:
    model = build("pipeline=2", **changes)
    gradients = GradientBuckets(model)
    if zero:
        gradients = GradientBuckets.for_master_weights(model, zero_stage=zero)
    run_pipeline(model, gradients, [micro_batch(0)])


def refusals() -> dict[str, str]:
    return {n: str(refusal(partial(run_one, **each), lines=1)) for n, each in BAD.items()}


def test_bad_input_is_one_line_on_every_rank(gloo: Pool) -> None:
    one, other = gloo.run(2, refusals)
    assert one == other
    assert "stage 1, Counts" in one["rows that the data decide"]
    assert "virtual=2" in one["stages that do not divide"]


def test_the_copies_of_the_first_stage_come_first() -> None:
    assert tie("word", "10.head", "9.head", "0.words").members == ("0.words", "9.head", "10.head")


def test_inputs_of_stages_are_those_of_the_dtypes_of_a_batch() -> None:
    model, batch = build(), micro_batch(0)
    for dtype in (np.float64, np.float32):
        counted = batch.counted.astype(dtype)
        _, _, mask, _ = model.stream(batch.with_arrays(counted=counted), 1)
        assert mask.dtype == torch.from_numpy(counted).dtype


def test_a_tie_of_no_places_is_refused() -> None:
    for words in ("a.b 0.x 1.x", "training 0.x 1.x", "a 0.x", "a x 1.x"):
        assert isinstance(refusal(partial(tie, *words.split())), ValueError)


def run_what_grows() -> None:
    run_one(makers=lambda mesh: [Words, Grows, Add, Sum], ties=[])


def test_a_stage_that_returns_something_else_than_on_meta_is_named(gloo: Pool) -> None:
    with pytest.raises(RuntimeError) as error:
        gloo.run(2, run_what_grows)
    assert "stage 1" in str(error.value)
