"""Loads of models from descriptors, on the node that runs on the entry's machine.

The descriptor passes through a socket of that node's relay. The graph, its contexts and their
sessions stay on the node.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress

import anyio
import msgspec

from .....backends.errors import Busy
from .....wire.frames import pack_frame
from ...calls.descriptors import model_refused
from ...calls.frames import Fields
from ...link import HANDSHAKE_S_MAX, RECEIVED, TOKEN_BYTES, ContentKind
from ..clients.client import ClientRequest, FleetClient
from ..clients.contexts import FleetGraph
from ..clients.passed_descriptors import PassedDescriptors
from .leases import GraphHandle
from .opening import check_graphs, exchange


async def load_passed(
    passed: PassedDescriptors,
    descriptors: Sequence[int],
    client: FleetClient,
    request: ClientRequest,
    params: Fields,
) -> Fields:
    """Load a model from a claimed descriptor, and close the descriptor.

    :raises UnsupportedOperation: no node runs on the entry's machine.
    :raises InferdError: that node cannot load it.
    """
    try:
        own = client.fleet.nodes.own
        if own is None:
            raise model_refused()
        check_graphs(client)
        token = secrets.token_bytes(TOKEN_BYTES)
        upstream = client.upstream(own.name)
        await pass_file(own.descriptors, token, descriptors[0])
        async with upstream.contents_lock:
            upstream.check_connected()
        # No `await` until the request is sent, as the content belongs to the next request sent.
        upstream.send_frame(pack_frame([ContentKind.PASSED, token]))
        upstream, raw = await exchange(client, request, own.name, params, has_contents=True)
        graph = FleetGraph(request.call, params, "", own.name)
        graph.leases[own.name] = msgspec.msgpack.decode(raw, type=GraphHandle).graph
        client.graphs[client.contexts.client_handle(upstream, graph.leases[own.name])] = graph
        return client.mapped(upstream, raw, request.row.handles_in_result)
    finally:
        passed.close_claimed(descriptors)


async def pass_file(path: str, token: bytes, descriptor: int) -> None:
    """Pass a descriptor to the relay at *path*.

    :raises Busy: the relay cannot be reached there, or has too many files.
    """
    loop = asyncio.get_running_loop()
    answer = b""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
        suppress(OSError),
        anyio.move_on_after(HANDSHAKE_S_MAX),
    ):
        sock.setblocking(False)
        await loop.sock_connect(sock, path)
        socket.send_fds(sock, [token], [descriptor])
        answer = await loop.sock_recv(sock, 1)
    if answer != RECEIVED:
        raise Busy(
            f"the relay at {path} does not take the file of the model now",
            hint="check that `inferd fleet node` has --descriptors with this path, and runs",
            data={"cause": "node", "retry_after_s": 1.0},
        )
