"""Cases of the fixed limits: the greatest value is accepted, the next one refused."""

from __future__ import annotations

from typing import Any

from ..page import LIMITS
from ..peer import REQUEST, Connection, Map, SentRequest, check
from ..suite import Server, case, expect


def refuse_beyond(connection: Connection, call: str, error: str, within: Map, beyond: Map) -> None:
    """Check that a call is accepted with the params *within*, and refused with *beyond*."""
    connection.call(call, **within)
    expect(connection.refusal(call, **beyond), error)


@case("Limits")
def values_of_a_request(server: Server) -> None:
    """A request has at most `ITEMS_MAX` values; more are TooLarge."""
    connection = server.connect()
    most = LIMITS["ITEMS_MAX"]
    connection.call("queue", pad=["x"] * (most - 100))
    expect(connection.refusal("queue", pad=["x"] * (most + 100)), "TooLarge")


@case("Limits")
def items_of_a_message(server: Server) -> None:
    """A message has at most `MESSAGE_ITEMS_MAX` items; more get a goodbye with ProtocolError."""
    connection = server.connect()
    most = LIMITS["MESSAGE_ITEMS_MAX"]
    connection.requests[1] = SentRequest()
    connection.send([REQUEST, 1, "queue", {}, *[None] * (most - 4)])
    connection.wait(1)
    connection.send([REQUEST, 2, "queue", {}, *[None] * (most - 3)])
    expect(connection.goodbye(), "ProtocolError")


@case("Limits")
def parameters_of_a_request(server: Server) -> None:
    """One request or JSON text has at most `KEYS_MAX` parameters; more are TooLarge."""
    connection = server.connect()
    texts = [
        "{" + ",".join(f'"key-{i}": 1' for i in range(count)) + "}"
        for count in (LIMITS["KEYS_MAX"], LIMITS["KEYS_MAX"] + 1)
    ]
    within, beyond = ({"name": server.model, "config": text} for text in texts)
    refuse_beyond(connection, "load_by_name_with_config", "TooLarge", within, beyond)


@case("Limits")
def the_name_in_a_builder(server: Server) -> None:
    """A builder over `NAME_BYTES_MAX` bytes is TooLarge, a shorter one an unknown model."""
    connection = server.connect()
    name = b"x" * LIMITS["NAME_BYTES_MAX"]
    expect(connection.refusal("load", builders=[name]), "ModelNotFound")
    expect(connection.refusal("load", builders=[name + b"x"]), "TooLarge")


@case("Limits")
def characters_of_a_session_id(server: Server) -> None:
    """A session id has 1 to `SESSION_ID_CHARACTERS_MAX` characters."""
    connection = server.connect()
    params = {"graph": server.graph(connection)}
    name = "s" * LIMITS["SESSION_ID_CHARACTERS_MAX"]
    call = "init_execution_context_with_session_id"
    connection.call(call, **params, session_id=name)
    connection.call("delete_session", session_id=name)
    for other in ("", name + "s"):
        expect(connection.refusal(call, **params, session_id=other), "InvalidArgument")


@case("Limits")
def texts_of_an_embed(server: Server) -> None:
    """`embed` takes 1 to `EMBED_TEXTS_MAX` texts."""
    connection = server.connect()
    graph = server.graph(connection)
    texts = ["a"] * LIMITS["EMBED_TEXTS_MAX"]
    within, beyond = {"graph": graph, "texts": texts}, {"graph": graph, "texts": [*texts, "a"]}
    refuse_beyond(connection, "embed", "InvalidArgument", within, beyond)
    expect(connection.refusal("embed", graph=graph, texts=[]), "InvalidArgument")


@case("Limits")
def documents_of_a_rerank(server: Server) -> None:
    """`rerank` takes 1 to `RERANK_DOCUMENTS_MAX` documents."""
    connection = server.connect()
    params = {"graph": server.graph(connection), "query": "q"}
    beyond = ["a"] * (LIMITS["RERANK_DOCUMENTS_MAX"] + 1)
    for documents in (beyond, []):
        refused = connection.refusal("rerank", **params, documents=documents)
        expect(refused, "InvalidArgument")


@case("Limits")
def tokens_of_a_detokenize(server: Server) -> None:
    """`detokenize` takes at most `DETOKENIZE_TOKENS_MAX` tokens."""
    connection = server.connect()
    graph = server.graph(connection)
    token = connection.call("tokenize", graph=graph, text="a")["tokens"][0]
    tokens = [token] * LIMITS["DETOKENIZE_TOKENS_MAX"]
    within, beyond = (
        {"graph": graph, "tokens": tokens},
        {"graph": graph, "tokens": [*tokens, token]},
    )
    refuse_beyond(connection, "detokenize", "InvalidArgument", within, beyond)


