"""Cases of streams: events, credit, the reply at the end, and positions in the queue."""

from __future__ import annotations

from ..peer import CREDIT, Connection, Map, SentRequest, check
from ..suite import Server, case, expect, output, paused_stream


def finish(connection: Connection, number: int) -> tuple[SentRequest, Map]:
    """Give a stream enough credit to end; return the request and its result."""
    connection.send([CREDIT, number, 1000])
    return connection.requests[number], connection.wait(number)


def stream_whole(connection: Connection, context: int, text: str) -> tuple[SentRequest, Map]:
    """Stream a raw turn to its end; return the request and its result."""
    params = {"context": context, "prompt": text, "raw": True, "credit": 1000}
    number = connection.start("stream", params)
    return connection.requests[number], connection.wait(number)


@case("`stream`")
def events_come_before_the_reply(server: Server) -> None:
    """A stream's events have the text as it is generated; the reply has the rest."""
    connection, context = server.connected()
    request, result = stream_whole(connection, context, "hello")
    text = request.text + result.get("text", b"")
    check(text == b"hello", f"the text is {text!r}")
    check(len(request.events) >= 5, f"five tokens came in {len(request.events)} events")
    check(result["metadata"]["stop_reason"] == "eos", "the reply has no metadata of the turn")
    check(output(connection, context) == b"hello", "the output is not the text of the stream")


@case("`stream`")
def events_count_their_tokens(server: Server) -> None:
    """`offset` is the number of the answer's tokens before those of the event."""
    connection, context = server.connected()
    request, _ = stream_whole(connection, context, "hello")
    offset = 0
    for event in request.events:
        check(event.get("offset", 0) == offset, f"an offset is {event.get('offset', 0)}")
        offset += len(event.get("tokens", []))
    check(offset >= 5, f"the events have {offset} tokens")


@case("`stream`")
def an_event_never_ends_within_a_character(server: Server) -> None:
    """The text of an event has whole UTF-8 characters."""
    connection, context = server.connected()
    text = "é€😀a"
    request, result = stream_whole(connection, context, text)
    for event in request.events:
        try:
            event.get("text", b"").decode()
        except UnicodeDecodeError:
            check(False, f"the text {event['text']!r} ends within a character")
    check((request.text + result.get("text", b"")).decode() == text, "the text is incomplete")


@case("`stream`")
def text_that_a_stop_may_cut_is_withheld(server: Server) -> None:
    """An event has nothing that a stop text may still cut."""
    connection, context = server.connected()
    options = {"stop": ["bcx"]}
    params = {"context": context, "raw": True, "credit": 1000, "options": options}
    for prompt, expected in (("abcd", b"abcd"), ("abcxd", b"a")):
        number = connection.start("stream", {**params, "prompt": prompt})
        result = connection.wait(number)
        text = connection.requests[number].text + result.get("text", b"")
        check(text == expected, f"the text of {prompt!r} is {text!r}")


@case("Credit")
def a_stream_sends_no_more_events_than_its_credit(server: Server) -> None:
    """A stream begins with credit for `credit` events, and each event uses one."""
    with paused_stream(server, "abcdef", credit=2) as (connection, _, number):
        connection.wait_events(number, 2)
        for _ in range(3):  # an event without credit would arrive before these replies
            connection.call("queue")
        request = connection.requests[number]
        check(len(request.events) == 2, f"{len(request.events)} events for a credit of 2")
        check(request.reply is None, "the reply came without credit")
        connection.send([CREDIT, number, 1])
        connection.wait_events(number, 3)
        for _ in range(3):
            connection.call("queue")
        check(len(request.events) == 3, f"{len(request.events)} events for a credit of 3")
        request, result = finish(connection, number)
        check(request.text + result.get("text", b"") == b"abcdef", "the text is incomplete")


