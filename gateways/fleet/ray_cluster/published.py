"""The nodes that a Ray cluster has published, and the child processes that use Ray.

The entry's child writes a `Report` as a line of JSON, every `POLL_S` while Ray answers. The child
of a node reads a `NodeRequest` and writes `NodeReport`s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from ....backends.errors import InferdError, InvalidArgument
from ..certificates import is_node_name, write_private
from ..link import NodeAddress, parse_node_address

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


RETRY_S_MIN = 1.0
T = TypeVar("T")


class ChildFailed(Exception):
    """A child process does not report."""


class ReportingChild(Generic[T]):
    """The Python *module* as a child with one argument; each line of its output is a *report*. The
    child reads *request*, and has the variables *environment* beside those of this process.

    A child is replaced when it has ended, or has not reported within *first_s_max* after its start
    or *silent_s_max* after a report.
    """

    def __init__(
        self,
        module: str,
        argument: str,
        report: type[T],
        request: bytes = b"",
        *,
        first_s_max: float,
        silent_s_max: float,
        retry_s_max: float,
        environment: Mapping[str, str] | None = None,
    ):
        self._environment = environment or {}
        self._command = [sys.executable, "-P", "-m", module, argument]
        self._request = request
        self._decoder = msgspec.json.Decoder(report)
        self._first_s_max, self._silent_s_max = first_s_max, silent_s_max
        self._retry_s_max = retry_s_max

    async def follow(
        self, accept: Callable[[T], Awaitable[bool]], fail: Callable[[str], object]
    ) -> None:
        """Pass each report to *accept* until cancelled; if *accept* returns false, replace the
        child. Pass the cause of a child's failure to *fail*.
        """
        retry_s = RETRY_S_MIN
        while True:
            try:
                async with aclosing(self._reports()) as reports:
                    async for report in reports:
                        if not await accept(report):
                            break
                        retry_s = RETRY_S_MIN
            except InferdError as exc:
                fail(exc.message)
            except anyio.BrokenResourceError:
                fail("its child process has ended")
            except (ChildFailed, OSError, msgspec.DecodeError) as exc:
                fail(str(exc))
            await anyio.sleep(retry_s)
            retry_s = min(2 * retry_s, self._retry_s_max)

    async def _reports(self) -> AsyncGenerator[T]:
        """Start a child, and yield its reports until it ends.

        :raises ChildFailed: it has ended or is silent.
        """
        process = await anyio.open_process(
            self._command,
            env=os.environ | self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            if self._request:
                await process.stdin.send(self._request)
            lines, wait_s = BufferedByteReceiveStream(process.stdout), self._first_s_max
            while True:
                yield self._decoder.decode(await _received_line(lines, wait_s))
                wait_s = self._silent_s_max
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):
                    process.kill()
                await process.aclose()


async def _received_line(lines: BufferedByteReceiveStream, wait_s: float) -> bytes:
    try:
        with anyio.fail_after(wait_s):
            return await lines.receive_until(b"\n", REPORT_BYTES_MAX)
    except TimeoutError:
        raise ChildFailed(f"no report within {wait_s:g} s") from None
    except (anyio.IncompleteRead, anyio.EndOfStream):
        raise ChildFailed("its child process has ended") from None
    except anyio.DelimiterNotFound:
        raise ChildFailed("its report is too long") from None
