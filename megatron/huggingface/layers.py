"""Classes of the modules of a model that a plan cuts: our layers under the model's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from megatron.huggingface.plan import Column, PlanError, Row, Summed, Vocabulary
from megatron.parallel.bucket import GradientView
from megatron.parallel.collectives import Cut, start_sum
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.layers import (
    DIVISIBLE_BY,
    Gathered,
    linear,
    look_up,
    look_up_own,
    multiply,
)
from megatron.parallel.layers_llama import key_value_heads_in_use
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.regions import gather_with_gradient, reduce_from, split_with_gradient
from megatron.parallel.sharding import ShardedModule, ShardingSpec, load_whole


@dataclass(frozen=True)
class WeightLayout:
    """How a parallel layer holds a whole parameter, other than the model's own code.

    parts: number of matrices stacked in it, [parts, out, in] here. is_transposed: whether the
    model's own weight is [in, out], as in transformers' Conv1D; here it is [out, in].
    """

    parts: int = 1
    is_transposed: bool = False

    def from_original(self, original: Tensor) -> Tensor:
        flat = original.T if self.is_transposed else original
        return flat if self.parts == 1 else flat.unflatten(0, (self.parts, -1))

    def to_original(self, value: Tensor) -> Tensor:
        flat = value if self.parts == 1 else value.flatten(0, 1)
        return flat.T if self.is_transposed else flat


ORIGINAL_LAYOUT = WeightLayout()
KEYS = ("k_proj", "key", "k_lin")  # names of layers that compute only keys
VOCABULARY = 32 * DIVISIBLE_BY  # from this many rows per rank on, padding is a small part


class TensorParallelInput:
    """f (section 3 of the paper), once for all column layers that read one tensor. The first
    layer returns its input to the others, so its backward runs last, has the gradients of all, and
    sums them over the ranks during the matmul for its weight's gradient. A model has one object of
    this class; its cache lives until the model's forward, or the backward of a tensor it made,
    ends."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.clear()

    def clear(self, *_: object) -> None:
        # (a tensor, its state, the result made of it)
        self.returned: tuple[Tensor, object, Tensor] | None = None  # rows [n, in]
        self.gathered: tuple[Tensor, object, Tensor] | None = None

    def _clear_after_backward(self, made: Tensor) -> None:
        """Clear the cache after the backward of `made`, and so after recomputation in it. The
        reference is weak, because this object holds the graph."""
        reference = ref(self)

        def clear(*_: object) -> None:
            if (this := reference()) is not None:
                this.clear()

        if made.grad_fn is not None:
            made.grad_fn.register_hook(clear)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, view: GradientView | None = None
    ) -> Tensor:
        """Map a whole x [.., in] to this rank's columns [n, out]; see layers.linear."""
        if self.axis.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return linear(x.flatten(0, -2), weight, bias, view=view)
        if (rows := _made_of(x, self.returned)) is not None:
            return linear(rows, weight, bias, view=view)
        if self.gathered is not None and self.gathered[2] is x:
            rows = _EnterGathered.apply(self.gathered[0], x.detach(), self.axis).flatten(0, -2)
            y = linear(rows, weight, bias, view=view)
        else:
            rows, division = x.flatten(0, -2), Gathered(x=Cut(terms=self.axis))
            y, rows = multiply(rows, [weight], [bias], [view], division, return_input=True)
        self.returned = x, _state(x), rows
        self._clear_after_backward(rows)
        return y

    def gather(self, x: Tensor) -> Tensor:
        """Gather x [b, s/t, ..]; column layers that read the result reduce-scatter its gradient."""
        if (whole := _made_of(x, self.gathered)) is None:
            whole = gather_with_gradient(x, 1, self.axis)
            self.gathered = x, _state(x), whole
            self._clear_after_backward(whole)
        return whole

    def __deepcopy__(self, memo: dict[int, object]) -> TensorParallelInput:
        memo[id(self)] = copy = TensorParallelInput(self.axis)
        return copy


