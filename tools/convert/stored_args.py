"""The model's settings, from the tensors' shapes, the args that are stored with them, and flags.

The releases of 2019 keep no args; then a flag gives the number of attention heads, which no tensor
shows. A setting that is given twice must be the same both times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.model import GPT2Config, ModelConfig
from megatron.errors import UsageError, flag
from tools.convert.ranks import Rank

# Settings that a flag of this program may give, and the values if neither args nor flags do.
FLAGS: Mapping[str, int | float | None] = {
    "num_attention_heads": None,
    "layernorm_epsilon": 1e-5,
    "make_vocab_size_divisible_by": 128,
}
# Settings that only continued training needs; our defaults are used if args do not have them.
TRAINING = ("init_method_std", "attention_dropout", "hidden_dropout")


def section_of(
    ranks: Sequence[Rank], given: Mapping[str, Any], sizes: Mapping[str, int]
) -> ModelConfig:
    """The config of the model. sizes: its whole dims by their letters in the table.

    Raises ValueError if args, flags and tensors disagree, or if a flag is needed.
    """
    first = ranks[0]
    _check_options(first)
    shown = {
        "num_layers": _count_layers(first),
        "hidden_size": sizes["h"],
        "max_position_embeddings": sizes["p"],
    }
    others = {
        "padded_vocab_size": sizes["v"],
        "model_parallel_size": len(ranks),
        "tensor_model_parallel_size": len(ranks),
    }
    for rank in ranks:
        _check_shown(rank, shown | others)
        for name in (*FLAGS, *TRAINING):
            if (value := _number(rank, name)) != (expected := _number(first, name)):
                raise ValueError(f"{rank.file}: args have {name} {value}, of rank 0 {expected}")
    chosen = {name: _choose(first, name, given.get(name)) for name in FLAGS}
    training = {name: value for name in TRAINING if (value := _number(first, name)) is not None}
    settings: dict[str, Any] = {**shown, **chosen, **training}
    # Code that has this arg computes the exact GeLU unless it or openai_gelu selects the tanh form.
    if first.args.get("bias_gelu_fusion", True) is False and not first.args.get("openai_gelu"):
        settings["activation"] = "gelu"
    section = GPT2Config(**settings)
    if section.num_attention_heads % len(ranks):
        raise UsageError(
            "--num-attention-heads",
            section.num_attention_heads,
            f"a multiple of the {len(ranks)} ranks of {first.file.parent.parent}",
        )
    return section


def _count_layers(rank: Rank) -> int:
    found = (re.match(r"layers\.(\d+)\.", name) for name in rank.tensors)
    return len({match[1] for match in found if match}) or 1


def _check_shown(rank: Rank, shown: Mapping[str, int]) -> None:
    for name, value in shown.items():
        stored = _number(rank, name)
        if stored is not None and stored != value:
            raise ValueError(
                f"{rank.file}: args have {name} {stored}, but the tensors that were found make "
                f"{value}; the files of all ranks of one checkpoint would work"
            )


def _choose(rank: Rank, name: str, given: int | float | None) -> int | float:
    stored = _number(rank, name)
    if stored is not None and given is not None and stored != given:
        allowed = f"the {stored} that {rank.file} was trained with"
        raise UsageError(flag(name), given, allowed, works=(flag(name), str(stored)))
    for value in (stored, given, FLAGS[name]):
        if value is not None:
            return value
    raise UsageError(
        flag(name), None, f"given: {rank.file} does not say it; of the released 345M model it is 16"
    )


def _number(rank: Rank, name: str) -> int | float | None:
    value = rank.args.get(name)
    kinds = (int, float) if name in (*TRAINING, "layernorm_epsilon") else (int,)
    if value is None or type(value) in kinds:
        return value
    raise ValueError(f"{rank.file}: args have {name} {value!r:.100}, which is no number")


def _check_options(rank: Rank) -> None:
    """Raise ValueError for options that change the model's function and are not supported here."""
    args = rank.args
    if args.get("apply_residual_connection_post_layernorm"):
        raise ValueError(
            f"{rank.file} was trained with apply_residual_connection_post_layernorm; this "
            "project's residuals are taken before the norm"
        )
