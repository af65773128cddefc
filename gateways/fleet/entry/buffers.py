"""Computations with tensors in buffers, which clients share with the entry.

A client's buffer is memory of the entry's machine. For each request, the parts that its inputs name
are copied to a buffer of the context's node, and outputs from there to their places. So a tensor of
any size passes in parts, of which the entry has one of each client in its own memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Any, NamedTuple, TypeAlias

import anyio
import msgspec

from ....backends.errors import InvalidArgument, ProtocolError, Timeout
from ....backends.shared_memory import ALIGNMENT
from ....ipc import messages as w
from ....ipc.server.buffers import Buffer
from ..frames import (
    Fields,
    decoded,
    fields_of,
    integer_in,
    is_given,
    number_in,
    raw_of,
)
from ..link import PART_BYTES
from ..nodes.upstream import Upstream
from .client import ClientRequest, FleetClient
from .opening import reopen_context
from .passed_descriptors import PassedDescriptors

Place: TypeAlias = tuple[str, int, int, int]
"""An output's name, and the handle of a buffer, the offset and the bytes for it there."""
_tensors = msgspec.msgpack.Decoder(list[tuple[str, Fields]])
_places = msgspec.msgpack.Decoder(list[Place])


class Part(NamedTuple):
    """Bytes of a client's buffer, and their offset in the node's."""

    buffer: Buffer
    offset: int
    length: int
    at: int


