"""Reading of parameters from JSON objects, in wasi-nn calls, inferd's calls and configurations."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from ..errors import InvalidArgument, InvalidEncoding, TooLarge, UnsupportedOperation
from ..texts import plain_number, shorten
from .chat_options import (
    read_answer_format,
    read_arguments,
    read_choice,
    read_efforts,
    read_tool_choice,
    read_tools,
)
from .fitting import without_nulls
from .json_texts import JSON_BYTES_MAX, decode_json, read_schema
from .numbers_of_items import check_distinct, check_list_text, read_biases, read_scales, read_shares
from .other_runtimes import (
    CONFIGURED,
    DEFAULT_SENTINEL,
    FORMS,
    IGNORED_KEYS,
    REFUSED_KEYS,
    UNTIL_FULL,
    Clamp,
    adjust_value,
    read_token,
    read_triggers,
    reduce_seed,
)
from .parameter_table import (
    BY_NAME,
    BY_SPELLING,
    FORMATS,
    PARAMETERS_HINT,
    SAMPLERS,
    Kind,
    Level,
    Parameter,
)
from .structural_tags import read_structural_tag

KEY_CHARACTERS_MAX = 100
"""A longer key is not taken for a misspelling; messages shorten it and suggest no other."""
KEYS_MAX = 256
"""Keys of one object and its sections."""
ERRORS_MAX = 16
"""Errors that are reported together; reading ends at this number."""
LIST_ITEMS_MAX = 10_000
"""Items of one list."""
TEXT_CHARACTERS_MAX = 64 << 10
"""Characters of one text, and of all texts of one list."""
REFUSED_HINT = "leave the key out; inferd writes text only"

_SECTIONS = {
    "model": "",
    "runtime": "",
    "backend": "",
    "sampling": "",
    "sampling.dynatemp": "dynatemp-",
    "sampling.dry": "dry-",
    "sampling.xtc": "xtc-",
    "sampling.mirostat": "mirostat-",
    "stopping": "",
    "memory": "",
    "memory-policy": "",
    "memory-management": "",
    "memory-management.cache-policy": "",
    "performance": "",
    "logging": "",
}
"""Objects whose keys are read as top-level keys, with the prefix that these get."""
_LEVELS = {
    "response-format": 2,
    **dict.fromkeys(("structured-outputs", "dynamic-timeout", "lora", "grammar-triggers"), 1),
    **dict.fromkeys((f"{kind}-conditions" for kind in ("token", "pattern", "semantic")), 1),
}
"""By the spelling of a key, the levels of objects in its value in which a null counts as absent."""
SECTION_NAMES = tuple(name for name in _SECTIONS if "." not in name)
_SAMPLER_SPELLINGS = {n.replace("-", ""): n for n in SAMPLERS} | {
    "temp": "temperature",
    "typical": "typ-p",
    "typicalp": "typ-p",
    "nucleus": "top-p",
}
"""By a sampler's spelling without hyphens, its name."""


class Options(msgspec.Struct, kw_only=True):
    """The parameters that were read from a JSON object."""

    values: dict[str, Any] = {}
    """By parameter name."""
    ignored: list[str] = []
    """The keys that have no effect, as they were given."""
    adjusted: dict[str, str] = {}
    """By parameter name, the reason why the value was adjusted."""

    def level(self, *levels: Level) -> dict[str, Any]:
        """Return the values of the parameters of *levels*."""
        return {k: v for k, v in self.values.items() if BY_NAME[k].level in levels}


def nearest(key: str, keys: Iterable[str]) -> str:
    """Return a question that suggests the one of *keys* nearest to *key* in any case, or an empty
    text.
    """
    if len(key) > KEY_CHARACTERS_MAX:
        return ""
    spelled = {known.lower(): known for known in keys}
    close = difflib.get_close_matches(key.lower(), list(spelled), n=1, cutoff=0.6)
    return f"did you mean {spelled[close[0]]!r}?" if close else ""


def parse_json_options(text: bytes | str, *, strict: bool = False) -> Options:
    """Read the JSON text of a wasi-nn call; an empty text is an empty object. Without *strict*,
    values out of their range are adjusted.

    :raises InvalidEncoding: *text* is not a JSON object.
    :raises InvalidArgument: a value is wrong, or, with *strict*, a key is unknown.
    :raises UnsupportedOperation: an answer that ignores one of the keys would be wrong.
    :raises TooLarge: *text* is too long, or has too many values or keys.
    """
    if len(text) <= JSON_BYTES_MAX and not text.strip():
        return Options()
    try:
        value = decode_json(text, dict[str, Any])
    except ValueError as exc:
        raise InvalidEncoding(
            f"the metadata is not a JSON object: {exc}", hint='send one JSON object, as {"temp":0}'
        ) from None
    return read_options(value, strict=strict, lenient=True)


