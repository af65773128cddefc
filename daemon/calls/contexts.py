"""The wasi-nn calls on execution contexts: open, input, compute, output, close.

They behave as WasmEdge's do.
"""

from __future__ import annotations

from typing import Any

from ...backends.errors import InvalidArgument, NotFound
from ...backends.params import parse_json_options, parse_turn_json
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...scheduler.owner import Priority
from ...scheduler.stopping import CONTEXT_FULL
from ...sessions import NamedState, Opening, PlaceWait, Session, TurnNotes, TurnOptions
from ..core import Daemon
from ..models.registry import Lease
from .arguments import (
    bounded,
    decode_text,
    located_in,
    metadata_text,
    priority_of,
    seconds_of,
    tensor_bytes,
    turn_options,
)
from .models import check_projector
from .prompt_images import Prompt, stored_images
from .session_operations import find_state
from .tensors import (
    ENDED,
    LostAttempt,
    are_tensors,
    check_keep,
    collect_inputs,
    compute_kept,
    compute_named,
    find_kept,
    info_of,
    is_configuration,
    is_graph,
    is_tensor,
    prompt_number,
    prompt_text,
    read_passed,
    read_tensor,
    set_tensor,
    text_output,
)
from .turns import finish_turn, metadata_if_cancelled, turn_result


async def _open_session(
    daemon: Daemon, request: Request, session_id: str | None = None, *, persist: bool = True
) -> tuple[Session, bool]:
    """Return a session on a graph, and whether it is an existing session with this id. A call with
    a queue timeout waits for a place.
    """
    daemon.check_open()
    graph, p = daemon.graph(request), request.params
    sessions, queue_timeout_s = daemon.sessions, seconds_of(p.queue_timeout_s)
    priority = priority_of(p.priority)
    state, missing = _find_origin(daemon, request, session_id)
    options = graph.options if state is None else state.defaults_on(graph.options, graph.origins)
    opening = Opening(
        request.connection, request.owner, graph.lease, options, session_id, persist, state
    )
    with daemon.media_store.lease(request.owner.user) as lease:
        if state is not None and state.owner.user != request.owner.user:
            media = state.facts.media
            await daemon.media_store.copy_contents(lease, state.owner.user, media)
        if queue_timeout_s:
            wait = PlaceWait(Priority.NORMAL if priority is None else priority, queue_timeout_s)
            session, attached = await sessions.open_session_in_queue(opening, wait)
            _check_graph(daemon, request, session, attached=attached)
        else:
            session, attached = sessions.open_session(opening)
    if missing is not None and not attached:  # the session was deleted while the call waited
        sessions.discard_session(session)
        raise missing
    if priority is not None:
        session.settings.priority = priority
        session.recording.facts_changed()
    session.settings.on_behalf_of = request.connection.on_behalf_of
    session.settings.key = request.connection.key
    parameters = session.settings.parameters
    if not attached:  # an attached session keeps its own defaults
        parameters.origins = dict(graph.origins)
    parameters.not_applied = dict(graph.not_applied)
    parameters.ignored = list(graph.ignored)
    if not attached:
        parameters.out_of_range = dict(graph.adjusted)
        if state is not None:
            daemon.states.prepare_kv(state, request.owner.user)
            await _wait_recorded(daemon, session)
    return session, attached


def _find_origin(
    daemon: Daemon, request: Request, session_id: str | None
) -> tuple[NamedState | None, NotFound | None]:
    """Return the state with which a new session begins, if the call names one. If there is no such
    state but the session exists, return the error to raise if the session is deleted meanwhile.

    :raises NotFound: neither the state nor the session exists.
    """
    name = request.params.from_state
    if not name:
        return None, None
    try:
        return find_state(daemon, request, name), None
    except NotFound as missing:
        if session_id is None or daemon.sessions.find_session(request.owner, session_id) is None:
            raise
        return None, missing


async def _wait_recorded(daemon: Daemon, session: Session) -> None:
    """Wait until a new session with a history is stored; discard it if the caller is cancelled."""
    try:
        await session.wait_recorded()
    except BaseException:
        daemon.sessions.discard_session(session)
        raise


