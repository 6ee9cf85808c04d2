"""Classes of the modules of a model that a plan cuts: our layers under the model's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.huggingface.plan import Column, PlanError, Row, Summed, Vocabulary
from megatron.parallel.collectives import Cut, Pair, gather_from, start_sum
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.layers import DIVISIBLE_BY, Gathered, linear, look_up, look_up_own, multiply
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


@dataclass
class SharedInput:
    """A tensor that several column layers read, to which f (section 3 of the paper) is applied
    once. The first layer hands its input to the others, so its backward runs last, has the
    gradients of all, and sums them over the ranks during the matmul for its weight's gradient.

    `parallelize` finds these layers. The tensor is held only while the module runs that calls them;
    a layer that gets another tensor applies f itself.
    """

    is_open: bool = False
    x: Tensor | None = None  # as the layers get it
    tokens: Tensor | None = None  # this rank's tokens, if a Redistribute gathered x from them
    rows: Tensor | None = None  # x [n, in] after f

    def __deepcopy__(self, memo: dict[int, object]) -> SharedInput:
        return SharedInput()

    def open(self, *_: object) -> None:
        self.is_open = True

    def close(self, *_: object) -> None:
        self.is_open = False
        self.x = self.tokens = self.rows = None

    def hold(self, x: Tensor, rows: Tensor | None, tokens: Tensor | None) -> None:
        if self.is_open:
            self.x, self.rows, self.tokens = x, rows, tokens

    def gather(self, x: Tensor, axis: Axis) -> Tensor:
        """Gather this rank's tokens x [b, s/t, ..]. Column layers that read the result
        reduce-scatter its gradient; for other code each rank keeps the gradient of its tokens."""
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        if self.x is not None and self.tokens is x and self.x.requires_grad == has_gradient:
            return self.x
        whole = gather_with_gradient(x, 1, axis)
        self.hold(whole, None, x)
        return whole


def _enter_tokens(x: Tensor, axis: Axis, whole: Tensor | None = None) -> Tensor:
    """f of this rank's tokens x [b, s/t, ..]: gather them, or take `whole`, which is gathered
    already; the backward reduce-scatters the gradient."""

    def forward_by(x: Tensor) -> Tensor:
        return gather_from(x, 1, axis) if whole is None else whole.detach()

    def backward_by(dy: Tensor) -> Tensor:
        return start_sum(dy.transpose(0, 1).contiguous(), axis, axis)().transpose(0, 1)

    return Pair.apply(x, forward_by, backward_by)


def _leave(x: Tensor, axis: Axis, tokens: bool) -> Tensor:
    """The sum over ranks, whole or for this rank's tokens."""
    if not tokens:
        return reduce_from(x, axis)
    return reduce_from(x.transpose(0, 1).contiguous(), axis, axis).transpose(0, 1)


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
    """The column layer for torch's Linear and transformers' Conv1D.

    If keys or values have fewer heads than there are ranks, every rank holds their whole weight and
    computes the heads of its queries.
    """

    style: Column
    mode = "output"
    """Result of forward. "output": as the plan says. "input": the input, for an output layer whose
    loss `loss` computes. "own columns": this rank's columns, even if the plan gathers them."""
    kept_input: Tensor | None = None  # if mode is "input"
    shared_input: SharedInput  # also of other column layers that read the same tensor
    rows_in_use: slice | None = None  # of a whole weight
    head_index: list[int] | None = None  # the head in use of each query head, see layers_llama.py

    def prepare(self, style: Column, parameters: ShardedParameters) -> None:
        self.style, tensor = style, self.mesh.tensor
        self.f = Gathered(x=Cut(terms=tensor))
        layout = WeightLayout(style.parts, is_transposed_matmul(self))
        of_bias = replace(layout, is_transposed=False)
        if layout.is_transposed and not style.gather and style.parts == 1:
            width, size = self.shard_of("weight").shape
            if size == 3 * width and tensor.size > 1:
                raise PlanError(
                    f"{self.full_name} holds queries, keys and values side by side, which a plain "
                    "cut would mix: Column(parts=3) works"
                )
        weight = layout.from_original(self.shard_of("weight"))
        self.features = weight.shape[-2]
        if style.heads % tensor.size:
            size, left = divmod(self.features, style.heads)
            if left:
                raise PlanError(f"{self.full_name}: its output is not of {style.heads} heads")
            own, self.head_index = key_value_heads_in_use(style.queries, style.heads, tensor)
            self.rows_in_use = slice(own.start * size, own.stop * size)
            over = (self.mesh.replicas, tensor)
            parameters.shard(self, "weight", layout, partial=over)
            parameters.shard(self, "bias", of_bias, decay=False, partial=over)
            return
        padded = None
        if style.gather and style.parts == 1:
            padded = _rows_of(self.features, tensor)
        elif self.features % tensor.size:
            raise PlanError(
                f"{self.full_name} has {self.features} output features, which {tensor.size} ranks "
                "cannot share; Column(gather=True) works"
            )
        fields: dict[str, Any] = {"shards": ((weight.dim() - 2, tensor),), "padded_rows": padded}
        parameters.shard(self, "weight", layout, **fields)
        parameters.shard(self, "bias", of_bias, decay=False, **fields)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "input":
            self.kept_input = x
            return x
        y = self.columns(x)
        if not self.style.gather or self.mode == "own columns":
            return y
        if self.style.parts > 1:
            y = y.unflatten(-1, (self.style.parts, -1))
        y = gather_with_gradient(y, -1, self.mesh.tensor)[..., : self.features]
        return y.flatten(-2) if self.style.parts > 1 else y

    def columns(self, x: Tensor) -> Tensor:
        """This rank's columns [.., out] of the output, for x [.., in] of all tokens, or for this
        rank's tokens if the style says so."""
        shared, tensor, tokens = self.shared_input, self.mesh.tensor, self.style.tokens
        weight, bias = self.shard_of("weight"), self.shard_of("bias")
        view = self.gradient_views.get("weight")
        if self.rows_in_use is not None:
            weight, view = weight[self.rows_in_use], None
            bias = None if bias is None else bias[self.rows_in_use]
        leading = [*x.shape[:-1]]
        if tokens:
            leading[1] *= tensor.size
        rows, gathered_from = (shared.rows, shared.tokens) if shared.x is x else (None, None)
        needs_f = tensor.size > 1 and torch.is_grad_enabled() and x.requires_grad
        if not needs_f:
            rows = (gather_from(x, 1, tensor) if tokens else x).flatten(0, -2)
        elif rows is None and tokens:
            rows = _enter_tokens(x, tensor).flatten(0, -2)
        elif rows is None and gathered_from is not None:
            rows = _enter_tokens(gathered_from, tensor, x).flatten(0, -2)
        if rows is not None:
            y = linear(rows, weight, bias, view=view)
        else:
            rows = x.flatten(0, -2)
            y, rows = multiply(rows, [weight], [bias], [view], self.f, return_input=True)
        if needs_f:
            shared.hold(x, rows, gathered_from)
        if self.head_index is not None:
            heads = y.unflatten(-1, (self.head_index[-1] + 1, -1))
            y = heads[:, self.head_index].flatten(1)
        return y.unflatten(0, leading)

    def loss(self, x: Tensor, labels: Tensor, scales: Tensor) -> Tensor:
        """Sum of scales [n] x the cross-entropy of labels [n] against the columns, for a whole x
        [n, in]. It is linear_cross_entropy, which never holds all logits."""
        weight, bias = self.shard_of("weight"), self.shard_of("bias")
        view, f = self.gradient_views.get("weight"), Cut(terms=self.mesh.tensor)
        return linear_cross_entropy(x, weight, bias, labels, scales, self.features, view, f)


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


