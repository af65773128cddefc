"""Handles of clients name their node and are never reused, also after a restart of the entry."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import InvalidArgument
from inferd.gateways.fleet.entry.contexts import (
    Incarnation,
    Incarnations,
    client_handle,
    daemon_handle,
)

halves = st.integers(1, 2**32 - 1)


def opened(folder: Path) -> Incarnations:
    found = Incarnations(folder)
    found.open()
    return found


def test_each_start_of_each_node_has_a_number_of_its_own_over_restarts(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert [first.number_of(*pair) for pair in (("a", 1), ("b", 1), ("a", 1))] == [1, 2, 1]
    second = opened(tmp_path)
    assert (first.starts, second.starts) == (1, 2)
    assert [second.number_of(*pair) for pair in (("a", 2), ("b", 1))] == [3, 2]
    assert second.find((3 << 32) + 7) == Incarnation("a", 2)
    for handle in (7, (4 << 32) + 7, (1 << 64) - 1, -1):
        assert second.find(handle) is None


@given(halves, halves, halves)
def test_a_handle_becomes_the_nodes_again(number: int, instance: int, counter: int) -> None:
    own = instance << 32 | counter
    given_out = client_handle(number, own)
    assert given_out >> 32 == number
    assert daemon_handle(Incarnation("a", instance), given_out) == own


def test_the_state_is_its_owners_alone(tmp_path: Path) -> None:
    opened(tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    (file,) = (tmp_path / "state").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_damaged_state_is_reported(tmp_path: Path) -> None:
    (tmp_path / "incarnations.json").write_text("{")
    with pytest.raises(InvalidArgument, match="cannot be used"):
        opened(tmp_path)