def _check_graph(daemon: Daemon, request: Request, session: Session, *, attached: bool) -> None:
    """Check that the graph was not unloaded while a call waited for the place of *session*.

    :raises InvalidArgument: the graph was unloaded; the session is closed or dormant again.
    """
    try:
        daemon.graph(request)
    except InvalidArgument:
        end = daemon.sessions.detach_session if attached else daemon.sessions.discard_session
        end(session)
        raise


async def init_execution_context(daemon: Daemon, request: Request) -> w.ContextResult:
    """Open a session without an id."""
    session, attached = await _open_session(daemon, request)
    return w.ContextResult(context=session.handle, attached=attached)


prompt_init = init_execution_context


async def init_execution_context_with_session_id(
    daemon: Daemon, request: Request
) -> w.ContextResult:
    """Open a session with an id, or attach to it; with `persist` off it is no longer stored."""
    p: w.SessionParams = request.params
    session, attached = await _open_session(daemon, request, p.session_id, persist=p.persist)
    if not p.persist and (session.settings.persist or not attached):
        await daemon.sessions.stop_persisting(session)
    return w.ContextResult(context=session.handle, attached=attached)


async def set_input(daemon: Daemon, request: Request) -> w.Empty:
    """Set the prompt, parameters at index 1, or an input of a tensor model."""
    session, p = daemon.session(request), request.params
    kept = find_kept(daemon, request, session, [p.tensor])
    for one in kept.values():
        one.check_file((await info_of(session)).fingerprint)
    tensor = kept[p.tensor.kept].tensor if kept else await read_tensor(request, p.tensor)
    if await is_tensor(session, p.index, tensor):
        await set_tensor(session, p.index, tensor)
    elif p.index == w.METADATA_INDEX:
        set_metadata(session, tensor.data)
        await session.wait_recorded()
    else:
        text = prompt_text(tensor)
        async with stored_images(daemon, request, session, text) as prompt:
            await session.set_input(prompt)
    return w.Empty()


def set_metadata(session: Session, data: bytes) -> None:
    """Apply JSON parameters to the context, from the next token on."""
    if session.state in ENDED:
        raise InvalidArgument(f"the context is {session.state.value}", hint="open another one")
    options = parse_json_options(metadata_text(data))
    if isinstance(session.model, Lease):
        check_projector(session.model, options.values)
    session.apply_options(options)


def get_output(daemon: Daemon, request: Request) -> w.OutputResult:
    """Return the text so far, or metadata."""
    p = request.params
    data = daemon.session(request).read_output(p.index)
    return w.OutputResult(data=bounded(data, p.size_max))


def get_output_single(daemon: Daemon, request: Request) -> w.OutputResult:
    """Return the last token's text, or metadata."""
    p = request.params
    data = daemon.session(request).read_single_output(p.index)
    return w.OutputResult(data=bounded(data, p.size_max))


async def fini_single(daemon: Daemon, request: Request) -> w.Empty:
    """End the turn and keep the input."""
    session = daemon.session(request)
    session.clear_output()
    await session.wait_recorded()
    return w.Empty()


async def finalize_execution_context(daemon: Daemon, request: Request) -> w.Empty:
    """Close the session; with `keep`, detach a session with an id instead."""
    session = daemon.session(request)
    if request.params.keep and session.session_id is not None:
        daemon.sessions.detach_session(session)
        await session.wait_recorded()
    else:
        await daemon.sessions.close_session(session)
    return w.Empty()


close_execution_context = finalize_execution_context


