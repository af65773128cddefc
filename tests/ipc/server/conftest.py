"""The event loops under which the server's asyncio tests run: the daemon uses either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop

Loop = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories() -> Mapping[str, Loop]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
