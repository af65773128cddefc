"""The choice of the models to evict."""

from __future__ import annotations

from inferd.daemon.residency.eviction import EvictionCandidate, choose_victims


def idle(name: str, need: int, load_s: float = 1.0, idle_s: float = 10.0) -> EvictionCandidate:
    return EvictionCandidate(name, need, load_s, idle_s)


def names(found: list[EvictionCandidate] | None) -> list[str] | None:
    return found if found is None else [i.name for i in found]


def test_the_least_valuable_model_is_evicted_first() -> None:
    quick, slow = idle("quick", 5, load_s=0.1), idle("slow", 5, load_s=9)
    assert names(choose_victims([slow, quick], 5)) == ["quick"]
    lately, long_ago = idle("lately", 5, idle_s=1), idle("long-ago", 5, idle_s=1000)
    assert names(choose_victims([lately, long_ago], 3)) == ["long-ago"]


def test_no_more_models_are_evicted_than_needed() -> None:
    small, large = idle("small", 2, load_s=0.1), idle("large", 10)
    assert names(choose_victims([small, large], 8)) == ["large"]
    assert names(choose_victims([small, large], 12)) == ["small", "large"]
    assert names(choose_victims([small, large], 0)) == []


def test_no_model_is_evicted_for_one_that_does_not_fit_anyway() -> None:
    assert choose_victims([idle("a", 5), idle("b", 5)], 11) is None
    assert choose_victims([], 1) is None


def test_a_model_that_was_never_idle_is_valuable() -> None:
    assert idle("a", 1, idle_s=0.0).value > idle("b", 1, idle_s=0.1).value
