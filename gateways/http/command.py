"""`inferd gateway`: the HTTP gateway on the command line."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...backends.library import LEVELS
from ...backends.texts import choice_of
from ...cli.commands import optional_import
from ...cli.options import SocketPath
from ...cli.output import note
from .limits import RESTART_S_MAX, Limits, UnknownFields, clients_max_of

_DEFAULTS = Limits()


def _level_of(text: str) -> str:
    level = choice_of(text, LEVELS)
    if level is None:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(LEVELS)}")
    return level


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
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="The file of keys; SIGHUP reads it again."),
]
NewKey = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Print a new key and its entry for the file, and exit."),
]
Certificate = Annotated[
    Path | None,
    typer.Option("--tls-certificate", metavar="FILE", help="Serve HTTPS with this certificate."),
]
CertificateKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's private key.")
]
SocketMode = Annotated[
    str, typer.Option("--mode", metavar="MODE", help="The permission bits of a Unix socket.")
]
RequestsMax = Annotated[int, typer.Option(metavar="N", min=1, help="Requests at once.")]
BodyBytesMax = Annotated[
    int, typer.Option(metavar="N", min=1, help="Bytes of a request; most paths allow less.")
]
ClientsMax = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=8,
        help="Connections of clients; 424 more than requests, if the limit of files allows them.",
        show_default=False,
    ),
]
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
ReceiveTimeout = Annotated[
    float,
    typer.Option(
        metavar="S",
        min=0.001,
        help="Seconds in which a request must arrive, or a part of an answer be read.",
    ),
]
UnknownFieldsChoice = Annotated[
    UnknownFields,
    typer.Option(
        metavar="ignore|refuse",
        case_sensitive=False,
        help="The treatment of fields that a path of the gateway does not know.",
    ),
]
TestModels = Annotated[
    bool,
    typer.Option(
        "--test-models",
        help="Offer test models (the backend echo) in lists, beside others.",
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        callback=_level_of,
        help="The least level of the log on standard error.",
    ),
]
HoldHeaders = Annotated[
    float,
    typer.Option(
        metavar="S",
        min=0,
        help="Seconds for which a stream's status waits, so that an early error has its own.",
    ),
]


def gateway(
    listen: Listen = "127.0.0.1:8080",
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    keys: KeysFile = None,
    new_key: NewKey = None,
    tls_certificate: Certificate = None,
    tls_key: CertificateKey = None,
    mode: SocketMode = "0600",
    requests_max: RequestsMax = _DEFAULTS.requests_max,
    body_bytes_max: BodyBytesMax = _DEFAULTS.body_bytes_max,
    clients_max: ClientsMax = None,
    connections_max: ConnectionsMax = _DEFAULTS.connections_max,
    queue_timeout: QueueTimeout = _DEFAULTS.queue_s_max,
    timeout: TurnTimeout = _DEFAULTS.turn_s_max,
    receive_timeout: ReceiveTimeout = _DEFAULTS.receive_s_max,
    hold_headers: HoldHeaders = _DEFAULTS.hold_s,
    unknown_fields: UnknownFieldsChoice = UnknownFields.IGNORE,
    test_models: TestModels = False,
    log_level: LogLevel = "warning",
    socket: SocketPath = None,
) -> None:
    """Serve the APIs of OpenAI, Anthropic and Ollama over HTTP (extra `gateway`).

    It runs until SIGTERM or Ctrl-C; requests under way may then end, for up to 10 s.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("inferd").setLevel(log_level.upper())
    if new_key is not None:
        show_new_key(new_key)
        return
    with optional_import("the gateway uses uvicorn", "gateway"):
        from .server import run_server
    from ...ipc.client import AsyncClient
    from ...ipc.server.descriptors import open_files_limit, raise_open_files_limit
    from .app import Gateway
    from .callers import DaemonUser, Keys
    from .heads import Origins
    from .listening import Listener, check_address, parse_address, parse_mode, read_tls
    from .server import APIS
    from .turns import ConnectionPool, TurnRunner

    raise_open_files_limit()
    limits = Limits(
        requests_max=requests_max,
        clients_max=clients_max_of(clients_max, requests_max, open_files_limit()),
        body_bytes_max=body_bytes_max,
        connections_max=connections_max,
        queue_s_max=queue_timeout,
        turn_s_max=timeout,
        receive_s_max=receive_timeout,
        hold_s=hold_headers,
    )

    def connect(user: DaemonUser) -> AsyncClient:
        return AsyncClient(
            socket,
            timeout=limits.turn_s_max,
            reconnect=True,
            resume_timeout=RESTART_S_MAX,
            software="inferd gateway",
            label=user.label,
            on_behalf_of=user.on_behalf_of,
        )

    address = parse_address(listen)
    known = None if keys is None else Keys(keys)
    check_address(address, has_keys=known is not None)
    tls = read_tls(tls_certificate, tls_key)
    listener = Listener(address, parse_mode(mode))
    try:
        turns = TurnRunner(ConnectionPool(connect, limits.connections_max), limits)
        any_host = bool(address.path) or known is not None
        origins = Origins(allow_host or (), allow_origin or (), any_host=any_host)
        run_server(
            Gateway(APIS, turns, limits, origins, known, unknown_fields, test_models),
            listener.sockets,
            limits,
            on_ready=partial(note, f"serving HTTP on {listener.name}"),
            tls=tls,
        )
    finally:
        listener.close()


def show_new_key(name: str) -> None:
    """Print a new key, and its entry for the file of keys."""
    from .callers import new_key

    key, entry = new_key(name)
    note(f"the key, which is shown only now: {key}")
    typer.echo(entry, nl=False)
