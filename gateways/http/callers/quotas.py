"""The requests and tokens that each caller has used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ....backends.errors import Busy, QuotaExceeded
from .caller import Caller

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """The tokens that are left of a minute's, as of a time."""

    tokens: float
    at: float


class Quotas:
    """The use of the gateway by its callers. All methods are synchronous.

    A caller saves up the tokens of one minute at most. A caller with at least one token left may
    send a request; the tokens that it uses beyond the rest are deducted afterwards.
    """

    def __init__(self, requests_max: int):
        self._requests_max = requests_max
        self._requests: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    def begin_request(self, caller: Caller, now: float) -> None:
        """Count a request, until `end_request`.

        :raises Busy: the gateway has too many.
        :raises QuotaExceeded: the caller has, or has used its tokens.
        """
        if self._requests.total() >= self._requests_max:
            raise Busy(
                f"the gateway has {self._requests_max} requests, its maximum",
                data={"bound": "requests-max", "requests_max": self._requests_max},
            )
        if caller.requests_max and self._requests[caller.name] >= caller.requests_max:
            raise QuotaExceeded(
                f"the key has {caller.requests_max} requests, its maximum",
                data={"bound": "requests-max", "requests_max": caller.requests_max},
            )
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
        self._requests[caller.name] += 1

    def end_request(self, caller: Caller) -> None:
        """Count a request no longer."""
        self._requests[caller.name] -= 1
        if not self._requests[caller.name]:
            del self._requests[caller.name]

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
