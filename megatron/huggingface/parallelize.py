"""Parallel layers, by a plan, in a model that was not written for them.

A plan says how modules are cut, by patterns of their names. `parallelize` turns these modules into
our parallel layers in place: a module keeps its name, its attributes and its uses in the model's
code, but gets another class, whose forward computes with this rank's shard. All other modules stay
as they are and compute the same on every rank.

    plan = {
        "*.mlp.c_fc": Column(),     # its output stays cut: this rank's columns
        "*.mlp.c_proj": Row(),      # reads these columns; its output is whole
        "*.attn.c_attn": Column(parts=3),                # q, k and v in one weight
        "*.attn": Local("num_heads", "split_size"),      # by which the model's code counts heads
        "*.wte": Vocabulary(),      # a head that is tied to it is cut the same way
    }

Between layers every tensor and its gradient are whole, except those that the plan leaves cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from inspect import unwrap
from itertools import takewhile
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.huggingface import layers
from megatron.huggingface.layers import ParallelizedModule, ShardedParameters, SharedInput
from megatron.huggingface.plan import (
    Column,
    Local,
    Plan,
    PlanError,
    Redistribute,
    Row,
    Style,
    Summed,
    Vocabulary,
    read_style,
)
from megatron.parallel.layers_llama import key_value_heads_in_use
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.regions import gather_with_gradient, split_with_gradient
from megatron.parallel.sharding import gather_whole

Named = tuple[str, Style]  # (name of a module, its style)
Inputs = Sequence[Any] | Mapping[str, Any]  # arguments of a forward, by position or by name
# Names of layers that compute the heads of queries, and of those that compute keys or values.
QUERIES = ("q_proj", "query", "query_key_value", "qkv_proj", "c_attn")
KEYS = ("k_proj", "v_proj", "key", "value")


def parallelize(
    model: nn.Module, plan: Plan, mesh: Mesh, inputs: Inputs | None = None
) -> nn.Module:
    """Cut a model in place over the tensor axis of the mesh, as the plan says, and return it.

    Pass the whole model: it no longer shares parameters with modules outside of it. The model may
    have weights, the same on every rank; each rank then keeps its shard. Or it may be built under
    `parameters_on_meta`; then `materialize` gives it memory. `model.load_state_dict` takes whole
    weights by the names of the model, and `whole_state_dict` returns them.

    plan: styles by patterns of module names. In a pattern * matches anything; if several patterns
    match a module, the last one counts. Raises PlanError, naming the module, for a pattern without
    a match, a module that cannot be cut that way, and parameters that two modules share but would
    cut differently; the model is then unchanged.

    inputs: arguments of the model's forward, of a small batch, as a list or by name. A forward on
    their shapes finds the column layers that read one tensor, whose gradient is then summed over
    the ranks once; hooks of the model run in it. Models of transformers have such inputs
    (`dummy_inputs`). Without inputs, each layer sums its own term: as right, but more is sent.

    GradientBuckets of the model sum gradients over samples. They also sum those of Summed, and of
    other parameters that ranks hold whole inside a cut region, over the tensor axis.
    Without GradientBuckets, `.grad` is this rank's term of the sum.
    """
    if mesh.tensor_parallel_mode != "1d":
        raise ValueError(f"a plan cuts along one axis: 1d, not {mesh.tensor_parallel_mode}")
    tensor = mesh.tensor
    modules = dict(model.named_modules())
    styles = _styles(model, plan)
    styles += _of_ties(model, styles, modules)
    styles = [*_with_heads(model, styles, modules, tensor)]
    for name, style in styles:
        if isinstance(style, Local):
            for attribute in style.attributes:
                number = getattr(modules[name], attribute, None)
                if not isinstance(number, int):
                    raise PlanError(f"{name} has no number {attribute}")
                if number % tensor.size:
                    ranks = f"{tensor.size} ranks"
                    raise PlanError(f"{name}: {attribute} {number} is no multiple of {ranks}")
        elif isinstance(style, Redistribute):
            for before, after in (*style.inputs.values(), *style.outputs.values()):
                if {before, after} not in ({"whole", "tokens"}, {"whole", "channels"}):
                    raise PlanError(f"{name}: no tensor goes from {before} to {after}")
    # Stand-ins on meta are cut first: the model is unchanged if its plan is refused.
    shapes = {
        id(each): nn.Parameter(each.detach().to("meta"), requires_grad=each.requires_grad)
        for each in model.parameters()
    }
    rehearsal = ShardedParameters(mesh, {})
    _cut(_stand_ins(modules, shapes), styles, rehearsal)
    for original, where in _held_outside(modules).items():
        if (entry := rehearsal.by_id.get(id(shapes[original]))) is not None:
            raise PlanError(
                f"{entry[0]} is cut, and {where} holds it whole, out of sight of its module"
            )
    inputs = inputs or getattr(model, "dummy_inputs", None)
    groups: dict[tuple[str, ...], str] = {}
    if inputs and tensor.size > 1:
        try:
            groups, failure = _readers_of_one_tensor(modules, styles, inputs), ""
        except Exception as error:  # from the model's code, which may read values
            failure = f"{type(error).__name__}: {error}"
        # On every rank or on none, as they communicate alike; absent ranks cannot be asked.
        failures = [failure] if mesh.control.group is None else mesh.control.gather(failure)
        if failure := next(filter(None, failures), ""):
            groups = {}
            warn(
                "every column layer sums the gradient of its input by itself, which is slower: the "
                f"model does not run on shapes alone ({failure})",
                stacklevel=2,
            )
    _cut(modules, styles, ShardedParameters(mesh, {}))
    shared_inputs: dict[str, SharedInput] = {}
    for names, caller in groups.items():
        shared = SharedInput()
        modules[caller].register_forward_pre_hook(shared.open)
        modules[caller].register_forward_hook(shared.close)
        shared_inputs |= dict.fromkeys(names, shared)
    for name, style in styles:
        module = modules[name]
        if isinstance(module, layers.ColumnLinear):
            module.shared_input = shared_inputs.get(name, SharedInput())
        if isinstance(style, Local):
            for attribute in style.attributes:
                setattr(module, attribute, getattr(module, attribute) // tensor.size)
            for attribute, value in style.values:
                setattr(module, attribute, value)
        elif isinstance(style, Redistribute):
            moving = _Moving(name, style, tensor, shared_inputs.get(name, SharedInput()))
            if style.inputs:
                module.register_forward_pre_hook(moving.enter, with_kwargs=True)
            if style.outputs:
                module.register_forward_hook(moving.leave)
    return model


def _stand_ins(
    modules: Mapping[str, nn.Module], tensors: Mapping[int, Tensor]
) -> dict[str, nn.Module]:
    """Modules with the classes and attributes of the model's, which run and change without them.
    tensors: their parameters and buffers, by the ids of the model's."""
    copies = {id(module): object.__new__(type(module)) for module in modules.values()}
    by_id: dict[int, Any] = {**tensors, **copies}
    for module in modules.values():
        copy = copies[id(module)]
        for name, value in vars(module).items():
            vars(copy)[name] = value.copy() if isinstance(value, dict | list | set) else value
        for held in (copy._parameters, copy._buffers, copy._modules):
            held.update({name: by_id.get(id(value), value) for name, value in held.items()})
    return {name: copies[id(module)] for name, module in modules.items()}


