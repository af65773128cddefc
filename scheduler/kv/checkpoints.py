"""The places of checkpoints in the tokens of recurrent and hybrid models: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_SHARE_STEP = 0.9


def message_borders(tokens: Sequence[int], is_control: Callable[[int], bool]) -> list[int]:
    """Return the places in *tokens* where a control token follows one that is none.

    Chat templates begin or end messages with control tokens. So if a message is edited, dropped or
    rendered in another way later, such a place is shortly before the first token that changes.
    """
    control = {token for token in set(tokens) if token >= 0 and is_control(token)}
    return [
        at
        for at in range(1, len(tokens))
        if tokens[at] in control and tokens[at - 1] not in control
    ]


def spaced(points: Iterable[int], gap: int) -> list[int]:
    """Return the ascending *points* without those that are less than *gap* behind another one."""
    kept, last = [], 0
    for point in points:
        if point - last >= gap:
            kept.append(point)
            last = point
    return kept


def thinned(points: Sequence[int], count_max: int) -> list[int]:
    """Return at most *count_max* of the ascending *points*, with the first and the last one.

    The first one is the end of the instructions, which conversations share. The distance between
    the others grows in proportion to their distance from the last one.
    """
    if len(points) <= count_max:
        return list(points)
    if count_max < 2:
        return list(points[-count_max:]) if count_max > 0 else []
    share, kept = 2.0 * count_max, list(points[1:])
    while len(kept) >= count_max and share > 1:
        kept, share = _sparse(points[1:], share), share * _SHARE_STEP
    return [points[0], *kept[-(count_max - 1) :]]


def _sparse(points: Sequence[int], share: float) -> list[int]:
    """Return the last of *points*, and those before it whose distance from the next one is at least
    one *share* of that from the last one.
    """
    end = points[-1]
    kept = [end]
    for point in reversed(points[:-1]):
        if kept[-1] - point >= (end - point) / share:
            kept.append(point)
    return kept[::-1]