def _state(x: Tensor) -> object:
    """Changes when a cached result of x gets stale: x is written to, or grad mode changes."""
    return torch.is_grad_enabled(), None if x.is_inference() else x._version


def _made_of(x: Tensor, entry: tuple[Tensor, object, Tensor] | None) -> Tensor | None:
    return entry[2] if entry is not None and entry[0] is x and entry[1] == _state(x) else None


class _EnterGathered(torch.autograd.Function):
    """f of tokens that are gathered already: the backward reduce-scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx = start_sum(dy.transpose(0, 1).contiguous(), ctx.axis, ctx.axis)()
        return dx.transpose(0, 1), None, None


def _leave(x: Tensor, axis: Axis, tokens: bool) -> Tensor:
    """The sum over ranks, whole or for this rank's tokens."""
    if not tokens:
        return reduce_from(x, axis)
    return reduce_from(x.transpose(0, 1).contiguous(), axis, axis).transpose(0, 1)


MOVES: Mapping[tuple[str, str], Callable[[Tensor, TensorParallelInput], Tensor]] = {
    ("tokens", "whole"): lambda x, tensor_input: tensor_input.gather(x),
    ("whole", "tokens"): lambda x, tensor_input: split_with_gradient(x, 1, tensor_input.axis),
    ("channels", "whole"): lambda x, tensor_input: gather_with_gradient(x, -1, tensor_input.axis),
    ("whole", "channels"): lambda x, tensor_input: split_with_gradient(x, -1, tensor_input.axis),
}


