"""Cases of errors: each error is provoked once, and its number and data are checked.

Some errors need a server that fails on purpose. They are provoked with the models of the fixture
(docs/protocol.md), and skipped on servers without them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

from ..page import ENCODINGS_REFUSED, ERROR_NUMBERS, RETRY_LATER
from ..peer import ErrorReceived, Skipped, check
from ..suite import Server, add_case, expect, paused_stream, set_input

Provoke = Callable[[Server], ErrorReceived]


def _invalid_argument(server: Server) -> ErrorReceived:
    return server.connect().refusal("compute", context=0)


def _protocol_error(server: Server) -> ErrorReceived:
    connection = server.connect()
    connection.send(5)
    return connection.goodbye()


def _invalid_encoding(server: Server) -> ErrorReceived:
    connection, context = server.connected()
    for name, number in ENCODINGS_REFUSED.items():
        for encoding in (name, number):
            builders = [server.model.encode()]
            refused = connection.refusal("load", builders=builders, encoding=encoding)
            expect(refused, "InvalidEncoding")
    params = {"context": context, "index": 1, "tensor": {"data": b"{"}}
    return connection.refusal("set_input", **params)


def _unsupported_operation(server: Server) -> ErrorReceived:
    connection = server.connect()
    for target in ("tpu", 2, "npu", 4):
        params = {"builders": [server.model.encode()], "target": target}
        expect(connection.refusal("load", **params), "UnsupportedOperation")
    return connection.refusal("compute_everything")


def _too_large(server: Server) -> ErrorReceived:
    connection, context = server.connected()
    set_input(connection, context, b"abc")
    connection.call("compute", context=context)
    return connection.refusal("get_output", context=context, size_max=1)


def _not_found(server: Server) -> ErrorReceived:
    connection, context = server.connected()
    return connection.refusal("get_output", context=context, index=5)


def _end_of_sequence(server: Server) -> ErrorReceived:
    connection, context = server.connected()
    set_input(connection, context, b"a")
    connection.call("compute_single", context=context)
    return connection.refusal("compute_single", context=context)


def _context_full(server: Server) -> ErrorReceived:
    connection, context = server.connected('{"ctx-size": 64}')
    set_input(connection, context, b"x" * 48)
    refused = connection.refusal("compute", context=context)
    check(refused.data.get("ctx_size") == 64, f"data is {refused.data!r}")
    return refused


def _prompt_too_long(server: Server) -> ErrorReceived:
    connection, context = server.connected('{"ctx-size": 64}')
    set_input(connection, context, b"x" * 100)
    refused = connection.refusal("compute", context=context)
    tokens = refused.data.get("prompt_tokens", 0)
    check(refused.data.get("ctx_size") == 64 and tokens >= 100, f"data is {refused.data!r}")
    return refused


def _model_not_found(server: Server) -> ErrorReceived:
    refused = server.connect().refusal("load_by_name", name="no-such-model")
    listed = refused.data.get("models", [])
    check(server.model in listed, f"data does not list {server.model!r}: {refused.data!r:.200}")
    return refused


def _timeout(server: Server) -> ErrorReceived:
    with paused_stream(server, timeout_s=0.2) as (connection, _, number):
        return connection.refused(number)


def _cancelled(server: Server) -> ErrorReceived:
    with paused_stream(server) as (connection, _, number):
        connection.call("cancel", request=number)
        return connection.refused(number)


def _session_busy(server: Server) -> ErrorReceived:
    with paused_stream(server) as (connection, context, _):
        return connection.refusal("compute", context=context)


def _version_mismatch(server: Server) -> ErrorReceived:
    return server.connect(protocol=[99, 0]).goodbye()


def _permission_denied(server: Server) -> ErrorReceived:
    # A gateway's own user never has the right to manage. Without the right *delegate*, the
    # goodbye to its hello has the same error.
    return server.connect(on_behalf_of="@conformance").refusal("unload_model", name=server.model)


def _quota_exceeded(server: Server) -> ErrorReceived:
    connections = [server.connect(label=f"{server.label}-{i}") for i in range(64)]
    for connection in connections:
        try:
            connection.call("queue")
        except ErrorReceived as refused:
            return refused
    return server.connect(label=f"{server.label}-last").goodbye()


def _busy(server: Server) -> ErrorReceived:
    connection = server.connect(label="")
    graph = server.graph(connection)
    most = connection.server_hello["limits"]["sessions_max"]
    if most > 1000:
        raise Skipped(f"the server has {most} sessions")
    for _ in range(most):
        try:
            connection.call("init_execution_context", graph=graph)
        except ErrorReceived as refused:
            return refused
    return connection.refusal("init_execution_context", graph=graph)


def _load_failed(server: Server) -> ErrorReceived:
    connection = server.connect()
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(b"not a model" * 100)
        file.flush()
        with open(file.name, "rb") as readable:
            return connection.refusal("load", [readable.fileno()], fd=0)


def _missing_memory(server: Server) -> ErrorReceived:
    name = server.fixture("echo-too-big")
    refused = server.connect().refusal("load_by_name", name=name)
    for key in ("needed_bytes", "free_bytes"):
        check(type(refused.data.get(key)) is int, f"data has no {key}: {refused.data!r:.200}")
    return refused


def _kv_full(server: Server) -> ErrorReceived:
    connection, context = server.connected(model=server.fixture("echo-kv-full"))
    set_input(connection, context, b"x" * 32)
    return connection.refusal("compute", context=context)


def _runtime_error(server: Server) -> ErrorReceived:
    connection, context = server.connected(model=server.fixture("echo-failing"))
    set_input(connection, context, b"abc")
    return connection.refusal("compute", context=context)


def _worker_crashed(server: Server) -> ErrorReceived:
    connection, context = server.connected(model=server.fixture("echo-crashing"))
    set_input(connection, context, b"please crash")
    return connection.refusal("compute", context=context)


def _session_expired(server: Server) -> ErrorReceived:
    connection, context = server.connected()
    seconds = connection.server_hello["limits"].get("idle_timeout_ms", 0) / 1000
    if not seconds:
        raise Skipped("the server does not say when a context expires")
    end = time.monotonic() + server.patience(seconds)
    while time.monotonic() < end:
        time.sleep(min(1.0, seconds) * 1.2)  # a call on the context would restart its idle time
        sessions = connection.call("sessions")["sessions"]
        if context not in {session["context"] for session in sessions}:
            break
    return connection.refusal("get_output", context=context)


def _reader_timeout(server: Server) -> ErrorReceived:
    with paused_stream(server) as (connection, _, number):
        connection.timeout_s = server.patience(300)
        return connection.refused(number)


def _shutting_down(server: Server) -> ErrorReceived:
    if not server.options.drain:
        raise Skipped("it drains the server: --drain allows that")
    connection = server.connect()
    graph = server.graph(connection)
    connection.call("drain")
    return connection.refusal("init_execution_context", graph=graph)


def _never_sent(server: Server) -> ErrorReceived:
    raise Skipped("it is never sent")


PROVOKED: dict[str, Provoke] = {
    "InvalidArgument": _invalid_argument,
    "ProtocolError": _protocol_error,
    "InvalidEncoding": _invalid_encoding,
    "MissingMemory": _missing_memory,
    "Busy": _busy,
    "SessionBusy": _session_busy,
    "QuotaExceeded": _quota_exceeded,
    "RuntimeError": _runtime_error,
    "KvFull": _kv_full,
    "WorkerCrashed": _worker_crashed,
    "LoadFailed": _load_failed,
    "UnsupportedOperation": _unsupported_operation,
    "VersionMismatch": _version_mismatch,
    "TooLarge": _too_large,
    "NotFound": _not_found,
    "EndOfSequence": _end_of_sequence,
    "ContextFull": _context_full,
    "PromptTooLong": _prompt_too_long,
    "ModelNotFound": _model_not_found,
    "Timeout": _timeout,
    "ReaderTimeout": _reader_timeout,
    "Cancelled": _cancelled,
    "SessionExpired": _session_expired,
    "PermissionDenied": _permission_denied,
    "ConnectionLost": _never_sent,
    "InvalidAnswer": _never_sent,
    "Unknown": _never_sent,
    "ShuttingDown": _shutting_down,
}
"""The function that provokes each error and returns it, by the error's name."""


def _register(name: str, provoke: Provoke) -> None:
    def check_it(server: Server) -> None:
        refused = provoke(server)
        # The limit that is reached may be the user's quota instead.
        expect(refused, *(("Busy", "QuotaExceeded") if name == "Busy" else (name,)))
        check(refused.error["message"], "the error has no message")
        if name in RETRY_LATER:
            check(refused.error["retryable"] is True, "it is not retryable")
            wait = refused.data.get("retry_after_s", 1)
            check(isinstance(wait, int | float) and wait >= 0, f"retry_after_s is {wait!r}")

    rule = f"The error {name} has the number {ERROR_NUMBERS[name]}."
    ends_server = name == "ShuttingDown"
    add_case(f"errors.{name}", "Errors", rule, check_it, ends_server=ends_server)


for _name, _provoke in PROVOKED.items():
    _register(_name, _provoke)

assert set(PROVOKED) == set(ERROR_NUMBERS)
