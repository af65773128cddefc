"""Cases of compatibility: what a newer client sends is ignored or refused readably."""

from __future__ import annotations

from ..peer import CREDIT, REQUEST, SentRequest, check
from ..suite import Server, case, expect, metadata, output, set_input


@case("Compatibility")
def unknown_fields_of_every_call_are_ignored(server: Server) -> None:
    """Each side ignores fields that it does not know, in params and in the maps within."""
    connection = server.connect()
    extra = {"colour": "blue", "later": [1, {"a": None}], "fds": -1}
    graph = connection.call("load_by_name", name=server.model, **extra)["graph"]
    context = connection.call("init_execution_context", graph=graph, **extra)["context"]
    tensor = {"data": b"ab", **extra}
    connection.call("set_input", context=context, index=0, tensor=tensor, **extra)
    connection.call("compute", context=context, **extra)
    check(output(connection, context, **extra) == b"ab", "the answer differs")
    named = connection.call("compute", context=context, inputs=[["a", tensor]], **extra)
    check(named["outputs"][0][1]["data"] == b"ab", "the answer differs")
    connection.call("chat", context=context, prompt="x", **extra)
    connection.call("finalize_execution_context", context=context, **extra)
    connection.call("unload", graph=graph, **extra)


@case("Compatibility")
def unknown_items_of_a_message_are_ignored(server: Server) -> None:
    """Each side ignores further items of a message."""
    connection = server.connect()
    connection.requests[1] = SentRequest()
    connection.send([REQUEST, 1, "queue", {}, "more", 5, [None]])
    connection.wait(1)
    connection.send([CREDIT, 1, 1, "more"])
    connection.call("queue")


@case("Compatibility")
def an_unknown_call_is_refused(server: Server) -> None:
    """An unknown call gets UnsupportedOperation, and the connection stays open."""
    connection = server.connect()
    for call in ("translate", "", "LOAD_BY_NAME", "x" * 300):
        expect(connection.refusal(call), "UnsupportedOperation")
    connection.call("queue")


@case("Compatibility")
def another_minor_version_is_served(server: Server) -> None:
    """Minor versions may differ."""
    server.connect(protocol=[1, 1000]).call("queue")


@case("Hello")
def another_major_version_is_refused(server: Server) -> None:
    """If the major versions differ, the daemon sends a goodbye with VersionMismatch."""
    refused = expect(server.connect(protocol=[2, 0]).goodbye(), "VersionMismatch")
    check((refused.data.get("protocol") or [0])[0] == 1, f"data is {refused.data!r}")


@case("Parameters")
def unknown_parameters_in_json_are_reported(server: Server) -> None:
    """In JSON, unknown keys are returned as `ignored`."""
    connection, context = server.connected()
    set_input(connection, context, b'{"n-predict": 2, "no-such-key": 1}', index=1)
    set_input(connection, context, b"abcd")
    connection.call("compute", context=context)
    found = metadata(connection, context)
    check("no-such-key" in found["ignored"], f"ignored is {found['ignored']!r}")
    check(output(connection, context) == b"ab", "n-predict has no effect")


@case("Parameters")
def unknown_parameters_are_refused_if_the_json_is_strict(server: Server) -> None:
    """With `"strict": true`, and in `options`, unknown keys are refused."""
    connection, context = server.connected()
    text = b'{"strict": true, "no-such-key": 1}'
    params = {"context": context, "index": 1, "tensor": {"data": text}}
    expect(connection.refusal("set_input", **params), "InvalidArgument")
    options = {"no-such-key": 1}
    expect(connection.refusal("set_options", context=context, options=options), "InvalidArgument")
    params = {"context": context, "prompt": "a", "options": options}
    expect(connection.refusal("stream", **params), "InvalidArgument")


@case("Messages")
def a_parameter_that_is_nil_counts_as_absent(server: Server) -> None:
    """In `options` and in JSON parameters a key with the value nil counts as absent."""
    connection, context = server.connected()
    connection.call("set_options", context=context, options={"temp": None, "n-predict": 1})
    set_input(connection, context, b'{"top-k": null}', index=1)
    check(
        connection.call("chat", context=context, prompt="ab")["text"] == b"a", "n-predict is lost"
    )


@case("Parameters")
def keys_may_be_spelt_with_underscores(server: Server) -> None:
    """Keys may be spelt with `_` for `-`."""
    connection, context = server.connected()
    answer = connection.call("chat", context=context, prompt="abc", options={"n_predict": 1})
    check(answer["text"] == b"a", f"the answer is {answer['text']!r}")


@case("Parameters")
def parameters_for_images_are_refused(server: Server) -> None:
    """Keys for image files and speech are refused with UnsupportedOperation."""
    connection, context = server.connected()
    params = {"context": context, "index": 1, "tensor": {"data": b'{"image": "x.png"}'}}
    expect(connection.refusal("set_input", **params), "UnsupportedOperation")
