"""Connections of commands to the daemon."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    ModelNotFound,
    SessionExpired,
    UnsupportedOperation,
)
from .output import fraction_bar, note

if TYPE_CHECKING:
    from ..ipc.client import Client, Graph, Session

RETRIES = 2
RETRY_S_MAX = 30.0
"""A longer wait is left to the user."""
NO_END_TEXTS = {
    "no_turn": "there was no running turn",
    "not_reasoning": "its answer does not reason now",
    "refused_by_grammar": "the answer's grammar does not allow the end here",
    "no_worker": "its turn waits; try again",
}
"""The reasons why reasoning does not end, for people."""
RESUME_S = 60.0
SOFTWARE = "inferd cli"
ResultT = TypeVar("ResultT")


def client_of(
    socket: Path | None,
    *,
    retries: int = 0,
    label: str = "",
    resume_s: float = RESUME_S,
    reconnect: bool = False,
) -> Client:
    """Return a client that is not connected yet; its sessions resume within *resume_s*."""
    from ..ipc.client import Client

    return Client(
        socket,
        retries=retries,
        software=SOFTWARE,
        label=label,
        resume_timeout=resume_s,
        reconnect=reconnect,
    )


def socket_of(socket: Path | None) -> Path:
    """Return the socket that a client connects to."""
    from ..ipc.paths import client_socket_path

    return socket or client_socket_path()


@contextmanager
def session_of(
    socket: Path | None,
    model: str,
    *,
    show_bar: bool,
    label: str = "",
    resume_s: float = RESUME_S,
    session_id: str | None = None,
    is_temporary: bool = False,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Iterator[Session]:
    """Yield a session with *model*, a name or a file, after a progress bar for its load. Parameters
    of the model in *options* are requested for the load; a printed line names those that are not
    applied. A refused request is repeated as by `repeat_refused`. A session with `resume` resumes
    within *resume_s*. One that *is_temporary* gets an id, so that it can resume, and is deleted at
    the end; a printed line names it if that fails.

    *arguments* are those of `Client.session`.
    """
    from .model_arguments import known_model, with_pull_hint  # `ps` needs neither

    if is_temporary:
        session_id = f"chat-{secrets.token_hex(6)}"
    options = options or {}
    config = {name: value for name, value in options.items() if _is_of_model(name)}
    arguments["options"] = {k: v for k, v in options.items() if k not in config} or None
    with ExitStack() as stack:
        client = stack.enter_context(client_of(socket, label=label, resume_s=resume_s))
        # Strict, because users read errors, and want the values that they gave or none.
        given = {**config, "strict": True} if config else None
        with fraction_bar(f"loading {model}", show=show_bar) as report:

            def open_session() -> Session:
                name = known_model(client, model, given, report)
                return stack.enter_context(
                    client.session(
                        name, session_id=session_id, config=given, on_progress=report, **arguments
                    )
                )

            try:
                session = repeat_refused(open_session)
            except ModelNotFound as exc:
                raise with_pull_hint(model, exc) from None
        _check_generates(client, session)
        note_not_applied(session.graph, config)
        try:
            yield session
        finally:
            if is_temporary:
                _delete_session(client, session, model)


def _check_generates(client: Client, session: Session) -> None:
    """Check that the model of a session is not a graph.

    :raises UnsupportedOperation: it is one.
    """
    from ..ipc.client.graphs import inputs_text

    graph = session.graph
    if graph.tensors and not graph.ctx_size:
        inputs = client.graph(graph.model).inputs
        raise UnsupportedOperation(
            f"{graph.model!r} is a graph, which takes no text",
            hint=f"`inferd run MODEL --input NAME=FILE.npy` computes it; {inputs_text(inputs)}",
        )


def _delete_session(client: Client, session: Session, model: str) -> None:
    """Delete a session that the user has not named; print a line if its daemon is lost."""
    from ..ipc.client.caller import CLOSE_S_MAX

    try:
        if client.connected:
            session.delete(timeout=CLOSE_S_MAX)
            return
    except (InvalidArgument, SessionExpired):  # it is not open, as the daemon no longer has it
        return
    except InferdError:
        pass
    note(f"the daemon keeps the conversation: `inferd chat {model} --session {session.session_id}`")


def repeat_refused(attempt: Callable[[], ResultT], until: float = math.inf) -> ResultT:
    """Return the result of *attempt*. If it is refused for now, print the reason and the time until
    the next attempt, and repeat it, up to `RETRIES` times and before *until*.

    :raises InferdError: the last refusal, or one that needs a longer wait.
    """
    for retries in range(RETRIES, -1, -1):
        try:
            return attempt()
        except InferdError as exc:
            pause_s = retry_pause_s(exc, retries, until - time.monotonic())
            if pause_s is None:
                raise
            note(f"{exc.message_for_people}; trying again in {math.ceil(pause_s)} s")
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def retry_pause_s(error: InferdError, retries: int, remaining_s: float) -> float | None:
    """Return the pause before the request that failed by *error* is repeated, or None if it is not:
    no *retries* remain, they cannot help, or the daemon asks for a longer wait.
    """
    from ..ipc.client.caller import retry_delay_s

    if not retries or (isinstance(error, Busy) and error.retry_after_s > RETRY_S_MAX):
        return None
    return retry_delay_s(error, remaining_s)


def _is_of_model(name: str) -> bool:
    from ..backends.params import BY_SPELLING

    parameter = BY_SPELLING.get(name.replace("_", "-"))
    return parameter is not None and parameter.level == "model"


def note_not_applied(graph: Graph, requested: Mapping[str, Any]) -> None:
    """Print which *requested* parameters of the model are not applied, and the values in force."""
    from ..backends.params import BY_SPELLING, REQUESTABLE

    for name, value in requested.items():
        parameter = BY_SPELLING[name.replace("_", "-")].name
        in_force = graph.not_applied.get(parameter)
        if in_force is not None:
            remedy = f"set it in the configuration: [models.{graph.model}]"
            if parameter in REQUESTABLE:
                remedy = f"`inferd unload {graph.model}` first, or {remedy}"
            note(f"{name}={value} is not applied: {graph.model} has {in_force} ({remedy})")
