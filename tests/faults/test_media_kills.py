"""The encoder, the worker and the daemon are killed at each point of a turn with an image: nothing
of the answer is lost or doubled, the image stays as long as its session, and no longer.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from inferd import Client, InferdError, Session
from inferd.testing import RunningDaemon, running_daemon
from tests.attacks.media_files import png
from tests.echo import echo_model
from tests.processes import running_children
from tests.waiting import wait_until

PICTURE = png(32, 32)
QUESTION = "What is in this picture, and what is beside it? " * 2
TURN_S_MAX = 60.0


def message(text: str = QUESTION, picture: bytes = PICTURE) -> list[dict[str, Any]]:
    parts = [{"type": "image", "data": picture}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


class Gate:
    """A FIFO at which each encoding waits."""

    def __init__(self, path: Path):
        self.path = path
        os.mkfifo(path)

    def hold(self) -> int:
        """Wait until an encoding waits; return the descriptor whose end lets it continue."""
        return wait_until(self._writer)

    def _writer(self) -> int | None:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as exc:
            assert exc.errno == errno.ENXIO
            return None


@contextmanager
def gate_open(gate: Gate) -> Iterator[None]:
    """Let all encodings pass."""
    ended = Event()

    def open_again() -> None:
        while not ended.wait(0.002):
            with suppress(OSError):
                os.close(os.open(gate.path, os.O_WRONLY | os.O_NONBLOCK))

    thread = Thread(target=open_again)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def processes(daemon: RunningDaemon) -> tuple[int, set[int]]:
    """Return the worker of a daemon's model, and the encoders."""
    with Client(daemon.socket) as client:
        worker = client.show("m")["pid"]
    return worker, {child.pid for child in running_children(daemon.pid)} - {worker}


def kill_encoder(daemon: RunningDaemon) -> None:
    [encoder] = processes(daemon)[1]
    os.kill(encoder, signal.SIGKILL)


def kill_worker(daemon: RunningDaemon) -> None:
    os.kill(processes(daemon)[0], signal.SIGKILL)


def kill_daemon(daemon: RunningDaemon) -> None:
    worker, encoders = processes(daemon)
    daemon.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, {worker, *encoders})))
    daemon.start_again()


VICTIMS: dict[str, Callable[[RunningDaemon], None]] = {
    "encoder": kill_encoder, "worker": kill_worker, "daemon": kill_daemon,
}  # fmt: skip


class Turn:
    """A turn with an image that a thread reads."""

    def __init__(self, session: Session):
        self.text, self.begun = "", Event()
        self.error: InferdError | None = None
        self._session = session
        self._thread = Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for piece in self._session.stream(message()):
                self.text += piece
                self.begun.set()
        except InferdError as exc:
            self.error = exc
        self.begun.set()

    def wait(self) -> str:
        """Return the whole text."""
        self._thread.join(TURN_S_MAX)
        assert not self._thread.is_alive() and self.error is None, self.error
        return self.text


def stored(daemon: RunningDaemon) -> list[bytes]:
    """Return the contents of all files in the media store."""
    folder = daemon.directory / "state" / "media"
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def config(gate: Gate) -> str:
    head = "[daemon]\nshutdown_grace_s = 0.1\n"
    return head + echo_model("m", slots=2, step_ms=10, media=True, media_gate=str(gate.path))


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of the turn if nothing is killed."""
    gate = Gate(tmp_path_factory.mktemp("undisturbed") / "gate")
    with (
        running_daemon(config(gate)) as daemon, gate_open(gate),
        Client(daemon.socket) as client, client.session("m") as session,
    ):  # fmt: skip
        return "".join(session.stream(message()))


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("point", ["encoding", "answering", "done"])
def test_a_turn_with_an_image_survives(point: str, victim: str, gate: Gate, expected: str) -> None:
    assert expected
    with running_daemon(config(gate)) as daemon, Client(daemon.socket) as client:
        session = client.session("m", session_id="victim", resume=True)
        with session:
            turn = Turn(session)
            held = gate.hold()
            if point == "encoding":
                VICTIMS[victim](daemon)
                os.close(held)
                with gate_open(gate):
                    assert turn.wait() == expected
            else:
                os.close(held)
                with gate_open(gate):
                    assert turn.begun.wait(TURN_S_MAX)
                    if point == "answering":
                        VICTIMS[victim](daemon)
                    assert turn.wait() == expected
            if point == "done":
                VICTIMS[victim](daemon)
            with gate_open(gate):
                assert session.metadata["media_tokens"] > 0
                more = "".join(session.stream("And now?"))
                assert more
            contents = [m["content"] for m in session.history().messages if m["role"] == "user"]
            assert [part["type"] for part in contents[0]] == ["image", "text"]
            assert len(contents) == 2
            assert stored(daemon) == [PICTURE]
        client.delete_session(session_id="victim")
        wait_until(lambda: not stored(daemon))


def test_an_image_of_a_session_that_a_kill_has_ended_is_deleted_at_the_next_start(
    gate: Gate,
) -> None:
    """A session without an id ends with its daemon, and the image with it."""
    with running_daemon(config(gate)) as daemon:
        with Client(daemon.socket) as client, gate_open(gate):
            session = client.session("m")
            session.__enter__()
            "".join(session.stream(message()))
            assert stored(daemon) == [PICTURE]
            daemon.kill()
        daemon.start_again()
        wait_until(lambda: not stored(daemon))


def test_an_encoder_that_an_image_ends_takes_no_other_request_with_it(gate: Gate) -> None:
    """The image is quarantined for its user: later requests with it start no encoder."""
    bad = png(32, 32) + b"end this process"
    table = echo_model("m", media=True, media_abort_on="end this process", media_abort_in="encode")
    with running_daemon(table) as daemon, Client(daemon.socket) as client:
        with client.session("m") as session:
            for _ in range(3):
                with pytest.raises(InferdError) as caught:
                    session.chat(message(picture=bad))
                assert caught.value.hint
            session.chat(message())
        assert "worker.died" not in daemon.log
        deaths = daemon.log.count("encoder.died")
        with client.session("m") as session, pytest.raises(InferdError):
            session.chat(message(picture=bad))
        assert daemon.log.count("encoder.died") == deaths
