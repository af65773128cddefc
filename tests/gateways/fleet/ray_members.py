"""A Ray cluster on this machine, and the members of a fleet in it, as processes.

The nodes of `FOUND` are members of the cluster before their command runs. That of `JOINING` joins
by its command, as on a machine of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from inferd.gateways.fleet.node.detached import holder_of
from inferd.gateways.fleet.published import node_resource
from tests.daemon.command_line import inferd_process
from tests.gateways.fleet.members import RunningFleet, certificates
from tests.waiting import wait_until

FOUND, JOINING = ("a", "b"), "c"
NAMES = (*FOUND, JOINING)
OBJECT_STORE_BYTES = 80 << 20
RAY_S_MAX = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class RayFleet(RunningFleet):
    """A cluster, `inferd fleet node --ray` for each of its nodes, and an entry."""

    def __init__(self, folder: Path, config: str, cluster: Any):
        super().__init__(folder, {})
        certificates(self.keys, *NAMES)
        (folder / "daemon.toml").write_text(config)
        (folder / "models").mkdir(exist_ok=True)
        self.cluster = cluster
        self.commands: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {name: free_port() for name in NAMES}

    def start_node(self, name: str) -> None:
        """Start a node's command."""
        folder = self.folder / name
        self.commands[name] = inferd_process(
            *("fleet", "node", name, "--ray", self.cluster.address),
            *("--listen", f"127.0.0.1:{self._ports[name]}"),
            *("--certificates", str(self.keys), "--state-dir", str(folder)),
            *("--", "--config", str(self.folder / "daemon.toml")),
            *("--models-dir", str(self.folder / "models"), "--state-dir", str(folder / "daemon")),
            socket=str(folder / "inferd.sock"),
        )

    def until_deployed(self, name: str) -> str:
        """Return the line with which a node's command reports that Ray supervises it."""
        errors = self.commands[name].stderr
        assert errors is not None
        while "supervised by Ray" not in (line := errors.readline().decode()):
            assert line, f"the command of {name} has ended"
        return line

    def end_command(self, name: str) -> int:
        """End a node's command by SIGTERM, and return its exit status."""
        command = self.commands.pop(name)
        command.terminate()
        command.communicate()
        return command.returncode

    def process_of(self, name: str, member: str) -> int | None:
        """Return the id of a node's `daemon` or `relay`."""
        return holder_of(self.folder / name / f"{member}.lock")

    def runs(self, name: str) -> bool:
        """Return whether a process of a node runs."""
        return any(self.process_of(name, member) for member in ("daemon", "relay"))

    def kill_member(self, name: str, member: str) -> None:
        """Kill a node's daemon or relay, and wait until Ray's replica has started another."""
        before = self.process_of(name, member)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.process_of(name, member) not in (None, before))

    def replica_of(self, name: str) -> int | None:
        """Return the id of the process of a node's replica."""
        title = f"ray::ServeReplica:inferd-{name}:"
        found = (p.pid for p in psutil.process_iter(["cmdline"]) if _title(p).startswith(title))
        return next(found, None)

    def kill_replica(self, name: str) -> None:
        """Kill a node's replica, and wait until Ray has started another."""
        before = wait_until(lambda: self.replica_of(name))  # Ray changes the title of a process
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.replica_of(name) not in (None, before), RAY_S_MAX)

    def kill_head(self) -> None:
        """Kill all processes of the cluster's head, with the controller of Ray Serve."""
        head = self.cluster.head_node
        head.kill_all_processes(check_alive=False, allow_graceful=False)

    def close(self) -> None:
        super().close()
        for name in tuple(self.commands):
            self.end_command(name)
        for name in NAMES:
            if (replica := self.replica_of(name)) is not None:
                os.kill(replica, signal.SIGKILL)  # it would start the others again
            for member in ("relay", "daemon"):
                if (process := self.process_of(name, member)) is not None:
                    os.kill(process, signal.SIGKILL)


def _title(process: psutil.Process) -> str:
    return "".join(process.info["cmdline"] or ())


@contextmanager
def ray_fleet(folder: Path, config: str) -> Iterator[RayFleet]:
    """Run a head, three nodes and an entry until the end of the block."""
    from ray.cluster_utils import Cluster  # takes 2 s, which each process of a run would spend

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        },
    )
    try:
        for name in FOUND:
            cluster.add_node(
                wait=False,
                num_cpus=1,
                resources={node_resource(name): 1},
                object_store_memory=OBJECT_STORE_BYTES,
            )
        fleet = RayFleet(folder, config, cluster)
        try:
            for name in NAMES:
                fleet.start_node(name)
            fleet.start_entry(f'ray = "{cluster.address}"\n')
            yield fleet
        finally:
            fleet.close()
    finally:
        cluster.shutdown()
