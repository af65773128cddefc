"""A Ray cluster on this machine, and the members of a fleet in it, as processes.

In `ray_fleet`, the nodes of `FOUND` are members of the cluster before their command runs. That of
`JOINING` joins by its command, as on a machine of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from inferd import Client
from inferd.backends.errors import Busy
from inferd.gateways.fleet.ray_cluster.detached import holder_of
from inferd.gateways.fleet.ray_cluster.published import node_resource
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

    def __init__(self, folder: Path, config: str, cluster: Any, names: Sequence[str] = NAMES):
        super().__init__(folder, {})
        self.names = names
        certificates(self.keys, *names)
        (folder / "daemon.toml").write_text(config)
        (folder / "models").mkdir(exist_ok=True)
        self.cluster = cluster
        self.commands: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {name: free_port() for name in names}

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
        return self.until_printed(name, "supervised by Ray")

    def until_printed(self, name: str, text: str) -> str:
        """Return the next line of a node's command that has *text*."""
        errors = self.commands[name].stderr
        assert errors is not None
        while text not in (line := errors.readline().decode()):
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

    def kill_member(self, name: str, member: str, seconds: float = RAY_S_MAX) -> None:
        """Kill a node's daemon or relay, and wait until Ray's replica has started another."""
        before = self.process_of(name, member)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.process_of(name, member) not in (None, before), seconds)

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
        for name in self.names:
            if (replica := self.replica_of(name)) is not None:
                os.kill(replica, signal.SIGKILL)  # it would start the others again
            for member in ("relay", "daemon"):
                if (process := self.process_of(name, member)) is not None:
                    os.kill(process, signal.SIGKILL)


def nodes_of(fleet: RayFleet) -> dict[str, bool]:
    """Return whether each node that the entry knows can be reached."""
    with Client(fleet.socket) as client:
        try:
            nodes = client.stats()["nodes"]
        except Busy:  # the entry knows no node that can be reached
            return {}
    return {name: node["reachable"] for name, node in nodes.items()}


class RayHead:
    """The head of a cluster by `ray start`, of which nothing is left after `close`."""

    def __init__(self) -> None:
        import ray._private.services as services  # takes 1 s, which other tests would spend

        self.host = str(services.get_node_ip_address())
        self.address = f"{self.host}:{free_port()}"
        self._folders = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the head, at the address of its former one, and wait until it runs."""
        # A short path, for the sockets in it; a new one, else Ray takes members here for its own.
        temporary = self._folders.enter_context(TemporaryDirectory(prefix="ray-"))
        output = Path(temporary, "output")
        command = [
            *(sys.executable, "-c", "from ray.scripts.scripts import main; main()"),
            *("start", "--head", "--block", f"--port={self.address.rpartition(':')[2]}"),
            *("--include-dashboard=false", "--num-cpus=1", "--disable-usage-stats"),
            *(f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={temporary}/ray"),
        ]
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )
        wait_until(lambda: self._is_running(output), RAY_S_MAX)

    def _is_running(self, output: Path) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, output.read_text()
        return "Ray runtime started" in output.read_text()

    def kill(self) -> None:
        """Kill the head with all its processes, the controller of Ray Serve among them."""
        assert self._process is not None
        found = psutil.Process(self._process.pid)
        processes = [found, *found.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(processes)
        self._process = None

    def close(self) -> None:
        """Kill the head, if it runs, and remove its files."""
        if self._process is not None:
            self.kill()
        self._folders.close()


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
