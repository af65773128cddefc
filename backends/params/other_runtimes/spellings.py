"""Values as other systems spell them: llama-server's triggers, wasi_nn_backend's conditions, and
the formats of answers of OpenAI and vLLM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...texts.shorten import shorten
from ..fitting import as_whole
from ..json_texts import decode_json

TRIGGER_KINDS = ("token", "word", "pattern", "pattern-full")
"""In the order of llama-server's numbers (`common/common.h`)."""
CONDITIONS_MAX = 512
_ANY_OBJECT = {"type": "object"}
_GLOBAL_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")


def read_triggers(value: Any) -> list[list[Any]]:
    """Return triggers as pairs of a kind and a text or a token's number, or raise ValueError."""
    return [_trigger(item) for item in _items(value)]


def _grammar_triggers(value: Any) -> dict[str, Any]:
    """Return triggers, or with another key the patterns of ends that wasi_nn_backend's texts have
    under the same name, as `{"enabled": true, "patterns": […]}` or empty. It does not read them.
    """
    if isinstance(value, Mapping) and (not value or value.keys() & {"enabled", "patterns"}):
        return {"grammar-triggers.patterns": value}
    return {"grammar-triggers": value}


def _trigger(item: Any) -> list[Any]:
    if isinstance(item, str) and item:
        return ["word", item]
    if isinstance(item, list) and len(item) == 2:
        item = {"type": item[0], "value": item[1]}
    if not isinstance(item, Mapping):
        raise ValueError(f"{shorten(item)} is not a trigger: give a text, or a type and a value")
    kind, value = as_whole(item.get("type", "word")), item.get("value", "")
    if isinstance(kind, int) and not isinstance(kind, bool) and 0 <= kind < len(TRIGGER_KINDS):
        kind = TRIGGER_KINDS[kind]
    kind = kind.replace("_", "-") if isinstance(kind, str) else kind
    if kind not in TRIGGER_KINDS:
        raise ValueError(f"there is no trigger {shorten(kind)}; use {', '.join(TRIGGER_KINDS)}")
    if kind == "token":
        return [kind, read_token(item.get("token", value))]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{shorten(value)} is not a text that can start a grammar")
    return [kind, value]


def read_token(value: Any) -> int:
    """Return a token's number, or raise ValueError."""
    token = as_whole(value)
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
        raise ValueError(f"{shorten(value)} is not a token's number")
    return token


