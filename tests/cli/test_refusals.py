"""Requests that are refused for now: repeated with a line about the wait, or left to the user."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest

from inferd.backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    QuotaExceeded,
    ShuttingDown,
)
from inferd.cli.client import RETRIES, RETRY_S_MAX, repeat_refused, retry_pause_s
from inferd.ipc.client import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model

QUOTA = f"[access.own]\nusers = [{os.getuid()}]\ntokens-per-minute = 1\n"


def busy(after_s: float, kind: type[Busy] = Busy) -> Busy:
    return kind("too many turns", data={"retry_after_s": after_s})


@pytest.mark.parametrize(
    ("error", "retries", "remaining_s", "pauses"),
    [
        (busy(2.0), 2, math.inf, (2.0, 2.5)),
        (busy(2.0, QuotaExceeded), 1, math.inf, (2.0, 2.5)),
        (busy(RETRY_S_MAX), 1, math.inf, (RETRY_S_MAX, 1.25 * RETRY_S_MAX)),
        (busy(RETRY_S_MAX + 1), 2, math.inf, None),
        (busy(2.0), 0, math.inf, None),
        (busy(2.0), 2, 1.0, None),
        (busy(2.0, ShuttingDown), 2, math.inf, None),
        (InvalidArgument("wrong"), 2, math.inf, None),
    ],
)
def test_a_pause_is_as_long_as_the_daemon_asks_or_none(
    error: InferdError, retries: int, remaining_s: float, pauses: tuple[float, float] | None
) -> None:
    pause_s = retry_pause_s(error, retries, remaining_s)
    if pauses is None:
        assert pause_s is None
    else:
        assert pause_s is not None and pauses[0] <= pause_s <= pauses[1]


def test_attempts_are_bounded_and_each_wait_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = []

    def attempt() -> None:
        attempts.append(1)
        raise busy(1.5)

    monkeypatch.setattr("inferd.cli.client.time.sleep", lambda seconds: None)
    with pytest.raises(Busy):
        repeat_refused(attempt)
    assert len(attempts) == RETRIES + 1
    assert capsys.readouterr().err == "too many turns; trying again in 2 s\n" * RETRIES


@pytest.fixture
def full() -> Iterator[RunningDaemon]:
    """A daemon that has one place for sessions of a user."""
    with running_daemon("[daemon]\nsessions-user-max = 1\n" + echo_model("echo")) as daemon:
        yield daemon


def test_a_run_over_a_quota_says_how_long_it_waits_and_then_answers(full: RunningDaemon) -> None:
    other = Client(full.socket)
    session = other.session("echo").__enter__()
    with inferd_process("run", "echo", "hello", socket=full.socket) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        session.__exit__(None, None, None)
        other.close()
        stdout, _ = process.communicate(timeout=60)
    assert b"; trying again in " in line
    assert (process.returncode, stdout) == (0, b"hello\n")


def test_a_long_wait_is_an_exit_status_at_once() -> None:
    with running_daemon(QUOTA + echo_model("echo")) as daemon:
        for _ in range(2):
            with inferd_process("run", "echo", "some words", socket=daemon.socket) as process:
                stdout, stderr = process.communicate(timeout=60)
        assert (process.returncode, stdout) == (4, b"")
        assert b"trying again" not in stderr
