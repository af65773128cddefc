"""The decision how many drafts of each stream the next step verifies.

A draft is a token that a drafter expects next. The step computes it behind the stream's last token,
and it is kept if the sampler then picks the same token. The functions are pure: predicted times
come in as a function, acceptance as the numbers that `Acceptance` has learned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

DRAFT_MAX = 64
"""The most drafts of a stream in a step."""
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, DRAFT_MAX - 1)
"""The numbers of drafts that are tried. Few sizes are enough, and their costs are soon known. With
the token before them, most make up whole blocks of `ModelInfo.rows_block`.
"""
GAIN_MIN = 1.1
"""Drafts are computed if the step then has at least this many times as many tokens per second. Less
is within the error of the prediction.
"""
LOSS_MAX = 0.02
"""A stream without drafts may lose this share of its pace to the drafts of others."""
STREAMS_MAX = 16
"""The most streams that get drafts in a pass of their own; this bounds what is tried."""
POSITIONS = 16
"""Positions with an acceptance of their own; later ones share the last one."""
WEIGHT = 1 / 8
"""Weight of the last token in an acceptance."""
MODEL_PRIOR, MODEL_WEIGHT = 0.8, 1 / 64
"""The acceptance of a draft model before any is known, and the weight of a token in that of all
streams, with which a new stream begins.
"""
REST_MIN = 128
"""Tokens that an answer of unknown length is expected to have left, at least. A longer answer is
expected to become twice as long.
"""
_PRIOR = tuple(1 - 0.6 * 0.87**position for position in range(POSITIONS))
"""The acceptance before any is known. A drafter that was right several times in a row copies a text
or a loop, so it is likely to be right again.
"""


class Acceptance:
    """The probability that the token at each position of a draft is right if all tokens before it
    were, as moving averages. Owned by the engine.
    """

    def __init__(self, rates: Sequence[float] = _PRIOR, weight: float = WEIGHT) -> None:
        self.rates, self._weight = list(rates), weight

    @classmethod
    def of_models(cls) -> Acceptance:
        """Return the acceptance of all streams of a draft model, before any is known."""
        return cls([MODEL_PRIOR] * POSITIONS, MODEL_WEIGHT)

    def note(self, position: int, *, right: bool) -> None:
        """Record whether the token at *position* was right."""
        position = min(position, POSITIONS - 1)
        self.rates[position] += self._weight * (right - self.rates[position])

    def expected(self, position: int, count: int) -> list[float]:
        """Return for each number of drafts, 1 … *count*, how many will be accepted if the first one
        is at *position*.
        """
        rates, last = self.rates, POSITIONS - 1
        chances = accumulate((rates[min(position + n, last)] for n in range(count)), mul)
        return list(accumulate(chances))


class StreamOffer(NamedTuple):
    """A stream of the next step: the *pending* tokens that it computes in any case, the last one at
    *position*, and the tokens that are *expected* to be accepted of 1, 2, … drafts, as many as are
    proposed. Its chunk can have *drafts_max* drafts. Streams of a lower *level* lose their drafts
    first.
    """

    pending: int
    position: int
    drafts_max: int = 0
    expected: Sequence[float] = ()
    level: int = 0
    by_model: bool = False
    """A draft model makes its drafts once their number is planned, which takes time."""
    goes_back: bool = False
    """If a draft is rejected, its slot goes back to before the step, and the pending and accepted
    tokens are computed again.
    """

    def gain(self, drafts: int) -> float:
        """Return how many of that many *drafts* are expected to be accepted. Those beyond the
        proposal are fill, of which none is.
        """
        proposed = min(drafts, len(self.expected))
        return self.expected[proposed - 1] if proposed else 0.0

    def rejection(self, drafts: int) -> float:
        """Return the probability that one of that many *drafts* is rejected."""
        if drafts > len(self.expected):
            return 1.0
        return 1 - self.expected[drafts - 1] + self.gain(drafts - 1)

    def again(self, drafts: int) -> float:
        """Return how many tokens are expected to be computed again after that many *drafts*: with
        the first one rejected the pending ones, with the second one rejected one more, and so on.
        """
        rejected, accepted = self.rejection(drafts), self.gain(drafts)
        # Of all cases, that in which all drafts are accepted computes nothing again.
        return self.pending * rejected + accepted - drafts * (1 - rejected)


class DraftPlan(NamedTuple):
    """The number of drafts of each stream, which may be more than its proposal has, and how many
    times as long the step takes with them.
    """

    counts: list[int]
    slowdown: float = 1.0


def passes_of(lengths: Sequence[int]) -> list[int]:
    """Return the tokens of each pass in which the backend computes chunks of these *lengths*: all
    chunks advance equally far in a pass (`llama_batch_allocr::split_equal`).
    """
    counts = Counter(lengths)
    passes, left, done = list[int](), len(lengths), 0
    for length in sorted(counts):
        passes.append(left * (length - done))
        left, done = left - counts[length], length
    return passes


def _mixed_passes(
    streams: Sequence[int], prompts: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return for each pass its tokens of *streams*, and those of *prompts*."""
    own, others = Counter(streams), Counter(prompts)
    left, left_others, done = len(streams), len(prompts), 0
    found = list[int](), list[int]()
    for length in sorted(own | others):
        found[0].append(left * (length - done))
        found[1].append(left_others * (length - done))
        left, left_others, done = left - own[length], left_others - others[length], length
    return found


