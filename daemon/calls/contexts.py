"""The wasi-nn calls on execution contexts, with WasmEdge's behaviour."""

from __future__ import annotations

import msgspec

from ...backends.errors import InvalidArgument
from ...backends.params import parse_json_options
from ...ipc import messages as w
from ...ipc.server.server import Request
from ...scheduler.output.stopping.ending import CONTEXT_FULL
from ...sessions import Session, TurnOptions
from ..core import CallTable, Daemon
from .arguments import bounded, metadata_text, number_of, priority_of, seconds_of, tensor_bytes
from .turns import turn_result

__all__ = ("CALLS", "open_context")

METADATA_INDEX = 1
METADATA_NAMES = ("1", "metadata", "options", "config")
"""Names under which `compute`'s named inputs hold metadata JSON; any other holds the prompt."""


def open_context(
    daemon: Daemon, request: Request, session_id: str | None, *, persist: bool = True
) -> w.ContextResult:
    """Open a session on a graph, or find it by its id."""
    daemon.check_open()
    graph = daemon.graph(request.connection, request.params.graph)
    uid = request.connection.peer.uid
    session, attached = daemon.sessions.open(
        request.connection, uid, graph.lease, graph.options, session_id, persist=persist
    )
    if not attached:  # else it keeps the defaults it was opened with
        session.parameters.origins = dict(graph.origins)
    session.parameters.not_applied = dict(graph.not_applied)
    session.parameters.ignored = list(graph.ignored)
    return w.ContextResult(context=session.handle, attached=attached)


async def init_execution_context(daemon: Daemon, request: Request) -> w.ContextResult:
    """Open an unnamed session."""
    return open_context(daemon, request, None)


async def init_with_session_id(daemon: Daemon, request: Request) -> w.ContextResult:
    """Open a session with an id, or come back to it; what may not be written down stays so."""
    p: w.SessionParams = request.params
    result = open_context(daemon, request, p.session_id, persist=p.persist)
    session = daemon.sessions.get(request.connection, result.context)
    if not p.persist and (session.persist or not result.attached):
        await daemon.sessions.quiet(session)
    return result


async def set_input(daemon: Daemon, request: Request) -> w.Empty:
    """Take a prompt, or at index 1 parameters."""
    session, p = daemon.session(request), request.params
    data = await tensor_bytes(p.tensor)
    if p.index == METADATA_INDEX:
        set_metadata(session, data)
        await session.settled()
    else:
        await session.set_input(data)
    return w.Empty()


def set_metadata(session: Session, data: bytes) -> None:
    """Let the JSON's parameters hold for this context from the next token on."""
    if session.state in ("dormant", "closed", "unloaded"):
        raise InvalidArgument(f"the context is {session.state.value}", hint="open another one")
    session.apply(parse_json_options(metadata_text(data)))


async def compute(daemon: Daemon, request: Request) -> w.ComputeResult:
    """Compute a whole turn; with named inputs, answer with named outputs."""
    session, p = daemon.session(request), request.params
    prompt = None
    for name, tensor in p.inputs or ():
        data = await tensor_bytes(tensor)
        if name in METADATA_NAMES:
            set_metadata(session, data)
        else:
            prompt = msgspec.structs.replace(tensor, data=data)
            await session.set_input(data)
    await _compute(daemon, session, _turn_options(p))
    if prompt is None:
        return w.ComputeResult()
    return w.ComputeResult(
        outputs=[("output", _like(session.output(0), prompt))], metadata=session.metadata()
    )


def _like(data: bytes, prompt: w.Tensor) -> w.Tensor:
    """Return *data* as a tensor: of the prompt's type and shape where it is as long (an echo)."""
    kind = number_of(prompt.type, w.TENSOR_TYPES, "tensor type")
    if prompt.dimensions and len(data) == len(prompt.data) and data:
        return w.Tensor(data=data, dimensions=prompt.dimensions, type=kind)
    return w.Tensor(data=data, dimensions=[len(data)], type=w.TENSOR_TYPES["u8"])


def _turn_options(p: w.ComputeParams | w.ComputeSingleParams) -> TurnOptions:
    return TurnOptions(
        embeds=isinstance(p, w.ComputeParams),
        priority=priority_of(p.priority),
        queue_timeout_s=seconds_of(p.queue_timeout_s),
        timeout_s=seconds_of(p.timeout_s),
    )


