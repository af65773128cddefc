"""Stop reasons: each condition declares its own, and histories and documents know them all."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.scheduler import stopping
from inferd.scheduler.stopping import (
    EMBEDDED,
    REASONS,
    CharacterCondition,
    Stop,
    StopReason,
    TextAssembler,
    TextCondition,
    TextConditions,
    TurnConditions,
    cuts_text,
)
from inferd.sessions.entries import Replay, TurnPiece

DOCS = Path(__file__).resolve().parents[2] / "docs"
METHODS = ("check_text", "add_token", "add_surprisal", "add_piece")
CUT = {"stop", "pattern", "complete", "indent", "similarity"}


def conditions() -> Iterator[type]:
    """Yield all classes that check a turn's text or tokens."""
    for _, found in inspect.getmembers(stopping, inspect.isclass):
        checks = any(hasattr(found, method) for method in METHODS)
        if found.__module__ == stopping.__name__ and checks:
            yield found


def test_every_condition_declares_its_stop_reason() -> None:
    found = set(conditions()) - {CharacterCondition, TextAssembler, TextCondition}
    found -= {TextConditions, TurnConditions}
    assert len(found) == 8
    for condition in found:
        assert isinstance(getattr(condition, "reason", None), StopReason), condition


def test_declared_reasons_know_whether_they_cut_text() -> None:
    assert {name for name in REASONS if cuts_text(name)} == CUT
    assert not cuts_text(None) and not cuts_text("Cancelled")


def test_a_new_condition_that_cuts_text_is_known_to_histories_at_once() -> None:
    class Shouting:
        reason = StopReason("shouting", cuts_text=True)
        undecided = None

        def check_text(self, text: str, at: int) -> Stop | None:
            place = at + len(text)
            return Stop(place, place - 1, self.reason, "!") if text.endswith("!") else None

    try:
        ending = TextAssembler(conditions=TextConditions([Shouting()])).add_piece(b"Oh!").ending
        assert ending is not None
        assert Replay([1], [TurnPiece(end=ending.reason.name)]).stopped_by_text
    finally:
        del REASONS[Shouting.reason.name]


def test_a_reason_is_declared_once() -> None:
    with pytest.raises(AssertionError, match="declared twice"):
        StopReason("pattern")


def test_the_documents_name_every_reason() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "stopping.md").read_text(), re.MULTILINE))
    assert set(REASONS) - {EMBEDDED.name} <= rows
    page = (DOCS / "protocol.md").read_text()
    field = re.search(r"^\| `stop_reason` \|(.*)$", page, re.MULTILINE)
    assert field is not None
    assert set(REASONS) <= set(re.findall(r"`(\w+)`", field[1]))
