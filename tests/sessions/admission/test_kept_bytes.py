"""The memory of kept values, and its sums by user."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import QuotaExceeded
from inferd.scheduler.owner import Owner
from inferd.sessions.admission.bounds import AdmissionBounds, KeptBytes, Quota
from inferd.sessions.memory import MemoryMeter, memory_bytes

VALUES: list[Any] = [
    [{}] * 1000,
    [[i] for i in range(1000, 2000)],
    [{"role": "user", "content": f"text {i}" * 20, "extra": {"a": [i, 0.5]}} for i in range(300)],
    {f"key {i}": "x" * 50 for i in range(1000)},
    "x" * 100_000,
]


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_the_memory_of_a_decoded_value_is_counted(number: int) -> None:
    frame = msgspec.msgpack.encode(VALUES[number])
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        value = msgspec.msgpack.decode(frame)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 < memory_bytes(value) / (after - before) < 2


def test_a_value_that_occurs_twice_counts_once() -> None:
    shared = ["x" * 1000]
    assert memory_bytes({"a": shared, "b": shared}) < 1500
    assert memory_bytes({"a": shared}, shared) < 1500


def test_a_meter_counts_as_the_memory_and_walks_each_value_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter, tools = MemoryMeter(), [{"name": f"tool {i}"} for i in range(100)]
    walked: list[Any] = []

    def count(*values: Any) -> int:
        walked.extend(values)
        return memory_bytes(*values)

    monkeypatch.setattr("inferd.sessions.memory.memory_bytes", count)
    defaults, options = {"tools": tools}, {"grammar": "x" * 1000}
    size = meter.count_bytes(defaults, options)
    assert size == pytest.approx(memory_bytes(defaults, options), rel=0.1)
    assert meter.count_bytes(defaults, options, {"tools": tools}) < size + 500
    assert meter.count_bytes(defaults | {"seed": 7}, options) > size
    assert walked == [tools, "x" * 1000, 7]
    assert meter.count_bytes(options) < meter.count_bytes(defaults, options)
    assert walked[3:] == [tools], "a value that was left out is not kept"


def test_sums_follow_the_holders_of_each_user() -> None:
    kept = KeptBytes(AdmissionBounds(1, 1, session_bytes_owner_max=100))
    kept.add_holder("s", Owner(1), 40)
    kept.add_holder("g", Owner(1), 20)
    kept.add_holder("t", Owner(2), 99)
    assert (kept.open_bytes(1), kept.left_for_dormant(1)) == (60, 40)
    kept.check_growth(Owner(1), 40)
    with pytest.raises(QuotaExceeded) as caught:
        kept.check_growth(Owner(1), 41)
    bound = {"bound": "session-bytes-user-max", "bytes": 60, "more": 41, "bytes_max": 100}
    assert caught.value.data == bound
    kept.set_bytes("s", 10)
    kept.set_bytes("unknown", 1000)
    kept.check_growth(Owner(1), 70)
    kept.remove_holder("s")
    kept.remove_holder("g")
    assert kept.open_bytes(1) == 0 and kept._open.users() == {2: 99}


def test_a_session_past_the_bound_may_shrink() -> None:
    kept = KeptBytes(AdmissionBounds(1, 1, session_bytes_owner_max=100))
    kept.add_holder("s", Owner(1), 200)
    kept.check_growth(Owner(1), 0)
    kept.check_growth(Owner(1), -50)


def test_an_access_rule_replaces_the_bound() -> None:
    bounds = AdmissionBounds(1, 1, session_bytes_owner_max=100)
    bounds.quota_of = lambda owner: Quota(rule="r", session_bytes_max=7 if owner == 1 else None)
    kept = KeptBytes(bounds)
    assert (kept.left_for_dormant(1), kept.left_for_dormant(2)) == (7, 100)
