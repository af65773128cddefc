"""The requests and streams of events that each caller has, and the tokens that it has used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from ...backends.errors import Busy, QuotaExceeded
from .callers import Caller

READS_MAX = 64
"""Requests of one caller at once that compute nothing."""
STREAMS_MAX = 16
"""Streams of events that one caller has at once."""
_MINUTE_S = 60.0


class RequestKind(Enum):
    """The bound towards which a request counts."""

    COMPUTE = "requests-max"
    READ = "reads-max"
    EVENTS = "streams-max"


@dataclass(slots=True)
class _Bucket:
    """The tokens that a caller had left at the time `at`."""

    tokens: float
    at: float


class Quotas:
    """The use of the gateway by its callers. All methods are synchronous.

    A caller saves up the tokens of one minute at most. A caller with at least one token left may
    send a request that computes. The tokens of the request are deducted afterwards, even if that
    leaves less than none.
    """

    def __init__(self, requests_max: int, streams_max: int = 0):
        self._requests_max, self._streams_max = requests_max, streams_max
        self._counts: dict[RequestKind, Counter[str]] = {kind: Counter() for kind in RequestKind}
        self._buckets: dict[str, _Bucket] = {}

    def begin_request(
        self, caller: Caller, now: float, kind: RequestKind = RequestKind.COMPUTE
    ) -> None:
        """Count a request, until `end_request`.

        :raises Busy: the gateway has too many requests of this kind.
        :raises QuotaExceeded: the caller has too many of them, or has used its tokens.
        """
        self._check_total(kind)
        most = self._bound_of(caller, kind)
        if most and self._counts[kind][caller.name] >= most:
            what = "streams of events" if kind is RequestKind.EVENTS else "requests"
            raise QuotaExceeded(
                f"the caller has {most} {what} at once, its maximum",
                data={"bound": kind.value, kind.value.replace("-", "_"): most},
            )
        if kind is RequestKind.COMPUTE:
            self._check_tokens(caller, now)
        self._counts[kind][caller.name] += 1

    def _check_total(self, kind: RequestKind) -> None:
        events = kind is RequestKind.EVENTS
        kinds = [kind] if events else [RequestKind.COMPUTE, RequestKind.READ]
        most = self._streams_max if events else self._requests_max
        if sum(self._counts[each].total() for each in kinds) >= most:
            name = "streams" if events else "requests"
            raise Busy(
                f"the gateway has {most} {name}, its maximum",
                data={"bound": f"{name}-max", f"{name}_max": most},
            )

    def _check_tokens(self, caller: Caller, now: float) -> None:
        per_minute = caller.tokens_per_minute
        if per_minute:
            bucket = self._refill(caller, now)
            if bucket.tokens < 1:
                wait_s = (1 - bucket.tokens) * _MINUTE_S / per_minute
                raise QuotaExceeded(
                    f"the key has used its {per_minute} tokens per minute",
                    data={
                        "bound": "tokens-per-minute",
                        "tokens_per_minute": per_minute,
                        "retry_after_s": wait_s,
                    },
                )

    def end_request(self, caller: Caller, kind: RequestKind = RequestKind.COMPUTE) -> None:
        """Stop counting a request."""
        counts = self._counts[kind]
        counts[caller.name] -= 1
        if not counts[caller.name]:
            del counts[caller.name]

    def charge_tokens(self, caller: Caller, tokens: int, now: float) -> None:
        """Deduct tokens that a caller has used."""
        if caller.tokens_per_minute:
            self._refill(caller, now).tokens -= tokens

    def _refill(self, caller: Caller, now: float) -> _Bucket:
        most = float(caller.tokens_per_minute)
        bucket = self._buckets.setdefault(caller.name, _Bucket(most, now))
        bucket.tokens = min(most, bucket.tokens + (now - bucket.at) * most / _MINUTE_S)
        bucket.at = now
        return bucket

    def _bound_of(self, caller: Caller, kind: RequestKind) -> int:
        """Return the most requests of a kind that a caller may have at once, or 0 without a bound.
        A caller with a key leaves an eighth of all requests to others.
        """
        if kind is not RequestKind.COMPUTE:
            return STREAMS_MAX if kind is RequestKind.EVENTS else READS_MAX
        if caller.requests_max or not caller.name:
            return caller.requests_max
        return self._requests_max - self._requests_max // 8
