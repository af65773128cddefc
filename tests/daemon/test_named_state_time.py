"""The time in which a session from a named state is ready, on a real model."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import pytest

from inferd import Client
from inferd.testing import running_daemon
from tests.models import fast_smollm2

pytestmark = [pytest.mark.model, pytest.mark.alone]
TEXT = "The quick brown fox jumps over the lazy dog and then goes home to sleep. " * 125
CONFIG = f"""[defaults]
ctx-size = 4096
slots = 2
[models.smollm2]
file = "{fast_smollm2()}"
"""
TOKENS = 6


def ready_s(client: Client) -> float:
    """Return the time to open a session and get its first token, less the time of a step."""
    times = [time.perf_counter()]
    options = {"temp": 0, "n-predict": TOKENS, "ignore-eos": True}
    with client.session("smollm2", raw=True, from_state="fox", options=options) as session:
        for _ in session.stream(" The quick"):
            times.append(time.perf_counter())  # noqa: PERF401  # each time is taken in the loop
        assert session.metadata["cached_tokens"] >= 2000
    return times[1] - times[0] - statistics.median(b - a for a, b in pairwise(times[1:]))


def save_state(client: Client) -> float:
    """Save the state "fox", and return the time in which its text was computed."""
    with client.session("smollm2", raw=True, options={"n-predict": 1}) as session:
        began = time.perf_counter()
        session.chat(TEXT)
        computed_s = time.perf_counter() - began
        saved = session.save_state("fox")
    assert saved.stored_tokens == saved.tokens > 2000
    return computed_s


def test_a_session_from_two_thousand_tokens_is_ready_at_once() -> None:
    """Also after a restart."""
    with running_daemon(CONFIG) as daemon:
        with Client(daemon.socket) as client:
            computed_s = save_state(client)
            client.load_by_name("smollm2")  # it stays loaded
            ready = [ready_s(client) for _ in range(5)]
        assert daemon.stop() == 0
        daemon.start_again()
        with Client(daemon.socket) as client:
            client.load_by_name("smollm2")
            after_restart = ready_s(client)
    # 0.01 to 0.04 s on two cores beside other work; computing the prompt takes seconds there.
    assert statistics.median(ready) < min(0.5, computed_s / 10), (ready, computed_s)
    assert after_restart < min(0.5, computed_s / 5), (after_restart, computed_s)
