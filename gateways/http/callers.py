"""Callers and their rights, the file of their keys, the requests and streams of events that each
caller has, and the tokens that it has used.

The file has only the SHA-256 of each key. Keys are random and 256 bits long, so that no slower hash
is needed.
"""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct

from ...backends.errors import Busy, InvalidArgument, PermissionDenied, QuotaExceeded
from ...backends.params import fit_settings
from ...ipc.model_names import find_name, model_not_found
from ...ipc.names import OWN_USER, Priority, check_key_name, check_label, check_user_name

PRIORITIES: tuple[Priority, ...] = get_args(Priority)


class UsageLimits(NamedTuple):
    """The limits of a key on its usage, which the daemon counts; 0 means none."""

    tokens_per_day: int = 0
    tokens_per_month: int = 0
    seconds_per_day: int = 0
    seconds_per_month: int = 0

    def given(self) -> dict[str, int]:
        """Return the limits that are set."""
        return {name: limit for name, limit in self._asdict().items() if limit}


class DaemonUser(NamedTuple):
    """The user, the label and the key for whom the gateway connects; no user means the gateway's
    own.
    """

    on_behalf_of: str = ""
    label: str = ""
    key: str = ""
    key_limits: UsageLimits = UsageLimits()

    @property
    def owner(self) -> tuple[str, str]:
        """The user and the label, to whom sessions belong, whatever the key."""
        return self.on_behalf_of, self.label


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
    tokens_per_day: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_month: Annotated[int, Meta(ge=1)] | None = None
    seconds_per_day: Annotated[int, Meta(ge=1)] | None = None
    seconds_per_month: Annotated[int, Meta(ge=1)] | None = None
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
    check_key_name(name)
    limits = UsageLimits(*(getattr(entry, field) or 0 for field in UsageLimits._fields))
    return Caller(
        name=name,
        user=DaemonUser(user, entry.label, name, limits),
        priority_max=entry.priority_max,
        models=None if entry.models is None else frozenset(entry.models),
        requests_max=entry.requests_max or 0,
        tokens_per_minute=entry.tokens_per_minute or 0,
        operator=entry.operator,
    )


READS_MAX = 64
"""Requests of one caller at once that compute nothing."""
STREAMS_MAX = 16
"""Streams of events that one caller has at once."""
_MINUTE_S = 60.0


class RequestKind(Enum):
    """The bound towards which a request counts."""

    COMPUTE = "requests-max"
    READ = "reads-max"
    EVENTS = "streams-max"


@dataclass(slots=True)
class _Bucket:
    """The tokens that a caller had left at the time `at`."""

    tokens: float
    at: float


class Quotas:
    """The use of the gateway by its callers. All methods are synchronous.

    A caller saves up the tokens of one minute at most. A caller with at least one token left may
    send a request that computes. The tokens of the request are deducted afterwards, even if that
    leaves less than none.
    """

    def __init__(self, requests_max: int, streams_max: int = 0):
        self._requests_max, self._streams_max = requests_max, streams_max
        self._counts: dict[RequestKind, Counter[str]] = {kind: Counter() for kind in RequestKind}
        self._buckets: dict[str, _Bucket] = {}

    def begin_request(
        self, caller: Caller, now: float, kind: RequestKind = RequestKind.COMPUTE
    ) -> None:
        """Count a request, until `end_request`.

        :raises Busy: the gateway has too many requests of this kind.
        :raises QuotaExceeded: the caller has too many of them, or has used its tokens.
        """
        self._check_total(kind)
        most = self._bound_of(caller, kind)
        if most and self._counts[kind][caller.name] >= most:
            what = "streams of events" if kind is RequestKind.EVENTS else "requests"
            raise QuotaExceeded(
                f"the caller has {most} {what} at once, its maximum",
                data={"bound": kind.value, kind.value.replace("-", "_"): most},
            )
        if kind is RequestKind.COMPUTE:
            self._check_tokens(caller, now)
        self._counts[kind][caller.name] += 1

    def _check_total(self, kind: RequestKind) -> None:
        events = kind is RequestKind.EVENTS
        kinds = [kind] if events else [RequestKind.COMPUTE, RequestKind.READ]
        most = self._streams_max if events else self._requests_max
        if sum(self._counts[each].total() for each in kinds) >= most:
            name = "streams" if events else "requests"
            raise Busy(
                f"the gateway has {most} {name}, its maximum",
                data={"bound": f"{name}-max", f"{name}_max": most},
            )

    def _check_tokens(self, caller: Caller, now: float) -> None:
        per_minute = caller.tokens_per_minute
        if per_minute:
            bucket = self._refill(caller, now)
            if bucket.tokens < 1:
                wait_s = (1 - bucket.tokens) * _MINUTE_S / per_minute
                raise QuotaExceeded(
                    f"the key has used its {per_minute} tokens per minute",
                    data={
                        "bound": "tokens-per-minute",
                        "tokens_per_minute": per_minute,
                        "retry_after_s": wait_s,
                    },
                )

    def end_request(self, caller: Caller, kind: RequestKind = RequestKind.COMPUTE) -> None:
        """Stop counting a request."""
        counts = self._counts[kind]
        counts[caller.name] -= 1
        if not counts[caller.name]:
            del counts[caller.name]

    def charge_tokens(self, caller: Caller, tokens: int, now: float) -> None:
        """Deduct tokens that a caller has used."""
        if caller.tokens_per_minute:
            self._refill(caller, now).tokens -= tokens

    def _refill(self, caller: Caller, now: float) -> _Bucket:
        most = float(caller.tokens_per_minute)
        bucket = self._buckets.setdefault(caller.name, _Bucket(most, now))
        bucket.tokens = min(most, bucket.tokens + (now - bucket.at) * most / _MINUTE_S)
        bucket.at = now
        return bucket

    def _bound_of(self, caller: Caller, kind: RequestKind) -> int:
        """Return the most requests of a kind that a caller may have at once, or 0 without a bound.
        A caller with a key leaves an eighth of all requests to others.
        """
        if kind is not RequestKind.COMPUTE:
            return STREAMS_MAX if kind is RequestKind.EVENTS else READS_MAX
        if caller.requests_max or not caller.name:
            return caller.requests_max
        return self._requests_max - self._requests_max // 8
