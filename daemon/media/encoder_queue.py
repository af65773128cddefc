"""The contents that wait for a model's encoder process: their order and their bounds.

Pure: no clock, no process, no event loop. The order is that of texts (`TextOrder`): by class with
ageing, then fair among owners. Requests for the same content in one scope are one job.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ...backends.errors import Busy
from ...backends.media import MediaContent
from ...scheduler.owner import Requester
from ...scheduler.policy.order import TextOrder

FIRST_JOB_S = 0.5
"""The assumed duration of a job, before the first one has ended."""
_WEIGHT_OF_LAST = 0.2


class EncoderBounds(NamedTuple):
    """Bounds on the requests that wait for the process of one model."""

    waiting_max: int = 2048
    waiting_user_max: int = 256
    bytes_user_max: int = 256 << 20


class JobKey(NamedTuple):
    """A content to read, or to encode, for the users in a *scope* of KV states."""

    scope: int
    content: MediaContent
    encodes: bool


class Wish:
    """A request for the result of a job. Subclasses add the way in which it gets the result."""

    def __init__(self, requester: Requester, size_bytes: int):
        self.requester, self.size_bytes = requester, size_bytes


@dataclass(eq=False, slots=True)
class Job:
    """A request of the process, for one or more wishes."""

    key: JobKey
    requester: Requester
    """The requester of the wish that decides its place: the first one of the highest class."""
    wishes: list[Wish] = field(default_factory=list)
    attempts: int = 0
    """The processes that were lost while they worked on it, without evidence against it."""
    is_waiting: bool = True


class EncoderQueue:
    """The jobs of one process, of which it does one at a time. Owned by the event loop."""

    def __init__(self, bounds: EncoderBounds | None = None, *, strict: bool = False):
        self.bounds = bounds or EncoderBounds()
        self._order = TextOrder[Job](strict=strict)
        self._jobs: dict[JobKey, Job] = {}
        self._waiting: Counter[int] = Counter()
        """The wishes by user."""
        self._bytes: Counter[int] = Counter()
        self._job_s = FIRST_JOB_S

    def __len__(self) -> int:
        return self._waiting.total()

    @property
    def has_waiting_job(self) -> bool:
        """Whether a job waits for the process."""
        return len(self._order) > 0

    def check_bounds(self, user: int, count: int, size_bytes: int) -> None:
        """Check that *count* more wishes of a user, for *size_bytes* in total, may wait.

        :raises Busy: too much waits.
        """
        bounds, waiting = self.bounds, self._waiting[user]
        if not waiting:
            return  # one request alone is bounded where it is accepted
        for name, used, most in (
            ("media-waiting-user-max", waiting + count, bounds.waiting_user_max),
            ("media-bytes-waiting-user-max", self._bytes[user] + size_bytes, bounds.bytes_user_max),
            ("media-waiting-max", len(self) + count, bounds.waiting_max),
        ):
            if used > most:
                raise Busy(
                    f"too many images and sounds wait to be read ({name} is {most})",
                    hint="send fewer at a time, or try again after retry_after_s seconds",
                    data={"bound": name, "retry_after_s": round(waiting * self._job_s, 3)},
                )

    def add_wish(self, key: JobKey, wish: Wish) -> Job:
        """Add a wish to the job for *key*, which begins to wait if it is not under way."""
        self._waiting[wish.requester.owner.user] += 1
        self._bytes[wish.requester.owner.user] += wish.size_bytes
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = Job(key, wish.requester, [wish])
            self._order.add_request(wish.requester, job)
        else:
            job.wishes.append(wish)
            self._place(job)
        return job

    def remove_wish(self, job: Job, wish: Wish) -> None:
        """Remove a wish that is no longer needed, and its job if no wish is left."""
        if wish not in job.wishes:
            return
        job.wishes.remove(wish)
        self._forget(wish)
        if job.wishes:
            self._place(job)
        elif job.is_waiting:
            self._order.remove_requests(lambda other: other is job)
            del self._jobs[job.key]

    def next_job(self) -> Job | None:
        """Return the job that the process is to do now, if one waits."""
        requester = self._order.next_requester()
        if requester is None:
            return None
        job = self._order.remove_first(requester)
        job.is_waiting = False
        return job

    def repeat_job(self, job: Job) -> None:
        """Let a job wait again, unless it is no longer needed."""
        if job.wishes:
            job.is_waiting = True
            self._order.add_request(job.requester, job)
        else:
            del self._jobs[job.key]

    def end_job(self, job: Job, seconds: float) -> list[Wish]:
        """Remove a job that took *seconds* of work, unless it was removed; return its wishes."""
        self._job_s += _WEIGHT_OF_LAST * (seconds - self._job_s)
        self._order.count_work(job.requester.owner, seconds)
        return self._remove(job)

    def remove_jobs(self) -> list[Wish]:
        """Remove all jobs; return their wishes."""
        self._order.remove_requests(lambda _: True)
        return [wish for job in list(self._jobs.values()) for wish in self._remove(job)]

    def _remove(self, job: Job) -> list[Wish]:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        wishes, job.wishes = job.wishes, []
        for wish in wishes:
            self._forget(wish)
        return wishes

    def _forget(self, wish: Wish) -> None:
        user = wish.requester.owner.user
        self._waiting[user] -= 1
        self._bytes[user] -= wish.size_bytes
        if not self._waiting[user]:
            del self._waiting[user], self._bytes[user]

    def _place(self, job: Job) -> None:
        """Move a waiting job to the line of the wish that decides its place."""
        requesters = [wish.requester for wish in job.wishes]
        first = max(requesters, key=lambda requester: requester.priority)
        if job.requester in requesters and first.priority <= job.requester.priority:
            return
        job.requester = first
        if job.is_waiting:
            self._order.remove_requests(lambda other: other is job)
            self._order.add_request(first, job)
