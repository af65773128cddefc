"""The usage that is counted now: turns under way, rows to be written, and sums of days for quotas.

The journal takes the rows in the step in which it takes the changes of sessions, and writes both in
one transaction. So for each stored turn the table has exactly the output that the journal has. The
amounts of a turn under way are counted whenever rows are taken, which needs no write per token.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import anyio

from ...scheduler.messages import count_tokens
from ...scheduler.owner import Owner
from ..turn.turn import Turn
from ..worker_client import ModelSource
from .limits import NO_LIMITS, LimitState, UsageLimits, check_usage, month_of, states_of
from .rows import (
    DAY_HOURS,
    HOUR_S,
    NOTHING,
    OTHER,
    OTHER_USER,
    Amounts,
    DaySum,
    StoredUsage,
    UsageKey,
    UsageRow,
)

USAGE_ROWS_USER_MAX = 256
"""Rows of one user in one hour."""
USAGE_ROWS_HOUR_MAX = 8192
"""Rows of all users in one hour, besides a row `OTHER` of each user."""
USAGE_USERS_HOUR_MAX = 4096
USAGE_HOURS_MAX = 48
"""Hours whose keys are remembered. In an hour that the clock returns to later, the bounds on rows
begin anew.
"""
USAGE_UNWRITTEN_MAX = 65_536
"""Rows that wait to be written, besides those of `OTHER_USER`."""
USAGE_DAYS_MAX = 62
"""Days of a user whose sums are kept in memory: those of this month and of the previous one."""
USAGE_USERS_MAX = 8192
"""Users, and keys of users, whose sums are kept in memory."""
_COMPUTATIONS_MAX = 256
"""The owners, keys and models whose computations are counted apart from the rows."""
PROGRESS_S = 1.0
"""While turns are under way, their usage so far is written after this time."""


class DaySums:
    """The usage of users, and of their keys, on each of the last days."""

    def __init__(self) -> None:
        self._sums: OrderedDict[tuple[int, str], dict[int, DaySum]] = OrderedDict()
        """By user and key; a user's own sums have an empty key."""

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, user: int, key: str, day: int, tokens: int, compute_us: int) -> None:
        """Add usage; a user past `USAGE_USERS_MAX` takes the place of the one idle for longest."""
        for subject in {(user, ""), (user, key)}:
            days = self._sums.setdefault(subject, {})
            days[day] = days.get(day, DaySum()).plus(tokens, compute_us)
            self._sums.move_to_end(subject)
            if len(days) > USAGE_DAYS_MAX:
                del days[min(days)]
        while len(self._sums) > USAGE_USERS_MAX:
            self._sums.popitem(last=False)

    def sum_of(self, user: int, key: str, days: range) -> DaySum:
        """Return the usage of a user with a key, or with all keys if that is empty."""
        found = DaySum()
        for day, one in self._sums.get((user, key), {}).items():
            if day in days:
                found = found.plus(*one)
        return found


class RowKeys:
    """The keys of the rows of the last hours, which bound the number of rows."""

    def __init__(self) -> None:
        self._hours: OrderedDict[int, dict[int, set[tuple[str, str, str]]]] = OrderedDict()

    def bounded(self, key: UsageKey) -> UsageKey:
        """Return the key of the row in which usage counts: its own, or that of a row `OTHER`."""
        users = self._hours.setdefault(key.hour, {})
        if len(self._hours) > USAGE_HOURS_MAX:
            self._hours.popitem(last=False)
        own, columns = users.get(key.user), (key.label, key.key, key.model)
        if own is None:
            if len(users) >= USAGE_USERS_HOUR_MAX:
                return UsageKey(key.hour, OTHER_USER, OTHER, OTHER, OTHER)
            own = users[key.user] = set()
        if columns not in own:
            full = sum(map(len, users.values())) >= USAGE_ROWS_HOUR_MAX
            if full or len(own) >= USAGE_ROWS_USER_MAX - 1:
                return UsageKey(key.hour, key.user, OTHER, OTHER, OTHER)
            own.add(columns)
        return key

    def add_stored(self, key: UsageKey) -> None:
        """Add the key of a row that is in the table."""
        self._hours.setdefault(key.hour, {}).setdefault(key.user, set()).add(key[2:])


class _Counted:
    """A turn under way, and the part of it that is counted."""

    def __init__(self, turn: Turn, model: str):
        self.turn, self.model = turn, model
        self.resumed_tokens = len(turn.tokens)
        """Output that was counted before the turn was resumed, as was its prompt."""
        self.so_far = NOTHING


