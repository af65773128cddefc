"""A daemon that is restarted under gateways: its model, a text that takes time, the restart."""

from __future__ import annotations

from inferd.testing import RunningDaemon
from tests.echo import echo_model

__all__ = ("CONFIG", "TEXT", "restart")

CONFIG = echo_model("slow", step_ms=40)
TEXT = b"a text that takes the slow model two seconds to echo"


def restart(daemon: RunningDaemon) -> None:
    """Kill the daemon and start another one on its files."""
    daemon.kill()
    daemon.start_again()
