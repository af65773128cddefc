"""Cases of contexts and sessions with an id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..peer import Connection, Map, check
from ..suite import Server, case, expect, output, paused_stream, set_input

WITH_ID = "init_execution_context_with_session_id"


@contextmanager
def session(server: Server, name: str) -> Iterator[tuple[Connection, Map]]:
    """Yield a connection and the params that open a session with an id; delete it at the end."""
    connection = server.connect()
    params = {"graph": server.graph(connection), "session_id": f"conformance-{name}"}
    try:
        yield connection, params
    finally:
        server.connect().call("delete_session", session_id=params["session_id"])


@case("`init_execution_context_with_session_id`")
def a_session_id_names_one_context(server: Server) -> None:
    """On the same connection the id returns the same context."""
    with session(server, "same") as (connection, params):
        first = connection.call(WITH_ID, **params)
        check(not first.get("attached", False), "a new session is reported as attached")
        again = connection.call(WITH_ID, **params)
        check(again["context"] == first["context"], "the second call opened another context")


@case("`init_execution_context_with_session_id`")
def a_session_is_open_on_one_connection(server: Server) -> None:
    """SessionBusy if the session is open on another connection."""
    with session(server, "busy") as (connection, params):
        connection.call(WITH_ID, **params)
        other = server.connect()
        params = {**params, "graph": server.graph(other)}
        expect(other.refusal(WITH_ID, **params), "SessionBusy")


@case("`init_execution_context_with_session_id`")
def a_session_keeps_its_history(server: Server) -> None:
    """After its connection has closed, an id returns a new handle on the same history."""
    with session(server, "kept") as (connection, params):
        context = connection.call(WITH_ID, **params)["context"]
        connection.call("chat", context=context, prompt="abc", raw=True)
        tokens = connection.call("rewind", context=context, turns=1).get("tokens", 0)
        connection.call("chat", context=context, prompt="abc", raw=True)
        connection.call("finalize_execution_context", context=context, keep=True)
        other = server.connect()
        result = other.call(WITH_ID, **{**params, "graph": server.graph(other)})
        check(result.get("attached") is True, "the session is not attached")
        check(result["context"] != context, "the handle was reused")
        left = other.call("rewind", context=result["context"], turns=1).get("tokens", 0)
        check(left == tokens, f"{left} tokens are left of the history, not {tokens}")


@case("`delete_session`")
def a_session_is_deleted_before_the_reply(server: Server) -> None:
    """`delete_session` deletes it; `deleted` says whether there was such a session."""
    with session(server, "deleted") as (connection, params):
        context = connection.call(WITH_ID, **params)["context"]
        name = params["session_id"]
        check(connection.call("delete_session", session_id=name)["deleted"] is True, "not deleted")
        check(
            connection.call("delete_session", session_id=name)["deleted"] is False, "deleted twice"
        )
        expect(connection.refusal("get_output", context=context), "InvalidArgument")
        check(not connection.call(WITH_ID, **params).get("attached", False), "its history is back")


@case("`update_session`")
def a_session_is_changed_and_restored_by_its_id(server: Server) -> None:
    """`update_session` sets the title; a session deleted with `undo_s` is restored."""
    with session(server, "titled") as (connection, params):
        context = connection.call(WITH_ID, **params)["context"]
        name = params["session_id"]
        connection.call("finalize_execution_context", context=context, keep=True)
        found = connection.call("update_session", session_id=name, title="Title")["session"]
        check(found["title"] == "Title", f"the title is {found['title']!r}")
        connection.call("delete_session", session_id=name, undo_s=60.0)
        expect(connection.refusal("update_session", session_id=name, title="x"), "NotFound")
        found = connection.call("restore_session", session_id=name)["session"]
        check(found["title"] == "Title", "the title was lost")
        expect(connection.refusal("restore_session", session_id=name), "NotFound")
        notes = connection.call("list_deletions")["deletions"]
        check(all(note["session_id"] != name for note in notes), "a note on a deletion by a call")


@case("`reset`")
def reset_clears_the_history(server: Server) -> None:
    """`reset` clears the history."""
    connection, context = server.connected()
    connection.call("chat", context=context, prompt="ab", raw=True)
    connection.call("reset", context=context)
    refused = connection.refusal("rewind", context=context, turns=1)
    expect(refused, "InvalidArgument")


@case("`rewind`")
def rewind_removes_turns(server: Server) -> None:
    """`rewind` truncates the history by turns; more turns than it has are InvalidArgument."""
    connection, context = server.connected()
    for prompt in ("ab", "cd"):
        connection.call("chat", context=context, prompt=prompt, raw=True)
    one = connection.call("rewind", context=context, turns=1)
    check(one.get("turns", 0) == 1, f"{one.get('turns', 0)} turns are left, not 1")
    none = connection.call("rewind", context=context, turns=1)
    check(none.get("tokens", 0) == 0, f"{none.get('tokens')} tokens are left, not 0")
    expect(connection.refusal("rewind", context=context, turns=1), "InvalidArgument")


@case("`fork_session`")
def branches_are_independent(server: Server) -> None:
    """Branches have the context's history, and are independent from then on."""
    connection, context = server.connected()
    connection.call("chat", context=context, prompt="ab", raw=True)
    forked = connection.call("fork_session", context=context, n=3)
    contexts = forked["contexts"]
    check(len({context, *contexts}) == 4, f"the branches are {contexts!r}")
    connection.call("reset", context=context)
    left = connection.call("rewind", context=contexts[0], tokens=2)
    check(left.get("tokens", 0) == 2, "the branch has lost its history")
    answer = connection.call("chat", context=contexts[1], prompt="x", raw=True)
    check(answer["metadata"]["input_tokens"] > forked["tokens"], "the branch has no history")


