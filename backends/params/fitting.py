"""Values of plain types in the form that a type expects, before they are converted to it.

A whole number written as a float, such as 1000.0, is an integer, as in JSON Schema: programs whose
numbers are all floats write them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from ..texts import choice_of
from .parameter_table import BY_NAME, FORMATS, OverflowPolicy

__all__ = ("Fitting", "as_whole", "fit_settings", "with_whole_numbers", "without_nulls")

_WHOLE_END = 1 << 63
UNKNOWN_MAX = 64
"""Names of unknown fields that are noted for one value."""


def as_whole(value: Any) -> Any:
    """Return a float that is a whole number of 64 bits as an int, and any other value unchanged."""
    if isinstance(value, float) and value.is_integer() and -_WHOLE_END <= value < _WHOLE_END:
        return int(value)
    return value


def without_nulls(value: Any, levels: int) -> Any:
    """Return *value* without the nulls in its objects, down to the given number of *levels* of
    objects. Deeper ones have values of the caller's tools, in which a null may mean something.
    """
    if isinstance(value, list) and levels:  # lists in lists stay, however deep they are
        return [without_nulls(v, levels) if isinstance(v, dict) else v for v in value]
    if not isinstance(value, dict) or not levels:
        return value
    return {n: without_nulls(v, levels - 1) for n, v in value.items() if v is not None}


def with_whole_numbers(value: Any, kind: Any) -> Any:
    """Return *value* with ints in place of whole floats where the type *kind* has ints."""
    return Fitting().fit(value, kind)


def fit_settings(value: Any, kind: Any) -> Any:
    """Return the content of a file of settings with ints in place of whole floats, and with words
    in the spelling of the type *kind*.
    """
    return Fitting(any_case=True).fit(value, kind)


@cache
def _type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _allows_null(kind: inspect.Type) -> bool:
    match kind:
        case inspect.Metadata(type=inner):
            return _allows_null(inner)
        case inspect.UnionType(types=types):
            return any(map(_allows_null, types))
    return isinstance(kind, inspect.NoneType | inspect.AnyType)


class Fitting:
    """The fitting of one value to a type. With *nulls_absent*, a null in a field whose type has no
    null counts as absent; with *any_case*, words are read as by `choice_of`. `unknown` has the
    places of the first fields that a struct lacks.
    """

    def __init__(self, *, nulls_absent: bool = False, any_case: bool = False):
        self._nulls_absent, self._any_case = nulls_absent, any_case
        self.unknown: list[str] = []

    def fit(self, value: Any, kind: Any) -> Any:
        """Return *value*, of plain types, fitted to the type *kind*."""
        return self._fit(value, _type_of(kind), "")

    def _is_fitting(self, value: Any) -> bool:
        """Return whether a list has only items that are never changed."""
        return isinstance(value, list) and not (
            self._any_case or any(type(item) in (float, list, dict) for item in value)
        )

    def _fit(self, value: Any, kind: inspect.Type, place: str) -> Any:
        match kind:
            case inspect.Metadata(type=inner):
                return self._fit(value, inner, place)
            case inspect.UnionType(types=types):
                return self._fit_union(value, types, place)
            case inspect.IntType():
                return as_whole(value)
            case inspect.LiteralType(values=values) if self._any_case and isinstance(value, str):
                return choice_of(value, [each for each in values if isinstance(each, str)]) or value
            case inspect.LiteralType(values=values):
                return as_whole(value) if any(isinstance(each, int) for each in values) else value
            case inspect.StructType(fields=fields) if isinstance(value, dict):
                return self._fit_fields(value, {f.encode_name: f.type for f in fields}, place)
            case inspect.DictType(value_type=inner) if isinstance(value, dict):
                return self._fit_fields(value, dict.fromkeys(value, inner), place)
            case inspect.ListType() if self._is_fitting(value):
                return value
            case inspect.ListType(item_type=inner) if isinstance(value, list):
                return [self._fit(item, inner, f"{place}{n}.") for n, item in enumerate(value)]
            case inspect.TupleType(item_types=inners) if isinstance(value, list):
                if len(value) == len(inners):
                    return [self._fit(v, k, place) for v, k in zip(value, inners, strict=True)]
        return value

    def _fit_union(self, value: Any, kinds: tuple[inspect.Type, ...], place: str) -> Any:
        """Return *value* fitted to the one of *kinds* that has its shape."""
        shapes: dict[type, tuple[type, ...]] = {
            dict: (inspect.StructType, inspect.DictType),
            list: (inspect.ListType, inspect.TupleType),
            float: (inspect.FloatType, inspect.IntType, inspect.LiteralType),
        }
        for shape in shapes.get(type(value), ()):
            for kind in kinds:
                if isinstance(kind, shape):
                    return self._fit(value, kind, place)
        return value

    def _fit_fields(
        self, value: dict[Any, Any], kinds: dict[Any, inspect.Type], place: str
    ) -> dict[Any, Any]:
        fitted = {}
        for name, item in value.items():
            kind = kinds.get(name)
            if kind is None and (item is not None or not self._nulls_absent):
                if len(self.unknown) < UNKNOWN_MAX:
                    self.unknown.append(f"{place}{name}")
                fitted[name] = item
            elif kind is not None and self._keeps(item, kind):
                fitted[name] = self._fit(item, kind, f"{place}{name}.")
        return fitted

    def _keeps(self, item: Any, kind: inspect.Type) -> bool:
        return item is not None or not self._nulls_absent or _allows_null(kind)


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
