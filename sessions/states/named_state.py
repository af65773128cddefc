"""A named state: the history and parameters of a session at one time, which never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ...scheduler.kv.origin import name_of_state
from ...scheduler.messages import SharedKv, count_tokens
from ...scheduler.owner import Owner
from ..admission.kept_bytes import memory_bytes
from ..history.history import History
from ..journal.entries import SessionFacts, StoredSession, decode_history, encode
from ..session.session import Session

STATE_BYTES = 4096
"""Memory of a named state besides its history and parameters."""


class StateFacts(SessionFacts, frozen=True, kw_only=True):
    """The stored values of a named state besides its history. *defaults* are those that its session
    was opened with, without its model's. *adapters* are the keys by which its KV state is found;
    *created_at* is a date of the system's clock.
    """

    adapters: tuple[str, ...] = ()
    created_at: float = 0.0


@dataclass(frozen=True, eq=False)
class NamedState:
    """One named state, a value. *packed* is its history, an encoded `HistoryEntry`."""

    owner: Owner
    name: str
    facts: StateFacts
    packed: bytes

    @classmethod
    def of_session(cls, session: Session, name: str, created_at: float) -> NamedState:
        """Return the state of a session whose last turn, if any, has computed its prompt."""
        # Sessions from the state compute their tokens anew if a context shift had dropped some,
        # because the KV states of shifted contexts serve one session only.
        entry = session.conversation.history_state.now.entry()
        values, origins = msgspec.structs.asdict(session.facts), session.settings.parameters.origins
        values["note"] = b""
        values["defaults"] = {k: v for k, v in values["defaults"].items() if k not in origins}
        facts = StateFacts(**values, adapters=session.settings.adapters, created_at=created_at)
        packed = encode(msgspec.structs.replace(entry, shifted=False))
        return cls(session.owner, name, facts, packed)

    @classmethod
    def from_stored(cls, stored: StoredSession) -> NamedState:
        """Return a state from the journal."""
        assert isinstance(stored.facts, StateFacts), "the journal of named states has their facts"
        return cls(stored.owner, stored.session_id, stored.facts, stored.past)

    @property
    def kv_name(self) -> str:
        """The engine's name for it."""
        return name_of_state(self.owner.label, self.name)

    @property
    def tokens(self) -> list[int]:
        """The tokens of its history."""
        return self.new_history().prompt

    def shared_with(self, owner: Owner) -> SharedKv | None:
        """Return its KV state for a session of another user, or None for the same user."""
        if owner.user == self.owner.user:
            return None
        packed = decode_history(self.packed).tokens
        return SharedKv.of_tokens(self.owner.user, self.kv_name, packed)

    @cached_property
    def size(self) -> int:
        """The number of its tokens."""
        return count_tokens(decode_history(self.packed).tokens)

    @cached_property
    def kept_bytes(self) -> int:
        """The memory that it takes."""
        return (
            STATE_BYTES + len(self.packed) + memory_bytes(self.facts.options, self.facts.defaults)
        )

    def defaults_on(
        self, requested: Mapping[str, Any], origins: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the defaults of a session on a graph with the options *requested*. The state's
        defaults replace the model's, which have *origins*; the graph's own replace both.
        """
        own = {name: value for name, value in requested.items() if name not in origins}
        return dict(requested) | self.facts.defaults | own

    def new_history(self) -> History:
        """Return a copy of its history."""
        return History.from_entry(decode_history(self.packed))