def _items(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    if len(items) > CONDITIONS_MAX:
        raise ValueError(f"{len(items)} items; {CONDITIONS_MAX} at most")
    return items


def _maps(value: Any) -> list[Mapping[str, Any]]:
    items = _items(value)
    for item in items:
        if not isinstance(item, Mapping):
            raise ValueError(f"{shorten(item)} is not a condition: give an object")
    return items


def _token_conditions(value: Any) -> dict[str, Any]:
    tokens = []
    for item in _maps(value):
        mode = item.get("mode", "stop_on_token")
        if mode != "stop_on_token":
            raise ValueError(f"there is no mode {shorten(mode)}; use stop_on_token")
        tokens.append(read_token(item.get("token_id")))
    return {"stop-tokens": tokens}


def _pattern_conditions(value: Any) -> dict[str, Any]:
    patterns = []
    for item in _maps(value):
        pattern, kind = item.get("pattern"), item.get("match_type", "partial")
        if not isinstance(pattern, str) or kind not in ("partial", "full"):
            raise ValueError(f"{shorten(dict(item))} is not a pattern with a partial or full match")
        flags = _GLOBAL_FLAGS.match(pattern)
        head = flags.group() if flags else ""
        full = rf"{head}\A(?:{pattern[len(head) :]})"
        patterns.append(full if kind == "full" else pattern)
    return {"stop-patterns": patterns}


def _semantic_conditions(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in _maps(value):
        kind, threshold = item.get("type"), item.get("threshold", 0.8)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            raise ValueError(f"{shorten(threshold)} is not a number")
        if not 0 < threshold < 1:
            raise ValueError(f"a threshold of {threshold:g}; it is between 0 and 1")
        match kind:
            case "completion_detection":
                found["stop-complete"] = ["sentence"]
            case "repetition_detection":
                found["stop-repetition"] = float(threshold)
            case "coherence_break":
                found["stop-surprisal"] = -math.log(1 - threshold)
            case "similarity" | "similarity_detection":
                found["stop-similarity"] = _similar_text(item)
                found["stop-similarity-threshold"] = float(threshold)
            case _:
                raise ValueError(f"there is no condition {shorten(kind)}; use {_SEMANTICS}")
    return found


_SEMANTICS = "completion_detection, repetition_detection, coherence_break, similarity"


def _similar_text(item: Mapping[str, Any]) -> str:
    text = item.get("text", item.get("target"))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{shorten(text)} is not a text: give one to compare sentences with")
    return text


def _dynamic_timeout(value: Any) -> dict[str, Any]:
    [item] = _maps(value)[:1] or [{}]
    names = {
        "base_ms": "timeout-base-ms",
        "token_scale": "timeout-token-ms",
        "max_ms": "timeout-max-ms",
    }
    unknown = [key for key in item if key not in names]
    if unknown:
        raise ValueError(f"there is no {shorten(unknown[0])}; use {', '.join(names)}")
    return {name: item[key] for key, name in names.items() if key in item}


def _response_format(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{shorten(value)} is not a format: give a map with a type")
    match value.get("type"):
        case "text":
            return {"json-schema": ""}
        case "json_object":  # llama-server allows a schema here, too
            return {"json-schema": _schema_of(value, _ANY_OBJECT)}
        case "json_schema":
            described = value.get("json_schema")
            return {"json-schema": _schema_of(described if isinstance(described, dict) else {})}
        case "structural_tag":
            return {"structural-tag": value}
    kinds = "text, json_object, json_schema, structural_tag"
    raise ValueError(f"there is no type {shorten(value.get('type'))}; use {kinds}")


def _schema_of(value: Mapping[str, Any], default: Any = None) -> Any:
    schema = value.get("schema", default)
    if not isinstance(schema, dict | bool):
        raise ValueError('the schema is missing: give {"name": "…", "schema": {…}}')
    return schema


def _guided_json(value: Any) -> dict[str, Any]:
    schema = decode_json(value) if isinstance(value, str) else value
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{shorten(value)} is not a schema: send an object, or its JSON text")
    return {"json-schema": schema}


def _guided_json_object(value: Any) -> dict[str, Any]:
    return {"json-schema": _ANY_OBJECT} if _flag(value) else {}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shorten(value)} is neither true nor false")
    return value


def _guided_choice(value: Any) -> dict[str, Any]:
    """Return a grammar of the texts of which the answer is one."""
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{shorten(value)} is not a list of texts, with at least one")
    texts = (f'"{text.translate(_GBNF_ESCAPES)}"' for text in dict.fromkeys(value))
    return {"grammar": f"root ::= {' | '.join(texts)}"}


def _guided_grammar(value: Any) -> dict[str, Any]:
    """Return a grammar in GBNF or Lark; as in vLLM, only GBNF has `::=`."""
    return {"grammar" if isinstance(value, str) and "::=" in value else "lark": value}


def _white_space(value: Any) -> dict[str, Any]:
    """Return the layout whose white space matches a regular expression."""
    if not isinstance(value, str) or len(value) > _WHITE_SPACE_CHARACTERS_MAX:
        raise ValueError(f"{shorten(value)} is not a regular expression of white space")
    try:
        pattern = re.compile(value)
    except (re.error, OverflowError) as exc:
        raise ValueError(f"{shorten(value)} is not a regular expression: {exc}") from None
    if not pattern.fullmatch(""):
        raise ValueError(f"{shorten(value)} requires white space, which the daemon leaves out")
    return {"json-whitespace": "spaced" if pattern.fullmatch(" ") else "compact"}


def _structured_outputs(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{shorten(value)} is not a map")
    found: dict[str, Any] = {}
    formats = 0
    for name, item in value.items():
        if name not in _STRUCTURED_OUTPUTS:
            names = ", ".join(_STRUCTURED_OUTPUTS)
            raise ValueError(f"there is no {shorten(name)}; use {names}")
        if item is not None:
            read = _STRUCTURED_OUTPUTS[name](item)
            formats += bool(read) and "json-whitespace" not in read
            found |= read
    if formats != 1:
        raise ValueError(f"it has {formats} formats of the answer; give one")
    return found


def _no_effect(value: Any) -> dict[str, Any]:
    """Return nothing: the daemon's only engine for grammars closes objects, and writes no white
    space beyond that of `json-whitespace`.
    """
    _flag(value)
    return {}


_GBNF_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"})
_WHITE_SPACE_CHARACTERS_MAX = 40
"""With more, groups could nest so deep that matching one space takes long."""
_STRUCTURED_OUTPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "json": _guided_json,
    "regex": lambda value: {"regex": value},
    "choice": _guided_choice,
    "grammar": _guided_grammar,
    "json_object": _guided_json_object,
    "structural_tag": lambda value: {"structural-tag": value},
    "whitespace_pattern": _white_space,
    "disable_any_whitespace": _no_effect,
    "disable_additional_properties": _no_effect,
    "disable_fallback": _no_effect,
}
"""By the name of a field of vLLM's `StructuredOutputsParams`, the function that translates it."""

FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "token-conditions": _token_conditions,
    "pattern-conditions": _pattern_conditions,
    "semantic-conditions": _semantic_conditions,
    "dynamic-timeout": _dynamic_timeout,
    "grammar-triggers": _grammar_triggers,
    "response-format": _response_format,
    "structured-outputs": _structured_outputs,
    "guided-json": _guided_json,
    "guided-json-object": _guided_json_object,
    "guided-regex": _STRUCTURED_OUTPUTS["regex"],
    "guided-choice": _guided_choice,
    "guided-grammar": _guided_grammar,
    "guided-whitespace-pattern": _white_space,
}
"""By a key's name with hyphens, the function that translates its value to those of parameters;
these are then read.
"""