@case("Requests")
def a_context_runs_one_turn_at_a_time(server: Server) -> None:
    """A request that is impossible during a turn gets SessionBusy."""
    with paused_stream(server) as (connection, context, number):
        tensor = {"data": b"x"}
        params = {"context": context, "index": 0, "tensor": tensor}
        expect(connection.refusal("set_input", **params), "SessionBusy")
        for call in ("compute", "compute_single", "reset"):
            expect(connection.refusal(call, context=context), "SessionBusy")
        expect(connection.refusal("rewind", context=context, turns=1), "SessionBusy")
        connection.call("cancel", request=number)


@case("`set_options`")
def options_hold_for_later_turns(server: Server) -> None:
    """`set_options` sets parameters of the context, and `parameters` returns those in force."""
    connection, context = server.connected()
    connection.call("set_options", context=context, options={"n-predict": 2})
    check(connection.call("chat", context=context, prompt="abcd")["text"] == b"ab", "not in force")
    listed = connection.call("parameters", context=context)["parameters"]
    entry = next(p for p in listed if p["name"] == "n-predict")
    check(entry["value"] == 2, f"`parameters` says {entry!r}")
    check(entry["origin"] == "session", f"the origin is {entry['origin']!r}")


@case("`set_input`")
def an_input_replaces_the_history_unless_it_is_appended(server: Server) -> None:
    """A prompt replaces the history, or is appended to it if the parameter `append` is true."""
    connection, context = server.connected()
    set_input(connection, context, b"ab")
    connection.call("compute", context=context)
    set_input(connection, context, b"cd")
    connection.call("compute", context=context)
    check(output(connection, context) == b"cd", "the prompt did not replace the history")
    before = connection.call("rewind", context=context, turns=1).get("tokens", 0)
    check(before == 0, f"the history still has {before} tokens before the turn")
    connection.call("chat", context=context, prompt="ab", raw=True)
    set_input(connection, context, b'{"append": true}', index=1)
    set_input(connection, context, b"cd")
    connection.call("compute", context=context)
    left = connection.call("rewind", context=context, turns=1)
    check(left.get("tokens", 0) > 0, "the prompt was not appended")


