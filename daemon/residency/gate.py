"""The turnstile: everybody who needs a model passes it, and waits here while others have memory.

Lives on the daemon's event loop. `look` decides for all models in one step, in which nothing else
happens: who is let in, which loads go on, which models leave for them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import anyio

from ...backends.errors import InferdError, Timeout
from ...scheduler.priority import Priority
from .budget import Room
from .residency import Stay, Visit, present

if TYPE_CHECKING:
    from ..models.model import Model

__all__ = ("Caller", "Turnstile")

LOOK_S = 0.05
"""While a load waits for models that are in use, they are looked at so often."""


class Caller(Visit):
    """A visit on the event loop. *about* is what it is for, by which it can be found again; *turn*
    tells whether it is a turn of that. *on_wait* hears that it has to wait, and may refuse that;
    *on_look* that it waits still.
    """

    def __init__(
        self,
        now: float,
        priority: Priority = Priority.NORMAL,
        *,
        about: Any = None,
        turn: bool = False,
        queue_timeout_s: float = 0.0,
        timeout_s: float = 0.0,
        absent: Callable[[], bool] = present,
        on_wait: Callable[[], None] = lambda: None,
        on_look: Callable[[], None] = lambda: None,
    ):
        super().__init__(priority, now, absent)
        self.about, self.turn = about, turn
        self.on_wait, self.on_look = on_wait, on_look
        self.queue_timeout_s, self.timeout_s = queue_timeout_s, timeout_s
        self.waited = False
        self.entered_at: float | None = None
        """When it was let in to its model."""
        self._error: InferdError | None = None
        self._scope: anyio.CancelScope | None = None
        self._woken: anyio.Event | None = None

    def refuse(self, error: InferdError) -> None:
        """Let the wait end with *error*; one that has ended is not touched."""
        self._error = error
        if self._scope is not None:
            self._scope.cancel()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Wait inside, as long as this visit may.

        :raises InferdError: what it was refused with.
        :raises Timeout: it was too long.
        """
        limits = {"total": self.timeout_s, "queue": self.queue_timeout_s}
        which, limit_s = min(
            ((name, s) for name, s in limits.items() if s),
            key=itemgetter(1),
            default=("total", math.inf),
        )
        with anyio.move_on_after(limit_s) as self._scope:
            yield
        if self._scope.cancelled_caught:
            raise self._error or _timeout(which, limit_s)

    async def woken(self) -> None:
        """Wait until it is woken, or was since it last waited."""
        self._woken = self._woken or anyio.Event()
        await self._woken.wait()
        self._woken = None

    def wake(self) -> None:
        """Let it look again whether it was let in."""
        self._woken = self._woken or anyio.Event()
        self._woken.set()


def _timeout(which: str, limit_s: float) -> Timeout:
    name = "timeout" if which == "total" else f"{which} timeout"
    return Timeout(
        f"the {name} of {limit_s:g} s has passed: the model was not in memory",
        data={"timeout": which},
    )


class Turnstile:
    """Lets visits in to *models*, which share the memory of *room*.

    *start* does work in the daemon's task group.
    """

    def __init__(
        self,
        room: Room,
        models: Callable[[], Iterable[Model]],
        stay_s: float,
        seconds: Callable[[], float],
        start: Callable[..., Any],
    ):
        self.stay_s = stay_s
        self._room, self._models = room, models
        self._seconds, self._start = seconds, start
        self._looking = False

    def stay(self) -> Stay:
        """Return a new model's."""
        return Stay(self.stay_s)

    @property
    def waiting(self) -> list[tuple[Model, Caller]]:
        """Who waits for which model, in order."""
        now = self._seconds()
        found = [(m, v) for m in self._models() for v in m.stay.waiting if isinstance(v, Caller)]
        return sorted(found, key=lambda pair: pair[1].key(now, self.stay_s))

    def refuse(self, error: InferdError, about: Any = None) -> bool:
        """Let those wait no more who are here for *about* (None: all); tell if there was any."""
        found = [v for _, v in self.waiting if about is None or v.about is about]
        for visit in found:
            visit.refuse(error)
        return bool(found)

    @asynccontextmanager
    async def visit(
        self,
        model: Model,
        visit: Caller,
        on_progress: Callable[[float], None] | None = None,
    ) -> AsyncIterator[None]:
        """Wait until *model* is in memory and *visit* may enter; it stays there until the end.

        :raises LoadFailed: it cannot be loaded.
        :raises Timeout: that took too long.
        """
        try:
            if model.loaded is not None and not self._room.loads_wait:
                model.stay.enter(visit)
            else:
                await self._wait(model, visit, on_progress)
            visit.entered_at = self._seconds()
            yield
        finally:
            now = model.used_at = self._seconds()
            model.stay.leave(visit, now)
            if self._room.loads_wait:
                self.look()

    async def _wait(
        self, model: Model, visit: Caller, on_progress: Callable[[float], None] | None
    ) -> None:
        model.stay.wait(visit, [other.stay for other in self._models()])
        if model.loaded is not None:
            self.look()
        if visit not in model.stay.waiting:
            return
        visit.on_wait()
        visit.waited = True
        with visit.limited():
            while visit in model.stay.waiting:
                await model.released()
                await model.ready(on_progress)
                self.look()
                if visit in model.stay.waiting:
                    await visit.woken()

    def left(self, model: Model) -> None:
        """Let those who wait ask for *model* again: its worker is gone."""
        for visit in model.stay.waiting:
            if isinstance(visit, Caller):
                visit.wake()
        self.look()

    def look(self) -> None:
        """Let in who may enter, and give memory to loads that wait for it."""
        now = self._seconds()
        rival, givers = self._room.head(now)
        for model in self._models():
            if model.stay.waiting and model.loaded is not None:
                other = rival if model in givers else None
                for visit in model.stay.let_in(other, now):
                    if isinstance(visit, Caller):
                        visit.wake()
        self._room.look(now)
        if self._room.loads_wait and not self._looking:
            self._looking = True
            self._start(self._keep_looking)

    async def _keep_looking(self) -> None:
        """Look while a load waits: readers go away, and a stay ends, without anybody saying so."""
        try:
            while self._room.loads_wait:
                await anyio.sleep(LOOK_S)
                for _, visit in self.waiting:
                    visit.on_look()
                self.look()
        finally:
            self._looking = False
