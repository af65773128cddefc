"""`inferd fleet`: certificates and relays of a fleet on the command line."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ...backends.errors import InvalidArgument
from ...cli.commands import optional_import
from ...cli.one_shot import OneShotClient
from ...cli.options import JsonOutput, ModelName, SocketPath, exit_after
from ...cli.output import Columns, note, table_of, write, write_json, write_result

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
RayMembers = Annotated[
    list[str] | None,
    typer.Option(
        "--ray",
        metavar="NAME=ADDRESS",
        help="Make a certificate for Ray as well, of a node or of `entry`, for the address of its"
        " machine. A member with several addresses has several such options.",
        show_default=False,
    ),
]
ListenAt = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="The address for entries; port 0: any.")
]
RayAddress = Annotated[
    str, typer.Option("--ray", metavar="HOST:PORT", help="Join this Ray cluster as a node.")
]
RayCluster = Annotated[
    str, typer.Option("--ray", metavar="HOST:PORT", help="The Ray cluster that has the node.")
]
Descriptors = Annotated[
    Path | None,
    typer.Option(
        "--descriptors",
        metavar="PATH",
        help="Take models in descriptors at this Unix socket, from an entry on this machine.",
        show_default=False,
    ),
]
NodeStateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="With --ray: the folder of the node's files; by default `fleet-nodes/NODE` beside the"
        " daemon's state.",
        show_default=False,
    ),
]
ServeArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="SERVE_ARGUMENT...", help="With --ray, after --: of `inferd serve`."),
]
FleetFile = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="The fleet's configuration file.")
]
CopyTo = Annotated[
    str,
    typer.Option("--to", metavar="NODE", help="The node that gets the file.", show_default=False),
]
Sha256 = Annotated[
    str,
    typer.Option(
        "--sha256", metavar="HEX", help="The required SHA-256 of the file.", show_default=False
    ),
]
NODES: Columns = {
    "NODE": "name",
    "ADDRESS": "address",
    "STATE": lambda n: _state(n),
    "SESSIONS": lambda n: f"{n['sessions']} of {n['sessions_max']}" if n["reachable"] else None,
    "RUNNING": lambda n: n.get("running"),
    "WAITING": lambda n: n.get("waiting"),
    "SLOTS": lambda n: n.get("slots"),
    "LOADED": lambda n: ", ".join(n.get("loaded", ())) or None,
}


def _state(node: dict[str, Any]) -> str:
    if not node["reachable"]:
        return f"lost: {node['cause']}"
    return "draining" if node["draining"] else "ready"


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
    ray: RayMembers = None,
    days: Days = DAYS,
    renew: Renew = False,
    as_json: JsonOutput = False,
) -> None:
    """Make the fleet's authority, and certificates of the entry and of nodes.

    Certificates that exist stay, unless they are renewed; the authority always stays. With --ray,
    the folder `ray` there gets an authority and certificates for a Ray cluster, and its token.
    """
    with optional_import(NEED, "fleet"):
        from .certificates import Authority, Role
        from .ray_cluster.keys import issue_for_members, members_of
    from .certificates import AUTHORITY, ENTRY, KeyFiles

    members = members_of(ray or ())

    folder = certificates_folder(certificates)
    authority = Authority(folder)
    is_new, issued = authority.open_or_create(), []
    for name, role in ((ENTRY, Role.ENTRY), *((name, Role.NODE) for name in nodes or ())):
        if renew or not KeyFiles.of(folder, name).certificate.exists():
            issued.append(str(authority.issue(name, role, days).certificate))
    issued += issue_for_members(folder, members, days, renew=renew)
    if as_json:
        write_json({"authority_is_new": is_new, "issued": issued, "days": days})
        return
    if is_new:
        write(f"{folder / AUTHORITY}.key: keep it here; its readers can join the fleet")
    for file in issued:
        write(f"{file}: valid for {days} days")
    for name in nodes or ():
        write(f"copy {name}.pem, {name}.key and {AUTHORITY}.pem to the machine of {name}")
    for name in members:
        files = f"ray/{name}.pem, ray/{name}.key, ray/{AUTHORITY}.pem and ray/token"
        write(f"copy {files} to the machine of {name}, too")


@fleet.command()
def node(
    name: NodeName,
    serve_arguments: ServeArguments = None,
    listen: ListenAt = "0.0.0.0:7878",
    certificates: Certificates = None,
    socket: SocketPath = None,
    descriptors: Descriptors = None,
    ray: RayAddress = "",
    state_dir: NodeStateDir = None,
) -> None:
    """Relay the protocol between entries and this machine's daemon, over mutual TLS.

    With --ray, a replica of Ray Serve supervises the daemon and the relay, and publishes the
    address. It runs until SIGTERM or Ctrl-C.
    """
    with optional_import(NEED, "fleet"):
        from .relay.relay import run_node
    from ...cli.client import socket_of

    if ray and descriptors:
        raise InvalidArgument(
            "--descriptors and --ray do not go together",
            hint="run the relay of the entry's own node without Ray",
        )
    if ray:
        import platformdirs

        check_ray()
        from .ray_cluster.node import run_ray_node

        ended_by = run_ray_node(
            name,
            ray=ray,
            listen=listen,
            certificates=certificates_folder(certificates),
            socket=str(socket_of(socket)),
            folder=state_dir or platformdirs.user_state_path("inferd") / "fleet-nodes" / name,
            serve=serve_arguments or (),
            note=note,
        )
        exit_after(ended_by)
        return
    if serve_arguments or state_dir:
        raise InvalidArgument(
            "arguments of the daemon need --ray",
            hint="without --ray, the daemon is started apart from its relay",
        )
    ended_by = run_node(
        name,
        listen=listen,
        folder=certificates_folder(certificates),
        path=str(socket_of(socket)),
        descriptors=str(descriptors or ""),
        on_ready=partial(note_ready, name),
        on_expiry=note,
    )
    exit_after(ended_by)


@fleet.command()
def serve(config: FleetFile, socket: SocketPath = None) -> None:
    """Serve clients of this machine from the nodes of the fleet.

    It runs until SIGTERM or Ctrl-C.
    """
    with optional_import(NEED, "fleet"):
        from .entry.server import run_entry
    from .config import read_config

    def note_entry(path: str) -> None:
        note(f"the fleet listens on {path}")

    settings = read_config(config, socket)
    if settings.settings.ray:
        check_ray()
    exit_after(run_entry(settings, on_ready=note_entry, note=note))


@fleet.command()
def remove(name: NodeName, ray: RayCluster, certificates: Certificates = None) -> None:
    """Remove a node from a Ray cluster; its relay and daemon end.

    End its `inferd fleet node` first, which would add it again.
    """
    check_ray()
    from .ray_cluster.node import remove_ray_node

    remove_ray_node(name, ray, certificates_folder(certificates))


@fleet.command()
def nodes(socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """List the nodes of the fleet that serves the socket."""
    with OneShotClient(socket) as client:
        found = client.stats().get("nodes")
    if found is None:
        raise InvalidArgument(
            "the socket belongs to a daemon, not to a fleet",
            hint="name the socket of `inferd fleet serve` with --socket",
        )
    entries = [{"name": name, **state} for name, state in found.items()]
    if as_json:
        write_json({"nodes": entries})
    else:
        table_of(NODES, entries)


@fleet.command()
def copy(
    model: ModelName,
    to: CopyTo,
    sha256: Sha256 = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Copy a model's file to a node that does not have it, from a node that does.

    Its projector for images and sounds is copied with it. The SHA-256 of both is checked before the
    node can load them.
    """
    from ...cli.client import client_of

    with client_of(socket) as client:
        result = client.copy_model(model, to, sha256=sha256)
    text = f"{model} is on {to} already"
    if not result.up_to_date:
        sizes = [f"{result.size_bytes} bytes, SHA-256 {result.sha256}"] if result.sha256 else []
        if result.projector_bytes:
            sizes.append(f"a projector of {result.projector_bytes} bytes")
        text = f"{model} is on {to}, from {result.source}: {', '.join(sizes)}"
    write_result(as_json, {"copied": model, "to": to, **msgspec.structs.asdict(result)}, text)


def check_ray() -> None:
    """Check that Ray is installed, without loading it.

    :raises UnsupportedOperation: Ray is not installed.
    """
    with optional_import("nodes in a Ray cluster use ray", "fleet"):
        if find_spec("ray") is None:
            raise ModuleNotFoundError("ray is not installed", name="ray")


def note_ready(name: str, address: str) -> None:
    """Print where a node's relay listens."""
    note(f"node {name} serves entries on {address}")
