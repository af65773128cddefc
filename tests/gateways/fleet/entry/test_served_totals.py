"""Sums of the nodes' tokens at the entry: their baselines and bounds."""

from __future__ import annotations

from inferd.gateways.fleet.nodes.fair_share import KEYS_MAX, ServedTotals
from inferd.ipc.messages import SERVED_TOKENS_MAX

MODEL = "echo"


def totals_of(*nodes: str) -> ServedTotals:
    """Return sums of nodes, each of which has reported a user with ten tokens."""
    totals = ServedTotals()
    for node in nodes:
        totals.begin_node(node)
        totals.note_totals(node, {MODEL: {"@ada": 10}})
    return totals


def test_a_node_gets_the_tokens_of_the_others_alone_and_once() -> None:
    totals = totals_of("a", "b", "c")
    totals.note_totals("a", {MODEL: {"@ada": 15}})
    totals.note_totals("b", {MODEL: {"@ada": 12}})
    assert totals.take_elsewhere("a") == {MODEL: {"@ada": 2}}
    assert totals.take_elsewhere("b") == {MODEL: {"@ada": 5}}
    assert totals.take_elsewhere("c") == {MODEL: {"@ada": 7}}
    for node in "abc":
        assert totals.take_elsewhere(node) == {}


def test_models_and_users_are_apart() -> None:
    totals = totals_of("a", "b")
    for node in "ab":
        totals.note_totals(node, {"other": {"@ada": 0}, MODEL: {"@bob": 0}})
    totals.note_totals("a", {"other": {"@ada": 3}, MODEL: {"@bob": 4}})
    assert totals.take_elsewhere("b") == {"other": {"@ada": 3}, MODEL: {"@bob": 4}}


def test_a_node_gets_nothing_for_users_that_it_does_not_know() -> None:
    totals = totals_of("a", "b")
    totals.note_totals("a", {MODEL: {"@bob": 0}})
    totals.note_totals("a", {MODEL: {"@bob": 100}})
    assert totals.take_elsewhere("b") == {}
    totals.note_totals("b", {MODEL: {"@bob": 50}})
    assert totals.take_elsewhere("b") == {}, "nor for the time before"
    totals.note_totals("a", {MODEL: {"@bob": 101}})
    assert totals.take_elsewhere("b") == {MODEL: {"@bob": 1}}


def test_the_first_total_on_a_connection_counts_for_nothing() -> None:
    totals = totals_of("a", "b")
    totals.note_totals("a", {MODEL: {"@ada": 30}})
    totals.begin_node("a")
    totals.note_totals("a", {MODEL: {"@ada": 1000}})
    assert totals.take_elsewhere("a") == {}
    assert totals.take_elsewhere("b") == {MODEL: {"@ada": 20}}
    totals.note_totals("a", {MODEL: {"@ada": 1001}})
    assert totals.take_elsewhere("b") == {MODEL: {"@ada": 1}}


def test_a_total_that_began_anew_counts_from_zero() -> None:
    totals = totals_of("a", "b")
    totals.note_totals("a", {MODEL: {"@ada": 4}})
    assert totals.take_elsewhere("b") == {MODEL: {"@ada": 4}}


def test_a_removed_node_takes_no_tokens_back() -> None:
    totals = totals_of("a", "b", "c")
    totals.note_totals("a", {MODEL: {"@ada": 100}})
    totals.drop_node("a")
    totals.note_totals("c", {MODEL: {"@ada": 11}})
    assert totals.take_elsewhere("b") == {MODEL: {"@ada": 91}}


def test_absurd_totals_stay_within_what_a_node_accepts() -> None:
    totals = totals_of("a", "b")
    totals.note_totals("a", {MODEL: {"@ada": 1 << 63}})
    assert totals.take_elsewhere("b") == {MODEL: {"@ada": SERVED_TOKENS_MAX}}
    assert totals.take_elsewhere("b") == {}


def test_the_latest_users_of_a_node_are_remembered() -> None:
    totals = totals_of("a", "b")
    for start in range(0, 3 * KEYS_MAX, 1000):
        users = {f"@user{number}": 0 for number in range(start, start + 1000)}
        totals.note_totals("a", {MODEL: users | {"@ada": start}})
    totals.take_elsewhere("b")
    totals.note_totals("b", {MODEL: {"@ada": 11, "@user0": 0}})
    totals.note_totals("b", {MODEL: {"@user0": 7}})
    assert totals.take_elsewhere("a") == {MODEL: {"@ada": 1}}, "user 0 is forgotten there"
    assert totals.keys <= KEYS_MAX + 2
