"""Plans in text: what they mean, and what is refused."""

from functools import partial

from megatron.huggingface.plan import (
    Column,
    Local,
    PlanError,
    Row,
    Summed,
    Vocabulary,
    Whole,
    read_plan,
)
from tests.refusals import refusal


def test_a_style_in_text() -> None:
    for text, style in (
        ('"column"', Column()),
        ('"row"', Row()),
        ('"vocabulary"', Vocabulary()),
        ('"summed"', Summed()),
        ('"whole"', Whole()),
        ('{ style = "column", parts = 3 }', Column(parts=3)),
        (
            '{ style = "column", gather = true, heads = 2, queries = 8 }',
            Column(1, True, False, 2, 8),
        ),
        ('{ style = "row", tokens = true }', Row(tokens=True)),
        ('{ style = "vocabulary", tokens = true }', Vocabulary(tokens=True)),
        ('{ style = "local", attributes = ["a", "b"] }', Local("a", "b")),
        ('{ style = "local", groups = 1 }', Local(groups=1)),
        ('"colwise"', Column()),
        ('"colwise_gather_output"', Column(gather=True)),
        ('"packed_colwise"', Column(parts=2)),
        ('"rowwise_split_input"', Row()),
        ('"replicated_with_grad_allreduce"', Summed()),
    ):
        assert read_plan(f'"layers.*.up" = {text}\n"other" = "whole"') == {
            "layers.*.up": style,
            "other": Whole(),
        }


def test_a_plan_in_text_keeps_its_order() -> None:
    """The last of several patterns that fit holds."""
    names = ["z*", "a*", "m"]
    assert [*read_plan("\n".join(f'"{name}" = "column"' for name in names))] == names


def test_plans_that_are_none_are_refused_by_name() -> None:
    for text, named in (
        ("up = column", "TOML"),
        ('"up" = "colums"', "colums"),
        ('"up" = "moe_tp_experts"', "moe_tp_experts"),
        ('"up" = 3', "up"),
        ('"up" = { parts = 3 }', "up"),
        ('"up" = { style = "colum" }', "colum"),
        ('"up" = { style = "column", part = 3 }', "part"),
        ('"up" = { style = "row", parts = 3 }', "parts"),
        ('"up" = { style = "column", attributes = ["a"] }', "up"),
        ('"up" = { style = "column", parts = "3" }', "parts"),
        ('"up" = { style = "column", gather = "false" }', "gather"),
        ('"up" = { style = "column", heads = 2 }', "queries"),
        ('"up" = { style = "local", attributes = "heads" }', "attributes"),
        ('"up" = { style = "local", groups = "1" }', "groups"),
        ('[layers.up]\nstyle = "column"', "layers"),
        ('layers.0.up = "column"', "layers"),
        ('[plan]\n"up" = "column"', "plan"),
        ('"up" = { style = "column", partss = 3 }', "gather partss"),
        ('"up" = { style = ["column"] }', "column"),
    ):
        refusal(partial(read_plan, text), *named.split(), kind=PlanError)
