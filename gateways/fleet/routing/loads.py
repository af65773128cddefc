"""The load of nodes and of their models, as nodes report it and routing reads it."""

from __future__ import annotations

from typing import TypeAlias, get_args

import msgspec

from ....ipc.priorities import Priority

ByClass: TypeAlias = tuple[int, int, int, int]
"""A number for each priority class, the lowest first. Messages between nodes have this form."""
NONE: ByClass = (0, 0, 0, 0)
CLASSES: tuple[Priority, ...] = get_args(Priority)
LOAD_S_DEFAULT = 5.0
"""Time of a model's load, unless its size is known."""
TOKEN_S_DEFAULT = 0.01
"""Time of a token before a node has computed any; it fits a small model on two cores."""


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model of a node.

    `running` and `waiting` are numbers of turns. `running_tokens` and `waiting_tokens` are the
    tokens that these turns still compute: the rest of their prompts, and the answers to expect.
    """

    loaded: bool = False
    loading: bool = False
    failed: bool = False
    """Whether its last load failed."""
    slots: int = 0
    """Its slots, or those that its load would give it; 0 if unknown."""
    running: ByClass = NONE
    waiting: ByClass = NONE
    running_tokens: ByClass = NONE
    waiting_tokens: ByClass = NONE
    token_s: float = TOKEN_S_DEFAULT
    """The engine's time for a token while it has work, as the node has learned it."""
    prompt_token_s: float | None = None
    """The time of a token of a long prompt; None until a step was computed."""
    load_s: float = LOAD_S_DEFAULT
    """Estimated time of its load."""
    need_bytes: int | None = None
    """The host's memory that its load needs; None if unknown, or if it has a worker already."""


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that can be reached."""

    instance: int
    """The start count of its daemon."""
    draining: bool = False
    sessions: int = 0
    sessions_max: int = 1
    """Contexts that have a place, and the most that may have one."""
    free_bytes: int | None = None
    """The host's memory that a load may take now; None if unknown."""
    evictable_bytes: int = 0
    """The memory of idle models, which may be unloaded for a load."""
    models: dict[str, ModelLoad] = {}
