"""`inferd nnrpc`: WasmEdge's RPC service on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...backends.errors import InferdError, InvalidArgument
from ...cli.client import RETRIES
from ...cli.commands import optional_import
from ...cli.options import Label, PriorityOption, SocketPath, exit_after
from ...cli.output import note
from ..guests import ImageDirectory
from ..guests.options import Allowed, Preloads, models_of
from .limits import Limits

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient
    from ...ipc.server.listener import InheritedListener, UnixListener

_DEFAULTS = Limits()
PID_MAX = 1 << 22
"""The largest process id of Linux."""

Listen = Annotated[
    str | None,
    typer.Option(
        metavar="unix:PATH",
        help="The socket for clients; systemd may pass one instead.",
        show_default=False,
    ),
]
SocketMode = Annotated[str, typer.Option(metavar="MODE", help="The socket's permission bits.")]
ConnectionsMax = Annotated[int, typer.Option(metavar="N", min=1, help="The most clients.")]
ContextsMax = Annotated[int, typer.Option(metavar="N", min=1, help="A client's contexts at most.")]
LabelClients = Annotated[
    bool,
    typer.Option(
        "--label-clients", help="Add a client's process id to the label: clients share fairly."
    ),
]
ImageDirectories = Annotated[
    list[str] | None,
    typer.Option(
        "--image-dir",
        metavar="DIR",
        help="A directory in which clients may name images with the key `image`; repeatable.",
    ),
]


def nnrpc(
    listen: Listen = None,
    preloads: Preloads = None,
    allowed: Allowed = None,
    priority: PriorityOption = "normal",
    label: Label = "",
    label_clients: LabelClients = False,
    mode: SocketMode = "0600",
    connections_max: ConnectionsMax = _DEFAULTS.connections_max,
    contexts_max: ContextsMax = _DEFAULTS.contexts_max,
    image_directories: ImageDirectories = None,
    socket: SocketPath = None,
) -> None:
    """Serve WasmEdge's RPC for wasi-nn, for `wasmedge --nn-rpc-uri` (extra `nnrpc`).

    It runs until SIGTERM or Ctrl-C; calls under way may then end, for up to 10 s.
    """
    with optional_import("the gateway uses gRPC", "nnrpc"):
        from .server import Server
    import anyio

    from ...ipc.client import AsyncClient
    from ...ipc.names import check_label

    def label_of(pid: int) -> str:
        return f"{label or 'nnrpc'}-{pid}" if label_clients else label

    def connect(pid: int) -> AsyncClient:
        return AsyncClient(socket, retries=RETRIES, software="inferd nnrpc", label=label_of(pid))

    check_label(label_of(PID_MAX))

    models = models_of(preloads, allowed)
    listener = open_listener(listen, mode)
    try:
        server = Server(
            listener.socket,
            connect,
            preloads=models,
            priority=priority,
            limits=Limits(connections_max=connections_max, contexts_max=contexts_max),
            image_directories=image_directories_of(image_directories or ()),
        )
        note_ready = partial(note, f"serving WasmEdge's RPC on unix:{listener.path}")
        note_stop = partial(note, "calls under way may end; a second signal ends them")
        ended_by = anyio.run(server.run, note_ready, note_stop)
    finally:
        listener.close()
    exit_after(ended_by)


def image_directories_of(paths: Sequence[str]) -> list[ImageDirectory]:
    """Return directories in which images have names relative to them, and absolute ones."""
    named = [ImageDirectory(".", path) for path in paths]
    return [*named, *(ImageDirectory(os.path.abspath(path), path) for path in paths)]


def open_listener(listen: str | None, mode: str) -> UnixListener | InheritedListener:
    """Return the socket that *listen* names, or that systemd passed."""
    from ...ipc.server.listener import UnixListener, inherited_listener

    if listen is None:
        inherited = inherited_listener(os.environ)
        if inherited is None:
            raise InvalidArgument("no socket to listen on", hint="name one: --listen unix:PATH")
        return inherited
    scheme, _, path = listen.partition(":")
    path = path.removeprefix("//")
    if scheme != "unix" or not path:
        raise typer.BadParameter(f"--listen {listen!r} is not of the form unix:PATH")
    try:
        bits = int(mode, 8)
    except ValueError:
        bits = -1
    if not 0 <= bits <= 0o777:
        raise typer.BadParameter(f"--mode {mode!r} is not octal, such as 0600")
    listener = UnixListener(str(Path(path).absolute()), bits, gateway=True)
    try:
        listener.bind()
    except InferdError:
        listener.close()
        raise
    return listener
