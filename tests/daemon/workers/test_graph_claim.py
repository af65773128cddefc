"""The claim of a graph on the cores."""

from __future__ import annotations

from contextlib import ExitStack

import anyio
import anyio.lowlevel
import pytest

from inferd.backends import ModelSpec
from inferd.daemon.workers.graph_claim import TICK_S, GraphClaim
from inferd.daemon.workers.process_client import ProcessClient, WorkerEvent
from inferd.ipc.server.request_bytes import RequestBytes
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority, Requester

pytestmark = pytest.mark.asyncio

ADA, BOB = Requester(Owner(1)), Requester(Owner(2), Priority.HIGH)
SAMPLES = 20


class Scene:
    """A claim on a clock of its own; *changes* are its values when it was reported."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changes: list[tuple[int | None, set[int]]] = []
        self.claim = GraphClaim(self._note, lambda: self.now)

    def _note(self) -> None:
        self.changes.append((self.claim.claim, self.claim.users))

    def pass_samples(self, share: float, requester: Requester = ADA, count: int = SAMPLES) -> None:
        """Compute in *share* of the time, in several computations a sample."""
        for _ in range(count):
            for _ in range(5):
                with ExitStack() as stack:
                    if share:
                        stack.enter_context(self.claim.computing(requester))
                    self.now += share * TICK_S / 5
                self.now += (1 - share) * TICK_S / 5
            self.claim.take_sample()


async def test_a_graph_claims_cores_while_it_is_busy_most_of_the_time() -> None:
    scene = Scene()
    scene.pass_samples(0.9)
    assert (scene.claim.claim, scene.claim.users) == (Priority.NORMAL, {1})
    scene.pass_samples(0.1)
    assert (scene.claim.claim, scene.claim.users) == (None, set())
    assert scene.changes == [(Priority.NORMAL, {1}), (None, set())]


async def test_rare_computations_claim_nothing() -> None:
    scene = Scene()
    scene.pass_samples(0.3)
    assert scene.changes == []


async def test_a_share_between_the_bounds_changes_nothing() -> None:
    scene = Scene()
    scene.pass_samples(0.4)
    assert scene.claim.claim is None
    scene.pass_samples(0.9)
    scene.pass_samples(0.4)
    assert scene.claim.claim == Priority.NORMAL
    assert len(scene.changes) == 1


async def test_one_long_computation_claims_cores_within_two_samples() -> None:
    scene = Scene()
    with scene.claim.computing(BOB):
        assert len(scene.claim) == 1
        for _ in range(2):
            scene.now += TICK_S
            scene.claim.take_sample()
        assert (scene.claim.claim, scene.claim.users) == (Priority.HIGH, {2})
    assert len(scene.claim) == 0


async def test_the_claim_is_that_of_all_users_and_of_the_highest_class() -> None:
    scene = Scene()
    scene.pass_samples(0.9)
    with scene.claim.computing(BOB):
        assert (scene.claim.claim, scene.claim.users) == (Priority.HIGH, {1, 2})
    scene.pass_samples(0.9, ADA, 1)
    assert (scene.claim.claim, scene.claim.users) == (Priority.HIGH, {1, 2})
    scene.pass_samples(0.9, ADA, 1)
    assert (scene.claim.claim, scene.claim.users) == (Priority.NORMAL, {1})
    assert [users for _, users in scene.changes] == [{1}, {1, 2}, {1}]


async def test_samples_are_taken_by_a_timer() -> None:
    claimed, freed = anyio.Event(), anyio.Event()

    def changed() -> None:
        (freed if claim.claim is None else claimed).set()

    claim = GraphClaim(changed)
    with claim.computing(ADA):
        await claimed.wait()
    await freed.wait()


async def test_a_graph_claims_cores_while_a_call_waits_for_its_outputs() -> None:
    sent: list[m.Command] = []
    changes: list[tuple[int | None, set[int], int]] = []
    changed = anyio.Event()

    def emit(event: WorkerEvent) -> None:
        nonlocal changed
        changes.append((client.claim, client.users, client.work))
        changed.set()
        changed = anyio.Event()

    client = ProcessClient(
        ModelSpec(name="g", backend="onnx"),
        lambda command, descriptor=-1: sent.append(command),
        anyio.Event(),
        emit,
        flush=lambda: None,
        request_bytes=RequestBytes(),
        reserve_embedding_memory=anyio.lowlevel.checkpoint,
    )
    async with anyio.create_task_group() as group:
        group.start_soon(client.compute_tensors, BOB, [])
        await changed.wait()
        assert changes == [(Priority.HIGH, {2}, 1)]
        command = sent[0]
        assert isinstance(command, m.ComputeTensors)
        client.queries.answer_query(command.id, m.ComputedTensors([], 0.0))
    while len(changes) == 1:
        await changed.wait()
    assert changes[1] == (None, set(), 0)


async def test_a_graph_claims_cores_by_the_use_of_channels_that_is_reported() -> None:
    scene = Scene()
    for tick in range(SAMPLES):
        scene.now += TICK_S
        if tick % 2:  # a report comes in every other interval, of twice as long a time
            scene.claim.count_busy([BOB], 2 * 0.9 * TICK_S, reports_follow=True)
        scene.claim.take_sample()
    assert (scene.claim.claim, scene.claim.users) == (Priority.HIGH, {2})
    for _ in range(SAMPLES):
        scene.now += TICK_S
        scene.claim.take_sample()
    assert scene.changes == [(Priority.HIGH, {2}), (None, set())]


async def test_channels_do_not_count_more_time_than_has_passed() -> None:
    scene = Scene()
    for _ in range(2):
        scene.now += TICK_S
        scene.claim.count_busy([ADA], 60.0, reports_follow=False)
        scene.claim.take_sample()
    for _ in range(3):
        scene.now += TICK_S
        scene.claim.take_sample()
    assert scene.claim.claim is None, "the share falls at once"