def _readers_of_one_tensor(
    modules: Mapping[str, nn.Module], styles: Sequence[Named], inputs: Inputs
) -> dict[tuple[str, ...], str]:
    """{names of modules that the plan cuts and that read one tensor: the innermost module that
    calls them all}. They are column layers, and those whose Redistribute gathers the tensor.

    The model runs once with these inputs, on tensors that have shapes and no memory.
    """
    reads: dict[str, list[int | str]] = {}  # positions or names of arguments
    for name, style in styles:
        if isinstance(style, Column) and not isinstance(modules[name], nn.Embedding):
            reads.setdefault(name, []).append(0)
        elif isinstance(style, Redistribute):
            gathered = [key for key, move in style.inputs.items() if move == ("tokens", "whole")]
            reads.setdefault(name, []).extend(gathered)
    running: list[str] = []
    # By the id of a tensor, which must not die: (it, its readers, the modules that ran then).
    found: dict[int, tuple[Any, list[str], list[list[str]]]] = {}

    def enter(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = dict[int | str, Any](enumerate(args)) | kwargs
        is_matmul = _is_matmul(modules[name])
        for key in reads.get(name, ()):
            if isinstance(x := values.get(key), Tensor):
                _, names, callers = found.setdefault(id(x), (x, [], []))
                names.append(name)
                callers.append([*running] if is_matmul else [*running, name])
        running.append(name)

    def leave(*_: object) -> None:
        running.pop()

    def without_memory(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor)
        return torch.empty(value.shape, dtype=value.dtype) if is_tensor else value

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        whole = modules[""]
        tensors = {id(t): without_memory(t) for t in (*whole.parameters(), *whole.buffers())}
        copies = _stand_ins(modules, tensors)
        for name, module in copies.items():
            module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            module.register_forward_hook(leave)
        model = copies[""].eval()
        if isinstance(inputs, Mapping):
            model(**{name: without_memory(value) for name, value in inputs.items()})
        else:
            model(*map(without_memory, inputs))
    groups: dict[tuple[str, ...], str] = {}
    for _, names, callers in found.values():
        if len(names) > 1:
            levels = zip(*callers, strict=False)  # from the model inwards
            common = [*takewhile(lambda level: len({*level}) == 1, levels)]
            groups[tuple(sorted({*names}))] = common[-1][0]
    return groups


def _cut(
    modules: Mapping[str, nn.Module], styles: Sequence[Named], parameters: ShardedParameters
) -> None:
    """Give the modules that hold parameters of the plan their classes and shards."""

    def adopt(name: str, kind: type[ParallelizedModule], style: Any) -> None:
        module = modules[name]
        module.__class__ = _joined(type(module), kind)  # type: ignore[arg-type]
        assert isinstance(module, ParallelizedModule)
        module.full_name, module.layouts = name, {}
        on_meta = any(each.is_meta for each in module.parameters(recurse=False))
        module.attach(parameters.mesh, is_on_meta=on_meta)
        module.prepare(style, parameters)

    for name, style in styles:
        if not isinstance(style, Column | Row | Vocabulary | Summed):
            continue
        if isinstance(modules[name], ParallelizedModule):
            raise PlanError(f"{name} is cut already: a model is parallelized once, by one plan")
        is_summed, axis = isinstance(style, Summed), parameters.mesh.tensor
        kind = layers.SummedParameters if is_summed else _class_of(name, modules[name], style, axis)
        adopt(name, kind, style)
    for name, module in modules.items():
        is_held = any(id(each) in parameters.by_id for each in module._parameters.values())
        # One module knows the mesh, even if the plan cuts nothing.
        is_first = not name and not parameters.by_id
        if not isinstance(module, ParallelizedModule) and (is_held or is_first):
            adopt(name, layers.TiedParameterHolder, None)


def _styles(model: nn.Module, plan: Plan) -> list[Named]:
    """(name of a module, its style) for each module of the plan, in the order of the model."""
    if not isinstance(plan, Mapping):
        raise PlanError(f"the plan is {plan!r}, and no mapping: plan_of(model, text) reads a text")
    modules = dict(model.named_modules())
    first = {id(module): name for name, module in modules.items()}
    chosen: dict[str, Any] = {}
    for pattern, styles in plan.items():
        _, dot, last = pattern.rpartition(".")
        # A pattern may name a parameter of the module instead.
        end = f"{dot}{last}" if last in ("weight", "bias") else ""
        fitting = [
            first[id(module)]
            for name, module in model.named_modules(remove_duplicate=False)
            if fnmatchcase(f"{name}{end}", pattern)
        ]
        if not fitting:
            raise PlanError(f"the plan's {pattern!r} fits no module of the model")
        chosen |= dict.fromkeys(fitting, styles)
    found: list[Named] = []
    for name, module in modules.items():
        styles = chosen.get(name, ())
        is_several = isinstance(styles, Sequence) and not isinstance(styles, str)
        for style in styles if is_several else [styles]:
            if isinstance(style, str | Mapping):
                style = read_style(name, style)
            elif not isinstance(style, Style):
                style = of_torch(name, style)
            if isinstance(style, Row) and isinstance(module, nn.Embedding):
                style = Vocabulary(style.tokens)  # torch's name for it is row-wise
            if isinstance(style, Summed):  # of every module inside that has parameters
                inside = [each for each in module.modules() if [*each.parameters(recurse=False)]]
                found += [(first[id(each)], style) for each in inside]
            else:
                found.append((name, style))
    return found


def _with_heads(
    model: Any, styles: Sequence[Named], modules: Mapping[str, nn.Module], tensor: Axis
) -> Iterator[Named]:
    """The same styles, with the numbers of heads if the model has a config that states them, as
    models of transformers do."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    queries: Any = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) or queries
    is_known = isinstance(queries, int) and isinstance(shared, int)
    groups: dict[str, int] = {}
    for name, style in styles:
        parent, _, last = name.rpartition(".")
        has_heads = is_known and last in (*QUERIES, *KEYS)
        if not has_heads or not isinstance(style, Column) or style.gather:
            yield name, style
            continue
        heads = shared if last in KEYS else queries
        yield name, replace(style, heads=heads, queries=queries)
        is_shared = heads % tensor.size > 0 and queries % tensor.size == 0
        if is_shared and hasattr(modules[parent], "num_key_value_groups"):
            own, kv_head_index = key_value_heads_in_use(queries, heads, tensor)
            share = queries // tensor.size
            groups[parent] = share // (own.stop - own.start) if kv_head_index is None else 1
    for parent, number in groups.items():
        yield parent, Local(num_key_value_groups=number)


def _held_outside(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Parameters that are also in plain attributes of modules, or in containers in attributes:
    {id of the parameter: name of the attribute}."""
    known = {id(each) for module in modules.values() for each in module.parameters(recurse=False)}
    found: dict[int, str] = {}
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            values = value.values() if isinstance(value, Mapping) else value
            held = (
                values if isinstance(values, Iterable) and not isinstance(values, Iterator) else ()
            )
            for each in [value] if isinstance(value, Tensor) else held:
                if id(each) in known and attribute != "_parameters":
                    found[id(each)] = f"{name}.{attribute}"
    return found


def _of_ties(
    model: nn.Module, styles: Sequence[Named], modules: Mapping[str, nn.Module]
) -> Iterator[Named]:
    """Styles of layers that the plan does not name, but whose weight it cuts in another module."""
    dims = {  # dim of the weight that is cut
        name: int(isinstance(style, Row) or (isinstance(style, Column) and is_embedding))
        for name, style in styles
        if isinstance(style, Column | Row | Vocabulary)
        for is_embedding in [isinstance(modules[name], nn.Embedding)]
    }
    owners: dict[int, list[str]] = {}  # names of modules by the id of a parameter
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for group in owners.values():
        cut = [dims[name] for name in group if name in dims]
        for name in group if cut else ():
            if name not in dims and isinstance(modules[name], nn.Embedding):
                yield name, Column(gather=True) if cut[0] else Vocabulary()
            elif name not in dims and _is_matmul(modules[name]):
                yield name, Row() if cut[0] else Column(gather=True)


@dataclass
class _Moving:
    """The hooks of a module with the style Redistribute; a copy of the model has its own."""

    name: str
    style: Redistribute
    axis: Axis
    shared_input: SharedInput

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = dict[int | str, Any](enumerate(args)) | kwargs
        self._move(values, self.style.inputs)
        return tuple(values[key] for key in range(len(args))), {key: values[key] for key in kwargs}

    def leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor | tuple | list):
            kind = type(output).__name__
            raise RuntimeError(f"{self.name} returns a {kind}; a plan moves tensors and tuples")
        values = dict(enumerate([output] if isinstance(output, Tensor) else output))
        self._move(values, self.style.outputs)
        return values[0] if isinstance(output, Tensor) else tuple(values.values())

    def _move(self, values: dict[Any, Any], moves: Mapping[Any, tuple[str, str]]) -> None:
        for key, move in moves.items():
            if key not in values:
                raise RuntimeError(
                    f"{self.name} has no input or output {key!r}, which a plan moves"
                )
            if not isinstance(x := values[key], Tensor):
                continue
            match move:
                case "tokens", "whole":
                    values[key] = self.shared_input.gather(x, self.axis)
                case "channels", "whole":
                    values[key] = gather_with_gradient(x, -1, self.axis)
                case "whole", kind:
                    dim = 1 if kind == "tokens" else -1
                    values[key] = split_with_gradient(x, dim, self.axis)


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict that the model would have without `parallelize`: whole tensors by its own
    names. None shares memory with the model's parameters (every rank calls this)."""
    state = {name: each.clone() for name, each in model.state_dict().items()}
    whole: dict[int, Tensor] = {}  # by id of the shard, which modules may share
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, ParallelizedModule):
            continue
        for name, layout in module.layouts.items():
            shard = module.shard_of(name)
            if id(shard) not in whole:
                gathered = gather_whole(shard, module.specs[name])
                whole[id(shard)] = layout.to_original(gathered).contiguous()
            state[f"{prefix}.{name}" if prefix else name] = whole[id(shard)]
    return state


