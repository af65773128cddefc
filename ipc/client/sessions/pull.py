"""Pulled turns: each token is computed when the reader requests it."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import cast

import msgspec

from ....backends.errors import ContextFull, EndOfSequence
from ...payloads import TensorLike, traceparent_of
from ..connection.inflight import no_metadata
from ..results import Metadata
from ..turn_settings import TurnSettings
from .turns_under_way import PulledTurn, TurnsUnderWay


class AsyncPull(AsyncIterator[str], AbstractAsyncContextManager["AsyncPull"]):
    """The pieces of a turn, each computed on demand (`compute_single`).

    A turn that is not read to its end is cancelled as in `AsyncStream`; the history keeps the
    pieces that were read. A piece is empty while a character's bytes, or a possible stop text, are
    incomplete.
    """

    def __init__(
        self,
        turns: TurnsUnderWay,
        prompt: TensorLike | None,
        settings: TurnSettings,
        session: object,
    ):
        self._session = session  # kept open, as for streams
        self.metadata = no_metadata()
        self._turns, self._prompt, self._settings = turns, prompt, settings
        self._traceparent = traceparent_of(settings.traceparent)
        self._turn: PulledTurn | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def __anext__(self) -> str:
        turn = self._turn
        if turn is None:
            turn = self._turn = await self._turns.start_pull(self._prompt, self._settings.timeout)
        if turn.ended:
            raise StopAsyncIteration
        try:
            piece = await self._turns.client.compute_single(
                turn.context,
                priority=self._settings.priority,
                timeout=self._settings.timeout,
                traceparent=self._traceparent,
            )
        except (EndOfSequence, ContextFull):
            turn.ended = True
        except BaseException:
            turn.abandon()
            raise
        else:
            return self._decoder.decode(piece)
        client, timeout = self._turns.client, self._settings.timeout
        text = await client.get_output(turn.context, 1, timeout=timeout)
        self.metadata = cast("Metadata", msgspec.json.decode(text))
        self._turns.set_metadata(self.metadata)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the turn if it has not ended."""
        turn = self._turn
        if turn is not None and not turn.ended:
            turn.ended = True
            await self._turns.client.fini_single(turn.context)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _abandon(self) -> None:
        """End the turn soon if it has not ended, without waiting."""
        turn = self._turn
        if turn is not None and not turn.ended and not turn.abandoned:
            turn.abandon()

    def __del__(self) -> None:
        self._abandon()
