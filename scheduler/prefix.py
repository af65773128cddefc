"""Common parts of two texts, or lists of tokens: pure functions."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix of *a* and *b*, sequences of the same type."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # halving compares slices in C: 20 times faster than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def equal_runs(
    have: Sequence[int], want: Sequence[int], keep: int, shortest: int
) -> list[tuple[int, int, int]]:
    """Return the runs of *have*, after the first *keep* tokens, with which *want* continues.

    Each is (from, to, count), at least *shortest* long. In *want* the runs follow each other
    without a gap, and its last token is in none. The algorithm is that of llama-server's
    `n_cache_reuse`: on a mismatch it skips a token of *have*.
    """
    runs = []
    at, to, end = keep, keep, len(want) - 1
    while at < len(have) and to < end:
        count = 0
        while at + count < len(have) and to + count < end and have[at + count] == want[to + count]:
            count += 1
        if count >= shortest:
            runs.append((at, to, count))
            to += count
        at += max(count, 1) if count >= shortest else 1
    return runs
