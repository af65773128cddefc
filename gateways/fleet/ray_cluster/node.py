"""The process of a node that joins a Ray cluster: the children that do so, and its signals.

Ray itself runs in children: `ray start`, if this machine is not yet a member of the cluster as this
node, and the program that deploys the node's application.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from ....backends.errors import BackendError, InvalidArgument
from ..certificates import node_context
from ..link import parse_node_address
from .keys import member_in, ray_environment
from .published import CHECK_S, NodeReport, NodeRequest, ReportingChild, node_resource
from .supervisor import MANAGER_VARIABLES, NodePlan, members_of, withdraw_plan

CHILD_MODULE = "inferd.gateways.fleet.ray_cluster.deploy"
LOG_FILE_BYTES_MAX = 16 << 20
RAY_ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",  # models fill the memory: Ray would end the replica
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # no replica of this machine can move
}
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray accepts, because the fleet passes no objects through Ray."""
RETRY_S_MAX = 10.0
FIRST_S_MAX = 60.0
"""Time in which a child deploys the application, or fails to."""
SILENT_S_MAX = 4 * CHECK_S
"""Time without a report after which a child is replaced."""
JOIN_S_MAX = 30.0
"""Time in which `ray start` makes this machine a member; after that, joining is tried again."""
LEAVE_S_MAX = 15.0
"""Time for `ray start` to end its processes."""


def plan_of(
    name: str, *, listen: str, certificates: Path, socket: str, folder: Path, serve: Sequence[str]
) -> NodePlan:
    """Return the plan of a node: the commands of its relay and its daemon, to which the arguments
    *serve* are passed on, and the environment of this process for both.
    """
    # -P: no module is imported from the current folder.
    inferd = [sys.executable, "-P", "-m", "inferd"]
    daemon = [
        *(*inferd, "serve", "--socket", socket, f"--set=log-file={folder / 'daemon.log'}"),
        *(f"--set=log-file-bytes-max={LOG_FILE_BYTES_MAX}", *serve),
    ]
    relay = [
        *(*inferd, "fleet", "node", name, "--listen", listen),
        *("--certificates", str(certificates), "--socket", socket),
    ]
    environment = {n: v for n, v in os.environ.items() if n not in MANAGER_VARIABLES}
    return NodePlan(listen, {"daemon": daemon, "relay": relay}, environment)