@case("Credit")
def the_default_credit_is_announced(server: Server) -> None:
    """A stream whose request sets no credit begins with `credit_default`."""
    connection, context = server.connected()
    default = connection.server_hello["limits"]["credit_default"]
    params = {"context": context, "prompt": "x" * (default + 20), "raw": True}
    number = connection.start("stream", params)
    connection.wait_events(number, default)
    for _ in range(3):
        connection.call("queue")
    events = len(connection.requests[number].events)
    check(events == default, f"{events} events for a credit of {default}")
    finish(connection, number)


@case("Credit")
def a_credit_outside_its_range_is_refused(server: Server) -> None:
    """The credit of a request is 1 … `credit_max`, else InvalidArgument."""
    connection, context = server.connected()
    most = connection.server_hello["limits"]["credit_max"]
    for credit in (0, -1, most + 1):
        params = {"context": context, "prompt": "a", "credit": credit}
        expect(connection.refusal("stream", **params), "InvalidArgument")
    connection.call("stream", context=context, prompt="a", credit=most)


@case("Messages")
def credit_for_an_unknown_request_is_ignored(server: Server) -> None:
    """Credit for a request that has ended, or never was, is ignored."""
    connection, context = server.connected()
    number = connection.start("stream", {"context": context, "prompt": "a", "credit": 1000})
    connection.wait(number)
    for other in (number, 4711):
        connection.send([CREDIT, other, 5])
    connection.call("queue")


@case("`stream`")
def the_queue_reports_the_position_of_a_turn(server: Server) -> None:
    """With `queue_events`, a waiting turn sends its position; these events use no credit."""
    connection = server.connect()
    loaded = connection.call("load_by_name", name=server.model)
    graph = loaded["graph"]
    running: list[int] = []
    for _ in range(loaded["slots"]):  # the turns of a higher class keep their slots
        context = connection.call("init_execution_context", graph=graph)["context"]
        connection.call("set_input", context=context, index=0, tensor={"data": b"abcdef"})
        connection.call("compute_single", context=context, priority="high")
        running.append(context)
    last = connection.call("init_execution_context", graph=graph)["context"]
    params = {"context": last, "prompt": "hi", "queue_events": True, "credit": 2}
    number = connection.start("stream", params)
    request = connection.requests[number]
    positions = connection.wait_events(number, 1)
    check("waiting" in positions[0], f"the first event is {positions[0]!r}")
    check(positions[0]["position"] >= 1, f"the position is {positions[0]['position']!r}")
    for context in running:
        connection.call("fini_single", context=context)
    _, result = finish(connection, number)
    text = b"".join(e.get("text", b"") for e in request.events if "waiting" not in e)
    check(text + result.get("text", b"") == b"hi", f"the text is {text!r}")


@case("`stream`")
def a_refused_turn_leaves_no_trace(server: Server) -> None:
    """A turn that is refused leaves the session as it was before the call."""
    connection, context = server.connected()
    stream_whole(connection, context, "ab")
    options = {"temp": "hot"}
    params = {"context": context, "prompt": "cd", "options": options}
    expect(connection.refusal("stream", **params), "InvalidArgument")
    check(output(connection, context) == b"ab", "the output of the turn before is lost")
    left = connection.call("rewind", context=context, turns=1)
    check(left.get("tokens", 0) == 0, "the refused input is in the history")


@case("`stream`")
def a_full_context_ends_a_stream(server: Server) -> None:
    """A full context ends a stream with the stop reason `context_full`, not with an error."""
    connection, context = server.connected('{"ctx-size": 64}')
    _, result = stream_whole(connection, context, "x" * 48)
    reason = result["metadata"]["stop_reason"]
    check(reason == "context_full", f"stop_reason is {reason!r}")


@case("`chat`")
def a_chat_has_no_events(server: Server) -> None:
    """`chat` has no events but those of the queue; `credit` has no effect."""
    connection, context = server.connected()
    number = connection.start("chat", {"context": context, "prompt": "hello", "credit": 1})
    check(connection.wait(number)["text"] == b"hello", "the answer differs")
    check(not connection.requests[number].events, "a chat has events")
