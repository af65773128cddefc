"""A child of the entry, which reads the published nodes from Ray and writes them to a pipe.

`python -m inferd.gateways.fleet.ray_cluster.watch ADDRESS` reports until its standard input ends
or Ray fails. Ray ends the process 60 s after the loss of its head; the entry starts another.
"""

from __future__ import annotations

import asyncio
import sys
from typing import BinaryIO

import msgspec
import ray
from ray import serve

from .connecting import connect, end_with_parent, own_output, replica_metadata, short_reason
from .published import APPLICATION_PREFIX, DEPLOYMENT, POLL_S, PublishedNodes, Report

HEAD_RESOURCE = "node:__internal_head__"


def cluster_id() -> str:
    """Return the id of the head, which is a new one after each start of the head."""
    heads = [n["NodeID"] for n in ray.nodes() if n["Alive"] and HEAD_RESOURCE in n["Resources"]]
    return str(heads[0]) if heads else ""


def applications() -> dict[str, bool]:
    """Return the fleet's applications by the names of their nodes, and whether each has a replica.

    :raises RuntimeError: Ray Serve does not run.
    """
    status = serve.status()
    if not status.applications and not status.proxies and not _is_running():
        raise RuntimeError("Ray Serve does not run: no node has joined")
    return {
        name.removeprefix(APPLICATION_PREFIX): _has_replica(application)
        for name, application in status.applications.items()
        if name.startswith(APPLICATION_PREFIX)
    }


def _is_running() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _has_replica(application: serve.schema.ApplicationStatusOverview) -> bool:
    found = application.deployments.get(DEPLOYMENT)
    return found is not None and bool(found.replica_states.get("RUNNING"))


async def published_address(node: str) -> str | None:
    """Return the address that a node's replica publishes; None if the replica does not answer."""
    metadata = await replica_metadata(APPLICATION_PREFIX + node)
    return str(metadata["address"]) if metadata else None


async def report_nodes(output: BinaryIO) -> None:
    """Report the published nodes until Ray fails.

    :raises Exception: as Ray raises it.
    """
    while True:
        found = await asyncio.to_thread(applications)
        names = [name for name, has_replica in found.items() if has_replica]
        addresses = await asyncio.gather(*(published_address(name) for name in names))
        nodes = dict.fromkeys(found) | dict(zip(names, addresses, strict=True))
        cluster = await asyncio.to_thread(cluster_id)
        write(output, Report(PublishedNodes(cluster, nodes)))
        await asyncio.sleep(POLL_S)


def write(output: BinaryIO, report: Report) -> None:
    """Write a report to the entry."""
    output.write(msgspec.json.encode(report) + b"\n")


def main(address: str) -> None:
    """Report until the entry or Ray ends this process."""
    output = own_output()
    end_with_parent()
    try:
        connect(address)
        asyncio.run(report_nodes(output))
    except Exception as exc:
        write(output, Report(error=short_reason(exc)))
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
