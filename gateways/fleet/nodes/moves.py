"""Moves of sessions between nodes, and the end of interrupted moves.

A session belongs to its old node until that node has recorded the departure, and to the new node
from then on. docs/protocol.md describes the calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeAlias

import anyio

from ....backends.errors import BackendError, Busy, InferdError, NotFound
from ....ipc import messages as w
from ..frames import Fields, raw_of, values_of
from ..routing.choice import RETRY_S, RouteRequest
from ..routing.homes import FleetUser, NodeTable, SessionKey
from ..routing.loads import CLASSES
from .nodes import Nodes
from .upstream import NodeConnections

MOVE_S_MAX = 120.0
"""Time of one move, after which it is given up."""
END_S_MAX = 5.0
"""Time for the target of a failed move to drop what it has, which it does at the latest when the
connection ends.
"""
WAIT_S_MAX = 30.0
"""Time that a request waits for the move of its session."""
FIRST_S_MAX = 10.0
"""Time to end interrupted moves at the start of an entry."""
ARRIVING, DEPARTED, COPY = "arriving", "departed", "copy"
LISTED: Fields = {"all": raw_of(True), "dormant": raw_of(True)}
Listed: TypeAlias = Mapping[str, dict[str, Any]]
"""The result of `sessions` by node."""


class NodeRefused(Exception):
    """The target node has refused a session."""

    def __init__(self, error: InferdError):
        super().__init__(error.message)
        self.error = error


def key_of(session: Mapping[str, Any]) -> SessionKey:
    """Return the key of a session in a list of a node."""
    user = session["on_behalf_of"] or session["user"]
    return SessionKey(FleetUser(user, session["label"]), session["session_id"])


async def end_transfer(
    operator: NodeConnections, node: str, transfer: str, outcome: Literal["keep", "drop", "release"]
) -> None:
    """End a move or a copy on a node.

    :raises InferdError: the node refuses that, or is lost.
    """
    params = w.EndTransferParams(transfer=transfer, outcome=outcome)
    await operator.call(node, "end_transfer", params, w.Empty)


async def begin_export(operator: NodeConnections, node: str, session: Mapping[str, Any]) -> str:
    """Begin the export of a session that no node imports; return its transfer, to be ended.

    :raises InferdError: it is open on *node*, or the node was lost.
    """
    transfer = secrets.token_hex(16)
    params = w.ExportParams(
        session_id=session["session_id"],
        transfer=transfer,
        uid=session["uid"],
        label=session["label"],
    )
    await operator.call(node, "export_session", params, w.ExportResult)
    return transfer


def _without_copies(result: dict[str, Any]) -> dict[str, Any]:
    return {"sessions": [s for s in result["sessions"] if s["state"] != COPY]}


class Moves:
    """Lives on the entry's event loop. *operator* acts on the nodes as the relay's user."""

    def __init__(
        self,
        nodes: Nodes,
        homes: NodeTable[SessionKey],
        operator: NodeConnections,
        note: Callable[[str], object],
    ):
        self._nodes, self._homes, self._operator, self._note = nodes, homes, operator, note
        self._under_way: dict[SessionKey, anyio.Event] = {}
        self._interrupted: set[SessionKey] = set()
        """Sessions whose node is not known, until `_resolve` has found it out."""
        self._undropped: list[tuple[str, str]] = []
        """Targets that did not answer in the time of a move, and the transfers to drop there."""
        self._is_incomplete = False
        """Whether a move is left that `_resolve` may be able to end later."""
        self._wanted, self._resolved = anyio.Event(), anyio.Event()
        self.drains = anyio.Lock()
        """Held by the drain that moves sessions."""

    def note_found(self) -> None:
        """Note that a node was found: moves to it or from it may have been interrupted."""
        self._resolved = anyio.Event()
        self._wanted.set()

    async def wait_settled(self, key: SessionKey) -> None:
        """Wait until a session does not move.

        :raises Busy: after `WAIT_S_MAX` it still moves, or its node is not known.
        """
        with anyio.move_on_after(WAIT_S_MAX):
            await self._resolved.wait()
            while (event := self._under_way.get(key)) is not None:
                await event.wait()
            if key not in self._interrupted:
                return
        raise Busy(
            f"session {key.session_id!r} is being moved, or its node is not known yet",
            data={"cause": "node", "retry_after_s": RETRY_S},
        )

    def is_settled(self, key: SessionKey) -> bool:
        """Return whether the node of a session is known, and the session does not move."""
        is_known = self._resolved.is_set() and key not in self._interrupted
        return is_known and key not in self._under_way

    def is_moving(self, key: SessionKey) -> bool:
        return key in self._under_way

    @contextmanager
    def moving(self, key: SessionKey) -> Iterator[None]:
        """Make requests that open a session wait until the end of the block."""
        assert key not in self._under_way, "one move at a time"
        event = self._under_way[key] = anyio.Event()
        try:
            yield
        finally:
            del self._under_way[key]
            event.set()

    async def run(
        self,
        on_listed: Callable[[Listed], Awaitable[object]],
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Whenever a node is found, call *on_listed* with the sessions of all reachable nodes, and
        then end interrupted moves, until cancelled; started after the first attempt.
        """
        with anyio.move_on_after(FIRST_S_MAX):
            await self._resolve(on_listed)
        self._resolved.set()
        task_status.started()
        while True:
            is_incomplete = self._is_incomplete or bool(self._interrupted)
            with anyio.move_on_after(RETRY_S if is_incomplete else None):
                await self._wanted.wait()
            self._wanted, resolved = anyio.Event(), self._resolved
            await self._resolve(on_listed)
            resolved.set()
            while self._undropped:
                await self._drop(*self._undropped.pop())

    async def _drop(self, target: str, transfer: str) -> None:
        """Let the target of a failed move drop what has arrived."""
        with anyio.move_on_after(END_S_MAX), suppress(InferdError):
            await end_transfer(self._operator, target, transfer, "drop")

    @property
    def under_way(self) -> int:
        """The number of sessions that are moving now."""
        return len(self._under_way)

    @property
    def interrupted(self) -> int:
        return len(self._interrupted)

    # One move.

    async def move_session(
        self,
        source: str,
        session: Mapping[str, Any],
        target: str | None = None,
        copy_s_max: float = MOVE_S_MAX,
    ) -> str:
        """Move a dormant session to *target*, or to the best node that takes it; return the node.
        If it is not copied within *copy_s_max*, it stays.

        :raises InferdError: no node takes the session, which stays; or the move was interrupted.
        """
        counters = self._nodes.counters_of(source)
        try:
            others = set() if target is None else {*self._nodes.links} - {target}
            found = await self._move_session(source, session, {source} | others, copy_s_max)
        except InferdError:
            counters.session_move_failures += 1
            raise
        counters.sessions_moved += 1
        return found

    async def _move_session(
        self, source: str, session: Mapping[str, Any], excluded: set[str], copy_s_max: float
    ) -> str:
        key = key_of(session)
        refusal: InferdError | None = None
        priority = CLASSES.index(session["priority"])
        while True:
            route = RouteRequest(session["model"], priority, excluded=excluded)
            try:
                target = self._nodes.choose(route)
            except InferdError as exc:
                raise refusal or exc from None
            try:
                with anyio.CancelScope(shield=True), anyio.fail_after(MOVE_S_MAX):
                    await self._transfer(source, target, session, copy_s_max)
            except NodeRefused as exc:
                refusal = exc.error
                excluded.add(target)
            except TimeoutError:
                raise BackendError(f"the move to {target} has taken too long") from None
            else:
                self._homes.put(key, target)
                return target

    async def _transfer(
        self, source: str, target: str, session: Mapping[str, Any], copy_s_max: float
    ) -> None:
        """Move a session from one node to another.

        :raises NodeRefused: *target* refuses it.
        :raises InferdError: *source* does not export it, or a node was lost.
        """
        transfer, key = secrets.token_hex(16), key_of(session)
        try:
            with anyio.fail_after(copy_s_max):
                await self._copy(source, target, transfer, session)
        except BaseException as exc:  # the session stays, and a copy that has arrived is dropped
            has_answered = isinstance(exc, InferdError | NodeRefused)
            if not has_answered:  # the session's request does not wait for a target that hangs
                self._undropped.append((target, transfer))
            self._wanted.set()
            with anyio.CancelScope(shield=True):
                with suppress(InferdError):
                    await end_transfer(self._operator, source, transfer, "keep")
                if has_answered:
                    await self._drop(target, transfer)
            raise
        self._interrupted.add(key)
        self._homes.drop(key)  # else it would be opened anew on the node that it has left
        try:
            await end_transfer(self._operator, source, transfer, "release")
            await end_transfer(self._operator, target, transfer, "keep")
        except BaseException:
            self._wanted.set()
            raise
        self._interrupted.discard(key)
        try:
            await end_transfer(self._operator, source, transfer, "drop")
        except BaseException as exc:  # it has moved; `_resolve` drops the record of its departure
            self._wanted.set()
            if not isinstance(exc, InferdError):
                raise

    async def _copy(
        self, source: str, target: str, transfer: str, session: Mapping[str, Any]
    ) -> None:
        offset, size = 0, 1
        name, label = session["session_id"], session["label"]
        while offset < size:
            part = await self._operator.call(
                source,
                "export_session",
                w.ExportParams(
                    session_id=name,
                    transfer=transfer,
                    uid=session["uid"],
                    label=label,
                    peer=target,
                    offset=offset,
                ),
                w.ExportResult,
            )
            try:
                taken = await self._operator.call(
                    target,
                    "import_session",
                    w.ImportParams(
                        session_id=name,
                        transfer=transfer,
                        data=part.data,
                        size=part.size,
                        on_behalf_of=part.on_behalf_of,
                        label=label,
                        peer=source,
                        offset=offset,
                    ),
                    w.ImportResult,
                )
            except InferdError as exc:
                raise NodeRefused(exc) from None
            offset, size = offset + len(part.data), taken.size

    # Interrupted moves.

    async def list_sessions(self, node: str) -> list[dict[str, Any]]:
        """Return all sessions of a node.

        :raises InferdError: it cannot be reached.
        """
        raw = await self._operator.upstream(node).call("sessions", LISTED)
        return list(values_of(raw)["sessions"])

    async def _resolve(self, on_listed: Callable[[Listed], Awaitable[object]]) -> None:
        """End the moves that were interrupted, as far as their nodes can be reached."""
        try:
            nodes = self._nodes.reachable()
        except Busy:
            return
        listed, _ = await self._operator.gather("sessions", LISTED, nodes)
        await on_listed(listed)
        listed = {node: _without_copies(result) for node, result in listed.items()}
        moving = [
            (node, session)
            for node, result in listed.items()
            for session in result["sessions"]
            if session["transfer"] is not None
        ]
        keys = {key_of(session) for _, session in moving}
        if all(name in listed for name in self._nodes.links):
            self._interrupted &= keys
        still: set[SessionKey] = set()
        self._is_incomplete = False
        for node, session in sorted(moving, key=lambda pair: pair[1]["state"]):  # arriving first
            key = key_of(session)
            if key in self._under_way:  # by its own move, or by a copy
                self._is_incomplete = True
                continue
            with self.moving(key):
                try:
                    ended = await self._end_interrupted(node, session, listed)
                except NotFound:  # it has gone on since the nodes were asked
                    self._is_incomplete = True
                    continue
                except InferdError as exc:
                    self._note(f"session {key.session_id!r} still moves: {exc.message}")
                    ended = False
            if ended and key not in still:
                self._interrupted.discard(key)
            elif not ended:
                still.add(key)
                peer = session["transfer"]["peer"]
                if peer not in self._nodes.links or peer in nodes:  # else until it is found
                    self._is_incomplete = True
                if session["state"] == ARRIVING:
                    self._interrupted.add(key)

    async def _end_interrupted(self, node: str, session: dict[str, Any], listed: Listed) -> bool:
        """End the move of an arriving or departed session; return whether it has ended."""
        transfer, peer = session["transfer"]["id"], session["transfer"]["peer"]
        is_known = peer in self._nodes.links
        if is_known and peer not in listed:
            return False
        listed_there = listed[peer]["sessions"] if is_known else ()
        there = [s for s in listed_there if s["session_id"] and key_of(s) == key_of(session)]
        if session["state"] == DEPARTED:
            if any(s["state"] == ARRIVING for s in there):
                return False  # it may be kept just now: its own move then ends the departure
            await end_transfer(self._operator, node, transfer, "drop")
            return True
        released = any((s["transfer"] or {}).get("id") == transfer for s in there)
        if released or not is_known:
            await end_transfer(self._operator, node, transfer, "keep")
            self._homes.put(key_of(session), node)
            if released:
                await end_transfer(self._operator, peer, transfer, "drop")
            return True
        for other in there:
            if other["state"] == "dormant":  # a release that is still on its way must fail
                newer = await begin_export(self._operator, peer, other)
                await end_transfer(self._operator, peer, newer, "keep")
        await end_transfer(self._operator, node, transfer, "drop")
        return True
