"""The file of keys: the callers that may send requests, with their users and bounds.

The file has only the SHA-256 of each key. Keys are random and 256 bits long, so that no slower hash
is needed.
"""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ....backends.errors import InvalidArgument
from ....backends.params import fit_settings
from ....ipc.names import OWN_USER, check_label, check_user_name
from ....ipc.priorities import Priority
from .caller import Caller, DaemonUser

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
