"""The layout of prompts to fill in the middle, and their budgets."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from inferd.backends.base import ModelInfo, SpecialToken
from inferd.backends.errors import UnsupportedOperation
from inferd.sessions.history.infill import (
    InfillBudget,
    InfillText,
    check_infill,
    infill_prompt,
    texts_of,
)
from tests.scheduler.doubles import Bench

PRE, SUF, MID, REP, SEP, BOS = 1001, 1002, 1003, 1004, 1005, 1006
REQUIRED = {"fim-pre": PRE, "fim-suf": SUF, "fim-mid": MID}
WIDE = InfillBudget(prefix=60, suffix=20, extra=40)


def names(ids: dict[str, int]) -> dict[str, SpecialToken]:
    return {name: SpecialToken(token, name) for name, token in ids.items()}


def info(ids: dict[str, int], token_bytes_max: int = 1) -> ModelInfo:
    return msgspec.structs.replace(
        Bench().model.info, special_tokens=names(ids), token_bytes_max=token_bytes_max
    )


def prompt(text: InfillText, budget: InfillBudget = WIDE, **more: int) -> list[int]:
    """Return the prompt in a vocabulary with a token for each byte."""
    ids = REQUIRED | {name.replace("_", "-"): token for name, token in more.items()}
    parts = [list(each.encode()) for each in texts_of(text, budget, info(ids))]
    return infill_prompt(parts, names(ids), budget, begin=[BOS], suffix_first=text.suffix_first)


def of(text: str) -> list[int]:
    return list(text.encode())


def test_the_prefix_precedes_the_suffix() -> None:
    assert prompt(InfillText("ab", "yz")) == [BOS, PRE, *of("ab"), SUF, *of("yz"), MID]


def test_typed_text_continues_the_prefix() -> None:
    found = prompt(InfillText("ab", "yz", typed="c"))
    assert found == [BOS, PRE, *of("abc"), SUF, *of("yz"), MID]


def test_the_suffix_may_be_first() -> None:
    found = prompt(InfillText("ab", "yz", typed="c", suffix_first=True))
    assert found == [BOS, SUF, *of("yz"), PRE, *of("abc"), MID]


def test_parts_of_other_files_precede_all_else_as_a_repository() -> None:
    found = prompt(
        InfillText("ab", "yz", extra=[("a.py", "x"), ("", "y")]), fim_rep=REP, fim_sep=SEP
    )
    files = [SEP, *of("a.py\nx"), SEP, *of("tmp\ny"), SEP, *of("filename\n")]
    extra = [REP, *of("myproject\n"), *files]
    assert found == [*extra, BOS, PRE, *of("ab"), SUF, *of("yz"), MID]
    assert len(extra) <= 40


def test_parts_without_tokens_for_files_follow_a_text_between_snippets() -> None:
    found = prompt(InfillText("a", "z", extra=[("a.py", "x")]))
    assert found == [*of("\n\n--- snippet ---\n\nx"), BOS, PRE, *of("a"), SUF, *of("z"), MID]


def test_the_parts_lose_their_beginning() -> None:
    budget = InfillBudget(prefix=8, suffix=8, extra=5)
    found = prompt(InfillText("a", "z", extra=[("1", "abc"), ("2", "def")]), budget)
    assert found[:5] == of("\n\ndef")
    assert found[5] == BOS


def test_the_suffix_keeps_its_start_beside_the_typed_text() -> None:
    budget = InfillBudget(prefix=12, suffix=8, extra=0)
    found = prompt(InfillText("a", "0123456789", typed="bc"), budget)
    assert found == [BOS, PRE, *of("abc"), SUF, *of("0123"), MID]


@pytest.mark.parametrize(("size", "start"), [(12, 0), (13, 2), (14, 2), (15, 4), (24, 12)])
def test_a_long_prefix_begins_at_a_multiple_of_a_step(size: int, start: int) -> None:
    """So it begins with the same tokens while somebody types."""
    text = "abcdefghijklmnopqrstuvwxyz"[:size]
    found = prompt(InfillText(text, ""), InfillBudget(prefix=12, suffix=4, extra=0))
    assert found == [BOS, PRE, *of(text[start:]), SUF, MID]


def test_a_prefix_of_any_length_begins_with_the_same_tokens_while_somebody_types() -> None:
    budget, text = InfillBudget(prefix=60, suffix=4, extra=0), "abcdefghijklmnopqrstuvwxyz" * 40
    prompts = [prompt(InfillText(text[:size], ""), budget)[:40] for size in range(600, 800)]
    changes = sum(one != other for one, other in pairwise(prompts))
    assert 200 // 20 <= changes <= 200 // 10 + 10, changes


@pytest.mark.parametrize(
    ("ctx_size", "n_predict", "budget"),
    [
        (4096, 128, (1536, 512, 4096 - 2048 - 256)),
        (8192, 30, (1536, 512, 6144 - 60)),
        (4096, -1, (1536, 512, 4096 - 2048 - 512)),
        (512, 128, (285, 95, 0)),
        (16, 100, (3, 1, 0)),
        (8192, 1, (1536, 512, 8192 - 2048 - 3)),
    ],
)
def test_the_budgets_are_those_of_llama_server_where_the_context_is_large_enough(
    ctx_size: int, n_predict: int, budget: tuple[int, int, int]
) -> None:
    assert InfillBudget.of_context(ctx_size, n_predict) == budget


@pytest.mark.parametrize("ctx_size", [64, 500, 2048, 2300, 4096, 5000])
@pytest.mark.parametrize("n_predict", [-1, 0, 1, 30])
def test_a_prompt_with_all_budgets_full_fits_its_context(ctx_size: int, n_predict: int) -> None:
    budget = InfillBudget.of_context(ctx_size, n_predict)
    long = "x" * 20_000
    text = InfillText(long, long, typed="abc", extra=[("n", long)] * 3)
    found = prompt(text, budget, fim_rep=REP, fim_sep=SEP)
    assert len(found) + max(1, n_predict) <= ctx_size


@pytest.mark.parametrize("typed", [4, 5, 6, 7, 13, 14, 15, 100])
def test_long_typed_text_takes_the_place_of_the_prefix(typed: int) -> None:
    """The text right before the place is kept; llama-server exceeds its budget instead."""
    budget = InfillBudget(prefix=9, suffix=7, extra=0)
    found = prompt(InfillText("a" * 30, "z" * 30, typed="t" * typed), budget)
    assert len(found) <= 9 + 7 + 2
    assert found.count(ord("t")) == min(typed, 9 + 7 - 2)


def test_only_characters_that_may_be_used_are_tokenized() -> None:
    budget = InfillBudget(prefix=6, suffix=4, extra=3)
    text = InfillText("x" * 100, "y" * 100, extra=[("1", "a" * 100), ("2", "b" * 100)])
    found = texts_of(text, budget, info(REQUIRED, token_bytes_max=2))
    assert [len(part) for part in found[:2]] == [24, 8]
    assert found[-1] == "b" * 6 and "a" not in "".join(found[5:]).replace("snippet", "")


def test_a_vocabulary_without_the_tokens_is_refused_by_their_names() -> None:
    assert check_infill(info(REQUIRED), "m")
    with pytest.raises(UnsupportedOperation, match="no tokens for suffix, middle") as caught:
        check_infill(info({"fim-pre": PRE}), "m")
    assert caught.value.data == {"missing": ["suffix", "middle"]}
    with pytest.raises(UnsupportedOperation, match="no token for prefix"):
        check_infill(info({"fim-suf": SUF, "fim-mid": MID}), "m")
