"""The members of a fleet in tests: certificates, relays and entries as processes, TLS by hand."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from inferd import Client
from inferd.gateways.fleet.certificates import ENTRY, Authority, Role, entry_context, server_name
from inferd.testing import RunningDaemon, running_daemon
from inferd.wire.frames import pack_frame
from tests.daemon.command_line import inferd_process
from tests.waiting import wait_until

WAIT_S_MAX = 60.0
NOTED_S_MAX = 60.0
DAYS = 90
HELLO: list[Any] = [0, {"protocol": [1, 0], "software": "test"}]


def certificates(folder: Path, *nodes: str) -> Path:
    """Make an authority with certificates of an entry and of nodes; return the folder."""
    authority = Authority(folder)
    authority.open_or_create()
    authority.issue(ENTRY, Role.ENTRY, DAYS)
    for name in nodes:
        authority.issue(name, Role.NODE, DAYS)
    return folder


class Relay:
    """A running `inferd fleet node`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str):
        self.process, self.address = process, address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@contextmanager
def relay(
    daemon: RunningDaemon,
    folder: Path,
    name: str = "a",
    listen: str = "127.0.0.1:0",
    *more: str,
) -> Iterator[Relay]:
    """Run a node's relay, with *more* arguments, until the end of the block."""
    arguments = ("fleet", "node", name, "--listen", listen, "--certificates", str(folder), *more)
    with inferd_process(*arguments, socket=daemon.socket) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline().decode()
            assert line.startswith(f"node {name} serves entries on "), line
            yield Relay(process, line.split()[-1])
        finally:
            process.kill()
            process.communicate()


class Peer:
    """An entry's connection to a relay, written by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    def send(self, *messages: Any) -> None:
        self.writer.write(b"".join(pack_frame(message) for message in messages))

    async def receive(self) -> list[Any]:
        """Return the next message; an empty list at the end."""
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                size = int.from_bytes(await self.reader.readexactly(4), "little")
                body = await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return []
        message: list[Any] = msgspec.msgpack.decode(body)
        return message

    async def until(self, kind: int) -> list[Any]:
        """Return the next message of a kind."""
        while True:
            message = await self.receive()
            assert message, "the relay has closed the connection"
            if message[0] == kind:
                return message


@asynccontextmanager
async def peer(
    folder: Path, port: int, protocol: str, *, node: str = "a", name: str = ENTRY
) -> AsyncIterator[Peer]:
    """Connect to a relay as the entry of *folder*."""
    context = entry_context(folder, name, protocol)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=server_name(node)
    )
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


class RunningFleet:
    """Daemons, their relays and an entry, each a process; `socket` is the entry's, and `metrics`
    that of its metrics. *own* is the node on the entry's machine.
    """

    def __init__(self, folder: Path, daemons: dict[str, RunningDaemon], own: str = ""):
        self.folder, self.daemons, self._own = folder, daemons, own
        self.descriptors = str(folder / "own.sock")
        self.keys = certificates(folder / "keys", *daemons)
        self.socket, self.metrics = str(folder / "fleet.sock"), str(folder / "metrics.sock")
        self.relays: dict[str, Relay] = {}
        self.entry: subprocess.Popen[bytes]
        self._stacks = {name: ExitStack() for name in (*daemons, ENTRY)}

    def start_relay(self, name: str) -> None:
        """Start a node's relay, at the address of its former one."""
        before = self.relays.get(name)
        listen = before.address if before else "127.0.0.1:0"
        more = ("--descriptors", self.descriptors) if name == self._own else ()
        running = relay(self.daemons[name], self.keys, name, listen, *more)
        self.relays[name] = self._stacks[name].enter_context(running)

    def kill_relay(self, name: str) -> None:
        self._stacks[name].close()

    def start_entry(self, more: str = "") -> None:
        """Start the entry with further lines of configuration, and wait until it listens."""
        nodes = "".join(
            f'[nodes.{name}]\naddress = "{running.address}"\n'
            + (f'descriptors = "{self.descriptors}"\n' if name == self._own else "")
            for name, running in self.relays.items()
        )
        if "metrics =" not in more:
            more += f'metrics = "{self.metrics}"\n'
        config = self.folder / "fleet.toml"
        config.write_text(
            f'certificates = "keys"\nsocket = "{self.socket}"\nstate-dir = "state"\n{more}{nodes}'
        )
        self.entry = inferd_process("fleet", "serve", "--config", str(config))
        self._stacks[ENTRY].callback(self._end_entry)
        self.until_noted("the fleet listens on")

    def _end_entry(self) -> None:
        self.entry.kill()
        self.entry.communicate()

    def kill_entry(self) -> None:
        self._stacks[ENTRY].close()

    def until_noted(self, text: str) -> str:
        """Return the next line on the entry's standard error that has *text*. An entry that writes
        none for too long is killed.
        """
        assert self.entry.stderr is not None
        watchdog = threading.Timer(NOTED_S_MAX, self.entry.kill)
        watchdog.start()
        try:
            while line := self.entry.stderr.readline().decode():
                if text in line:
                    return line
        finally:
            watchdog.cancel()
        raise AssertionError(f"the entry has ended, or was killed, without {text!r}")

    def load(self, model: str) -> None:
        """Load a model on all nodes, and wait until the entry knows that, and of no turn."""
        for daemon in self.daemons.values():
            with Client(daemon.socket) as direct:
                direct.unload(direct.load_by_name(model), keep=True)
        with Client(self.socket) as client:
            wait_until(lambda: _are_ready(client, model))

    def clear(self) -> None:
        """Use all nodes again, and delete the sessions with an id."""
        with Client(self.socket) as client:
            for node in self.daemons:
                client.drain(node=node, undo=True)
            for session in client.sessions(dormant=True):
                if session["session_id"]:
                    client.delete_session(session_id=session["session_id"])

    def close(self) -> None:
        for stack in reversed(self._stacks.values()):
            stack.close()


def _are_ready(client: Client, model: str) -> bool:
    nodes = client.stats()["nodes"].values()
    return all(model in node.get("loaded", ()) and not node["running"] for node in nodes)


@contextmanager
def running_fleet(
    folder: Path,
    config: str | Mapping[str, str],
    *names: str,
    more: str = "",
    models_dir: Path | None = None,
    own: str = "",
) -> Iterator[RunningFleet]:
    """Run a fleet whose nodes have the configuration *config*, or each its own one, until the end
    of the block.
    """
    with ExitStack() as stack:
        configs = dict.fromkeys(names, config) if isinstance(config, str) else config
        daemons = {
            name: stack.enter_context(running_daemon(configs[name], models_dir=models_dir))
            for name in names
        }
        fleet = RunningFleet(folder, daemons, own)
        stack.callback(fleet.close)
        for name in names:
            fleet.start_relay(name)
        fleet.start_entry(more)
        yield fleet
