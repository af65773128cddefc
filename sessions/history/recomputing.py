"""What of a chat's history a turn computes again, and why: its template rewrites what stands."""

from __future__ import annotations

from typing import NamedTuple

EXCERPT_CHARACTERS = 24


class Recomputed(NamedTuple):
    """So many tokens of the history do not stand any more; *why* is for people."""

    tokens: int = 0
    why: str = ""


NOTHING = Recomputed()


def why(said: str, text: str, *, chatted: bool, told_otherwise: bool) -> str:
    """Return why *text*, a chat by its template, does not begin with what was *said*: empty where
    ids and text do not agree. *chatted*: it was a chat, *told_otherwise*: with other tools or
    arguments.
    """
    if not chatted:
        return "a chat begins anew after raw text"
    if not said:
        return "the last answer was cut at a stop text: its tokens say more than its text"
    if told_otherwise:
        return "tools or chat-template-kwargs are not those of the turn before"
    pairs = enumerate(zip(said, text, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(said), len(text)))
    before, now = (repr(t[at : at + EXCERPT_CHARACTERS]) for t in (said, text))
    return f"the chat template rewrites what came before: {now} where the history has {before}"
