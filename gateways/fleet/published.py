"""The nodes that a Ray cluster has published, and the messages of the child processes of Ray.

The entry's child writes a `Report` as a line of JSON, every `POLL_S` while Ray answers. The child
of a node reads a `NodeRequest` and writes `NodeReport`s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import msgspec

from ...backends.errors import InvalidArgument
from .addresses import NodeAddress, parse_node_address
from .certificates.folder import is_node_name, write_private

POLL_S = 2.0
"""Interval of the reports to the entry."""
CHECK_S = 5.0
"""Interval of the reports to a node's command."""
REPORT_BYTES_MAX = 1 << 20
NODES_MAX = 1000
APPLICATION_PREFIX = "inferd-"
"""A node's application in Ray Serve is this and the node's name."""
DEPLOYMENT = "node"
"""The one deployment of such an application."""


class PublishedNodes(msgspec.Struct, frozen=True):
    """The addresses of the nodes of a cluster, None where a node has not published one yet.

    `cluster` names the start of the cluster's head; it is empty while the head is lost.
    """

    cluster: str = ""
    nodes: dict[str, str | None] = {}


class KnownNode(msgspec.Struct, frozen=True):
    """A node in the entry's table: its last address, and the cluster that had it last."""

    address: str | None
    cluster: str


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the child: the nodes, or the error for which it ends."""

    published: PublishedNodes | None = None
    error: str = ""


class NodeRequest(msgspec.Struct, frozen=True):
    """A node to deploy: its name, its state directory, and the version of the plan there."""

    name: str
    folder: str
    digest: str


class NodeReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a node's child: the application is deployed, or the error for which it ends."""

    running: bool = False
    must_join: bool = False
    """Whether this machine is not a member of the cluster as this node."""
    error: str = ""


def node_resource(name: str) -> str:
    """Return the resource by which Ray places the replica of a node on its machine."""
    return f"inferd-node-{name}"


KnownNodes: TypeAlias = dict[str, KnownNode]
_NEW = KnownNode(None, "")


def merge_published(known: KnownNodes, found: PublishedNodes) -> KnownNodes:
    """Return the table after a report.

    A node is removed when it is missing in the cluster that had it last. A node stays while a
    restarted head does not know it, because the node has not joined that head yet.
    """
    missing_stay = {n: node for n, node in known.items() if _may_return(node, found.cluster)}
    return missing_stay | {
        name: _known_node(known.get(name, _NEW), address, found.cluster)
        for name, address in found.nodes.items()
    }


def _may_return(node: KnownNode, cluster: str) -> bool:
    return not cluster or node.cluster != cluster


def _known_node(before: KnownNode, address: str | None, cluster: str) -> KnownNode:
    return KnownNode(address or before.address, cluster or before.cluster)


def addresses_of(known: KnownNodes) -> dict[str, NodeAddress | None]:
    """Return the addresses by node.

    :raises InvalidArgument: a name or an address is not valid, or there are too many nodes.
    """
    if len(known) > NODES_MAX:
        raise InvalidArgument(f"Ray has more than {NODES_MAX} nodes of the fleet")
    for name in known:
        if not is_node_name(name):
            raise InvalidArgument(f"{name!r} is not the name of a node")
    return {
        name: parse_node_address(node.address) if node.address else None
        for name, node in known.items()
    }


class PublishedFile:
    """The last table, in a file of the entry's state directory."""

    def __init__(self, folder: Path):
        self._file = folder / "published.json"

    def read(self) -> KnownNodes:
        """Return the table; an empty one if there is no file.

        :raises InvalidArgument: the file cannot be read.
        """
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=KnownNodes)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as exc:
            raise InvalidArgument(
                f"the nodes in {self._file} cannot be read: {exc}",
                hint="move the file away: the nodes are read from Ray again",
            ) from None

    def write(self, known: KnownNodes) -> None:
        """Write the table atomically.

        :raises OSError: it cannot be written.
        """
        write_private(self._file, msgspec.json.encode(known))
