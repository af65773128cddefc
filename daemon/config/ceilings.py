"""The form of ceilings on reasoning: one number of tokens for all classes, or one for each."""

from __future__ import annotations

from typing import Any

from ...backends.params import BY_NAME, as_whole
from ...backends.texts import shorten
from ...scheduler import PRIORITIES
from .declaration import Form, Schema

REASONING_MAX = int(BY_NAME["reasoning-budget"].high)
_REASONING_TOKENS: Schema = {"type": "integer", "minimum": 0, "maximum": REASONING_MAX}


def _parse_reasoning_max(value: Any) -> dict[str, int]:
    """Return the maximum number of tokens by class, given as one number for all classes, a table,
    or a text such as `low=1000,normal=8000`.
    """
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        numbers = {name.strip(): number.strip() for name, _, number in pairs}
        value = {k: int(v) if v.isascii() and v.isdigit() else v for k, v in numbers.items()}
        if list(value.values()) == [""]:  # a number alone
            [number] = value
            value = int(number) if number.isascii() and number.isdigit() else value
    value = as_whole(value)
    given = dict.fromkeys(PRIORITIES, value) if not isinstance(value, dict) else value
    found, wrong = dict[str, int](), list[str]()
    for name, number in ((key, as_whole(item)) for key, item in given.items()):
        if name not in PRIORITIES:
            wrong.append(f"{shorten(name)} is not one of {', '.join(PRIORITIES)}")
        elif type(number) is not int or not 0 <= number <= REASONING_MAX:
            wrong.append(f"{shorten(number)} is not a number of tokens, 0 … {REASONING_MAX}")
        else:
            found[name] = number
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    return found


REASONING_CEILINGS = Form(
    _parse_reasoning_max,
    {
        "anyOf": [
            _REASONING_TOKENS,
            {
                "type": "object",
                "properties": dict.fromkeys(PRIORITIES, _REASONING_TOKENS),
                "additionalProperties": False,
            },
            {"type": "string"},
        ]
    },
)
