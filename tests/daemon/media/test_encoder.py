"""A model's encoder, with the process of an echo model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from inferd.backends import ModelSpec
from inferd.backends import media_process as p
from inferd.backends.errors import (
    BackendError,
    Busy,
    InvalidArgument,
    LoadFailed,
    NotFound,
    QuotaExceeded,
    TooLarge,
    WorkerCrashed,
)
from inferd.daemon.media import encoder
from inferd.daemon.media.encoder import EncoderEvent
from inferd.daemon.media.encoder_process import EncoderProcess
from inferd.daemon.media.encoder_queue import EncoderBounds
from inferd.daemon.workers.cores import LOADING
from inferd.daemon.workers.deaths import VERDICTS_MAX
from inferd.daemon.workers.process import start_spawner

from .encoders import Gate, Scene, encoding, open_files, requester

pytestmark = [pytest.mark.asyncio, pytest.mark.process]
EMBEDDING_BYTES = 16


@pytest.fixture(autouse=True)
def spawner() -> None:
    start_spawner()  # its descriptors stay open


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


async def test_a_content_is_read_and_encoded_once() -> None:
    async with encoding(Scene({})) as scene:
        [item] = await scene.read_items(b"x" * 130)
        assert item.size == 3 and item.content.sha256
        embeddings, cached = await scene.encode(b"x" * 130)
        assert embeddings == bytes(3 * EMBEDDING_BYTES) and not cached
        assert await scene.encode(b"x" * 130) == (embeddings, True)
        assert scene.results == {"encoded": 1, "cached": 1}


async def test_the_tiles_of_a_content_are_encoded_together() -> None:
    async with encoding(Scene({"media_tiles": 3})) as scene:
        content = scene.add(b"tiles")
        [read] = await scene.encoder.read(requester(1), [content])
        assert [item.index for item in read.items] == [0, 1, 2]
        assert read.tokens.count(ord("\n")) == 2
        for number, item in enumerate(read.items):
            found = await scene.encoder.embeddings(requester(1), item)
            os.close(found.fd)
            assert found.cached == bool(number)


async def test_another_bound_on_tokens_is_another_item() -> None:
    async with encoding(Scene({})) as scene:
        contents = [scene.add(b"x" * 1000, tokens_max=most) for most in (0, 4)]
        read = await scene.encoder.read(requester(1), contents)
        assert [len(found.tokens) for found in read] == [16, 4]
        assert read[0].items[0].digest != read[1].items[0].digest


async def test_errors_name_the_content() -> None:
    async with encoding(Scene({})) as scene:
        contents = [scene.add(b"fine"), scene.add(b"refuse this"), scene.add(b"fine, too")]
        with pytest.raises(InvalidArgument) as refused:
            await scene.encoder.read(requester(1), contents)
        assert refused.value.data["item"] == 1
        with pytest.raises(NotFound) as missing:
            await scene.encoder.read(requester(2), contents[:1])
        assert missing.value.data["item"] == 0
        scene.encoder.size_whole_max = 1
        assert await scene.encoder.read(requester(1), contents[:1]), "echo's items are causal"


async def test_an_item_that_is_larger_than_a_step_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with encoding(Scene({})) as scene:
        content = scene.add(b"x" * 300)
        await scene.encoder.read(requester(1), [content])
        whole = scene.encoder.caches.find_read(1, content)
        assert whole is not None
        scene.encoder.caches.add_read(1, content, whole._replace(size_whole=5))
        scene.encoder.size_whole_max = 5
        await scene.encoder.read(requester(1), [content])
        scene.encoder.size_whole_max = 4
        with pytest.raises(TooLarge) as refused:
            await scene.encoder.read(requester(1), [content])
        assert refused.value.data == {"item": 0, "tokens": 5, "tokens_max": 4}


async def test_a_user_finds_nothing_of_another_one() -> None:
    async with encoding(Scene({})) as scene:
        assert [(await scene.encode(b"same", user))[1] for user in (1, 2, 1, 2)] == [
            *(False, False),
            *(True, True),
        ]


async def test_users_share_embeddings_if_they_share_kv_states() -> None:
    async with encoding(Scene({}, shared=True)) as scene:
        assert [(await scene.encode(b"same", user))[1] for user in (1, 2)] == [False, True]


async def test_requests_for_one_content_wait_for_one_encoding(gate: Gate) -> None:
    async with encoding(Scene({"media_gate": str(gate.path)})) as scene:
        [item] = await scene.read_items(b"document")
        cached = []

        async def embed(by: int) -> None:
            found = await scene.encoder.embeddings(requester(1), item, by)
            os.close(found.fd)
            cached.append((by, found.cached))

        async with anyio.create_task_group() as group:
            for by in (7, 8, 7, 9):
                group.start_soon(embed, by)
            await gate.wait_reached()
            assert scene.encoder.waiting == 4 and scene.encoder.users == {1}
            assert scene.encoder.claim == LOADING
            gate.open()
        assert sorted(cached) == [(7, False), (7, False), (8, True), (9, True)]
        assert scene.encoder.claim is None
        assert scene.encoder.caches.items == 1


async def test_the_cache_is_bounded_and_an_item_that_left_is_encoded_again() -> None:
    async with encoding(Scene({}, cache_bytes=EMBEDDING_BYTES)) as scene:
        found = [(await scene.encode(data))[1] for data in (b"a", b"b", b"b", b"a")]
        assert found == [False, False, True, False]


async def test_an_item_of_another_projector_is_an_error() -> None:
    async with encoding(Scene({})) as scene:
        [item] = await scene.read_items(b"x")
        other = type(item)(b"d" * 32, item.size, 0, item.content, 0)
        with pytest.raises(BackendError) as changed:
            await scene.encoder.embeddings(requester(1), other)
        assert changed.value.data["cause"] == "projector"


async def test_a_hundred_requests_at_once() -> None:
    async with encoding(Scene({})) as scene:
        done = set[tuple[int, int]]()

        async def encode(user: int, number: int) -> None:
            embeddings, _ = await scene.encode(b"x" * 64 * number, user)
            assert len(embeddings) == EMBEDDING_BYTES * (1 + number)
            done.add((user, number))

        async with anyio.create_task_group() as group:
            for number in range(25):
                for user in range(4):
                    group.start_soon(encode, user, number)
        assert len(done) == 100 and scene.results == {"encoded": 100} and not scene.deaths


async def test_too_many_requests_of_a_user_are_refused(gate: Gate) -> None:
    bounds = EncoderBounds(waiting_user_max=3)
    async with encoding(Scene({"media_gate": str(gate.path)}, bounds=bounds)) as scene:
        async with anyio.create_task_group() as group:
            group.start_soon(scene.encode, b"first")
            await gate.wait_reached()
            contents = [scene.add(bytes([number])) for number in range(3)]
            with pytest.raises(Busy) as refused:
                await scene.encoder.read(requester(1), contents)
            assert refused.value.data["bound"] == "media-waiting-user-max"
            assert refused.value.retry_after_s > 0
            group.start_soon(scene.encoder.read, requester(1), contents[:2])
            gate.open()
        assert len(await scene.encoder.read(requester(1), contents)) == 3


# Deaths of the process.


async def test_a_content_that_crashes_the_process_is_quarantined_for_its_user() -> None:
    for place in ("read", "encode"):
        options = {"media_abort_on": "bad", "media_abort_in": place}
        async with encoding(Scene(options)) as scene:
            for _ in range(2):
                with pytest.raises(WorkerCrashed) as crashed:
                    await scene.encode(b"a bad image")
                assert crashed.value.data["cause"] == "input" and not crashed.value.retryable
                assert "encoder" in crashed.value.message
            assert scene.deaths == 1, "the second time it was known"
            assert (await scene.encode(b"a good one"))[1] is False
            with pytest.raises(WorkerCrashed):
                await scene.encode(b"a bad image", user=2)
            assert scene.deaths == 2, "one user's quarantine is not another's"


async def test_requests_of_others_survive_a_crash() -> None:
    options = {"media_abort_on": "bad", "media_abort_in": "read"}
    async with encoding(Scene(options)) as scene:
        failed = list[int]()

        async def encode(user: int, data: bytes) -> None:
            try:
                await scene.encode(data, user)
            except WorkerCrashed:
                failed.append(user)

        async with anyio.create_task_group() as group:
            for user in range(6):
                group.start_soon(encode, user, b"bad" if user == 3 else b"good")
        assert failed == [3] and scene.deaths == 1 and scene.results == {"encoded": 5}


async def test_a_user_whose_contents_crash_it_again_and_again_is_refused_for_a_while() -> None:
    async with encoding(Scene({"media_abort_on": "bad"})) as scene:
        for number in range(VERDICTS_MAX):
            with pytest.raises(WorkerCrashed):
                await scene.encode(b"bad %d" % number)
        with pytest.raises(QuotaExceeded) as banned:
            await scene.encode(b"good")
        assert banned.value.data["item"] == 0
        await scene.encode(b"good", user=2)


async def test_a_process_that_was_killed_while_it_encodes_does_not_fail_the_request(
    gate: Gate,
) -> None:
    async with encoding(Scene({"media_gate": str(gate.path)})) as scene:
        async with anyio.create_task_group() as group:
            group.start_soon(scene.encode, b"x")
            await gate.wait_reached()
            killed = scene.kill()
            gate.open()
            await scene.until(lambda: scene.encoder.pid not in (0, killed))
            await gate.wait_reached()
            gate.open()
        assert scene.results == {"encoded": 1} and scene.deaths == 1


async def test_a_process_that_is_always_killed_with_a_content_fails_the_request(
    gate: Gate,
) -> None:
    async with encoding(Scene({"media_gate": str(gate.path)})) as scene:

        async def encode() -> None:
            with pytest.raises(BackendError) as failed:
                await scene.encode(b"x")
            assert "killed 3 times" in failed.value.message

        async with anyio.create_task_group() as group:
            group.start_soon(encode)
            for deaths in range(1, 4):
                await gate.wait_reached()
                scene.kill()
                gate.open()
                await scene.until(partial(scene.has_died, deaths))
        assert scene.deaths == 3


async def test_a_process_killed_at_any_point_is_replaced() -> None:
    """Kill the process at each event in turn: while it opens, is idle, reads and encodes."""
    for point in range(12):
        async with encoding(Scene({})) as scene:
            left = point

            def kill(_: EncoderEvent, scene: Scene = scene) -> None:
                nonlocal left
                left -= 1
                if left == 0 and scene.encoder.pid:
                    scene.kill()

            scene.on_event = kill
            for data in (b"one", b"two"):
                embeddings, _ = await scene.encode(data)
                assert embeddings == bytes(EMBEDDING_BYTES)
            assert scene.deaths <= 1


async def test_a_process_that_dies_while_it_is_idle_is_replaced_at_once() -> None:
    async with encoding(Scene({})) as scene:
        await scene.encode(b"x")
        before = scene.kill()
        await scene.until(lambda: scene.encoder.pid not in (0, before))
        assert scene.deaths == 1 and (await scene.encode(b"x"))[1] is True


async def test_a_process_that_does_not_answer_is_killed(gate: Gate) -> None:
    scene = Scene({"media_gate": str(gate.path)}, hang_s=0.4)
    async with encoding(scene):
        with pytest.raises(BackendError):  # it waits, so the content is not to blame
            await scene.encode(b"x")
        assert scene.deaths == 3


async def test_a_projector_that_cannot_be_opened_fails_the_requests() -> None:
    spec = ModelSpec(name="m", backend="echo", options={"media": True, "media_tiles": "many"})
    scene = Scene({}, spec=spec)
    async with encoding(scene):
        with pytest.raises(LoadFailed):
            await scene.encode(b"x")
        assert scene.encoder.error is not None and not scene.encoder.pid


# Cancellation and the end.


async def test_a_request_that_nobody_waits_for_is_not_begun(gate: Gate) -> None:
    async with encoding(Scene({"media_gate": str(gate.path)})) as scene:
        items = [(await scene.read_items(data))[0] for data in (b"a", b"b", b"c")]
        scopes = [anyio.CancelScope() for _ in items]

        async def embed(number: int) -> None:
            with scopes[number]:
                found = await scene.encoder.embeddings(requester(1), items[number])
                os.close(found.fd)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(embed, number)
            await gate.wait_reached()
            scopes[0].cancel()  # under way: it ends, and stays for later
            scopes[1].cancel()
            await anyio.wait_all_tasks_blocked()
            assert scene.encoder.waiting == 1
            gate.open()
            await scene.until(lambda: scene.encoder.caches.items)
            await gate.wait_reached()
            gate.open()
        assert scene.encoder.caches.items == 2
        assert scene.encoder.caches.find_encoded(1, items[1].digest) is None


@pytest.mark.parametrize("steps", range(12))
async def test_a_request_cancelled_at_any_await_leaves_nothing(steps: int) -> None:
    async with encoding(Scene({})) as scene:
        await scene.encode(b"warm")
        files, scope = open_files(), anyio.CancelScope()

        async def encode() -> None:
            with scope:
                await scene.encode(b"x")

        async with anyio.create_task_group() as group:
            group.start_soon(encode)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            scope.cancel()
        await scene.until(lambda: scene.encoder.claim is None)
        assert scene.encoder.waiting == 0
        assert len(open_files()) <= len(files) + 1, "only the cache may hold the item"
        assert await scene.encode(b"x")


async def test_an_encoder_that_is_closed_refuses_all_requests(gate: Gate) -> None:
    async with encoding(Scene({"media_gate": str(gate.path)})) as scene:
        refused = list[str]()

        async def encode(data: bytes) -> None:
            try:
                await scene.encode(data)
            except WorkerCrashed as exc:
                refused.append(exc.message)

        async with anyio.create_task_group() as group:
            for data in (b"a", b"b", b"c"):
                group.start_soon(encode, data)
            await gate.wait_reached()
            scene.encoder.close()
        gate.open()
        assert len(refused) == 3
        with pytest.raises(WorkerCrashed):
            await scene.encode(b"d")


async def test_an_encoder_that_never_ran_can_be_closed() -> None:
    scene = Scene({})
    scene.encoder.close()
    with anyio.fail_after(60):
        await scene.encoder.run()
        with pytest.raises(WorkerCrashed):
            await scene.read_items(b"x")


async def test_an_idle_process_gets_all_threads_once_no_model_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, free = list[p.Request](), [0, 0, 3]
    got_threads = anyio.Event()

    sends = EncoderProcess.send

    async def send(process: EncoderProcess, request: p.Request, content: int = -1) -> None:
        await sends(process, request, content)
        if isinstance(request, p.UseThreads):
            sent.append(request)
            got_threads.set()

    monkeypatch.setattr(encoder, "IDLE_S", 0.001)
    monkeypatch.setattr(EncoderProcess, "send", send)
    async with encoding(Scene({}, idle_threads=lambda: free.pop(0))):
        await got_threads.wait()
        await anyio.wait_all_tasks_blocked()
    assert sent == [p.UseThreads(2)] and not free
