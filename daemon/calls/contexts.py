"""The wasi-nn calls that open an execution context, set its input, read its output and close it."""

from __future__ import annotations

from ...backends.errors import InvalidArgument
from ...backends.params import parse_json_options
from ...ipc import messages as w
from ...ipc.server.server_connection import Request
from ...sessions import Session
from ..core import CallTable, Daemon
from .arguments import bounded, metadata_text, tensor_bytes

METADATA_INDEX = 1


def open_context(
    daemon: Daemon, request: Request, session_id: str | None, *, persist: bool = True
) -> w.ContextResult:
    """Open a session on a graph, or find it by its id."""
    daemon.check_open()
    graph = daemon.graph(request.connection, request.params.graph)
    uid = request.connection.peer.uid
    session, attached = daemon.sessions.open_session(
        request.connection, uid, graph.lease, graph.options, session_id, persist=persist
    )
    if not attached:  # else it keeps the defaults it was opened with
        session.settings.parameters.origins = dict(graph.origins)
    session.settings.parameters.not_applied = dict(graph.not_applied)
    session.settings.parameters.ignored = list(graph.ignored)
    return w.ContextResult(context=session.handle, attached=attached)


async def init_execution_context(daemon: Daemon, request: Request) -> w.ContextResult:
    """Open an unnamed session."""
    return open_context(daemon, request, None)


async def init_with_session_id(daemon: Daemon, request: Request) -> w.ContextResult:
    """Open a session with an id, or come back to it; what may not be written down stays so."""
    p: w.SessionParams = request.params
    result = open_context(daemon, request, p.session_id, persist=p.persist)
    session = daemon.sessions.live.get_session(request.connection, result.context)
    if not p.persist and (session.settings.persist or not result.attached):
        await daemon.sessions.stop_persisting(session)
    return result


async def set_input(daemon: Daemon, request: Request) -> w.Empty:
    """Take a prompt, or at index 1 parameters."""
    session, p = daemon.session(request), request.params
    data = await tensor_bytes(p.tensor)
    if p.index == METADATA_INDEX:
        set_metadata(session, data)
        await session.wait_recorded()
    else:
        await session.input.set_input(data)
    return w.Empty()


def set_metadata(session: Session, data: bytes) -> None:
    """Let the JSON's parameters hold for this context from the next token on."""
    if session.state in ("dormant", "closed", "unloaded"):
        raise InvalidArgument(f"the context is {session.state.value}", hint="open another one")
    session.apply_options(parse_json_options(metadata_text(data)))


async def get_output(daemon: Daemon, request: Request) -> w.OutputResult:
    """Return the text so far, or metadata."""
    p = request.params
    return w.OutputResult(
        data=bounded(daemon.session(request).outputs.read_output(p.index), p.size_max)
    )


async def get_output_single(daemon: Daemon, request: Request) -> w.OutputResult:
    """Return the last token's text, or metadata."""
    p = request.params
    data = daemon.session(request).outputs.read_single_output(p.index)
    return w.OutputResult(data=bounded(data, p.size_max))


async def fini_single(daemon: Daemon, request: Request) -> w.Empty:
    """End the turn; the input stays."""
    session = daemon.session(request)
    session.runner.clear_output()
    await session.wait_recorded()
    return w.Empty()


async def finalize(daemon: Daemon, request: Request) -> w.Empty:
    """Close the session: nothing of it is kept, unless it has an id and is to be kept."""
    session = daemon.session(request)
    if request.params.keep and session.session_id is not None:
        daemon.sessions.detach_session(session)
        await session.wait_recorded()
    else:
        await daemon.sessions.close_session(session)
    return w.Empty()


CALLS: CallTable = {
    "init_execution_context": init_execution_context,
    "init_execution_context_with_session_id": init_with_session_id,
    "prompt_init": init_execution_context,
    "set_input": set_input,
    "get_output": get_output,
    "get_output_single": get_output_single,
    "fini_single": fini_single,
    "finalize_execution_context": finalize,
    "close_execution_context": finalize,
}
