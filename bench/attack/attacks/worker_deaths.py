"""Attacks on the worker process: kills from outside, such as those of the kernel's OOM killer."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from contextlib import suppress

import psutil

from bench.attack.attack import Attack, Target

KILL_S = 2.0
_CREDENTIALS = struct.Struct("3i")


def _daemon_of(target: Target) -> psutil.Process:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(target.socket)
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return psutil.Process(_CREDENTIALS.unpack(packed)[0])


def kill_workers(target: Target) -> None:
    """Kill all workers at intervals; this process has root's real user, so it may."""
    daemon = _daemon_of(target)
    while not target.is_over():
        for worker in daemon.children():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                os.kill(worker.pid, signal.SIGKILL)
        time.sleep(KILL_S)


ATTACKS = (
    Attack(
        "worker-kills",
        "a SIGKILL to the worker every 2 s, as by the OOM killer",
        kill_workers,
        pace_least=0.2,  # half of each 2 s is a load, and the prompt is computed again
    ),
)
