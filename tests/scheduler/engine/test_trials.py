"""Tasks on trial are computed in steps of their own, and the record names the task in question."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from inferd.backends import Chunk, EmbedSpec, Sampler, SamplingParams
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.record import Activity, ActivityKind
from tests.scheduler.doubles import Bench

LONG = "a long prompt, in more than one step. " * 5


def steps_of(bench: Bench) -> list[list[int]]:
    """Return the tasks of each step from now on, as the record names them."""
    steps: list[list[int]] = []
    step, recorder = bench.model.step, bench.engine.metrics.recorder

    def recorded(chunks: Sequence[Chunk]) -> None:
        activity = recorder.read_activity()
        assert activity.kind is ActivityKind.STEP and len(activity.ids) == len(chunks)
        steps.append(list(activity.ids))
        step(chunks)

    bench.model.step = recorded  # type: ignore[method-assign]
    return steps


def test_tasks_on_trial_are_computed_alone_until_they_have_their_tokens() -> None:
    bench = Bench(slots=5, batch_size=32, ctx_size=1024)
    bench.iterate(*(bench.submit(n, "innocent " * 4) for n in (1, 2)))
    steps = steps_of(bench)
    bench.iterate(bench.submit(3, LONG, trial_tokens=1), bench.submit(4, LONG, trial_tokens=3))
    bench.iterate(bench.submit(5, "a newcomer"))
    bench.run()

    end = next(i for i, step in enumerate(steps) if {3, 4} <= set(step))
    assert all(len(step) == 1 for step in steps[:end] if 4 in step), "newcomers wait, too"
    assert {5} < set().union(*steps[:end])
    assert [bench.text(n).decode() for n in (3, 4)] == [LONG, LONG]
    assert bench.text(1).decode() == "innocent " * 4


def test_others_get_every_other_step_beside_a_trial() -> None:
    bench = Bench(slots=2, batch_size=16)
    bench.iterate(bench.submit(1, "innocent " * 9))
    steps = steps_of(bench)
    bench.iterate(bench.submit(2, LONG, trial_tokens=1))
    while not bench.tokens(2):
        bench.iterate()
    assert [step for step in steps if len(step) == 1] == steps
    assert all(a != b for a, b in pairwise(steps))


def test_a_trial_waits_for_a_reader_who_takes_no_token_without_stopping_the_others() -> None:
    bench = Bench(slots=2)
    bench.iterate(bench.submit(1, LONG), bench.submit(2, "unread", pull=True, trial_tokens=2))
    while bench.end(1) is None:
        bench.iterate()
        bench.now += 0.001
    assert len(bench.tokens(2)) == 1


def test_texts_on_trial_are_embedded_alone() -> None:
    bench = Bench(settings=EngineSettings())
    steps: list[tuple[int, ...]] = []
    embedder, recorder = bench.model.embedder(), bench.engine.metrics.recorder
    step = embedder.step

    def recorded(chunks: Sequence[Chunk]) -> None:
        steps.append(recorder.read_activity().ids)
        step(chunks)

    embedder.step = recorded  # type: ignore[method-assign]
    tasks = [bench.submit(n, "a text", embed=EmbedSpec()) for n in (1, 2)]
    bench.run(*tasks, bench.submit(3, "a text", embed=EmbedSpec(), trial_tokens=1))
    assert steps == [(3,), (1, 2)]


def test_the_record_names_the_task_that_is_sampled() -> None:
    bench = Bench(slots=3)
    recorder, sample = bench.engine.metrics.recorder, bench.model.sample
    seen: list[Activity] = []

    def recorded(slot: int, sampler: Sampler, index: int, position: int | None = None) -> int:
        seen.append(recorder.read_activity())
        return sample(slot, sampler, index, position)

    bench.model.sample = recorded  # type: ignore[method-assign]
    bench.run(*(bench.submit(n, str(n)) for n in (1, 2, 3)))
    assert {activity.kind for activity in seen} == {ActivityKind.SAMPLE}
    assert [activity.ids for activity in seen] == [(1,), (2,), (3,)] * 2
    assert recorder.read_activity().kind is ActivityKind.IDLE


def test_the_record_names_the_task_whose_sampler_is_made() -> None:
    bench = Bench()
    recorder, sampler = bench.engine.metrics.recorder, bench.model.sampler
    seen: list[Activity] = []

    def recorded(
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        grammar: object | None = None,
    ) -> Sampler:
        seen.append(recorder.read_activity())
        return sampler(params, prompt, answer)

    bench.model.sampler = recorded  # type: ignore[method-assign]
    spec = bench.spec(1)
    bench.run(m.Submit(spec), m.Adjust(1, spec.sampling, 3, (), ()))
    assert seen and all((a.kind, a.ids) == (ActivityKind.SAMPLE, (1,)) for a in seen)
