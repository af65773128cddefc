"""Daemons end and start again under clients that connect again, and under those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from inferd import AsyncClient, Client, ConnectionLost, InferdError, InvalidArgument, ShuttingDown
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model

CONFIG = "[daemon]\nshutdown_grace_s = 0\n" + echo_model("m") + echo_model("slow", step_ms=20)
Call = Callable[..., Any]


def kill(daemon: RunningDaemon) -> None:
    daemon.kill()


def stop(daemon: RunningDaemon) -> None:
    assert daemon.stop() == 0


ENDINGS = pytest.mark.parametrize("end", [kill, stop])
DRIVERS = pytest.mark.parametrize("driver", ["blocking", "async"])


@contextmanager
def opened(driver: str, path: str, **options: Any) -> Iterator[Call]:
    """Connect a client, and yield a function that makes a call by its name."""
    if driver == "blocking":
        with Client(path, **options) as client:
            yield lambda name, *args, **kw: getattr(client, name)(*args, **kw)
        return
    with start_blocking_portal() as portal:
        asynchronous = AsyncClient(path, **options)
        portal.call(asynchronous.open)
        try:
            yield lambda name, *args, **kw: portal.call(
                partial(getattr(asynchronous, name), *args, **kw)
            )
        finally:
            portal.call(asynchronous.aclose)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """A daemon that each test leaves running."""
    with running_daemon(CONFIG) as daemon:
        yield daemon


@DRIVERS
@ENDINGS
def test_a_client_with_reconnect_connects_again(
    driver: str, end: Callable[[RunningDaemon], None], daemon: RunningDaemon
) -> None:
    with opened(driver, daemon.socket, reconnect=True) as call:
        context = call("init_execution_context", call("load_by_name", "m"))
        end(daemon)
        daemon.start_again()
        with pytest.raises(InvalidArgument, match="no execution context"):  # it ended, too
            call("chat", context, "x")
        assert call("chat", "m", "again") == "again"


@DRIVERS
@ENDINGS
def test_without_reconnect_a_loss_is_final(
    driver: str, end: Callable[[RunningDaemon], None], daemon: RunningDaemon
) -> None:
    with opened(driver, daemon.socket, retries=3) as call:
        end(daemon)
        daemon.start_again()
        for _ in range(3):
            with pytest.raises(ConnectionLost, match=r"closed the connection|reset by") as lost:
                call("stats")
            assert not lost.value.retryable
        with pytest.raises(ConnectionLost):
            call("chat", "m", "hello")


@DRIVERS
def test_a_call_waits_for_the_daemon_for_resume_timeout(driver: str, daemon: RunningDaemon) -> None:
    with ThreadPoolExecutor(1) as pool:
        with opened(driver, daemon.socket, reconnect=True, resume_timeout=0.2) as call:
            stop(daemon)
            with pytest.raises(ConnectionLost, match="no daemon answers"):
                call("stats")
            with pytest.raises(ConnectionLost, match="no daemon answers"):
                call("stats", timeout=0.1)
            daemon.start_again()
            assert "tasks" in str(call("stats"))
        with opened(driver, daemon.socket, reconnect=True) as call:
            stop(daemon)
            waiting = pool.submit(call, "chat", "m", "patient")
            daemon.start_again()
            assert waiting.result(timeout=30) == "patient"


@DRIVERS
@ENDINGS
def test_a_call_under_way_fails_and_is_not_repeated(
    driver: str, end: Callable[[RunningDaemon], None], daemon: RunningDaemon
) -> None:
    options = {"reconnect": True, "retries": 3}
    with ThreadPoolExecutor(1) as pool, opened(driver, daemon.socket, **options) as call:
        waiting = pool.submit(call, "chat", "slow", "x" * 2000)
        with Client(daemon.socket) as watcher:
            while not watcher.queue():
                assert not waiting.done()
        end(daemon)
        daemon.start_again()
        with pytest.raises(InferdError) as failed:
            waiting.result(timeout=30)
        assert isinstance(failed.value, ConnectionLost | ShuttingDown)
        assert call("queue") == []
        assert call("chat", "m", "next") == "next"


def test_a_session_without_resume_ends_with_its_connection(daemon: RunningDaemon) -> None:
    with Client(daemon.socket, reconnect=True) as client, client.session("m") as session:
        kill(daemon)
        daemon.start_again()
        with pytest.raises(ConnectionLost):
            session.chat("x")
        assert client.chat("m", "another session") == "another session"
        with pytest.raises(ConnectionLost):
            session.chat("x")
