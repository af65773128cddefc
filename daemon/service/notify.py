"""Telling systemd how the service is (sd_notify): one datagram to `$NOTIFY_SOCKET`."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> str | None:
    """Send *state*, such as ``READY=1``; return why that failed, if it did. Nothing happens without
    a service manager.
    """
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return None
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)  # nothing waits for a manager that does not read
            sock.sendto(state.encode(), address)
    except OSError as exc:
        return f"{path}: {exc.strerror or exc}"
    return None