def join_command(address: str, name: str) -> list[str]:
    """Return the command that makes this machine a member of the cluster as a node."""
    return [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"),
        *(f"--address={address}", "--num-cpus=1", "--num-gpus=0", "--disable-usage-stats"),
        *(f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-log-monitor=False"),
        f"--resources={json.dumps({node_resource(name): 1})}",
    ]


class RayNode:
    """A node of the cluster at *ray*, whose state directory is *folder*. Ray's programs have the
    variables *environment*.
    """

    def __init__(
        self,
        name: str,
        ray: str,
        plan: NodePlan,
        folder: Path,
        note: Callable[[str], object],
        environment: Mapping[str, str] | None = None,
    ):
        self._environment = dict(environment or {})
        self._name, self._ray = name, ray
        self._plan, self._folder, self._note = plan, folder, note
        request = NodeRequest(name, str(folder), plan.digest)
        self._child = ReportingChild(
            CHILD_MODULE,
            ray,
            NodeReport,
            msgspec.json.encode(request) + b"\n",
            first_s_max=FIRST_S_MAX,
            silent_s_max=SILENT_S_MAX,
            retry_s_max=RETRY_S_MAX,
            environment=environment,
        )
        self._raylet: anyio.abc.Process | None = None
        """`ray start`, if this process has made this machine a member of the cluster."""
        self._joined_at = 0.0
        self._is_running = False
        self._cause = ""

    async def run(self) -> signal.Signals:
        """Keep the node deployed until SIGTERM or SIGINT, and return that signal.

        A member that this process has made leaves the cluster then, and its relay and daemon end.
        """
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with anyio.create_task_group() as group:
                group.start_soon(self._child.follow, self._accept, self._fail)
                ended_by = await anext(signals)
                group.cancel_scope.cancel()
        if self._raylet is not None:
            # A replica outlives its member for a moment; without the plan, it restarts nothing.
            await anyio.to_thread.run_sync(withdraw_plan, self._folder)
            await self._leave()
            for member in reversed(members_of(self._plan, self._folder).values()):
                await anyio.to_thread.run_sync(member.end)
        return ended_by

    async def _accept(self, report: NodeReport) -> bool:
        if report.running and not self._is_running:
            self._note(
                f"node {self._name} serves entries on {self._plan.address}, supervised by Ray"
            )
        self._is_running = report.running
        if report.running:
            self._cause = ""
        elif not report.must_join:
            self._note_cause(report.error)
        elif self._raylet is None:
            self._note(f"joining the Ray cluster at {self._ray}")
            await self._join()
        elif time.monotonic() > self._joined_at + JOIN_S_MAX:
            # Even if `ray start` runs: it may be a member of a cluster whose head is lost.
            self._note_cause(report.error)
            await self._leave()
            await self._join()
        return report.running

    def _fail(self, cause: str) -> None:
        self._is_running = False
        self._note_cause(cause)

    async def _join(self) -> None:
        self._joined_at = time.monotonic()
        self._raylet = await anyio.open_process(
            join_command(self._ray, self._name),
            env=os.environ | RAY_ENVIRONMENT | self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def _leave(self) -> None:
        """End `ray start`, which ends its processes."""
        raylet = self._raylet
        if raylet is None or raylet.returncode is not None:
            return
        with suppress(ProcessLookupError):
            raylet.terminate()
        with anyio.move_on_after(LEAVE_S_MAX):
            await raylet.wait()
            return
        with suppress(ProcessLookupError):
            raylet.kill()
        await raylet.wait()

    def _note_cause(self, cause: str) -> None:
        if cause != self._cause:
            self._note(f"Ray does not supervise node {self._name}: {cause}; trying again")
        self._cause = cause


def run_ray_node(
    name: str,
    *,
    ray: str,
    listen: str,
    certificates: Path,
    socket: str,
    folder: Path,
    serve: Sequence[str],
    note: Callable[[str], object],
) -> signal.Signals:
    """Keep a node in the Ray cluster at *ray* until SIGTERM or SIGINT, and return that signal.

    *folder* is the node's state directory, *serve* has the arguments of its daemon.

    :raises InvalidArgument: the address, the certificate or the state directory cannot be used.
    """
    address = parse_node_address(listen)
    if not address.port or address.host in ("0.0.0.0", "::", ""):
        raise InvalidArgument(
            f"{listen} is not an address that entries can use",
            hint="give --listen the address of this machine and a port, such as 10.0.0.2:7878",
        )
    node_context(certificates, name)
    environment = ray_environment(certificates, name)
    folder = folder.absolute()
    plan = plan_of(
        name,
        listen=listen,
        certificates=certificates.absolute(),
        socket=socket,
        folder=folder,
        serve=serve,
    )
    plan.write(folder)
    return anyio.run(RayNode(name, ray, plan, folder, note, environment).run)


def remove_ray_node(name: str, ray: str, certificates: Path) -> None:
    """Delete a node from the Ray cluster at *ray*; Ray ends its relay and daemon. *certificates*
    is the folder of this machine's certificates.

    :raises InvalidArgument: a file of Ray there cannot be used.
    :raises BackendError: the cluster does not answer, or does not have the node.
    """
    environment = ray_environment(certificates, member_in(certificates))
    found = subprocess.run(
        [sys.executable, "-P", "-m", CHILD_MODULE, "remove", ray, name],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    lines = found.stdout.splitlines()
    cause = msgspec.json.decode(lines[-1], type=NodeReport).error if lines else "Ray has failed"
    if cause:
        raise BackendError(
            f"node {name} was not removed: {cause}",
            hint="run this on a machine that is a member of the Ray cluster",
        )
