"""A client's record of its turns, and the figures computed from it; pure functions."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CACHED_TOKENS_MAX = 6
"""Most cached tokens of a new prompt, of which the start mark and a few digits may be known."""


@dataclass(frozen=True)
class Stream:
    """One turn of one program, as its client saw it; times are seconds of one clock."""

    requested_s: float
    arrivals_s: tuple[float, ...]
    """The arrival time of each piece of the answer."""
    tokens: int
    tokens_requested: int
    label: str = ""
    """Name of the conversation; all its turns share it."""
    priority: str = "normal"
    waited_s: float = 0.0
    """Time from the request until the prompt's computation began, as the server reports it."""
    input_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens that were not computed."""
    parks: int = 0
    """Number of times the turn was parked."""
    error: str = ""
    sampling_s: float = 0.0
    """Time of sampling its tokens, where it is measured."""
    encode_s: float = 0.0
    """Time of encoding its images, as the server reports it."""
    rss_bytes: float = 0.0
    """Resident memory that its server takes for it, where it is measured."""

    @property
    def lost(self) -> bool:
        """Whether the client did not get all requested tokens."""
        return bool(self.error) or self.tokens != self.tokens_requested

    @property
    def first_s(self) -> float:
        """Arrival time of the first piece."""
        return self.arrivals_s[0]

    @property
    def ended_s(self) -> float:
        """Arrival time of the last piece, or the time of the request if none arrived."""
        return self.arrivals_s[-1] if self.arrivals_s else self.requested_s

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first piece."""
        return self.first_s - self.requested_s

    def gaps(self) -> Iterator[tuple[float, float]]:
        """Yield the arrival times of each two successive pieces."""
        return zip(self.arrivals_s, self.arrivals_s[1:], strict=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def from_dict(fields: dict[str, Any]) -> Stream:
    """Return the stream of an output of `as_dict`."""
    return Stream(**{**fields, "arrivals_s": tuple(fields["arrivals_s"])})


def check_complete(streams: Iterable[Stream]) -> None:
    """Reject a run in which a turn ended early, because its figures would not be comparable."""
    for stream in streams:
        what = stream.error or f"{stream.tokens} tokens, not {stream.tokens_requested}"
        assert not stream.lost, f"{stream.label or 'a stream'}: {what}"


def check_cold(streams: Iterable[Stream]) -> None:
    """Reject a run with a prompt in a cache, because its figures would not be comparable."""
    for stream in streams:
        cached = stream.cached_tokens
        assert cached <= CACHED_TOKENS_MAX, f"{cached} tokens of the prompt came from a cache"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least *share* of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def makespan_s(streams: Sequence[Stream]) -> float:
    """Return the time from the first request to the last piece."""
    return max(s.ended_s for s in streams) - min(s.requested_s for s in streams)


def ttft_median_s(streams: Sequence[Stream]) -> float:
    """Return the median time to the first piece."""
    return statistics.median(s.ttft_s for s in streams)


def gap_worst_s(streams: Iterable[Stream], begin_s: float, end_s: float) -> float:
    """Return the longest gap of any stream that touches the time from *begin_s* to *end_s*."""
    gaps = (gap for s in streams for gap in s.gaps())
    return max((b - a for a, b in gaps if b > begin_s and a < end_s), default=0.0)


def computed_tokens(streams: Iterable[Stream]) -> int:
    """Return the number of computed prompt tokens."""
    return sum(s.input_tokens - s.cached_tokens for s in streams)


def computed_twice(turns: Sequence[Stream]) -> int:
    """Return the number of history tokens that a conversation computed again over its *turns*.

    A turn's history is the previous turn's input and output without the last token, which was
    sampled and not computed.
    """
    pairs = itertools.pairwise(turns)
    known = ((before.input_tokens + before.tokens - 1, turn) for before, turn in pairs)
    return sum(max(0, history - turn.cached_tokens) for history, turn in known)


def by_label(streams: Iterable[Stream]) -> dict[str, list[Stream]]:
    """Return the streams of each label in the order of their requests."""
    found: dict[str, list[Stream]] = {}
    for stream in sorted(streams, key=lambda s: s.requested_s):
        found.setdefault(stream.label, []).append(stream)
    return found
