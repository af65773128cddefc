"""The daemon process: its socket, signals, background services, and shutdown."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial

import anyio
import anyio.abc
import structlog

from ..backends.errors import InferdError, ShuttingDown
from ..backends.memory import return_large_blocks
from ..ipc.messages import Kind
from ..ipc.metrics_listener import HttpListener
from ..ipc.server.descriptors import allow_interrupts, raise_open_files_limit
from ..ipc.server.listener import InheritedListener, UnixListener, inherited_listener
from .calls import ALL_CALLS, CALLS_WITHOUT_TASK, IMMEDIATE_CALLS
from .components import Components
from .config.access_settings import gid_of
from .config.settings import Config
from .core import Daemon
from .logs.setup import logs
from .metrics.pages import MetricsPages
from .models.loader import LoadListener
from .models.preloads import Preloads
from .models.tuner import TuningPace
from .printable import escape_controls
from .residency.machine import MachineMemory
from .residency.pressure import Pace
from .service.background import ReadinessReport
from .service.notifier import ServiceNotifier
from .service.reload import ConfigReloader
from .state_lock import StateDirectory
from .traces.tracing import Traces
from .workers.process import start_spawner

log = structlog.get_logger()
MMAP_BYTES = 128 << 10
"""Freed blocks of this size or more return to the system. Without that, unfinished frames of 1 MiB
left up to 30 MB in the heap.
"""
_HARD_STOP, _INTERRUPTED = 1, 130
Listener = UnixListener | InheritedListener


def serve(
    config: Config,
    machine: MachineMemory | None = None,
    pace: Pace | None = None,
    read: Callable[[], Config] | None = None,
    report: ReadinessReport | None = None,
    tuning_pace: TuningPace | None = None,
) -> int:
    """Run a daemon until it is ordered to stop; return the process's exit status.

    Free memory is read from *machine*, at the intervals of *pace*. *read* returns the configuration
    for a reload. *report* gets readiness, or the error that ended the start. Settings are measured
    at *tuning_pace*.
    """
    report = report or ReadinessReport()
    components, state = Components(), StateDirectory(config.state_dir)
    try:
        # This is first, because sockets are inherited by number, which another file may get later.
        given = inherited_listener(os.environ)
        logs.configure(config, partial(components.note, "log"))
        instance = state.open(given.path if given else str(config.socket), components)
        listener = given or _bind_socket(config)
    except InferdError as exc:
        state.close()
        report.send_error(exc)
        sys.stderr.write(
            escape_controls(f"inferd: {exc.message_for_people}\n  {exc.hint_for_people}\n")
        )
        return 1
    try:
        raise_open_files_limit()
        allow_interrupts()
        return_large_blocks(MMAP_BYTES)
        start_spawner()
        daemon = partial(
            Daemon,
            config,
            instance=instance,
            components=components,
            machine=machine,
            pace=pace,
            tuning_pace=tuning_pace,
        )
        main = partial(_main, daemon, listener, read or (lambda: config), report)
        return anyio.run(main, backend_options=_loop_options(components))
    finally:
        listener.close()
        state.close()


def _bind_socket(config: Config) -> UnixListener:
    """Return a listener on the configured socket."""
    gid = gid_of(config.socket_group) if config.socket_group else -1
    own = UnixListener(str(config.socket), config.socket_mode, gid)
    own.bind()
    return own


def _loop_options(components: Components) -> dict[str, bool]:
    """Return the options of the event loop, which is uvloop where that is installed and works."""
    if importlib.util.find_spec("uvloop") is None:
        return {}
    try:
        import uvloop

        uvloop.new_event_loop().close()
    except Exception as exc:  # a failing extra must not keep the daemon from starting
        components.note("uvloop", repr(exc))
        return {}
    return {"use_uvloop": True}


async def _main(
    start: Callable[[anyio.abc.TaskGroup], Daemon],
    listener: Listener,
    read: Callable[[], Config],
    report: ReadinessReport,
) -> int:
    logs.bind_loop(asyncio.get_running_loop())
    async with anyio.create_task_group() as group:
        daemon = start(group)
        daemon.calls, daemon.immediate_calls = ALL_CALLS, IMMEDIATE_CALLS
        daemon.calls_without_task = CALLS_WITHOUT_TASK
        traces = Traces(daemon)
        traces.open()
        daemon.socket_activated = listener.inherited
        daemon.socket_path = listener.path
        service = _service(daemon)
        reload = ConfigReloader(daemon, read, service)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            group.start_soon(_watch_signals, daemon, signals, listener, reload)
            async with anyio.create_task_group() as services:
                services.start_soon(service.run)
                await _start_services(daemon, services)
                await services.start(daemon.server.serve, listener.socket)
                await daemon.registry.catalog.refresh()
                log.info(
                    "daemon.ready",
                    socket=listener.path,
                    inherited=listener.inherited,
                    pid=os.getpid(),
                    models=len(daemon.registry.catalog.listed_to(os.getuid())),
                )
                service.notify_ready()
                services.start_soon(daemon.jobs.run)
                services.start_soon(daemon.job_runner.run)
                _report_ready(daemon, report)
                services.start_soon(reload.run)
                services.start_soon(_preload, daemon)
                await daemon.stopping.wait()
                service.notify_stopping(daemon.config.shutdown_grace_s)
                if listener.inherited:
                    daemon.server.stop_accepting()  # the next daemon accepts new clients
                await _stop(daemon)
                await traces.close()
                services.cancel_scope.cancel()
        group.cancel_scope.cancel()
    log.info("daemon.stopped")
    return daemon.exit_status


def _report_ready(daemon: Daemon, report: ReadinessReport) -> None:
    """Report readiness to the starter, unless the daemon is already shutting down."""
    if not daemon.stopping.is_set() and not report.send_ready():
        log.warning("daemon.starter_has_ended")  # such as by Ctrl-C: no program uses this daemon
        daemon.stopping.set()


async def _preload(daemon: Daemon) -> None:
    """Load the models of `preload`, after the daemon was reported as ready."""
    note = partial(daemon.components.note, "preload")
    preloads = Preloads(daemon.registry, daemon.config.preload, note)
    daemon.registry.loader.listeners.append(preloads)
    await daemon.components.run_component("preload", preloads.run)


async def _start_services(daemon: Daemon, services: anyio.abc.TaskGroup) -> None:
    """Start the background services, and restore the state of earlier daemons."""
    components, registry = daemon.components, daemon.registry
    services.start_soon(daemon.sessions.expire_idle)
    services.start_soon(registry.loader.unload_unused)
    watch_external_load = registry.loader.cores.watch_external_load
    services.start_soon(components.run_component, "cores", watch_external_load)
    services.start_soon(components.run_component, "memory", daemon.memory.run)
    services.start_soon(components.run_component, "tuning", registry.tuner.run)
    services.start_soon(daemon.draft_gains.run)
    await registry.kv_index.load()
    services.start_soon(registry.kv_index.run)
    await daemon.restore()
    services.start_soon(daemon.clock.run)
    services.start_soon(daemon.journal.run)
    services.start_soon(daemon.usage.run, daemon.journal.note_usage)
    services.start_soon(daemon.state_journal.run)
    services.start_soon(daemon.media_store.run)
    pages = MetricsPages(daemon)
    daemon.metrics_text = pages.exposition
    if not daemon.config.metrics.is_off:
        services.start_soon(_metrics(daemon, pages).run)
    gc.collect()
    gc.freeze()  # the restored state is permanent: later collections need not scan it


def _metrics(daemon: Daemon, pages: MetricsPages) -> HttpListener:
    """Return the listener of the metrics, which listens already if it can."""
    listener = pages.new_listener(partial(daemon.components.note, "metrics"))
    listener.open()
    daemon.metrics_at = lambda: listener.where
    return listener


def _service(daemon: Daemon) -> ServiceNotifier:
    """Return the notifier that reports on *daemon* to the service manager."""
    service = ServiceNotifier(
        daemon.components,
        loading=lambda: daemon.registry.catalog.loading,
        overdue=lambda: [w.spec.name for w in daemon.registry.catalog.all_workers() if w.overdue],
        turns=lambda: sum(session.active for session in daemon.sessions.live),
        pending_restart=lambda: daemon.pending_restart,
    )
    daemon.components.on_change = service.component_changed
    daemon.registry.loader.listeners.append(_LoadStatus(service))
    return service


class _LoadStatus(LoadListener):
    """Reports loads to the service manager."""

    def __init__(self, service: ServiceNotifier):
        self._service = service

    def loads_changed(self) -> None:
        """Report which models are being loaded."""
        self._service.notify_soon()


async def _stop(daemon: Daemon) -> None:
    """Finish the running turns, send a goodbye to all clients, and unload the workers."""
    log.info("daemon.stopping", shutdown_grace_s=daemon.config.shutdown_grace_s)
    await daemon.drain(daemon.config.shutdown_grace_s)
    error = ShuttingDown("the daemon is shutting down")
    for connection in tuple(daemon.server.places.holders):
        connection.send([Kind.GOODBYE, error.to_wire()])
    daemon.sessions.detach_all()
    await daemon.registry.close()
    await daemon.journal.close()
    await daemon.state_journal.close()
    await daemon.media_store.close()
    await daemon.jobs.close()
    await daemon.clock.note()


async def _watch_signals(
    daemon: Daemon,
    signals: AsyncIterator[signal.Signals],
    listener: Listener,
    reload: ConfigReloader,
) -> None:
    """Shut down on the first SIGTERM or SIGINT, exit at once on the second; reload the
    configuration and the models directory on SIGHUP.
    """
    async for number in signals:
        if number is signal.SIGHUP:
            reload.request_reload()
        elif not daemon.stopping.is_set():
            daemon.exit_status = _INTERRUPTED if number is signal.SIGINT else 0
            daemon.stopping.set()
        else:
            log.warning("daemon.stopped_immediately")
            listener.remove()
            os._exit(_HARD_STOP)  # the workers die with this process
