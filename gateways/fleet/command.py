"""`inferd fleet`: certificates and relays of a fleet on the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...daemon.cli.commands import optional_import
from ...daemon.cli.options import SocketPath
from ...daemon.cli.output import note, write

DAYS = 365
NEED = "the fleet's certificates use cryptography"

NodeNames = Annotated[
    list[str] | None, typer.Argument(metavar="NODE...", help="Nodes that get a certificate.")
]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
Certificates = Annotated[
    Path | None,
    typer.Option(
        "--certificates",
        metavar="DIR",
        help="The folder of certificates; by default `fleet` beside the user's configuration.",
        show_default=False,
    ),
]
Days = Annotated[int, typer.Option(metavar="N", min=1, help="Days for which they are valid.")]
Renew = Annotated[
    bool, typer.Option("--renew", help="Replace certificates that exist, the entry's included.")
]
ListenAt = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="The address for entries; port 0: any.")
]

fleet = typer.Typer(
    help="Serve the daemons of several machines as one (extra `fleet`).", no_args_is_help=True
)


def certificates_folder(given: Path | None) -> Path:
    """Return the folder of certificates, which need not exist."""
    import platformdirs

    return given or platformdirs.user_config_path("inferd") / "fleet"


@fleet.command()
def init(
    nodes: NodeNames = None,
    certificates: Certificates = None,
    days: Days = DAYS,
    renew: Renew = False,
) -> None:
    """Make the fleet's authority, and certificates of the entry and of nodes.

    Certificates that exist stay, unless they are renewed; the authority always stays.
    """
    with optional_import(NEED, "fleet"):
        from .certificates.authority import Authority, Role
    from .certificates.folder import AUTHORITY, ENTRY, KeyFiles

    folder = certificates_folder(certificates)
    authority = Authority(folder)
    if authority.open_or_create():
        write(f"{folder / AUTHORITY}.key: keep it here; whoever has it can join the fleet")
    for name, role in ((ENTRY, Role.ENTRY), *((name, Role.NODE) for name in nodes or ())):
        if renew or not KeyFiles.of(folder, name).certificate.exists():
            files = authority.issue(name, role, days)
            write(f"{files.certificate}: valid for {days} days")
    for name in nodes or ():
        write(f"copy {name}.pem, {name}.key and {AUTHORITY}.pem to the machine of {name}")


@fleet.command()
def node(
    name: NodeName,
    listen: ListenAt = "0.0.0.0:7878",
    certificates: Certificates = None,
    socket: SocketPath = None,
) -> None:
    """Relay the protocol between entries and this machine's daemon, over mutual TLS.

    It runs until SIGTERM or Ctrl-C.
    """
    with optional_import(NEED, "fleet"):
        from .node.serving import run_node
    from ...daemon.cli.client import socket_of

    run_node(
        name,
        listen=listen,
        folder=certificates_folder(certificates),
        path=str(socket_of(socket)),
        on_ready=partial(note_ready, name),
        on_expiry=note,
    )


def note_ready(name: str, address: str) -> None:
    """Print where a node's relay listens."""
    note(f"node {name} serves entries on {address}")
