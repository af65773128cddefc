"""A child of discovery that behaves as its address says: a double of the program that uses Ray."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from inferd.gateways.fleet.ray_cluster.published import REPORT_BYTES_MAX, PublishedNodes, Report


def report(cluster: str, **nodes: str | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(Report(PublishedNodes(cluster, nodes))) + b"\n")
    sys.stdout.buffer.flush()


def main(address: str) -> None:
    behaviour, _, folder = address.partition(":")
    starts = Path(folder) / "starts"
    starts.write_text(starts.read_text() + "." if starts.exists() else ".")
    if behaviour == "error":
        sys.stdout.buffer.write(msgspec.json.encode(Report(error="the head is lost")) + b"\n")
        return
    if behaviour == "long":
        sys.stdout.buffer.write(b"x" * (REPORT_BYTES_MAX + 1) + b"\n")
        return
    if behaviour == "garbled":
        sys.stdout.buffer.write(b'{"published": 1}\n')
        return
    if behaviour == "invalid":
        report("first", a="10.0.0.2")
    elif behaviour == "restarts":
        # The second start finds a new head, which does not know a node of the old one.
        if len(starts.read_text()) == 1:
            report("first", a="10.0.0.2:7878", b=None)
            return
        report("second", b="10.0.0.3:7878")
    sys.stdout.buffer.flush()
    time.sleep(3600)  # the entry ends a child that is silent


if __name__ == "__main__":
    main(sys.argv[1])
