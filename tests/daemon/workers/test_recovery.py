"""Suspects, trials, refusals and failed tasks when workers die, tested without a process."""

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
from inferd.daemon.workers.recovery import (
    DEATHS_MAX,
    QUARANTINE_INPUTS_MAX,
    QUARANTINE_S,
    Quarantine,
    Recovery,
    fail_readers,
)
from inferd.daemon.workers.tasks import WorkerListener
from inferd.daemon.workers.worker import Worker
from inferd.scheduler import messages as m
from inferd.scheduler.recording.recorder import Activity, ActivityKind
from inferd.sessions.turn import Turn
from inferd.sessions.worker_client import TaskReader
from tests.sessions.doubles import InProcessClient

pytestmark = pytest.mark.asyncio


class FakeWorkerClient(InProcessClient):
    """A client of a worker that does nothing by itself."""

    def __init__(self) -> None:
        self.commands = []
        self.readers = {}

    def send_report(self, report: m.Tokens) -> None:
        self.readers[report.task_id].report(report)


class Scene:
    """A recovery, the clients of the workers that it has started, and a clock."""

    def __init__(self, tasks: int = 4):
        self.now = 0.0
        self.failure: Exception | None = None
        self.lines = [FakeWorkerClient()]
        self.recovery = Recovery("m", self.ready, lambda: self.now, instantly)
        self.turns = [Turn(self.lines[0], spec(n), lambda _: None) for n in range(1, tasks + 1)]
        for turn in self.turns:
            turn.submit()

    @property
    def line(self) -> FakeWorkerClient:
        return self.lines[-1]

    async def ready(self) -> FakeWorkerClient:
        if self.failure is not None:
            raise self.failure
        self.lines.append(FakeWorkerClient())
        return self.line

    async def die(self, *step: int) -> list[int]:
        """Kill the worker in a step with these tasks; return the tasks of the next worker."""
        act = Activity(ActivityKind.STEP if step else ActivityKind.IDLE, step, self.now)
        readers, self.line.readers = self.line.readers, {}
        self.recovery.add_orphans(readers, act)
        await self.recovery.resume_tasks()
        return sorted(self.line.readers)

    def errors(self) -> dict[int, str]:
        return {t.spec.id: t.error.name for t in self.turns if t.error is not None}


def spec(number: int) -> m.TaskSpec:
    tokens = m.pack_tokens([number] * 5)
    return m.TaskSpec(id=number, owner=1, tokens=tokens, sampling=SamplingParams())


async def test_tasks_outside_the_fatal_step_continue_at_once_and_suspects_one_by_one() -> None:
    scene = Scene()

    assert await scene.die(2, 3) == [1, 2, 4]
    scene.line.send_report(m.Tokens(2, [9], b"x"))
    assert sorted(scene.line.readers) == [1, 2, 3, 4]
    scene.line.send_report(m.Tokens(3, [9], b"x"))
    assert await scene.die() == [1, 2, 3, 4], "a death outside a step makes no suspects"
    assert scene.errors() == {}


async def test_a_task_on_trial_is_refused_after_a_death_and_its_prompt_quarantined() -> None:
    scene = Scene()
    await scene.die(1, 2, 3)
    assert await scene.die(1, 4) == [2, 4]

    assert scene.errors() == {1: "WorkerCrashed"}
    assert spec(1).tokens in scene.recovery.quarantine
    assert spec(2).tokens not in scene.recovery.quarantine
    scene.now += QUARANTINE_S
    assert spec(1).tokens not in scene.recovery.quarantine
    scene.line.send_report(m.Tokens(2, [9], b"x"))
    assert sorted(scene.line.readers) == [2, 3, 4], "the next suspect's turn"


async def test_a_death_outside_a_step_keeps_the_suspects() -> None:
    scene = Scene()
    await scene.die(1, 2)
    assert await scene.die() == [1, 3, 4]
    assert scene.errors() == {}


async def test_a_cancelled_suspect_is_skipped() -> None:
    scene = Scene()
    scene.turns[0].report(m.Failed(1, {"name": "Cancelled", "message": "by the client"}))
    assert await scene.die(1, 2) == [2, 3, 4]


async def test_a_continued_task_includes_the_tokens_already_sent() -> None:
    scene = Scene(tasks=1)
    scene.line.send_report(m.Tokens(1, [7, 8], "é".encode()))
    await scene.die(1)
    [submit] = [c for c in scene.line.commands if isinstance(c, m.Submit)]
    assert m.unpack_tokens(submit.task.tokens) == [1] * 5 + [7, 8]
    assert submit.task.resume_point is not None
    assert (submit.task.resume_point.output_tokens, submit.task.resume_point.text_bytes) == (2, 2)


async def test_open_credit_and_token_requests_stay_open() -> None:
    line = FakeWorkerClient()
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
    assert before[1] is not None and before[1].resume_point is not None
    assert before[1].resume_point.tokens_requested == 1
    assert (
        after is not None
        and after.resume_point is not None
        and after.resume_point.tokens_requested == 0
    )


