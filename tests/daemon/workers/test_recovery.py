"""Who is suspected, tried, refused and given up when workers die: without a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskGroup

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.errors import LoadFailed, WorkerCrashed
from inferd.daemon.config.sources import load_config
from inferd.daemon.models.registry import Registry
from inferd.daemon.models.swap import Swaps
from inferd.daemon.workers.listener import WorkerListener
from inferd.daemon.workers.process_client import ProcessClient
from inferd.daemon.workers.recovery import (
    DEATHS_MAX,
    QUARANTINE_INPUTS_MAX,
    QUARANTINE_S,
    Quarantine,
    Recovery,
    fail_readers,
)
from inferd.daemon.workers.worker import Worker
from inferd.scheduler import messages as m
from inferd.scheduler.recording.recorder import Activity, Doing
from inferd.sessions.turn import Turn
from inferd.sessions.worker_client import TaskReader
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
            turn.submit()

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
        act = Activity(Doing.STEP if step else Doing.REST, step, self.now)
        readers, self.line.readers = self.line.readers, {}
        self.recovery.add_orphans(readers, act)
        await self.recovery.resume_tasks()
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
    assert spec(1).tokens in scene.recovery.quarantine
    assert spec(2).tokens not in scene.recovery.quarantine
    scene.now += QUARANTINE_S
    assert spec(1).tokens not in scene.recovery.quarantine
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
    assert (submit.task.progressed.output_tokens, submit.task.progressed.text_bytes) == (2, 2)


async def test_credit_and_questions_that_were_open_are_open_still() -> None:
    line = Line()
    push = Turn(line, m.TaskSpec(id=1, owner=1, tokens=b"", sampling=SamplingParams(), credit=3),
                lambda _: None)  # fmt: skip
    pull = Turn(line, m.TaskSpec(id=2, owner=1, tokens=b"", sampling=SamplingParams(), pull=True),
                lambda _: None)  # fmt: skip
    push.report(m.Tokens(1, [7], b"x"))
    push.add_credit(2)
    before = push.continue_on(line), pull.continue_on(line)
    pull.report(m.Tokens(2, [7], b"x"))
    after = pull.continue_on(line)

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


async def test_tasks_that_are_moved_are_no_deaths_and_disturb_no_trial() -> None:
    scene = Scene()
    await scene.die(1, 2)
    trial = scene.recovery._trial
    assert trial == 1
    for _ in range(2 * DEATHS_MAX):
        line = scene.line
        readers = {n: r for n, r in line.readers.items() if n != trial}
        for number in readers:
            del line.readers[number]
        scene.recovery.move_tasks(readers)
        await scene.recovery.resume_tasks()
    assert scene.errors() == {}
    assert scene.recovery._trial == trial
    assert scene.recovery.recovered > 2 * DEATHS_MAX


async def test_tasks_that_wait_for_a_worker_can_be_taken_back() -> None:
    scene = Scene()
    readers, scene.line.readers = scene.line.readers, {}
    scene.recovery.move_tasks(readers)
    assert scene.recovery.release_tasks() == readers
    await scene.recovery.resume_tasks()
    assert scene.line.readers == {}


async def test_the_quarantine_is_bounded() -> None:
    quarantine = Quarantine(lambda: 0.0)
    for number in range(QUARANTINE_INPUTS_MAX + 5):
        quarantine.add_input(str(number).encode())
    assert b"4" not in quarantine
    assert b"5" in quarantine


async def instantly(seconds: float) -> None:
    """Sleep not at all."""


class Deaf(Turn):
    """Cannot take a report: a bug of somebody's."""

    def report(self, report: m.Report) -> None:
        raise RuntimeError("a reader's bug")


