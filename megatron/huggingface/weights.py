"""Weights in a folder of transformers: their names in the model, and each rank's slices of them.

Names in files are not always those of a model's parameters: transformers adds and drops the name of
the base model, renames weights of older versions, and computes some weights from others. Its own
tables say how (transformers.conversion_mapping), and folders are read the same here. Weights that
are left over or missing are a warning there and an error here, except for heads of other classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import UsageError
from megatron.huggingface.config import HuggingFaceConfig
from megatron.huggingface.layers import ORIGINAL_LAYOUT, ParallelizedModule, WeightLayout
from megatron.huggingface.replacements import unmodified
from megatron.models.hf_folder import fetch, has_weights, open_files
from megatron.parallel.compare import listed
from megatron.parallel.initialize import derive_seed
from megatron.parallel.sharding import ShardingSpec

FLOATS = ("F64", "F32", "BF16", "F16")  # names in safetensors


def layout_of(model: nn.Module, name: str) -> WeightLayout:
    """The layout in which the model holds the parameter `name`."""
    module_name, _, own_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    if isinstance(module, ParallelizedModule) and own_name in module.layouts:
        return module.layouts[own_name]
    return ORIGINAL_LAYOUT


def layouts_of(model: nn.Module) -> dict[str, list[int]]:
    """{name of a parameter: the numbers of its WeightLayout}, for parameters that are held in
    another layout than transformers writes."""
    found = {name: layout_of(model, name) for name, _ in model.named_parameters()}
    return {
        name: [*map(int, astuple(layout))]
        for name, layout in found.items()
        if layout != ORIGINAL_LAYOUT
    }


class Bare:
    """A model as transformers builds it, on meta, with its names."""

    def __init__(self, config: HuggingFaceConfig, auto_class: str) -> None:
        self.model = unmodified(config, auto_class)
        self.state: dict[str, Tensor] = self.model.state_dict()
        names: dict[int, str] = {}
        self.first = {
            name: names.setdefault(id(parameter), name)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }
        """{name of a parameter: its first name}; the names of a tied parameter share one."""


Group = tuple[Any, str, list[tuple[str, str]]]
"""A converter of transformers, the name that it is called with, and its (pattern, key) pairs."""


def match(
    bare: Bare, keys: Iterable[str]
) -> tuple[dict[str, list[str]], list[Group], dict[str, str]]:
    """Match the keys of a folder's tensors to names as transformers' from_pretrained does.

    Returns {first name of a parameter, or name of a buffer: keys of its tensors}; a group for each
    weight that is computed from several tensors; {name that the model would have: key} of the rest.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(bare.model)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, list[str]] = {}
    groups: dict[str, Group] = {}
    unknown: dict[str, str] = {}
    for key in sorted(keys, key=loading.dot_natural_key):
        prefix = bare.model.base_model_prefix
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, bare.state)
        if name not in bare.state and key in bare.state:
            name, pattern = loading.rename_source_key(key, [], [], prefix, bare.state)
        if name not in bare.state:
            unknown[name] = key
        elif pattern is None:
            found.setdefault(bare.first.get(name, name), []).append(key)
        else:
            group = groups.setdefault(name, (deepcopy(by_pattern[pattern]), name, []))
            group[2].append((pattern, key))
    return found, [*groups.values()], unknown


def load_folder(
    model: Any, name: str, shards: Mapping[str, tuple[ShardingSpec, Tensor]]
) -> list[str]:
    """Start a HuggingFace from the weights of a folder, or of a name on the hub. shards: see
    read_weights; masters get the values of the files.

    Returns messages to the user. Raises UsageError if the folder has no file of weights or, naming
    the tensors, if it is of another model.
    """
    folder = fetch(name)
    works = ("--hf-model", name, "--random-weights")
    if not has_weights(name, folder):
        raise UsageError("--hf-model", name, "a model with model.safetensors", works=works)
    try:
        left_out = read_weights(model, folder, shards)
    except (ValueError, OSError) as error:
        allowed = f"a folder whose weights are of its config.json ({error})"
        raise UsageError("--hf-model", name, allowed, works=works) from error
    messages = [f"starting at step 0 from the weights of {name}"]
    if left_out:
        messages.append(f"left out, as the model has no part for it: {', '.join(left_out)}")
    return messages


