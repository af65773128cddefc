"""The nodes of an entry: the report connection of each, and the choice among all."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec

from ....backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    NotFound,
    ProtocolError,
    error_from_wire,
)
from ....backends.recent_dict import RecentDict
from ....ipc.messages import (
    CREDIT_DEFAULT,
    CREDIT_MAX,
    PROTOCOL_VERSION,
    REQUESTS_MAX,
    TENSOR_BYTES_MAX,
    Limits,
    ServerHello,
)
from ....ipc.model_names import find_name
from ....wire.frames import FRAME_BYTES_MAX, NESTING_MAX, READ_BYTES, REPLY_BYTES_MAX, FrameReader
from ..certificates import (
    DATA,
    REPORTS,
    entry_context,
    failure_reason,
    refusal_reason,
    server_name,
    write_private,
)
from ..config import EntryConfig
from ..link import HANDSHAKE_S_MAX, LOST_S, NodeAddress, ReportKind, set_options
from ..routing.choice import (
    RETRY_HINT,
    RETRY_S,
    FleetLoad,
    RouteRequest,
    choose_node,
    model_names,
    node_to_warm_up,
    starts_at_once,
)
from ..routing.loads import NONE, ByClass, NodeLoad, OwnTurns, TurnKind

RECONNECT_S = 1.0
_message = msgspec.msgpack.Decoder(list[msgspec.Raw])
_kind = msgspec.msgpack.Decoder(int)
_load = msgspec.msgpack.Decoder(NodeLoad)
_hello = msgspec.msgpack.Decoder(ServerHello)
_map = msgspec.msgpack.Decoder(dict[str, Any])


class NodeCounters:
    """Events of a node since it became one of the fleet. Owned by the entry's event loop."""

    def __init__(self) -> None:
        self.losses = 0
        self.contexts_opened = 0
        self.contexts_refused = 0
        self.contexts_lost = 0
        self.sessions_moved = 0
        self.session_move_failures = 0


class NodeLink:
    """The state of a node. Lives on the entry's event loop; its task runs `run`.

    *on_change* is called when the node or a new start of its daemon is found, and when the node is
    lost or the first attempt to reach it fails. `load` is None while it cannot be reached, and
    `cause` is the reason. `address` is None until the node publishes one.
    """

    def __init__(
        self,
        name: str,
        address: NodeAddress | None,
        context: ssl.SSLContext,
        own_certificate: tuple[Path, str],
        on_change: Callable[[NodeLink], object],
    ):
        self.name, self.address = name, address
        self.load: NodeLoad | None = None
        self.hello: ServerHello | None = None
        self.cause = "it has not answered yet"
        self.lost_at = time.monotonic()
        """The time since which it cannot be reached."""
        self._attempt: anyio.CancelScope | None = None
        self._context, self._own_certificate = context, own_certificate
        self._on_change = on_change
        self.turns = OwnTurns()
        self._reported = anyio.Event()
        """Set at the next report."""
        self.swapped = Counter[str]()
        """The swaps under way by model, during which new contexts go to other nodes."""
        self.counters = NodeCounters()
        self.reported_at: float | None = None
        """The time of its last report."""
        self.settled = anyio.Event()
        """Set once the node was found, or could not be reached."""

    async def run(self) -> None:
        """Listen to the node's reports, and connect again after a loss, until cancelled."""
        while True:
            with anyio.CancelScope() as self._attempt:
                if self.address is None:
                    self._lose("its address is not published yet")
                    await anyio.sleep_forever()
                else:
                    await self._try(self.address)
                    await anyio.sleep(RECONNECT_S)

    def move(self, address: NodeAddress) -> None:
        if address != self.address:
            self.address = address
            if self.load is not None:
                self._lose(f"it has moved to {address}")
            if self._attempt is not None:
                self._attempt.cancel()

    async def _try(self, address: NodeAddress) -> None:
        try:
            await self._listen(address)
        except InferdError as exc:
            self._lose(exc.message)
        except OSError as exc:
            self._lose(failure_reason(exc, self.name))

    async def _listen(self, address: NodeAddress) -> None:
        with anyio.move_on_after(HANDSHAKE_S_MAX) as scope:
            reader, writer = await asyncio.open_connection(
                address.host,
                address.port,
                ssl=self._context,
                server_hostname=server_name(self.name),
            )
        if scope.cancelled_caught:
            self._lose(f"it has not answered within {HANDSHAKE_S_MAX:g} s")
            return
        try:
            set_options(writer.get_extra_info("socket"))
            await self._read_reports(reader)
        finally:
            writer.transport.abort()

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        frames, received = FrameReader(REPLY_BYTES_MAX), False
        while True:
            with anyio.move_on_after(LOST_S) as scope:
                data = await reader.read(READ_BYTES)
            if scope.cancelled_caught:
                self._lose(f"its relay was silent for {LOST_S:g} s")
                return
            if not data:
                self._lose("its relay has closed the connection" if received else self._refusal())
                return
            for frame in frames.read_frames(data):
                received = True
                self._handle(frame)

    def _refusal(self) -> str:
        return refusal_reason(*self._own_certificate)

    def _handle(self, frame: bytes) -> None:
        try:
            items = _message.decode(frame)
            kind = _kind.decode(items[0])
            if kind == ReportKind.LOAD:
                self._accept_load(_load.decode(items[1]))
            elif kind == ReportKind.HELLO:
                self.hello = _hello.decode(items[1])
            elif kind == ReportKind.DAEMON_LOST:
                self._lose(error_from_wire(_map.decode(items[1])).message)
        except (msgspec.DecodeError, IndexError) as exc:
            raise ProtocolError(f"a report cannot be read: {exc}") from None

    async def wait_report(self) -> None:
        await self._reported.wait()

    def _accept_load(self, load: NodeLoad) -> None:
        is_new = self.load is None or self.load.instance != load.instance
        self.load, self.cause = load, ""
        self.reported_at = time.monotonic()
        self.turns.note_report(load, self.reported_at)
        self._reported.set()
        self._reported = anyio.Event()
        if is_new:
            self.settled.set()
            self._on_change(self)

    def _lose(self, cause: str) -> None:
        is_news = self.load is not None or not self.settled.is_set()
        if self.load is not None:
            self.lost_at = time.monotonic()
        self.counters.losses += self.load is not None
        self.load, self.cause = None, cause
        self.settled.set()
        if is_news:
            self._on_change(self)


