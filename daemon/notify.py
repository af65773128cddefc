"""Telling systemd how the service is (sd_notify): one datagram to `$NOTIFY_SOCKET`."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ("notify",)


def notify(state: str) -> None:
    """Send *state*, such as ``READY=1``; nothing happens without a service manager."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
    ):
        sock.sendto(state.encode(), address)
