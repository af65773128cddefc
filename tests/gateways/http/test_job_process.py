"""The process that answers the requests of jobs, driven as the daemon does it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from inferd.daemon.jobs.runner import MODULE
from inferd.ipc import job_messages as j
from inferd.testing import running_daemon
from inferd.wire.frames import FrameReader, pack_frame
from tests.echo import echo_model

CONFIG = echo_model("echo", slots=1, step_ms=10)


@contextmanager
def job_process(daemon_socket: str) -> Iterator[socket.socket]:
    """Run the process, and yield the daemon's end of its socket."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-m", MODULE, daemon_socket]
            process = subprocess.Popen(command, stdin=theirs.fileno())
        with process:
            try:
                yield ours
            finally:
                process.kill()


def compute(number: int) -> j.Compute:
    body = {"model": "echo", "messages": [{"role": "user", "content": f"request {number}"}]}
    return j.Compute(
        number=number,
        user="@ada",
        label="",
        key="",
        key_limits={},
        priority="low",
        models=None,
        url="/v1/chat/completions",
        body=msgspec.json.encode(body),
        response_id="",
    )


def first_answer(ours: socket.socket) -> j.Answer:
    frames = FrameReader(j.REPLY_BYTES_MAX)
    while True:
        data = ours.recv(1 << 16)
        assert data, "the process has ended"
        for frame in frames.read_frames(data):
            return msgspec.msgpack.decode(frame, type=j.Answer)


def test_a_request_that_is_cancelled_before_it_began_is_not_computed() -> None:
    with running_daemon(CONFIG) as daemon, job_process(daemon.socket) as ours:
        commands = compute(1), j.Cancel(number=1), compute(2)
        ours.sendall(b"".join(map(pack_frame, commands)))  # are read at once
        answer = first_answer(ours)
    assert isinstance(answer, j.Done) and answer.number == 2, "the model has one slot"
    assert answer.status == 200, answer.body
