"""A child of `inferd fleet node`, which deploys the node's application and follows it.

`python -m inferd.gateways.fleet.ray_cluster.deploy ADDRESS` reads a `NodeRequest` as a line of
JSON, reports while the application is deployed, and ends when it is missing or Ray fails. With
`remove ADDRESS NODE` it deletes the application.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import BinaryIO

import msgspec
import ray
from ray import serve

from .connecting import connect, end_with_parent, own_output, replica_metadata, short_reason
from .published import (
    APPLICATION_PREFIX,
    CHECK_S,
    DEPLOYMENT,
    NodeReport,
    NodeRequest,
    node_resource,
)
from .refusals import HeadNotReached, HeadRefuses
from .replica import NodeReplica

HEALTH_CHECK_S = 2.0
END_S_MAX = 90.0
"""Time in which a replica must stop; its daemon first finishes its turns."""


def is_member(resource: str) -> bool:
    """Return whether a machine of the cluster has the resource."""
    return any(node["Alive"] and resource in node["Resources"] for node in ray.nodes())


def is_running(name: str) -> bool:
    """Return whether an application has its replica."""
    application = serve.status().applications.get(name)
    return application is not None and str(application.status.value) == "RUNNING"


def deploy(request: NodeRequest) -> None:
    """Deploy the application of a node, unless it runs with the same plan.

    :raises Exception: as Ray raises it.
    """
    name = APPLICATION_PREFIX + request.name
    serve.start(proxy_location="Disabled")
    if is_running(name) and asyncio.run(replica_metadata(name)).get("digest") == request.digest:
        return
    deployment = serve.deployment(
        NodeReplica,
        name=DEPLOYMENT,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": {node_resource(request.name): 1}},
        health_check_period_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=END_S_MAX,
    )
    # By default, Serve gives each deployment a new version. After a restart of the head it would
    # replace a running replica that it has not found yet, and with it the daemon and the relay.
    deployment = deployment.options(version=request.digest, _internal=True)
    bound = deployment.bind(request.folder, request.digest)
    serve.run(bound, name=name, route_prefix=None)


def follow(request: NodeRequest, output: BinaryIO) -> None:
    """Deploy the application, and return when it is missing.

    :raises Exception: as Ray raises it.
    """
    if not is_member(node_resource(request.name)):
        write(output, NodeReport(must_join=True, error="no machine of the cluster is this node"))
        return
    deploy(request)
    while APPLICATION_PREFIX + request.name in serve.status().applications:
        write(output, NodeReport(running=True))
        time.sleep(CHECK_S)
    write(output, NodeReport(error="its application was deleted"))


def write(output: BinaryIO, report: NodeReport) -> None:
    """Write a report to the parent."""
    output.write(msgspec.json.encode(report) + b"\n")


def remove(address: str, name: str, output: BinaryIO) -> None:
    """Delete a node's application, which ends its relay and daemon.

    :raises Exception: as Ray raises it.
    """
    connect(address)
    application = APPLICATION_PREFIX + name
    if application not in serve.status().applications:
        write(output, NodeReport(error=f"the cluster does not have the node {name}"))
        return
    # Without the node's machine, Ray would wait 90 s for the end of a replica that cannot start.
    serve.delete(application, _blocking=is_member(node_resource(name)))
    write(output, NodeReport(running=False))


def main(arguments: list[str]) -> None:
    """Run until the parent or Ray ends this process."""
    output = own_output()
    try:
        if arguments[0] == "remove":
            remove(arguments[1], arguments[2], output)
            return
        request = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeRequest)
        end_with_parent()
        try:
            connect(arguments[0])
        except (HeadRefuses, HeadNotReached):
            raise
        except Exception as exc:
            write(output, NodeReport(must_join=True, error=short_reason(exc)))
            return
        follow(request, output)
    except Exception as exc:
        write(output, NodeReport(error=short_reason(exc)))
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
