"""A model's stay in memory that others wait for: who may still enter, and when it is over.

Decisions without a loop or a clock; `turnstile` asks them and acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from ...scheduler import Priority

__all__ = ("AGEING_S_MIN", "LINGER_S", "Stay", "Visit", "present")

AGEING_S_MIN = 10.0
"""A visit that waits rises by a class each time it has waited for a stay, but not sooner."""
LINGER_S = 0.2
"""A model is left alone for so long after a visit: what it was to prepare follows (`compute` after
`set_input`, the next step of a program).
"""

Rank = tuple[int, bool, int, bool, float]
"""What sorts models: class with age, patience, how many wait, whether programs go on, arrival."""

_numbers = count()


def present() -> bool:
    """Tell of a reader that there is nothing it could be away from."""
    return False


class Visit:
    """Somebody who needs a model, from asking for it until he is done with it.

    *absent* tells whether nobody reads what the model says to him: then he does not keep it.
    """

    def __init__(
        self, priority: Priority, since: float, absent: Callable[[], bool] = present
    ) -> None:
        self.priority, self.since, self.absent = priority, since, absent
        self.number = next(_numbers)
        self.goes_on = False
        """It came as soon as another model had answered: most likely a program's next step."""

    def effective(self, now: float, stay_s: float) -> Priority:
        """Return the class with its age."""
        rises = int(max(0.0, now - self.since) / max(stay_s, AGEING_S_MIN))
        return Priority(min(Priority.URGENT, self.priority + rises))

    def key(self, now: float, stay_s: float) -> tuple[int, int]:
        """Return what sorts visits, first come first: (class with age, arrival)."""
        return -self.effective(now, stay_s), self.number


class Stay:
    """One model's visits: those that wait for it and those inside. *stay_s* is how long others may
    be delayed by visits that came after theirs.
    """

    def __init__(self, stay_s: float):
        self.stay_s = stay_s
        self.waiting: list[Visit] = []
        self.inside: list[Visit] = []
        self.slots = 1
        self.began = 0.0
        """When the model was loaded."""
        self.served = False
        """Somebody has been let in since."""
        self.used_at = float("-inf")
        """When somebody was inside last."""

    def begin(self, now: float, slots: int) -> None:
        """Note that the model was loaded."""
        self.began, self.slots, self.served = now, slots, False

    @property
    def wanted(self) -> bool:
        """Tell whether anybody wants the model."""
        return bool(self.waiting) or self.visited

    @property
    def visited(self) -> bool:
        """Tell whether somebody is inside who is not away."""
        return any(not visit.absent() for visit in self.inside)

    @property
    def engaged(self) -> bool:
        """Tell whether somebody is inside, or is to be: whom it was loaded for."""
        return self.visited or (bool(self.waiting) and not self.served)

    def first(self, now: float) -> Visit | None:
        """Return who comes first of those who wait, or, if nobody does, of those inside."""
        return self._first(self.waiting or self.inside, now)

    def _first(self, visits: Sequence[Visit], now: float) -> Visit | None:
        return min(visits, key=lambda visit: visit.key(now, self.stay_s), default=None)

    def rank(self, now: float) -> Rank:
        """Return what sorts models by their visits; those without any come last.

        Of equal class the model comes first that most wait for; of these the one that a program
        has gone on to last. So programs that ask for several models in turns catch up with those
        that wait for the next one, and share the loads from then on. Once the first visit has
        waited for a stay, its arrival alone counts.
        """
        first = self._first((*self.waiting, *self.inside), now)
        if first is None:
            return 0, True, 0, True, float("inf")
        effective, arrival = first.key(now, self.stay_s)
        if now >= first.since + self.stay_s:
            return effective, False, 0, True, arrival
        gone_on = max((v.number for v in self.waiting if v.goes_on), default=None)
        if gone_on is None:
            return effective, True, -len(self.waiting), True, arrival
        return effective, True, -len(self.waiting), False, -gone_on

    def wait(self, visit: Visit, stays: Iterable[Stay]) -> None:
        """Let a visit wait; *stays* are all models'. Where another one was left just before, it
        goes on from there.
        """
        others = (stay for stay in stays if stay is not self)
        visit.goes_on = any(visit.since < stay.used_at + LINGER_S for stay in others)
        self.waiting.append(visit)

    def let_in(self, other: Visit | None, now: float) -> list[Visit]:
        """Let those in who may enter, and return them; *other* waits for the model's memory.

        Who comes before *other* enters. Who comes after it does if its own class is not lower, a
        slot is free, and the stay is not over: so no more is delayed than `stay_s`, and what has a
        slot by then. Whom the model was loaded for enters in any case, or models would come and go
        without having served anybody.
        """
        entered = []
        for visit in sorted(self.waiting, key=lambda visit: visit.key(now, self.stay_s)):
            if other is None or not self.served or self._enters(visit, other, now):
                self.enter(visit)
                entered.append(visit)
        return entered

    def enter(self, visit: Visit) -> None:
        """Let a visit in."""
        if visit in self.waiting:
            self.waiting.remove(visit)
        self.inside.append(visit)
        self.served = True

    def leave(self, visit: Visit, now: float) -> None:
        """End a visit, whether it was let in or not."""
        if visit in self.waiting:
            self.waiting.remove(visit)
        elif visit in self.inside:
            self.inside.remove(visit)
            self.used_at = now

    def _enters(self, visit: Visit, other: Visit, now: float) -> bool:
        if visit.key(now, self.stay_s) < other.key(now, self.stay_s):
            return True
        free = sum(not v.absent() for v in self.inside) < self.slots
        return free and visit.priority >= other.priority and now < self.ends(other)

    def ends(self, other: Visit) -> float:
        """Return when nobody enters any more who comes after *other*."""
        return max(self.began, other.since) + self.stay_s

    def over(self, other: Visit | None, now: float) -> bool:
        """Tell whether the model may leave for *other*, once `let_in` has let nobody in."""
        if self.engaged:
            return False
        if other is None:
            return True
        return now >= min(self.used_at + LINGER_S, self.ends(other))
