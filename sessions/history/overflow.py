"""Decisions about a history that does not fit its context: the parts of it that are dropped.

`ContextLimit` is the policy of one turn, made from the parameters `overflow`, `ctx-shift`,
`n-keep`, `n-discard` and `n-predict`. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ...backends.params import OverflowPolicy
from ..answers.messages import answer_forms
from ..memory import memory_bytes

DROPPED_BYTES_MAX = 1 << 20
"""Bound on the memory of one history's dropped messages; the oldest ones are deleted beyond it."""
DROPPED = "dropped"
"""The key of a message that the model no longer reads. No template gets such a message."""
_FREED_PART = 4
"""A drop frees at least this part of the context, so that drops are rare; the answer may reserve
as much.
"""
_OPENING_ROLES = frozenset(("user", "system", "developer"))
_SYSTEM_ROLES = frozenset(("system", "developer"))
_MESSAGE_BYTES = 16
"""The bytes of a template's text around a message, in estimates."""

Message = Mapping[str, Any]


class TokenCut(NamedTuple):
    """The first *keep* tokens stay, the next *discard* tokens are dropped."""

    keep: int
    discard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """The context of a turn, and the policy for a history that exceeds it."""

    policy: OverflowPolicy
    ctx_size: int
    """Tokens of prompt and answer."""
    n_predict: int = -1
    n_keep: int = 0
    n_discard: int = 0
    drops_input: bool = False
    """Turns within the new input may be dropped too, not only those that the session has."""

    @property
    def answer_tokens(self) -> int:
        """The tokens that a shortened history leaves for the answer."""
        most = max(1, self.ctx_size // _FREED_PART)
        return most if self.n_predict < 0 else max(1, min(self.n_predict, most))

    @property
    def drops_turns(self) -> bool:
        """Whether whole turns are dropped."""
        return self.policy is OverflowPolicy.DROP_TURNS

    @property
    def cut_behind(self) -> int:
        """The number of tokens behind which a text that is too long for any context loses its
        middle before it is tokenized; −1: such a text is refused.
        """
        cuts = self.policy in (OverflowPolicy.SHIFT, OverflowPolicy.TRUNCATE)
        return self.kept_tokens if cuts else -1

    @property
    def kept_tokens(self) -> int:
        """The tokens at the start that stay when tokens of a prompt are dropped: at least one, and
        at most half of the context, so that the end of the prompt stays too.
        """
        most = max(1, self.ctx_size // 2)
        return most if self.n_keep < 0 else max(1, min(self.n_keep, most))

    @property
    def kept_reason(self) -> str:
        """The reason why a shortened prompt keeps fewer tokens than `n-keep`, or empty."""
        if 0 <= self.n_keep <= self.kept_tokens:
            return ""
        half = f"a shortened prompt keeps at most half of the context of {self.ctx_size} tokens"
        return f"{half}: {self.kept_tokens}"

    def needs_drop(self, tokens: int) -> bool:
        """Return whether turns of a history with this many *tokens* are to be dropped."""
        return self.drops_turns and tokens + self.answer_tokens > self.ctx_size

    def enough_dropped(self, before: int, after: int) -> bool:
        """Return whether *after* tokens, left of those *before*, are few enough."""
        return (
            after + self.answer_tokens <= self.ctx_size
            and before - after >= self.ctx_size // _FREED_PART
        )

    def missing_tokens(self, before: int, after: int) -> int:
        """Return the tokens to drop from *after* tokens, left of those *before*."""
        freed = before - after
        return max(
            after + self.answer_tokens - self.ctx_size, self.ctx_size // _FREED_PART - freed, 1
        )

    def cut(self, tokens: int, turn_starts: Sequence[int] = ()) -> TokenCut | None:
        """Return the cut of a prompt with this many *tokens*, or None if it stays whole. The policy
        `drop-turns` cuts at one of *turn_starts*, which ascend.

        The sizes are those of llama-server's context shift and truncation
        (`server-context.cpp`), except that a cut leaves room for the answer.
        """
        keep = self.kept_tokens
        match self.policy:
            case OverflowPolicy.DROP_TURNS:
                ends = [at for at in turn_starts if keep < at < tokens]
                if not (self.needs_drop(tokens) and ends):
                    return None
                missing = self.missing_tokens(tokens, tokens)
                end = next((at for at in ends if at - keep >= missing), ends[-1])
                return TokenCut(keep, end - keep)
            case OverflowPolicy.SHIFT | OverflowPolicy.TRUNCATE if tokens >= self.ctx_size:
                missing = tokens + self.answer_tokens - self.ctx_size
                if self.policy is OverflowPolicy.SHIFT:
                    missing = max(missing, self.n_discard or (self.ctx_size - keep) // 2)
                return TokenCut(keep, min(missing, tokens - keep - 1))
        return None


UNLIMITED = ContextLimit(policy=OverflowPolicy.ERROR, ctx_size=0)
"""The limit of histories that are not shortened."""


def is_dropped(message: Message) -> bool:
    """Return whether the model no longer reads a message of the history."""
    return bool(message.get(DROPPED))


def as_dropped(message: Message) -> dict[str, Any]:
    """Return a message that the model no longer reads."""
    return {**message, DROPPED: True}


def as_read(message: Message) -> dict[str, Any]:
    """Return a message that the model reads."""
    return {key: value for key, value in message.items() if key != DROPPED}


def dropped_bytes(messages: Iterable[Message]) -> int:
    """Return the memory of the dropped ones of *messages*."""
    return memory_bytes(*(x for x in messages if is_dropped(x)))


def system_messages(messages: Sequence[Message]) -> int:
    """Return the number of system messages at the start of a chat; these are never dropped."""
    roles = (message.get("role") not in _SYSTEM_ROLES for message in messages)
    return next((at for at, other in enumerate(roles) if other), len(messages))


def turn_starts(messages: Sequence[Message], first: int) -> list[int]:
    """Return the places, from *first* on, at which a turn of a chat begins: with a user's message,
    or with the system message before it. Results of tools belong to the turn of their calls.
    """
    opens = [message.get("role") in _OPENING_ROLES for message in messages]
    return [
        at for at in range(first, len(messages)) if opens[at] and (at == first or not opens[at - 1])
    ]


class KeptMessages(NamedTuple):
    """The messages of a chat that are rendered: those of the history before its last answer, the
    forms of this answer, and new ones.
    """

    before: list[dict[str, Any]]
    forms: list[dict[str, Any]]
    added: list[dict[str, Any]]


class TurnDrops:
    """The oldest turns of a chat that may be dropped, and a choice among them by estimates.

    The chat consists of the messages that were *read* and of those *added* by a turn. Messages are
    compared by the lengths of their texts, since their tokens are not known; *size_of* returns that
    of a message's content.
    """

    def __init__(
        self,
        read: list[dict[str, Any]],
        added: list[dict[str, Any]],
        limit: ContextLimit,
        size_of: Callable[[object], int] = lambda content: len(str(content)),
    ):
        self._read, self._limit, self._size_of = read, limit, size_of
        self._chat = [*read, *added]
        self.first = system_messages(self._chat)
        """The number of system messages at the start, which stay."""

    @cached_property
    def _starts(self) -> list[int]:
        return turn_starts(self._chat, self.first)

    @cached_property
    def _sizes_before(self) -> list[int]:
        """The size of the messages before each place."""
        texts = ((x.get("content"), x.get("tool_calls", "")) for x in self._chat)
        sizes = (self._size_of(x) + len(str(calls)) + _MESSAGE_BYTES for x, calls in texts)
        return list(accumulate(sizes, initial=0))

    def next_end(self, after: int, whole: int, left: int) -> int | None:
        """Return the end of the messages to drop, a place behind *after*, or None if no more can be
        dropped. The *whole* chat had this many tokens, and without those up to *after* the *left*.
        """
        last = len(self._chat) if self._limit.drops_input else len(self._read)
        dropped, sizes = max(after, self.first), self._sizes_before
        ends = [end for end in self._starts if dropped < end <= last]
        if not ends:
            return None
        size_left = sizes[self.first] + sizes[-1] - sizes[dropped]
        size = self._limit.missing_tokens(whole, left) * size_left / max(left, 1)
        return next((end for end in ends if sizes[end] - sizes[dropped] >= size), ends[-1])

    def kept(self, end: int) -> KeptMessages:
        """Return the messages that stay if those up to *end* are dropped, or all for 0."""
        system, rest = (self.first, end) if end else (0, 0)
        size = len(self._read)
        before = [*self._read[:system], *self._read[rest:]]
        added = [*self._chat[size : max(system, size)], *self._chat[max(rest, size) :]]
        if before and before[-1]["role"] == "assistant":
            return KeptMessages(before[:-1], answer_forms(before[-1]), added)
        return KeptMessages(before, [], added)

    def turns(self, end: int) -> int:
        """Return the number of turns that are dropped with the messages up to *end*."""
        return sum(self.first <= at < end for at in self._starts)
