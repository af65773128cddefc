"""A key of another wasi-nn system, and its effect in inferd."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from inferd.backends.params import IGNORED_KEYS, REFUSED_KEYS

NONE = "–"
GUESTS_CANNOT = "guests cannot set it"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The effect of *value*. It sets the parameters of `used`, or only the operator can set them,
    or it is ignored or refused. It is sent with the keys of `beside`, which it needs.
    """

    value: Any
    effect: Literal["sets", "operator", "ignored", "refused"]
    used: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)
    is_adjusted: bool = False
    """Whether `adjusted` reports that another value is used."""
    number: int = 6
    """The number of the error of a refused key."""
    deviation: str = NONE


def sets(parameter: str, value: Any, deviation: str = NONE, **options: Any) -> Row:
    """Return the row of a key that sets a parameter. *options* may have `read`, the value that the
    parameter gets if it is not *value*, and other fields of the row.
    """
    used = {parameter: options.pop("read", value)}
    return Row(value=value, effect="sets", used=used, deviation=deviation, **options)


def operator(parameter: str, value: Any, deviation: str = GUESTS_CANNOT, **options: Any) -> Row:
    """Return the row of a key whose parameter only the operator sets. The arguments are those of
    `sets`.
    """
    used = {parameter: options.pop("read", value)}
    return Row(value=value, effect="operator", used=used, deviation=deviation, **options)


def ignored(value: Any, keys: str, more: str = "") -> dict[str, Row]:
    """Return the rows of ignored *keys*, by key; *more* follows the reason."""
    return {
        key: Row(value=value, effect="ignored", deviation=IGNORED_KEYS[key] + more)
        for key in keys.split()
    }


def refused(value: Any, keys: str) -> dict[str, Row]:
    """Return the rows of refused *keys*, by key."""
    return {
        key: Row(value=value, effect="refused", deviation=REFUSED_KEYS[key]) for key in keys.split()
    }
