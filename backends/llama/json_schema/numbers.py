"""Numbers between bounds, digit by digit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, floor

from .rules import Rules, either, literal, sequence

__all__ = ("DIGITS_MAX", "NUMBER", "Range", "integers", "multiples", "numbers")

DIGITS_MAX = 15
"""So many significant digits are told apart by a double: none rounds past a bound."""
MULTIPLES_MAX = 256
DIVISOR_MAX = 64
POINT = literal(".")
_RUNS = re.compile(r"\d+|\.")
_CAP = 10**9
"""The bound of decimals that have none on this side."""

NUMBER = (
    f'"-"? ("0" | [1-9] [0-9]{{0,{DIGITS_MAX - 1}}})'
    f' ("." [0-9]{{1,{DIGITS_MAX}}})? ([eE] [-+]? [0-9]{{1,2}})?'
)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from *low* to *high*; None: no bound. An open end is not among them."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False

    @property
    def empty(self) -> bool:
        """Tell whether no number is in it."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def before(self, other: Range) -> bool:
        """Tell whether all of it is below *other*."""
        if self.high is None or other.low is None:
            return False
        touching = self.high == other.low and (self.high_open or other.low_open)
        return self.high < other.low or touching

    @property
    def whole(self) -> tuple[int | None, int | None]:
        """The first and the last integer; None: no bound."""
        low = high = None
        if self.low is not None:
            low = ceil(self.low) + (self.low_open and self.low == ceil(self.low))
        if self.high is not None:
            high = floor(self.high) - (self.high_open and self.high == floor(self.high))
        return low, high

    @property
    def mirrored(self) -> Range:
        """The same numbers with the other sign."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return Range(low, high, self.high_open, self.low_open)

    @property
    def digits(self) -> int:
        """Digits that it takes to write a bound in full."""
        return max(
            (len(f"{abs(b):f}".replace(".", "")) for b in (self.low, self.high) if b), default=1
        )


def integers(between: Range) -> list[str]:
    """Return the integers of a range as alternatives; none if there are none."""
    low, high = between.whole
    most = (
        10 ** max(DIGITS_MAX, *(len(str(abs(b))) + 1 for b in (low, high) if b is not None), 0) - 1
    )
    low, high = -most if low is None else low, most if high is None else high
    found = []
    if low < 0 and low <= high:
        found.append(sequence('"-"', either(_naturals(max(1, -high), -low))))
    return found + list(_naturals(max(0, low), high))


def _naturals(low: int, high: int) -> Iterator[str]:
    if low == 0 <= high:
        yield '"0"'
    low = max(1, low)
    full = []
    for length in range(len(str(low)), len(str(max(high, 1))) + 1):
        first, last = 10 ** (length - 1), 10**length - 1
        if low <= first and last <= high:
            full.append(length - 1)
        elif max(low, first) <= min(high, last):
            yield from _between(str(max(low, first)), str(min(high, last)))
    if full:
        yield f"[1-9] [0-9]{{{full[0]},{full[-1]}}}"


def _between(low: str, high: str) -> list[str]:
    """Return the digits from *low* to *high*, texts of one length with the point at one place."""
    if low == high:
        return [literal(low)]
    rest_low, rest_high = low[1:], high[1:]
    if low[0] == high[0]:
        return [sequence(literal(low[0]), either(_between(rest_low, rest_high)))]
    first, last, found = int(low[0]), int(high[0]), []
    if set(rest_low) - set("0."):
        found.append(sequence(literal(low[0]), either(_between(rest_low, _all("9", rest_low)))))
        first += 1
    if set(rest_high) - set("9."):
        found.append(sequence(literal(high[0]), either(_between(_all("0", rest_high), rest_high))))
        last -= 1
    if first <= last:
        digit = f"[{first}-{last}]" if first < last else f'"{first}"'
        found.append(sequence(digit, _any(rest_low)))
    return found


def _all(digit: str, like: str) -> str:
    return "".join("." if c == "." else digit for c in like)


def _any(like: str) -> str:
    runs = _RUNS.findall(like)
    return sequence(*(POINT if run == "." else f"[0-9]{{{len(run)}}}" for run in runs))


def numbers(between: Range) -> list[str]:
    """Return the numbers of a range as alternatives; none if there are none. Those with a point
    have as many digits as its bounds, and more, but at most `DIGITS_MAX` in all.
    """
    found = list(_positive(_clipped(between)))
    negative = list(_positive(_clipped(between.mirrored, above_zero=True)))
    return ([sequence('"-"', either(negative))] if negative else []) + found


def _clipped(between: Range, *, above_zero: bool = False) -> Range:
    """Return what of a range is not below zero, with both bounds."""
    low, low_open = between.low, between.low_open
    if low is None or low < 0 or (low == 0 and above_zero):
        low, low_open = Decimal(0), above_zero
    high = between.high if between.high is not None else max(Decimal(_CAP), low * 10 + 1)
    return Range(low, high, low_open, between.high_open)


def _positive(between: Range) -> Iterator[str]:
    low, high = between.low, between.high
    assert low is not None and high is not None
    if between.empty:
        return
    first, last = between.whole
    assert first is not None and last is not None
    yield from _naturals(first, last)
    ends = ((low, between.low_open), (high, between.high_open))
    yield from (literal(f"{end:f}") for end, is_open in ends if not is_open)
    places = max(1, *(-_exponent(bound) for bound in (low, high)))
    scaled_low, scaled_high = int(low.scaleb(places)), int(high.scaleb(places))
    more = DIGITS_MAX - max(len(str(scaled_high)), places + 1)
    if between.low_open:
        if more > 0 and scaled_low < scaled_high:
            rest = more - 1 - more // 2
            above = f'"0"{{0,{more // 2}}} [1-9] [0-9]{{0,{rest}}}'
            yield sequence(literal(_pointed(scaled_low, places)), above)
        scaled_low += 1
    if scaled_low < scaled_high:
        steps = either(_steps(scaled_low, scaled_high - 1, places))
        yield sequence(steps, f"[0-9]{{0,{more}}}" if more > 0 else "")
    if scaled_low <= scaled_high and not between.high_open:
        yield literal(_pointed(scaled_high, places))


def _exponent(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), "it is finite"
    return exponent


def _steps(low: int, high: int, places: int) -> Iterator[str]:
    """Return the numbers from *low* to *high*, which count units of so many places."""
    shortest = places + 1
    for length in range(max(shortest, len(str(low))), max(shortest, len(str(high))) + 1):
        first = 0 if length == shortest else 10 ** (length - 1)
        begin, end = max(low, first), min(high, 10**length - 1)
        if begin <= end:
            yield from _between(_pointed(begin, places), _pointed(end, places))


def _pointed(number: int, places: int) -> str:
    digits = str(number).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}"


def multiples(rules: Rules, divisor: int, between: Range) -> list[str] | None:
    """Return the multiples of *divisor* in a range as alternatives; None if there are too many to
    tell them one by one, and no other way.
    """
    low, high = between.whole
    if low is not None and high is not None:
        first, last = -(-low // divisor), high // divisor
        if last - first < MULTIPLES_MAX:
            return [literal(str(n * divisor)) for n in range(first, last + 1)]
    if low is None and high is None and divisor <= DIVISOR_MAX:
        return ['"0"', sequence('"-"?', _dividing(rules, divisor))]
    return None


def _dividing(rules: Rules, divisor: int) -> str:
    """Return digits that *divisor* divides: a rule for each remainder."""
    names = [rules.reserve() for _ in range(divisor)]
    for remainder, name in enumerate(names):
        found = [
            (step, frozenset[str]()) for step in _next(remainder, divisor, names, "0123456789")
        ]
        rules.define(name, [*found, ('""', frozenset())] if remainder == 0 else found)
    return either(_next(0, divisor, names, "123456789"))


def _next(remainder: int, divisor: int, names: list[str], digits: str) -> Iterator[str]:
    by_rest: dict[int, str] = {}
    for digit in digits:
        rest = (remainder * 10 + int(digit)) % divisor
        by_rest[rest] = by_rest.get(rest, "") + digit
    for rest, same in by_rest.items():
        yield sequence(f"[{same}]", names[rest])
