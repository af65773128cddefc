"""A sender of requests as the gateway knows it: its user in the daemon, its rights and bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

from ....backends.errors import PermissionDenied
from ....ipc.model_names import find_name, model_not_found
from ....ipc.priorities import Priority

PRIORITIES: tuple[Priority, ...] = get_args(Priority)


class DaemonUser(NamedTuple):
    """The user and the label for whom the gateway connects; no user means the gateway's own."""

    on_behalf_of: str = ""
    label: str = ""


_GATEWAY = DaemonUser()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request.

    If *models* is None, it may use all of the daemon's. An *operator* may load, unload and swap
    models. If *requests_max* or *tokens_per_minute* is 0, only the bounds of the gateway and of the
    daemon apply.
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

        :raises PermissionDenied: the caller is not an operator.
        """
        if not self.operator:
            raise PermissionDenied(
                "only an operator may load, unload and swap models",
                hint="use a key that has `operator = true` in the gateway's file of keys",
                data={"right": "manage"},
            )
        return replace(self, user=_GATEWAY)

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use a model."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> str:
        """Return the name of the model that *model* means among those that the caller may use;
        other models do not exist for it. A caller that may use all leaves this to the daemon.

        :raises ModelNotFound: the caller may not use the model.
        """
        if self.models is None:
            return model
        found = find_name(model, self.models)
        if found is None:
            advice = "GET /v1/models lists the models"
            raise model_not_found(model, self.models, f"there is no model {model[:200]!r}", advice)
        return found

    def class_of(self, priority: Priority | None, default: Priority = "normal") -> Priority:
        """Return the class of a request: its *priority*, or *default* lowered to the caller's
        highest. `check_priority` refuses a *priority* that is too high.
        """
        if priority is not None:
            return priority
        return min(default, self.priority_max, key=PRIORITIES.index)

    def check_priority(self, priority: Priority) -> None:
        """Check that the caller may use a priority class.

        :raises PermissionDenied: the class is higher than the caller's highest.
        """
        if PRIORITIES.index(priority) > PRIORITIES.index(self.priority_max):
            raise PermissionDenied(
                f"the priority {priority!r} is above {self.priority_max!r}, the highest one here",
                hint="request a lower one, or use a key with a higher `priority-max`",
                data={"priority_max": self.priority_max, "param": "priority"},
            )


LOCAL = Caller()
"""Every caller of a gateway without keys: it may use models, up to the class `normal`."""
