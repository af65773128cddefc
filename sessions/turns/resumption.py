"""What a turn that was interrupted goes on with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...backends.errors import InvalidArgument
from ...scheduler.priority import PRIORITIES
from ..journal.entries import Replay
from .turn_options import TurnOptions


def resumed(
    before: Replay | None, call: TurnOptions, tokens: Sequence[int], text: bytes, vocab_size: int
) -> tuple[Replay, TurnOptions]:
    """Return what the interrupted turn *before* has told, with the *tokens* and the *text* that its
    reader has of it, and the options to go on with: its own, its seed among them, in what *call*
    leaves open.

    :raises InvalidArgument: there was none, or its reader has something else.
    """
    if before is None:
        raise InvalidArgument("no turn of this session was interrupted")
    if not all(0 <= token < vocab_size for token in tokens):
        raise InvalidArgument(f"the tokens are 0 … {vocab_size - 1}")
    whole, how = before.extended(tokens, text), before.begin
    own = msgspec.structs.replace(
        call,
        options={**how.options, "seed": how.seed},
        priority=PRIORITIES[how.priority] if call.priority is None else call.priority,
        special=how.special,
    )
    return whole, own
