"""Who is behind, from where each rank stands; no processes."""

from dataclasses import replace

from megatron.train.watch.blame import Call, Standing, behind, explain, find_fault, find_waits

CURE = "or wait longer"

# t = 2, d = 2: the ranks of each one's groups.
MEMBERS = [
    {"tensor": [rank - rank % 2, rank - rank % 2 + 1], "data": [rank % 2, rank % 2 + 2]}
    | {"peers": [0, 1, 2, 3]}
    for rank in range(4)
]


def stand(rank: int, tensor: int, data: int, *waits: str, peers: int = 0) -> Standing:
    counts = {"tensor": tensor, "data": data, "peers": peers}
    return Standing(
        who=f"R{rank}",
        counts=counts,
        members=MEMBERS[rank],
        waits=[Call(axis, counts[axis], "all_reduce of [2] Float") for axis in waits],
        stack=f"stack of {rank}",
    )


def told(standings: dict[int, Standing], reason: str = "still") -> tuple[str, str]:
    fault = find_fault(standings)
    assert fault is not None
    return explain(standings, fault, reason, CURE)


def test_waits_lead_to_the_rank_that_waits_for_nobody() -> None:
    ranks = [stand(0, 6, 5, "tensor"), stand(1, 5, 5), stand(2, 6, 6, "data")]
    standings = dict(enumerate([*ranks, stand(3, 6, 6, "data")]))
    assert behind(find_waits(standings)) == [1]
    headline, text = told(standings, "nothing moved for 5 s")
    assert headline == "nothing moved for 5 s: R1 is behind"
    assert "rank 0 waits for it in collective 6 on the tensor axis, all_reduce of [2]" in text
    assert "rank 3 waits for it in collective 6 on the data axis" in text
    assert "stack of 1" in text
    assert "stack of 0" not in text
    assert text.endswith(CURE)


def test_who_is_behind_but_moves_is_at_work_until_it_was_asked_six_times() -> None:
    late = replace(stand(1, 5, 5), moves=True)
    standings = {0: stand(0, 6, 5, "tensor"), 1: replace(late, rounds=5)}
    assert find_fault(standings) is None
    standings[1] = replace(late, rounds=6)
    headline, text = told(standings)
    assert headline == "still: R1 is behind"
    assert "it moves in Python, but was asked 6 times in vain" in text


def test_who_moves_is_not_named_beside_who_does_not() -> None:
    standings = {0: stand(0, 6, 6, "tensor", "data"), 1: replace(stand(1, 5, 5), moves=True)}
    standings |= {2: stand(2, 5, 5), 3: stand(3, 6, 6, "tensor")}
    assert told(standings)[0] == "still: R2 is behind"


def test_a_silent_rank_does_not_move_though_its_last_beat_did() -> None:
    standings = {0: stand(0, 6, 5, "tensor"), 1: replace(stand(1, 5, 5), stack=None, moves=True)}
    headline, text = told(standings)
    assert headline == "still: R1 is behind"
    assert CURE not in text


def test_a_circle_in_which_a_thread_still_writes_is_none() -> None:
    standings = {0: stand(0, 6, 5, "tensor"), 1: stand(1, 5, 6, "data")}
    standings |= {2: stand(2, 5, 6, "data"), 3: stand(3, 6, 5, "tensor")}
    standings[2] = replace(standings[2], moves=True)
    assert find_fault(standings) is None


def test_a_silent_rank_is_named_though_nobody_waits_for_it() -> None:
    standings = {rank: stand(rank, 5, 5) for rank in range(3)}
    standings[3] = Standing("R3", {"tensor": 5, "data": 4, "peers": 0}, MEMBERS[3])
    headline, text = told(standings)
    assert headline == "still: R3 is behind"
    assert "it does not answer" in text


def test_a_circle_is_broken_where_a_step_leaves_something_out() -> None:
    """Rank 1 skipped a collective over the tensor axis and waits where all meet."""
    standings = {0: stand(0, 6, 6, "tensor"), 1: stand(1, 5, 6, "peers", peers=1)}
    standings |= {2: stand(2, 6, 6, "peers", peers=1), 3: stand(3, 6, 6, "peers", peers=1)}
    assert behind(find_waits(standings)) == []
    assert told(standings)[0] == "still: R1 is behind"


def test_ranks_that_wait_for_each_other_are_all_named() -> None:
    """Ranks 0 to 3 wait along tensor, data, tensor, data; nobody is behind all others."""
    standings = {0: stand(0, 6, 5, "tensor"), 1: stand(1, 5, 6, "data")}
    standings |= {2: stand(2, 5, 6, "data"), 3: stand(3, 6, 5, "tensor")}
    headline, text = told(standings)
    assert headline == "still: R0, R1, R2, R3 wait for each other"
    assert all(f"stack of {rank}" in text for rank in range(4))
    assert CURE not in text


def test_where_nobody_waits_the_stacks_are_shown() -> None:
    standings = {rank: stand(rank, 5, 5) for rank in range(4)}
    headline, text = told(standings)
    assert headline == "still: no rank waits for another; stacks of R0, R1, R2, R3"
    assert "stack of 2" in text
    standings[2] = replace(standings[2], moves=True)
    assert find_fault(standings) is None