@case("Copies of sessions")
def a_copy_becomes_the_session(server: Server) -> None:
    """A copy cannot be opened until it is kept; then it has the session's history."""
    with session(server, "copied") as (connection, params):
        context = connection.call(WITH_ID, **params)["context"]
        connection.call("chat", context=context, prompt="abc", raw=True)
        named = {"session_id": params["session_id"], "label": server.label}
        whole = connection.call("read_copy", **named)
        connection.call("delete_session", context=context)
        given = {name: whole[name] for name in ("stream", "number", "data")}
        connection.call("store_copy", **named, **given, size=len(whole["data"]))
        expect(connection.refusal(WITH_ID, **params), "SessionBusy")
        connection.call("end_transfer", transfer=whole["stream"], outcome="keep")
        result = connection.call(WITH_ID, **params)
        check(result.get("attached") is True, "the session is not there")
        left = connection.call("rewind", context=result["context"], turns=1)
        check(left.get("turns", 0) == 0, "the history has other turns")


@case("Copies of sessions")
def a_changed_session_is_sent_before_the_reply(server: Server) -> None:
    """With `copies` in the hello, a change is sent with its request's id, before the reply."""
    connection, named = server.connect(copies=True), {"session_id": "conformance-changes"}
    context = connection.call(WITH_ID, graph=server.graph(connection), **named)["context"]
    options = {"context": context, "options": {"n-predict": 2}}
    number = connection.start("set_options", options)
    message = connection.read_message()
    connection.wait(number)
    server.connect().call("delete_session", **named)
    check(message[:2] == [7, number], f"the first message is {message[:2]}")
    check(message[2]["session_id"] == named["session_id"], "it is of another session")
    check(message[2]["number"] == 1, "it is not the first change")


@case("Copying models")
def an_imported_file_needs_its_hash(server: Server) -> None:
    """A file with another hash is not kept; parts come in order, until the transfer is ended."""
    connection, file = server.connect(), b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
    sent: Map = {"name": "conformance", "transfer": "1", "size": len(file)}
    refused = connection.refusal("import_model", **sent, data=file, sha256="0" * 64)
    expect(refused, "RuntimeError")
    names = {model["name"] for model in connection.call("models")["models"]}
    check("conformance" not in names, "the file became a model")
    sent["transfer"] = "2"
    part = connection.call("import_model", **sent, data=file[:8])
    check(not part.get("arrived", False), "a part is the whole file")
    connection.call("end_model_transfer", transfer="2")
    refused = connection.refusal("import_model", **sent, data=file[8:], offset=8, sha256="0" * 64)
    expect(refused, "InvalidArgument")
    expect(connection.refusal("export_model", name="echo", transfer="3"), "UnsupportedOperation")


@case("`add_model`")
def a_query_without_a_descriptor_adds_nothing(server: Server) -> None:
    """The result names the file that would be made; a name that is a path is refused."""
    connection = server.connect()
    found = connection.call("add_model", name="conformance-absent")
    check(found["file"].endswith("/conformance-absent.gguf"), f"the file is {found['file']}")
    check(not found.get("added", False) and found.get("size_bytes", 0) == 0, "it is there")
    expect(connection.refusal("add_model", name="../escape"), "InvalidArgument")


@case("Moving sessions")
def an_exported_session_is_imported_again(server: Server) -> None:
    """A held or arriving session cannot be opened; where it is imported, it has its history."""
    with session(server, "moved") as (connection, params):
        context = connection.call(WITH_ID, **params)["context"]
        connection.call("chat", context=context, prompt="abc", raw=True)
        connection.call("finalize_execution_context", context=context, keep=True)
        moved = {"session_id": params["session_id"], "transfer": "conformance"}
        moved["label"] = server.label
        part = connection.call("export_session", **moved)
        expect(connection.refusal(WITH_ID, **params), "SessionBusy")
        connection.call("end_transfer", transfer="conformance", outcome="release")
        connection.call("end_transfer", transfer="conformance", outcome="drop")
        connection.call("import_session", **moved, data=part["data"], size=part["size"])
        expect(connection.refusal(WITH_ID, **params), "SessionBusy")
        connection.call("end_transfer", transfer="conformance", outcome="keep")
        result = connection.call(WITH_ID, **params)
        check(result.get("attached") is True, "the session is not there")
        left = connection.call("rewind", context=result["context"], turns=1)
        check(left.get("turns", 0) == 0, "the history has other turns")
