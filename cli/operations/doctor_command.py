"""`inferd doctor`: problems of this machine, and their remedies."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...daemon.printable import escape_controls
from ..options import EXIT_REFUSED, ConfigFile, JsonOutput, SocketPath
from ..output import has_colors, note, write, write_json, write_unchanged

if TYPE_CHECKING:
    from ...daemon.doctor.finding import Finding

STATUS_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a file for a bug report; it has no text of users.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFile = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Check the machine, the build, the configuration, permissions and memory.

    It prints its findings and their remedies. It needs no daemon. The exit status is 1 if a finding
    prevents a daemon from working.
    """
    from ...daemon.doctor.examination import examine
    from ...daemon.doctor.finding import worst
    from ...daemon.doctor.report import report as report_of
    from ...daemon.doctor.report import write_new

    examination = examine(socket, config)
    if report is not None:
        write_new(report, report_of(examination, datetime.datetime.now().astimezone()))
    status = worst(examination.findings)
    if as_json:
        write_json(
            {"status": status, "socket": str(examination.socket), "findings": examination.findings}
        )
    else:
        _show(examination.findings)
    if report is not None:
        note(
            f"wrote {report} for a bug report: these findings, versions, configuration and metrics"
        )
    if status == "fail":
        raise typer.Exit(EXIT_REFUSED)


def _show(findings: list[Finding]) -> None:
    from ...daemon.doctor.report import text_of

    for finding in findings:
        text = escape_controls(text_of([finding]))
        if has_colors(sys.stdout):
            status = finding.status
            text = typer.style(status, fg=STATUS_COLORS[status]) + text.removeprefix(status)
        write_unchanged(f"{text}\n")
    count = {status: sum(f.status == status for f in findings) for status in STATUS_COLORS}
    warnings = f"{count['warn']} warning{'' if count['warn'] == 1 else 's'}"
    write(f"{count['ok']} ok, {warnings}, {count['fail']} failed")
