"""The table of prompts: blocks, nodes that have computed them, bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.gateways.fleet.routing.homes import (
    BLOCK_NODES_MAX,
    PROMPT_BYTES_MAX,
    PromptTable,
    prompt_blocks,
)

SYSTEM = b"You are a careful assistant. " * 100


def table_with(*prompts: tuple[bytes, str]) -> PromptTable:
    table = PromptTable()
    for text, node in prompts:
        table.note_prompt(prompt_blocks("u", text), node)
    return table


def test_the_common_beginning_of_two_prompts_is_found() -> None:
    table = table_with((SYSTEM + b"one question" * 50, "a"), (SYSTEM[:1000] + b"x" * 900, "b"))
    covered = table.covered_bytes(prompt_blocks("u", SYSTEM + b"another one" * 50))
    assert 0.9 * len(SYSTEM) < covered["a"] <= len(SYSTEM)
    assert 800 < covered["b"] <= 1000


def test_prompts_of_other_scopes_have_nothing_in_common() -> None:
    table = table_with((SYSTEM, "a"))
    assert table.covered_bytes(prompt_blocks("v", SYSTEM)) == {}


def test_a_short_prompt_has_no_blocks_and_a_huge_one_has_few() -> None:
    assert prompt_blocks("u", b"x" * 127) == []
    blocks = prompt_blocks("u", b"x" * (8 << 20))
    assert len(blocks) < 200 and PROMPT_BYTES_MAX * 15 / 16 < blocks[-1].end <= PROMPT_BYTES_MAX


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_common_bytes_are_never_overstated_and_understated_by_a_block(
    common: int, one: int, other: int
) -> None:
    table = table_with((b"c" * common + b"1" * one, "a"))
    covered = table.covered_bytes(prompt_blocks("u", b"c" * common + b"2" * other))
    found = covered.get("a", 0)
    assert found <= common
    assert found > common - max(128, common // 16) - 1


def test_the_least_recently_computed_blocks_are_forgotten() -> None:
    table = PromptTable(blocks_max=40)
    for number in range(10):
        table.note_prompt(prompt_blocks("u", b"%d" % number * 2000), "a")
        assert len(table) <= 40
    assert table.covered_bytes(prompt_blocks("u", b"0" * 2000)) == {}
    assert table.covered_bytes(prompt_blocks("u", b"9" * 2000)) == {"a": 1920}
    known = table.covered_bytes(prompt_blocks("u", b"7" * 2000)).get("a", 0)
    assert 0 < known < 1920, "of one prompt the last block is forgotten first"


def test_a_block_has_a_bounded_number_of_nodes() -> None:
    nodes = [f"n{number}" for number in range(BLOCK_NODES_MAX + 4)]
    table = table_with(*((SYSTEM, node) for node in nodes))
    covered = table.covered_bytes(prompt_blocks("u", SYSTEM))
    assert set(covered) == set(nodes[4:])


def test_a_lost_node_is_forgotten() -> None:
    table = table_with((SYSTEM, "a"), (SYSTEM, "b"), (b"own" * 500, "a"))
    table.forget_node("a")
    assert set(table.covered_bytes(prompt_blocks("u", SYSTEM))) == {"b"}
    assert table.covered_bytes(prompt_blocks("u", b"own" * 500)) == {}