OWN_REQUESTS = 16
"""Requests on a connection to a node that are kept for the entry's own, beside the client's."""
OWN_BYTES = 64
"""Bytes by which a request may grow in the entry: by a longer id, and longer handles."""
CHECK_S, CHECKS_MAX = 0.1, 1000
PRELOAD_PREFIX = "preload:"


class DrainedNodes:
    """The nodes that get no new contexts. Owned by the entry's event loop."""

    def __init__(self, folder: Path):
        self._file = folder / "drained.json"
        self._names: set[str] = set()

    def __contains__(self, node: str) -> bool:
        return node in self._names

    def open(self) -> None:
        """Read the file.

        :raises InvalidArgument: it cannot be read.
        """
        try:
            if self._file.exists():
                self._names = msgspec.json.decode(self._file.read_bytes(), type=set[str])
        except (OSError, msgspec.DecodeError) as exc:
            raise InvalidArgument(
                f"the drained nodes in {self._file} cannot be read: {exc}",
                hint="delete the file if it is damaged, and drain the nodes again",
            ) from None

    def set_drained(self, node: str, *, is_drained: bool) -> None:
        """Drain a node, or use it again; the change is in the file before this returns.

        :raises OSError: it cannot be written.
        """
        names = self._names | {node} if is_drained else self._names - {node}
        write_private(self._file, msgspec.json.encode(sorted(names)))
        self._names = names


