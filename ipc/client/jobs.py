"""Jobs of a client: requests that outlive it, submitted, watched and read as one object."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from ...backends.errors import InferdError, NotFound, Timeout
from .. import messages as w
from ..names import Priority
from .caller import AsyncCaller, is_loss
from .results import JobFileInfo, JobInfo

Requests = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""A file with one request in each line, or the requests."""
ENDED = ("completed", "cancelled", "expired", "failed")
"""The states of a job whose requests are no longer computed."""
_PART_BYTES = w.JOB_PART_BYTES_MAX
_RETRY_S = 0.5


def parts_of(requests: Requests) -> Iterator[bytes]:
    """Yield the lines of requests in parts of at most `JOB_PART_BYTES_MAX` bytes."""
    if isinstance(requests, str | os.PathLike):
        with open(requests, "rb") as file:
            yield from iter(lambda: file.read(_PART_BYTES), b"")
        return
    pending = bytearray()
    for request in requests:
        pending += msgspec.json.encode(request) + b"\n"
        while len(pending) >= _PART_BYTES:
            yield bytes(pending[:_PART_BYTES])
            del pending[:_PART_BYTES]
    if pending:
        yield bytes(pending)


class JobResults:
    """The progress of a reader of a job's results, who has some of its files' lines."""

    def __init__(self, client: AsyncCaller, job_id: str, timeout: float | None):
        self._client, self._job_id, self._timeout = client, job_id, timeout
        self._files: list[str] | None = None
        self._offset, self._rest = 0, b""

    async def read_next(self) -> list[dict[str, Any]] | None:
        """Return further results, perhaps none, or None after the last one."""
        if self._files is None:
            job = await AsyncJobs(self._client).get(self._job_id, timeout=self._timeout)
            self._files = [job["output_file"], job["error_file"]]
        if not self._files:
            return None
        params = w.ReadFileParams(file=self._files[0], offset=self._offset)
        try:
            part = await self._client._call("read_file", params, w.ReadFileResult, self._timeout)
        except NotFound:
            part = w.ReadFileResult(data=b"", size=0, growing=False)  # there were no results
        if not part.data:
            del self._files[0]
            self._offset, self._rest = 0, b""
            return []
        self._offset += len(part.data)
        *lines, self._rest = (self._rest + part.data).split(b"\n")
        return [msgspec.json.decode(line) for line in lines]


