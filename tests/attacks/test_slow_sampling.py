"""A task of one user that is slow to sample, beside the stream of another."""

from __future__ import annotations

import pytest

from inferd.backends.errors import Timeout
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import RawClient

SLOW = "slow " * 400


def begin_slow_stream(client: RawClient) -> int:
    """Begin a stream that is slow to sample; return its request."""
    context = client.context()
    return client.start_request("stream", context=context, prompt=SLOW, raw=True, credit=1000)


@pytest.mark.process
def test_a_stream_keeps_its_pace_beside_a_task_that_is_slow_to_sample() -> None:
    config = echo_model("echo", step_ms=2, sample_ms=40, slow_on="slow")
    with (
        daemon_for_all(config) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        begin_slow_stream(bob)
        bob.events.append(bob.read_message())
        ada.begin_stream(ada.context(), "x" * 3000)
        start = len(ada.streamed_text)
        read = len(bob.streamed_text)
        while len(bob.streamed_text) < read + 4:
            bob.events.append(bob.read_message())
        done = ada.context()  # all tokens so far precede this answer
        assert done and len(ada.streamed_text) - start >= 4 * 8


@pytest.mark.process
def test_a_token_that_takes_too_long_ends_only_its_own_turn() -> None:
    config = echo_model("echo", step_ms=2, sample_ms=1100, slow_on="slow")
    with (
        daemon_for_all(config) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        stream = ada.begin_stream(ada.context(), "x" * 200)
        with pytest.raises(Timeout, match=r"sampling one token took \d") as caught:
            bob.wait_result(begin_slow_stream(bob))
        assert caught.value.data["timeout"] == "sampling"
        ada.wait_result(stream)
        assert ada.streamed_text == "x" * 200
