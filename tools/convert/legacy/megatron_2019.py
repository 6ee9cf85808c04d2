"""Megatron-LM's GPT-2 of 2019 and 2020: its shards on t model-parallel ranks to whole parameters.

    DIR/latest_checkpointed_iteration.txt               "250000", or "release"
    DIR/iter_0250000/mp_rank_00/model_optim_rng.pt      one file per model-parallel rank

A file is a dict. "model" has the weights of the rank, nested by module from 2020 on, before that
flat with dotted names. "args" (an argparse.Namespace) and "checkpoint_version" may be absent. The
optimizer and random states are not used here.

    h hidden   a heads   d = h/a head size   v vocabulary, padded   t ranks

Linear layers are [out, in] in both. Biases of row-parallel layers, norms and position embeddings
are on every rank. The order of the 3h/t rows of a rank's query_key_value changed twice:

    checkpoint_version   none or 0          1                2 and later
    rows                 [3, a/t, d]        [a/t, d, 3]      [a/t, 3, d]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.config.model import GPT2Config
from megatron.errors import UsageError, flag
from megatron.models.build import build_on_meta
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import sharding_specs
from megatron.train.state import DTYPES
from tools.convert.legacy.pickles import Placeholder, SavedFile

POINTER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
WORDS, POSITIONS = "word_embeddings.weight", "position_embeddings.weight"
QKV = "attention.query_key_value"
ORDERS = ("[3, a/t, d]", "[a/t, d, 3]", "[a/t, 3, d]")  # by version; the last holds for later ones

# Modules of a layer: theirs, ours, and the dim of the weight that is sharded over the ranks.
LAYER = (
    ("input_layernorm", "attention_norm", None),
    (QKV, "attention.qkv", 0),
    ("attention.dense", "attention.output", 1),
    ("post_attention_layernorm", "mlp_norm", None),
    ("mlp.dense_h_to_4h", "mlp.up", 0),
    ("mlp.dense_4h_to_h", "mlp.down", 1),
)
# Modules that only contain others; 2019 and 2020 have different ones, and wrappers add "module".
CONTAINERS = {"module", "language_model", "embedding", "transformer", "encoder"}
# Modules and parameters that a BERT has and a GPT-2 does not.
BERT = {"pooler", "lm_head", "binary_head", "tokentype_embeddings"}

# Settings that a flag of import_megatron.py may give, and the values if neither the stored args nor
# flags do. The releases of 2019 keep no args, and no tensor shows the number of heads.
FLAGS: Mapping[str, int | float | None] = {
    "num_attention_heads": None,
    "layernorm_epsilon": 1e-5,
    "make_vocab_size_divisible_by": 128,
}
# Settings that only continued training needs; our defaults are used if args do not have them.
TRAINING = ("init_method_std", "attention_dropout", "hidden_dropout")


def find_files(source: Path) -> list[Path]:
    """Files of all ranks. source: a --save directory, the folder of an iteration, or one file.

    Raises UsageError for other folders, ValueError for a wrong pointer, FileNotFoundError if the
    file of a rank is missing.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UsageError("--from", source, "a file or directory that exists")
    folder, pointer = source, source / POINTER
    if pointer.is_file():
        text = pointer.read_bytes()[:100].decode("latin1").strip()
        if text != "release" and not re.fullmatch(r"[0-9]{1,9}", text):
            raise ValueError(f"{pointer} says {text!r}, not an iteration or 'release'")
        folder = source / (text if text == "release" else f"iter_{int(text):07d}")
    names = sorted(path.name for path in folder.glob("mp_rank_*"))
    if not names:
        allowed = f"a folder of Megatron-LM's --save, with mp_rank_00/{FILE} or {POINTER}"
        raise UsageError("--from", folder, allowed)
    if odd := [name for name in names if not re.fullmatch(r"mp_rank_\d\d", name)]:
        allowed = f"a checkpoint of --pipeline-model-parallel-size 1, without {odd[0]}"
        raise UsageError("--from", folder, allowed)
    count = int(names[-1].removeprefix("mp_rank_")) + 1
    files = [folder / f"mp_rank_{rank:02d}" / FILE for rank in range(count)]
    if missing := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing: {folder} has ranks up to {names[-1]}")
    return files


@dataclass(frozen=True)
class Rank:
    """Contents of one model-parallel rank's file; tensors have the names of 2019, and are views of
    the file."""

    file: Path
    tensors: Mapping[str, Tensor]
    args: Mapping[str, Any]
    version: float


