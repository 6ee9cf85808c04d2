"""The cases: every valid product of the factors, and a cover of what they join."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product

from megatron.config.parallel import TrainingParallelConfig
from tests.layouts.matrix import GLOBAL_BATCH, Case
from tools.layouts.layout import parse_layout

# The values of each factor; "" for what is the default.
FACTORS: dict[str, tuple[str, ...]] = {
    "layout": (
        "tensor=2",
        "tensor=4",
        "data=2",
        "tensor=2,data=2",
        "tensor=2,sequence",
        "tensor=4,sequence",
        "tensor=2,data=2,sequence",
    ),
    "model": ("gpt2", "bert", "bert-post-ln"),
    "precision": ("", "fp32", "bf16", "fp16"),
    "recomputation": ("", "full", "selective"),
    "dropout": ("", "dropout"),
    "micro-batches": ("", "accumulate"),
    "mask": ("", "documents"),
    "head": ("", "untied"),
    "loss": ("", "whole-logits"),
}
# Layouts whose parts the other layouts of pipelines show one by one: a case of each.
TOGETHER = (
    "tensor=2,pipeline=2,virtual=2",
    "data=2,pipeline=2,virtual=2",
    "tensor=2,pipeline=2,schedule=zb-h1",
    "data=2,pipeline=2,schedule=zb-h1",
    "tensor=2,pipeline=2,schedule=zb-h1,sequence",
)
# Pipelines: micro-batches are so many, of one sample each.
OF_PIPELINES = FACTORS | {
    "layout": (
        "pipeline=2",
        "pipeline=4",
        "tensor=2,pipeline=2",
        "data=2,pipeline=2",
        "tensor=2,pipeline=2,sequence",
        "pipeline=2,virtual=2",
        "pipeline=4,schedule=zb-h1",
        "pipeline=2,schedule=gpipe",
        *TOGETHER,
    ),
    "micro-batches": tuple("4123567"),
    "mask": ("", "documents", "unscored"),
}
# Llama; a pipeline has 3 micro-batches.
OF_LLAMA = FACTORS | {
    "layout": (
        "tensor=2",
        "tensor=4",
        "data=2",
        "tensor=2,sequence",
        "tensor=4,sequence",
        "pipeline=2",
        "tensor=2,pipeline=2",
        "pipeline=2,virtual=2",
        "tensor=2,pipeline=2,schedule=zb-h1,sequence",
    ),
    "model": ("llama", "llama-even"),
    "micro-batches": ("", "accumulate", "3"),
    "mask": ("", "documents", "padded"),
}
# ZeRO; a pipeline has 3 micro-batches.
OF_ZERO = FACTORS | {
    "layout": (
        *(
            f"{layout},zero={stage}{sequence}"
            for stage in (1, 2, 3)
            for layout, sequence in (
                ("data=2", ""),
                ("data=4", ""),
                ("data=3", ""),
                ("tensor=2,data=2", ""),
                ("tensor=2,data=2", ",sequence"),
            )
        ),
        "data=2,pipeline=2,zero=1",
    ),
    "model": ("gpt2", "bert", "llama"),
    "micro-batches": ("", "accumulate", "3"),
}
# 2D, 2.5D and 3D; a pipeline has 3 micro-batches.
OF_GRIDS = FACTORS | {
    "layout": (
        "tensor=4:2d",
        "tensor=8:2.5d:2",
        "tensor=8:3d",
        "tensor=4:2d,data=2",
        "tensor=4:2d,pipeline=2",
        "tensor=4:2d,data=2,zero=1",
        "tensor=4:2d,data=2,zero=2",
        "tensor=4:2d,data=2,zero=3",
        "tensor=8:2.5d:2,zero=2",
    ),
    "model": ("gpt2", "bert", "bert-post-ln", "llama", "llama-even"),
    "micro-batches": ("", "accumulate", "3"),
    "mask": ("", "documents", "padded"),
}
# Unmodified models of transformers: each of them, and what is done with a model.
UNMODIFIED = (
    Case("tensor=2", "hf-gpt2", frozenset(["dropout", "accumulate"])),
    Case("tensor=2", "hf-llama", frozenset(["whole-logits", "full"])),
    Case("tensor=2", "hf-qwen3", frozenset(["fp32", "documents"])),
    Case("tensor=2", "hf-mistral", frozenset(["dropout", "padded"])),
    Case("tensor=2", "hf-gpt_neox", frozenset(["dropout", "full"])),
    Case("tensor=2", "hf-bert", frozenset(["dropout", "full", "accumulate"])),
    Case("tensor=4", "hf-llama", frozenset(["padded"])),
    Case("tensor=4", "hf-qwen3", frozenset(["dropout", "full"])),
    Case("tensor=2,data=2", "hf-gpt2", frozenset(["documents", "full", "dropout"])),
    Case("tensor=2,data=2", "hf-llama", frozenset(["bf16", "accumulate"])),
    Case("data=2,zero=2", "hf-gpt2", frozenset(["dropout"])),
    Case("data=2,zero=3", "hf-llama", frozenset(["accumulate", "full"])),
    Case("tensor=2,data=2,zero=3", "hf-bert", frozenset(["dropout", "bf16"])),
)
# A kind of model that the project does not know, of one layer.
OF_USERS = (
    Case("tensor=2", "own-kind-even", frozenset(["accumulate"]), layers=1),
    Case("tensor=4", "own-kind", frozenset(["dropout"]), layers=1),
    Case("tensor=2,data=2,sequence", "own-kind", frozenset(["fp32"]), layers=1),
    Case("data=2,zero=2", "own-kind", frozenset(["accumulate"]), layers=1),
)
# Context parallelism, for the full product; a pipeline has 3 micro-batches.
WITH_CONTEXT = FACTORS | {
    "layout": tuple(
        layout.replace("context=2", f"context=2{kind}").replace("context=4", f"context=4{kind}")
        for kind in ("", ":p2p")
        for layout in (
            "context=2",
            "context=4",
            "tensor=2,context=2",
            "tensor=2,context=2,sequence",
            "context=2,data=2",
            "context=2,pipeline=2",
            "context=2,zero=1",
            "context=2,data=2,zero=3",
        )
    ),
    "model": ("gpt2", "bert", "llama", "llama-even"),
    "micro-batches": ("", "accumulate", "3"),
}
# A cover of it, and of ViT.
OF_CONTEXT = (
    Case("context=2", "gpt2"),
    Case("context=2:p2p", "gpt2"),
    Case("context=4", "gpt2", frozenset(["documents", "dropout"])),
    Case("context=4:p2p", "gpt2", frozenset(["documents", "dropout"])),
    Case("context=4", "llama-even", frozenset(["documents", "full"])),
    Case("context=4:p2p", "llama", frozenset(["padded", "dropout", "accumulate"])),
    Case("tensor=2,context=2", "llama", frozenset(["dropout", "selective"])),
    Case("tensor=2,context=2:p2p", "llama", frozenset(["documents", "untied"])),
    Case("tensor=2,context=2,sequence", "bert", frozenset(["dropout", "full"])),
    Case("tensor=2,context=2:p2p,sequence", "gpt2", frozenset(["dropout", "full", "accumulate"])),
    Case("context=2,data=2", "bert", frozenset(["accumulate"])),
    Case("context=2:p2p,data=2", "gpt2", frozenset(["documents", "fp32"])),
    Case("context=2,pipeline=2", "gpt2", frozenset(["dropout", "accumulate"]), 3, 3),
    Case("context=2:p2p,pipeline=2", "bert", frozenset(["dropout", "accumulate"]), 3, 3),
    Case("context=2,zero=1", "llama-even", frozenset(["dropout", "accumulate"])),
    Case("context=2:p2p,zero=3", "bert-post-ln", frozenset(["accumulate", "full"])),
    Case("context=2,data=2,zero=3", "gpt2", frozenset(["dropout", "selective"])),
    Case("context=2:p2p,data=2,zero=2", "llama", frozenset(["accumulate", "bf16"])),
    Case("context=2", "bert-post-ln", frozenset(["selective", "bf16"])),
    Case("context=2:p2p", "bert", frozenset(["fp16", "dropout"])),
    Case("context=2", "vit-mean", frozenset(["dropout", "selective"])),
    Case("context=2:p2p", "vit-mean", frozenset(["accumulate", "full"])),
    Case("context=2", "llama", frozenset(["whole-logits", "fp32"])),
    Case("context=2:p2p", "gpt2", frozenset(["whole-logits", "unscored", "untied"])),
)
# ViT: each mode of tensor parallelism, and what else a model goes through.
OF_IMAGES = (
    Case("tensor=2", "vit", frozenset(["dropout"])),
    Case("tensor=2,sequence", "vit-mean", frozenset(["accumulate", "full"])),
    Case("data=2", "vit-mean", frozenset(["dropout", "bf16"])),
    Case("pipeline=2", "vit", frozenset(["dropout", "accumulate"]), samples=3, layers=3),
    Case("tensor=4:2d", "vit", frozenset(["dropout", "accumulate"])),
    Case("tensor=8:2.5d:2", "vit-mean", samples=8),
    Case("tensor=8:3d", "vit", frozenset(["dropout", "full"]), samples=8),
    Case("tensor=2,data=2,zero=3", "vit", frozenset(["accumulate", "selective"])),
)
# Factors of models that predict the next token.
OF_TEXT = {"documents", "padded", "unscored", "whole-logits"}
Row = tuple[str, ...]


def is_valid(row: Row) -> bool:
    if ("full" in row and "zb-h1" in row[0]) or ("unscored" in row and "1" in row):
        return False
    if "p2p" in row[0] and "selective" in row:  # the ring keeps no probabilities
        return False
    # Factors of micro-batches, in pipelines.
    of_one_number = row[1] in OF_LLAMA["model"] or any(
        word in row[0] for word in ("zero", ":", "context")
    )
    if of_one_number and ("pipeline" in row[0]) != ("3" in row):
        return False
    return not row[1].startswith("bert") or not OF_TEXT & {*row}


def rows_of(factors: Mapping[str, tuple[str, ...]]) -> Iterator[Row]:
    return filter(is_valid, product(*factors.values()))


def every_row() -> list[Row]:
    factors = (FACTORS, OF_PIPELINES, OF_LLAMA, OF_ZERO, OF_GRIDS, WITH_CONTEXT)
    return [row for each in factors for row in rows_of(each)]


def joined(row: Row) -> Iterator[object]:
    """Combinations that a row shows: all pairs of values, and more where layouts have failed."""
    layout, values = row[0], dict(zip([*FACTORS][1:], row[1:], strict=True))
    words = tuple(word for word in ("tensor", "data", "sequence") if word in layout)
    yield from combinations(values.items(), 2)
    yield from product(words, values.items())
    yield from product(words, [(values["model"], values["dropout"])])
    if not values["precision"]:
        for name in ("model", "recomputation", "dropout", "micro-batches"):
            yield words, name, values[name]


def joined_by_pipelines(row: Row) -> Iterator[object]:
    """The values of most factors for each layout and schedule; numbers of micro-batches, up to 5,
    by that of the ranks, and whether they are fewer or fill whole rounds; other cases show pairs
    without a pipeline."""
    values = dict(zip(FACTORS, row, strict=True))
    layout, m = values["layout"], int(values["micro-batches"])
    p = parse_layout(layout).size("pipeline")
    schedule = p, "virtual" in layout, layout.partition("schedule=")[2]
    if layout in TOGETHER:  # with dropout, and a last group that is not full
        if values["dropout"] and not values["precision"] and m > p and m % p:
            yield layout
        return
    if m > 5:
        return
    yield layout, values["model"] == "gpt2"
    yield layout, values["dropout"]
    for name in ("recomputation", "head"):
        yield schedule, name, values[name]
    yield schedule, m < p, m % p == 0
    yield p, m
    for name in ("model", "mask"):
        yield schedule[:2], name, values[name]
    yield schedule[1], values["precision"]
    yield schedule, values["mask"] == "unscored"
    yield "tensor" in layout, values["loss"]
    yield values["head"], values["model"], values["dropout"]


def joined_by_llama(row: Row) -> Iterator[object]:
    """Both numbers of heads for each layout; the values of most factors for each form; pairs of
    those that attention joins."""
    values = dict(zip(FACTORS, row, strict=True))
    layout = values["layout"]
    form = "sequence" in layout, "tensor" in layout
    if "virtual" in layout:  # a case of it
        if values["dropout"] and not values["precision"]:
            yield layout
        return
    yield layout, "tensor" in layout and "pipeline" not in layout and values["model"]
    if "schedule" in layout:  # a case of it
        return
    for name in ("recomputation", "dropout", "head", "mask"):
        yield form, name, values[name]
    yield values["mask"], values["recomputation"]
    for name in ("precision", "mask", "recomputation"):
        yield values["model"], name, values[name]
    yield "tensor" in layout, values["loss"]
    yield values["micro-batches"]


def joined_by_zero(row: Row) -> Iterator[object]:
    """The values of most factors for each stage; each layout that no other one shows; pairs of the
    factors that decide when a gradient comes, and where weights are gathered."""
    values = dict(zip(FACTORS, row, strict=True))
    layout, stage = values["layout"], parse_layout(values["layout"]).zero
    if "pipeline" in layout:  # a case of it
        if values["dropout"] and not values["precision"]:
            yield layout
        return
    if "data=4" in layout or ("tensor" in layout and "sequence" not in layout):
        return
    yield layout
    for name in FACTORS:
        if name != "layout":
            yield stage, name, values[name]
    if not values["precision"]:
        for name in ("recomputation", "micro-batches"):
            yield values["model"], name, values[name]
        yield stage, values["micro-batches"], values["head"]


def joined_by_grids(row: Row) -> Iterator[object]:
    """2D, which 4 ranks show: the values of each factor. 3D: the factors that meet in attention,
    which holds other samples than were read. 2.5D, which is 2D x data: the models, and one case of
    each combination."""
    values = dict(zip(FACTORS, row, strict=True))
    layout = parse_layout(values["layout"])
    if layout.sizes.keys() != {"tensor"} or layout.zero:
        is_another = "pipeline" in layout.sizes or layout.zero == 3 or layout.depth > 1
        if is_another and values["dropout"] and values["micro-batches"] and not values["precision"]:
            yield values["layout"]
        return
    if layout.mode == "2.5d":
        yield layout.mode, values["model"].partition("-")[0]
        return
    for name in [*FACTORS][1:] if layout.mode == "2d" else ["dropout"]:
        yield layout.mode, name, values[name]
    yield layout.mode, bool(values["mask"])
    if not values["precision"]:
        yield layout.mode, values["model"].partition("-")[0]


def chosen(rows: Mapping[Row, Iterator[object]], first: list[Row]) -> list[Row]:
    """The first ones; then greedily few rows, until all is shown that the rows can show."""
    bits: dict[object, int] = {}
    shown = {
        row: sum(1 << bits.setdefault(each, len(bits)) for each in {*shows})
        for row, shows in rows.items()
    }
    left, found = (1 << len(bits)) - 1, []
    while left:
        best = (
            first.pop(0) if first else max(shown, key=lambda row: (shown[row] & left).bit_count())
        )
        left &= ~shown[best]
        found.append(best)
    return found


def cover() -> list[Row]:
    """Every layout with GPT-2 and no option, and few rows that show what can be shown."""
    rows = {row: joined(row) for row in rows_of(FACTORS)}
    plain = [row for row in rows if row[1] == "gpt2" and not any(row[2:])]
    of_pipelines = {row: joined_by_pipelines(row) for row in rows_of(OF_PIPELINES)}
    of_llama = {row: joined_by_llama(row) for row in rows_of(OF_LLAMA)}
    of_zero = {row: joined_by_zero(row) for row in rows_of(OF_ZERO)}
    of_grids = {row: joined_by_grids(row) for row in rows_of(OF_GRIDS)}
    others = (of_pipelines, of_llama, of_zero, of_grids)
    return [*chosen(rows, plain), *(row for each in others for row in chosen(each, []))]


def case_of(row: Row) -> Case:
    layout, model, *options = row
    sizes = parse_layout(layout)
    readers = TrainingParallelConfig(**sizes.settings).batch_parallel_size(sizes.ranks)
    if sizes.size("pipeline") == 1:
        most = max(GLOBAL_BATCH, 2 * readers)
        return Case(layout, model, frozenset(filter(None, options)), samples=most)
    (number,) = {*options} & {*OF_PIPELINES["micro-batches"]}
    return Case(
        layout,
        model,
        frozenset(["accumulate", *filter(None, options)]) - {number},
        samples=int(number) * readers,
        layers=sizes.size("pipeline") * sizes.virtual + 1,  # which the stages do not divide
    )
