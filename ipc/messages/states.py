"""Messages of the calls on named states: frozen histories with which sessions begin."""

from __future__ import annotations

from typing import Annotated, Any

from .base import Map
from .contexts import ContextParams
from .results import StateInfo


class SaveStateParams(ContextParams):
    """`save_state`: save a context's present state under a name of the user's own, of 1 to 128
    characters; `replace` permits that the name is in use.
    """

    name: str
    """1 to 128 characters; of this user and [label](#labels)."""
    replace: bool = False
    """The state replaces one that has the name."""


class SaveStateResult(Map):
    """The saved history: its `tokens`, of which `stored_tokens` have their KV state on disk."""

    tokens: int = 0
    """Tokens of the history."""
    stored_tokens: int = 0
    """Tokens whose KV state is on disk; 0: they are computed again when they are needed."""


class ListStatesResult(Map):
    """The user's named states, each with `name`, `model`, `tokens` and more, and those of other
    users that access rules share: they have `shared_by`.
    """

    states: list[Annotated[Any, StateInfo]]
    """One state each: the caller's by their names, then those that access rules
    [share](#shared-states) with the caller.
    """


class DeleteStateParams(Map):
    """`delete_state` by its name."""

    name: str
    """A state of this user and [label](#labels)."""


class DeleteStateResult(Map):
    """Whether there was such a state."""

    deleted: bool
    """Whether there was such a state."""
