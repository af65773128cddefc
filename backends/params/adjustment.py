"""Adjustment of parameters that depend on each other, by rules that also report errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .parameter_table import BY_NAME, FORMATS, OverflowPolicy


class Adjustment:
    """The parameters that the rules check: *values* so far, reasons for changes, and errors."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)
        self.reasons: dict[str, str] = {}
        """By the name of each adjusted parameter."""
        self.errors: list[str] = []

    def value_of(self, name: str) -> Any:
        """Return the value of a parameter, or its default."""
        return self.values.get(name, BY_NAME[name].default)

    @property
    def has_grammar(self) -> bool:
        """Whether the answer follows a grammar, given in one of the formats."""
        return any(map(self.value_of, FORMATS))

    def adjust(self, name: str, reason: str, value: Any) -> None:
        """Replace the value of a parameter."""
        self.values[name], self.reasons[name] = value, reason

    def limit(self, name: str, count: int, most: int, unit: str) -> None:
        """Refuse *count* if it exceeds *most*; *unit* follows the number in the error."""
        if count > most:
            self.errors.append(f"{name}: {count} {unit}; {most} at most")


Rule = Callable[[Adjustment], None]


def overflow_beside(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `overflow` and `ctx-shift` that follow from the other one in *layer*,
    whose values replace those of *base*: the newer one of them applies. Only a layer with both can
    combine, say, `drop-turns` with a shift within the answer.
    """
    shift, auto = OverflowPolicy.SHIFT.value, OverflowPolicy.AUTO.value
    if "overflow" in layer:
        return {"ctx-shift": layer["overflow"] == shift} if "ctx-shift" not in layer else {}
    if layer.get("ctx-shift"):
        return {"overflow": shift}
    if "ctx-shift" in layer and base.get("overflow") == shift:
        return {"overflow": auto}
    return {}


def fields_of(kind: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of *kind* that *values* (by parameter name) has, with lists as tuples."""
    names = {field: field.replace("_", "-") for field in kind.__struct_fields__}
    return {field: _as_tuple(values[name]) for field, name in names.items() if name in values}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
