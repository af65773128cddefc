"""The columns of `top` that fit on a narrow screen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.cli.monitoring.top_screen import PADDING, fit_columns
from inferd.cli.monitoring.top_view import MODELS, SESSIONS, TASKS, Panel

PANELS = (MODELS, TASKS, SESSIONS)
NUMBER = "1234567"
NAME = "gemma-3-270m-instruct"


def columns_of(panel: Panel, name: str = NAME) -> dict[str, list[str]]:
    """Return a row of long cells."""
    return {head: [name if head in panel.names else NUMBER] for head in panel.heads}


@pytest.mark.parametrize("panel", PANELS, ids=lambda p: p.title)
def test_every_head_has_its_importance(panel: Panel) -> None:
    assert sorted(panel.importance) == sorted(panel.heads)
    assert panel.numbers | panel.names <= set(panel.heads) | {"MODEL", "SESSION"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda p: p.title)
def test_a_wide_screen_shows_all_columns_in_full(panel: Panel) -> None:
    fitted = fit_columns(panel, columns_of(panel), 200)
    assert tuple(fitted) == panel.heads
    assert all(fitted[head] >= len(NUMBER) for head in fitted)
    assert all(fitted[head] == len(NAME) for head in fitted if head in panel.names)


def test_a_narrow_screen_shows_the_important_columns() -> None:
    tasks = columns_of(TASKS) | {"STATE": ["running"], "MODEL": ["smollm2"], "TOK/S": ["12.3"]}
    assert list(fit_columns(TASKS, tasks, 40)) == ["STATE", "MODEL", "TOK/S", "SESSION"]
    assert list(fit_columns(TASKS, tasks, 20)) == ["STATE", "MODEL"]
    assert fit_columns(TASKS, tasks, 3) == {}


def test_names_are_cut_before_a_column_is_left_out_but_numbers_of_sessions_are_not() -> None:
    sessions = columns_of(SESSIONS) | {"STATE": ["done"], "MODEL": ["m"]}
    assert fit_columns(SESSIONS, sessions, 30)["SESSION"] < len(NAME)
    number = "4294967298"
    cut = fit_columns(SESSIONS, sessions | {"SESSION": [NAME, number]}, 20)
    assert cut["SESSION"] >= len(number)


@given(st.sampled_from(PANELS), st.integers(0, 200), st.data())
def test_the_columns_fit_and_only_names_are_cut(
    panel: Panel, available: int, data: st.DataObject
) -> None:
    cells = {h: [data.draw(st.text("ab1 ", max_size=30))] for h in panel.heads}
    fitted = fit_columns(panel, cells, available)
    assert sum(width + PADDING for width in fitted.values()) <= available
    for head, width in fitted.items():
        full = max(len(head), *map(len, cells[head]))
        assert width == full or (head in panel.names and width < full)
