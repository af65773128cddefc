"""Connections of commands to the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import fraction_bar

if TYPE_CHECKING:
    from ...ipc.client import Client, Session

RETRIES = 2
SOFTWARE = "inferd cli"


def client_of(socket: Path | None, *, retries: int = 0) -> Client:
    """Return a client that is not connected yet."""
    from ...ipc.client import Client

    return Client(socket, retries=retries, software=SOFTWARE)


def socket_of(socket: Path | None) -> Path:
    """Return the socket that a client connects to."""
    from ...ipc.paths import client_socket_path

    return socket or client_socket_path()


@contextmanager
def session_of(
    socket: Path | None, model: str, *, show_bar: bool, **arguments: Any
) -> Iterator[Session]:
    """Yield a session with *model*, after a progress bar for its load.

    *arguments* are those of `Client.session`.
    """
    with ExitStack() as stack:
        client = stack.enter_context(client_of(socket, retries=RETRIES))
        with fraction_bar(f"loading {model}", show=show_bar) as report:
            session = stack.enter_context(client.session(model, on_progress=report, **arguments))
        yield session