def read_rank(file: Path) -> Rank:
    """Raises ValueError, naming the file, if it is damaged or not of a GPT-2."""
    saved = SavedFile(file)
    content = saved.content if isinstance(saved.content, dict) else {}
    if not isinstance(model := content.get("model"), dict):
        raise ValueError(f"{file} has no weights under 'model'; {FILE} of Megatron-LM has")
    args = content.get("args")
    args = args.state if isinstance(args, Placeholder) else args
    version = content.get("checkpoint_version") or 0
    if not isinstance(version, int | float) or not (version in (0, 1) or version >= 2):
        raise ValueError(f"{file} has checkpoint_version {version!r}; 0, 1, 2 and 3 are known")
    tensors: dict[str, Tensor] = {}
    for full, value in _leaves(file, model):
        parts = full.split(".")
        if bert := BERT.intersection(parts):
            raise ValueError(f"{file} is of a BERT, for it has a {bert.pop()}; a GPT-2 would work")
        while parts and parts[0] in CONTAINERS:
            parts.pop(0)
        name = ".".join(parts).replace(".self_attention.", ".attention.")
        if name in tensors:
            raise ValueError(f"{file} has {name} twice, once as {full}")
        tensors[name] = saved.tensor(value, full)
    for name in (WORDS, POSITIONS):
        if name not in tensors or tensors[name].dim() != 2:
            raise ValueError(f"{file} has no matrix {name}, so it is not of a GPT-2")
    return Rank(file, tensors, args if isinstance(args, dict) else {}, version)


