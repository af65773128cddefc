"""The return of memory after large requests."""

from __future__ import annotations

import gc
import weakref

import anyio
import anyio.lowlevel
import pytest

from inferd.daemon.freed_memory import COLLECTED_BYTES, LARGE_BYTES, FreedMemory

pytestmark = pytest.mark.asyncio


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


async def test_the_cycles_of_many_large_requests_are_collected_at_once() -> None:
    freed = FreedMemory()
    gc.disable()
    try:
        cycle = weakref.ref(Cycle())
        freed.note_freed(COLLECTED_BYTES - 1)
        await anyio.lowlevel.checkpoint()
        assert cycle() is not None
        freed.note_freed(LARGE_BYTES)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert cycle() is None
    finally:
        gc.enable()


async def test_the_end_of_small_requests_collects_nothing() -> None:
    freed = FreedMemory()
    gc.disable()
    try:
        cycle = weakref.ref(Cycle())
        for _ in range(2 * COLLECTED_BYTES // LARGE_BYTES):
            freed.note_freed(LARGE_BYTES - 1)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert cycle() is not None
    finally:
        gc.enable()
