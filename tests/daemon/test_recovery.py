"""Who is suspected, tried, refused and given up when workers die: without a process."""

from __future__ import annotations

import pytest

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.errors import LoadFailed, WorkerCrashed
from inferd.daemon.recovery import DEATHS_MAX, POISON_MAX, POISON_S, Poison, Recovery
from inferd.daemon.workers import Worker
from inferd.scheduler import messages as m
from inferd.scheduler.recorder import Act, Doing
from inferd.sessions.turn import Turn
from tests.sessions.doubles import EnginePort

pytestmark = pytest.mark.asyncio


class Line(EnginePort):
    """A line to a worker that does nothing by itself."""

    def __init__(self) -> None:
        self.commands = []
        self.readers = {}

    def tell(self, report: m.Tokens) -> None:
        self.readers[report.task_id].report(report)


class Scene:
    """A recovery, the lines to the workers it has started, and a clock."""

    def __init__(self, tasks: int = 4):
        self.now = 0.0
        self.failure: Exception | None = None
        self.lines = [Line()]
        self.recovery = Recovery("m", self.ready, lambda: self.now, instantly)
        self.turns = [Turn(self.lines[0], spec(n), lambda _: None) for n in range(1, tasks + 1)]
        for turn in self.turns:
            turn.start()

    @property
    def line(self) -> Line:
        return self.lines[-1]

    async def ready(self) -> Line:
        if self.failure is not None:
            raise self.failure
        self.lines.append(Line())
        return self.line

    async def die(self, *step: int) -> list[int]:
        """Let the worker die in a step with these tasks; return those that the next one has."""
        act = Act(Doing.STEP if step else Doing.REST, step, self.now)
        readers, self.line.readers = self.line.readers, {}
        self.recovery.take(readers, act)
        await self.recovery.bring_back()
        return sorted(self.line.readers)

    def errors(self) -> dict[int, str]:
        return {t.spec.id: t.error.name for t in self.turns if t.error is not None}


def spec(number: int) -> m.TaskSpec:
    tokens = m.pack_tokens([number] * 5)
    return m.TaskSpec(id=number, owner=1, tokens=tokens, sampling=SamplingParams())


async def test_tasks_outside_the_fatal_step_go_on_at_once_and_suspects_one_by_one() -> None:
    scene = Scene()

    assert await scene.die(2, 3) == [1, 2, 4]
    scene.line.tell(m.Tokens(2, [9], b"x"))
    assert sorted(scene.line.readers) == [1, 2, 3, 4]
    scene.line.tell(m.Tokens(3, [9], b"x"))
    assert await scene.die() == [1, 2, 3, 4], "a death outside a step makes no suspects"
    assert scene.errors() == {}


async def test_the_one_on_trial_is_blamed_and_its_prompt_remembered() -> None:
    scene = Scene()
    await scene.die(1, 2, 3)
    assert await scene.die(1, 4) == [2, 4]

    assert scene.errors() == {1: "WorkerCrashed"}
    assert spec(1).tokens in scene.recovery.poison
    assert spec(2).tokens not in scene.recovery.poison
    scene.now += POISON_S
    assert spec(1).tokens not in scene.recovery.poison
    scene.line.tell(m.Tokens(2, [9], b"x"))
    assert sorted(scene.line.readers) == [2, 3, 4], "the next suspect's turn"


async def test_a_death_elsewhere_leaves_the_suspects_suspects() -> None:
    scene = Scene()
    await scene.die(1, 2)
    assert await scene.die() == [1, 3, 4]
    assert scene.errors() == {}


async def test_a_suspect_that_was_cancelled_is_passed_over() -> None:
    scene = Scene()
    scene.turns[0].report(m.Failed(1, {"name": "Cancelled", "message": "by the client"}))
    assert await scene.die(1, 2) == [2, 3, 4]


async def test_what_was_told_is_in_what_goes_on() -> None:
    scene = Scene(tasks=1)
    scene.line.tell(m.Tokens(1, [7, 8], "é".encode()))
    await scene.die(1)
    [submit] = [c for c in scene.line.commands if isinstance(c, m.Submit)]
    assert m.unpack_tokens(submit.task.tokens) == [1] * 5 + [7, 8]
    assert submit.task.progressed is not None
    assert (submit.task.progressed.told, submit.task.progressed.text_bytes) == (2, 2)


async def test_credit_and_questions_that_were_open_are_open_still() -> None:
    line = Line()
    push = Turn(line, m.TaskSpec(id=1, owner=1, tokens=b"", sampling=SamplingParams(), credit=3),
                lambda _: None)  # fmt: skip
    pull = Turn(line, m.TaskSpec(id=2, owner=1, tokens=b"", sampling=SamplingParams(), pull=True),
                lambda _: None)  # fmt: skip
    push.report(m.Tokens(1, [7], b"x"))
    push.credit(2)
    before = push.go_on(line), pull.go_on(line)
    pull.report(m.Tokens(2, [7], b"x"))
    after = pull.go_on(line)

    assert before[0] is not None and before[0].credit == 4
    assert before[1] is not None and before[1].progressed is not None
    assert before[1].progressed.asked == 1
    assert after is not None and after.progressed is not None and after.progressed.asked == 0


async def test_it_gives_up_after_many_deaths_and_begins_anew_later() -> None:
    scene = Scene()
    for _ in range(DEATHS_MAX):
        scene.now += 0.1
        assert await scene.die() == [1, 2, 3, 4]
    scene.now += 0.1
    await scene.die()
    assert set(scene.errors()) == {1, 2, 3, 4}


async def test_a_model_that_cannot_be_loaded_any_more_fails_its_tasks_with_the_reason() -> None:
    scene = Scene()
    scene.failure = LoadFailed("the file is gone")
    await scene.die(1)
    assert set(scene.errors().values()) == {"LoadFailed"}


async def test_a_worker_that_dies_while_it_loads_is_not_the_last() -> None:
    scene = Scene()
    failures = [LoadFailed("it ended", data={"cause": "died"})] * 2

    async def ready() -> Line:
        if failures:
            raise failures.pop()
        return await scene.ready()

    scene.recovery._ready = ready
    assert await scene.die() == [1, 2, 3, 4]
    assert scene.errors() == {}


async def test_the_poison_that_is_remembered_is_bounded() -> None:
    poison = Poison(lambda: 0.0)
    for number in range(POISON_MAX + 5):
        poison.add(str(number).encode())
    assert b"4" not in poison
    assert b"5" in poison


async def instantly(seconds: float) -> None:
    """Sleep not at all."""


class Deaf(Turn):
    """Cannot take a report: a bug of somebody's."""

    def report(self, report: m.Report) -> None:
        raise RuntimeError("a reader's bug")


async def test_all_hear_of_a_death_whatever_one_of_them_answers() -> None:
    frames: list[None] = []
    worker = Worker(ModelSpec(name="m"), lambda: frames.append(None))
    turns = [kind(worker, spec(n), lambda _: None) for n, kind in enumerate((Deaf, Turn), 1)]
    for turn in turns:
        turn.start()
    worker.gone.set()

    with pytest.raises(WorkerCrashed):
        await worker.queue()
    assert turns[1].error is not None and turns[1].error.name == "WorkerCrashed"
    assert worker.tasks == 0
    assert frames, "and the clients are written to"