class Transfer:
    """The parts of buffers that a request names, one after the other in a buffer of the node."""

    def __init__(self) -> None:
        self.inputs: list[Part] = []
        self.outputs: dict[str, Part] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """The bytes of the node's buffer, of which there is at least one."""
        return max(1, self._size)

    def add_part(self, buffer: Buffer, offset: int, length: int) -> Part:
        """Return a part, with its place behind the others.

        :raises InvalidArgument: it is not within the buffer, or begins where no tensor may.
        """
        buffer.check_part(offset, length)
        part = Part(buffer, offset, length, self._size)
        self._size += -(-length // ALIGNMENT) * ALIGNMENT
        return part


async def call_on_buffers(
    passed: PassedDescriptors,
    descriptors: Sequence[int],
    client: FleetClient,
    request: ClientRequest,
    params: Fields,
) -> Mapping[str, Any]:
    """Register, write, read or free buffers of a client.

    :raises NotFound: the client has no such buffer.
    :raises QuotaExceeded: the user has too many, or too large ones.
    """
    found = decoded(params, request.row.params)
    if isinstance(found, w.RegisterBufferParams):
        return await _register(passed, descriptors, client, found)
    buffers, connection = client.fleet.buffers, client.connection
    if isinstance(found, w.WriteBufferParams):
        buffer = buffers.get_buffer(connection, found.buffer)
        buffer.check_range(found.offset, len(found.data))
        await buffer.write(found.offset, found.data)
        return {}
    if isinstance(found, w.ReadBufferParams):
        buffer = buffers.get_buffer(connection, found.buffer)
        buffer.check_read(found.offset, found.size)
        return {"data": await buffer.read(found.offset, found.size)}
    assert isinstance(found, w.FreeBuffersParams), "the table has no other call of this route"
    buffers.free_buffers(connection, found.buffers)
    return {}


async def _register(
    passed: PassedDescriptors,
    descriptors: Sequence[int],
    client: FleetClient,
    params: w.RegisterBufferParams,
) -> Mapping[str, Any]:
    buffers, user = client.fleet.buffers, client.owner.user
    if not descriptors:
        buffer = await buffers.register_new(client.connection, user, params.size)
    else:
        try:
            client.connection.user.check_call()
            buffer = await buffers.register_passed(client.connection, user, descriptors[0])
        except BaseException:
            passed.close_claimed(descriptors)
            raise
    return {"buffer": buffer.handle, "size": buffer.size}


async def compute_in_buffers(
    passed: PassedDescriptors,
    descriptors: Sequence[int],
    client: FleetClient,
    request: ClientRequest,
    params: Fields,
) -> Mapping[str, Any]:
    """Compute a request with parts of buffers on the node of its context. It waits for the copies
    of these parts, which `timeout_s` bounds as well.

    :raises NotFound: the client has no such buffer.
    :raises WorkerCrashed: the node was lost.
    :raises Timeout: it takes too long.
    """
    try:
        timeout_s = number_in(params, "timeout_s")
        with anyio.move_on_after(timeout_s if timeout_s > 0 else inf):
            return await _compute(passed, descriptors, client, request, params)
        raise Timeout(
            f"the tensors were not computed and copied within {timeout_s:g} s",
            hint="allow more time: they pass through the entry to a node and back",
            data={"timeout": "total"},
        )
    finally:
        passed.close_claimed(descriptors)


async def _compute(
    passed: PassedDescriptors,
    descriptors: Sequence[int],
    client: FleetClient,
    request: ClientRequest,
    params: Fields,
) -> Mapping[str, Any]:
    handle = integer_in(params, "context")
    await reopen_context(client, handle)
    request.context = handle  # its session does not move meanwhile
    client.contexts.note_used(params)
    incarnation, _ = client.contexts.incarnation_of(params)
    upstream = client.upstream(incarnation.node)
    transfer = _parts_of(client, params)
    async with client.transfers, _buffer_on(upstream, transfer.size) as own:
        for part in transfer.inputs:
            await _copy_to_node(client, part, upstream, own)
        fields = _on_node(client, params, transfer, own)
        async with upstream.contents_lock:
            if descriptors:
                await passed.send_contents(descriptors, upstream)
            upstream.check_connected()
            # No `await` until the request is sent, as the contents belong to it.
            _, answer = client.begin_exchange(
                request, incarnation.node, fields, has_contents=bool(descriptors)
            )
        client.note_turn(request, params)
        try:
            raw = await client.end_exchange(request, answer)
        finally:
            client.note_withdrawn(request)
        return await _with_outputs(client, fields_of(raw), transfer, upstream, own)


def _parts_of(client: FleetClient, params: Fields) -> Transfer:
    """Return the parts of buffers that a request names.

    :raises InvalidArgument: a part is not within its buffer, or an output has two places.
    :raises NotFound: the client has no such buffer.
    """
    transfer, get = Transfer(), client.fleet.buffers.get_buffer
    for _, tensor in _inputs_in(params):
        if is_in_buffer(tensor):
            buffer = get(client.connection, integer_in(tensor, "buffer"))
            offset, length = (int(number_in(tensor, name)) for name in ("offset", "length"))
            transfer.inputs.append(transfer.add_part(buffer, offset, length))
    for name, handle, offset, length in _places_in(params):
        if name in transfer.outputs:
            raise InvalidArgument(
                f"the output {name[:100]!r} has two places", hint="name each output once"
            )
        buffer = get(client.connection, handle)
        transfer.outputs[name] = transfer.add_part(buffer, offset, length)
    return transfer


def _inputs_in(params: Fields) -> list[tuple[str, Fields]]:
    return _tensors.decode(params["inputs"]) if is_given(params, "inputs") else []


def _places_in(params: Fields) -> list[Place]:
    return _places.decode(params["outputs"]) if is_given(params, "outputs") else []


def is_in_buffer(tensor: Fields) -> bool:
    """Return whether the bytes of a tensor are in a buffer."""
    return number_in(tensor, "buffer") != 0


def _on_node(client: FleetClient, params: Fields, transfer: Transfer, own: int) -> Fields:
    """Return params with the node's handles, and the parts of its buffer *own*."""
    parts, inputs = iter(transfer.inputs), _inputs_in(params)
    for number, (name, tensor) in enumerate(inputs):
        if is_in_buffer(tensor):
            place = {"buffer": raw_of(own), "offset": raw_of(next(parts).at)}
            inputs[number] = name, {**tensor, **place}
    outputs = [(name, own, part.at, part.length) for name, part in transfer.outputs.items()]
    handle = client.contexts.daemon_handle(integer_in(params, "context"))
    fields = {**params, "context": raw_of(handle), "outputs": raw_of(outputs)}
    return fields | ({"inputs": raw_of(inputs)} if is_given(params, "inputs") else {})


@asynccontextmanager
async def _buffer_on(upstream: Upstream, size: int) -> AsyncIterator[int]:
    """Yield the handle of a new buffer of a node, which is freed at the end."""
    # A request that is cancelled meanwhile could leave it there.
    with anyio.CancelScope(shield=True):
        raw = await upstream.call("register_buffer", {"size": raw_of(size)})
    own = integer_in(fields_of(raw), "buffer")
    try:
        yield own
    finally:
        upstream.post("free_buffers", {"buffers": raw_of([own])})


async def _copy_to_node(client: FleetClient, part: Part, upstream: Upstream, own: int) -> None:
    for done in range(0, part.length, PART_BYTES):
        async with client.part_lock:
            size = min(PART_BYTES, part.length - done)
            data = await part.buffer.read(part.offset + done, size)
            fields = {"buffer": own, "offset": part.at + done, "data": data}
            await upstream.call("write_buffer", {key: raw_of(one) for key, one in fields.items()})


async def _copy_from_node(client: FleetClient, part: Part, upstream: Upstream, own: int) -> None:
    for done in range(0, part.length, PART_BYTES):
        async with client.part_lock:
            size = min(PART_BYTES, part.length - done)
            fields = {"buffer": own, "offset": part.at + done, "size": size}
            raw = await upstream.call(
                "read_buffer", {key: raw_of(one) for key, one in fields.items()}
            )
            data = msgspec.msgpack.decode(raw, type=w.ReadBufferResult).data
            if len(data) != size:
                raise ProtocolError(f"the node {upstream.node} sent {len(data)} bytes of {size}")
            await part.buffer.write(part.offset + done, data)


async def _with_outputs(
    client: FleetClient, result: Fields, transfer: Transfer, upstream: Upstream, own: int
) -> Mapping[str, Any]:
    """Copy the outputs to their places, and return the result with these."""
    outputs = _tensors.decode(result["outputs"]) if "outputs" in result else []
    found = list[tuple[str, Fields]]()
    for name, tensor in outputs:
        part = transfer.outputs.get(name)
        if part is not None and is_in_buffer(tensor):
            length = int(number_in(tensor, "length"))
            if length > part.length:
                raise ProtocolError(f"the node {upstream.node} has written past an output's place")
            await _copy_from_node(client, part._replace(length=length), upstream, own)
            place = {"buffer": part.buffer.handle, "offset": part.offset}
            tensor = {**tensor, **{key: raw_of(one) for key, one in place.items()}}
        found.append((name, tensor))
    return {**result, "outputs": found}
