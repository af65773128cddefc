"""Steps beside tasks that are slow to sample, on a clock that the model advances."""

from __future__ import annotations

import pytest

from inferd.backends import Chunk, ModelSpec, Sampler
from inferd.backends.echo.model import EchoModel
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from tests.scheduler.doubles import Bench

STEP_S = 0.01
PROMPT = "x" * 3000


class SlowToSample(EchoModel):
    """A model whose tokens take *wall_s*, of which *cpu_s* are CPU time, in slot 0."""

    def __init__(self, bench: Bench, wall_s: float, cpu_s: float):
        super().__init__(
            ModelSpec(name="echo", backend="echo", slots=2, ctx_size=8192, batch_size=8192)
        )
        self._bench, self._wall_s, self._cpu_s = bench, wall_s, cpu_s
        self.cpu_s = self.sampled_s = 0.0

    def step(self, chunks: object) -> None:
        assert isinstance(chunks, list) and all(isinstance(c, Chunk) for c in chunks)
        self._bench.now += STEP_S
        super().step(chunks)

    def sample(self, slot: int, sampler: Sampler, index: int, position: int | None = None) -> int:
        if slot == 0:
            self._bench.now += self._wall_s
            self.sampled_s += self._wall_s
            self.cpu_s += self._cpu_s
        return super().sample(slot, sampler, index, position)


def bench_with(wall_s: float, cpu_s: float) -> tuple[Bench, SlowToSample]:
    bench = Bench()
    bench.model = model = SlowToSample(bench, wall_s, cpu_s)
    bench.engine = Engine(model, seconds=lambda: bench.now)
    bench.engine.clock.cpu = lambda: model.cpu_s
    return bench, model


@pytest.mark.parametrize(("wall_s", "cpu_s"), [(0.05, 0.05), (0.5, 0.5), (0.5, 0.1)])
def test_sampling_for_a_slow_task_takes_a_share_of_the_time(wall_s: float, cpu_s: float) -> None:
    bench, model = bench_with(wall_s, cpu_s)
    start = bench.now
    bench.iterate(bench.submit(1, PROMPT, owner=1), bench.submit(2, PROMPT, owner=2))
    while bench.now < start + 20:
        bench.iterate()
    assert model.sampled_s <= 0.2 * 20 + wall_s
    assert len(bench.tokens(2)) >= 0.75 * 20 / STEP_S and len(bench.tokens(1)) >= 4


def test_a_slow_task_alone_skips_nothing() -> None:
    bench, _ = bench_with(0.05, 0.05)
    bench.run(bench.submit(1, "x" * 100))
    assert bench.text(1) == b"x" * 100 and bench.model.faults.steps <= 103


def test_skipped_steps_count_to_the_quantum_and_do_not_age_the_task() -> None:
    bench, _ = bench_with(0.5, 0.5)
    bench.iterate(bench.submit(1, PROMPT, owner=1), bench.submit(2, PROMPT, owner=2))
    while not (bench.tokens(1) and bench.tokens(2)):
        bench.iterate()
    slow, other = bench.engine.slots.tasks
    age, ahead = slow.age, slow.quantum - other.quantum
    for _ in range(100):
        bench.iterate()
    assert len(bench.tokens(1)) < 10 and slow.age == age
    assert slow.quantum - other.quantum >= ahead


def test_a_slow_task_gives_its_slot_up_as_soon_as_others() -> None:
    bench, _ = bench_with(0.05, 0.05)
    bench.iterate(bench.submit(1, PROMPT, owner=1), bench.submit(2, PROMPT, owner=2))
    bench.iterate(bench.submit(3, "third", owner=3))
    for _ in range(300):
        bench.iterate()
    assert 3 in bench.order


def test_a_token_that_takes_too_long_ends_the_task_after_it_was_sent() -> None:
    bench, _ = bench_with(1.5, 1.5)
    bench.run(bench.submit(1, "hello"))
    assert bench.text(1) == b"h" and bench.error(1) == "Timeout"
    end = bench.end(1)
    assert isinstance(end, m.Failed) and end.error["data"]["timeout"] == "sampling"