class AsyncJobs:
    """The jobs of the client's user, `client.jobs`::

        requests = [{"url": "/v1/chat/completions", "body": {"model": "smollm2", "messages": […]}}]
        job = await client.jobs.submit(requests)
        await client.jobs.wait(job["id"])
        async for result in client.jobs.results(job["id"]):
            print(result["custom_id"], result["response"]["body"])

    They go on without the client, and over restarts of the daemon.
    """

    def __init__(self, client: AsyncCaller):
        self._client = client

    async def submit(
        self,
        requests: Requests,
        *,
        endpoint: str = "",
        priority: Priority | None = None,
        expires: float = 0.0,
        metadata: Mapping[str, str] | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> JobInfo:
        """Submit *requests*: the path of a file with one in each line, or the requests themselves.

        A request has a `body`, a `url` (or the job's *endpoint*), and a `custom_id` by which its
        result is found. Its class is *priority*, by default `low`. After *expires* seconds the
        remaining requests are given up; 0: never.
        """
        file = await self.upload(requests, name=name, timeout=timeout)
        try:
            return await self.submit_file(
                file["id"],
                endpoint=endpoint,
                priority=priority,
                expires=expires,
                metadata=metadata,
                timeout=timeout,
            )
        except InferdError:
            await self._client._call(
                "delete_file", w.FileParams(file=file["id"]), w.DeletedResult, timeout
            )
            raise

    async def upload(
        self, requests: Requests, *, name: str = "", timeout: float | None = None
    ) -> JobFileInfo:
        """Upload *requests*, for `submit_file`, and return the file."""
        if not name and isinstance(requests, str | os.PathLike):
            name = os.path.basename(requests)
        params = w.UploadFileParams(name=name[:200])
        parts = iter(parts_of(requests))
        data = next(parts, b"")
        while True:
            following = next(parts, b"")
            params.data, params.end = data, not following
            file = await self.upload_part(params, timeout=timeout)
            if params.end:
                return file
            params.file, params.offset, data = file["id"], file["bytes"], following

    async def upload_part(
        self, params: w.UploadFileParams, *, timeout: float | None = None
    ) -> JobFileInfo:
        """Upload a part of a file, and return the file so far. `delete_file` gives it up."""
        result = await self._client._call("upload_file", params, w.JobFileResult, timeout)
        return cast("JobFileInfo", result.file)

    async def submit_file(
        self,
        file_id: str,
        *,
        job_id: str = "",
        endpoint: str = "",
        priority: Priority | None = None,
        expires: float = 0.0,
        metadata: Mapping[str, str] | None = None,
        models: Iterable[str] | None = None,
        events: bool = False,
        timeout: float | None = None,
    ) -> JobInfo:
        """Submit the requests of an uploaded file; see `submit`. They may use only the *models*, if
        given. With *events*, the results are those of one streamed response.
        """
        params = w.SubmitJobParams(
            file=file_id,
            job=job_id,
            endpoint=endpoint,
            priority=priority or "",
            expires_s=expires,
            metadata=dict(metadata or {}),
            models=None if models is None else list(models),
            events=events,
        )
        result = await self._client._call("submit_job", params, w.JobResult, timeout)
        return cast("JobInfo", result.job)

    async def list(
        self, *, all_users: bool = False, timeout: float | None = None
    ) -> Sequence[JobInfo]:
        """Return the user's jobs, the latest first, or with *all_users* (right `see-all`) all'."""
        result = await self._client._call(
            "jobs", w.JobsParams(all=all_users), w.JobsResult, timeout
        )
        return cast("list[JobInfo]", result.jobs)

    async def get(self, job_id: str, *, timeout: float | None = None) -> JobInfo:
        """Return a job."""
        return await self._get(w.JobsParams(job=job_id), timeout)

    async def _get(self, params: w.JobsParams, timeout: float | None) -> JobInfo:
        result = await self._client._call("jobs", params, w.JobsResult, timeout)
        return cast("JobInfo", result.jobs[0])

    async def wait(
        self,
        job_id: str,
        *,
        on_progress: Callable[[JobInfo], object] | None = None,
        timeout: float | None = None,
    ) -> JobInfo:
        """Wait until a job has ended, by default without a bound, and return it.

        *on_progress* is called with the job at each change. A client with *reconnect* waits on
        while the daemon restarts.

        :raises Timeout: the job has not ended within *timeout* seconds; it goes on.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        params = w.JobsParams(job=job_id)
        while True:
            try:
                job = await self._get(params, None)
            except InferdError as exc:
                if not self._client._reconnects or not is_loss(exc):
                    raise
                await self._client._driver.sleep(_RETRY_S)
                continue
            if on_progress is not None:
                on_progress(job)
            if job["state"] in ENDED:
                return job
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise Timeout(
                    f"the job {job_id!r} has not ended within {timeout:g} s",
                    hint="it goes on; wait for it again",
                    data={"timeout": "client"},
                )
            params.revision = job["revision"]
            params.wait_s = min(remaining_s, w.JOB_WAIT_S_MAX / 2)

    def results(
        self, job_id: str, *, timeout: float | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Return an iterator over the results so far: first those of requests that were answered,
        then of those that failed. Each has `custom_id` and `response`, with `status_code`, `body`.
        """
        return self._results(JobResults(self._client, job_id, timeout))

    async def _results(self, reader: JobResults) -> AsyncIterator[dict[str, Any]]:
        while (results := await reader.read_next()) is not None:
            for result in results:
                yield result

    async def cancel(self, job_id: str, *, timeout: float | None = None) -> JobInfo:
        """Give up the requests of a job that have not ended; its results stay."""
        result = await self._client._call(
            "cancel_job", w.JobParams(job=job_id), w.JobResult, timeout
        )
        return cast("JobInfo", result.job)

    async def delete(self, job_id: str, *, timeout: float | None = None) -> bool:
        """Delete a job with its requests and results; return whether there was one."""
        params = w.JobParams(job=job_id)
        return (await self._client._call("delete_job", params, w.DeletedResult, timeout)).deleted

    async def files(self, *, timeout: float | None = None) -> Sequence[JobFileInfo]:
        """Return the files with requests and results, the latest first."""
        result = await self._client._call("files", w.FilesParams(), w.FilesResult, timeout)
        return cast("list[JobFileInfo]", result.files)

    async def file(self, file_id: str, *, timeout: float | None = None) -> JobFileInfo:
        """Return a file."""
        params = w.FilesParams(file=file_id)
        result = await self._client._call("files", params, w.FilesResult, timeout)
        return cast("JobFileInfo", result.files[0])

    async def read_file(
        self, file_id: str, offset: int = 0, *, wait: float = 0.0, timeout: float | None = None
    ) -> w.ReadFileResult:
        """Return the next part of a file; at its present end, wait for *wait* seconds for more."""
        params = w.ReadFileParams(file=file_id, offset=offset, wait_s=wait)
        return await self._client._call("read_file", params, w.ReadFileResult, timeout)

    async def delete_file(self, file_id: str, *, timeout: float | None = None) -> bool:
        """Delete a file with requests; return whether there was one."""
        params = w.FileParams(file=file_id)
        return (await self._client._call("delete_file", params, w.DeletedResult, timeout)).deleted
