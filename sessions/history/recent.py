"""Chats whose sessions have ended, which later requests with the same messages continue.

A program without a session sends the whole conversation each time. The template renders it anew,
and its tokens can differ from those that the model has written: a model may divide a text into
other tokens than the tokenizer, and the JSON of a call may be spaced in another way. So the history
that has the same messages is continued instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from ...scheduler.owner import Owner
from ..answers.calls import decode_object
from ..answers.messages import answer_message, raw_answer, without_raw_answer
from ..answers.parser import AnswerParser
from ..entries import Replay, TurnPiece
from .history import History

RECENT_CHATS_MAX = 256
"""Chats of all owners."""
RECENT_CHATS_BYTES_MAX = 32 << 20
"""Memory of all chats, which is that of about 100 chats of 8000 tokens."""
_IGNORED = frozenset(("refusal", "annotations", "audio", "function_call"))
"""Keys of answers in OpenAI's form that templates do not read."""


class _Key(NamedTuple):
    """The messages before an answer, by a digest. With another *fingerprint*, the model differs."""

    owner: Owner
    fingerprint: str
    messages: bytes


class _Chat(NamedTuple):
    history: History
    piece: TurnPiece
    kept_bytes: int


class RecentChats:
    """The last chats of each owner, the oldest first. Owned by the manager of the sessions. Past a
    bound, the user with the most chats, or the most memory, loses the oldest one.
    """

    def __init__(self, chats_max: int = RECENT_CHATS_MAX, bytes_max: int = RECENT_CHATS_BYTES_MAX):
        self._chats_max, self._bytes_max = chats_max, bytes_max
        self._chats: dict[_Key, _Chat] = {}
        self._counts, self._bytes = Counter[int](), Counter[int]()
        """The number of chats, and their memory, for each user."""

    def __len__(self) -> int:
        return len(self._chats)

    @property
    def bytes(self) -> int:
        return self._bytes.total()

    def add(
        self,
        owner: Owner,
        fingerprint: str,
        messages: Sequence[Mapping[str, Any]],
        history: History,
        piece: TurnPiece,
    ) -> None:
        """Add a chat: the *history* that a client's *messages* have made, and its answer."""
        key = _Key(owner, fingerprint, _digest(messages))
        size = history.kept_bytes + len(piece.text) + len(piece.tokens)
        self._remove(key)
        self._chats[key] = _Chat(history, piece, size)
        self._counts[owner.user] += 1
        self._bytes[owner.user] += size
        while len(self._chats) > self._chats_max:
            self._remove_oldest(self._counts)
        while self.bytes > self._bytes_max:
            self._remove_oldest(self._bytes)

    def delete(self, owner: Owner, messages: Sequence[Mapping[str, Any]]) -> None:
        """Delete the chats of an owner that begin like the chat with these *messages*, which is
        their continuation or the same.
        """
        begins = set(_digests(messages))
        for key in [k for k in self._chats if k.owner == owner and k.messages in begins]:
            self._remove(key)

    def _remove_oldest(self, amounts: Counter[int]) -> None:
        """Remove the oldest chat of the user with the largest amount."""
        [(user, _)] = amounts.most_common(1)
        self._remove(next(key for key in self._chats if key.owner.user == user))

    def _remove(self, key: _Key) -> None:
        chat = self._chats.pop(key, None)
        if chat is not None:
            user = key.owner.user
            self._counts[user] -= 1
            self._bytes[user] -= chat.kept_bytes
            if not self._counts[user]:
                del self._counts[user], self._bytes[user]

    def find(
        self, owner: Owner, fingerprint: str, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[History, int] | None:
        """Return the history that *messages* continue, with the number of its messages, or None."""
        answered = (at for at in range(len(messages) - 1, 0, -1) if _answers(messages[at]))
        at = next(answered, None)
        if at is None:
            return None
        chat = self._chats.get(_Key(owner, fingerprint, _digest(messages[:at])))
        if chat is None:
            return None
        turn = Replay(chat.history.prompt, (chat.piece,))
        history = chat.history.after(turn)
        forms = _client_forms(history, chat.history.new_parser(turn.seed, reasoning=True))
        same = _comparable(messages[at]) in map(_comparable, forms)
        return (history, at + 1) if same and at + 1 < len(messages) else None


def _client_forms(history: History, parser: AnswerParser | None) -> Iterator[dict[str, Any]]:
    """Yield the last answer as clients can have it: with its reasoning in the text, or apart."""
    answer = history.client_messages[-1]
    yield answer
    if parser is not None:
        yield without_raw_answer(answer_message(raw_answer(history.messages[-1]), parser))


def _answers(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _digest(messages: Sequence[Mapping[str, Any]]) -> bytes:
    return list(_digests(messages))[-1]


def _digests(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the digest of the first message, of the first two, and so on."""
    digest = blake2b(digest_size=16)
    for message in messages:
        digest.update(msgspec.msgpack.encode(message))
        yield digest.digest()


def _comparable(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer in one form. White space around its texts differs between programs."""
    found = {key: value for key, value in answer.items() if value and key not in _IGNORED}
    for key in ("content", "reasoning_content"):
        found[key] = str(found.get(key, "")).strip()
    found["tool_calls"] = list(map(_comparable_call, answer.get("tool_calls") or ()))
    return found


def _comparable_call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        decoded = decode_object(arguments)
        arguments = arguments if decoded is None else decoded
    return [call.get("id"), function.get("name"), _encoded(arguments)]


def _encoded(arguments: object) -> bytes | None:
    """Return arguments in a form that distinguishes 1, 1.0 and True, which Python finds equal; None
    for a map whose keys are not texts, which no model writes.
    """
    try:
        return msgspec.json.encode(arguments, order="sorted")
    except TypeError:
        return None
