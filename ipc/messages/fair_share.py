"""Messages of the call by which the daemons of a fleet share fairly among users."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .base import Map

SERVED_TOKENS_MAX = 1 << 40
"""Tokens of a user that one call may report."""


class ExchangeServedParams(Map):
    """`exchange_served`: the tokens that other daemons have computed since the last call, by model
    and user. A user is named as in `on_behalf_of`; an empty name is the caller.
    """

    elsewhere: dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0, le=SERVED_TOKENS_MAX)]]] = {}
    """The tokens that other daemons have computed since the last call: for each model a map of
    users to tokens, of at most `SERVED_TOKENS_MAX` each.
    """


class ExchangeServedResult(Map):
    """The tokens that this daemon has computed so far, by model and user. Only users appear who
    have tasks, or for whom tokens were computed since the last call.
    """

    served: dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0)]]]
    """The tokens that this daemon has computed so far, in the same form: those of users who have
    turns, or for whom tokens were computed since the last call.
    """
