"""Random frames to a real daemon: it answers or closes, and serves the next client."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.ipc.messages import CALLS
from inferd.testing import RunningDaemon
from tests.raw import Closed, RawClient
from tests.repetitions import repetitions

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=10)
    | st.sampled_from(["echo", "urgent", 0, 1, -1, '{"temp":0}', b"echo", "ggml"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["data", "type", "fd"]), inner)
    ),
    max_leaves=8,
)
# `drain` would end what the other examples need, with nothing wrong in that.
NAMES = sorted(CALLS.keys() - {"drain"})
FIELDS = sorted({f for call in CALLS.values() for f in call.params.__struct_fields__})
REQUESTS = st.tuples(
    st.just(1),
    st.integers(1, 50),
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6) | VALUES,
)
MESSAGES = REQUESTS | st.lists(VALUES, max_size=5)
SETTINGS = settings(
    max_examples=repetitions(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def exchange(daemon: RunningDaemon, data: bytes) -> None:
    """Send bytes, ask for the models behind them, read until that is answered or the end."""
    with RawClient(daemon.socket) as client:
        context = client.context()
        client.call("set_input", context=context, index=0, tensor={"data": b"hello"})
        try:
            client.send_bytes(data)
            client.write([1, 4711, "models", {}])
            while client.read_message()[1] != 4711:
                pass
        except (Closed, ConnectionError):
            pass  # refused: the connection ends
    with RawClient(daemon.socket) as client:
        assert client.call("models")["models"]


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


@SETTINGS
@given(messages=st.lists(MESSAGES, min_size=1, max_size=4))
def test_random_messages_end_at_most_their_connection(
    daemon: RunningDaemon, messages: list[Any]
) -> None:
    exchange(daemon, b"".join(frame(m) for m in messages))


@SETTINGS
@given(body=st.binary(max_size=40))
def test_random_bytes_end_at_most_their_connection(daemon: RunningDaemon, body: bytes) -> None:
    exchange(daemon, struct.pack("<I", len(body)) + body)


def test_no_call_failed_unexpectedly(daemon: RunningDaemon) -> None:
    assert "call.failed" not in daemon.log
    assert "Traceback" not in daemon.log
