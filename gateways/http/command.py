"""`inferd gateway`: the HTTP gateway on the command line."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from socket import create_connection
from typing import Annotated

import typer

from ...backends.library import LEVELS
from ...backends.texts import choice_of
from ...cli.commands import optional_import
from ...cli.options import SocketPath
from ...cli.output import note
from .limits import Limits, UnknownFields, clients_max_of

_DEFAULTS = Limits()
PROBE_S_MAX = 5.0
"""Time for the daemon's and the gateway's answers to `--show`."""


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
Show = Annotated[
    bool,
    typer.Option(
        "--show",
        help="Print the settings by which PROGRAM uses the gateway with these options, and exit;"
        " without PROGRAM list the programs.",
    ),
]
ShownProgram = Annotated[
    str, typer.Argument(metavar="[PROGRAM]", help="The program of --show.", show_default=False)
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
SharedMemory = Annotated[
    bool,
    typer.Option(
        "--shared-memory",
        help="Let callers use their own shared memory on this machine for tensors, as Triton does.",
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
    program: ShownProgram = "",
    listen: Listen = "127.0.0.1:8080",
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    keys: KeysFile = None,
    new_key: NewKey = None,
    show: Show = False,
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
    shared_memory: SharedMemory = False,
    log_level: LogLevel = "warning",
    socket: SocketPath = None,
) -> None:
    """Serve the APIs of OpenAI, Anthropic and Ollama over HTTP (extra `gateway`).

    Graphs are served by the Open Inference Protocol, which Triton and KServe have.

    It runs until SIGTERM or Ctrl-C; requests under way may then end, for up to 10 s.
    """
    _log_from(log_level)
    if program and not show:
        raise typer.BadParameter(f"{program!r}: a program is only named with --show")
    if new_key is not None:
        show_new_key(new_key)
        return
    if show:
        scheme = "https" if tls_certificate is not None else "http"
        show_settings(program, listen, scheme, socket, has_keys=keys is not None)
        return
    with optional_import("the gateway uses uvicorn", "gateway"):
        from .server import run_server
    from ...ipc.server.descriptors import open_files_limit, raise_open_files_limit
    from .app import Gateway
    from .callers import Keys
    from .heads import Origins
    from .listening import Listener, check_address, parse_address, parse_mode, read_tls
    from .server import APIS
    from .shared_memory import REGIONS_MAX
    from .turns import ConnectionPool, TurnRunner, new_client

    raise_open_files_limit()
    limits = Limits(
        requests_max=requests_max,
        clients_max=clients_max_of(
            clients_max, requests_max, open_files_limit(), REGIONS_MAX if shared_memory else 0
        ),
        body_bytes_max=body_bytes_max,
        connections_max=connections_max,
        queue_s_max=queue_timeout,
        turn_s_max=timeout,
        receive_s_max=receive_timeout,
        hold_s=hold_headers,
    )
    address = parse_address(listen)
    known = None if keys is None else Keys(keys)
    check_address(address, has_keys=known is not None)
    tls = read_tls(tls_certificate, tls_key)
    listener = Listener(address, parse_mode(mode))
    try:
        connect = partial(
            new_client, socket=socket, timeout_s=limits.turn_s_max, software="inferd gateway"
        )
        pool = ConnectionPool(connect, limits.connections_max)
        turns = TurnRunner(pool, limits, shared_memory=shared_memory)
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


def _log_from(level: str) -> None:
    """Log to standard error from *level* on."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("inferd").setLevel(level.upper())


def show_settings(
    name: str, listen: str, scheme: str, socket: Path | None, *, has_keys: bool
) -> None:
    """Print the settings of the program *name* for a gateway at *listen*, or list the programs.

    :raises NotFound: no settings are known for the program.
    :raises InvalidArgument: the gateway has no address that programs can be set to.
    """
    from ...backends.errors import InvalidArgument
    from .listening import parse_address
    from .programs import NO_KEY, PROGRAMS, Address, find_program, settings_text

    if not name:
        for each in PROGRAMS:
            typer.echo(f"{each.name:18} {each.package} ({each.registry})")
        return
    program, address = find_program(name), parse_address(listen)
    if address.path or not address.port:
        raise InvalidArgument(
            f"programs cannot be set to the address {listen!r}",
            hint="name the gateway's host and port: --listen 127.0.0.1:8080",
        )
    url = f"{scheme}://{_host_for_clients(listen)}"
    model = _model_for_clients(socket)
    key = "KEY" if has_keys else NO_KEY
    typer.echo(settings_text(program, Address(url, model or "MODEL", key)), nl=False)
    if not model:
        note("MODEL is one of `inferd models`; no daemon with a model answers now")
    if has_keys:
        note("KEY is the key that `inferd gateway --new-key NAME` has shown")
    if not _answers(address.host, address.port):
        note(f"no gateway answers there now: start it with `inferd gateway --listen {listen}`")


def _host_for_clients(listen: str) -> str:
    """Return the host and the port by which programs of this machine reach a gateway."""
    host, _, port = listen.rpartition(":")
    return f"{'127.0.0.1' if host in ('', '0.0.0.0', '*', '[::]', '::') else host}:{port}"


def _model_for_clients(socket: Path | None) -> str:
    """Return the model with which a program begins, or an empty text if no daemon answers."""
    from ...backends.errors import InferdError
    from ...ipc.client import Client
    from ...ipc.model_names import offered_models, preferred_model

    try:
        with Client(socket, timeout=PROBE_S_MAX) as client:
            models = client.models()
            memory = client.stats().get("memory", {})
    except InferdError:
        return ""
    first = next((model["name"] for model in offered_models(models)), "")
    return preferred_model(models, memory) or first


def _answers(host: str, port: int) -> bool:
    """Return whether a program accepts connections at an address."""
    try:
        with create_connection((host or "127.0.0.1", port), timeout=PROBE_S_MAX):
            return True
    except OSError:
        return False


def show_new_key(name: str) -> None:
    """Print a new key, and its entry for the file of keys."""
    from .callers import new_key

    key, entry = new_key(name)
    note(f"the key, which is shown only now: {key}")
    typer.echo(entry, nl=False)
