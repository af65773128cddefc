"""The KV states of one model on one node, within its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from inferd.scheduler.kv.eviction_order import EvictionOrder

from .turns import Session


class SessionStates:
    """The number of tokens in the state of each session, evicted by the scheduler's order.

    A turn uses the state of its own session, or the shared tokens at the beginning of another
    session of its user. States that turns are computing count as well.
    """

    def __init__(self, bytes_max: int, token_bytes: int, recompute_s: Callable[[int], float]):
        self._bytes_max, self._token_bytes, self._recompute_s = bytes_max, token_bytes, recompute_s
        self._bytes = 0
        self._order = EvictionOrder[int]()
        self._entries: dict[int, tuple[int, int]] = {}
        """By session, its tokens and its user."""
        self._by_user = Counter[int]()

    def covered_tokens(self, session: Session, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt need not be computed; its last one always is."""
        entry = self._entries.get(session.number)
        if entry is not None:
            covered = entry[0]
            self._use(session.number, covered)
        else:
            covered = session.shared_tokens if self._by_user[session.user] else 0
        return min(covered, prompt_tokens - 1)

    def save_state(self, session: Session, tokens: int) -> None:
        """Keep the first *tokens* of a session, and evict others for them."""
        self._remove(session.number)
        while self._entries and self._bytes + tokens * self._token_bytes > self._bytes_max:
            self._remove(self._order.evict_least())
        self._entries[session.number] = tokens, session.user
        self._by_user[session.user] += 1
        self._bytes += tokens * self._token_bytes
        self._use(session.number, tokens)

    def _use(self, number: int, tokens: int) -> None:
        seconds = self._recompute_s(tokens)
        self._order.record_use(number, tokens * self._token_bytes, seconds)

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            self._order.remove(number)
            self._by_user[entry[1]] -= 1
            if not self._by_user[entry[1]]:
                del self._by_user[entry[1]]
            self._bytes -= entry[0] * self._token_bytes
