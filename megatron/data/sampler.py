"""Which samples a data-parallel rank reads next."""


def micro_batches(
    consumed: int,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
) -> list[range]:
    """Sample numbers of this rank's micro-batches of the step that starts at sample `consumed`.

    All ranks together read [consumed, consumed + global_batch_size), each number once, whatever
    the micro-batch and data-parallel sizes.
    """
    at_once = micro_batch_size * data_size
    assert global_batch_size % at_once == 0
    first = consumed + data_rank * micro_batch_size
    starts = range(first, first + global_batch_size, at_once)
    return [range(start, start + micro_batch_size) for start in starts]
