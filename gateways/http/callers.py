"""Callers and their rights, and the file of their keys.

The file has only the SHA-256 of each key. Keys are random and 256 bits long, so that no slower hash
is needed.
"""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct

from ...backends.errors import InvalidArgument, PermissionDenied
from ...backends.params import fit_settings
from ...ipc.model_names import find_name, model_not_found
from ...ipc.names import OWN_USER, check_label, check_user_name
from ...ipc.priorities import Priority

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


KEYS_MAX = 1000
KEY_CHARACTERS_MAX = 512
FILE_BYTES_MAX = 1 << 20
_PREFIX = "sk-inferd-"
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class KeyEntry(Struct, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """A key in the file, ``[keys.NAME]``."""

    sha256: _Sha256
    user: str | None = None
    label: str = ""
    priority_max: Priority = "normal"
    models: Annotated[list[str], Meta(max_length=1000)] | None = None
    requests_max: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    operator: bool = False


class _KeysFile(Struct, kw_only=True, forbid_unknown_fields=True):
    keys: Annotated[dict[str, KeyEntry], Meta(min_length=1, max_length=KEYS_MAX)]


class Keys:
    """The callers by their keys."""

    def __init__(self, path: Path):
        self._path = path
        self._callers = _read_file(path)

    def reload(self) -> None:
        """Read the file again; the previous keys stay if that fails.

        :raises InvalidArgument: the file cannot be read, or has mistakes.
        """
        self._callers = _read_file(self._path)

    def find_caller(self, key: str) -> Caller | None:
        """Return the caller with this key, or None."""
        if not 0 < len(key) <= KEY_CHARACTERS_MAX:
            return None
        # The time of the lookup reveals nothing, because a caller cannot choose the hash of a key.
        return self._callers.get(_hash(key))


def new_key(name: str) -> tuple[str, str]:
    """Return a new key, and its entry for the file.

    :raises InvalidArgument: *name* is not allowed as the name of a user.
    """
    check_user_name(f"{OWN_USER}{name}")
    key = _PREFIX + secrets.token_urlsafe(32)
    table = name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'
    return key, f'[keys.{table}]\nsha256 = "{_hash(key)}"\n'


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _read_file(path: Path) -> Mapping[str, Caller]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
        content = fit_settings(tomllib.loads(data.decode()), _KeysFile)
        entries = msgspec.convert(content, _KeysFile).keys
        callers = {entry.sha256: _caller(name, entry) for name, entry in entries.items()}
        if len(callers) < len(entries):
            raise ValueError("two keys are equal")
        return callers
    except OSError as exc:
        problem: Any = exc.strerror
    except (ValueError, InvalidArgument) as exc:  # msgspec's and tomllib's errors are ValueErrors
        problem = exc
    raise InvalidArgument(
        f"the keys in {path} cannot be read: {problem}",
        hint="correct it; `inferd gateway --new-key NAME` prints a correct entry",
    )


def _caller(name: str, entry: KeyEntry) -> Caller:
    user = f"{OWN_USER}{name}" if entry.user is None else entry.user
    check_user_name(user)
    check_label(entry.label)
    return Caller(
        name=name,
        user=DaemonUser(user, entry.label),
        priority_max=entry.priority_max,
        models=None if entry.models is None else frozenset(entry.models),
        requests_max=entry.requests_max or 0,
        tokens_per_minute=entry.tokens_per_minute or 0,
        operator=entry.operator,
    )
