"""Turns of a guest's contexts: computed as a whole, streamed to the guest's output, or pulled.

Each function returns an action for `Remote.call`, which repeats it when the daemon was restarted.
The action returns the error that is the end of the turn, if any. The output is read within it, so
that it cannot get lost between the turn and the guest's `get_output`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ...backends.errors import ContextFull, EndOfSequence, InferdError
from .graphs import METADATA_INDEX, GuestContext

if TYPE_CHECKING:
    from ...ipc.client import Client
    from ...ipc.priorities import Priority

TurnAction: TypeAlias = "Callable[[Client, int, float], InferdError | None]"


def whole_turn(context: GuestContext, priority: Priority) -> TurnAction:
    """Return the action that computes a turn."""

    def compute(client: Client, handle: int, timeout_s: float) -> InferdError | None:
        end = None
        try:
            client.compute(handle, priority=priority, timeout=timeout_s)
        except ContextFull as exc:
            end = exc
        _keep_output(context, client, handle)
        return end

    return compute


def streamed_turn(
    context: GuestContext, priority: Priority, write_text: Callable[[bytes], object]
) -> TurnAction:
    """Return the action that computes a turn and passes its text to *write_text*."""

    def stream(client: Client, handle: int, timeout_s: float) -> InferdError | None:
        context.in_turn = True
        with client.stream(handle, priority=priority, timeout=timeout_s) as pieces:
            for piece in pieces:
                write_text(piece.encode())
                context.text = (context.text or b"") + piece.encode()
            full = pieces.metadata.get("stop_reason") == "context_full"
        _keep_output(context, client, handle)
        return ContextFull("the context is full") if full else None

    return stream


def next_token(context: GuestContext, priority: Priority) -> TurnAction:
    """Return the action that computes the next token."""

    def compute(client: Client, handle: int, timeout_s: float) -> InferdError | None:
        try:
            context.piece = client.compute_single(handle, priority=priority, timeout=timeout_s)
        except (EndOfSequence, ContextFull) as exc:
            piece = client.get_output_single(handle, 0)
            _keep_output(context, client, handle)
            context.piece = piece
            return exc
        context.text = (context.text or b"") + context.piece
        return None

    return compute


def _keep_output(context: GuestContext, client: Client, handle: int) -> None:
    context.end_turn(client.get_output(handle, 0), client.get_output(handle, METADATA_INDEX))
