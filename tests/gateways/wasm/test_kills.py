"""Guests of `inferd wasm run` while their bridge, their model's worker or the daemon is killed."""

from __future__ import annotations

import os
import signal
import statistics
import time

import pytest

from inferd import Client
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.wasm.serving import serving_guests
from tests.waiting import wait_until

CONFIG = echo_model("slow", step_ms=20, slots=4) + echo_model("deadly", abort_on="die")
GUESTS = 3
FREED_S_MAX = 0.05
END_S_MAX = 60.0
LONG = "and so on " * 100
SENTENCE = "a text that takes the slow model a second or so to echo"


@pytest.mark.alone
def test_killed_bridges_leave_no_session_and_no_slot_after_50_ms(
    daemon: RunningDaemon, client: Client
) -> None:
    freed_s = []
    with serving_guests(daemon.socket, "slow", {}, ["normal"] * GUESTS) as guests:
        for guest in guests:
            guest.send_prompt(LONG)
        for guest in guests:
            guest.read_text(3)
        assert len(client.sessions()) == len(client.queue()) == GUESTS
        for left, guest in enumerate(reversed(guests), 1):
            guest.process.kill()
            guest.process.wait()
            begun = time.monotonic()
            while max(len(client.sessions()), len(client.queue())) > GUESTS - left:
                pass
            freed_s.append(time.monotonic() - begun)
    assert statistics.median(freed_s) < FREED_S_MAX, freed_s


def test_guests_do_not_notice_that_a_worker_was_killed(
    daemon: RunningDaemon, client: Client
) -> None:
    with serving_guests(daemon.socket, "slow", {}, ["normal"] * GUESTS) as guests:
        for number, guest in enumerate(guests):
            guest.send_prompt(f"{number} {SENTENCE}")
        begun = [guest.read_text(3) for guest in guests]
        [worker] = [model["pid"] for model in client.models() if model["name"] == "slow"]
        os.kill(int(worker), signal.SIGKILL)
        for number, (guest, before) in enumerate(zip(guests, begun, strict=True)):
            text, metadata = guest.read_answer()
            assert (before + text).decode() == f"{number} {SENTENCE}"
            assert metadata["stop_reason"] == "eos"


def test_guests_go_on_after_the_daemon_was_killed(daemon: RunningDaemon, client: Client) -> None:
    with serving_guests(daemon.socket, "slow", {}, ["normal"] * GUESTS) as guests:
        for guest in guests:
            guest.send_prompt(SENTENCE)
        begun = [guest.read_text(3) for guest in guests]
        daemon.kill()
        daemon.start_again()
        for guest, first in zip(guests, begun, strict=True):
            text = (first + guest.read_answer()[0]).decode()
            # The daemon gets prompt and text so far as the prompt, which echo repeats as a whole.
            before = text[: (len(text) - len(SENTENCE)) // 2]
            assert text == before + SENTENCE + before and SENTENCE.startswith(before)
            guest.send_prompt("again")
            assert guest.read_answer()[0] == b"again"
        for guest in guests:
            _, errors = guest.process.communicate(timeout=END_S_MAX)
            assert (guest.process.returncode, errors) == (0, b"")


def test_a_prompt_that_kills_workers_is_error_5(daemon: RunningDaemon, client: Client) -> None:
    with serving_guests(daemon.socket, "deadly", {}, ["normal"]) as [guest]:
        guest.send_prompt("live")
        assert guest.read_answer()[0] == b"live"
        guest.send_prompt("die")
        output, errors = guest.process.communicate(timeout=END_S_MAX)
    assert (guest.process.returncode, output) == (10 + 5, b"")
    assert errors.startswith(b"inferd: compute_single: ")
    assert errors.endswith(b"compute_single: error 5\n")
    wait_until(lambda: not client.sessions() and not client.queue())


def test_ctrl_c_ends_a_guest_that_waits_for_a_daemon(daemon: RunningDaemon) -> None:
    with serving_guests(daemon.socket, "echo", {}, ["normal"]) as [guest]:
        daemon.kill()
        try:
            guest.send_prompt("x")
            guest.process.send_signal(signal.SIGINT)
            assert guest.process.wait(END_S_MAX) == 130
        finally:
            daemon.start_again()
