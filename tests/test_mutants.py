"""The list of faults stays alive: its texts and tests are there. `python -m tests.mutants` shows
whether the tests catch them, which takes long."""

import ast
from functools import cache

import pytest

from tests import mutants
from tests.layouts.test_matrix import case_id, groups
from tests.mutants import EQUIVALENT, MUTANTS, ROOT, Mutant, parse

LISTED = parse(MUTANTS)


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


@cache
def cases() -> set[str]:
    """Names of those of tests/layouts."""
    return {case_id(each) for each in groups(is_full=False)}


@pytest.mark.parametrize("mutant", [*LISTED, *parse(EQUIVALENT)], ids=lambda each: each.name)
def test_a_mutant_is_a_change_that_can_be_made(mutant: Mutant) -> None:
    """Its text is there once, the changed file is Python, and its tests exist."""
    assert mutant.text != mutant.replacement
    ast.parse(mutant.patched())
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), file
        name, _, case = function.removesuffix("]").partition("[")
        assert not name or name in functions(file), test
        assert not case or case in cases(), test
    assert mutant.tests or mutant.reason


def test_mutants_have_names_of_their_own() -> None:
    names = [each.name for each in [*LISTED, *parse(EQUIVALENT)]]
    assert len({*names}) == len(names) > 250


SPLIT = """
@ megatron/data/order.py | data/test_order::test_every_document_is_in_one_split_in_proportion
caught
- for end in range(4)]
+ for end in (0, 1, 1, 3)]
survives
# a message of another test
- it gets none of {documents} DOCUMENTS
+ it gets some of {documents} documents
"""


def test_the_status_tells_of_survivors_and_of_lost_texts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "MUTANTS", SPLIT.replace("DOCUMENTS", "documents"))
    assert mutants.main(["--only", "caught"]) == 0
    assert mutants.main([]) == 1
    assert "SURVIVED survives" in capsys.readouterr().out
    monkeypatch.setattr(mutants, "MUTANTS", SPLIT)
    assert mutants.main(["--list"]) == 0
    assert mutants.main([]) == 2
