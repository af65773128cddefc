"""A worker or the daemon is killed in every state: the promises hold, and nothing is left behind.

The states come from `sessions/table.py` and `daemon/models/model.py`. A state without an entry in
`WAYS` or `MODEL_WAYS` fails `test_every_state_can_be_reached`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd.backends.errors import (
    Cancelled,
    InferdError,
    InvalidArgument,
    LoadFailed,
    SessionBusy,
)
from inferd.daemon.models.model import ModelState
from inferd.sessions.table import ACTIVE, SessionState
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

CONFIG = '[models.bad]\nfile = "nowhere.gguf"\n'
CONFIG += echo_model("m", slots=1, step_ms=2) + echo_model("slow", load_ms=20_000)
TALE = "once upon a time there was a daemon that nobody could kill. " * 2
URGENT = "let me through, I am in a hurry. " * 3
ID = "victim"


@dataclass
class Scene:
    """A daemon with one session on the model `m`, brought into a state by `WAYS`."""

    daemon: RunningDaemon
    client: RawClient
    other: RawClient
    """Another client, which blocks the slot and queries states."""
    context: int = 0
    graph: int = 0
    turns: list[tuple[RawClient, int, str]] = field(default_factory=list)
    """Turns under way: the client, its request, the expected text."""

    def open(self) -> None:
        graph = self.client.call("load_by_name", name="m")["graph"]
        call = "init_execution_context_with_session_id"
        self.graph = int(graph)
        self.context = int(self.client.call(call, graph=graph, session_id=ID)["context"])

    def stream(self, client: RawClient, context: int, text: str, priority: str) -> None:
        params = {"context": context, "prompt": text, "priority": priority}
        number = client.start_request("stream", **params, raw=True, credit=1000)
        self.turns.append((client, number, text))

    def block_slot(self) -> None:
        """Start an urgent turn, which takes the only slot."""
        self.stream(self.other, self.other.context("m"), URGENT, "urgent")
        self.other.events.append(self.other.read_message())

    def start_turn(self) -> None:
        """Start the session's turn."""
        self.stream(self.client, self.context, TALE, "low")

    def await_state(self, state: SessionState) -> None:
        with RawClient(self.daemon.socket) as observer:
            wait_until(lambda: self.state(observer) == state.value, 10)

    def state(self, observer: RawClient) -> str | None:
        listed = observer.call("sessions", dormant=True)["sessions"]
        return next((s["state"] for s in listed if s["session_id"] == ID), None)

    def worker(self, model: str = "m") -> int:
        (found,) = self.other.call("show", name=model)["models"]
        return int(found["pid"])


def waiting(scene: Scene) -> None:
    scene.block_slot()
    scene.start_turn()


def running(scene: Scene) -> None:
    scene.start_turn()
    scene.client.events.append(scene.client.read_message())


def parked(scene: Scene) -> None:
    running(scene)
    scene.block_slot()


def ready(scene: Scene) -> None:
    scene.client.set_input(scene.context, b"hello")


def done(scene: Scene) -> None:
    ready(scene)
    scene.client.call("compute", context=scene.context)


def failed(scene: Scene) -> None:
    running(scene)
    scene.other.call("cancel", context=scene.context)
    client, number, _ = scene.turns.pop()
    with pytest.raises(InferdError):
        client.wait_result(number)


def unloaded(scene: Scene) -> None:
    done(scene)
    scene.other.call("load_by_name", name="m")
    scene.client.call("unload", graph=scene.graph)


def dormant(scene: Scene) -> None:
    done(scene)
    scene.client.socket.close()


def closed(scene: Scene) -> None:
    done(scene)
    scene.client.call("delete_session", context=scene.context)


WAYS: dict[SessionState, Callable[[Scene], None]] = {
    SessionState.EMPTY: lambda scene: None,
    SessionState.READY: ready,
    SessionState.WAITING: waiting,
    SessionState.RUNNING: running,
    SessionState.PARKED: parked,
    SessionState.DONE: done,
    SessionState.FAILED: failed,
    SessionState.UNLOADED: unloaded,
    SessionState.DORMANT: dormant,
    SessionState.CLOSED: closed,
}


@contextmanager
def scene_of(daemon: RunningDaemon, state: SessionState) -> Iterator[Scene]:
    """Yield a scene whose session is in *state*."""
    with RawClient(daemon.socket) as client, RawClient(daemon.socket) as other:
        scene = Scene(daemon, client, other)
        scene.open()
        WAYS[state](scene)
        if state is not SessionState.CLOSED:
            scene.await_state(state)
        yield scene


def test_every_state_can_be_reached() -> None:
    assert set(WAYS) == set(SessionState)
    assert set(MODEL_WAYS) == set(ModelState)


def chat(daemon: RunningDaemon, model: str = "m") -> None:
    """Assert that the daemon serves the session by its id as well as a new one."""
    with RawClient(daemon.socket) as client:
        graph = client.call("load_by_name", name=model)["graph"]
        for session_id in (ID, "another"):
            context = opened(client, graph, session_id)
            client.set_input(context, b"are you there?")
            client.call("compute", context=context)
            assert client.output(context) == b"are you there?"
            client.call("delete_session", context=context)


