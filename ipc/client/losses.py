"""Errors of turns that lost their connection or daemon, with the turn's progress."""

from __future__ import annotations

from ...backends.errors import ConnectionLost, InferdError, ShuttingDown, error_from_wire

HINT = (
    "`data` has the tokens and the text that were read; a session with an id continues after them"
    " by resume(tokens, text), or by itself if it is opened with resume=True"
)


def is_loss(error: InferdError) -> bool:
    """Return whether *error* means that a turn lost its connection or daemon."""
    return isinstance(error, ConnectionLost | ShuttingDown)


def with_progress(error: InferdError, tokens: list[int], text: str) -> InferdError:
    """Return *error* with the tokens and the text that were read."""
    fields = error.to_wire()
    fields["message"] = f"{error.message}; {len(tokens)} tokens of the answer were read"
    fields["hint"] = f"{error.hint}; {HINT}"
    fields["data"] = {**error.data, "tokens": list(tokens), "text": text}
    return error_from_wire(fields)
