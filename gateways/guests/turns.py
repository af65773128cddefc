"""Turns of a guest's contexts: computed as a whole, streamed to the guest's output, or pulled.

Each function returns an action for `Remote.call`, which repeats it when the daemon was restarted.
The action returns the error that ended the turn, if any. It also reads the output, which otherwise
could get lost between the turn and the guest's `get_output`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from ...backends.errors import ContextFull, EndOfSequence, InferdError
from ...ipc.messages import METADATA_INDEX
from .graphs import GuestContext

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient
    from ...ipc.priorities import Priority

TurnAction: TypeAlias = "Callable[[AsyncClient, int, float], Awaitable[InferdError | None]]"


def whole_turn(context: GuestContext, priority: Priority) -> TurnAction:
    """Return the action that computes a turn."""

    async def compute(client: AsyncClient, handle: int, timeout_s: float) -> InferdError | None:
        end = None
        try:
            await client.compute(handle, priority=priority, timeout=timeout_s)
        except ContextFull as exc:
            end = exc
        await _keep_output(context, client, handle)
        return end

    return compute


def streamed_turn(
    context: GuestContext, priority: Priority, write_text: Callable[[bytes], object]
) -> TurnAction:
    """Return the action that computes a turn and passes its text to *write_text*."""

    async def stream(client: AsyncClient, handle: int, timeout_s: float) -> InferdError | None:
        context.in_turn = True
        async with client.stream(handle, priority=priority, timeout=timeout_s) as pieces:
            async for piece in pieces:
                write_text(piece.encode())
                context.text = (context.text or b"") + piece.encode()
            full = pieces.metadata.get("stop_reason") == "context_full"
        await _keep_output(context, client, handle)
        return ContextFull("the context is full") if full else None

    return stream


def next_token(context: GuestContext, priority: Priority) -> TurnAction:
    """Return the action that computes the next token."""

    async def compute(client: AsyncClient, handle: int, timeout_s: float) -> InferdError | None:
        try:
            context.piece = await client.compute_single(
                handle, priority=priority, timeout=timeout_s
            )
        except (EndOfSequence, ContextFull) as exc:
            piece = await client.get_output_single(handle, 0)
            await _keep_output(context, client, handle)
            context.piece = piece
            return exc
        context.text = (context.text or b"") + context.piece
        return None

    return compute


def prompt_turn(
    prompt: str, priority: Priority
) -> Callable[[AsyncClient, int, float], Awaitable[str]]:
    """Return the action that answers a prompt of the prompt interface."""

    async def compute(client: AsyncClient, handle: int, timeout_s: float) -> str:
        return await client.prompt_compute(handle, prompt, priority=priority, timeout=timeout_s)

    return compute


async def _keep_output(context: GuestContext, client: AsyncClient, handle: int) -> None:
    text = await client.get_output(handle, 0)
    context.end_turn(text, await client.get_output(handle, METADATA_INDEX))
