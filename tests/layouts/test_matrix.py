"""Every layout computes what one process computes, and divides the work (promise 1)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import groupby, product
from math import isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.dist import Pool
from tests.layouts.cover import (
    FACTORS,
    OF_CONTEXT,
    OF_IMAGES,
    OF_LLAMA,
    OF_USERS,
    UNMODIFIED,
    case_of,
    cover,
    every_row,
)
from tests.layouts.matrix import (
    GLOBAL_BATCH,
    TOLERANCES,
    Case,
    alone,
    counts_alone,
    differences,
    reference_of,
    run_cases,
    shape,
    undivided,
)
from tools.layouts.layout import parse_layout

AT_ONCE = 8  # cases of a call to the pool
# By the number of ranks: where checkpoints are loaded, each at one of them. A call has three of
# these layouts, whose meshes take longer to make than its cases to run, and one process.
OTHERS = {
    2: (
        *("pipeline=2", "data=2,zero=3", "data=2", "tensor=2,sequence"),
        *("data=2,zero=1", "context=2:p2p", "context=2,zero=2"),
    ),
    3: ("data=3,zero=3", "data=3", "data=3,zero=2"),
    4: (
        *("tensor=2,context=2,zero=1", "tensor=2,pipeline=2", "tensor=2,data=2,zero=3"),
        *("tensor=4,sequence", "data=4,zero=2", "tensor=4:2d", "data=2,pipeline=2"),
    ),
    8: (
        *("tensor=8:3d", "tensor=4:2d,data=2,zero=3"),
        *("tensor=2,data=2,pipeline=2", "tensor=8:2.5d:2"),
    ),
}
MODELS = FACTORS["model"] + OF_LLAMA["model"]
THEIRS = tuple(dict.fromkeys(case.model for case in UNMODIFIED))
Group = tuple[Case, ...]


def ranks(case: Case) -> int:
    return parse_layout(case.layout).ranks


@cache
def groups(is_full: bool) -> dict[Case, Group]:
    """The cases that run in the same call, by case."""
    cases = [*map(case_of, every_row() if is_full else cover())]
    cases += [*UNMODIFIED, *OF_USERS, *OF_IMAGES, *OF_CONTEXT]
    cases = sorted(dict.fromkeys(cases), key=lambda case: (ranks(case), case.layout))
    found: dict[Case, Group] = {}
    for _, each in groupby(cases, ranks):
        same = list(each)
        for start in range(0, len(same), AT_ONCE):
            group = tuple(same[start : start + AT_ONCE])
            found |= dict.fromkeys(group, group)
    return found


def case_id(case: Case) -> str:
    return case.name.replace(" ", "-")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        by_case = groups(metafunc.config.getoption("--full-matrix"))
        part, parts = map(int, metafunc.config.getoption("--part").split("/"))
        chosen = {*[*dict.fromkeys(by_case.values())][part - 1 :: parts]}
        cases = [case for case, group in by_case.items() if group in chosen]
        metafunc.parametrize("case", cases, ids=case_id)


def run_group(pool: Pool, group: Group, number: int, device: str) -> dict[Case, set[str]]:
    """The faults of each case, on any rank. number: of its group in the whole list."""
    names = OTHERS[ranks(group[0])]
    chosen = [names[(3 * number + each) % len(names)] for each in range(3)]
    others = [parse_layout(name) for name in (*chosen, "serial")]
    with TemporaryDirectory() as folder:
        cases = [(case, reference_of(case, torch.device(device))) for case in group]
        arguments = (cases, others, Path(folder), device)
        of_ranks = pool.run(ranks(group[0]), run_cases, *arguments)
    return {case: {each for of_rank in of_ranks for each in of_rank[case]} for case in group}


@cache
def outcomes(
    pool: Pool, group: Group, number: int, device: str
) -> dict[Case, set[str]] | Exception:
    """A failure of a group, which is that of each case, is reported once."""
    try:
        return run_group(pool, group, number, device)
    except Exception as error:
        return error


def test_a_layout_equals_one_process_and_divides_the_work(
    gloo: Pool, request: pytest.FixtureRequest, case: Case
) -> None:
    items = request.session.items
    asked = {each.callspec.params["case"] for each in items if each.function is request.function}
    of_case = groups(request.config.getoption("--full-matrix"))
    number = [*dict.fromkeys(of_case.values())].index(of_case[case])
    group = tuple(each for each in of_case[case] if each in asked)
    wrong = outcomes(gloo, group, number, request.config.getoption("--device"))
    if isinstance(wrong, Exception):
        raise wrong
    assert not wrong[case]


@pytest.mark.parametrize(
    ("model", "option"),
    [*product(MODELS, FACTORS["recomputation"]), *product(THEIRS, ("", "full"))],
)
def test_one_process_takes_what_the_formulas_say(model: str, option: str) -> None:
    case = Case("serial", model, frozenset(filter(None, [option])))
    expected = shape(case, CPU)
    assert not list(undivided(counts_alone(case), expected, on_cpu=True))


def test_the_cases_are_as_uneven_as_they_are_meant_to_be() -> None:
    plain, dropped = (Case("serial", "gpt2", frozenset(each)) for each in ([], ["dropout"]))
    for model in MODELS:
        counted = Case("serial", model).draw(GLOBAL_BATCH).loss_mask.sum(axis=1)
        assert len({*counted}) > 1, "a mean of means would pass"
    one, other = (alone(case, CPU) for case in (plain, dropped))
    assert abs(one.terms[0]["loss"] - other.terms[0]["loss"]) > 1e-3
    norm = torch.nn.utils.get_total_norm(one.gradients.values()).item()
    assert one.figures[0] == pytest.approx(norm, rel=1e-12)


SERIAL, CPU = Case("serial", "gpt2"), torch.device("cpu")


@pytest.mark.parametrize("layout", ["tensor=2", "tensor=4:2d", "data=2,zero=3", "pipeline=2"])
def test_a_run_that_is_not_divided_is_seen(layout: str) -> None:
    """No layout may compute, hold and send as much as one process."""
    counts, expected = counts_alone(SERIAL), shape(replace(SERIAL, layout=layout), CPU)
    seen = {each.partition(":")[0] for each in undivided(counts, expected, on_cpu=True)}
    assert seen >= {"matmul FLOPs", "parameter bytes", "saved bytes"}
    assert any("calls over" in each for each in seen)


def test_other_numbers_are_seen() -> None:
    """Half of a gradient, a step that is left out, the norm counted twice, a mean of means, NaN."""
    right = alone(SERIAL, CPU)
    name = "transformer.layers.0.mlp.up.weight"
    half, before = right.gradients[name] / 2, right.weights[name] - 1e-3 * right.gradients[name]
    wrong = {
        "gradients": replace(right, gradients=right.gradients | {name: half}),
        "weights": replace(right, weights=right.weights | {name: before}),
        "norm": replace(right, figures=[2**0.5 * each for each in right.figures]),
        "loss": replace(right, terms=[{"loss": each["loss"] + 1e-6} for each in right.terms]),
    }
    assert max(differences(right, right).values()) == 0
    for kind, found in wrong.items():
        seen = {
            each
            for each, value in differences(found, right).items()
            if value > TOLERANCES[torch.float64]
        }
        assert seen == {kind}
    without = replace(right, figures=[nan, *right.figures[1:]])
    assert isnan(differences(without, right)["norm"])
