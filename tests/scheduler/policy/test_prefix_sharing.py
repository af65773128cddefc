"""The memory of common prefixes: it is bounded, and forgotten with the tasks."""

from __future__ import annotations

import pytest

from inferd.scheduler.policy import slot_plan
from tests.scheduler.doubles import Bench

PREFIX = "a prefix that is long enough to be worth waiting for, twice over and more: " * 2


@pytest.mark.parametrize("others_max", [1, 256])
def test_tasks_that_wait_for_a_prefix_are_remembered_until_they_end(
    monkeypatch: pytest.MonkeyPatch, others_max: int
) -> None:
    monkeypatch.setattr(slot_plan, "OTHERS_MAX", others_max)
    bench = Bench(slots=4, batch_size=16, ctx_size=512)
    leaders = bench.engine.tasks.leaders
    texts = {number: f"{PREFIX}{number}" for number in range(1, 8)}
    bench.iterate(bench.submit(1, texts[1]), bench.submit(2, texts[2]))
    bench.iterate(*(bench.submit(number, texts[number]) for number in range(3, 8)))

    assert leaders._shared
    assert all(len(others) <= others_max for others in leaders._shared.values())

    bench.run()
    assert {number: bench.text(number).decode() for number in texts} == texts
    assert not leaders._shared and not leaders._cached
