"""Messages of jobs: requests that outlive their client, the files with these requests, and the
files with their results.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from .base import Map
from .results import JobFileInfo, JobInfo

JOB_PART_BYTES_MAX = 512 << 10
"""Bytes of a file in one call."""
JOB_WAIT_S_MAX = 60.0
"""The longest wait of one call for a job."""
_Wait = Annotated[float, Meta(ge=0, le=JOB_WAIT_S_MAX)]
_Name = Annotated[str, Meta(max_length=200)]
_Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class UploadFileParams(Map):
    """`upload_file`: a part of a new file with one request in each line."""

    file: str = ""
    """The file's id, which the first part's result has; empty: a new file."""
    offset: Annotated[int, Meta(ge=0)] = 0
    """Bytes of the parts before this one."""
    data: Annotated[bytes, Meta(max_length=JOB_PART_BYTES_MAX)] = b""
    """The part, of at most 524288 bytes."""
    name: _Name = ""
    """The file's name, for lists; that of the first part counts."""
    end: bool = False
    """Whether this is the last part. Before it, the file ends with the connection."""


class JobFileResult(Map):
    """One file."""

    file: Annotated[Any, JobFileInfo]
    """The file."""


class FilesParams(Map):
    """`files`: the caller's files, or only one."""

    file: str = ""
    """Only this file, else `NotFound`."""


class FilesResult(Map):
    """Files, the latest first."""

    files: list[Annotated[Any, JobFileInfo]]
    """One file each."""


class ReadFileParams(Map):
    """`read_file`: a part of a file; at its present end, wait for more."""

    file: str
    """The file's id."""
    offset: Annotated[int, Meta(ge=0)] = 0
    """The first byte to read."""
    wait_s: _Wait = 0.0
    """How long to wait for data, if a job still writes the file; at most 60."""


class ReadFileResult(Map):
    """A part of a file, of at most 512 KiB."""

    data: bytes
    """The part; empty: there is none after the offset."""
    size: int
    """The file's present size."""
    growing: bool
    """Whether a job still writes it."""


class FileParams(Map):
    """A call on one file."""

    file: str
    """The file's id."""


class DeletedResult(Map):
    """Whether there was a file or a job to delete."""

    deleted: bool
    """Whether there was one."""


class SubmitJobParams(Map):
    """`submit_job`: compute the requests of a file, from now on without their client."""

    file: str
    """The file with the requests, wholly uploaded."""
    job: Annotated[str, Meta(max_length=64)] = ""
    """The id of the new job: letters, digits, `_` and `-`; empty: one is made."""
    endpoint: str = ""
    """The path of all requests, such as `/v1/chat/completions`; empty: each line has its own
    `url`.
    """
    priority: str = ""
    """The class of requests that name none, and the highest that they may name; empty: `low`."""
    expires_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds after which requests that have not ended are given up; 0: never."""
    metadata: _Metadata = {}
    """Up to 16 texts of the caller, which lists show."""
    models: Annotated[list[str], Meta(max_length=1000)] | None = None
    """The models that the requests may use; nil: all that the user may use."""
    events: bool = False
    """Whether the results are the events of one streamed response, each in a line, as they
    arise. The file then has one request, of `/v1/responses`.
    """


class JobResult(Map):
    """One job."""

    job: Annotated[Any, JobInfo]
    """The job."""


class JobsParams(Map):
    """`jobs`: the caller's jobs, or only one, whose next change the call can wait for."""

    job: str = ""
    """Only this job, else `NotFound`."""
    all: bool = False
    """The jobs of all users: requires the right [*see-all*](#access-rights), else
    `PermissionDenied`.
    """
    revision: Annotated[int, Meta(ge=0)] = 0
    """With `job`: wait until its `revision` is another one."""
    wait_s: _Wait = 0.0
    """With `job`: how long to wait; at most 60."""


class JobsResult(Map):
    """Jobs, the latest first."""

    jobs: list[Annotated[Any, JobInfo]]
    """One job each."""


class JobParams(Map):
    """A call on one job."""

    job: str
    """The job's id."""