class Listener(WorkerListener):
    """Lets the tasks of a process that died fail, and counts the frames."""

    def __init__(self) -> None:
        self.frames = 0

    def reports_handled(self) -> None:
        self.frames += 1

    def work_changed(self) -> None:
        return None

    def load_progressed(self, fraction: float) -> None:
        return None

    def memory_estimated(self, worker: Worker, estimate: m.MemoryEstimate) -> None:
        worker.proceed()

    async def reserve_embedding_memory(self, client: ProcessClient) -> None:
        return None

    def embedding_context_created(self, worker: Worker) -> None:
        return None

    def kv_file_changed(self, worker: Worker, report: m.KvFileWritten | m.KvFileLost) -> None:
        return None

    def tasks_orphaned(self, readers: Mapping[int, TaskReader], act: Activity) -> None:
        fail_readers(readers, WorkerCrashed("the process ended"))


async def test_all_hear_of_a_death_whatever_one_of_them_answers() -> None:
    listener = Listener()
    worker = Worker(ModelSpec(name="m"), listener)
    turns = [kind(worker.client, spec(n), lambda _: None) for n, kind in enumerate((Deaf, Turn), 1)]
    for turn in turns:
        turn.submit()
    worker.gone.set()

    with pytest.raises(WorkerCrashed):
        await worker.client.queue()
    assert turns[1].error is not None and turns[1].error.name == "WorkerCrashed"
    assert len(worker.client.tasks) == 0
    assert listener.frames, "and the clients are written to"


async def test_a_task_that_comes_after_the_worker_was_told_to_quit_goes_to_the_successor() -> None:
    worker = Worker(ModelSpec(name="m"), Listener())
    inherited: dict[int, TaskReader] = {}
    worker.client.successor = inherited.update
    worker.quit()
    turn = Turn(worker.client, spec(1), lambda _: None)
    turn.submit()
    worker.gone.set()
    with pytest.raises(WorkerCrashed):
        await worker.client.queue()
    late = Turn(worker.client, spec(2), lambda _: None)
    late.submit()

    assert inherited == {1: turn, 2: late}
    assert turn.error is None and late.error is None
    assert len(worker.client.tasks) == 0


def registry_in(folder: Path, group: TaskGroup) -> Registry:
    config = load_config({"state_dir": folder, "models_dir": folder}, {})
    return Registry(config, group, lambda: None)


async def test_background_work_that_fails_ends_alone(tmp_path: Path) -> None:
    done = anyio.Event()

    async def fails() -> None:
        raise RuntimeError("a bug of somebody's")

    async def works() -> None:
        done.set()

    async with anyio.create_task_group() as group:
        registry = registry_in(tmp_path, group)
        registry.start_soon(fails)
        registry.start_soon(works)
        await done.wait()


async def test_tasks_whose_return_fails_hear_of_it_and_the_daemon_goes_on(tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        registry = registry_in(tmp_path, group)
        model = registry.catalog.get("echo", 0)
        scene = Scene()
        scene.failure = RuntimeError("a bug of somebody's")
        model.recovery._ready = scene.ready
        model.recovery.add_orphans(dict(scene.line.readers), Activity(Doing.REST, (), 0.0))
        registry.start_soon(model.recovery.resume_tasks)
        for turn in scene.turns:
            await turn.ended.wait()
    assert set(scene.errors().values()) == {"WorkerCrashed"}


@pytest.mark.process
async def test_a_model_that_was_swapped_and_has_left_is_not_loaded_for_who_still_asks_it(
    tmp_path: Path,
) -> None:
    """Whoever asked for a text when it left would wait for it for ever, or start it anew."""
    async with anyio.create_task_group() as group:
        registry = registry_in(tmp_path, group)
        model = registry.catalog.get("echo", 0)
        before = await model.load()
        await Swaps(registry, (), grace_s=1.0).swap(model, model.config)
        (former,) = model.predecessors.values()
        with anyio.fail_after(20):
            await before.gone.wait()
            with pytest.raises(WorkerCrashed, match="has left"):
                await former.ready()
        await registry.close()