async def compute(daemon: Daemon, request: Request) -> w.ComputeResult:
    """Compute a whole turn, or the outputs of tensors; if the call names inputs, return named
    outputs.
    """
    session, p = daemon.session(request), request.params
    daemon.kept_tensors.free_tensors(request.connection, p.free)
    daemon.check_open()
    check_keep(session, p)
    if p.inputs is None and (session.tensors.inputs or is_graph(session)):
        await compute_kept(daemon, request, session)
        return w.ComputeResult()
    named = await read_passed(request, p.inputs or ())
    lost: LostAttempt | None = request.lost_attempt
    collected = collect_inputs(daemon, request, session, named) if lost is None else lost.inputs
    inputs = collected.tensors
    if p.inputs is not None and await are_tensors(session, inputs):
        outputs = await compute_named(daemon, request, session, collected)
        if is_graph(session):
            return w.ComputeResult(outputs=outputs)
        return w.ComputeResult(outputs=outputs, metadata=session.metadata())
    number = prompt_number(inputs)
    prompt = None if number is None else prompt_text(inputs[number][1])
    for name, tensor in inputs:
        if is_configuration(name, tensor):
            set_metadata(session, tensor.data)
    if prompt is not None:
        async with stored_images(daemon, request, session, prompt) as with_images:
            await session.set_input(with_images)
        daemon.check_open()  # it may have begun to drain meanwhile
    turn = await session.start_turn(turn_options(p, TurnOptions(embeds=True)))
    await finish_turn(request, session, turn)
    if turn.stats is not None and turn.stats.stop_reason == CONTEXT_FULL.name:
        raise turn.ending()
    if p.inputs is None or number is None or prompt is None:
        return w.ComputeResult()
    output = session.read_output(0)
    name, text = named[number][0], text_output(output, named[number][1])
    if turn.client.info.computes_tensors and turn.embedding is None:  # as of a tensor model
        outputs = [*named[:number], (name, text), *named[number + 1 :]]
    else:
        outputs = [("output", text)]
    return w.ComputeResult(outputs=outputs, metadata=session.metadata())


def free_tensors(daemon: Daemon, request: Request) -> w.Empty:
    """Free tensors that stay in the daemon."""
    daemon.kept_tensors.free_tensors(request.connection, request.params.tensors)
    return w.Empty()


async def compute_single(daemon: Daemon, request: Request) -> w.ComputeSingleResult:
    """Compute the next token."""
    session = daemon.session(request)
    if not session.active:
        daemon.check_open()
    with metadata_if_cancelled(request, session):
        piece = await session.pull_token(turn_options(request.params, TurnOptions()))
    return w.ComputeSingleResult(piece=piece)


async def prompt_compute(daemon: Daemon, request: Request) -> w.PromptComputeResult:
    """Answer a prompt; the context keeps both."""
    daemon.check_open()
    session, p = daemon.session(request), request.params
    options, prompt = turn_options(p, TurnOptions(special=False)), p.prompt.encode()
    async with (
        stored_images(daemon, request, session, prompt) as with_images,
        session.turn_input(lambda: session.add_text(with_images)),
    ):
        turn = await session.start_turn(options)
    await finish_turn(request, session, turn)
    return w.PromptComputeResult(text=turn.text.decode(errors="replace"))


async def run_inference(daemon: Daemon, request: Request) -> w.TurnResult:
    """Compute one chat turn and keep its history, as apuslabs/wasi_nn_backend does."""
    daemon.check_open()
    session, p = daemon.session(request), request.params
    data = (await tensor_bytes(request, p.tensor)).rstrip(b"\0")
    options = parse_turn_json(metadata_text(p.config))
    notes = TurnNotes(options.ignored, options.adjusted)
    given = TurnOptions(options=options.values, notes=notes, special=False)
    turn_settings = turn_options(p, given)
    async with stored_images(daemon, request, session, data) as prompt:
        content = await _as_content(prompt)
        message = {"role": "user", "content": content}
        with located_in(content if isinstance(content, str) else ""):
            async with session.turn_input(lambda: session.add_messages([message], options.values)):
                turn = await session.start_turn(turn_settings)
                splitter = session.new_splitter(options.values, turn)
    await finish_turn(request, session, turn)
    result = turn_result(session, splitter, bytes(turn.text))
    bounded(result.text, p.size_max)
    return result


async def _as_content(prompt: Prompt) -> str | list[dict[str, Any]]:
    """Return a prompt as the content of a message."""
    if isinstance(prompt, bytes):
        return await decode_text(prompt)
    return [
        {"type": "text", "text": await decode_text(piece)} if isinstance(piece, bytes) else piece
        for piece in prompt
    ]
