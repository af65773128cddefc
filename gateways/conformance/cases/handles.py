"""Cases of handles: their numbers, their connections, and how long they live."""

from __future__ import annotations

from ..peer import check
from ..suite import Server, case, expect, output, set_input


@case("Handles")
def handles_carry_the_start_count(server: Server) -> None:
    """Handles have the daemon's start count (`instance`) in the upper 32 bits."""
    connection = server.connect()
    graph = server.graph(connection)
    context = connection.call("init_execution_context", graph=graph)["context"]
    for handle in (graph, context):
        instance = connection.server_hello["instance"]
        check(handle >> 32 == instance & 0xFFFFFFFF, f"the handle {handle} is not of {instance}")


@case("Handles")
def handles_are_never_reused(server: Server) -> None:
    """A handle is never reused."""
    connection = server.connect()
    graph = server.graph(connection)
    seen = {graph}
    for _ in range(20):
        context = connection.call("init_execution_context", graph=graph)["context"]
        check(context not in seen, f"the handle {context} was used before")
        seen.add(context)
        connection.call("finalize_execution_context", context=context)
    check(server.graph(connection) not in seen, "a graph has the handle of a context")


@case("Handles")
def a_handle_is_valid_on_its_own_connection_only(server: Server) -> None:
    """On another connection a handle is treated as one that never existed."""
    connection = server.connect()
    graph = server.graph(connection)
    context = connection.call("init_execution_context", graph=graph)["context"]
    other = server.connect()
    expect(other.refusal("init_execution_context", graph=graph), "InvalidArgument")
    expect(other.refusal("unload", graph=graph), "InvalidArgument")
    for call in ("compute", "get_output", "fini_single", "finalize_execution_context"):
        expect(other.refusal(call, context=context), "InvalidArgument")
    connection.call("finalize_execution_context", context=context)


@case("Handles")
def a_handle_that_never_existed_is_refused(server: Server) -> None:
    """A handle that never existed is InvalidArgument."""
    connection = server.connect()
    for handle in (0, 1, (1 << 64) - 1, -1):
        expect(connection.refusal("compute", context=handle), "InvalidArgument")
        expect(connection.refusal("unload", graph=handle), "InvalidArgument")


@case("Handles")
def a_graph_is_not_a_context(server: Server) -> None:
    """The handle of a graph does not stand for a context, nor the other way round."""
    connection = server.connect()
    graph = server.graph(connection)
    context = connection.call("init_execution_context", graph=graph)["context"]
    expect(connection.refusal("get_output", context=graph), "InvalidArgument")
    expect(connection.refusal("init_execution_context", graph=context), "InvalidArgument")


@case("`finalize_execution_context`, `close_execution_context`")
def closing_a_context_twice_is_refused(server: Server) -> None:
    """Closing a context twice is InvalidArgument."""
    for first in ("finalize_execution_context", "close_execution_context"):
        connection, context = server.connected()
        connection.call(first, context=context)
        for call in ("finalize_execution_context", "close_execution_context", "get_output"):
            expect(connection.refusal(call, context=context), "InvalidArgument")


@case("`unload`")
def outputs_outlive_their_lease(server: Server) -> None:
    """After `unload`, contexts cannot compute, but their output can still be read."""
    connection = server.connect()
    graph = server.graph(connection)
    context = connection.call("init_execution_context", graph=graph)["context"]
    set_input(connection, context, b"ab")
    connection.call("compute", context=context)
    connection.call("unload", graph=graph)
    check(output(connection, context) == b"ab", "the output is lost")
    connection.refusal("compute", context=context)
    expect(connection.refusal("unload", graph=graph), "InvalidArgument")


@case("`load_by_name_with_config`")
def a_second_graph_has_its_own_parameters(server: Server) -> None:
    """The parameters of `config` hold for this graph only."""
    connection = server.connect()
    short = server.context(connection, '{"n-predict": 1}')
    whole = server.context(connection)
    texts = [connection.call("chat", context=c, prompt="abc")["text"] for c in (short, whole)]
    check(texts == [b"a", b"abc"], f"the answers are {texts!r}")


@case("Transport")
def handles_end_with_their_connection(server: Server) -> None:
    """A connection's graphs, contexts and requests end with it."""
    connection, context = server.connected()
    watcher = server.connect()

    def is_open() -> bool:
        sessions = watcher.call("sessions")["sessions"]
        return context in {session["context"] for session in sessions}

    check(is_open(), "`sessions` does not list the context")
    connection.close()
    server.wait_until(lambda: not is_open(), "the context outlives its connection")


@case("`load`")
def load_accepts_a_name_and_its_builder_form(server: Server) -> None:
    """The first builder is the model's name, or `preload:` and its name."""
    connection = server.connect()
    name = server.model.encode()
    for builder in (name, b"preload:" + name):
        for encoding in ("ggml", "GGML", 6, "autodetect", "auto_detect", 5):
            result = connection.call("load", builders=[builder], encoding=encoding)
            check(result.get("model") == server.model, f"the model is {result.get('model')!r}")
