"""Commands on jobs: jobs, with submit, wait, results, cancel and rm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...backends.errors import InvalidArgument
from .. import completion
from ..client import client_of
from ..monitoring.status_commands import columns_for
from ..nodes import NODE_COLUMN
from ..one_shot import OneShotClient
from ..options import (
    EXIT_REFUSED,
    AllUsers,
    JsonOutput,
    Label,
    PriorityOption,
    SocketPath,
)
from ..output import (
    Columns,
    Fraction,
    fraction_bar,
    note,
    time_text,
    write_json,
    write_json_line,
    write_list,
    write_result,
)

if TYPE_CHECKING:
    from ...ipc.client import JobInfo

RECONNECT_S = 600.0
"""The time for which `wait` waits for a daemon that restarts."""
JOBS: Columns = {
    **NODE_COLUMN,
    "ID": "id",
    "USER": lambda j: j["user"] or j["uid"],
    "LABEL": lambda j: j["label"] or None,
    "STATE": "state",
    "DONE": lambda j: f"{j['completed'] + j['failed']}/{j['requests']}",
    "FAILED": lambda j: j["failed"] or None,
    "PRIORITY": "priority",
    "SUBMITTED": lambda j: time.strftime("%Y-%m-%d %H:%M", time.localtime(j["created_at"])),
}
Id = Annotated[
    str,
    typer.Argument(metavar="ID", help="A job's id.", autocompletion=completion.jobs),
]

jobs = typer.Typer(help="List, submit, wait for, read, cancel and delete jobs.")


@jobs.callback(invoke_without_command=True)
def list_jobs(
    ctx: typer.Context,
    all_users: AllUsers = False,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """List jobs, which are requests that the daemon computes without their client."""
    if ctx.invoked_subcommand is not None:
        return
    with OneShotClient(socket, label=label) as client:
        found = client.jobs(all_users=all_users)
    columns = dict(columns_for(found, JOBS))
    if not all_users:
        columns.pop("USER")
    write_list(as_json, "jobs", found, columns)


@jobs.command()
def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file with one request in each line (JSONL).")
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    endpoint: Annotated[
        str,
        typer.Option(metavar="PATH", help="The path of all requests, as /v1/chat/completions."),
    ] = "",
    priority: PriorityOption = "low",
    expires: Annotated[
        float,
        typer.Option(
            metavar="S", min=0, help="Seconds after which the rest is given up; 0: never."
        ),
    ] = 0.0,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Submit the requests of a file, and print the job's id.

    Each line is an object of OpenAI's Batch API: {"custom_id": …, "url": …, "body": {…}}.
    """
    with client_of(socket, label=label) as client:
        try:
            job = client.jobs.submit(file, endpoint=endpoint, priority=priority, expires=expires)
        except OSError as exc:
            raise InvalidArgument(f"{file} cannot be read: {exc.strerror}", hint="") from None
    if wait:
        note(f"the job {job['id']}, of {job['requests']} requests")
        _wait(socket, label, job["id"], None, as_json)
    else:
        write_result(as_json, {"job": job}, job["id"])


@jobs.command()
def wait(
    job: Id,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Wait for at most this many seconds."),
    ] = None,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Wait until a job has ended, also over restarts of the daemon.

    The exit status is 1 if the job was cancelled, expired or failed, or a request failed.
    """
    _wait(socket, label, job, timeout, as_json)


def _wait(
    socket: Path | None, label: str, job_id: str, timeout: float | None, as_json: bool
) -> None:
    with (
        client_of(socket, label=label, resume_s=RECONNECT_S, reconnect=True) as client,
        fraction_bar("requests", show=not as_json) as report,
    ):
        ended = client.jobs.wait(job_id, on_progress=_progress(report), timeout=timeout)
    write_result(as_json, {"job": ended}, _summary(ended))
    if ended["state"] != "completed" or ended["failed"]:
        raise typer.Exit(EXIT_REFUSED)


def _progress(report: Fraction | None) -> Any:
    def show(job: JobInfo) -> None:
        if report is not None and job["requests"]:
            report((job["completed"] + job["failed"]) / job["requests"])

    return show


def _summary(job: JobInfo) -> str:
    done = f"{job['state']}: {job['completed']} of {job['requests']} requests were answered"
    failed = f", {job['failed']} failed" if job["failed"] else ""
    seconds = (job["ended_at"] or 0) - job["created_at"]
    error = f" ({job['error']})" if job["error"] else ""
    return f"{done}{failed}, in {time_text(max(0.0, seconds))}{error}"


@jobs.command()
def results(
    job: Id,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Print the results of a job so far, each in a line of JSON.

    Those of requests that failed come last. With --json they are one document.
    """
    with client_of(socket, label=label) as client:
        if as_json:
            write_json({"results": list(client.jobs.results(job))})
            return
        for result in client.jobs.results(job):
            write_json_line(result)


@jobs.command()
def cancel(
    job: Id,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Give up the requests of a job that have not ended; its results stay.

    Operators can also cancel and delete the jobs of other users.
    """
    with client_of(socket, label=label) as client:
        ended = client.jobs.cancel(job)
    write_result(as_json, {"job": ended}, _summary(ended))


@jobs.command()
def rm(
    job: Id,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Delete a job with its requests and results; one that has not ended is cancelled."""
    with client_of(socket, label=label) as client:
        deleted = client.jobs.delete(job)
    text = "deleted" if deleted else f"there was no job {job!r}"
    write_result(as_json, {"deleted": deleted}, text)