class CutParameter(Tensor):
    """Stands in for a sharded parameter in the code of a model, which may read its shape and dtype.
    Computing with it is an error, because the result would be that of a shard."""

    owner: str

    ALLOWED: ClassVar = frozenset(
        (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "is_cuda"),
            *("is_cpu", "is_sparse", "is_quantized", "is_nested", "size", "dim", "numel"),
            *("is_floating_point", "is_complex", "element_size", "__repr__"),
        )
    )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__
        if name == "__get__":  # a property
            name = function.__self__.__name__
        if name not in cls.ALLOWED:
            given = (*args, *(kwargs or {}).values())
            lists = (each if isinstance(each, list | tuple) else [each] for each in given)
            cut = (each for each in chain(*lists) if isinstance(each, cls))
            owner = next((each.owner for each in cut), "a parameter")
            raise RuntimeError(
                f"{owner} is cut, and the model computes with it outside of its module ({name}): "
                "a plan that leaves this module whole works"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class ParallelizedModule(ShardedModule):
    """The class that a module of the model gets in addition to its own.

    From outside, its parameters are those of the model, or CutParameter where computing with them
    would be wrong. `state_dict` has this rank's shards in the model's own layout.
    `load_state_dict` takes such shards, or whole parameters of the model.
    """

    full_name: str
    tensor_input: TensorParallelInput
    layouts: dict[str, WeightLayout]
    computes_itself = False
    """Whether its forward is the model's; it may read parameters whose gradients are summed."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        specs = self.__dict__.get("specs", {})
        spec = specs.get(name) if isinstance(value, nn.Parameter) else None
        if spec is None:
            return value
        axes = {*spec.shard_axes} if self.computes_itself else {*spec.shard_axes, *spec.partial}
        tensor = self.mesh.tensor
        if tensor.size == 1 or tensor not in axes:
            layout = self.layouts[name]
            return value if layout == ORIGINAL_LAYOUT else layout.to_original(value)
        cut: Any = value.as_subclass(CutParameter)
        cut._is_param = True  # for `get_parameter`
        cut.owner = f"{self.full_name}.{name}"
        return cut

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, layout in self.layouts.items():
            if layout != ORIGINAL_LAYOUT:
                destination[prefix + name] = layout.to_original(destination[prefix + name])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        shards = {}
        for name, spec in self.specs.items():
            if (value := state_dict.get(prefix + name)) is None:
                continue
            layout, shard = self.layouts[name], self.shard_of(name)
            if value.shape == layout.to_original(torch.empty(spec.shape, device="meta")).shape:
                whole = layout.from_original(value.detach())
                value = torch.empty(shard.shape, dtype=value.dtype, device=value.device)
                load_whole(value, whole, spec)
            elif value.shape == layout.to_original(shard).shape:
                value = layout.from_original(value)
            shards[prefix + name] = value  # one of another shape is an error of torch's
        super()._load_from_state_dict({**state_dict, **shards}, prefix, *others)

    def prepare(self, style: Any, parameters: ShardedParameters) -> None:
        """Cut the parameters."""
        raise NotImplementedError


@dataclass
class ShardedParameters:
    """The shards made of the model's parameters, which modules may share: {id of the parameter:
    (its name, the shard, its spec, its layout)}."""

    mesh: Mesh
    by_id: dict[int, tuple[str, nn.Parameter, ShardingSpec, WeightLayout]]

    def shard(
        self,
        module: ParallelizedModule,
        name: str,
        layout: WeightLayout = ORIGINAL_LAYOUT,
        shards: tuple[tuple[int, Axis], ...] = (),
        **fields: Any,
    ) -> None:
        """Replace the module's parameter `name` by this rank's shard, in this layout. fields: those
        of ShardingSpec. Raises PlanError if another module cuts the parameter in another way."""
        if (original := module.shard_of(name)) is None:
            return
        full_name = f"{module.full_name}.{name}"
        whole = layout.from_original(original.detach())
        fields = {"partial": (self.mesh.replicas,), "decay": original.dim() > 1} | fields
        fields["zero_gradient"] = name == "bias" and module.full_name.split(".")[-1] in KEYS
        spec = ShardingSpec(shape=tuple(whole.shape), shards=shards, **fields)
        try:
            shape = spec.local_shape
        except ValueError as error:
            raise PlanError(f"{full_name}: {error}") from None
        entry = self.by_id.get(id(original))
        if entry is None:
            local = torch.empty(shape, dtype=whole.dtype, device=whole.device)
            if not whole.is_meta:
                load_whole(local, whole, spec)
            parameter = nn.Parameter(local, requires_grad=original.requires_grad)
            entry = self.by_id[id(original)] = full_name, parameter, spec, layout
        other, parameter, other_spec, other_layout = entry
        if (other_spec, other_layout) != (spec, layout):
            raise PlanError(f"{full_name} and {other} are one, and the plan cuts them differently")
        module.register_parameter(name, parameter)
        module.specs[name], module.layouts[name] = spec, layout


def _rows_of(count: int, axis: Axis) -> int | None:
    """Number of rows with padding that makes `count` divisible; None if it already is. Each rank's
    share of a vocabulary is padded as in our own layers: matmuls with an odd size are slower."""
    multiple = axis.size
    if multiple > 1 and count >= VOCABULARY * multiple:
        multiple *= DIVISIBLE_BY
    return None if count % multiple == 0 else -(-count // multiple) * multiple


class ColumnLinear(ParallelizedModule):
    """The column layer for torch's Linear and transformers' Conv1D."""

    style: Column
    mode = "output"
    """Result of forward. "output": as the plan says. "input": the input, for an output layer whose
    loss `loss` computes. "own columns": this rank's columns, even if the plan gathers them."""
    seen: Tensor | None = None  # the input, if mode is "input"

    def prepare(self, style: Column, parameters: ShardedParameters) -> None:
        self.style, tensor = style, self.mesh.tensor
        layout = WeightLayout(style.parts, is_transposed_matmul(self))
        if layout.is_transposed and not style.gather and style.parts == 1:
            width, size = self.shard_of("weight").shape
            if size == 3 * width and tensor.size > 1:
                raise PlanError(
                    f"{self.full_name} holds queries, keys and values side by side, which a plain "
                    "cut would mix: Column(parts=3) works"
                )
        weight = layout.from_original(self.shard_of("weight"))
        cut_dim, self.features = weight.dim() - 2, weight.shape[-2]
        padded = None
        if style.gather and style.parts == 1:
            padded = _rows_of(self.features, tensor)
        elif self.features % tensor.size:
            raise PlanError(
                f"{self.full_name} has {self.features} output features, which {tensor.size} ranks "
                "cannot share; Column(gather=True) works"
            )
        fields: dict[str, Any] = {"shards": ((cut_dim, tensor),), "padded_rows": padded}
        parameters.shard(self, "weight", layout, **fields)
        parameters.shard(self, "bias", replace(layout, is_transposed=False), decay=False, **fields)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "input":
            self.seen = x
            return x
        if self.style.tokens:
            x = self.tensor_input.gather(x)
        y = self.columns(x)
        if not self.style.gather or self.mode == "own columns":
            return y
        if self.style.parts > 1:
            y = y.unflatten(-1, (self.style.parts, -1))
        y = gather_with_gradient(y, -1, self.mesh.tensor)[..., : self.features]
        return y.flatten(-2) if self.style.parts > 1 else y

    def columns(self, x: Tensor) -> Tensor:
        """This rank's columns of the output, for a whole x [.., in]."""
        return self._columns(x).unflatten(0, x.shape[:-1])

    def _columns(self, x: Tensor) -> Tensor:
        view = self.gradient_views.get("weight")
        return self.tensor_input.linear(x, self.shard_of("weight"), self.shard_of("bias"), view)

    def loss(self, x: Tensor, labels: Tensor, scales: Tensor) -> Tensor:
        """Sum of scales [n] x the cross-entropy of labels [n] against the columns, for a whole x
        [n, in]. It is linear_cross_entropy, which never holds all logits."""
        weight, view = self.shard_of("weight"), self.gradient_views.get("weight")
        return linear_cross_entropy(
            x,
            weight,
            self.shard_of("bias"),
            labels,
            scales,
            self.features,
            view,
            Cut(terms=self.mesh.tensor),
        )


