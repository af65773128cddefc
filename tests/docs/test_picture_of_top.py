"""The README's picture of `inferd top` shows its tables and keys, and no path of its author."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from inferd.cli.monitoring.top_screen import Top
from inferd.cli.monitoring.top_view import MODELS, SESSIONS, TASKS
from tools.picture_of_top import FILES, PICTURE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shown() -> str:
    text = html.unescape(re.sub(r"<[^>]*>", "\n", PICTURE.read_text()))
    return text.replace("\xa0", " ")


def test_the_readme_shows_it() -> None:
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()
    assert PICTURE.stat().st_size < 200_000


def test_it_has_the_tables_of_the_screen(shown: str) -> None:
    for panel in (MODELS, TASKS, SESSIONS):
        assert f"{panel.title} (" in shown
        assert all(head in shown for head in panel.heads), panel.title


def test_it_names_the_keys(shown: str) -> None:
    described = [binding.description for binding in Top.BINDINGS if binding.show]  # type: ignore[union-attr]
    assert described and all(description in shown for description in described)


def test_it_is_of_two_real_models_under_load(shown: str) -> None:
    assert all(name in shown for name in FILES)
    for state in ("running", "waiting"):
        assert shown.count(state) > 1, state
    rates = re.search(r"tokens/s +(\d+) prompt, (\d+) answer", shown)
    assert rates is not None and int(rates[2]) > 0


def test_it_shows_no_path_of_its_author() -> None:
    assert not re.search(r"/(home|root|tmp|work)/", PICTURE.read_text())
