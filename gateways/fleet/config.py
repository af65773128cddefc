"""The configuration of an entry, a TOML file, and the users as whom its clients act on nodes."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import platformdirs

from ...backends.errors import InvalidArgument, PermissionDenied
from ...backends.params import fit_settings
from ...ipc.metrics_address import LOOPBACK, Address, parse_address
from ...ipc.names import OWN_USER, check_user_name
from ...ipc.paths import daemon_socket_path
from .link import NodeAddress, parse_node_address
from .ray_cluster.published import NODES_MAX

FILE_BYTES_MAX = 1 << 20
METRICS_PORT = 4634
"""Next to the daemon's."""


class NodeSettings(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    """A table `[nodes.NAME]`."""

    address: str
    descriptors: str = ""
    """The Unix socket of a relay on the entry's machine that takes models in descriptors."""


_FORM = "it is TOML, with a table [nodes.NAME] and its `address` for each node, or `ray`"


class EntrySettings(msgspec.Struct, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """The file, as it is written. Relative paths begin at its folder."""

    nodes: dict[str, NodeSettings] = {}
    ray: str = ""
    """The address of a Ray cluster that publishes further nodes; by default there is none."""
    certificates: str = ""
    """The folder of certificates; by default `fleet` beside the user's configuration."""
    certificate: str = "entry"
    """The name of the entry's own certificate."""
    socket: str = ""
    """The socket for clients; by default the daemon's."""
    socket_mode: str = "0600"
    state_dir: str = ""
    users: Literal["names", "accounts"] = "names"
    """Whether nodes know users as the fleet's own, by name, or as users of their systems."""
    operators: list[str] = []
    """Users of this machine who act as the relay's user on each node: they manage the fleet."""
    delegates: list[str] = []
    """Users of this machine who may act on behalf of others: gateways."""
    copies: Literal["off", "async", "sync"] = "sync"
    """Whether sessions with an id have a copy on a second node, and whether answers wait for it."""
    follower_after: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 10.0
    """Seconds after the loss of a node until its sessions continue from their copies."""
    connections_max: Annotated[int, msgspec.Meta(ge=8, le=100_000)] = 256
    buffers_user_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 64
    """Buffers of a user that the entry holds."""
    buffer_bytes_user_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1 << 30
    buffer_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 4 << 30
    """The same for all users together."""
    metrics: str | int = f"{LOOPBACK}:{METRICS_PORT}"
    """The address of the metrics listener: a port, HOST:PORT, the path of a Unix socket, or off."""
    metrics_network: Literal["loopback", "any"] = "loopback"
    """The programs that may be allowed to read them: those of this machine, or any."""


class OwnNode(msgspec.Struct, frozen=True):
    """The node on the entry's machine, and the socket at which its relay takes descriptors."""

    name: str
    descriptors: str


class EntryConfig(msgspec.Struct, frozen=True):
    """The configuration with all defaults, and with absolute paths."""

    settings: EntrySettings
    addresses: dict[str, NodeAddress]
    certificates: Path
    socket: Path
    socket_mode: int
    state_dir: Path
    metrics: Address
    own_node: OwnNode | None = None


def read_config(file: Path, socket: Path | None = None) -> EntryConfig:
    """Return the configuration in *file*; *socket* replaces its socket.

    :raises InvalidArgument: the file cannot be read, or has an unknown key or an invalid value.
    """
    settings = _read_settings(file)

    def path_of(text: str, default: Path) -> Path:
        return (file.parent / text).absolute() if text else default

    return EntryConfig(
        settings,
        {name: _address(file, name, node) for name, node in settings.nodes.items()},
        path_of(settings.certificates, platformdirs.user_config_path("inferd") / "fleet"),
        socket or path_of(settings.socket, daemon_socket_path()),
        _mode(file, settings.socket_mode),
        path_of(settings.state_dir, platformdirs.user_state_path("inferd") / "fleet"),
        _metrics_address(file, settings),
        _own_node(file, settings),
    )


def _read_settings(file: Path) -> EntrySettings:
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise InvalidArgument(f"{file} has more than {FILE_BYTES_MAX} bytes")
        content = fit_settings(msgspec.toml.decode(text), EntrySettings)
        settings = msgspec.convert(content, EntrySettings)
    except OSError as exc:
        raise InvalidArgument(f"cannot read {file}: {exc.strerror or exc}", hint=_FORM) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidArgument(f"{file}: {exc}", hint=_FORM) from None
    if len(settings.nodes) > NODES_MAX or not (settings.nodes or settings.ray):
        raise InvalidArgument(
            f"{file} has {len(settings.nodes)} nodes",
            hint=f"name 1 to {NODES_MAX}, as [nodes.NAME], or the Ray cluster that has them (ray)",
        )
    return settings


def _address(file: Path, name: str, node: NodeSettings) -> NodeAddress:
    try:
        return parse_node_address(node.address)
    except InvalidArgument as exc:
        raise InvalidArgument(f"{file}: nodes.{name}: {exc.message}", hint=exc.hint) from None


def _own_node(file: Path, settings: EntrySettings) -> OwnNode | None:
    found = {name: node.descriptors for name, node in settings.nodes.items() if node.descriptors}
    if len(found) > 1:
        raise InvalidArgument(
            f"{file}: {' and '.join(found)} have `descriptors`",
            hint="only the node on the entry's machine has it",
        )
    for name, path in found.items():
        return OwnNode(name, str((file.parent / path).absolute()))
    return None


def _metrics_address(file: Path, settings: EntrySettings) -> Address:
    try:
        address = parse_address(settings.metrics)
    except ValueError as exc:
        raise InvalidArgument(f"{file}: metrics: {exc}") from None
    if address.is_remote and settings.metrics_network != "any":
        raise InvalidArgument(
            f"{file}: metrics: {address} is not this machine's loopback: other machines could read"
            " the metrics",
            hint='name 127.0.0.1, or allow it by metrics-network = "any"',
        )
    return address


def _mode(file: Path, text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise InvalidArgument(
            f"{file}: socket-mode {text!r} is not octal", hint="give one such as 0660"
        )
    return mode


@dataclass(frozen=True, slots=True)
class UserRules:
    """The entry's rules of users, by their names on this machine."""

    users: Literal["names", "accounts"] = "names"
    operators: Collection[str] = ()
    delegates: Collection[str] = ()


def name_of(uid: int) -> str:
    """Return the name of a user of this machine, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def is_operator(uid: int, name: str, rules: UserRules) -> bool:
    """Return whether a user manages the fleet: root, the entry's own user, or a named operator."""
    return uid in (0, os.getuid()) or name in rules.operators


def user_on_nodes(uid: int, name: str, on_behalf_of: str, rules: UserRules) -> str:
    """Return the `on_behalf_of` with which the entry connects to nodes for a client. It is empty
    for operators: they act as the relay's user.

    :raises PermissionDenied: the user may not act on behalf of others.
    :raises InvalidArgument: the name is too long.
    """
    operator = is_operator(uid, name, rules)
    if on_behalf_of:
        if not (operator or name in rules.delegates):
            raise PermissionDenied(
                f"user {name} may not act on behalf of others",
                hint="the fleet's operator can name the user in `delegates`",
                data={"right": "delegate"},
            )
        found = _delegated_user(name, on_behalf_of, rules)
    elif operator:
        found = ""
    else:
        found = name if rules.users == "accounts" else OWN_USER + name
    check_user_name(found)
    return found


def _delegated_user(gateway: str, on_behalf_of: str, rules: UserRules) -> str:
    """Return the user for whom a gateway acts. A gateway's own user never has the name of another
    gateway's own user, or of a user of this machine.
    """
    if on_behalf_of.startswith(OWN_USER):
        return f"{OWN_USER}{gateway}:{on_behalf_of.removeprefix(OWN_USER)}"
    if rules.users == "accounts":
        return on_behalf_of
    return OWN_USER + (name_of(int(on_behalf_of)) if on_behalf_of.isdecimal() else on_behalf_of)