def amounts_of(turn: Turn, resumed_tokens: int = 0, *, is_refusal: bool = False) -> Amounts:
    """Return the usage of a turn so far, without what was counted before it was resumed.

    A prompt counts from the first token on. Until then only the engine knows how much of it is
    computed; a turn that ends before counts the time for which it had a slot. With *is_refusal*
    the turn has ended and does not count as a request.
    """
    ended, stats = turn.ended_at is not None, turn.stats
    output = len(turn.tokens) if stats is None else max(len(turn.tokens), stats.output_tokens)
    prompt = cached = 0
    if not resumed_tokens and (stats is not None or turn.first_token_at is not None):
        prompt = count_tokens(turn.spec.tokens)
        cached = min(prompt, turn.cached_tokens if stats is None else stats.cached_tokens)
    compute_s = turn.compute_s + turn.encode_s
    if turn.ended_at is not None and stats is None and turn.first_token_at is None:
        compute_s += turn.ended_at - (turn.started_at or turn.ended_at)
    return Amounts(
        requests=int(ended and not is_refusal),
        prompt_tokens=prompt,
        cached_tokens=cached,
        generated_tokens=output - resumed_tokens,
        drafted_tokens=turn.drafted_tokens if stats is None else stats.drafted_tokens,
        compute_us=round(compute_s * 1e6),
    )