def _leaves(file: Path, model: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every value that is not a dict. Raises ValueError if one dict stands
    in two places: a dict inside itself has no end."""
    waiting: list[tuple[str, Mapping[Any, Any]]] = [("", model)]
    seen: set[int] = set()
    while waiting:
        prefix, tree = waiting.pop()
        if id(tree) in seen:
            raise ValueError(f"{file} has {prefix:.100} twice: one dict stands in two places")
        seen.add(id(tree))
        for key, value in tree.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{key}.", value))
            else:
                yield f"{prefix}{key}", value


def config_of(ranks: Sequence[Rank], flags: Mapping[str, Any]) -> GPT2Config:
    """The model's config, from the shapes of the tensors, the stored args, and the flags (by name,
    None if not given). A setting that is given twice must be the same both times.

    Raises ValueError, naming the file or the flag, if they disagree, or if a flag is needed.
    """
    first, count = ranks[0], len(ranks)
    if first.args.get("apply_residual_connection_post_layernorm"):
        raise ValueError(
            f"{first.file} was trained with apply_residual_connection_post_layernorm; this "
            "project's residuals are taken before the norm"
        )
    positions, hidden = first.tensors[POSITIONS].shape
    numbers = {name.split(".")[1] for name in first.tensors if re.match(r"layers\.\d+\.", name)}
    settings: dict[str, Any] = {
        "num_layers": len(numbers) or 1,
        "hidden_size": hidden,
        "max_position_embeddings": positions,
    }
    derived = settings | {
        "padded_vocab_size": first.tensors[WORDS].shape[0] * count,
        "model_parallel_size": count,
        "tensor_model_parallel_size": count,
    }
    for rank in ranks:
        for name, expected in derived.items():
            if (stored := _number(rank, name)) not in (None, expected):
                raise ValueError(
                    f"{rank.file}: args have {name} {stored}, but the tensors that were found make "
                    f"{expected}; the files of all ranks of one checkpoint would work"
                )
        for name in (*FLAGS, *TRAINING):
            if (stored := _number(rank, name)) != (expected := _number(first, name)):
                raise ValueError(f"{rank.file}: args have {name} {stored}, of rank 0 {expected}")
    for name, default in FLAGS.items():
        stored, given = _number(first, name), flags[name]
        if None not in (stored, given) and stored != given:
            raise UsageError(flag(name), given, f"the {stored} that {first.file} was trained with")
        value = next((each for each in (stored, given, default) if each is not None), None)
        if value is None:
            allowed = f"given: {first.file} does not say it; of the released 345M model it is 16"
            raise UsageError(flag(name), None, allowed)
        settings[name] = value
    for name in TRAINING:
        if (stored := _number(first, name)) is not None:
            settings[name] = stored
    # Code that has this arg computes the exact GeLU unless it or openai_gelu selects the tanh form.
    if first.args.get("bias_gelu_fusion", True) is False and not first.args.get("openai_gelu"):
        settings["activation"] = "gelu"
    config = GPT2Config(**settings)
    if (heads := config.num_attention_heads) % count:
        allowed = f"a multiple of the {count} ranks of {first.file.parent.parent}"
        raise UsageError("--num-attention-heads", heads, allowed)
    return config


def _number(rank: Rank, name: str) -> int | float | None:
    value = rank.args.get(name)
    kinds = (int, float) if name in (*TRAINING, "layernorm_epsilon") else (int,)
    if value is None or type(value) in kinds:
        return value
    raise ValueError(f"{rank.file}: args have {name} {value!r:.100}, which is no number")


def names_of(num_layers: int) -> dict[str, tuple[str, int | None]]:
    """{their name: (ours, the dim that is sharded over the ranks)} of every tensor; the dim is None
    if every rank has the whole."""
    modules: list[tuple[str, str, int | None]] = [("final_layernorm", "final_norm", None)]
    for n in range(num_layers):
        for theirs, ours, dim in LAYER:
            modules.append((f"layers.{n}.{theirs}", f"transformer.layers.{n}.{ours}", dim))
    names: dict[str, tuple[str, int | None]] = {
        WORDS: ("word_embedding.weight", 0),
        POSITIONS: ("position_embedding.weight", None),
    }
    for theirs, ours, dim in modules:
        names[f"{theirs}.weight"] = f"{ours}.weight", dim
        names[f"{theirs}.bias"] = f"{ours}.bias", 0 if dim == 0 else None
    return names


def read_weights(ranks: Sequence[Rank], config: GPT2Config, vocab_size: int) -> dict[str, Tensor]:
    """Every parameter by our name, whole and in its stored dtype.

    Raises ValueError, naming the file, if tensors are missing, surplus or of another shape or
    dtype, if ranks differ in version or in a tensor that each has whole, or if `vocab_size` does
    not fit the rows of the embedding.
    """
    first, count = ranks[0], len(ranks)
    names = names_of(config.num_layers)
    dtype = first.tensors[WORDS].dtype
    for rank in ranks:
        if rank.version != first.version:
            raise ValueError(
                f"{rank.file} has checkpoint_version {rank.version:g}, {first.file} "
                f"{first.version:g}; all ranks of one checkpoint would work"
            )
        if missing := names.keys() - rank.tensors.keys():
            raise ValueError(f"{rank.file} has no {min(missing)}, which a GPT-2 needs")
        if surplus := rank.tensors.keys() - names.keys():
            raise ValueError(
                f"{rank.file} has a {min(surplus)}, which no GPT-2 of 2019 or 2020 has"
            )
        for name, tensor in rank.tensors.items():
            if tensor.dtype not in DTYPES.values() or tensor.dtype != dtype:
                known = ", ".join(map(str, DTYPES.values()))
                raise ValueError(
                    f"{rank.file}: {name} is {tensor.dtype}; all tensors of one of {known} work"
                )
    rows = first.tensors[WORDS].shape[0] * count
    multiple = config.make_vocab_size_divisible_by * count
    padded = ceil(vocab_size / multiple) * multiple
    if rows != padded:
        raise ValueError(
            f"the word embedding has {rows} rows; the tokenizer's {vocab_size} ids, padded to a "
            f"multiple of {config.make_vocab_size_divisible_by} x {count} ranks, make {padded}; "
            "the model's own --vocab-file and --merge-file would work, or its "
            "--make-vocab-size-divisible-by"
        )
    specs = sharding_specs(build_on_meta(config, serial_mesh(), vocab_size))
    weights: dict[str, Tensor] = {}
    for theirs, (ours, dim) in tqdm(names.items(), "reading", unit=" tensors"):
        shape = list(specs[ours].shape)
        if QKV in theirs:
            shape[:2] = [3 * config.hidden_size]  # ours are [3, h, ...]
        if theirs == WORDS:
            shape[0] = padded
        if dim is not None:
            shape[dim] //= count
        for rank in ranks:
            if list(rank.tensors[theirs].shape) != shape:
                raise ValueError(
                    f"{rank.file}: {theirs} is {list(rank.tensors[theirs].shape)}, not {shape}, as "
                    f"the embeddings and {count} ranks ask for; the files of all ranks of one "
                    "GPT-2 would work"
                )
        parts = [rank.tensors[theirs] for rank in ranks]
        # Each is copied, so that no weight depends on the file any more.
        if QKV in theirs:
            heads = config.num_attention_heads // count
            parts = [_in_order(part, heads, first.version) for part in parts]
            weights[ours] = torch.cat(parts, dim=1)
        elif dim is not None:
            weights[ours] = torch.cat(parts, dim=dim)[: specs[ours].shape[0]]  # without padding
        else:
            for part, rank in zip(parts, ranks, strict=True):
                if not torch.equal(part, parts[0]):
                    raise ValueError(
                        f"{theirs} differs between {first.file} and {rank.file}, though every "
                        "rank has the whole of it; the ranks of one checkpoint would work"
                    )
            weights[ours] = parts[0].clone()
    return weights


def _in_order(part: Tensor, heads: int, version: float) -> Tensor:
    """Reorders a rank's query_key_value [3h/t, ...] to [3, h/t, ...]. heads: number on the rank."""
    rest = part.shape[1:]
    size = part.shape[0] // (3 * heads)
    if version == 0:
        part = part.reshape(3, heads, size, *rest)
    elif version == 1:
        part = part.reshape(heads, size, 3, *rest).movedim(2, 0)
    else:
        part = part.reshape(heads, 3, size, *rest).movedim(1, 0)
    return part.reshape(3, heads * size, *rest)
