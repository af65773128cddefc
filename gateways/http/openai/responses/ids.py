"""The ids of responses, and of the items of their input.

A response's id has a hash of the instructions with which its history began, by which a response
that continues it is checked to have the same ones.
"""

from __future__ import annotations

import hashlib

_START = "resp_"
_MARK_CHARACTERS = 16


def mark_of(instructions: str | None) -> str:
    """Return the hash of instructions."""
    digest = hashlib.sha256((instructions or "").encode(errors="replace")).hexdigest()
    return digest[:_MARK_CHARACTERS]


def mark_in(response_id: str) -> str:
    """Return the hash in a response's id."""
    return response_id.removeprefix(_START)[:_MARK_CHARACTERS]


def item_id(kind: str, response_id: str, number: int) -> str:
    """Return the id of an input item of a response, which is the same in each list of them."""
    digest = hashlib.sha256(f"{response_id} {number}".encode()).hexdigest()
    return f"{kind}_{digest[:24]}"
