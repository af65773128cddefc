"""Inputs that have crashed a model's workers. Their owners may not send them again for an hour.

The same input of another user is computed as before.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from ...backends.errors import InferdError, QuotaExceeded, WorkerCrashed
from ...backends.params import GRAMMAR_FIELDS
from ...scheduler.messages import TaskSpec
from ...scheduler.owner import Priority

QUARANTINE_S = 3600.0
INPUTS_MAX = 32
"""Quarantined inputs per owner; more than an owner can add within `QUARANTINE_S`."""
OWNERS_MAX = 1000
VERDICTS_MAX = 3
"""Verdicts within `QUARANTINE_S` after which the model refuses the owner for `BAN_S`."""
BAN_S = 600.0


class _Owner:
    """The quarantined inputs of one owner."""

    def __init__(self) -> None:
        self.inputs: OrderedDict[bytes, float] = OrderedDict()
        """The time at which the quarantine of each input ends, by its hash."""
        self.verdicts: deque[float] = deque(maxlen=VERDICTS_MAX)
        self.banned_until = 0.0


class Quarantine:
    """Inputs of one model's users. Lives on the daemon's event loop."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._owners: OrderedDict[int, _Owner] = OrderedDict()

    def add_task(self, spec: TaskSpec, *, while_sampling: bool) -> None:
        """Quarantine a task, and its grammar if the worker crashed while sampling for the task."""
        grammar = _grammar(spec) if while_sampling else None
        self._add(spec.owner.user, *(_hash(it) for it in (_task(spec), grammar) if it))

    def add_text(self, owner: int, text: object) -> None:
        """Quarantine a text that crashed the worker while it was tokenized or rendered."""
        self._add(owner, _hash(text))

    def refusal_of_task(self, model: str, spec: TaskSpec) -> InferdError | None:
        """Return the error of a task that may not run, or None if it may."""
        if spec.owner.user not in self._owners:  # nearly always
            return None
        return self._refusal(model, spec.owner.user, _task(spec), _grammar(spec))

    def refusal_of_text(self, model: str, owner: int, text: object) -> InferdError | None:
        """Return the error of a text that may not be tokenized or rendered, or None if it may."""
        return self._refusal(model, owner, text)

    def _add(self, owner: int, *hashes: bytes) -> None:
        now = self._seconds()
        found = self._owners.setdefault(owner, _Owner())
        self._owners.move_to_end(owner)
        while len(self._owners) > OWNERS_MAX:
            self._owners.popitem(last=False)
        for key in hashes:
            found.inputs[key] = now + QUARANTINE_S
            found.inputs.move_to_end(key)
        while len(found.inputs) > INPUTS_MAX:
            found.inputs.popitem(last=False)
        found.verdicts.append(now)
        if len(found.verdicts) == VERDICTS_MAX and now < found.verdicts[0] + QUARANTINE_S:
            found.banned_until = now + BAN_S

    def _refusal(self, model: str, owner: int, *inputs: object) -> InferdError | None:
        found, now = self._owners.get(owner), self._seconds()
        if found is None:
            return None
        if now < found.banned_until:
            return _ban(model, found.banned_until - now)
        if any(now < found.inputs.get(_hash(it), now) for it in inputs if it):
            return quarantine_error(model)
        return None


def quarantine_error(model: str) -> WorkerCrashed:
    """Return the error of an input that has crashed a worker process."""
    return WorkerCrashed(
        f"this input crashes the worker process of {model!r}",
        hint="change the input: unchanged it is refused for an hour; the daemon's log has the cause"
        " of the crash",
        data={"model": model, "cause": "input"},
        retryable=False,
    )


def _ban(model: str, seconds: float) -> QuotaExceeded:
    return QuotaExceeded(
        f"{VERDICTS_MAX} of your inputs have crashed the worker process of {model!r} within an"
        " hour",
        hint="find out what they have in common (a grammar, an adapter, special tokens) before"
        " you try again after retry_after_s seconds",
        data={"model": model, "crashes_max": VERDICTS_MAX, "retry_after_s": seconds},
    )


def _task(spec: TaskSpec) -> TaskSpec:
    """Return the part of a task that determines its computation, whatever its reader and seed."""
    return replace(
        spec,
        id=0,
        sampling=replace(spec.sampling, seed=0),
        priority=Priority.NORMAL,
        pull=False,
        credit=-1,
        queue_timeout_s=0.0,
        total_timeout_s=0.0,
        session="",
        persist=False,
        shared_kv=None,
        watch=False,
        resume_point=None,
        request="",
    )


def _grammar(spec: TaskSpec) -> object:
    sampling = spec.sampling
    if not sampling.has_grammar:
        return None
    return [getattr(sampling, name) for name in GRAMMAR_FIELDS]


def _hash(data: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(data)).digest()
