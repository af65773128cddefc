"""Cases of cancellation: by a request, by a context, and by the end of a connection."""

from __future__ import annotations

from ..peer import CREDIT, Map, check
from ..suite import Server, case, expect, metadata, output, paused_stream


@case("Cancellation")
def a_request_is_cancelled_by_its_id(server: Server) -> None:
    """`cancel` ends a request by its id; the request's reply is Cancelled."""
    with paused_stream(server) as (connection, _, number):
        check(connection.call("cancel", request=number)["cancelled"] is True, "not cancelled")
        refused = expect(connection.refused(number), "Cancelled")
        found = refused.data.get("metadata") or {}
        reason = found.get("stop_reason")
        check(reason == "Cancelled", f"stop_reason in data.metadata is {reason!r}")


@case("Cancellation")
def a_turn_is_cancelled_by_its_context(server: Server) -> None:
    """`cancel` ends a context's turn by its handle."""
    with paused_stream(server) as (connection, context, number):
        check(connection.call("cancel", context=context)["cancelled"] is True, "not cancelled")
        expect(connection.refused(number), "Cancelled")


@case("Cancellation")
def the_output_of_a_cancelled_turn_stays(server: Server) -> None:
    """The output so far stays readable and in the history, and the context can be used."""
    with paused_stream(server, "abcd") as (connection, context, number):
        connection.call("cancel", request=number)
        expect(connection.refused(number), "Cancelled")
        sent = connection.requests[number].text
        kept = output(connection, context)
        check(kept == sent, f"the output is {kept!r}, the stream sent {sent!r}")
        check(metadata(connection, context)["stop_reason"] == "Cancelled", "the metadata differs")
        answer = connection.call("chat", context=context, prompt="x", raw=True)
        check(answer["metadata"]["input_tokens"] > 4, "the cancelled turn is not in the history")


@case("Cancellation")
def nothing_comes_after_a_cancelled_reply(server: Server) -> None:
    """A request has exactly one reply, after its last event; credit for it is then ignored."""
    with paused_stream(server, "abcdefgh") as (connection, _, number):
        connection.call("cancel", request=number)
        expect(connection.refused(number), "Cancelled")
        connection.send([CREDIT, number, 100])
        for _ in range(3):  # `read_one` refuses a message for a request that has its reply
            connection.call("queue")


@case("Cancellation")
def a_request_that_has_ended_cannot_be_cancelled(server: Server) -> None:
    """A request that has ended or never was, and a context without a turn, give false."""
    connection, context = server.connected()
    number = connection.start("chat", {"context": context, "prompt": "a"})
    connection.wait(number)
    targets: list[Map] = [{"request": number}, {"request": 4711}, {"context": context}]
    for target in targets:
        found = connection.call("cancel", **target)["cancelled"]
        check(found is False, f"cancelled is {found!r} for {target!r}")


@case("Cancellation")
def an_unknown_context_cannot_be_cancelled(server: Server) -> None:
    """An unknown context is InvalidArgument, as is a call without a target or with two."""
    connection, context = server.connected()
    targets: list[Map] = [{"context": 1}, {}, {"context": context, "request": 1}]
    for target in targets:
        expect(connection.refusal("cancel", **target), "InvalidArgument")


@case("Handles")
def another_connection_of_the_user_may_cancel(server: Server) -> None:
    """`cancel` and `park` accept the context of any connection of the same user and label."""
    with paused_stream(server) as (connection, context, number):
        other = server.connect()
        other.call("park", context=context)
        check(other.call("cancel", context=context)["cancelled"] is True, "not cancelled")
        expect(connection.refused(number), "Cancelled")


@case("Cancellation")
def the_end_of_a_connection_cancels_its_requests(server: Server) -> None:
    """Closing the connection cancels all its requests."""
    watcher = server.connect()
    with paused_stream(server) as (connection, context, _):

        def is_queued() -> bool:
            tasks = watcher.call("queue")["tasks"]
            return context in {task["context"] for task in tasks}

        check(is_queued(), "`queue` does not list the turn")
        connection.close()
        server.wait_until(lambda: not is_queued(), "the turn outlives its connection")


@case("`stream`")
def a_turn_that_lasts_too_long_is_ended(server: Server) -> None:
    """The turn must end within `timeout_s`, else Timeout with `data.timeout` total."""
    with paused_stream(server, timeout_s=0.2) as (connection, _, number):
        refused = expect(connection.refused(number), "Timeout")
        check(refused.data.get("timeout") == "total", f"data is {refused.data!r}")


@case("`park`")
def a_parked_turn_continues(server: Server) -> None:
    """A parked turn continues where it stopped."""
    with paused_stream(server, "abcd") as (connection, context, number):
        parked = connection.call("park", context=context)["parked"]
        check(type(parked) is bool, f"parked is {parked!r}")
        connection.send([CREDIT, number, 100])
        text = connection.wait(number).get("text", b"")
        text = connection.requests[number].text + text
        check(text == b"abcd", f"the text is {text!r}")


@case("`end_reasoning`")
def reasoning_ends_on_request(server: Server) -> None:
    """The end of a thought under way is added to the answer; without one, the reason says why."""
    thought = "<think>" + "a" * 40 + "</think>b"
    with paused_stream(server, thought) as (connection, context, number):
        connection.send([CREDIT, number, 10])
        connection.wait_events(number, 11)
        found = connection.call("end_reasoning", context=context)
        check(found.get("ended") is True, f"the result is {found!r}")
        connection.send([CREDIT, number, 1000])
        connection.wait(number)
        found = connection.call("end_reasoning", context=context)
        reason = found.get("reason")
        check(found.get("ended") is False and reason == "no_turn", f"the result is {found!r}")
