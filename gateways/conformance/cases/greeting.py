"""Cases of the hello: both sides' first frame, the limits in it, and refused greetings."""

from __future__ import annotations

from ..peer import GOODBYE, HELLO, REQUEST, check, frame
from ..suite import Server, case, expect

LIMITS = (
    *("frame_bytes_max", "reply_bytes_max", "nesting_max", "requests_max", "credit_default"),
    *("credit_max", "tensor_bytes_max", "sessions_max"),
)


@case("Hello")
def the_server_sends_its_hello_first(server: Server) -> None:
    """Each side sends its hello as its first frame, without waiting for the other's."""
    hello = server.connect(raw=True).read_hello()
    version = hello["protocol"]
    check([type(v) for v in version] == [int, int], f"protocol is {version!r}, not two ints")
    check(version[0] == 1, f"the major version is {version[0]}, not 1")
    check(type(hello.get("software")) is str, "software is not a str")
    check(type(hello.get("instance")) is int, "instance is not an int")
    check(type(hello.get("llama_build_number", 0)) is int, "llama_build_number is not an int")
    check(type(hello.get("llama_commit", "")) is str, "llama_commit is not a str")


@case("Hello")
def the_hello_has_every_limit(server: Server) -> None:
    """The daemon's hello has the limits in force, each a positive int."""
    limits = server.connect().server_hello["limits"]
    for name in LIMITS:
        value = limits.get(name)
        check(type(value) is int and value > 0, f"the limit {name} is {value!r}")
    idle = limits.get("idle_timeout_ms", 0)
    check(type(idle) is int and idle >= 0, f"the limit idle_timeout_ms is {idle!r}")


@case("Hello")
def requests_may_follow_the_hello_at_once(server: Server) -> None:
    """Requests may follow the client's hello at once."""
    connection = server.connect(raw=True)
    hello = frame([HELLO, {"protocol": [1, 0]}])
    connection.send_bytes(hello + frame([REQUEST, 5, "queue", {}]))
    connection.read_hello()
    message = connection.read_message()
    check(message[:2] == [2, 5], f"the reply is {message!r:.200}")


@case("Hello")
def unknown_fields_of_the_hello_are_ignored(server: Server) -> None:
    """Both sides ignore fields that they do not know, also in the hello."""
    server.connect(colour="blue", limits={"a": [1, None]}).call("queue")


@case("Labels")
def a_label_of_other_characters_is_refused(server: Server) -> None:
    """A label that is not allowed gets a goodbye with InvalidArgument."""
    for label in ("two words", "-first", "ä", "x" * 65):
        expect(server.connect(label=label).goodbye(), "InvalidArgument")


@case("Labels")
def a_label_may_have_every_allowed_character(server: Server) -> None:
    """A label has at most 64 letters, digits and . _ : @ + -."""
    label = ("conformance.a_b:c@d+e-0" * 3)[:64]
    server.connect(label=label).call("queue")


@case("Labels")
def sessions_belong_to_their_label(server: Server) -> None:
    """Session ids and `queue` concern the caller's label."""
    connection = server.connect()
    params = {"graph": server.graph(connection), "session_id": "conformance-label"}
    connection.call("init_execution_context_with_session_id", **params)
    other = server.connect(label=f"{server.label}-2")
    found = other.call("delete_session", session_id="conformance-label")
    check(found["deleted"] is False, "another label deleted the session")
    found = connection.call("delete_session", session_id="conformance-label")
    check(found["deleted"] is True, "the session's own label did not delete it")


@case("Gateways")
def a_name_on_behalf_of_nobody_is_refused(server: Server) -> None:
    """A name of other characters gets InvalidArgument, PermissionDenied without *delegate*."""
    goodbye = server.connect(on_behalf_of="two words").goodbye()
    expect(goodbye, "InvalidArgument", "PermissionDenied")


@case("Messages")
def a_goodbye_is_the_last_message(server: Server) -> None:
    """After a goodbye the connection closes."""
    connection = server.connect()
    connection.send([GOODBYE, {}])
    expect(connection.goodbye(), "ProtocolError")
