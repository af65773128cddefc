"""A sender of requests as the gateway knows it: its user in the daemon, its rights and bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

from ....backends.errors import ModelNotFound, PermissionDenied
from ....ipc.priorities import Priority

PRIORITIES: tuple[Priority, ...] = get_args(Priority)


class DaemonUser(NamedTuple):
    """The user and the label for whom the gateway connects; without a user it is its own."""

    on_behalf_of: str = ""
    label: str = ""


_GATEWAY = DaemonUser()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request.

    *models* None means all of the daemon's. An *operator* may load, unload and swap models.
    *requests_max* and *tokens_per_minute* 0 mean only the gateway's and the daemon's own bounds.
    """

    name: str = ""
    user: DaemonUser = _GATEWAY
    priority_max: Priority = "normal"
    models: frozenset[str] | None = None
    requests_max: int = 0
    tokens_per_minute: int = 0
    operator: bool = False

    def as_operator(self) -> Caller:
        """Return this caller as the gateway's own user, which may have the right to manage models.

        :raises PermissionDenied: it is not an operator.
        """
        if not self.operator:
            raise PermissionDenied(
                "only an operator may load, unload and swap models",
                hint="use a key that has `operator = true` (docs/gateway.md)",
                data={"right": "manage"},
            )
        return replace(self, user=_GATEWAY)

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use a model."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Check that the caller may use a model; another one is unknown to it.

        :raises ModelNotFound: it may not.
        """
        if not self.may_use(model):
            raise ModelNotFound(
                f"there is no model {model!r}",
                hint="GET /v1/models lists the models",
                data={"models": sorted(self.models or ())},
            )

    def check_priority(self, priority: Priority) -> None:
        """Check a class.

        :raises PermissionDenied: it is higher than the caller's highest.
        """
        if PRIORITIES.index(priority) > PRIORITIES.index(self.priority_max):
            raise PermissionDenied(
                f"the priority {priority!r} is above {self.priority_max!r}, the highest one here",
                hint="ask for a lower one; keys may have a higher one (docs/gateway.md)",
                data={"priority_max": self.priority_max, "param": "priority"},
            )


LOCAL = Caller()
"""Every caller of a gateway without keys: it may use models, up to the class `normal`."""
