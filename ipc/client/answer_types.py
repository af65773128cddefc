"""Answers as instances of types: the type's JSON schema before the turn, the instance after it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ...backends.errors import InvalidAnswer, InvalidArgument
from .texts import Reply

T = TypeVar("T")
_CUT = ("length", "context_full", "time")
"""Stop reasons of answers that are cut off."""


def schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON schema of *kind*: a pydantic model, a dataclass, a struct of msgspec, or any
    other type that msgspec knows.

    :raises InvalidArgument: it has none.
    """
    pydantic = getattr(kind, "model_json_schema", None)
    try:
        found: dict[str, Any] = msgspec.json.schema(kind) if pydantic is None else pydantic()
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(
            f"{kind!r} has no JSON schema: {exc}",
            hint="pass a struct of msgspec, a dataclass or a pydantic model, or `json_schema`",
        ) from None
    return found


def read_answer(reply: Reply, kind: type[T]) -> T:
    """Return the JSON of *reply* as an instance of *kind*.

    :raises InvalidAnswer: it is not complete JSON, or does not fit.
    """
    text = str(reply)  # msgspec takes no subclass
    pydantic = getattr(kind, "model_validate_json", None)
    try:
        found: T = msgspec.json.decode(text, type=kind) if pydantic is None else pydantic(text)
    except ValueError as exc:  # the base of the errors of msgspec and pydantic
        reason = reply.metadata.get("stop_reason") or ""
        cut = f"was cut off ({reason}) and " if reason in _CUT else ""
        raise InvalidAnswer(
            f"the answer {cut}is not a {kind.__name__}: {' '.join(str(exc).split())}",
            hint="raise n_predict, or shorten the schema" if cut else "",
            data={"text": text, "stop_reason": reason},
        ) from None
    return found
