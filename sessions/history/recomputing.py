"""Tokens of a chat's history that a turn computes again since the template renders them anew."""

from __future__ import annotations

from typing import NamedTuple

EXCERPT_CHARACTERS = 24


class Recomputed(NamedTuple):
    """The number of the history's tokens that are obsolete, and why, for users."""

    tokens: int = 0
    why: str = ""


NOTHING = Recomputed()


def cause_of(previous: str, text: str, *, was_chat: bool, other_arguments: bool) -> str:
    """Return why *text*, rendered by the template, does not begin with the *previous* text. That is
    empty where ids and text disagree. *was_chat*: the history was a chat; *other_arguments*: it was
    rendered with other tools or arguments.
    """
    if not was_chat:
        return "a chat after raw text begins a new history"
    if not previous:
        return "the last answer was cut at a stop text: its tokens say more than its text"
    if other_arguments:
        return "tools or chat-template-kwargs differ from those of the previous turn"
    pairs = enumerate(zip(previous, text, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(previous), len(text)))
    before, now = (repr(t[at : at + EXCERPT_CHARACTERS]) for t in (previous, text))
    return f"the chat template changes earlier text: {now} where the history has {before}"