def parse_turn_json(text: bytes | str) -> Options:
    """Read the JSON text of a `run_inference`, as `parse_json_options`. As in wasi_nn_backend, -1
    means the configured default of each number, also where it is within the number's range.
    """
    options = parse_json_options(text)
    for name, value in [*options.values.items()]:
        is_number = BY_NAME[name].kind in ("int", "float")
        if is_number and value == DEFAULT_SENTINEL.value and name not in options.adjusted:
            del options.values[name]
            options.adjusted[name] = DEFAULT_SENTINEL.reason
    return options


def read_options(raw: Mapping[str, Any], *, strict: bool = False, lenient: bool = False) -> Options:
    """Read parameters from a decoded object; `ignored` lists unknown keys. With *lenient* and
    without *strict*, values out of their range are `adjusted` as by `adjust_value`.

    Of several spellings of one parameter the last one applies. The first `ERRORS_MAX` errors are
    reported together, each with key, value and range; one of them suggests the nearest known key.

    :raises InvalidArgument: a value is wrong, or, with *strict* (or ``"strict": true``), a key is
        unknown.
    :raises UnsupportedOperation: an answer that ignores one of the keys would be wrong.
    :raises TooLarge: there are more than `KEYS_MAX` keys.
    """
    options = Options()
    errors: list[str] = []
    formats: dict[str, tuple[str, str]] = {}
    suggests = True
    strict = strict or raw.get("strict") is True
    keys = [*islice(flat_keys(raw), KEYS_MAX + 1)]
    if len(keys) > KEYS_MAX:
        raise TooLarge(f"more than {KEYS_MAX} keys", data={"keys_max": KEYS_MAX})
    applies = {
        BY_SPELLING[name].name: number
        for number, (_, name, value) in enumerate(keys)
        if _is_plain(name, value)
    }
    for number, (key, name, value) in enumerate(keys):
        if value is None or (name == "strict" and isinstance(value, bool)):
            continue
        if _is_plain(name, value) and applies[BY_SPELLING[name].name] != number:
            continue  # it may be large, and is not read
        value = without_nulls(value, _LEVELS.get(name, 0))
        try:
            values = FORMS[name](value) if name in FORMS else {name: value}
        except ValueError as exc:
            errors.append(f"{key}: {exc}")
            continue
        for spelling, item in values.items():
            if spelling in FORMATS and (name in FORMS or item not in ("", None)):
                other, other_name = formats.setdefault(spelling, (key, name))
                if other_name != name and FORMS.keys() & {name, other_name}:
                    errors.append(f"{key}: {other} is given too; leave one of them out")
            if spelling in BY_SPELLING:
                _read_value(
                    BY_SPELLING[spelling],
                    key,
                    item,
                    options,
                    errors,
                    lenient=not strict and lenient,
                )
            elif strict:
                errors.append(_unknown(key, spelling, suggests=suggests))
                suggests = False
            elif spelling in REFUSED_KEYS and item:
                raise UnsupportedOperation(f"{key}: {REFUSED_KEYS[spelling]}", hint=REFUSED_HINT)
            else:
                options.ignored.append(key)
        if len(errors) >= ERRORS_MAX:
            break
    if options.adjusted.get("n-predict") == UNTIL_FULL:
        if options.values.get("ctx-shift"):
            options.adjusted["ctx-shift"] = "n-predict -2 ends the turn when the context is full"
        options.values["ctx-shift"] = False
    if errors:
        raise InvalidArgument("; ".join(errors), hint=PARAMETERS_HINT, data={"errors": errors})
    return options


def _is_plain(name: str, value: Any) -> bool:
    """Return whether a key is a spelling of one parameter, and gives it a value."""
    return value is not None and name in BY_SPELLING and name not in FORMS


