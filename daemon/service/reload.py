"""Reload of the configuration (SIGHUP): changes that can be applied at once are applied.

A file with an error changes nothing. `config.settings.applies` returns the time at which a change
of a setting takes effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import anyio
import anyio.to_thread
import structlog

from ..config.declaration import Applies, hyphens
from ..config.settings import Config, applies
from ..config.sources import ConfigError
from ..core import Daemon
from ..logs.setup import logs
from .notifier import ServiceNotifier

ERRORS_NAMED_MAX = 3
CAUSE_CHARACTERS_MAX = 500

log = structlog.get_logger()


@dataclass(frozen=True)
class Reloaded:
    """The outcome of a reload."""

    config: Config
    """The configuration in force."""
    changed: list[str]
    """Changed settings that take effect at once, or with a model's next load."""
    restart: list[str]
    """Changed settings that take effect after a restart."""


def merge(running: Config, read: Config) -> Reloaded:
    """Return the configuration after *read* was read by a daemon that uses *running*."""
    names = [field.name for field in fields(Config)]
    differing = [f for f in names if getattr(running, f) != getattr(read, f)]
    restart = [f for f in differing if applies(hyphens(f)) is Applies.RESTART]
    changed = [field for field in differing if field not in restart]
    config = replace(running, **{f: getattr(read, f) for f in changed})
    return Reloaded(config, [hyphens(f) for f in changed], [hyphens(f) for f in restart])


class ConfigReloader:
    """Reads the configuration with *read* on request. Requests during a reload cause one more
    reload. Lives on the daemon's event loop.
    """

    def __init__(self, daemon: Daemon, read: Callable[[], Config], service: ServiceNotifier):
        self._daemon, self._read, self._service = daemon, read, service
        self._requested = anyio.Event()

    def request_reload(self) -> None:
        self._requested.set()

    async def run(self) -> None:
        """Reload on request, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested = anyio.Event()
            self._service.notify_reloading()
            await self._reload()
            self._service.notify_ready()

    async def _reload(self) -> None:
        logs.reopen_file()
        components = self._daemon.components
        try:
            read = await anyio.to_thread.run_sync(self._read)
        except (ConfigError, OSError) as exc:
            errors = exc.lines if isinstance(exc, ConfigError) else [str(exc)]
            log.error("config.refused", errors=errors)
            components.note("config", _cause(errors))
            await self._daemon.registry.catalog.refresh()
            return
        reloaded = merge(self._daemon.config, read)
        self._daemon.pending_restart = reloaded.restart
        outdated = _apply(self._daemon, reloaded.config)
        await self._daemon.registry.catalog.refresh()
        components.note("config", None)
        log.info(
            "config.read_again",
            changed=reloaded.changed,
            restart=reloaded.restart,
            models_at_next_load=outdated,
        )


def _cause(lines: list[str]) -> str:
    more = len(lines) - ERRORS_NAMED_MAX
    text = "; ".join(lines[:ERRORS_NAMED_MAX]) + (f"; and {more} more" if more > 0 else "")
    return text[:CAUSE_CHARACTERS_MAX]


def _apply(daemon: Daemon, config: Config) -> list[str]:
    """Apply *config*; return the models that keep the old configuration until their next load."""
    daemon.apply_config(config)
    logs.apply_config(config)
    daemon.apply_log_levels()
    return daemon.registry.reconfigure(config)
