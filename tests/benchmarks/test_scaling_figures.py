"""Figures, rows and picture of the scaling study, from seconds that are given."""

from typing import Any

import pytest

from benchmarks.scaling_configurations import STRONG_SCALING, studies
from benchmarks.scaling_figures import Account, Peak, Result, find_peak, record, shares
from benchmarks.scaling_report import tables
from tools.planning.figure5 import Study
from tools.planning.hardware import load_hardware
from tools.planning.parameters import whole
from tools.planning.software import THIS_PROJECT

PROFILED = {"step_seconds": 2.0, "tensor": {"seconds": 0.5, "exposed_seconds": 0.2}}
POINTS = studies(2, is_small=True)
ABOUT = {
    "cpu": "a CPU",
    "cores": 2,
    "torch": "2",
    "device": "cpu",
    "miniature": True,
    "processes": 2,
    "threads_per_process": 1,
    "rounds": 2,
    "steps_of_a_round": 2,
    "warm_up_steps": 1,
    "command": "torchrun",
    "warnings": [],
}


def account(**changes: Any) -> Account:
    given: dict[str, Any] = {"precision": "fp32", "hardware": None, "peak": None}
    return Account(**given | changes)


def results(**reasons: str) -> dict[str, Result]:
    """A step takes 2 and then 4 seconds on one rank, 2.5 on two. reasons: by rank, r1, r2, ..."""
    found = {}
    for each in POINTS:
        ranks = each.configuration.ranks
        reason = reasons.get(f"r{ranks}", "takes 4 ranks" if ranks > 2 else None)
        seconds = [[2.0, 2.0], [4.0, 4.0]] if ranks == 1 else [[2.5, 2.5], [2.5, 2.5]]
        profiled = PROFILED if ranks == 2 else None
        found[each.configuration.name] = Result(
            rounds=[] if reason else seconds, communication=profiled, reason=reason
        )
    return found


def test_every_round_is_compared_with_its_own_single_rank() -> None:
    found = record(account(), POINTS, results())
    one, two = POINTS[0].configuration.shape("fp32"), POINTS[1].configuration.shape("fp32")
    parameters = 100 * whole(two) / (2 * whole(one))
    base, weak = found["points"][:2]
    assert base["measured"] == {"median": 100, "p10": 100, "p90": 100}
    assert weak["measured"]["median"] == pytest.approx(parameters * (2 / 2.5 + 4 / 2.5) / 2)
    assert weak["measured"]["p10"] < weak["measured"]["p90"]
    (strong,) = (
        each
        for each in found["points"]
        if each["study"] == "strong scaling" and each["paper"] == 1.64
    )
    assert strong["measured"]["median"] == pytest.approx((2 / 2.5 + 4 / 2.5) / 2)
    # Copies train as many more samples, and so are not divided by.
    (copies,) = (each for each in found["points"] if each["paper"] == 96)
    assert copies["measured"]["median"] == pytest.approx(100 * (2 / 2.5 + 4 / 2.5) / 2)


def test_tflops_count_recomputation_and_mfu_does_not() -> None:
    peak = Peak(value=1e9, source="said")
    found = record(account(peak=peak), POINTS, results())["configurations"]
    own = found[POINTS[1].configuration.name]
    n, h, layers, s, v = 8 * 128, own["hidden"], own["layers"], 128, 1600
    forward = layers * (24 * n * h**2 + 4 * n * s * h)
    logits = 2 * n * h * v
    assert own["tflops"] == pytest.approx((4 * forward + 3 * logits) / (2 * 2.5) / 1e12)
    assert own["mfu"] == pytest.approx(3 * (forward + logits) / (2 * 2.5 * 1e9))
    assert own["seconds"] == {"median": 2.5, "p10": 2.5, "p90": 2.5}
    assert own["tokens_per_second"] == pytest.approx(n / 2.5)


def test_shares_are_those_of_the_profiled_step() -> None:
    found = shares(PROFILED)
    assert found is not None
    assert found["tensor"]["share"] == 0.25
    assert found["tensor"]["exposed_share"] == 0.1
    assert shares(None) is None


def test_what_has_no_figures_has_a_reason() -> None:
    found = record(account(), POINTS, results(r2="out of memory: so much"))
    for each in found["points"]:
        own = found["configurations"][each["configuration"]]
        assert (each["measured"] is None) == (own["ranks"] != 1)
        assert bool(each["reason"]) == (own["ranks"] != 1)
    assert "| 2 x 1 | not measured: out of memory: so much |" in tables(found)
    assert "| 4 x 1 | not measured: takes 4 ranks |" in tables(found)
    found = record(account(), POINTS, results(r1="out of memory: one"))
    assert found["points"][1]["reason"] == "no baseline: out of memory: one"
    assert found["points"][1]["measured"] is None
    assert "seconds" in found["configurations"][found["points"][1]["configuration"]]


def test_the_prediction_is_the_planners() -> None:
    hardware = load_hardware("cpu")
    found = record(account(hardware=hardware, precision="fp16"), POINTS, results())
    study, one = Study(hardware), POINTS[0].configuration.shape("fp16")
    for point, row in zip(POINTS, found["points"], strict=True):
        shape = point.configuration.shape("fp16")
        seconds = found["configurations"][row["configuration"]]["predicted_seconds"]
        assert seconds == study.seconds(shape, THIS_PROJECT)
        if point.study == STRONG_SCALING:
            assert row["predicted"] == pytest.approx(study.seconds(one, THIS_PROJECT) / seconds)
        else:
            assert row["predicted"] == pytest.approx(study.efficiency(shape, THIS_PROJECT, one))


def test_a_peak_is_only_that_of_a_known_device() -> None:
    assert find_peak("cpu", None, "fp32") is None
    with pytest.raises(ValueError, match="no peak in bf16; --dtype fp16 or --dtype fp32 would"):
        find_peak("cpu", load_hardware("dgx2h"), "bf16")
    known = find_peak("cpu", load_hardware("h200"), "bf16")
    assert known is not None
    assert known.value == pytest.approx(989e12, rel=0.01)
    assert len(known.source) > 10
    with pytest.raises(ValueError, match="no peak in bf16"):
        find_peak("cuda", load_hardware("dgx2h"), "bf16")