@torch.no_grad()
def read_weights(
    model: Any, folder: Path, shards: Mapping[str, tuple[ShardingSpec, Tensor]]
) -> list[str]:
    """Fill this rank's shards of a model's parameters from a folder; padding becomes zero.

    model: a HuggingFace. shards: {name of its parameter: (spec, local of any dtype)}. Returns the
    keys of tensors that only another class of transformers has a part for: heads. Raises
    ValueError, naming the folder and the tensors, for tensors that are missing, unknown or of
    another shape.
    """
    bare = Bare(model.config, model.auto_class)
    missing = {*bare.first.values()}

    def fill(name: str, part: Any) -> None:
        """part: the whole tensor as the model writes it, or a slice of a file."""
        is_tensor = isinstance(part, Tensor)
        shape = list(part.shape if is_tensor else part.get_shape())
        own = bare.state[name]
        if shape != list(own.shape):
            raise ValueError(f"{folder}: {name} is {shape}, and {list(own.shape)} by config.json")
        if name not in missing:  # a buffer, which no checkpoint keeps
            value = part if is_tensor else part[...]
            if not torch.equal(own.to(value.dtype), value):
                raise ValueError(f"{folder}: {name} is a buffer, and other than config.json says")
            return
        missing.remove(name)
        if not is_tensor and (dtype := part.get_dtype()) not in FLOATS:
            raise ValueError(f"{folder}: {name} is {dtype}; {', '.join(FLOATS)} would work")
        spec, local = shards[f"model.{name}"]
        _copy(part, local, spec, layout_of(model, f"model.{name}"))

    with ExitStack() as stack:
        files = open_files(folder, stack)
        found, groups, unknown = match(bare, files)
        left_out = _left_out(bare, unknown, folder)
        for name, (key, *others) in found.items():
            for other in others:
                if not torch.equal(files[key].get_tensor(key), files[other].get_tensor(other)):
                    raise ValueError(
                        f"{folder}: {key} and {other} differ, and config.json ties them"
                    )
            fill(name, files[key].get_slice(key))
        for converter, name, parts in groups:
            for pattern, key in parts:
                converter.add_tensor(name, key, pattern, partial(files[key].get_tensor, key))
            made = converter.convert(name, model=bare.model, config=bare.model.config)
            for each, value in made.items():
                whole = value[0] if isinstance(value, list) else value
                fill(bare.first.get(each, each), whole)
    if missing:
        lacks = f"{folder} lacks {listed(sorted(missing))} of {type(bare.model).__name__}"
        raise ValueError(f"{lacks}: a folder with all weights, or --random-weights, would work")
    return left_out


def _copy(part: Any, local: Tensor, spec: ShardingSpec, layout: WeightLayout) -> None:
    local.zero_()
    if layout == ORIGINAL_LAYOUT:
        for own, where in spec.boxes(local):
            own.copy_(part[where or ...])  # ... for a single number
        return
    if spec.flat is not None:  # a flat range of a shard in another layout
        if spec.flat.start < spec.flat.stop:
            shard = local.new_empty(spec.of_shard.local_shape)
            _copy(part, shard, spec.of_shard, layout)
            local.copy_(shard.flatten()[spec.flat.start : spec.flat.stop])
        return
    box = spec.local_slices
    if any(cut.start == cut.stop for cut in box):  # only padding
        return
    # The matrices of a parameter lie one after another.
    rows, *others = box[1:] if layout.parts > 1 else box
    step = spec.shape[1] if layout.parts > 1 else 0
    pieces = []
    for number in range(layout.parts):
        index = (slice(rows.start + number * step, rows.stop + number * step), *others)
        pieces.append(part[index[::-1] if layout.is_transposed else index])
    original = pieces[0] if layout.parts == 1 else torch.cat(pieces, int(layout.is_transposed))
    spec.real(local).copy_(layout.from_original(original))


def _left_out(bare: Bare, unknown: Mapping[str, str], folder: Path) -> list[str]:
    """Keys of unknown names that other classes have, without names that transformers ignores: a
    folder of BERT for pretraining also has the head of the second task. Raises ValueError for the
    rest."""
    import transformers

    patterns = list(bare.model._keys_to_ignore_on_load_unexpected or ())  # in transformers 5.23
    # Buffers that are no longer saved.
    patterns += [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$"]
    rest = {
        name: key
        for name, key in unknown.items()
        if not any(re.search(pattern, name) for pattern in patterns)
    }
    if not rest:
        return []
    config, known = bare.model.config, set[str]()
    kinds = [getattr(transformers, name, None) for name in config.architectures or ()]
    kinds.append(transformers.MODEL_FOR_PRETRAINING_MAPPING.get(type(config), None))
    for kind in filter(None, kinds):
        with torch.device("meta"):
            known |= kind(config).state_dict().keys()
    prefix = f"{bare.model.base_model_prefix}."
    heads = {name: key for name, key in rest.items() if {name, prefix + name} & known}
    if strange := [key for name, key in rest.items() if name not in heads]:
        kind, names = type(bare.model).__name__, listed(sorted(strange))
        raise ValueError(f"{folder} has {names}, for which {kind} has no part")
    return sorted(heads.values())


@torch.no_grad()
def initial_values(model: Any, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) for the parameters of a model of transformers that is on meta."""
    from transformers import PreTrainedModel
    from transformers.initialization import guard_torch_init_functions

    def initialise(module: nn.Module, own: Any) -> None:
        for child in module.children():
            initialise(child, child._init_weights if isinstance(child, PreTrainedModel) else own)
        own(module)

    def walk(name: str, module: nn.Module, own: Any, is_unit: bool) -> Iterator[tuple[str, Tensor]]:
        if isinstance(module, PreTrainedModel):
            own = module._init_weights
        if is_unit or [*module.parameters(recurse=False)]:
            own_parameters: Any = module.named_parameters(name, recurse=is_unit)
            made = {own_name: each.made for own_name, each in own_parameters}
            module.to_empty(device="cpu", recurse=is_unit)
            for parameter in module.parameters(recurse=is_unit):
                parameter.fill_(torch.nan)
            with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
                torch.manual_seed(derive_seed(seed, "initialise", name))
                initialise(module, own) if is_unit else own(module)
            for own_name, parameter in module.named_parameters(name, recurse=is_unit):
                if (unset := parameter.isnan()).any():  # the constructor's value stays
                    parameter.copy_(torch.where(unset, made[own_name], parameter))
                yield own_name, parameter.detach()
            module.to("meta")
        for child_name, child in () if is_unit else module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            yield from walk(full, child, own, isinstance(module, nn.ModuleList))

    yield from walk("", model, model._init_weights, False)