class PromptChunks(NamedTuple):
    """The chunks of prompts beside the streams: their *lengths*, the seconds of one of their tokens
    in a pass, and those of a pass that has only tokens of prompts. Beside them no size of a pass is
    tried, since nothing would be learned: it has at most *known_max* tokens of streams.
    """

    lengths: Sequence[int] = ()
    token_s: float = 0.0
    pass_s: float = 0.0
    known_max: int = 0


NO_PROMPTS = PromptChunks()


class StepTimes(NamedTuple):
    """The predicted seconds of the next step. *pass_s* returns those of a pass by its number of
    tokens of streams, to which *position_s* is added for each earlier token that a token attends
    to. *prompts* are computed beside the streams. *draft_s* returns the seconds in which a draft
    model makes drafts, by the number of streams and of drafts for each.
    """

    pass_s: Callable[[int], float]
    position_s: float = 0.0
    prompts: PromptChunks = NO_PROMPTS
    draft_s: Callable[[int, int], float] = lambda streams, drafts: 0.0
    keep_s: float = 0.0
    """The seconds of keeping a slot's state, and those of going back to it."""

    def of_chunks(self, lengths: Sequence[int]) -> float:
        """Return the seconds of chunks of streams with these *lengths*, without those of depth.
        They are infinite if a pass beside prompts has a number of tokens that is not known.
        """
        prompts = self.prompts
        if not prompts.lengths:
            return sum(map(self.pass_s, passes_of(lengths)))
        passes = [*zip(*_mixed_passes(lengths, prompts.lengths), strict=True)]
        if any(own > prompts.known_max for own, _ in passes):
            return math.inf
        return sum(
            (self.pass_s(own) if own else prompts.pass_s) + prompts.token_s * others
            for own, others in passes
        )


class StepBounds(NamedTuple):
    """The bounds of a step with drafts: its *seconds*, and the number of *drafts* in all. It may
    take up to *longer_s* if it then has `GAIN_MIN` times as many tokens per second as the best
    shorter one.
    """

    seconds: float
    drafts: int
    longer_s: float = 0.0

    @property
    def seconds_max(self) -> float:
        """The most seconds that a step may take."""
        return max(self.seconds, self.longer_s)


class _Choice:
    """The best plan so far for *streams*, of those that were considered."""

    def __init__(self, streams: Sequence[StreamOffer], times: StepTimes, bounds: StepBounds):
        self._streams, self._times, self._bounds = streams, times, bounds
        self._lengths = [s.pending for s in streams]
        # Tokens that are computed again are not progress.
        self._tokens = sum(1 if s.goes_back else s.pending for s in streams)
        self.plain = self._lengths == [1] * len(streams)
        """Each stream computes a single token in any case."""
        self._depth_s = times.position_s * sum(s.pending * s.position for s in streams)
        self.before_s = times.of_chunks(self._lengths) + self._depth_s
        """The seconds of the step without drafts."""
        self.best = DraftPlan([0] * len(streams))
        self._rate_best = GAIN_MIN * self._tokens / self.before_s if self.before_s else math.inf
        self._longer: list[tuple[float, float, DraftPlan]] = []
        """Plans whose step takes longer than usual: the seconds, and the tokens per second."""

    def consider(self, chosen: Sequence[int], size: int) -> None:
        """Consider a plan with *size* drafts for each of the *chosen* streams."""
        drafts = [0] * len(self._streams)
        for index in chosen:
            drafts[index] = size
        seconds = self._seconds_of(chosen, drafts, size)
        if seconds > self._bounds.seconds_max:
            return
        gains = [s.gain(n) for s, n in zip(self._streams, drafts, strict=True)]
        slowdown, rate = seconds / self.before_s, (self._tokens + sum(gains)) / seconds
        if rate <= self._rate_best or self._delays(gains, slowdown):
            return
        plan = DraftPlan(drafts, slowdown)
        if seconds > self._bounds.seconds:
            self._longer.append((seconds, rate, plan))
        else:
            self.best, self._rate_best = plan, rate

    def _seconds_of(self, chosen: Sequence[int], drafts: Sequence[int], size: int) -> float:
        """Return the seconds of a step with these *drafts*, *size* for each *chosen* stream."""
        streams, times, count = self._streams, self._times, len(self._streams)
        more_s = times.position_s * size * sum(streams[i].position for i in chosen)
        if self.plain and len(chosen) == count and not times.prompts.lengths:
            seconds = times.pass_s(count * (1 + size))
        else:
            longer = [n + more for n, more in zip(self._lengths, drafts, strict=True)]
            seconds = times.of_chunks(longer)
        seconds += self._depth_s + more_s
        if any(streams[i].goes_back for i in chosen):
            seconds += self._again_s(chosen, size, seconds)
        if by_model := sum(streams[i].by_model for i in chosen):
            seconds += times.draft_s(by_model, size)
        return seconds

    def _again_s(self, chosen: Sequence[int], size: int, seconds: float) -> float:
        """Return the expected time of keeping states, going back to them and computing tokens
        again, after a step of *seconds* with *size* drafts for each *chosen* stream.
        """
        token_s = max(0.0, seconds - self.before_s) / (size * len(chosen))
        streams = [s for s in map(self._streams.__getitem__, chosen) if s.goes_back]
        kept = sum(1 + s.rejection(size) for s in streams)
        return self._times.keep_s * kept + token_s * sum(s.again(size) for s in streams)

    def _delays(self, gains: Sequence[float], slowdown: float) -> bool:
        """Return whether somebody pays for drafts that gain as many tokens, in a step that takes
        *slowdown* times as long: a stream, or with prompts all tokens together.
        """
        prompts = self._times.prompts.lengths
        if slowdown > (1 + LOSS_MAX) * (1 + (0.0 if prompts else min(gains))):
            return True
        tokens = self._tokens + sum(prompts)
        return len(prompts) > 0 and tokens + sum(gains) <= tokens * slowdown

    def take_longer(self) -> None:
        """Take a plan whose step takes longer than usual if that pays, the shortest one first."""
        for _, rate, plan in sorted(self._longer, key=lambda each: each[0]):
            if rate > self._rate_best * (GAIN_MIN if any(self.best.counts) else 1.0):
                self.best, self._rate_best = plan, rate


