"""Connections of commands to the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import fraction_bar, note

if TYPE_CHECKING:
    from ...ipc.client import Client, Graph, Session

RETRIES = 2
SOFTWARE = "inferd cli"


def client_of(socket: Path | None, *, retries: int = 0, label: str = "") -> Client:
    """Return a client that is not connected yet."""
    from ...ipc.client import Client

    return Client(socket, retries=retries, software=SOFTWARE, label=label)


def socket_of(socket: Path | None) -> Path:
    """Return the socket that a client connects to."""
    from ...ipc.paths import client_socket_path

    return socket or client_socket_path()


@contextmanager
def session_of(
    socket: Path | None,
    model: str,
    *,
    show_bar: bool,
    label: str = "",
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Iterator[Session]:
    """Yield a session with *model*, after a progress bar for its load. Parameters of the model in
    *options* are requested for the load; a printed line names those that are not applied.

    *arguments* are those of `Client.session`.
    """
    options = options or {}
    config = {name: value for name, value in options.items() if _is_of_model(name)}
    arguments["options"] = {k: v for k, v in options.items() if k not in config} or None
    with ExitStack() as stack:
        client = stack.enter_context(client_of(socket, retries=RETRIES, label=label))
        with fraction_bar(f"loading {model}", show=show_bar) as report:
            # Strict, because users read errors, and want the values that they gave or none.
            given = {**config, "strict": True} if config else None
            session = client.session(model, config=given, on_progress=report, **arguments)
            stack.enter_context(session)
        note_not_applied(session.graph, config)
        yield session


def _is_of_model(name: str) -> bool:
    from ...backends.params import BY_SPELLING

    parameter = BY_SPELLING.get(name.replace("_", "-"))
    return parameter is not None and parameter.level == "model"


def note_not_applied(graph: Graph, requested: Mapping[str, Any]) -> None:
    """Print which *requested* parameters of the model are not applied, and the values in force."""
    from ...backends.params import BY_SPELLING, REQUESTABLE

    for name, value in requested.items():
        parameter = BY_SPELLING[name.replace("_", "-")].name
        in_force = graph.not_applied.get(parameter)
        if in_force is not None:
            remedy = f"set it in the configuration: [models.{graph.model}]"
            if parameter in REQUESTABLE:
                remedy = f"`inferd unload {graph.model}` first, or {remedy}"
            note(f"{name}={value} is not applied: {graph.model} has {in_force} ({remedy})")
