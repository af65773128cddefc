"""The origin of a KV state: who made it, and whom it may serve."""

from __future__ import annotations

from dataclasses import dataclass

SCOPE_ALL = -1
"""The scope of KV states that serve every owner."""


def scoped(owner: int, session: str, *, shared: bool) -> tuple[int, str]:
    """Return the scope and the session's name in it; *shared* states serve every owner."""
    return (SCOPE_ALL, f"{owner}/{session}") if shared else (owner, session)


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose a KV state is, and whom it may serve.

    *scope* is the owner, or the same number for all where states are shared. *session* made it;
    an *approximate* state (its context was shifted) serves that session alone.
    """

    scope: int
    session: str = ""
    adapters: tuple[str, ...] = ()
    approximate: bool = False
    persist: bool = False

    def serves(self, other: Origin) -> bool:
        """Tell whether a state of this origin may serve a task of *other*."""
        if self.scope != other.scope or self.adapters != other.adapters:
            return False
        return not self.approximate or (bool(self.session) and self.session == other.session)
