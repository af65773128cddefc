"""Cases of frames and requests: their bytes, sizes, ids, and their concurrency."""

from __future__ import annotations

import socket
import time

from ..peer import REQUEST, Connection, SentRequest, check, frame
from ..suite import Server, case, expect, paused_stream


def _request_of(size: int, number: int) -> bytes:
    """Return a frame whose body has *size* bytes: a request with an unknown field."""
    empty = len(frame([REQUEST, number, "queue", {"pad": b"x" * 70_000}])) - 4 - 70_000
    return frame([REQUEST, number, "queue", {"pad": b"x" * (size - empty)}])


def _expect_reply(connection: Connection, number: int) -> None:
    connection.requests[number] = SentRequest()
    connection.wait(number)


@case("Frames")
def a_frame_may_arrive_in_pieces(server: Server) -> None:
    """The length and the body of a frame may arrive byte by byte."""
    connection = server.connect()
    for byte in frame([REQUEST, 1, "queue", {}]):
        connection.send_bytes(bytes([byte]))
        time.sleep(0.001)
    _expect_reply(connection, 1)


@case("Frames")
def frames_may_arrive_together(server: Server) -> None:
    """Many frames may arrive at once; each request gets its reply."""
    connection = server.connect()
    numbers = range(1, 33)
    for number in numbers:
        connection.requests[number] = SentRequest()
    connection.send_bytes(b"".join(frame([REQUEST, n, "queue", {}]) for n in numbers))
    for number in numbers:
        connection.wait(number)


@case("Frames")
def a_frame_of_the_greatest_size_is_read(server: Server) -> None:
    """A body from a client has at most `frame_bytes_max` bytes."""
    connection = server.connect()
    size = connection.server_hello["limits"]["frame_bytes_max"]
    connection.send_bytes(_request_of(size, 1))
    _expect_reply(connection, 1)


@case("Frames")
def a_longer_frame_ends_the_connection(server: Server) -> None:
    """A frame above `frame_bytes_max` gets a goodbye with TooLarge."""
    connection = server.connect()
    size = connection.server_hello["limits"]["frame_bytes_max"]
    connection.send_bytes((size + 1).to_bytes(4, "little"))
    expect(connection.goodbye(), "TooLarge")


@case("Frames")
def arrays_and_maps_may_be_as_deep_as_the_limit(server: Server) -> None:
    """A body has at most `nesting_max` levels; a request with more gets InvalidArgument."""
    connection = server.connect()
    levels = connection.server_hello["limits"]["nesting_max"]
    value: object = 1
    for _ in range(levels - 2):
        value = [value]
    connection.call("queue", pad=value)
    expect(connection.refusal("queue", pad=[value]), "InvalidArgument")


@case("Messages")
def every_int_is_an_id(server: Server) -> None:
    """The client chooses `id`, an int that no running request of the connection has."""
    connection = server.connect()
    for number in (0, -1, 1 << 40, (1 << 63) - 1, -(1 << 63), 0):
        connection.send([REQUEST, number, "queue", {}])
        _expect_reply(connection, number)


@case("Messages")
def an_id_in_use_ends_the_connection(server: Server) -> None:
    """A frame with an `id` that is in use is unreadable: a goodbye with ProtocolError."""
    with paused_stream(server) as (connection, _, number):
        connection.send([REQUEST, number, "queue", {}])
        expect(connection.goodbye(), "ProtocolError")


@case("Messages")
def another_mistake_leaves_the_connection_open(server: Server) -> None:
    """Every mistake in a readable frame gets an error reply, and the connection stays open."""
    connection = server.connect()
    expect(connection.refusal("compute", context=0), "InvalidArgument")
    expect(connection.refusal("queue", all="yes"), "InvalidArgument")
    connection.call("queue")


@case("Messages")
def nil_stands_only_where_the_page_allows_it(server: Server) -> None:
    """Nil stands only where a type says "or nil"; elsewhere it is InvalidArgument."""
    connection, context = server.connected()
    for field in ("priority", "timeout_s", "credit", "options"):
        params = {"context": context, "prompt": "a", field: None}
        expect(connection.refusal("stream", **params), "InvalidArgument")
    connection.call("chat", context=context, prompt="a", messages=None)


@case("Messages")
def fields_with_their_defaults_may_be_given(server: Server) -> None:
    """A field that has its default value may be omitted, and may be sent."""
    connection, context = server.connected()
    params = {"priority": "", "queue_timeout_s": 0.0, "timeout_s": 0.0, "traceparent": ""}
    result = connection.call(
        "chat", context=context, prompt="ab", messages=None, raw=False, options={}, **params
    )
    check(result["text"] == b"ab", f"the answer is {result['text']!r}")


@case("Messages")
def an_int_is_accepted_as_a_float(server: Server) -> None:
    """The types are msgpack's: where a float is expected, an int is accepted."""
    connection, context = server.connected()
    connection.call("chat", context=context, prompt="ab", timeout_s=600, queue_timeout_s=600)


@case("Requests")
def a_slow_request_does_not_hold_up_others(server: Server) -> None:
    """Requests on one connection run concurrently; replies come as the requests end."""
    with paused_stream(server) as (connection, context, number):
        for _ in range(3):
            connection.call("queue")
        check(connection.requests[number].reply is None, "the stream ended without credit")
        connection.call("cancel", context=context)
        expect(connection.refused(number), "Cancelled")


@case("Transport")
def a_client_that_stops_sending_gets_its_replies(server: Server) -> None:
    """A client that shuts down its sending side gets the replies to its requests."""
    connection, context = server.connected()
    number = connection.start("chat", {"context": context, "prompt": "abc"})
    connection.socket.shutdown(socket.SHUT_WR)
    check(connection.wait(number)["text"] == b"abc", "the answer differs")
    connection.expect_end()


@case("Hello")
def a_client_without_a_hello_is_disconnected(server: Server) -> None:
    """The daemon disconnects a client that has sent no hello after 10 s."""
    connection = server.connect(raw=True)
    connection.read_hello()
    connection.timeout_s = server.patience(10.0)
    expect(connection.goodbye(), "ProtocolError")


@case("Frames")
def an_incomplete_frame_ends_the_connection(server: Server) -> None:
    """30 s after its first byte, an incomplete frame ends the connection with ProtocolError."""
    connection = server.connect()
    connection.timeout_s = server.patience(30.0)
    connection.send_bytes(b"\x10\x00")
    expect(connection.goodbye(), "ProtocolError")
