"""The replica of Ray Serve that supervises a node's daemon and relay and publishes its address."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from .supervisor import NodeSupervisor

_log = logging.getLogger("ray.serve")


class NodeReplica:
    """Supervises the node whose state directory is *folder*.

    The daemon and the relay outlive the kill of a replica and the loss of Ray; the deletion of the
    application ends them. *version* is that of the plan at the deployment, so that Ray Serve
    replaces a replica when the plan changes.
    """

    def __init__(self, folder: str, version: str):
        self._supervisor = NodeSupervisor(Path(folder), _log.warning)
        plan = self._supervisor.plan
        self._metadata = {"address": plan.address, "digest": plan.digest}
        self._supervisor.begin()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Publish the address of the relay, and the version of the plan."""
        return self._metadata

    def check_health(self) -> None:
        """Fail if the node is not supervised, so that Ray starts another replica."""
        if not self._supervisor.is_sound():
            raise RuntimeError("a thread of the supervisor has ended")

    def __del__(self) -> None:
        """End relay and daemon: Ray Serve calls this when the application is deleted or changed."""
        if not sys.is_finalizing() and hasattr(self, "_supervisor"):
            self._supervisor.end()
