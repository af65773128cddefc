"""A deployment of replicas beside daemons, with a router that notes the nodes that it names."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from inferd import AsyncClient
from inferd.gateways.fleet.ray_cluster.node_stats import NodeStats

NAMED: dict[int, str] = {}
"""The first node that the router has named, by the number of the call."""


class RoutedNode(NodeStats):
    """Answers from one of the daemons in *folder*, of which no other replica has the lock."""

    def __init__(self, folder: str):
        name = next(name for name in "abc" if self._locks(Path(folder, f"{name}.lock")))
        self._socket = Path(folder, f"{name}.socket").read_text()
        super().__init__(name, self._socket)
        self._name = name

    def _locks(self, path: Path) -> bool:
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            return False
        return True

    async def __call__(self, number: int, model: str, text: str) -> str:
        """Return the name of the node that has echoed a text."""
        async with AsyncClient(self._socket) as client, client.session(model) as session:
            assert str(await session.chat(text)) == text
        return self._name

    def process(self, number: int) -> int:
        """Return the id of the replica's process."""
        return os.getpid()


class Front:
    """Calls the nodes itself, several times at once in one request."""

    def __init__(self, nodes: Any):
        self._nodes = nodes

    async def __call__(self, texts: list[str]) -> list[str]:
        """Return the names of the nodes that have echoed the texts."""
        named = self._nodes.options(multiplexed_model_id="m")
        calls = [named.remote(number, "m", text) for number, text in enumerate(texts)]
        return [await call for call in calls]
