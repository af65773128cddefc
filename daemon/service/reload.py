"""Reading the configuration again (SIGHUP): what can hold at once does, what cannot is named.

A file with any error in it changes nothing. `config.applies` says when a change of a setting holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import anyio
import anyio.to_thread
import structlog

from ...sessions import DAY_S
from ..config.declaration import Applies, hyphens
from ..config.settings import Config, applies
from ..config.sources import ConfigError
from ..core import Daemon
from ..logs.setup import logs
from .status import Service

__all__ = ("Reload", "Reloaded", "merge")

ERRORS_TOLD_MAX = 3
CAUSE_CHARACTERS_MAX = 500

log = structlog.get_logger()


@dataclass(frozen=True)
class Reloaded:
    """What becomes of a configuration that was read again."""

    config: Config
    """What holds now."""
    changed: list[str]
    """What is another than before, and holds at once or from a model's next load on."""
    restart: list[str]
    """What is another, and holds after a restart alone."""


def merge(running: Config, read: Config) -> Reloaded:
    """Return what holds of *read*, in a daemon that goes by *running*."""
    differing = [
        f
        for f in (field.name for field in fields(Config))
        if getattr(running, f) != getattr(read, f)
    ]
    restart = [f for f in differing if applies(hyphens(f)) is Applies.RESTART]
    changed = [field for field in differing if field not in restart]
    config = replace(running, **{f: getattr(read, f) for f in changed})
    return Reloaded(config, [hyphens(f) for f in changed], [hyphens(f) for f in restart])


class Reload:
    """Reads the configuration with *read* each time that it is asked to; several requests while one
    is under way are one more. Lives on the daemon's event loop.
    """

    def __init__(self, daemon: Daemon, read: Callable[[], Config], service: Service):
        self._daemon, self._read, self._service = daemon, read, service
        self._asked = anyio.Event()

    def ask(self) -> None:
        """Read it again, soon."""
        self._asked.set()

    async def run(self) -> None:
        """Do what is asked, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = anyio.Event()
            self._service.reloading()
            await self._once()
            self._service.ready()

    async def _once(self) -> None:
        logs.reopen()
        parts = self._daemon.parts
        try:
            read = await anyio.to_thread.run_sync(self._read)
        except ConfigError as exc:
            log.error("config.refused", errors=exc.lines)
            parts.note("config", _cause(exc.lines))
            self._daemon.registry.scan()
            return
        reloaded = merge(self._daemon.config, read)
        self._daemon.restart_for = reloaded.restart
        outdated = _hold(self._daemon, reloaded.config)
        parts.note("config", None)
        log.info(
            "config.read_again",
            changed=reloaded.changed,
            restart=reloaded.restart,
            models_at_next_load=outdated,
        )


def _cause(lines: list[str]) -> str:
    more = len(lines) - ERRORS_TOLD_MAX
    text = "; ".join(lines[:ERRORS_TOLD_MAX]) + (f"; and {more} more" if more > 0 else "")
    return text[:CAUSE_CHARACTERS_MAX]


def _hold(daemon: Daemon, config: Config) -> list[str]:
    """Let *config* hold; return the models that go by the one before until their next load."""
    daemon.config = config
    bounds = daemon.ledger.bounds
    bounds.tasks_max = config.tasks_waiting_max
    bounds.tasks_owner_max = config.tasks_waiting_owner_max
    bounds.prompt_tokens_max = config.prompt_tokens_waiting_max
    bounds.prompt_tokens_owner_max = config.prompt_tokens_waiting_owner_max
    daemon.access.set_rules(config.access)
    daemon.server.connections_max = config.connections_max
    daemon.sessions.set_limits(
        sessions_max=config.sessions_max,
        idle_timeout_s=config.idle_timeout_ms / 1000,
        dormant_max=config.dormant_max,
        dormant_s_max=config.dormant_days_max * DAY_S,
        dormant_bytes_max=config.dormant_bytes_max,
    )
    logs.hold(config)
    daemon.use_logging()
    return daemon.registry.reconfigure(config)