async def test_tasks_fail_after_too_many_deaths() -> None:
    scene = Scene()
    for _ in range(DEATHS_MAX):
        scene.now += 0.1
        assert await scene.die() == [1, 2, 3, 4]
    scene.now += 0.1
    await scene.die()
    assert set(scene.errors()) == {1, 2, 3, 4}


async def test_tasks_of_a_model_that_does_not_load_fail_with_the_cause() -> None:
    scene = Scene()
    scene.failure = LoadFailed("the file was deleted")
    await scene.die(1)
    assert set(scene.errors().values()) == {"LoadFailed"}


async def test_after_a_death_during_the_load_another_worker_starts() -> None:
    scene = Scene()
    failures = [LoadFailed("it ended", data={"cause": "died"})] * 2

    async def ready() -> FakeWorkerClient:
        if failures:
            raise failures.pop()
        return await scene.ready()

    scene.recovery._ready = ready
    assert await scene.die() == [1, 2, 3, 4]
    assert scene.errors() == {}


async def test_moved_tasks_do_not_count_as_deaths_and_keep_the_trial() -> None:
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


async def test_tasks_that_wait_for_a_worker_can_be_released() -> None:
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
    """Return at once."""


class FailingTurn(Turn):
    """A turn whose `report` raises."""

    def report(self, report: m.Report) -> None:
        raise RuntimeError("a reader's bug")


class Listener(WorkerListener):
    """Fails the tasks of a dead process, and counts the frames."""

    def __init__(self) -> None:
        self.frames = 0

    def reports_handled(self) -> None:
        self.frames += 1

    def work_changed(self) -> None:
        return None

    def load_progressed(self, fraction: float) -> None:
        return None

    def memory_estimated(self, estimate: m.MemoryEstimate) -> None:
        return None

    async def reserve_embedding_memory(self) -> None:
        return None

    def embedding_context_created(self) -> None:
        return None

    def kv_file_changed(self, report: m.KvFileWritten | m.KvFileLost) -> None:
        return None

    def tasks_orphaned(self, readers: Mapping[int, TaskReader], act: Activity) -> None:
        fail_readers(readers, WorkerCrashed("the process ended"))


async def test_all_readers_get_the_report_of_a_death_although_one_raises() -> None:
    listener = Listener()
    worker = Worker(ModelSpec(name="m"), listener)
    turns = [
        kind(worker.client, spec(n), lambda _: None)
        for n, kind in enumerate((FailingTurn, Turn), 1)
    ]
    for turn in turns:
        turn.submit()
    worker.exited.set()

    with pytest.raises(WorkerCrashed):
        await worker.client.queue()
    assert turns[1].error is not None and turns[1].error.name == "WorkerCrashed"
    assert len(worker.client.tasks) == 0
    assert listener.frames, "and the clients are written to"


async def test_a_task_submitted_after_the_order_to_quit_goes_to_the_successor() -> None:
    worker = Worker(ModelSpec(name="m"), Listener())
    received: dict[int, TaskReader] = {}
    worker.client.successor = received.update
    worker.quit()
    turn = Turn(worker.client, spec(1), lambda _: None)
    turn.submit()
    worker.exited.set()
    with pytest.raises(WorkerCrashed):
        await worker.client.queue()
    late = Turn(worker.client, spec(2), lambda _: None)
    late.submit()

    assert received == {1: turn, 2: late}
    assert turn.error is None and late.error is None
    assert len(worker.client.tasks) == 0


def registry_in(folder: Path, group: TaskGroup) -> Registry:
    config = load_config({"state_dir": folder, "models_dir": folder}, {})
    return Registry(config, group, lambda: None)


async def test_failing_background_work_ends_alone(tmp_path: Path) -> None:
    done = anyio.Event()

    async def fails() -> None:
        raise RuntimeError("a bug")

    async def works() -> None:
        done.set()

    async with anyio.create_task_group() as group:
        registry = registry_in(tmp_path, group)
        registry.start_soon(fails)
        registry.start_soon(works)
        await done.wait()


async def test_tasks_fail_if_their_recovery_raises_and_the_daemon_continues(tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        registry = registry_in(tmp_path, group)
        model = registry.catalog.get("echo", 0)
        scene = Scene()
        scene.failure = RuntimeError("a bug")
        model.recovery._ready = scene.ready
        model.recovery.add_orphans(dict(scene.line.readers), Activity(ActivityKind.IDLE, (), 0.0))
        registry.start_soon(model.recovery.resume_tasks)
        for turn in scene.turns:
            await turn.ended.wait()
    assert set(scene.errors().values()) == {"WorkerCrashed"}


@pytest.mark.process
async def test_a_predecessor_that_was_unloaded_after_a_swap_is_not_loaded_again(
    tmp_path: Path,
) -> None:
    """A caller that waits for a text of the predecessor gets an error, not a new load."""
    async with anyio.create_task_group() as group:
        registry = registry_in(tmp_path, group)
        model = registry.catalog.get("echo", 0)
        before = await model.load()
        await Swaps(registry, (), grace_s=1.0).swap(model, model.config)
        (predecessor,) = model.predecessors.values()
        with anyio.fail_after(20):
            await before.exited.wait()
            with pytest.raises(WorkerCrashed, match="is unloaded for good"):
                await predecessor.ready()
        await registry.close()