@cache
def _joined(model_class: type, kind: type[ParallelizedModule]) -> type:
    """A class that inherits from both. An embedding whose forward calls super() (and scales the
    result) comes first, so that super() is our class."""
    bases: tuple[type, ...] = (kind, model_class)
    if issubclass(kind, nn.Embedding):
        bases = (kind,) if model_class is nn.Embedding else (model_class, kind)
    is_named = kind is layers.TiedParameterHolder  # all its code is the model's
    name = model_class.__name__ if is_named else f"{kind.__name__}Of{model_class.__name__}"
    return type(name, bases, {})


def _is_matmul(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or layers.is_transposed_matmul(module)


def _class_of(name: str, module: nn.Module, style: Any, tensor: Axis) -> type[ParallelizedModule]:
    """The class that the module gets. Raises PlanError if it cannot be cut as its style says."""
    kinds: dict[type, type[ParallelizedModule]] = {}
    known: type[nn.Module] = nn.Module
    if isinstance(module, nn.Embedding):
        kinds, known = {Vocabulary: layers.CutEmbedding, Column: layers.CutEmbedding}, nn.Embedding
    elif _is_matmul(module):
        kinds, known = {Column: layers.ColumnLinear, Row: layers.RowLinear}, nn.Linear
        if isinstance(style, Column) and style.queries % tensor.size:
            raise PlanError(f"{name}: {tensor.size} ranks cannot share {style.queries} query heads")
        is_shared = isinstance(style, Column) and style.heads % tensor.size > 0
        if is_shared and (style.parts > 1 or style.gather):
            allowed = "Column(gather=True) without heads works"
            raise PlanError(f"{name}: heads that ranks share are of one part, and cut; {allowed}")
    own = type(module)
    if type(style) not in kinds:
        raise PlanError(f"{name} is a {own.__name__}, which cannot be cut as {style}")
    forward = unwrap(own.forward)
    is_plain = forward is known.forward or (
        layers.is_transposed_matmul(module) and own.__name__ == "Conv1D"
    )
    goes_on = known is nn.Embedding and "__class__" in forward.__code__.co_freevars
    if "weight" not in dict(module.named_parameters(recurse=False)):
        raise PlanError(f"{name} computes its weight (by weight_norm, prune ...): Whole() works")
    if "forward" in vars(module) or not (is_plain or goes_on):
        text = f"{name} is a {own.__name__}, which computes something else than {known.__name__}"
        raise PlanError(f"{text}: Whole() works")
    return kinds[type(style)]


def of_torch(name: str, style: Any) -> Style:
    """Our style with the meaning of one of torch.distributed.tensor.parallel. Raises PlanError,
    naming the module, if there is none."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as torchs

    if type(style).__module__.partition(".")[0] != "torch":  # it may do anything
        raise PlanError(f"{name}: {type(style).__name__} is no style of this project or of torch")

    def kind(layout: Any) -> str:
        if layout is None or isinstance(layout, Replicate):
            return "whole"
        if isinstance(layout, Shard) and layout.dim in (1, -1):
            return "tokens" if layout.dim == 1 else "channels"
        return str(layout)

    def moves(before: Any, after: Any) -> dict[Any, tuple[str, str]]:
        """Changes of layout, by position or name; a layout of None leaves the tensor as it is."""
        if not isinstance(before, Mapping):
            before = dict(enumerate(before if isinstance(before, tuple) else (before,)))
            after = dict(enumerate(after if isinstance(after, tuple) else (after,)))
        found = {}
        for key, layout in before.items():
            if layout and after.get(key) and kind(layout) != kind(after[key]):
                found[key] = (kind(layout), kind(after[key]))
        return found

    is_local = getattr(style, "use_local_output", True)  # otherwise code sees whole sizes
    match style:
        case torchs.ColwiseParallel():
            entering, leaving = kind(style.input_layouts[0]), kind(style.output_layouts[0])
            if entering in ("whole", "tokens") and leaving in ("whole", "channels"):
                # Code that reads a DTensor sees it whole.
                gather = leaving == "whole" or not is_local
                return Column(gather=gather, tokens=entering == "tokens")
        case torchs.RowwiseParallel():
            entering, leaving = kind(style.input_layouts[0]), kind(style.output_layouts[0])
            is_known = leaving == "whole" or (leaving == "tokens" and is_local)
            if entering in ("whole", "channels") and is_known:
                return Row(tokens=leaving == "tokens")
        case torchs.SequenceParallel():
            if kind(style.sequence_sharding[0]) == "tokens":
                return Summed()
        case torchs.PrepareModuleInput():
            inputs = moves(style.input_layouts, style.desired_input_layouts)
            inputs |= moves(style.input_kwarg_layouts, style.desired_input_kwarg_layouts)
            if is_local or all(move[1] == "whole" for move in inputs.values()):
                return Redistribute(inputs, {})
        case torchs.PrepareModuleOutput():
            outputs = moves(style.output_layouts, style.desired_output_layouts)
            if is_local or all(move[1] == "whole" for move in outputs.values()):
                return Redistribute({}, outputs)
        case torchs.PrepareModuleInputOutput():
            before: Any = of_torch(name, style.prepare_module_input)
            after: Any = of_torch(name, style.prepare_module_output)
            return Redistribute(before.inputs, after.outputs)
    values = ", ".join(f"{key}={value}" for key, value in vars(style).items())
    raise PlanError(f"{name}: no layer here does what {type(style).__name__}({values}) says")
