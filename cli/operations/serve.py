"""`inferd serve`: the daemon itself, in the foreground."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import typer

from ..commands import optional_import
from ..options import ConfigFile, ModelsDir, SettingPairs, SocketPath, StateDir, read_settings

DESCRIPTOR_MIN = 3
"""The first descriptor that is neither standard input, output nor error."""

MetricsAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="Address of the metrics: a port, HOST:PORT, a path, or off."
    ),
]
Cores = Annotated[
    str | None, typer.Option(metavar="N", help="CPU cores that all models share; 0: all.")
]
LowestLevel = Annotated[
    str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")
]


def serve(
    config: ConfigFile = None,
    socket: SocketPath = None,
    models_dir: ModelsDir = None,
    state_dir: StateDir = None,
    metrics: MetricsAddress = None,
    cores: Cores = None,
    log_level: LowestLevel = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="auto, json or console.")
    ] = None,
    settings: SettingPairs = None,
    ready_fd: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=DESCRIPTOR_MIN,
            help="Write a newline to this descriptor when the daemon is ready, as s6 and dinit"
            " expect. A daemon whose reader has ended by then stops.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the daemon in the foreground; `inferd start` runs it in the background.

    After SIGTERM or Ctrl-C running turns finish; a second one stops the daemon at once. SIGHUP
    reloads the configuration.
    """
    from ...daemon.config.sources import load_config
    from ...daemon.service.background import ReadinessReport

    flags: dict[str, Any] = {
        "config": config,
        "socket": socket,
        "models_dir": models_dir,
        "state_dir": state_dir,
        "metrics": metrics,
        "cores": cores,
        "log_level": log_level,
        "log_format": log_format,
    }
    read = partial(load_config, flags | read_settings(settings))
    report = ReadinessReport(ready_fd)
    gc.disable()  # collections would take a tenth of the imports' time
    with report.errors_sent():
        configured = read()
        with optional_import("inferd serve needs the engine", "daemon"), _without_rich():
            from ...daemon.app import serve as run_daemon
    gc.freeze()  # otherwise the first collections would walk the 80 000 objects of the imports
    gc.enable()
    raise typer.Exit(run_daemon(configured, read=read, report=report))


@contextmanager
def _without_rich() -> Iterator[None]:
    """Hide rich from structlog, which would import its 8 MB for tracebacks that are not printed."""
    if "rich" in sys.modules:
        yield
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["rich"]