class SharedHeads(ColumnLinear):
    """Keys or values with fewer heads than there are ranks. Every rank holds the whole weight and
    computes the heads of its queries."""

    def prepare(self, style: Column, parameters: ShardedParameters) -> None:
        self.style, tensor = style, self.mesh.tensor
        layout = WeightLayout(1, is_transposed_matmul(self))
        partial_axes = (self.mesh.replicas, tensor)
        size, left = divmod(len(layout.from_original(self.shard_of("weight"))), style.heads)
        if left:
            raise PlanError(f"{self.full_name}: its output is not of {style.heads} heads")
        # copies: None, or each query head gets its own copy of a key or value head.
        own, self.copies = key_value_heads_in_use(style.queries, style.heads, tensor)
        self.rows = slice(own.start * size, own.stop * size)
        parameters.shard(self, "weight", layout, partial=partial_axes)
        parameters.shard(self, "bias", decay=False, partial=partial_axes)

    def _columns(self, x: Tensor) -> Tensor:
        weight, bias = self.shard_of("weight")[self.rows], self.shard_of("bias")
        y = self.tensor_input.linear(x, weight, None if bias is None else bias[self.rows])
        if self.copies is None:
            return y
        return y.unflatten(-1, (self.copies[-1] + 1, -1))[:, self.copies].flatten(1)