async def _compute(daemon: Daemon, session: Session, options: TurnOptions) -> None:
    daemon.check_open()
    turn = await session.start(options)
    await session.finish(turn)
    if turn.stats is not None and turn.stats.stop_reason == CONTEXT_FULL.name:
        raise turn.ending()


async def compute_single(daemon: Daemon, request: Request) -> w.ComputeSingleResult:
    """Draw the next token."""
    session = daemon.session(request)
    if not session.active:
        daemon.check_open()
    piece = await session.compute_single(_turn_options(request.params))
    return w.ComputeSingleResult(piece=piece)


async def get_output(daemon: Daemon, request: Request) -> w.OutputResult:
    """Return the text so far, or metadata."""
    p = request.params
    return w.OutputResult(data=bounded(daemon.session(request).output(p.index), p.size_max))


async def get_output_single(daemon: Daemon, request: Request) -> w.OutputResult:
    """Return the last token's text, or metadata."""
    p = request.params
    data = daemon.session(request).output_single(p.index)
    return w.OutputResult(data=bounded(data, p.size_max))


async def fini_single(daemon: Daemon, request: Request) -> w.Empty:
    """End the turn; the input stays."""
    session = daemon.session(request)
    session.fini_single()
    await session.settled()
    return w.Empty()


async def finalize(daemon: Daemon, request: Request) -> w.Empty:
    """Close the session: nothing of it is kept, unless it has an id and is to be kept."""
    session = daemon.session(request)
    if request.params.keep and session.session_id is not None:
        daemon.sessions.detach(session)
        await session.settled()
    else:
        await daemon.sessions.close(session)
    return w.Empty()


async def prompt_compute(daemon: Daemon, request: Request) -> w.PromptComputeResult:
    """Take a prompt and answer it; the context keeps both (the prompt interface)."""
    daemon.check_open()
    session, p = daemon.session(request), request.params
    options = TurnOptions(
        priority=priority_of(p.priority), timeout_s=seconds_of(p.timeout_s), special=False
    )
    with session.undone_if_refused():
        await session.add_text(p.prompt.encode())
        turn = await session.start(options)
    await session.finish(turn)
    return w.PromptComputeResult(text=turn.text.decode(errors="replace"))


async def init_backend(daemon: Daemon, request: Request) -> w.InitBackendResult:
    """Say which keys of a backend configuration are set aside: all, they are the operator's."""
    text = metadata_text(request.params.config)
    options = parse_json_options(text)
    return w.InitBackendResult(ignored=sorted({*options.ignored, *options.values}))


async def deinit_backend(daemon: Daemon, request: Request) -> w.Empty:
    """Close the connection's sessions and graphs."""
    for session in daemon.sessions.of(request.connection):
        await daemon.sessions.close(session)
    for graph in [g for g in daemon.graphs.values() if g.connection is request.connection]:
        del daemon.graphs[graph.handle]
        graph.lease.close()
    return w.Empty()


async def run_inference(daemon: Daemon, request: Request) -> w.TurnResult:
    """Do one turn by the chat template, its history kept (apuslabs/wasi_nn_backend)."""
    daemon.check_open()
    session, p = daemon.session(request), request.params
    data = (await tensor_bytes(p.tensor)).rstrip(b"\0")
    options = parse_json_options(metadata_text(p.config))
    call = TurnOptions(
        options=options.values,
        priority=priority_of(p.priority),
        timeout_s=seconds_of(p.timeout_s),
        special=False,
    )
    with session.undone_if_refused():
        message = {"role": "user", "content": data.decode(errors="replace")}
        await session.add_messages([message], options.values)
        splitter = session.splitter(options.values)
        turn = await session.start(call)
    await session.finish(turn)
    result = turn_result(session, splitter, bytes(turn.text))
    bounded(result.text, p.size_max)
    metadata = result.metadata
    metadata["ignored"] = sorted({*metadata["ignored"], *options.ignored})
    return result


CALLS: CallTable = {
    "init_execution_context": init_execution_context,
    "init_execution_context_with_session_id": init_with_session_id,
    "prompt_init": init_execution_context,
    "prompt_compute": prompt_compute,
    "set_input": set_input,
    "compute": compute,
    "compute_single": compute_single,
    "get_output": get_output,
    "get_output_single": get_output_single,
    "fini_single": fini_single,
    "finalize_execution_context": finalize,
    "close_execution_context": finalize,
    "init_backend": init_backend,
    "deinit_backend": deinit_backend,
    "run_inference": run_inference,
}
