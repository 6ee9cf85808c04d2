"""What a layer keeps, as the benchmark counts it, against what is known of it."""

import pytest

from benchmarks.activations import rows
from benchmarks.cases import Case
from tools.planning.memory import GRANULARITIES


def test_what_is_cut_is_kept_and_sent_in_parts() -> None:
    case = Case(
        name="small", num_layers=1, hidden_size=64, heads=4, vocab_size=64, batch=2, sequence=32
    )
    stream = 2 * case.tokens * case.hidden_size  # bytes in bf16
    found = list(rows(case, 0.0))
    assert len(found) == len(GRANULARITIES) * 5
    alone = {each["recompute"]: each["kept_bytes"] for each in found[: len(GRANULARITIES)]}
    assert alone["full"] == stream
    for each in found:
        t, kept = each["tensor_parallel"], each["kept_bytes"]
        if each["sequence_parallel"]:
            assert kept == pytest.approx(alone[each["recompute"]] / t, rel=0.01)
        elif t > 1 and each["recompute"] == "full":
            assert kept == stream
        assert (each["sent_bytes"] > 0) == (t > 1)