def flat_keys(raw: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the keys of *raw* and of the sections in it: each key as it is given, its spelling with
    the section's prefix, and its value.
    """
    prefix = _SECTIONS.get(path, "")
    for key, value in raw.items():
        spelling = str(key).lower().replace("_", "-")
        section = f"{path}.{spelling}" if path else spelling
        if section in _SECTIONS and isinstance(value, Mapping):
            yield from flat_keys(value, section)
        else:
            yield str(key)[:KEY_CHARACTERS_MAX], prefix + spelling, value


def _unknown(key: str, name: str, *, suggests: bool) -> str:
    if name in IGNORED_KEYS:
        return f"key {key!r} has no effect here: {IGNORED_KEYS[name]}"
    if name in REFUSED_KEYS:
        return f"key {key!r} is not supported: {REFUSED_KEYS[name]}"
    close = nearest(name, BY_SPELLING) if suggests else ""
    return f"unknown key {key!r}" + (f"; {close}" if close else "")


def _read_value(
    parameter: Parameter,
    key: str,
    value: Any,
    options: Options,
    errors: list[str],
    *,
    lenient: bool,
) -> None:
    used, reason = reduce_seed(parameter, value) if parameter.name == "seed" else (value, "")
    if lenient and not reason:
        used, reason = adjust_value(parameter, value)
    if used is CONFIGURED:
        options.values.pop(parameter.name, None)
        options.adjusted[parameter.name] = reason
        return
    try:
        if parameter.kind in _ITEM_READERS:
            clamp = Clamp() if lenient else None
            options.values[parameter.name] = _ITEM_READERS[parameter.kind](used, clamp)
            reason = clamp.reason if clamp else ""
        else:
            options.values[parameter.name] = _READERS[parameter.kind](parameter, used)
        options.adjusted.pop(parameter.name, None)
        if reason:
            options.adjusted[parameter.name] = reason
    except RecursionError:
        errors.append(f"{key}: it nests too deep")
    except ValueError as exc:
        errors.append(f"{key}: {exc}")


def _read_bool(_: Parameter, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shorten(value)} is neither true nor false")
    return value


def _read_int(parameter: Parameter, value: Any) -> int:
    number = _read_float(parameter, value)
    if number != int(number):
        raise ValueError(f"{shorten(value)} is not a whole number")
    return int(value)


def _read_float(parameter: Parameter, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shorten(value)} is not a number")
    if not parameter.low <= value <= parameter.high:
        low, high = parameter.low, parameter.high
        valid = min(max(value, low), high) if value == value else low
        bounds, nearest_valid = f"{plain_number(low)} … {plain_number(high)}", plain_number(valid)
        raise ValueError(f"{shorten(value)} is outside {bounds}; nearest: {nearest_valid}")
    return float(value)


def _read_text(_: Parameter, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shorten(value)} is not a text")
    if len(value) > TEXT_CHARACTERS_MAX:
        raise ValueError(f"a text of {len(value)} characters; {TEXT_CHARACTERS_MAX} at most")
    if "\0" in value:
        raise ValueError("it contains a NUL")
    return value


def _read_texts(_: Parameter, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
        raise ValueError(f"{shorten(value)} is neither a text nor a list of texts")
    _check_length(items)
    return [i for i in items if i]


def _read_samplers(_: Parameter, value: Any) -> list[str]:
    """Read sampler names, with `_`, `-` or neither, or llama-server's letters."""
    check_list_text(value)
    letters = {letter: name for name, letter in SAMPLERS.items()}
    if isinstance(value, str) and all(c in letters for c in value):
        samplers = [letters[c] for c in value]
    else:
        names = value.replace(";", ",").split(",") if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"{shorten(value)} is neither a list of samplers nor their letters")
        _check_length(names)
        samplers = [_sampler(name) for name in names]
    check_distinct("sampler", samplers)
    return samplers


def _sampler(name: str) -> str:
    spelling = name.strip().lower().replace("_", "-")
    try:
        return _SAMPLER_SPELLINGS[spelling.replace("-", "")]
    except KeyError:
        hint = nearest(spelling, SAMPLERS) or f"there are {', '.join(SAMPLERS)}"
        raise ValueError(f"there is no sampler {shorten(name)}; {hint}") from None


def _read_tokens(_: Parameter, value: Any) -> list[int]:
    items = value if isinstance(value, list) else [value]
    _check_length(items)
    return [read_token(item) for item in items]


def _check_length(items: list[Any]) -> None:
    if len(items) > LIST_ITEMS_MAX:
        raise ValueError(f"{len(items)} items; {LIST_ITEMS_MAX} at most")
    characters = sum(len(item) for item in items if isinstance(item, str))
    if characters > TEXT_CHARACTERS_MAX:
        raise ValueError(f"texts of {characters} characters; {TEXT_CHARACTERS_MAX} at most")


_READERS: dict[Kind, Callable[[Parameter, Any], Any]] = {
    "bool": _read_bool,
    "int": _read_int,
    "float": _read_float,
    "text": _read_text,
    "texts": _read_texts,
    "schema": lambda _, value: read_schema(value),
    "samplers": _read_samplers,
    "tokens": _read_tokens,
    "triggers": lambda _, value: read_triggers(value),
    "structural-tag": lambda _, value: read_structural_tag(value),
    "choice": read_choice,
    "tools": read_tools,
    "tool-choice": read_tool_choice,
    "arguments": read_arguments,
    "efforts": read_efforts,
    "answer-form": read_answer_format,
}
_ITEM_READERS: dict[Kind, Callable[[Any, Clamp | None], Any]] = {
    "biases": read_biases,
    "shares": read_shares,
    "scales": read_scales,
}


def check_turn_level(values: Mapping[str, Any]) -> None:
    """Refuse parameters that cannot apply to a single turn; a smaller context can.

    :raises InvalidArgument: there are some.
    """
    others = [n for n in values if BY_NAME[n].level != "request" and n != "ctx-size"]
    if others:
        raise InvalidArgument(
            "; ".join(f"{n}: applies to a {BY_NAME[n].level}, not to a turn" for n in others),
            hint="set_options sets a context's, the daemon's configuration a model's",
            data={"errors": others},
        )