class Usage:
    """Counts usage as turns and other computations end. Lives on the daemon's event loop.

    *model_name* returns the name under which a model's usage is shown, *user_name* the name that a
    gateway gave a user. *is_refusal* returns whether a turn's error is a refusal, which its call
    counts. *now* is the machine's clock: after it was set back, usage counts in the earlier hour.
    """

    def __init__(
        self,
        model_name: Callable[[ModelSource], str],
        user_name: Callable[[int], str] = lambda _: "",
        is_refusal: Callable[[Turn], bool] = lambda _: False,
        now: Callable[[], float] = time.time,
    ):
        self.days_max = 90.0
        """Rows are deleted after this number of days, but not before the month has ended."""
        self.has_ended = False
        """Whether a turn has ended that is not in the rows taken so far."""
        self._day_sums = DaySums()
        self._totals: dict[str, Amounts] = {}
        self._computations: dict[tuple[int, Owner, str, str], list[int]] = {}
        """The numbers and microseconds of computations that are not in the rows yet, by hour,
        owner, key and model. To add one to rows and sums takes longer than many computations.
        """
        self._model_name, self._user_name = model_name, user_name
        self._is_refusal, self._now = is_refusal, now
        self._turns: dict[Turn, _Counted] = {}
        self._rows: dict[UsageKey, Amounts] = {}
        """Amounts to be written."""
        self._keys = RowKeys()
        self._restored = False
        self._deleted_at = -1
        self._changed = anyio.Event()

    @property
    def day_sums(self) -> DaySums:
        """The usage of users on each of the last days."""
        self._add_computations()
        return self._day_sums

    @property
    def totals(self) -> dict[str, Amounts]:
        """The amounts of each model since the start. The names of models are bounded."""
        self._add_computations()
        return self._totals

    @property
    def hour(self) -> int:
        return int(self._now() // HOUR_S)

    @property
    def day(self) -> int:
        return self.hour // DAY_HOURS

    @property
    def unwritten(self) -> int:
        """The number of rows that wait to be written."""
        self._add_computations()
        return len(self._rows)

    # Counting.

    def turn_began(self, model: ModelSource, turn: Turn, *, chat: bool) -> None:
        """Note a turn under way."""
        self._turns[turn] = _Counted(turn, self._model_name(model))
        self._changed.set()

    def turn_ended(self, model: ModelSource, turn: Turn) -> None:
        """Count a turn that has ended."""
        counted = self._turns.pop(turn, None)
        if counted is not None:
            self._count_turn(counted)
            self.has_ended = True

    def count_turns(self, user: int | None = None) -> None:
        """Count the turns under way up to now, of all users or of one."""
        for counted in self._turns.values():
            if user in (None, counted.turn.spec.owner.user):
                self._count_turn(counted)

    def _count_turn(self, counted: _Counted) -> None:
        turn = counted.turn
        is_refusal = turn.error is not None and self._is_refusal(turn)
        amounts = amounts_of(turn, counted.resumed_tokens, is_refusal=is_refusal)
        more, counted.so_far = amounts.minus(counted.so_far), amounts
        if more != NOTHING:
            self._add(turn.spec.owner, turn.key, counted.model, more)

    def count_computation(
        self, owner: Owner, key: str, model: ModelSource, seconds: float, number: int = 1
    ) -> None:
        """Count a *number* of computations that are not turns, such as those of tensors, and the
        time of all of them. Their replies do not wait for the write, which can take longer than a
        computation.
        """
        counted = self._computations
        amounts = counted.setdefault((self.hour, owner, key, self._model_name(model)), [0, 0])
        is_new = not amounts[0]
        amounts[0] += number
        amounts[1] += round(seconds * 1e6)
        if len(counted) > _COMPUTATIONS_MAX:
            self._add_computations()
        if is_new:
            self._changed.set()

    def _add_computations(self) -> None:
        counted, self._computations = self._computations, {}
        for (hour, owner, key, model), (requests, compute_us) in counted.items():
            amounts = Amounts(requests=requests, compute_us=compute_us)
            self._add(owner, key, model, amounts, hour)

    def count_refusal(self, owner: Owner, key: str, model: ModelSource | None) -> None:
        """Count a request that was refused; *model* is None if its model is not known."""
        name = "" if model is None else self._model_name(model)
        self._add(owner, key, name, Amounts(refused=1))
        self._changed.set()

    def _add(
        self, owner: Owner, key: str, model: str, amounts: Amounts, hour: int | None = None
    ) -> None:
        hour = self.hour if hour is None else hour
        row = self._keys.bounded(UsageKey(hour, owner.user, owner.label, key, model))
        self._add_row(row, amounts)
        self._totals[model] = self._totals.get(model, NOTHING).plus(amounts)
        tokens, compute_us = amounts.computed_tokens, amounts.compute_us
        if tokens or compute_us:
            self._day_sums.add(owner.user, key, row.hour // DAY_HOURS, tokens, compute_us)

    def _add_row(self, row: UsageKey, amounts: Amounts) -> None:
        if row not in self._rows and len(self._rows) >= USAGE_UNWRITTEN_MAX:
            row = UsageKey(row.hour, OTHER_USER, OTHER, OTHER, OTHER)
        self._rows[row] = self._rows.get(row, NOTHING).plus(amounts)

    # Limits.

    def check_limits(
        self, user: int, limits: UsageLimits, key: str, key_limits: UsageLimits, rule: str
    ) -> None:
        """Check that a user may use more, and so may a gateway's key. The limits of a user are set
        by an access *rule*.

        :raises QuotaExceeded: a limit is reached; the data has the time until its period ends.
        """
        if limits != NO_LIMITS or key_limits != NO_LIMITS:
            self.count_turns(user)
            sum_of, now = self.day_sums.sum_of, self._now()
            check_usage(limits, lambda days: sum_of(user, "", days), now, rule)
            check_usage(key_limits, lambda days: sum_of(user, key, days), now, "")

    def limit_states(
        self, user: int, limits: UsageLimits, key: str, key_limits: UsageLimits
    ) -> list[LimitState]:
        """Return the use of the limits of a user, then of those of a key."""
        self.count_turns(user)
        sum_of, now = self.day_sums.sum_of, self._now()
        return [
            *states_of(limits, lambda days: sum_of(user, "", days), now),
            *states_of(key_limits, lambda days: sum_of(user, key, days), now),
        ]

    # Writing, by the journal.

    async def run(self, write: Callable[[], None]) -> None:
        """Have usage written `PROGRESS_S` after it has changed, until cancelled."""
        while True:
            await self._changed.wait()
            await anyio.sleep(PROGRESS_S)
            if not self._turns:
                self._changed = anyio.Event()
            write()

    def take_rows(self) -> list[UsageRow]:
        """Return the rows to be written, which then count as written."""
        self.count_turns()
        self._add_computations()
        self.has_ended = False
        rows, self._rows = self._rows, {}
        return self._named(rows.items())

    def return_rows(self, rows: Iterable[UsageRow]) -> None:
        """Take back rows that could not be written."""
        for row in rows:
            self._add_row(row.key, row.amounts)
        self._changed.set()

    def unwritten_rows(self) -> list[UsageRow]:
        """Return the rows that wait to be written, without taking them."""
        self._add_computations()
        return self._named(self._rows.items())

    def _named(self, rows: Iterable[tuple[UsageKey, Amounts]]) -> list[UsageRow]:
        return [UsageRow(key, self._user_name(key.user), amounts) for key, amounts in rows]

    def expired_before(self, date: float) -> int | None:
        """Return the hour before which rows are to be deleted, or None if that was done in this
        hour. *date* is that of the journal, which does not leap ahead when the clock does.
        """
        if self._deleted_at == self.hour:
            return None
        self._deleted_at = self.hour
        now = min(self._now(), date)
        return min(int((now - self.days_max * 86_400) // HOUR_S), month_of(now).start * DAY_HOURS)

    # The start.

    @property
    def first_day(self) -> int:
        """The first day whose sums are kept: the beginning of the previous month."""
        return month_of((month_of(self._now()).start - 1) * 86_400.0).start

    def restore(self, stored: StoredUsage) -> None:
        """Add the usage that was in the table when it was first opened."""
        if self._restored:
            return
        self._restored = True
        for key in stored.rows:
            self._keys.add_stored(key)
        for found in stored.days:
            self._day_sums.add(*found)
