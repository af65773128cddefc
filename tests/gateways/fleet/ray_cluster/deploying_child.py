"""A child that reports what its argument says: a double of the program that deploys a node."""

from __future__ import annotations

import sys
import time

import msgspec

from inferd.gateways.fleet.ray_cluster.published import NodeReport, NodeRequest


def main(behaviour: str) -> None:
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeRequest)
    report = NodeReport(running=True)
    if behaviour == "error":
        report = NodeReport(error=f"{request.name} is missing")
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()
    if behaviour == "silent":
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1])