def opened(client: RawClient, graph: int, session_id: str) -> int:
    """Open a session by its id, as soon as the previous owner has closed or deleted it."""

    def attach() -> dict[str, Any] | None:
        call = "init_execution_context_with_session_id"
        with suppress(SessionBusy):
            return dict(client.call(call, graph=graph, session_id=session_id))
        return None

    return int(wait_until(attach)["context"])


def processes(daemon: RunningDaemon) -> set[int]:
    """Return the daemon's processes that have not ended."""
    return {p.pid for p in psutil.Process(daemon.pid).children() if not is_ended(p.pid)}


def is_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """Yield a daemon, and assert that it leaves neither processes nor files when it stops. Each
    test ends with `chat`, which deletes the session.
    """
    running = running_daemon(CONFIG)
    running.start()
    try:
        yield running
        workers = processes(running)
        assert running.stop() == 0
        assert not Path(running.socket).exists()
        wait_until(lambda: all(map(is_ended, workers)), 5)
        files = {p.name for p in running.directory.rglob("*") if p.is_file()}
        assert not {name for name in files if name.endswith((".new", ".tmp", ".part"))}
    finally:
        with suppress(Exception):
            running.kill()
        running.__exit__(None, None, None)


@pytest.mark.parametrize("state", SessionState)
def test_a_worker_is_killed_in_every_state_of_a_session(
    state: SessionState, daemon: RunningDaemon
) -> None:
    with scene_of(daemon, state) as scene:
        os.kill(scene.worker(), signal.SIGKILL)
        for client, request, text in scene.turns:
            client.wait_result(request)
            assert client.streamed_text == text, "no character is lost or repeated"
        if state is SessionState.CLOSED:
            with pytest.raises(InvalidArgument):
                scene.client.output(scene.context)
        if state in (SessionState.DONE, SessionState.UNLOADED):
            assert scene.client.output(scene.context) == b"hello"
        if state in ACTIVE or state in (
            SessionState.EMPTY,
            SessionState.READY,
            SessionState.DONE,
            SessionState.FAILED,
        ):
            scene.client.set_input(scene.context, b"and on we go")
            scene.client.call("compute", context=scene.context)
            assert scene.client.output(scene.context) == b"and on we go"
    chat(daemon)
    assert len(processes(daemon)) == 1


@pytest.mark.parametrize("state", SessionState)
def test_the_daemon_is_killed_in_every_state_of_a_session(
    state: SessionState, daemon: RunningDaemon
) -> None:
    with scene_of(daemon, state):
        workers = processes(daemon)
        assert workers
        daemon.kill()
        wait_until(lambda: all(map(is_ended, workers)), 5)
    daemon.start_again()
    chat(daemon)


def is_loading(scene: Scene) -> str:
    scene.turns.append((scene.client, scene.client.start_request("load_by_name", name="slow"), ""))
    return "slow"


def is_unloading(scene: Scene) -> str:
    """A stopped worker does not read the command to quit."""
    pid = scene.worker()
    os.kill(pid, signal.SIGSTOP)
    scene.turns.append((scene.client, scene.client.start_request("unload", graph=scene.graph), ""))
    return "m"


def is_failed(scene: Scene) -> str:
    with pytest.raises(LoadFailed):
        scene.other.call("load_by_name", name="bad")
    return "bad"


def is_cold(scene: Scene) -> str:
    scene.client.call("unload", graph=scene.graph)
    return "m"


MODEL_WAYS: dict[ModelState, Callable[[Scene], str]] = {
    ModelState.COLD: is_cold,
    ModelState.LOADING: is_loading,
    ModelState.READY: lambda scene: "m",
    ModelState.UNLOADING: is_unloading,
    ModelState.FAILED: is_failed,
}


def described(client: RawClient, name: str) -> dict[str, Any]:
    (found,) = client.call("show", name=name)["models"]
    return dict(found)


@pytest.mark.parametrize("state", ModelState)
def test_a_worker_is_killed_in_every_state_of_a_model(
    state: ModelState, daemon: RunningDaemon
) -> None:
    with scene_of(daemon, SessionState.DONE) as scene:
        name = MODEL_WAYS[state](scene)
        wait_until(lambda: described(scene.other, name)["state"] == state.value, 10)
        if state not in (ModelState.COLD, ModelState.FAILED):
            wait_until(lambda: _pid(scene, name) > 0, 10)
        pid = _pid(scene, name)
        assert state is not ModelState.COLD or not pid
        if pid:
            with suppress(ProcessLookupError):  # the worker of a failed load is about to end
                os.kill(pid, signal.SIGKILL)
        if state is ModelState.LOADING:
            wait_until(lambda: _pid(scene, name) not in (0, pid), 10)  # the load is repeated
            scene.other.call("unload_model", name=name, force=True)
            with pytest.raises(Cancelled):
                scene.client.wait_result(scene.turns[0][1])
        elif state is ModelState.UNLOADING:
            assert scene.client.wait_result(scene.turns[0][1]) == {}
        elif state is ModelState.FAILED:
            with pytest.raises(LoadFailed):
                scene.other.call("load_by_name", name=name)
    chat(daemon)
    assert len(processes(daemon)) == 1


def _pid(scene: Scene, name: str) -> int:
    return int(described(scene.other, name)["pid"])
