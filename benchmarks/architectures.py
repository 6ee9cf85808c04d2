"""Which architectures of transformers are exact when they are cut by their plans.

Of every one that predicts the next token and has a plan, of transformers or of this project,
a tiny model is cut over 2 and over 4 ranks and compared in fp64 with the unmodified one, as
tools.prove_plan does. Those with few key/value heads have 2, so that 4 ranks share them.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import json as json_library
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from megatron.config.huggingface import HuggingFaceConfig, HuggingFaceMaskedConfig
from megatron.data.files import write_atomically

SIZES = (2, 4)
MASKED = "masked words"
NO_LAYER = "no layer here cuts "
UNGROUPED = ("esmc",)  # whose keys and values have as many heads as queries
NOTES = "\n## Notes\n"


METHOD = (
    "Hybrids of linear attention (olmo_hybrid, qwen3_5) leave it whole on every rank, as their "
    "plans say; in a model as tiny as this it is nearly all of the FLOPs. Where there are 2 "
    "key/value heads each of 4 ranks computes one, which is why its share is above 25 %.",
    "Plans of transformers' that are wrong, and are mended here (MENDED in "
    "megatron/models/hf_plans.py): apertus (parameters of an activation between cut layers), "
    "gemma3n (the mean and the deviation of cut gates: logits off by 0.025 without an error), "
    "doge, esmc and neomme (attention that needs all heads).",
)


@dataclass(frozen=True)
class Row:
    """Of an architecture; difference and shares of the matmul FLOPs are of those that are exact."""

    name: str
    outcome: str  # exact, refused, or wrong: it ends with an error or differs
    reason: str = ""
    difference: float | None = None
    shares: tuple[float, ...] = ()  # of the busiest rank, by tensor size


def architectures() -> tuple[dict[str, HuggingFaceConfig], list[str]]:
    """({name: its config}, those without a plan)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    from transformers.utils.logging import set_verbosity_error

    from megatron.models.hf_plans import PLANS

    set_verbosity_error()  # of defaults that do not fit together
    found: dict[str, HuggingFaceConfig] = {}
    without = []
    for kind, names in (
        (HuggingFaceConfig, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (HuggingFaceMaskedConfig, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        is_masked = kind is HuggingFaceMaskedConfig
        for name in names:
            is_encoder = name in MODEL_FOR_MASKED_LM_MAPPING_NAMES
            if is_encoder != is_masked or f"{name}, {MASKED}" in found or name in found:
                continue
            if not (words_of(CONFIG_MAPPING[name]) or name in PLANS):
                without.append(name)
                continue
            text = json_library.dumps(described(name))
            full_name = f"{name}, {MASKED}" if is_masked else name
            found[full_name] = kind(hf_model=name, hf_config=text)
    return found, without


def words_of(config_class: Any) -> set[str]:
    """Of transformers' own plan, of the text model where there are several."""
    inside = (getattr(config_class, "sub_configs", None) or {}).values()
    plans = [getattr(each, "base_model_tp_plan", None) for each in (config_class, *inside)]
    return {word for plan in plans for word in (plan or {}).values()}


def described(name: str) -> dict[str, Any]:
    """A config.json with what a real one says and the defaults leave open."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = CONFIG_MAPPING[name]().to_dict()
    found: dict[str, Any] = {"model_type": name}
    heads, hidden = given.get("num_attention_heads"), given.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int)) or heads < 4:
        return found
    if "num_key_value_heads" in given and name not in UNGROUPED and "kv_lora_rank" not in given:
        found["num_key_value_heads"] = 2
    if given.get("head_dim", 0) is None:
        found["head_dim"] = hidden // heads
    if given.get("layer_types") and not given.get("rope_parameters"):
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        found["rope_parameters"] = dict.fromkeys(given["layer_types"], rope)
    return found


def rows() -> Iterator[Row]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from megatron.parallel.plan import REFUSED
    from tools.processes import on_ranks
    from tools.proofs import prove_at

    configs, _ = architectures()
    found, *_ = on_ranks(max(SIZES), prove_at, [*configs.values()], SIZES)
    for (name, config), outcomes in zip(configs.items(), found, strict=True):
        proofs = [each for each in outcomes if not isinstance(each, str)]
        reasons = [each for each in outcomes if isinstance(each, str)]
        words = words_of(CONFIG_MAPPING[config.described["model_type"]])
        refused = sorted({REFUSED[word] for word in words if word in REFUSED})
        if wrong := [each for each in proofs if each.wrong]:
            yield Row(name, "wrong", wrong[0].wrong[0])
        elif reasons and refused and "tiny model" in reasons[0]:
            yield Row(name, "refused", f"{NO_LAYER}{' or '.join(refused)}")
        elif reasons:
            yield Row(name, "refused", reasons[0])
        else:
            shares = tuple(each.flops[0] / each.flops[1] for each in proofs)
            yield Row(name, "exact", "", max(each.worst for each in proofs), shares)


def result(found: list[Row]) -> str:
    exact = [row for row in found if row.outcome == "exact"]
    worst = max((row.difference or 0.0 for row in exact), default=0.0)
    refused = Counter(
        row.reason.partition(NO_LAYER)[2].partition(",")[0]
        for row in found
        if row.outcome == "refused"
    )
    wrong = sum(row.outcome == "wrong" for row in found)
    others = refused.pop("", 0) + wrong
    each = ", ".join(f"{count} with {what}" for what, count in sorted(refused.items()))
    split = f"{wrong} wrong, {others - wrong} refused; the table has the reasons"
    rest = f" (of the other {others}: {split})" if others else ""
    return (
        f"{len(exact)} of {len(exact) + others} dense architectures that have a plan are exact at "
        f"t = 2 and 4{rest}:\nloss, logits and every gradient are the unmodified model's within "
        f"{worst:.0e} of their norm, in fp64.\nRefused by the name of a style are {each}."
    )


def page_of(found: list[Row], without: list[str], old: str) -> str:
    """old: the page so far, of which what stands below "## Notes" is kept."""
    from benchmarks.report import command, commit, markdown, processor

    lines = [
        [
            row.name,
            row.outcome,
            "" if row.difference is None else f"{row.difference:.0e}",
            *([f"{share:.0%}" for share in row.shares] or [""] * len(SIZES)),
            row.reason.replace("|", "/"),
        ]
        for row in sorted(found, key=lambda row: (row.outcome, row.name))
    ]
    import torch
    import transformers

    shares = [f"matmul FLOPs of a rank, t = {size}" for size in SIZES]
    header = ["architecture", "outcome", "largest difference", *shares, "reason"]
    parts = [
        "# Unmodified models of transformers, cut by their plans",
        result(found),
        f"    {command()}",
        f"commit {commit()}, {processor()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        " ".join((__doc__ or "").split()),
        markdown(header, lines),
        *METHOD,
        f"Without a plan, where `--plan FILE.toml` says how they are cut: {', '.join(without)}.",
    ]
    notes = old.partition(NOTES)[2].strip()
    speed = "How fast they train: [huggingface_speed.md](huggingface_speed.md)."
    return "\n\n".join([*parts, speed]) + "\n" + (f"{NOTES}\n{notes}\n" if notes else "")


def main(*, page: Path | None = None, json: Path | None = None) -> None:
    """Prove the plans of all architectures of transformers that have one, by tiny models.

    Args:
        page: The page that is written; what stands below its "## Notes" is kept.
        json: A file for a row per architecture.
    """
    found, (_, without) = [*rows()], architectures()
    print(result(found))
    if json is not None:
        text = json_library.dumps([vars(row) for row in found], indent=1) + "\n"
        write_atomically(json, text.encode())
    if page is not None:
        old = page.read_text() if page.exists() else ""
        write_atomically(page, page_of(found, without, old).encode())


if __name__ == "__main__":
    tyro.cli(main)