class RowLinear(ParallelizedModule):
    style: Row

    def prepare(self, style: Row, parameters: ShardedParameters) -> None:
        self.style, tensor = style, self.mesh.tensor
        layout = WeightLayout(1, is_transposed_matmul(self))
        self.features = layout.from_original(self.shard_of("weight")).shape[1]
        parameters.shard(self, "weight", layout, ((1, tensor),))
        # Under sequence parallelism each rank adds the bias to its own tokens.
        over = (self.mesh.replicas, tensor) if style.tokens else (self.mesh.replicas,)
        parameters.shard(self, "bias", decay=False, partial=over)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == self.features:
            x = split_with_gradient(x, -1, self.mesh.tensor)
        view = self.gradient_views.get("weight")
        y = linear(x.flatten(0, -2), self.shard_of("weight"), None, view=view)
        y = _leave(y.unflatten(0, x.shape[:-1]), self.mesh.tensor, self.style.tokens)
        return y if (bias := self.shard_of("bias")) is None else y + bias


class VocabularyEmbedding(ParallelizedModule, nn.Embedding):
    style: Vocabulary

    def prepare(self, style: Vocabulary, parameters: ShardedParameters) -> None:
        _require_plain(self)
        self.style, tensor = style, self.mesh.tensor
        padded = _rows_of(self.num_embeddings, tensor)
        parameters.shard(self, "weight", shards=((0, tensor),), padded_rows=padded)
        self.own_ids = self.specs["weight"].local_slices[0]  # without padding rows

    def forward(self, ids: Tensor) -> Tensor:
        weight, view = self.shard_of("weight"), self.gradient_views.get("weight")
        rows = look_up_own(ids.flatten(), self.own_ids, weight, view)
        rows = _without_gradient(rows, ids, self.padding_idx).unflatten(0, ids.shape)
        return _leave(rows, self.mesh.tensor, self.style.tokens)


class ChannelEmbedding(ParallelizedModule, nn.Embedding):
    style: Column

    def prepare(self, style: Column, parameters: ShardedParameters) -> None:
        _require_plain(self)
        self.style = style
        if style != Column(gather=style.gather):
            raise PlanError(
                f"{self.full_name} is an embedding, of which Column has gather alone: {style} is "
                "of a matmul"
            )
        parameters.shard(self, "weight", shards=((1, self.mesh.tensor),))

    def forward(self, ids: Tensor) -> Tensor:
        rows = look_up(ids.flatten(), self.shard_of("weight"), self.gradient_views.get("weight"))
        rows = _without_gradient(rows, ids, self.padding_idx).unflatten(0, ids.shape)
        return gather_with_gradient(rows, -1, self.mesh.tensor) if self.style.gather else rows


def _without_gradient(rows: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
    """Stop the gradient of the row of padding_idx, as torch's embedding does."""
    if padding_idx is None:
        return rows
    return torch.where((ids.flatten() == padding_idx)[:, None], rows.detach(), rows)


class SummedParameters(ParallelizedModule):
    """For a module of any class, which keeps its own forward."""

    computes_itself = True

    def prepare(self, style: Summed, parameters: ShardedParameters) -> None:
        for name, _ in [*self.named_parameters(recurse=False)]:
            parameters.shard(self, name, partial=(self.mesh.replicas, self.mesh.tensor))


class TiedParameterHolder(ParallelizedModule):
    """A module that the plan does not name, with parameters that are cut in another module: its
    code may not compute with them."""

    def prepare(self, style: Any, parameters: ShardedParameters) -> None:
        for name, parameter in [*self.named_parameters(recurse=False)]:
            if id(parameter) in parameters.by_id:
                _, shard, spec, layout = parameters.by_id[id(parameter)]
                self.register_parameter(name, shard)
                self.specs[name], self.layouts[name] = spec, layout


def _require_plain(module: Any) -> None:
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            raise PlanError(f"{module.full_name} has {name}, which a cut embedding has not")


def is_transposed_matmul(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, whose weight is [in, out]."""
    origin = "transformers.pytorch_utils"
    return any(
        (each.__module__, each.__name__) == (origin, "Conv1D") for each in type(module).mro()
    )
