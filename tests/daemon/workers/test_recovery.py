"""Suspects, trials, refusals and failed tasks when workers die, tested without a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGABRT, SIGKILL
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.errors import (
    Cancelled,
    InferdError,
    LoadFailed,
    OutOfMemory,
    QuotaExceeded,
    WorkerCrashed,
)
from inferd.backends.tensors import Tensor
from inferd.daemon.config.sources import load_config
from inferd.daemon.models.registry import Registry
from inferd.daemon.models.swap import Swaps
from inferd.daemon.workers.deaths import QUARANTINE_S, VERDICTS_MAX, Death
from inferd.daemon.workers.process_client import ProcessClient
from inferd.daemon.workers.recovery import (
    BACKOFF_S_MAX,
    CAREFUL_S,
    SHRINK_S,
    STALLED_S_MAX,
    Recovery,
)
from inferd.daemon.workers.worker import Worker
from inferd.ipc.server.request_bytes import RequestBytes
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Requester
from inferd.scheduler.record import Activity, ActivityKind
from inferd.sessions.turn.turn import Turn
from inferd.sessions.worker_client import TaskReader
from tests.sessions.doubles import InProcessClient

pytestmark = pytest.mark.asyncio
IDLE = Activity(ActivityKind.IDLE, (), 0.0)


class FakeWorkerClient(InProcessClient):
    """A client of a worker that does nothing by itself."""

    def __init__(self) -> None:
        self.commands = []
        self.readers = {}
        self.aside = {}

    def send_report(self, report: m.Tokens) -> None:
        self.readers[report.task_id].report(report)


class Scene:
    """A recovery, the clients of the workers that it has started, and a clock."""

    def __init__(self, tasks: int = 4):
        self.now = 0.0
        self.failure: Exception | None = None
        self.lines = [FakeWorkerClient()]
        self.recovery = Recovery("m", lambda: self.now)
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

    async def die(
        self,
        *step: int,
        kind: ActivityKind = ActivityKind.STEP,
        number: int = SIGABRT,
        beside_text: bool = False,
        **fields: bool,
    ) -> list[int]:
        """Kill the worker in a step with these tasks; return the tasks of the next worker."""
        kind = kind if step else ActivityKind.IDLE
        act = Activity(kind, step, self.now, beside_text)
        death = Death(activity=act, code=-number, **fields)
        readers, self.line.readers = self.line.readers, {}
        self.recovery.note_death(death, needed=bool(readers))
        self.recovery.add_orphans(readers, death)
        await self.recovery.resume_tasks(self.ready)
        return sorted(self.line.readers)

    def on_trial(self) -> dict[int, int]:
        """Return the tokens of the trials by the tasks that the present worker computes alone."""
        submitted = [c.task for c in self.line.commands if isinstance(c, m.Submit)]
        return {task.id: task.trial_tokens for task in submitted if task.trial_tokens}

    def errors(self) -> dict[int, str]:
        return {t.spec.id: t.error.name for t in self.turns if t.error is not None}


def spec(number: int) -> m.TaskSpec:
    tokens = m.pack_tokens([number] * 5)
    return m.TaskSpec(id=number, owner=Owner(1), tokens=tokens, sampling=SamplingParams())


async def test_all_tasks_continue_at_once_and_suspects_are_computed_alone() -> None:
    scene = Scene()

    assert await scene.die(2, 3) == [1, 2, 3, 4]
    assert scene.on_trial() == {2: 1, 3: 1}
    assert scene.recovery.careful_s
    scene.line.send_report(m.Tokens(2, [9], b"x"))
    scene.line.send_report(m.Tokens(3, [9], b"x"))
    scene.now += CAREFUL_S
    assert not scene.recovery.careful_s
    assert await scene.die() == [1, 2, 3, 4], "a death outside a step makes no suspects"
    assert scene.on_trial() == {}
    assert scene.errors() == {}


async def test_a_suspect_alone_in_the_next_fatal_step_is_refused_and_quarantined() -> None:
    scene = Scene()
    await scene.die(1, 2, 3)
    assert await scene.die(1) == [2, 3, 4]

    def refused(number: int) -> bool:
        return scene.recovery.quarantine.refusal_of_task("m", spec(number)) is not None

    assert scene.errors() == {1: "WorkerCrashed"}
    assert refused(1) and not refused(2)
    scene.now += QUARANTINE_S
    assert not refused(1)
    assert scene.on_trial() == {2: 1, 3: 1}, "their trials go on"


async def test_a_task_alone_in_a_fatal_step_is_guilty_at_the_second_death_only() -> None:
    scene = Scene()
    assert await scene.die(1) == [1, 2, 3, 4]
    assert await scene.die(1) == [2, 3, 4]


async def test_tasks_of_a_shared_step_are_never_refused() -> None:
    scene = Scene()
    for _ in range(5):
        scene.now += 1.0
        assert await scene.die(1, 2) == [1, 2, 3, 4]
    assert scene.errors() == {}


async def test_a_trial_grows_with_each_death_after_a_passed_one() -> None:
    scene = Scene()
    for tokens in (1, 4, 16, 64, 256, 256):
        await scene.die(1, 2)
        assert scene.on_trial() == {1: tokens, 2: tokens}
        await scene.die()
        assert scene.on_trial() == {1: tokens, 2: tokens}, "it has not begun"
        for number in (1, 2):
            scene.line.send_report(m.Tokens(number, [9] * tokens, b"x"))


async def test_a_death_while_a_thread_tokenized_convicts_nobody() -> None:
    scene = Scene()
    for kind in (ActivityKind.STEP, ActivityKind.SAMPLE):
        for _ in range(3):
            assert await scene.die(1, kind=kind, beside_text=True) == [1, 2, 3, 4]
            assert scene.recovery.careful_s, "the next worker has no such thread"
    assert await scene.die(1) == [2, 3, 4]


async def test_a_task_that_is_sampled_at_two_deaths_is_refused() -> None:
    scene = Scene()
    assert await scene.die(1, kind=ActivityKind.SAMPLE) == [1, 2, 3, 4]
    assert await scene.die(1, kind=ActivityKind.SAMPLE) == [2, 3, 4]
    assert scene.errors() == {1: "WorkerCrashed"}


@pytest.mark.parametrize("kind", [ActivityKind.STEP, ActivityKind.SAMPLE, ActivityKind.PROMPT])
async def test_a_kill_from_outside_blames_nobody(kind: ActivityKind) -> None:
    scene = Scene()
    for _ in range(20):
        scene.now += 2.0
        died = await scene.die(1, kind=kind, number=SIGKILL, made_progress=True)
        assert died == [1, 2, 3, 4]
        assert scene.on_trial() == {}
    assert scene.errors() == {}


async def test_a_death_from_outside_keeps_the_trials() -> None:
    scene = Scene()
    await scene.die(1, 2)
    assert await scene.die(1, number=SIGKILL) == [1, 2, 3, 4]
    assert scene.on_trial() == {1: 1, 2: 1}
    assert scene.errors() == {}


async def test_a_cancelled_suspect_is_skipped() -> None:
    scene = Scene()
    scene.turns[0].report(m.Failed(1, Cancelled("by the client").to_wire()))
    assert await scene.die(1, 2) == [2, 3, 4]
    assert scene.on_trial() == {2: 1}
    scene.line.readers[2].report(m.Failed(2, Cancelled("by the client").to_wire()))
    scene.now += CAREFUL_S
    assert not scene.recovery.careful_s


# OOM kills.


async def test_oom_kills_in_steps_shrink_the_model_and_then_refuse_the_tasks_of_the_step() -> None:
    scene = Scene()
    killed = partial(scene.die, 1, 2, number=SIGKILL, was_oom_killed=True)
    assert await killed() == [1, 2, 3, 4] and scene.recovery.shrinks == 0
    assert await killed() == [1, 2, 3, 4] and scene.recovery.shrinks == 1
    assert await killed() == [3, 4]
    assert scene.errors() == {1: "MissingMemory", 2: "MissingMemory"}
    scene.now += SHRINK_S + 1
    assert scene.recovery.shrinks == 0
    assert scene.recovery.quarantine.refusal_of_task("m", spec(1)) is None


async def test_an_oom_kill_while_a_task_is_sampled_refuses_that_task() -> None:
    scene = Scene()
    kind = ActivityKind.SAMPLE
    assert await scene.die(1, kind=kind, number=SIGKILL, was_oom_killed=True) == [2, 3, 4]
    assert scene.errors() == {1: "MissingMemory"}


async def test_an_oom_kill_of_an_idle_worker_shrinks_the_model() -> None:
    scene = Scene()
    assert await scene.die(number=SIGKILL, was_oom_killed=True) == [1, 2, 3, 4]
    assert scene.recovery.shrinks == 1


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
    fields: dict[str, Any] = {"owner": Owner(1), "tokens": b"", "sampling": SamplingParams()}
    push = Turn(line, m.TaskSpec(id=1, credit=3, **fields), lambda _: None)
    pull = Turn(line, m.TaskSpec(id=2, pull=True, **fields), lambda _: None)
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


async def test_restarts_are_delayed_after_deaths_without_a_token() -> None:
    scene = Scene()
    delays = []
    for _ in range(8):
        await scene.die(number=SIGKILL)
        delays.append(scene.recovery.restarts.delay_s("m"))
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, BACKOFF_S_MAX, BACKOFF_S_MAX]
    scene.now += 3.0
    assert scene.recovery.restarts.delay_s("m") == 1.0, "counted from the death"
    await scene.die(number=SIGKILL, made_progress=True)
    assert scene.recovery.restarts.delay_s("m") == 0.0


async def test_the_delay_stays_bounded_after_any_number_of_deaths() -> None:
    restarts = Scene().recovery.restarts
    for _ in range(2000):
        restarts.note_death(made_progress=False, needed=False)
    assert restarts.delay_s("m") == BACKOFF_S_MAX


async def test_restarts_end_after_a_time_without_a_token() -> None:
    scene = Scene()
    begun = scene.now
    while scene.now <= begun + STALLED_S_MAX:
        assert await scene.die(number=SIGKILL) == [1, 2, 3, 4]
        scene.recovery.restarts.delay_s("m")
        scene.now += 1.0
    await scene.die(number=SIGKILL)
    with pytest.raises(WorkerCrashed, match="without a token"):
        scene.recovery.restarts.delay_s("m")
    scene.now += BACKOFF_S_MAX
    assert scene.recovery.restarts.delay_s("m") == 0.0, "a later request loads the model again"


async def test_restarts_of_a_worker_that_is_not_needed_never_end() -> None:
    restarts = Scene().recovery.restarts
    clock = iter(range(0, 10_000, 100))
    restarts._seconds = lambda: float(next(clock))
    for _ in range(5):
        restarts.note_death(made_progress=False, needed=False)
        assert restarts.delay_s("m") == 0.0


async def test_tasks_of_a_model_that_does_not_load_fail_with_the_cause() -> None:
    scene = Scene()
    scene.failure = LoadFailed("the file was deleted")
    await scene.die(1)
    assert set(scene.errors().values()) == {"LoadFailed"}


@pytest.mark.parametrize(
    ("evidence", "errors"),
    [
        (Death(activity=IDLE, loaded=False, code=-SIGABRT), ["died", "crashed", "died"]),
        (Death(activity=IDLE, loaded=False, code=1), ["died", "crashed", "died"]),
        (Death(activity=IDLE, loaded=False, code=-SIGKILL), ["died"] * 5),
    ],
)
async def test_a_model_is_to_blame_at_the_second_fault_during_its_load(
    evidence: Death, errors: list[str]
) -> None:
    recovery = Scene().recovery
    assert [recovery.load_error(evidence, "x").data["cause"] for _ in errors] == errors
    recovery.note_loaded()
    assert recovery.load_error(evidence, "x").data["cause"] == "died"


async def test_an_oom_kill_during_a_load_is_missing_memory() -> None:
    death = Death(activity=IDLE, loaded=False, code=-SIGKILL, was_oom_killed=True)
    assert isinstance(Scene().recovery.load_error(death, "x"), OutOfMemory)


async def test_moved_tasks_are_not_deaths_and_keep_their_trials() -> None:
    scene = Scene()
    await scene.die(1, 2)
    for _ in range(10):
        readers, scene.line.readers = scene.line.readers, {}
        scene.recovery.move_tasks(readers)
        await scene.recovery.resume_tasks(scene.ready)
        assert sorted(scene.line.readers) == [1, 2, 3, 4]
    assert scene.errors() == {}
    assert scene.on_trial() == {1: 1, 2: 1}
    assert scene.recovery.recovered > 10


async def test_tasks_that_wait_for_a_worker_can_be_released() -> None:
    scene = Scene()
    readers, scene.line.readers = scene.line.readers, {}
    scene.recovery.move_tasks(readers)
    assert scene.recovery.release_tasks() == readers
    await scene.recovery.resume_tasks(scene.ready)
    assert scene.line.readers == {}


class FailingTurn(Turn):
    """A turn whose `report` raises."""

    def report(self, report: m.Report) -> None:
        raise RuntimeError("a reader's bug")


async def reserve_nothing() -> None: ...


def worker_of(flush: Callable[[], None] = lambda: None) -> Worker:
    return Worker(
        ModelSpec(name="m"),
        lambda _: None,
        flush=flush,
        request_bytes=RequestBytes(),
        reserve_embedding_memory=reserve_nothing,
    )


def client_of(sent: list[m.Command], request_bytes: RequestBytes | None = None) -> ProcessClient:
    return ProcessClient(
        ModelSpec(name="m"),
        lambda command, descriptor=-1: sent.append(command),
        anyio.Event(),
        lambda _: None,
        flush=lambda: None,
        request_bytes=request_bytes or RequestBytes(),
        reserve_embedding_memory=reserve_nothing,
    )


async def test_all_readers_get_the_report_of_a_death_although_one_raises() -> None:
    frames = list[None]()
    worker = worker_of(lambda: frames.append(None))
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
    assert frames, "and the clients are written to"


async def test_a_task_submitted_after_the_order_to_quit_goes_to_the_successor() -> None:
    worker = worker_of()
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
        model.recovery.add_orphans(dict(scene.line.readers), Death(activity=IDLE))
        registry.start_soon(model.recovery.resume_tasks, scene.ready)
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
        await Swaps(registry, (), 1.0, lambda mode, seconds: None).swap(model, model.config)
        (predecessor,) = model.predecessors.values()
        with anyio.fail_after(60):
            await before.exited.wait()
            with pytest.raises(WorkerCrashed, match="is unloaded for good"):
                await predecessor.ready()
        await registry.close()


@pytest.mark.parametrize(
    ("code", "alone_error"), [(-SIGABRT, WorkerCrashed), (-SIGKILL, OutOfMemory)]
)
async def test_inputs_that_were_computed_beside_others_are_suspects_and_guilty_alone(
    code: int, alone_error: type[InferdError]
) -> None:
    sent: list[m.Command] = []
    client = client_of(sent)
    causes: dict[int, str] = {}

    async def compute(number: int) -> None:
        with pytest.raises((WorkerCrashed, OutOfMemory)) as caught:
            await client.compute_tensors(Requester(Owner(7)), [("a", Tensor(bytes([number])))])
        causes[number] = str(caught.value.data.get("cause", ""))
        if number == 3:
            assert isinstance(caught.value, alone_error)

    for numbers, under_way in (((0, 1, 2), 2), ((3, 4), 1)):
        first = len(sent)
        async with anyio.create_task_group() as group:
            for number in numbers:
                group.start_soon(compute, number)
            await anyio.wait_all_tasks_blocked()
            ids = [c.id for c in sent[first:] if isinstance(c, m.ComputeTensors)]
            activity = Activity(ActivityKind.PROMPT, tuple(ids[:under_way]), 0.0)
            client.death = Death(activity=activity, code=code, was_oom_killed=code == -SIGKILL)
            client.settle(code)
    guilty = "input" if code == -SIGABRT else ""
    assert causes == {0: "suspect", 1: "suspect", 2: "", 3: guilty, 4: ""}
    for number in range(5):
        text = [("a", Tensor(bytes([number])))]
        refusal = client.quarantine.refusal_of_text("m", 7, text)
        assert (refusal is not None) == (number == 3 and code == -SIGABRT)


async def test_tokens_that_crash_the_process_are_refused_to_their_user_alone() -> None:
    sent: list[m.Command] = []
    client = client_of(sent)
    texts = client.texts_of(Requester(Owner(7)))

    async def detokenize(token: int) -> None:
        with pytest.raises(WorkerCrashed) as caught:
            await texts.detokenize([token])
        assert caught.value.data["cause"] == "input"

    for token in range(VERDICTS_MAX):
        async with anyio.create_task_group() as group:
            group.start_soon(detokenize, token)
            await anyio.wait_all_tasks_blocked()
            command = sent[-1]
            assert isinstance(command, m.Detokenize)
            activity = Activity(ActivityKind.PROMPT, (command.id,), 0.0)
            client.death = Death(activity=activity, code=-SIGABRT)
            client.settle(-SIGABRT)
    with pytest.raises(QuotaExceeded):
        await texts.detokenize([100])
    assert client.quarantine.refusal_of_text("m", m.NOBODY.owner.user, b"") is None, (
        "stats, queue, park"
    )