class Nodes:
    """The nodes of the configuration, and those that are published. Owned by the entry's event
    loop.

    *on_found* is called with each node that is found, and *on_lost* with each that is lost or could
    not be reached at first.
    """

    def __init__(
        self,
        config: EntryConfig,
        on_found: Callable[[NodeLink], object],
        on_lost: Callable[[NodeLink], object],
    ):
        folder, name = config.certificates, config.settings.certificate
        context = entry_context(folder, name, REPORTS)
        self.data_context: ssl.SSLContext = entry_context(folder, name, DATA)
        """The context of connections for clients."""
        self._on_found, self._on_lost = on_found, on_lost
        self._context, self._own_certificate = context, (folder, name)
        self._configured, self.own = config.addresses, config.own_node
        self.drained = DrainedNodes(config.state_dir)
        self._group: anyio.abc.TaskGroup | None = None
        """The tasks of the links, while they run."""
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._starts_at_once = RecentDict[tuple[str, int], tuple[float, bool]](CHECKS_MAX)
        """By model and class, when it was checked whether a turn starts at once, and the result."""
        self.links: dict[str, NodeLink] = {}
        for node, address in config.addresses.items():
            self._add(node, address)

    def publish(self, addresses: Mapping[str, NodeAddress | None]) -> None:
        """Take the published nodes beside those of the configuration, which keep their addresses.

        A published node that is missing in *addresses* stays as long as it can be reached.
        """
        for node, address in addresses.items():
            if node in self._configured:
                continue
            if node not in self.links:
                self._add(node, address)
            elif address is not None:
                self.links[node].move(address)
        for node, link in tuple(self.links.items()):
            if node not in self._configured and node not in addresses and link.load is None:
                self._remove(node)

    def _add(self, node: str, address: NodeAddress | None) -> None:
        link = NodeLink(node, address, self._context, self._own_certificate, self._note_change)
        self.links[node] = link
        if self._group is not None:
            self._group.start_soon(self._run_link, link)

    def _remove(self, node: str) -> None:
        del self.links[node]
        scope = self._scopes.pop(node, None)
        if scope is not None:
            scope.cancel()

    async def _run_link(self, link: NodeLink) -> None:
        if self.links.get(link.name) is link:  # else it was removed before this task began
            with anyio.CancelScope() as self._scopes[link.name]:
                await link.run()

    def turns_of(self, node: str) -> OwnTurns:
        """Return the turns that are counted for a node; for a removed node, a placeholder."""
        link = self.links.get(node)
        return link.turns if link is not None else OwnTurns()

    def counters_of(self, node: str) -> NodeCounters:
        """Return the counters of a node; for a removed node, a placeholder."""
        link = self.links.get(node)
        return link.counters if link is not None else NodeCounters()

    def _note_change(self, link: NodeLink) -> None:
        (self._on_lost if link.load is None else self._on_found)(link)

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep the links until cancelled; started after the first attempt to reach every node."""
        async with anyio.create_task_group() as group:
            self._group = group
            for link in self.links.values():
                group.start_soon(self._run_link, link)
            await self.wait_settled()
            task_status.started()
            await anyio.sleep_forever()  # links may be added

    async def wait_settled(self) -> None:
        """Wait until the first attempt to reach every node has ended."""
        for link in tuple(self.links.values()):
            await link.settled.wait()

    def loads(self) -> dict[str, NodeLoad]:
        return {
            name: _load_for_choice(link.load, link.swapped, is_drained=name in self.drained)
            for name, link in self.links.items()
            if link.load is not None
        }

    def unreachable(self) -> list[str]:
        return [name for name, link in self.links.items() if link.load is None]

    def reachable(self) -> list[str]:
        """Return the names of the nodes that can be reached.

        :raises Busy: there are none.
        """
        names = list(self.loads())
        if not names:
            raise Busy(
                "no node of the fleet can be reached",
                hint=RETRY_HINT,
                data={
                    "cause": "node",
                    "nodes": {name: link.cause for name, link in self.links.items()},
                    "retry_after_s": RETRY_S,
                },
            )
        return names

    def is_reachable(self, node: str) -> bool:
        link = self.links.get(node)
        return link is not None and link.load is not None

    def check_exists(self, node: str) -> None:
        """Check that a node is one of the fleet.

        :raises NotFound: it is not.
        """
        if node not in self.links:
            names = sorted(self.links)
            raise NotFound(
                f"there is no node {node!r}",
                hint=f"the nodes are {', '.join(names)}",
                data={"nodes": names},
            )

    def with_model(self, model: str) -> list[str]:
        """Return the names of the nodes that can be reached and have a model."""
        return [name for name, load in self.loads().items() if model in load.models]

    def only_drained(self, model: str) -> list[str]:
        """Return the drained nodes that have a model, if all that have it are drained."""
        names = self.with_model(model)
        return names if all(name in self.drained for name in names) else []

    def choose(self, request: RouteRequest, key: Hashable | None = None) -> str:
        """Return the node for a context, see `choose_node`. With a *key*, count the context there
        at once.
        """
        node = choose_node(request, self._fleet_load())
        if key is not None:
            kind = TurnKind(request.model, request.priority)
            self.links[node].turns.note_opening(key, kind)
        return node

    def _fleet_load(self) -> FleetLoad:
        now = time.monotonic()
        opened: dict[tuple[str, str], ByClass] = {}
        for name, link in self.links.items():
            for model, counts in link.turns.since_report(now).items():
                opened[name, model] = counts
        return FleetLoad(self.loads(), self.unreachable(), opened)

    def to_warm_up(self, model: str, chosen: str) -> str | None:
        """Return a node that is to load a model now, see `node_to_warm_up`."""
        fleet = self._fleet_load()
        if chosen not in fleet.loads or model not in fleet.loads[chosen].models:
            return None
        if any(link.swapped[model] for link in self.links.values()):
            return None  # it counts as not loaded where it is being swapped
        return node_to_warm_up(model, chosen, fleet)

    def has_loaded(self, node: str, model: str) -> bool:
        """Return whether a model is in a node's memory."""
        link = self.links.get(node)
        load = None if link is None or link.load is None else link.load.models.get(model)
        return load is not None and load.loaded

    def starts_at_once(self, node: str, model: str, priority: int) -> bool:
        """Return whether a turn of a class gets a slot of a node's model at once."""
        link = self.links[node]
        if link.load is None or model not in link.load.models:
            return False
        opened = link.turns.since_report(time.monotonic()).get(model, NONE)
        return starts_at_once(link.load.models[model], opened, priority)

    def some_start_at_once(self, model: str, priority: int) -> bool:
        """Return whether a turn of a class gets a slot of some node at once. The result is up to
        `CHECK_S` old, because many waiting turns check this repeatedly.
        """
        now, key = time.monotonic(), (model, priority)
        checked_at, found = self._starts_at_once.get(key, (-CHECK_S, False))
        if now >= checked_at + CHECK_S:
            found = any(self.starts_at_once(node, model, priority) for node in self.links)
            self._starts_at_once[key] = now, found
        return found

    @contextmanager
    def swapping(self, node: str, model: str) -> Iterator[None]:
        """Make new contexts of a model prefer other nodes than *node* in the `with` block."""
        link = self.links.get(node)
        swapped = Counter[str]() if link is None else link.swapped
        swapped[model] += 1
        try:
            yield
        finally:
            swapped[model] -= 1

    def model_name(self, text: str) -> str:
        """Return the name of the nodes' model that *text* means, maybe after `preload:`; or *text*
        itself if there is none.
        """
        name = text.removeprefix(PRELOAD_PREFIX)
        return find_name(name, model_names(self.loads())) or name

    def hello(self, software: str, instance: int) -> ServerHello:
        """Return the hello of the fleet, whose limits hold on every node."""
        hellos = [link.hello for link in self.links.values() if link.hello is not None]
        known = [hello.limits for hello in hellos]
        first = hellos[0] if hellos else None
        frame_bytes_max = _least((x.frame_bytes_max for x in known), FRAME_BYTES_MAX)
        return ServerHello(
            protocol=PROTOCOL_VERSION,
            software=software,
            instance=instance,
            limits=Limits(
                frame_bytes_max=frame_bytes_max - OWN_BYTES,
                reply_bytes_max=REPLY_BYTES_MAX,
                nesting_max=_least((x.nesting_max for x in known), NESTING_MAX),
                requests_max=_least((x.requests_max for x in known), REQUESTS_MAX) - OWN_REQUESTS,
                credit_default=CREDIT_DEFAULT,
                credit_max=_least((x.credit_max for x in known), CREDIT_MAX),
                tensor_bytes_max=TENSOR_BYTES_MAX,
                sessions_max=sum(x.sessions_max for x in known),
                idle_timeout_ms=_least((x.idle_timeout_ms for x in known), 0),
            ),
            llama_build_number=first.llama_build_number if first else 0,
            llama_commit=first.llama_commit if first else "",
        )

    def describe(self) -> Mapping[str, Any]:
        return {
            name: _described(link, is_drained=name in self.drained)
            for name, link in self.links.items()
        }


