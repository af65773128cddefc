"""The duration of a step: a linear model of its work, learned while the engine runs."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

DRIFT = 0.01
"""Random walk of each coefficient per step, as a share of it. So old steps are forgotten."""
NOISE = 0.1
"""Standard deviation of a step's time, as a share of it."""
DEVIATIONS_MAX = 3.0
"""A larger error is clipped to this many deviations, because a single outlier is not a trend."""
SECONDS_MIN = 1e-6
"""The least duration of a step, for machines with a coarse clock."""
TREND_STEPS = 3
"""This many outliers in a row are a trend, caused by a change of the machine."""

LOGITS_GAIN = 0.2
"""Weight of the last step in the time of a token's logits."""
DECODE_GAIN = 0.1
"""Weight of the last step in the time of a decoding step."""
TRIED_TOKENS, UNKNOWN_SHARE = 2, 0.6
"""Tokens more than in a known step that are tried as if they cost as little as those of a prompt,
and the cost of further ones as a share of a step of one token: that of a CPU. So the first steps
with drafts are short.
"""
STALE_STEPS = 4096
"""After this many decoding steps without one of a size, its time is forgotten."""
KEPT_STATES = 8
"""The time of keeping a state is a mean of about this many."""
LOST_FACTOR = 100.0
"""If such a trend is slower by this factor, the coefficients begin anew. Otherwise they would grow
too slowly, because their own size bounds their uncertainty.
"""

_Three = tuple[float, float, float]
_Six = tuple[float, float, float, float, float, float]


