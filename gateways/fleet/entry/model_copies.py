"""Copies of models' files from one node to another, with their projectors.

A file passes through the entry part by part, and no part is read before the previous one was
written. After each part, the copy pauses for as long as the event loop has computed meanwhile, so
that at least half of the loop's time is left to tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import anyio
import msgspec

from ....backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    ModelNotFound,
)
from ....ipc import messages as w
from ..frames import Fields, decoded, raw_of, values_of
from ..nodes.upstream import Upstream
from ..routing.choice import node_unreachable
from .client import ClientRequest, FleetClient

PAUSE_S_MAX = 0.5
END_S_MAX = 5.0
"""Time for a node to end a failed transfer, which ends with the connection at the latest."""
REPORTED_S_MAX = 2.0
"""Time to wait for a report of the node that has the copied model."""


async def copy_model(client: FleetClient, request: ClientRequest, params: Fields) -> dict[str, Any]:
    """Copy a model's file and its projector to a node that does not have them, from one that does.

    :raises PermissionDenied: the client is not an operator.
    :raises NotFound: there is no such node.
    :raises ModelNotFound: no other node has the model.
    :raises InvalidArgument: the node has another file of this name.
    :raises InferdError: a node has failed; the target node keeps nothing of the file.
    """
    p, nodes = decoded(params, w.CopyModelParams), client.fleet.nodes
    client.check_operator("copy models between nodes", "manage")
    nodes.check_exists(p.to)
    name = nodes.model_name(p.name)
    async with client.fleet.model_copies.holding(f"{p.to}/{name}"):
        result = await _copy(client, name, p.to, p.sha256)
    return msgspec.structs.asdict(result)


async def _copy(client: FleetClient, name: str, to: str, sha256: str) -> w.CopyModelResult:
    files = await _files(client, name)
    if not client.fleet.nodes.is_reachable(to):
        raise node_unreachable(to)
    there = files.pop(to, None)
    source = max(files, key=lambda node: files[node].has_projector, default=None)
    if source is None:
        if there is None:
            raise _no_source(client, name)
        return w.CopyModelResult(source=to, size_bytes=there.size, up_to_date=True)
    if there is not None:
        return await _add_projector(client, name, (source, files[source]), (to, there))
    result = await _Copy(client, name, source, to).run(sha256)
    link = client.fleet.nodes.links.get(to)
    with anyio.move_on_after(REPORTED_S_MAX):  # new contexts go where reports have the model
        while link is not None and to not in client.fleet.nodes.with_model(name):
            await link.wait_report()
    return result


async def _add_projector(
    client: FleetClient, name: str, source: tuple[str, _File], target: tuple[str, _File]
) -> w.CopyModelResult:
    """Copy the projector of a model that both nodes have, if only the source has it.

    :raises InvalidArgument: the nodes have different files of the model.
    """
    (node, have), (to, there) = source, target
    if have.size != there.size:
        raise InvalidArgument(
            f"the node {to} has another file of the model {name!r}",
            hint=f"remove it there first: `inferd rm {name}`",
            data={"node": to},
        )
    if there.has_projector or not have.has_projector:
        return w.CopyModelResult(source=to, size_bytes=there.size, up_to_date=True)
    size = await _Copy(client, name, node, to).run_projector()
    return w.CopyModelResult(source=node, size_bytes=there.size, projector_bytes=size)


class _File(NamedTuple):
    size: int
    has_projector: bool


async def _files(client: FleetClient, name: str) -> dict[str, _File]:
    results, _ = await client.gather("models", {}, client.fleet.nodes.reachable())
    return {
        node: _File(model["size_bytes"], bool((model["projector"] or {}).get("file")))
        for node, result in results.items()
        for model in result["models"]
        if model["name"] == name and model["file"] and model["size_bytes"]
    }


def _no_source(client: FleetClient, name: str) -> InferdError:
    missing = client.fleet.nodes.unreachable()
    if missing:
        return Busy(
            f"no reachable node has a file of the model {name!r}",
            data={"cause": "node", "nodes": sorted(missing), "retry_after_s": 1.0},
        )
    return ModelNotFound(f"no node has a file of the model {name!r}")


class _CopiedFile(NamedTuple):
    """A file after its last part; a projector of 0 bytes does not exist."""

    size: int
    sha256: str
    is_published: bool


class _Copy:
    """One copy, over the client's connections to both nodes."""

    def __init__(self, client: FleetClient, name: str, source: str, to: str):
        self._name, self._source_name = name, source
        self._source, self._target = client.upstream(source), client.upstream(to)
        self._transfer = secrets.token_hex(16)

    async def run(self, sha256: str) -> w.CopyModelResult:
        """Copy the projector, if there is one, and the model's file; *sha256* is the hash that this
        must have, or an empty text.
        """
        async with self._ended_if_failed():
            projector = await self._copy_file(is_projector=True)
            model = await self._copy_file(sha256)
        return w.CopyModelResult(
            source=self._source_name,
            size_bytes=model.size,
            sha256=model.sha256,
            projector_bytes=projector.size,
        )

    async def run_projector(self) -> int:
        """Copy the projector to a node that has the model; return its size.

        :raises InvalidArgument: the model's file there has another place than copied ones.
        """
        async with self._ended_if_failed():
            copied = await self._copy_file(is_projector=True)
            if not copied.is_published and copied.size:
                raise InvalidArgument(
                    f"the model {self._name!r} of the node is not {self._name}.gguf in its models"
                    " directory",
                    hint="put the projector beside the model's file there",
                )
        return copied.size

    @asynccontextmanager
    async def _ended_if_failed(self) -> AsyncIterator[None]:
        """End the transfer on both nodes if the block fails."""
        try:
            yield
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._end(self._target)
                await self._end(self._source)
            raise

    async def _copy_file(self, sha256: str = "", *, is_projector: bool = False) -> _CopiedFile:
        offset, arrived = 0, False
        while True:
            computed_s = time.thread_time()
            own = {"name": raw_of(self._name), "transfer": raw_of(self._transfer)}
            own |= {"offset": raw_of(offset), "projector": raw_of(is_projector)}
            raw = await self._source.call("export_model", own)
            part = msgspec.msgpack.decode(raw, type=w.ExportModelResult)
            if not part.size:
                return _CopiedFile(0, "", is_published=False)
            fields = {"data": part.data, "size": part.size, "sha256": sha256 or part.sha256}
            more = {name: raw_of(value) for name, value in fields.items()}
            written = values_of(await self._target.call("import_model", own | more))
            offset, arrived = offset + len(part.data), bool(written.get("arrived"))
            if offset >= part.size:
                return _CopiedFile(part.size, part.sha256, arrived)
            await anyio.sleep(min(time.thread_time() - computed_s, PAUSE_S_MAX))

    async def _end(self, upstream: Upstream) -> None:
        """End the transfer on a node, which then keeps nothing of the file."""
        if upstream.lost is None:
            with anyio.move_on_after(END_S_MAX), suppress(InferdError):
                await upstream.call("end_model_transfer", {"transfer": raw_of(self._transfer)})
