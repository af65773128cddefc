"""Contents of passed descriptors on their way to a node: bounds, and an end at any time."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from inferd.backends.errors import Busy
from inferd.gateways.fleet.entry.passed_descriptors import PassedDescriptors
from inferd.gateways.fleet.link import PART_BYTES, ContentKind
from inferd.ipc.server.descriptors import ClientDescriptors
from inferd.ipc.server.fairness import SharedLimit
from tests.waiting import wait_until

pytestmark = pytest.mark.asyncio
UID = 1000


class Node:
    """A connection to a node that takes frames while `accepts` is set."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.accepts = anyio.Event()

    def send_frame(self, frame: bytes) -> None:
        self.kinds.append(msgspec.msgpack.decode(frame[4:])[0])

    async def send_and_wait(self, frame: bytes) -> None:
        self.send_frame(frame)
        await self.accepts.wait()


@pytest.fixture
def descriptor() -> Iterator[int]:
    found = os.memfd_create("test")
    os.write(found, b"x" * (PART_BYTES + 1))
    yield found
    os.close(found)


@asynccontextmanager
async def sending(
    descriptor: int, limit: SharedLimit, node: Node
) -> AsyncIterator[anyio.abc.TaskGroup]:
    """Send a content, of which the node has taken the first part."""
    passed = PassedDescriptors(ClientDescriptors().of_user(UID), UID, limit)
    upstream: Any = node
    async with anyio.create_task_group() as group:
        group.start_soon(passed.send_contents, [descriptor], upstream)
        while not node.kinds:
            await anyio.lowlevel.checkpoint()
        yield group


async def test_contents_go_in_parts_as_the_node_takes_them(descriptor: int) -> None:
    limit, node = SharedLimit(1 << 20), Node()
    async with sending(descriptor, limit, node):
        await anyio.wait_all_tasks_blocked()
        assert node.kinds == [ContentKind.PART] and limit.total == PART_BYTES + 1
        node.accepts.set()
    assert node.kinds == [ContentKind.PART, ContentKind.PART, ContentKind.END]
    assert limit.total == 0


async def test_contents_beyond_the_shared_limit_are_busy(descriptor: int) -> None:
    passed = PassedDescriptors(ClientDescriptors().of_user(UID), UID, SharedLimit(PART_BYTES))
    node: Any = Node()
    with pytest.raises(Busy) as caught:
        await passed.send_contents([descriptor], node)
    assert caught.value.retry_after_s > 0 and node.kinds == []


async def test_a_cancelled_request_drops_its_contents(descriptor: int) -> None:
    limit, node = SharedLimit(1 << 20), Node()
    async with sending(descriptor, limit, node) as group:
        group.cancel_scope.cancel()
    assert node.kinds == [ContentKind.PART, ContentKind.DROP]
    assert limit.total == 0


async def test_unclaimed_descriptors_are_closed_with_the_connection() -> None:
    everybody = ClientDescriptors()
    user = everybody.of_user(UID)
    passed = PassedDescriptors(user, UID, SharedLimit(1))
    passed.add([os.memfd_create("one"), os.memfd_create("two")])
    (claimed,) = passed.claim(1)
    passed.close()
    wait_until(lambda: user.count == 1)
    passed.close_claimed([claimed])
    wait_until(lambda: user.count == 0)