def plan_drafts(streams: Sequence[StreamOffer], times: StepTimes, bounds: StepBounds) -> DraftPlan:
    """Return the number of drafts of each of *streams*.

    It is the same for all that have some, because chunks of different lengths are computed in
    several passes. Either all chunks get this number, filled up where less is proposed, and the
    step is one pass; or the streams of the highest levels get it, in a pass of their own.

    The drafts are those with which the step computes most tokens of streams per second, if they are
    `GAIN_MIN` times as many as without drafts. Nobody pays for them: no stream falls below its pace
    without drafts, except for `LOSS_MAX`, nor do prompts, and all tokens together do not become
    fewer per second.
    """
    choice = _Choice(streams, times, bounds)
    able = [i for i, s in enumerate(streams) if s.expected and s.expected[-1] > GAIN_MIN - 1]
    if able and bounds.drafts and 0 < choice.before_s <= bounds.seconds_max:
        able.sort(key=lambda i: (-streams[i].level, -streams[i].expected[-1]))
        # Mostly a second pass alone takes longer than that, whatever its size.
        second_s = choice.before_s + times.pass_s(1)
        apart = second_s <= (1 + LOSS_MAX) * choice.before_s
        apart = apart or not choice.plain or bool(times.prompts.lengths)
        for chosen, size in _tried(streams, able, bounds.drafts, plain=choice.plain, apart=apart):
            choice.consider(chosen, size)
        choice.take_longer()
    return choice.best


def _tried(
    streams: Sequence[StreamOffer],
    able: Sequence[int],
    drafts_max: int,
    *,
    plain: bool,
    apart: bool,
) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the streams that get drafts, and the number of drafts of each, for the plans that are
    tried: all *streams*, or with *apart* the first ones of those that are *able*.
    """
    together = min(s.drafts_max for s in streams) if plain else 0
    longest = max(len(streams[i].expected) for i in able)
    for size in SIZES:
        if size > longest or size > drafts_max:
            return
        if size <= together and size * len(streams) <= drafts_max:
            yield range(len(streams)), size
        if apart:
            proposed = [i for i in able if len(streams[i].expected) >= size]
            for most in range(1, min(len(proposed), STREAMS_MAX, drafts_max // size) + 1):
                yield proposed[:most], size


def saving_s(streams: Sequence[StreamOffer], plan: DraftPlan, index: int, step_s: float) -> float:
    """Return the seconds that *plan* saves a stream for each of its tokens, where a step without
    drafts takes *step_s*; 0 if it has no drafts.
    """
    drafts = plan.counts[index]
    if not drafts:
        return 0.0
    return max(0.0, step_s * (1 - plan.slowdown / (1 + streams[index].gain(drafts))))


def pays_to_catch_up(
    lag_s: float, saved_s: float, generated: int, tokens_left: int, account_s: float, trial_s: float
) -> bool:
    """Return whether a draft model is to compute, in *lag_s*, the tokens of a stream that it has
    not computed.

    Drafts are expected to save *saved_s* for each token. An answer ends after at most *tokens_left*
    more tokens, and probably with fewer, by how many it has *generated*. If that does not pay, the
    acceptance may still be better than known: it is tried again, in *trial_s*, once the stream's
    account has the time for both.
    """
    rest = min(tokens_left, max(generated, REST_MIN))
    return lag_s < saved_s * rest or account_s >= lag_s + trial_s
