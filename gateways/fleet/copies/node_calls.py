"""Calls about copies on the nodes, which the entry makes as the relay's user."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import anyio
import anyio.abc
import msgspec

from ....ipc import messages as w
from ....ipc.messages import PROTOCOL_VERSION, ClientHello, CopiedChange
from ..calls.frames import raw_of
from ..draining.moves import LISTED, Listed, NoClient
from ..entry.clients.client import EntryState, FleetClient
from ..entry.placing.homes import FleetUser, SessionKey
from ..entry.several_nodes.gathering import gather

PARTS_MAX = 4
"""Changes in several parts that are on their way at once."""
Outcome: TypeAlias = Literal["keep", "drop", "release"]


class NodeCalls:
    """Lives on the entry's event loop. Calls are made only after `begin`."""

    def __init__(self, fleet: EntryState):
        self._fleet = fleet
        self._client: FleetClient | None = None
        self._parts = anyio.CapacityLimiter(PARTS_MAX)

    def begin(self, group: anyio.abc.TaskGroup) -> None:
        """Make the client whose connections to the nodes are tasks of *group*."""
        hello = ClientHello(protocol=PROTOCOL_VERSION, software="inferd fleet")
        self._client = FleetClient(self._fleet, NoClient(), FleetUser("", ""), hello, group)

    @property
    def _begun(self) -> FleetClient:
        assert self._client is not None, "`begin` was called"
        return self._client

    async def list_sessions(self, nodes: list[str]) -> Listed:
        """Return the sessions of those of *nodes* that answer."""
        listed, _ = await gather(self._begun, "sessions", LISTED, nodes)
        return listed

    async def store(self, key: SessionKey, node: str, home: str, change: CopiedChange) -> None:
        """Store a change at a node.

        :raises InferdError: the node refuses the change, or is lost.
        """
        if len(change.data) <= w.PART_BYTES:
            await self._store_part(key, node, home, change, 0)
            return
        async with self._parts:
            for offset in range(0, len(change.data), w.PART_BYTES):
                await self._store_part(key, node, home, change, offset)

    async def _store_part(
        self, key: SessionKey, node: str, home: str, change: CopiedChange, offset: int
    ) -> None:
        params = w.StoreCopyParams(
            session_id=key.session_id,
            stream=change.stream,
            number=change.number,
            data=change.data[offset : offset + w.PART_BYTES],
            size=len(change.data),
            on_behalf_of=key.owner.user,
            label=key.owner.label,
            peer=home,
            offset=offset,
        )
        await self._call(node, "store_copy", params, w.Empty)

    async def read_whole(self, key: SessionKey, home: str) -> CopiedChange:
        """Read a whole session at its home, as a change.

        :raises InferdError: the home does not send it, or is lost.
        """
        params = w.ReadCopyParams(
            session_id=key.session_id, on_behalf_of=key.owner.user, label=key.owner.label
        )
        whole: w.ReadCopyResult = await self._call(home, "read_copy", params, w.ReadCopyResult)
        return CopiedChange(
            session_id=key.session_id,
            stream=whole.stream,
            number=whole.number,
            data=whole.data,
            whole=True,
            model=whole.model,
        )

    async def end_copy(self, node: str, stream: str, outcome: Outcome) -> None:
        """End a copy or a transfer on a node.

        :raises InferdError: the node refuses that, or is lost.
        """
        params = w.EndTransferParams(transfer=stream, outcome=outcome)
        await self._call(node, "end_transfer", params, w.Empty)

    async def remove_session(self, node: str, session: Mapping[str, Any]) -> None:
        """Remove a session that has continued on another node.

        :raises InferdError: it is open on *node*, or the node was lost.
        """
        transfer = secrets.token_hex(16)
        params = w.ExportParams(
            session_id=session["session_id"],
            transfer=transfer,
            uid=session["uid"],
            label=session["label"],
        )
        await self._call(node, "export_session", params, w.ExportResult)
        await self.end_copy(node, transfer, "release")
        await self.end_copy(node, transfer, "drop")

    async def _call(self, node: str, call: str, params: w.Map, result: type[Any]) -> Any:
        fields = {n: raw_of(value) for n, value in msgspec.structs.asdict(params).items()}
        raw = await self._begun.upstream(node).call(call, fields)
        return msgspec.msgpack.decode(raw, type=result)
