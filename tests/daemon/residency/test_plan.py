"""Decisions on loads, and the choice of the models to evict."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.backends import Device, Shape
from inferd.daemon.residency.plan import (
    DeviceShortage,
    EvictionCandidate,
    LoadAct,
    LoadDecision,
    MemoryForLoad,
    choose_victims,
    decide_load,
)


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


SHAPE, FLOOR = Shape(4, 4096, 512), Shape(1, 4096, 512)
IDLE = EvictionCandidate("idle", 10, 1.0, 10.0)
ENGAGED = EvictionCandidate("engaged", 10, 1.0, 0.0, is_engaged=True)


def decide(need: int, *candidates: EvictionCandidate, free: int = 10, **facts: Any) -> LoadDecision:
    """Decide on a load of *need* bytes, of which *free* are free, for which callers wait."""
    ahead, loading, floor = (
        facts.pop("ahead", 0),
        facts.pop("loading", 0),
        facts.pop("floor", SHAPE),
    )
    memory = MemoryForLoad(
        need=need,
        free=free,
        ahead=ahead,
        obtainable=free + sum(c.need for c in candidates) + loading,
        shortage=None,
        missing=need - (free - ahead),
        candidates=candidates,
    )
    known = {"must_shrink": False, "has_waiters": True, "is_wanted": True, "embeds": False}
    return decide_load(memory, SHAPE, floor, **(known | facts))


@pytest.mark.parametrize(
    ("decision", "act"),
    [
        (decide(10), LoadAct.PROCEED),
        (decide(10, must_shrink=True), LoadAct.PROCEED),  # no shape is smaller
        (decide(10, must_shrink=True, floor=FLOOR), LoadAct.SHRINK),
        (decide(10, ahead=5), LoadAct.WAIT),
        (decide(10, IDLE, ahead=5), LoadAct.PROCEED),
        (decide(11, has_waiters=False), LoadAct.GIVE_UP),
        (decide(11, IDLE, has_waiters=False), LoadAct.GIVE_UP),
        (decide(11, IDLE), LoadAct.WAIT),
        (decide(11, loading=5), LoadAct.WAIT),
        (decide(11, loading=5, is_wanted=False), LoadAct.REFUSE),
        (decide(21, IDLE, floor=FLOOR), LoadAct.SHRINK),
        (decide(21, IDLE), LoadAct.REFUSE),
        (decide(21, IDLE, embeds=True), LoadAct.LEAVE_OUT_EMBEDDINGS),
    ],
)
def test_the_steps_of_a_decision(decision: LoadDecision, act: LoadAct) -> None:
    assert decision.act is act


def test_victims_are_evicted_together_or_not_yet() -> None:
    assert decide(20, IDLE, ENGAGED).victims == [IDLE]
    assert decide(30, IDLE, ENGAGED) == LoadDecision(LoadAct.WAIT)


def test_a_device_without_memory_gets_fewer_layers() -> None:
    shortage = DeviceShortage(Device("GPU", 5, 100), 10, 5)
    layers = Shape(4, 4096, 512, 20)
    memory = MemoryForLoad(
        need=5, free=10, ahead=0, obtainable=10, shortage=shortage, missing=5, candidates=()
    )
    facts = {"must_shrink": False, "has_waiters": True, "is_wanted": True, "embeds": False}
    found = decide_load(memory, layers, SHAPE, **facts)
    assert found == LoadDecision(LoadAct.SHRINK, Shape(4, 4096, 512, 10))