@case("Limits")
def branches_of_a_fork(server: Server) -> None:
    """`fork_session` makes 1 to `BRANCHES_MAX` branches."""
    connection, context = server.connected()
    most = LIMITS["BRANCHES_MAX"]
    within, beyond = ({"context": context, "n": n} for n in (most, most + 1))
    refuse_beyond(connection, "fork_session", "InvalidArgument", within, beyond)
    expect(connection.refusal("fork_session", context=context, n=0), "InvalidArgument")


@case("Limits")
def answers_of_a_call(server: Server) -> None:
    """`answers` generates 1 to `ANSWERS_MAX` answers."""
    connection, context = server.connected()
    most = LIMITS["ANSWERS_MAX"]
    within, beyond = ({"context": context, "n": n, "prompt": "a"} for n in (most, most + 1))
    refuse_beyond(connection, "answers", "InvalidArgument", within, beyond)


@case("Limits")
def messages_of_a_chat(server: Server) -> None:
    """`messages` has 1 to `MESSAGES_MAX` messages."""
    connection, context = server.connected()
    messages = [{"role": "user", "content": "a"}] * LIMITS["MESSAGES_MAX"]
    within, beyond = ({"context": context, "messages": m} for m in (messages, [*messages] * 2))
    refuse_beyond(connection, "chat", "InvalidArgument", within, beyond)
    expect(connection.refusal("chat", context=context, messages=[]), "InvalidArgument")


@case("Limits")
def tool_calls_of_a_message(server: Server) -> None:
    """A message has at most `TOOL_CALLS_MAX` tool calls."""
    connection, context = server.connected()
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}

    def params(calls: int) -> Map:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        messages.append({"role": "assistant", "tool_calls": [call] * calls})
        return {"context": context, "messages": [*messages, {"role": "user", "content": "b"}]}

    most = LIMITS["TOOL_CALLS_MAX"]
    refuse_beyond(connection, "chat", "InvalidArgument", params(most), params(most + 1))


@case("Limits")
def seconds_of_a_timeout(server: Server) -> None:
    """A timeout is 0, which is unlimited, to `TIMEOUT_S_MAX` seconds."""
    connection, context = server.connected()
    for field in ("timeout_s", "queue_timeout_s"):
        for accepted in (0, LIMITS["TIMEOUT_S_MAX"]):
            connection.call("chat", context=context, prompt="a", **{field: accepted})
        for seconds in (-1, LIMITS["TIMEOUT_S_MAX"] + 1, float("nan"), float("inf")):
            params = {"context": context, "prompt": "a", field: seconds}
            expect(connection.refusal("chat", **params), "InvalidArgument")


@case("Limits")
def characters_of_a_traceparent(server: Server) -> None:
    """A `traceparent` of a later version has at most `TRACEPARENT_CHARACTERS_MAX` characters."""
    connection, context = server.connected()
    span = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-"
    most = LIMITS["TRACEPARENT_CHARACTERS_MAX"]
    within, beyond = (
        {"context": context, "prompt": "a", "traceparent": span.ljust(size, "x")}
        for size in (most, most + 1)
    )
    refuse_beyond(connection, "chat", "InvalidArgument", within, beyond)


@case("Limits")
def graphs_of_a_connection(server: Server) -> None:
    """A connection has at most `GRAPHS_MAX` graphs; a further one is InvalidArgument."""
    connection = server.connect()
    for _ in range(LIMITS["GRAPHS_MAX"] // 100):
        numbers = [
            connection.start("load_by_name", {"name": server.model, "progress": False})
            for _ in range(100)
        ]
        for number in numbers:
            connection.wait(number)
    expect(connection.refusal("load_by_name", name=server.model), "InvalidArgument")


@case("Limits")
def descriptors_that_no_request_has_taken(server: Server) -> None:
    """More than `DESCRIPTORS_MAX` descriptors that no request has taken end the connection."""
    connection = server.connect()
    own = connection.socket.fileno()
    for _ in range(LIMITS["DESCRIPTORS_MAX"]):
        number = connection.start("queue", {}, [own])
        connection.wait(number)
    number = connection.start("queue", {}, [own])
    expect(connection.goodbye(), "ProtocolError")


@case("Limits")
def a_reply_above_its_limit(server: Server) -> None:
    """A reply that would exceed its limit is replaced by TooLarge; here vectors of an `embed`."""
    connection = server.connect()
    graph = server.graph(connection)
    limits = connection.server_hello["limits"]
    size = connection.call("embed", graph=graph, texts=["a"])["size"]
    text = "x" * 2000
    texts = [text] * min(LIMITS["EMBED_TEXTS_MAX"], 1 + limits["reply_bytes_max"] // (8000 * size))
    expect(connection.refusal("embed", graph=graph, texts=texts, pooling="none"), "TooLarge")
    check(connection.call("queue") is not None, "the connection is not open")
