"""The table of a run's layout in the quickstart's report."""

import pytest

from tools.quickstart.page import layout

COMMIT = "ff94391aa9b07634b2536c3ed5a6109c28f84949"


@pytest.mark.parametrize(
    ("commit", "shown"),
    [(COMMIT, "ff94391aa9b0"), (f"{COMMIT}-dirty", "ff94391aa9b0-dirty"), (None, "None")],
)
def test_a_commit_is_short_enough_to_leave_room_for_the_values(
    commit: str | None, shown: str
) -> None:
    html = layout({"layout": {"commit": commit}, "training": {}, "seconds": {}})
    assert f"<td>{shown}</td>" in html
    assert COMMIT not in html


def test_a_switch_is_shown_as_a_word() -> None:
    html = layout({"layout": {"compiled": False}, "training": {"bf16": True}, "seconds": {}})
    assert "<td>no</td>" in html
    assert "<td>yes</td>" in html
