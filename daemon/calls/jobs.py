"""Calls on jobs: uploads, files, and jobs with their results."""

from __future__ import annotations

from typing import Any

from ...backends.errors import InvalidArgument, NotFound
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ..core import Daemon, key_of
from ..jobs.jobs import DAY_S, FileFacts, Job, no_job
from ..jobs.store import ENDPOINTS, StoredJob, errors_of, output_of
from .arguments import seconds_of


async def upload_file(daemon: Daemon, request: Request) -> w.JobFileResult:
    """Add a part to a file with requests."""
    p: w.UploadFileParams = request.params
    row = await daemon.jobs.upload(
        *(request.owner, request.connection, p.file, p.offset, p.data), name=p.name
    )
    if p.end:
        row = await daemon.jobs.end_of_upload(row.id)
    facts = FileFacts(row.id, row, "input", row.bytes, row.lines, None)
    return w.JobFileResult(file=_describe_file(daemon, facts))


async def files(daemon: Daemon, request: Request) -> w.FilesResult:
    """List the caller's files, or return one."""
    p: w.FilesParams = request.params
    owner, jobs = request.owner, daemon.jobs
    found = [jobs.file(owner, p.file)] if p.file else jobs.files(owner)
    return w.FilesResult(files=[_describe_file(daemon, facts) for facts in found])


def _describe_file(daemon: Daemon, facts: FileFacts) -> w.JobFileInfo:
    row, job = facts.row, facts.job
    days = daemon.jobs.limits.days_max
    since = row.created_at if job is None else job.row.ended_at
    return w.JobFileInfo(
        id=facts.id,
        name="" if isinstance(row, StoredJob) else row.name,
        label=row.owner.label,
        purpose=facts.purpose,
        bytes=facts.bytes,
        lines=facts.lines,
        created_at=row.created_at,
        expires_at=None if since is None else since + days * DAY_S,
        job="" if job is None else job.row.id,
    )


async def read_file(daemon: Daemon, request: Request) -> w.ReadFileResult:
    """Return a part of a file; at its present end, wait for more."""
    p: w.ReadFileParams = request.params
    data, facts = await daemon.jobs.read(request.owner, p.file, p.offset, _wait_of(p.wait_s))
    growing = facts.job is not None and not facts.job.ended
    return w.ReadFileResult(data=data, size=facts.bytes, growing=growing)


def _wait_of(wait_s: float) -> float:
    """Return a wait, which is bounded even if it is not a number."""
    return wait_s if wait_s <= w.JOB_WAIT_S_MAX else w.JOB_WAIT_S_MAX


async def delete_file(daemon: Daemon, request: Request) -> w.DeletedResult:
    """Delete a file with requests."""
    return w.DeletedResult(
        deleted=await daemon.jobs.delete_file(request.owner, request.params.file)
    )


async def submit_job(daemon: Daemon, request: Request) -> w.JobResult:
    """Compute the requests of a file, from now on without their client."""
    p: w.SubmitJobParams = request.params
    daemon.check_open()
    if p.endpoint and p.endpoint not in ENDPOINTS:
        raise InvalidArgument(
            f"there is no endpoint {p.endpoint[:100]!r} for jobs",
            hint=f"use one of {', '.join(ENDPOINTS)}",
            data={"param": "endpoint"},
        )
    if p.events and p.endpoint != "/v1/responses":
        raise InvalidArgument("only a response of /v1/responses has events")
    now, expires_s = daemon.jobs.now(), seconds_of(p.expires_s)
    _, key, limits = key_of(request)
    row = StoredJob(
        id=p.job or daemon.jobs.new_id(),
        owner=request.owner,
        gateway=request.connection.peer.uid,
        on_behalf_of=request.connection.on_behalf_of,
        key=key,
        key_limits={name: limit for name, limit in limits._asdict().items() if limit is not None},
        file=p.file,
        endpoint=p.endpoint,
        priority=p.priority or "low",
        events=p.events,
        models=p.models,
        metadata=p.metadata,
        requests=0,
        created_at=now,
        expires_at=now + expires_s if expires_s else None,
    )
    return w.JobResult(job=_describe_job(daemon, await daemon.jobs.submit(row)))


async def jobs(daemon: Daemon, request: Request) -> w.JobsResult:
    """List the caller's jobs, or with `all` those of all users; or wait for a change of one."""
    p: w.JobsParams = request.params
    if not p.job:
        found = daemon.jobs.jobs(None if p.all else request.owner)
    else:
        job = daemon.jobs.find(p.job)
        if job is None or not (p.all or request.owner.includes(job.row.owner)):
            raise no_job(p.job)
        await daemon.jobs.wait(job, p.revision, _wait_of(p.wait_s))
        if daemon.jobs.find(p.job) is not job:  # it was deleted meanwhile
            raise no_job(p.job)
        found = [job]
    described = [_describe_job(daemon, job) for job in found]
    for info, job in zip(described, found, strict=True):
        if not request.owner.includes(job.row.owner):
            info.metadata = {}
    return w.JobsResult(jobs=described)


def _controlled(daemon: Daemon, request: Request) -> Job:
    """Return the job of a call that cancels or deletes it; operators may those of all users.

    :raises NotFound: there is none that the caller sees.
    """
    job = daemon.jobs.find(request.params.job)
    access = daemon.connections.access
    if job is None or not access.may_control_turns_of(request.connection, job.row.owner):
        raise no_job(request.params.job)
    return job


async def cancel_job(daemon: Daemon, request: Request) -> w.JobResult:
    """Give up the requests of a job that have not ended; its results stay."""
    job = _controlled(daemon, request)
    await daemon.jobs.end(job, "cancelled")
    return w.JobResult(job=_describe_job(daemon, job))


async def delete_job(daemon: Daemon, request: Request) -> w.DeletedResult:
    """Delete a job with its results and requests; one that has not ended is cancelled."""
    try:
        job = _controlled(daemon, request)
    except NotFound:
        return w.DeletedResult(deleted=False)
    await daemon.jobs.delete_job(job)
    return w.DeletedResult(deleted=True)


def _describe_job(daemon: Daemon, job: Job) -> w.JobInfo:
    row: Any = job.row
    names = daemon.connections.access.own_user_names
    return w.JobInfo(
        id=row.id,
        uid=row.owner.user,
        user=names.name_of(row.owner.user),
        label=row.owner.label,
        state=row.state,
        endpoint=row.endpoint,
        priority=row.priority,
        metadata=row.metadata,
        requests=row.requests,
        completed=row.completed,
        failed=row.failed,
        running=0 if job.ended else job.running,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        expires_at=row.expires_at,
        input_file=row.file,
        output_file=output_of(row.id),
        error_file=errors_of(row.id),
        error=row.error,
        revision=job.revision,
    )
