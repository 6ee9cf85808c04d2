"""The layers of each virtual stage of a pipeline. No torch."""

from __future__ import annotations

from megatron.parallel.schedules import consecutive


def head_weight(hidden: int, seq_length: int, vocab_size: int) -> float:
    """Cost of the head, in transformer layers: V / (12 h (1 + s/(6h))).

    The forward of a layer takes 24 s h^2 (1 + s/(6h)) floating-point operations, that of the logits
    2 s h V (arXiv 2104.04473, appendix). The backward of each takes twice as many.
    """
    return vocab_size / (12 * hidden * (1 + seq_length / (6 * hidden)))


def partition(
    layers: int, stages: int, *, head: float, first: int | None = None, last: int | None = None
) -> tuple[range, ...]:
    """Consecutive layers for each virtual stage, at least one, that minimise the largest cost of a
    stage. Layers are otherwise spread as evenly as possible; earlier stages get the remainder.

    head: cost of the last stage beyond its layers, in layers. The embedding of the first stage, a
    look-up, costs next to nothing. first, last: number of layers of these stages. Raises ValueError
    if that is not possible.
    """
    fixed = {stage: size for stage, size in ((0, first), (stages - 1, last)) if size is not None}
    sizes = [fixed.get(stage, 1) for stage in range(stages)]
    left = layers - sum(sizes)
    clash = stages == 1 and None not in (first, last) and first != last
    if stages < 1 or clash or min(sizes) < 1 or left < 0 or (left > 0 and len(fixed) == stages):
        asked = "".join(f", {size} on stage {stage}" for stage, size in fixed.items())
        raise ValueError(f"{layers} layers do not fit {stages} stages of 1 or more{asked}")
    costs = [float(size) for size in sizes]
    costs[-1] += head
    for _ in range(left):
        stage = min(range(stages), key=lambda each: (each in fixed, costs[each]))
        sizes[stage] += 1
        costs[stage] += 1
    return consecutive(sizes)


def partition_uniform(layers: int, stages: int, chunks: int = 1) -> tuple[range, ...]:
    """Colossal-AI's partition_uniform: chunks have equally many layers. Each chunk is divided over
    the ranks as evenly as possible; later ranks get the remainder.

    stages: number of virtual stages; each rank has `chunks` of them. Raises ValueError if `chunks`
    does not divide layers or stages, or there are fewer layers than stages.
    """
    if layers % chunks or stages % chunks or layers < stages:
        chunked = f"{chunks} chunks must divide both, and each stage has 1 or more"
        raise ValueError(f"{layers} layers, {stages} stages: {chunked}")
    ranks = stages // chunks
    small, larger = divmod(layers // chunks, ranks)
    return consecutive([small + (rank >= ranks - larger) for rank in range(ranks)] * chunks)