class CutEmbedding(ParallelizedModule, nn.Embedding):
    """torch's Embedding with this rank's rows (Vocabulary) or channels (Column)."""

    style: Vocabulary | Column

    def prepare(self, style: Vocabulary | Column, parameters: ShardedParameters) -> None:
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(self, name):
                raise PlanError(f"{self.full_name} has {name}, which a cut embedding has not")
        self.style, tensor = style, self.mesh.tensor
        if isinstance(style, Vocabulary):
            padded = _rows_of(self.num_embeddings, tensor)
            parameters.shard(self, "weight", shards=((0, tensor),), padded_rows=padded)
            self.own_ids = self.specs["weight"].local_slices[0]  # without padding rows
        elif style == Column(gather=style.gather):
            parameters.shard(self, "weight", shards=((1, tensor),))
        else:
            text = f"{self.full_name} is an embedding, for which Column supports only gather"
            raise PlanError(f"{text}: {style} is for a matmul")

    def forward(self, ids: Tensor) -> Tensor:
        weight, view = self.shard_of("weight"), self.gradient_views.get("weight")
        if isinstance(self.style, Vocabulary):
            rows = look_up_own(ids.flatten(), self.own_ids, weight, view)
        else:
            rows = look_up(ids.flatten(), weight, view)
        if self.padding_idx is not None:  # its row gets no gradient, as in torch
            is_padding = (ids.flatten() == self.padding_idx)[:, None]
            rows = torch.where(is_padding, rows.detach(), rows)
        rows = rows.unflatten(0, ids.shape)
        if isinstance(self.style, Vocabulary):
            return _leave(rows, self.mesh.tensor, self.style.tokens)
        return gather_with_gradient(rows, -1, self.mesh.tensor) if self.style.gather else rows


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


def is_transposed_matmul(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, whose weight is [in, out]."""
    conv1d = ("transformers.pytorch_utils", "Conv1D")
    return any((each.__module__, each.__name__) == conv1d for each in type(module).mro())
