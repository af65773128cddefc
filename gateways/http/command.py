"""`inferd gateway`: the HTTP gateway on the command line."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ...daemon.cli.commands import optional_import
from ...daemon.cli.options import SocketPath
from ...daemon.cli.output import note
from .limits import Limits

_DEFAULTS = Limits()

Listen = Annotated[
    str,
    typer.Option(metavar="HOST:PORT|unix:PATH", help="The address for clients; port 0: any."),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A further name by which clients call the gateway."),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(metavar="ORIGIN", help="An origin whose web pages may call the gateway (CORS)."),
]
RequestsMax = Annotated[int, typer.Option(metavar="N", min=1, help="Requests at once.")]
BodyBytesMax = Annotated[int, typer.Option(metavar="N", min=1, help="Bytes of a request.")]
ConnectionsMax = Annotated[
    int, typer.Option(metavar="N", min=1, help="Connections to the daemon; each has 240 requests.")
]
QueueTimeout = Annotated[
    float, typer.Option(metavar="S", min=0.001, help="Seconds that a request may wait.")
]
TurnTimeout = Annotated[
    float,
    typer.Option("--timeout", metavar="S", min=0.001, help="Seconds that a request may take."),
]


def gateway(
    listen: Listen = "127.0.0.1:8080",
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    requests_max: RequestsMax = _DEFAULTS.requests_max,
    body_bytes_max: BodyBytesMax = _DEFAULTS.body_bytes_max,
    connections_max: ConnectionsMax = _DEFAULTS.connections_max,
    queue_timeout: QueueTimeout = _DEFAULTS.queue_s_max,
    timeout: TurnTimeout = _DEFAULTS.turn_s_max,
    socket: SocketPath = None,
) -> None:
    """Serve the API of OpenAI over HTTP (extra `gateway`).

    It runs until SIGTERM or Ctrl-C; requests under way may then end, for up to 10 s.
    """
    with optional_import("the gateway uses starlette and uvicorn", "gateway"):
        from .server import run_server
    from ...ipc.client import AsyncClient
    from .apis import APIS
    from .app import Gateway
    from .callers.caller import DaemonUser
    from .callers.origins import Origins
    from .listening import Listener, check_address, parse_address
    from .turns import ConnectionPool, TurnRunner

    limits = Limits(
        requests_max=requests_max,
        clients_max=requests_max + 424,
        body_bytes_max=body_bytes_max,
        connections_max=connections_max,
        queue_s_max=queue_timeout,
        turn_s_max=timeout,
    )

    def connect(user: DaemonUser) -> AsyncClient:
        return AsyncClient(
            socket,
            timeout=limits.turn_s_max,
            reconnect=True,
            resume_timeout=limits.receive_s_max,
            software="inferd gateway",
            label=user.label,
            on_behalf_of=user.on_behalf_of,
        )

    address = parse_address(listen)
    check_address(address, has_keys=False)
    listener = Listener(address)
    try:
        turns = TurnRunner(ConnectionPool(connect, limits.connections_max), limits)
        origins = Origins(allow_host or (), allow_origin or (), any_host=bool(address.path))
        app = Gateway(APIS, turns, limits, origins)
        on_ready = partial(note, f"serving HTTP on {listener.name}")
        run_server(app, listener.socket, limits, on_ready=on_ready)
    finally:
        listener.close()