def _load_for_choice(load: NodeLoad, swapped: Counter[str], *, is_drained: bool) -> NodeLoad:
    """Return a node's load; a model that is being swapped counts as not loaded."""
    models = {
        name: msgspec.structs.replace(load.models[name], loaded=False, loading=False)
        for name in +swapped
        if name in load.models
    }
    if not (models or is_drained):
        return load
    return msgspec.structs.replace(
        load, draining=load.draining or is_drained, models=load.models | models
    )


def _described(link: NodeLink, *, is_drained: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "address": str(link.address) if link.address else None,
        "reachable": link.load is not None,
        "cause": link.cause,
    }
    load = link.load
    if load is None:
        return found
    models = load.models.values()
    return found | {
        "instance": load.instance,
        "draining": load.draining or is_drained,
        "sessions": load.sessions,
        "sessions_max": load.sessions_max,
        "free_bytes": load.free_bytes,
        "loaded": sorted(name for name, model in load.models.items() if model.loaded),
        "slots": sum(model.slots for model in models if model.loaded),
        "running": sum(sum(model.running) for model in models),
        "waiting": sum(sum(model.waiting) for model in models),
    }


def _least(values: Iterable[int], default: int) -> int:
    """Return the least of *values*, and the default where there are none."""
    return min(values, default=default)
