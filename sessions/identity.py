"""Ids, names and titles of sessions. A title is a client's, or the first message's first words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..backends.errors import InvalidArgument
from ..scheduler.owner import Owner

SessionKey = tuple[Owner, str]
"""A session's owner and id."""
SESSION_ID_CHARACTERS_MAX = 128


def check_id(session_id: str, what: str = "a session id") -> None:
    """Check the length of an id.

    :raises InvalidArgument: it is empty or too long.
    """
    if not 0 < len(session_id) <= SESSION_ID_CHARACTERS_MAX:
        raise InvalidArgument(
            f"{what} of {len(session_id)} characters",
            hint=f"use 1 to {SESSION_ID_CHARACTERS_MAX}",
        )


def name_of_id(label: str, session_id: str) -> str:
    """Return the engine's name for a session with an id. A label has no slash."""
    return f"label:{label}/{session_id}" if label else f"id:{session_id}"


TITLE_CHARACTERS_MAX = 200
OPENING_CHARACTERS_MAX = 300
"""The part of the first message that is searched."""
SEARCH_CHARACTERS_MAX = 200
WORDS_CHARACTERS_MAX = 80
"""The length of a title that is made of the first words."""


def checked_title(title: str) -> str:
    """Return a title of a client on one line.

    :raises InvalidArgument: it is too long.
    """
    if len(title) > TITLE_CHARACTERS_MAX:
        raise InvalidArgument(
            f"a title of {len(title)} characters; the limit is {TITLE_CHARACTERS_MAX}",
            hint="use a shorter title",
            data={"characters": len(title), "title_characters_max": TITLE_CHARACTERS_MAX},
        )
    return " ".join(title.split())


def opening_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the beginning of the user's first message on one line, or an empty text."""
    for message in messages:
        if message.get("role") == "user":
            return _text_of(message.get("content"))
    return ""


def _text_of(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text", "") if isinstance(part, Mapping) else part for part in parts)
    shown = (text for text in texts if isinstance(text, str))
    # White space is shortened, so more of the text is read than is returned.
    start = " ".join(text[: 4 * OPENING_CHARACTERS_MAX] for text in shown)
    return " ".join(start.split())[:OPENING_CHARACTERS_MAX]


def first_words(opening: str) -> str:
    """Return the first words of a message as a title."""
    if len(opening) <= WORDS_CHARACTERS_MAX:
        return opening
    cut = opening[: WORDS_CHARACTERS_MAX - 1]
    head, _, _ = cut.rpartition(" ")
    return f"{head if len(head) > WORDS_CHARACTERS_MAX // 2 else cut}…"


def check_search(search: str) -> None:
    """Check the length of a text that is searched.

    :raises InvalidArgument: it is too long.
    """
    if len(search) > SEARCH_CHARACTERS_MAX:
        raise InvalidArgument(
            f"a search for {len(search)} characters; the limit is {SEARCH_CHARACTERS_MAX}",
            hint="search for a shorter text",
        )


def matches(search: str, title: str, opening: str) -> bool:
    """Return whether a title or first message has a text, in any case."""
    wanted = " ".join(search.split()).casefold()
    return wanted in title.casefold() or wanted in opening.casefold()
