"""Work on texts in threads. Each thread has a lane, from which it gets its work in a fair order."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from .. import messages as m
from ..call_thread import CallResult, CallThread
from ..policy.text_order import TextOrder
from ..priority import Requester
from ..recording.recorder import Recorder

Parts = Generator["LaneCall | None", Any, object]
"""The work on a request. It yields a call for a thread, whose result is sent back to it, or None
where other requests may precede the rest.
"""


@dataclass(slots=True)
class LaneWork:
    """The work on a *request*, or for a task, which gets no answer."""

    requester: Requester
    parts: Parts
    request: m.InputRequest | None = None
    call: LaneCall | None = None
    """The call that comes next in a thread."""
    done: bool = False


class Lane:
    """Work that waits for a thread, and the work that is in it. A *recorder* records when the
    thread uses the model, because this use may end the process.
    """

    def __init__(
        self, thread: CallThread, recorder: Recorder | None = None, *, strict: bool = False
    ):
        self.thread, self._recorder = thread, recorder
        self._waiting: TextOrder[LaneWork] = TextOrder(strict=strict)
        self._in_thread: LaneWork | None = None

    @property
    def busy(self) -> bool:
        """Whether work is in the thread, or its result was not taken."""
        return self._in_thread is not None

    def add_work(self, work: LaneWork) -> None:
        """Add work with a call, which is made at once if the thread is idle."""
        self._waiting.add_request(work.requester, work)
        self._begin_next()

    def drop_work(self, is_dropped: Callable[[LaneWork], bool]) -> None:
        """Drop work that waits for the thread."""
        self._waiting.remove_requests(is_dropped)

    def _begin_next(self) -> None:
        requester = None if self.busy else self._waiting.next_requester()
        if requester is not None:
            self._in_thread = work = self._waiting.remove_first(requester)
            assert work.call is not None
            self._record(busy=True)
            self.thread.queue_call(work.call.function)

    def take_result(self, wait_s: float = 0) -> tuple[LaneWork, CallResult] | None:
        """Return the work whose call has ended, and its result; make the next call."""
        work = self._in_thread
        results = self.thread.results(wait_s) if work is not None else []
        if work is None or not results:
            return None
        [result], self._in_thread = results, None
        self._record(busy=False)
        self._waiting.count_work(work.requester.owner, result.seconds)
        self._begin_next()
        return work, result

    def _record(self, *, busy: bool) -> None:
        if self._recorder is not None:
            self._recorder.record_text_thread(busy=busy)


@dataclass(frozen=True, slots=True)
class LaneCall:
    """A function for the thread of a lane, whose result the engine awaits for *wait_s* at most."""

    lane: Lane
    function: Callable[[], Any]
    wait_s: float = 0.0
    charged_s_max: float = 0.0
    """The most time in the lane's thread that counts in the owner's share of the engine's thread.
    """