class KeepTime:
    """The CPU seconds of keeping the state of a slot, for a step that may have to go back to it.
    They do not depend on other processes, and are not learned again while no state is kept.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._learned = 0

    def learn(self, seconds: float, slots: int) -> None:
        """Add the *seconds* in which the states of *slots* were kept."""
        self._learned += 1
        if self._learned > 1:  # the first time, the memory is new
            self.seconds += (seconds / slots - self.seconds) / min(self._learned - 1, KEPT_STATES)


class StepLoad(msgspec.Struct, frozen=True):
    """The work in a step.

    *ubatches* counts the different lengths of chunks. The backend runs the model once for each,
    because all sequences of a ubatch advance equally far. *depth* sums the positions of the tokens,
    that is, how many earlier tokens each attends to. *logits* counts the tokens with logits, except
    the last one of each chunk.
    """

    ubatches: int
    tokens: int
    depth: int
    logits: int = 0
    decodes: bool = False
    """Whether each chunk has one token."""
    passes: tuple[int, ...] = ()
    """In a step with drafts, the tokens of each pass (`draft_plan.passes_of`)."""
    has_prompts: bool = False
    """Whether there are chunks of prompts in a step with drafts."""

    @classmethod
    def of_chunks(cls, chunks: Sequence[tuple[int, int]], logits: int = 0) -> StepLoad:
        """Return the load of chunks, each (position, count), with *logits* more than one each."""
        tokens = depth = 0
        lengths = set()
        for position, count in chunks:  # one loop: plans of prompts try many loads
            lengths.add(count)
            tokens += count
            depth += count * position + count * (count - 1) // 2
        return cls(len(lengths), tokens, depth, logits, lengths == {1})


class CostCoefficients(NamedTuple):
    """The learned seconds of a ubatch, a token and a position, and the shortest time of a token."""

    ubatch_s: float
    token_s: float
    position_s: float
    token_s_least: float


class StepCost:
    """Predicts the seconds of a step with the number of threads in use. *rows_block* is that of
    `ModelInfo`.
    """

    def __init__(self, rows_block: int = 1) -> None:
        self._rows_block = rows_block
        self.steps = 0
        self._cost = LinearCost()
        self._token_s_least = math.inf
        """The shortest time of a token so far."""
        self._logits_s = 0.0
        """The time that a token takes longer if it has logits that are read."""
        self._decoding = DecodeTimes(rows_block)
        self._threads = 0
        self._by_threads: dict[int, LinearCost] = {}
        """The costs with other numbers of threads."""

    @classmethod
    def from_coefficients(cls, known: CostCoefficients) -> StepCost:
        """Return costs as they were learned elsewhere."""
        cost = cls()
        *coefficients, token_s_least = known
        cost.steps, cost._cost = 1, LinearCost(*coefficients)
        cost._token_s_least = token_s_least
        return cost

    def coefficients(self) -> CostCoefficients | None:
        """Return what was learned so far; None if nothing was."""
        if not self.steps:
            return None
        return CostCoefficients(*self._cost.coefficients, self._token_s_least)

    @property
    def pass_s(self) -> float:
        """The seconds of a pass without tokens; 0.0 while nothing is known."""
        return self._cost.coefficients[0]

    @property
    def known(self) -> bool:
        """Whether a step was learned yet."""
        return self.steps > 0

    def predict(self, load: StepLoad) -> float:
        """Return the seconds that a step of *load* will take; 0.0 while nothing is known.

        The shortest time of a token so far is a lower bound: on a busy machine the coefficients can
        make prompts look free, and a step would compute a whole one.
        """
        if not self.steps:
            return 0.0
        seconds = max(self._cost.seconds(load), self._token_s_least * load.tokens)
        return seconds + self._logits_s * load.logits

    def logits_as_tokens(self, logits: int) -> int:
        """Return how many tokens could be computed in the time that *logits* take."""
        return self.seconds_as_tokens(logits * self._logits_s)

    def seconds_as_tokens(self, seconds: float) -> int:
        """Return how many tokens could be computed in that many *seconds*."""
        token_s = self.predict(StepLoad(0, 1, 0)) if seconds else 0.0
        return round(seconds / token_s) if token_s else 0

    def fast_size(self, count: int, most: int) -> int:
        """Return a size of a chunk near *count*, at most *most*, with which the time of a token is
        short: whole blocks and groups of a quarter of them. Where the next block is nearly full, to
        fill it takes no more time.
        """
        block = self._rows_block
        rest = count % block
        if not rest:
            return count
        if rest >= _paid_of(block) and count - rest + block <= most:
            return count - rest + block
        return (count - rest % (block // 4)) or count

    def recompute_s(self, tokens: int) -> float:
        """Return the seconds that it would take to compute the first *tokens* of a prompt again."""
        return self.predict(StepLoad.of_chunks([(0, tokens)]))

    def alone_s(self, load: StepLoad, whole: StepLoad, seconds: float) -> float:
        """Return how long *load*, a part of a step of the *whole* load that took *seconds*, would
        have taken alone. Before this is known for tokens of decoding tasks, each token counts as an
        equal part, which is the least.
        """
        if not load.decodes:
            alone_s = seconds * self.predict(load) / max(self.predict(whole), SECONDS_MIN)
        else:
            known = self._decoding.seconds(load.tokens)
            if known is None:
                return seconds * load.tokens / whole.tokens
            alone_s = known + self._cost.coefficients[2] * load.depth
        return min(seconds, alone_s)

    def decode_s(self, tokens: int) -> float:
        """Return the seconds of a step of *tokens* that only decodes, without those of depth; 0.0
        while nothing is known.
        """
        known = self._decoding.seconds(tokens)
        return self.predict(StepLoad(1, tokens, 0)) if known is None else known

    def logits_pass_s(self, tokens: int) -> float:
        """Return the seconds of a pass of *tokens* that all have logits, without those of depth. It
        hardly matters whether they are of one sequence or of several. Sizes that were not seen are
        estimated from the others (`DecodeTimes.interpolate`), low enough that some larger steps are
        tried. The result is 0.0 before the first step that decodes.
        """
        if not self._decoding.known:
            return 0.0
        known = self._decoding.interpolate(tokens, self._cost.coefficients[1])
        return self.predict(StepLoad(1, tokens, 0)) if known is None else known

    @property
    def logits_pass_known(self) -> int:
        """The most tokens of a pass that decodes, of which the time is known; 0 if none is."""
        return self._decoding.size_max

    @property
    def token_s(self) -> float:
        """The seconds of a token of a prompt, without those of depth."""
        return self._cost.coefficients[1]

    @property
    def position_s(self) -> float:
        """The seconds that each earlier token adds to a token that attends to it."""
        return self._cost.coefficients[2]

    def use_threads(self, threads: int) -> None:
        """Predict steps with this many *threads* from now on, by the costs learned for this number.
        If there are none, the present costs continue, scaled up for fewer threads. They are not
        scaled down for more threads, which may not be faster.
        """
        before, self._threads = self._threads, threads
        if threads == before or not before or not self.known:
            return
        self._by_threads[before] = self._cost
        self._decoding = DecodeTimes(self._rows_block)
        learned = self._by_threads.pop(threads, None)
        self._cost = learned or self._cost.scaled(max(1.0, before / threads))

    def learn_step(self, load: StepLoad, seconds: float) -> None:
        """Update the cost by a step of *load* that took *seconds*. A step with logits, apart from
        the first step, does not change the costs of the others. Neither does one with drafts, from
        which nothing is learned if it has prompts, too.
        """
        self.steps += 1
        seconds = max(seconds, SECONDS_MIN)
        if load.passes and load.has_prompts:
            return  # the costs of tokens with and without logits are not told apart
        if load.passes:
            self._decoding.learn_passes(load.passes, seconds - self.position_s * load.depth)
            return
        if load.logits and self.steps > 1:
            self._learn_logits(load, seconds)
            return
        self._token_s_least = min(self._token_s_least, seconds / max(load.tokens, 1))
        if self.steps == 1:
            self._cost.init_from_step(load, seconds)
        else:
            self._cost.learn(load, seconds)
        if load.decodes:
            self._decoding.learn(load.tokens, seconds - self._cost.coefficients[2] * load.depth)

    def _learn_logits(self, load: StepLoad, seconds: float) -> None:
        """Update the time of a token's logits. An outlier, such as a pause of the process, counts
        as little more than the time so far.
        """
        without = self.predict(msgspec.structs.replace(load, logits=0))
        found = max(0.0, seconds - without) / load.logits
        found = min(found, 2 * self._logits_s + without / load.tokens)
        self._logits_s += LOGITS_GAIN * (found - self._logits_s)


def _paid_of(block: int) -> int:
    """Return how many tokens of a block, computed in groups, take as long as all at once."""
    return block - block // 4


class DecodeTimes:
    """The seconds of steps that only decode, by the number of their tokens, without the cost of
    depth. On CPUs a few more of these tokens take much longer than as many tokens of a prompt:
    with SmolLM2-135M on two cores a step of 4 takes 29 ms, one of 1 takes 11 ms, and a token of a
    prompt 1 ms. So one linear model does not fit both.
    """

    def __init__(self, rows_block: int = 1) -> None:
        self._rows_block = rows_block
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []
        """The known numbers of tokens, ascending."""
        self._learned_at: dict[int, int] = {}
        self._steps = 0

    @property
    def known(self) -> bool:
        """Whether there was a step yet."""
        return bool(self._sizes)

    @property
    def size_max(self) -> int:
        """The largest known number of tokens; 0 if none is known."""
        return self._sizes[-1] if self._sizes else 0

    def seconds(self, tokens: int) -> float | None:
        """Return the seconds of a step of that many tokens; None if there was none yet."""
        return self._seconds.get(tokens)

    def interpolate(self, tokens: int, token_s: float) -> float | None:
        """Return the seconds of a step of *tokens*, between those of the nearest known sizes, or
        None if no smaller size is known. Beyond the largest one, a token costs as much as on
        average up to there, and the last ones of a block nothing. If a single size is known,
        `TRIED_TOKENS` more cost *token_s* each, and those behind them `UNKNOWN_SHARE` of the
        smallest step.
        """
        known = self._seconds.get(tokens)
        if known is not None:
            return known
        above = bisect_left(self._sizes, tokens)
        if not above:
            return None
        first, low = self._sizes[0], self._sizes[above - 1]
        more = self._paid(tokens) - self._paid(low)
        if above < len(self._sizes):
            high = self._sizes[above]
            more = tokens - low
            token_s = (self._seconds[high] - self._seconds[low]) / (high - low)
        elif first < low:
            risen = self._seconds[low] - self._seconds[first]
            risen /= max(1, self._paid(low) - self._paid(first))
            token_s = max(token_s, risen)
        elif more > TRIED_TOKENS:
            more_s = UNKNOWN_SHARE * self._seconds[low] / low * (more - TRIED_TOKENS)
            return self._seconds[low] + token_s * TRIED_TOKENS + more_s
        return self._seconds[low] + token_s * more

    def _paid(self, tokens: int) -> int:
        """Return the tokens that a pass of *tokens* pays for: of each block all but the last."""
        block = self._rows_block
        return tokens - tokens // block * (block - _paid_of(block))

    def learn(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        self._steps += 1
        before = self._seconds.get(tokens)
        if before is None:
            insort(self._sizes, tokens)
            before = seconds
        self._seconds[tokens] = before + DECODE_GAIN * (seconds - before)
        self._learned_at[tokens] = self._steps
        if not self._steps % STALE_STEPS:
            self._forget_stale()

    def learn_passes(self, passes: Sequence[int], seconds: float) -> None:
        """Add a step of several passes, if the times of all but the last one are known."""
        known = [self._seconds.get(tokens) for tokens in passes[:-1]]
        rest = seconds - sum(time for time in known if time is not None)
        if rest > 0 and None not in known:
            self.learn(passes[-1], rest)

    def _forget_stale(self) -> None:
        """Forget sizes that were not seen for long: the first step of a size may have been slow for
        another reason, and a size that looks slow is not tried again.
        """
        for tokens, at in list(self._learned_at.items()):
            if at <= self._steps - STALE_STEPS:
                self._sizes.remove(tokens)
                del self._seconds[tokens], self._learned_at[tokens]


class LinearCost:
    """The seconds a·ubatches + b·tokens + c·depth.

    The coefficients are the state of a Kalman filter whose process noise is a random walk. Plain
    recursive least squares with forgetting fails here: after hours of one kind of step it would
    forget the cost of the other kinds (covariance wind-up). The filter bounds a coefficient's
    uncertainty by its size.
    """

    def __init__(self, a: float = 0.0, b: float = 0.0, c: float = 0.0) -> None:
        self._theta: _Three = (a, b, c)
        self._variance: _Six
        """Covariances aa, ab, ac, bb, bc, cc; loops would take 40 instead of 12 µs a step."""
        self._make_uncertain()
        self._outliers = 0

    @property
    def coefficients(self) -> _Three:
        """The seconds of a ubatch, of a token and of a position."""
        return self._theta

    def seconds(self, load: StepLoad) -> float:
        """Return the cost of *load*."""
        a, b, c = self._theta
        return a * load.ubatches + b * load.tokens + c * load.depth

    def scaled(self, factor: float) -> LinearCost:
        """Return a copy whose costs are *factor* times as high."""
        copy = LinearCost(*(factor * value for value in self._theta))
        aa, ab, ac, bb, bc, cc = (factor**2 * value for value in self._variance)
        copy._variance = (aa, ab, ac, bb, bc, cc)
        return copy

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Update the coefficients by a *load* that took *seconds*."""
        x, y, z = float(load.ubatches), float(load.tokens), float(load.depth)
        self._drift()
        aa, ab, ac, bb, bc, cc = self._variance
        gain_a = aa * x + ab * y + ac * z
        gain_b = ab * x + bb * y + bc * z
        gain_c = ac * x + bc * y + cc * z
        expected = self.seconds(load)
        noise = (NOISE * max(expected, seconds / 2)) ** 2 + 1e-12
        spread = noise + max(0.0, x * gain_a + y * gain_b + z * gain_c)
        error = seconds - expected
        limit = DEVIATIONS_MAX * math.sqrt(spread)
        self._outliers = self._outliers + 1 if abs(error) > limit else 0
        if self._outliers == TREND_STEPS:
            self._outliers = 0
            self._make_uncertain()
            aa, ab, ac, bb, bc, cc = self._variance
            if seconds > LOST_FACTOR * expected:
                self.init_from_step(load, seconds)
                return
        self._variance = (
            aa - gain_a * gain_a / spread,
            ab - gain_a * gain_b / spread,
            ac - gain_a * gain_c / spread,
            bb - gain_b * gain_b / spread,
            bc - gain_b * gain_c / spread,
            cc - gain_c * gain_c / spread,
        )
        share = min(max(error, -limit), limit) / spread
        self._add(gain_a * share, gain_b * share, gain_c * share)

    def _add(self, more_a: float, more_b: float, more_c: float) -> None:
        """Add to the coefficients. One that would become negative becomes zero, and the others are
        corrected by their covariance with it, as they were estimated beside its negative value.
        """
        aa, ab, ac, bb, bc, cc = self._variance
        a, b, c = self._theta
        a, b, c = a + more_a, b + more_b, c + more_c
        if c < 0 < cc:
            a, b, c = a - c * ac / cc, b - c * bc / cc, 0.0
        if a < 0 < aa:
            a, b, c = 0.0, b - a * ab / aa, c - a * ac / aa
        if b < 0 < bb:
            a, b, c = a - b * ab / bb, 0.0, c - b * bc / bb
        self._theta = (max(0.0, a), max(0.0, b), max(0.0, c))

    def _make_uncertain(self) -> None:
        """Make all coefficients as uncertain as can be, after a change of the machine."""
        a, b, c = self._scales()
        self._variance = (a**2, 0.0, 0.0, b**2, 0.0, c**2)

    def init_from_step(self, load: StepLoad, seconds: float) -> None:
        """Attribute nine tenths of a first step to tokens, one to ubatches, none to depth."""
        ubatch, token = 0.1 * seconds / max(load.ubatches, 1), 0.9 * seconds / max(load.tokens, 1)
        self._theta = (ubatch, token, 0.0)
        self._variance = ((3 * ubatch) ** 2, 0.0, 0.0, token**2, 0.0, (token / 1000) ** 2)

    def _drift(self) -> None:
        """Make each coefficient less certain, up to its own size. A row and its column shrink
        alike, so that the matrix stays a covariance matrix.
        """
        aa, ab, ac, bb, bc, cc = self._variance
        a, b, c = self._scales()
        aa = max(0.0, aa) + (DRIFT * a) ** 2  # rounding can make it negative
        bb = max(0.0, bb) + (DRIFT * b) ** 2
        cc = max(0.0, cc) + (DRIFT * c) ** 2
        less_a = min(1.0, a / math.sqrt(aa))
        less_b = min(1.0, b / math.sqrt(bb))
        less_c = min(1.0, c / math.sqrt(cc))
        self._variance = (
            aa * less_a * less_a,
            ab * less_a * less_b,
            ac * less_a * less_c,
            bb * less_b * less_b,
            bc * less_b * less_c,
            cc * less_c * less_c,
        )

    def _scales(self) -> tuple[float, float, float]:
        """Return the size of each coefficient, which bounds its uncertainty; never zero."""
        a, b, c = self._theta
        return max(a, b, 1e-9), max(b, a / 100, 1e-9), max(c, b / 1000, a / 100_000, 1e-12)
