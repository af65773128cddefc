"""Requests of which only the newest one of each key counts."""

from __future__ import annotations

import anyio
import pytest

from inferd.ipc.superseding import NewestRequests

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Requests:
    """Requests that run until they are cancelled or `finish` is set; `log` has their events."""

    def __init__(self) -> None:
        self.newest, self.finish = NewestRequests(), anyio.Event()
        self.log: list[str] = []
        self.changed = anyio.Event()

    def note(self, event: str) -> None:
        self.log.append(event)
        self.changed.set()
        self.changed = anyio.Event()

    async def until(self, event: str) -> None:
        with anyio.fail_after(5):
            while event not in self.log:
                await self.changed.wait()

    async def run(self, name: str, key: str) -> None:
        with anyio.CancelScope() as scope:
            async with self.newest.supersede(key, scope.cancel):
                self.note(f"{name} begins")
                try:
                    await self.finish.wait()
                finally:
                    self.note(f"{name} ends")


async def test_a_newer_request_begins_once_the_previous_one_has_ended() -> None:
    requests = Requests()
    async with anyio.create_task_group() as group:
        for name in ("a", "b", "c"):
            group.start_soon(requests.run, name, "buffer")
            await requests.until(f"{name} begins")
        requests.finish.set()
    assert requests.log == [
        *("a begins", "a ends", "b begins", "b ends", "c begins", "c ends"),
    ]
    assert len(requests.newest) == 0


async def test_of_many_at_once_only_the_last_one_runs_to_its_end() -> None:
    requests = Requests()
    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(requests.run, str(number), "buffer")
        await requests.until("99 begins")
        requests.finish.set()
    assert requests.log[-2:] == ["99 begins", "99 ends"]
    begun = [event for event in requests.log if event.endswith("begins")]
    assert len(begun) <= 2, begun
    assert len(requests.newest) == 0


async def test_requests_with_other_keys_run_side_by_side() -> None:
    requests = Requests()
    async with anyio.create_task_group() as group:
        for name in ("a", "b"):
            group.start_soon(requests.run, name, name)
            await requests.until(f"{name} begins")
        requests.finish.set()
    assert requests.log[:2] == ["a begins", "b begins"]
