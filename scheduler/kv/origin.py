"""The origin of a KV state: the user, session and adapters that bound its use."""

from __future__ import annotations

from dataclasses import dataclass

SCOPE_ALL = -1
"""The scope of KV states that serve every user."""


NAMED_STATE = "state:"
"""The beginning of the engine's names of named states; no session's name begins with it."""


def name_of_state(label: str, name: str) -> str:
    """Return the engine's name of a named state. A label has no slash."""
    return f"{NAMED_STATE}{label}/{name}"


def is_named_state(scope: int, session: str) -> bool:
    """Return whether a KV state belongs to a named state, by its scope and its name there."""
    own = session.partition("/")[2] if scope == SCOPE_ALL else session
    return own.startswith(NAMED_STATE)


def scoped(user: int, session: str, *, shared: bool) -> tuple[int, str]:
    """Return the scope and the session's name in it; *shared* states serve every user."""
    return (SCOPE_ALL, f"{user}/{session}") if shared else (user, session)


@dataclass(frozen=True, slots=True)
class Origin:
    """The tasks that a KV state may serve.

    *scope* is the user, or `SCOPE_ALL` if states are shared. *session* computed the state. An
    *approximate* state, whose context was shifted, serves only that session.
    """

    scope: int
    session: str = ""
    adapters: tuple[str, ...] = ()
    approximate: bool = False
    persist: bool = False

    def serves(self, other: Origin) -> bool:
        """Return whether a state of this origin may serve a task of *other*."""
        if self.scope != other.scope or self.adapters != other.adapters:
            return False
        return not self.approximate or (bool(self.session) and self.session == other.session)
